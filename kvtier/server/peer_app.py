"""The gRPC server for other nodes, on TCP: a second aio server on the loop that the core runs on.

Mutual TLS, or plain: on the loopback alone, unless the configuration says `insecure`.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Any, Final

import grpc

from kvtier import logs
from kvtier.config import Config
from kvtier.errors import ConfigError, InvalidRequest, KvtierError, ResourceShortage
from kvtier.interfaces import Transfer
from kvtier.node import Node
from kvtier.remote import tls
from kvtier.remote.channels import READ_MESSAGE_BYTES
from kvtier.server import handlers
from kvtier.server.app import (
    HANDSHAKE_TIMEOUT_MS,
    KEEPALIVE_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_METADATA_BYTES,
    MIN_CLIENT_PING_MS,
    STOP_GRACE_S,
)
from kvtier.server.peer_service import PeerService
from kvtier.tiers.arena import Arena
from kvtier.v1 import peer_pb2 as pb

MAX_CONCURRENT_RPCS: Final = 512
"""Calls of all peers that are being answered; one more is refused with RESOURCE_EXHAUSTED."""
MAX_STREAMS_PER_CONNECTION: Final = 128
MAX_CONNECTIONS: Final = 2048

SERVICE: Final = pb.DESCRIPTOR.services_by_name["PeerService"]

log = logs.get("peer-service")


def server_options(config: Config) -> list[tuple[str, Any]]:
    """Every bound of the transport."""
    return [
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", max(config.max_message_bytes, READ_MESSAGE_BYTES)),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_CLIENT_PING_MS),
    ]


class PeerServer:
    """PeerService on `peer_host` and `peer_port`.

    Parameters
    ----------
    transfers
        What peers may read with, the best first; may still be filled later.

    Attributes
    ----------
    address
        ``HOST:PORT`` for others, after `start`; empty where no peers are served.
    """

    def __init__(self, node: Node, arena: Arena, transfers: Sequence[Transfer]) -> None:
        self.address = ""
        self._config = node.config
        self._service = PeerService(node, arena, transfers)
        self._server: Any = None

    async def start(self) -> None:
        """Answer from now on; nothing happens where `peer_port` is -1.

        Raises
        ------
        ConfigError
            `peer_host` or `peer_address` is none, peers off the loopback would be served in the clear, or a
            certificate cannot be used.
        ResourceShortage
            The port cannot be had: another process listens there, for one.
        """
        config = self._config
        if config.peer_port < 0:
            return
        credentials = check(config)
        server = grpc.aio.server(options=server_options(config), maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS)
        # The messages of Read come serialised.
        handlers.add(server, SERVICE, self._service, self._service.metrics, serialised={"Read"})
        target = tls.join(config.peer_host, config.peer_port)
        try:
            if credentials is None:
                port = server.add_insecure_port(target)
            else:
                port = server.add_secure_port(target, credentials.for_server())
        except RuntimeError as error:
            why = _why_not(config.peer_host, config.peer_port)
            raise why or _refusal(
                config.peer_host, config.peer_port, "cannot listen there; try again"
            ) from error
        await server.start()
        self._server = server
        self.address = config.peer_address or tls.join(config.peer_host, port)
        if credentials is None and not tls.is_loopback(config.peer_host):
            log.warning(
                "peers are served without TLS: whoever reaches this port can read what is cached",
                address=self.address,
            )

    async def stop(self) -> None:
        """Refuse new calls, give running ones `STOP_GRACE_S`, free the port; idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(STOP_GRACE_S)
        await self._service.close()


def check(config: Config) -> tls.Tls | None:
    """The certificates to use, None for none; raises `ConfigError` where `config` would expose this node."""
    host = config.peer_host
    if not tls.is_host(host):
        raise ConfigError(f"peer_host is {host!r}: allowed is an IP address or a host's name")
    if config.peer_address:
        try:
            tls.parse_address(config.peer_address)
        except InvalidRequest as error:
            raise ConfigError(f"peer_address: {error}") from None
    elif tls.is_any(host):
        raise ConfigError(
            f"peer_host is {host}, which other nodes cannot call: set peer_address to the HOST:PORT "
            "under which they reach this one"
        )
    credentials = tls.load_tls(config)
    if credentials is None and not tls.is_loopback(host) and not config.insecure:
        raise ConfigError(
            f"peer_host is {host}, and peers would be served without TLS: set tls_cert_file, tls_key_file "
            "and tls_ca_file, or insecure where everybody on the network may read what is cached; on one "
            "machine use 127.0.0.1"
        )
    return credentials


def refuse_busy_port(config: Config) -> None:
    """See, without listening, that `PeerServer.start` would find its port free and its certificates usable.

    Raises
    ------
    ConfigError, ResourceShortage
        As `PeerServer.start` raises them.
    """
    if config.peer_port < 0:
        return
    check(config)
    if fault := _why_not(config.peer_host, config.peer_port):
        raise fault


def _why_not(host: str, port: int) -> KvtierError | None:
    """gRPC does not say why it cannot listen; the kernel does. None where it would let us.

    A name may have several addresses, one of a family that this machine lacks: as for gRPC one is enough.
    """
    why = "it has no address"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return _refusal(host, port, f"cannot listen there ({error.strerror or error}); choose another")
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
                return None
        except OSError as error:
            why = f"cannot listen there ({error.strerror or error}); choose another"
            if error.errno == errno.EADDRINUSE:
                why = "another process listens there; stop it, or choose another port (0: any free one)"
    return _refusal(host, port, why)


def _refusal(host: str, port: int, why: str) -> ResourceShortage:
    return ResourceShortage(f"peer_host is {host} and peer_port {port}: {why}")
