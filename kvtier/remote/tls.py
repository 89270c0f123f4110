"""Who may talk to whom: addresses of peers, and mutual TLS between them."""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from kvtier.config import Config
from kvtier.errors import ConfigError, InvalidRequest

MAX_PEM_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*\.?")
_MAX_NAME_CHARS: Final = 253
_FIELDS: Final = ("tls_cert_file", "tls_key_file", "tls_ca_file")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer service answers: an IP address or a name, and a port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether it cannot leave the machine."""
        return is_loopback(self.host)

    @property
    def target(self) -> str:
        """For gRPC, with the scheme, so that no address can mean a file or another resolver."""
        match _ip(self.host):
            case None:
                return f"dns:///{self.host}:{self.port}"
            case ipaddress.IPv4Address():
                return f"ipv4:{self.host}:{self.port}"
            case _:
                return f"ipv6:[{self.host}]:{self.port}"

    def __str__(self) -> str:
        return join(self.host, self.port)


def parse_address(text: str) -> Address:
    """``HOST:PORT`` or ``[IPV6]:PORT``; raises `InvalidRequest`."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        is_host = isinstance(_ip(host), ipaddress.IPv6Address)
    else:
        is_host = isinstance(_ip(host), ipaddress.IPv4Address) or _is_name(host)
    if not (colon and is_host and port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65_535):
        raise InvalidRequest(f"{text[:_MAX_NAME_CHARS]!r} is no address: allowed is HOST:PORT or [IPV6]:PORT")
    return Address(host, int(port))


def join(host: str, port: int) -> str:
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's loopback for certain: a name other than localhost may be anything."""
    address = _ip(host)
    return address.is_loopback if address is not None else host.lower().rstrip(".") == "localhost"


def is_any(host: str) -> bool:
    """Whether `host` stands for every address of the machine."""
    address = _ip(host)
    return address is not None and address.is_unspecified


def is_host(host: str) -> bool:
    """Whether `host` is an IP address or can be a name."""
    return _ip(host) is not None or _is_name(host)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_name(host: str) -> bool:
    return len(host) <= _MAX_NAME_CHARS and _NAME.fullmatch(host) is not None


# ---- certificates


@dataclass(frozen=True, slots=True)
class Tls:
    """This node's certificate and key, and the CA of every peer's certificate, as PEM."""

    cert: bytes
    key: bytes
    ca: bytes

    def for_server(self) -> grpc.ServerCredentials:
        """Clients without a certificate of the CA are refused."""
        return grpc.ssl_server_credentials(
            [(self.key, self.cert)], root_certificates=self.ca, require_client_auth=True
        )

    def for_client(self) -> grpc.ChannelCredentials:
        """The server's certificate has to be of the CA and to name the host that was called."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


def load_tls(config: Config) -> Tls | None:
    """What `config` names; None where it names nothing.

    Raises
    ------
    ConfigError
        Only some of the three files are named, one cannot be read, or they do not belong together.
    """
    paths = {name: path for name in _FIELDS if (path := getattr(config, name)) is not None}
    if not paths:
        return None
    missing = [name for name in _FIELDS if name not in paths]
    if missing:
        raise ConfigError(
            f"{', '.join(paths)} without {', '.join(missing)}: TLS between peers needs all three"
        )
    pems = {name: _read(name, path) for name, path in paths.items()}
    _check(paths)
    return Tls(*(pems[name] for name in _FIELDS))


def _read(name: str, path: Path) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            pem = file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name} is {path}: it cannot be read ({error.strerror})") from error
    if len(pem) > MAX_PEM_BYTES:
        raise ConfigError(f"{name} is {path}: it has more than {MAX_PEM_BYTES} bytes, a PEM file has not")
    return pem


def _check(paths: dict[str, Path]) -> None:
    """gRPC would take anything and then fail every handshake without a word."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    cert, key, ca = (paths[name].expanduser() for name in _FIELDS)
    try:
        context.load_cert_chain(cert, key, password="")  # no prompt for an encrypted key
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"tls_cert_file {cert} and tls_key_file {key} are not a certificate and its unencrypted key "
            f"in PEM ({_reason(error)})"
        ) from error
    try:
        context.load_verify_locations(ca)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"tls_ca_file is {ca}: it holds no certificate in PEM ({_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
