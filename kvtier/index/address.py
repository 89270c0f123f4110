"""Where the index is: its URL taken apart, and what of it may be shown. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from kvtier.errors import ConfigError

DEFAULT_PORT: Final = 6379
DEFAULT_SENTINEL_PORT: Final = 26_379
MAX_HOSTS: Final = 64
_ALLOWED: Final = (
    "allowed are redis://HOST:PORT[/DB], redis+sentinel://HOST:PORT,HOST:PORT/MASTER and "
    "redis+cluster://HOST:PORT,HOST:PORT, each with rediss for TLS, 'none', or empty"
)
_SCHEMES: Final = {"": "single", "+sentinel": "sentinel", "+cluster": "cluster"}
_SCHEME: Final = re.compile(r"[A-Za-z+]+://")
_URL: Final = re.compile(r"redis(?P<tls>s?)(?P<kind>|\+sentinel|\+cluster)://(?P<rest>.*)", re.DOTALL)
_HOST: Final = re.compile(
    r"(?P<host>[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
)
_MASTER: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Address:
    """What a URL names.

    Attributes
    ----------
    kind
        ``single``, ``sentinel``, ``cluster``, or ``socket``.
    hosts
        Servers, sentinels, or some nodes of the Cluster.
    database
        Number of the database of a single server.
    master
        Name of the master that the sentinels watch.
    path
        Unix socket of a server on this machine.
    user, password
        From the URL; configuration fields come first.
    """

    kind: str
    hosts: tuple[tuple[str, int], ...] = ()
    tls: bool = False
    database: int = 0
    master: str = ""
    path: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        """For logs and messages: neither user nor password."""
        if self.path is not None:
            return str(self.path)
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        scheme = ("rediss" if self.tls else "redis") + ("" if self.kind == "single" else f"+{self.kind}")
        tail = f"/{self.master}" if self.master else f"/{self.database}" if self.database else ""
        return f"{scheme}://{hosts}{tail}"


def redact(url: str) -> str:
    """A URL without the user and password that it may carry."""
    scheme = _SCHEME.match(url)
    begin = scheme.end() if scheme else 0
    _, at, host = url[begin:].rpartition("@")
    place, query, _ = host.partition("?")
    return f"{url[:begin]}{'***@' if at else ''}{place}{query}{'***' if query else ''}"


def parse_address(url: str) -> Address:
    """Take a URL apart; raises `ConfigError`, which shows it without user and password."""
    match = _URL.fullmatch(url.strip())
    if match is None:
        raise _refused(url, "it begins with no known scheme")
    credentials, _, rest = match["rest"].rpartition("@")
    user, _, password = credentials.partition(":")
    places, _, tail = rest.partition("/")
    kind = _SCHEMES[match["kind"]]
    address = Address(
        kind=kind,
        hosts=_hosts(url, places, DEFAULT_SENTINEL_PORT if kind == "sentinel" else DEFAULT_PORT),
        tls=bool(match["tls"]),
        database=_database(url, tail) if kind == "single" else 0,
        master=tail if kind == "sentinel" else "",
        user=unquote(user),
        password=unquote(password),
    )
    if kind == "single" and len(address.hosts) > 1:
        raise _refused(url, "one server has one HOST:PORT")
    if kind == "sentinel" and not _MASTER.fullmatch(tail):
        raise _refused(url, "behind the sentinels comes the master's name")
    if kind == "cluster" and tail not in ("", "0"):
        raise _refused(url, "a Cluster has no databases")
    return address


def _hosts(url: str, places: str, default_port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for place in places.split(",")[: MAX_HOSTS + 1]:
        match = _HOST.fullmatch(place)
        if match is None:
            raise _refused(url, "one of its hosts is not HOST:PORT")
        port = int(match["port"] or default_port)
        if not 0 < port < 65_536:
            raise _refused(url, f"{port} is no port")
        hosts.append((match["host"].strip("[]"), port))
    if len(hosts) > MAX_HOSTS:
        raise _refused(url, f"it names more than {MAX_HOSTS} hosts")
    return tuple(hosts)


def _database(url: str, tail: str) -> int:
    if not tail:
        return 0
    if not re.fullmatch(r"[0-9]{1,5}", tail):
        raise _refused(url, "behind the port comes the number of a database")
    return int(tail)


def _refused(url: str, reason: str) -> ConfigError:
    return ConfigError(f"index is {redact(url)[:300]!r}: {reason}; {_ALLOWED}")
