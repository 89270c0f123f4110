"""The gRPC server on the node's Unix socket: one aio server on the loop that the core runs on."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvtier.config import Config
from kvtier.errors import AlreadyRunning, ConfigError, ResourceShortage
from kvtier.node import Node
from kvtier.server import handlers
from kvtier.server.admin_service import AdminService
from kvtier.server.engine_service import EngineService
from kvtier.tiers.arena import Arena
from kvtier.v1 import admin_pb2, engine_pb2

MAX_CONCURRENT_RPCS: Final = 512
"""Calls that are being answered, of all clients; one more is refused with RESOURCE_EXHAUSTED."""
MAX_STREAMS_PER_CONNECTION: Final = 128
CONNECTIONS_PER_ENGINE: Final = 4
OTHER_CONNECTIONS: Final = 64
"""Operators, probes and engines that are just coming or going."""
MAX_METADATA_BYTES: Final = 16 << 10
HANDSHAKE_TIMEOUT_MS: Final = 5_000
KEEPALIVE_MS: Final = 60_000
"""A client that is stopped or hangs loses its connection after this and `KEEPALIVE_TIMEOUT_MS`."""
KEEPALIVE_TIMEOUT_MS: Final = 20_000
MIN_CLIENT_PING_MS: Final = 10_000
STOP_GRACE_S: Final = 0.5
PROBE_TIMEOUT_S: Final = 1.0

SERVICES: Final = (
    engine_pb2.DESCRIPTOR.services_by_name["EngineService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
_HEALTHY: Final = ("", *(service.full_name for service in SERVICES[:2]))
"""What the health service tells of; the empty name stands for all."""


def server_options(config: Config) -> list[tuple[str, Any]]:
    """Every bound of the transport."""
    max_message_bytes = config.max_message_bytes
    return [
        (
            "grpc.max_allowed_incoming_connections",
            CONNECTIONS_PER_ENGINE * config.max_engines + OTHER_CONNECTIONS,
        ),
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_CLIENT_PING_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


class Server:
    """EngineService, AdminService, health and reflection on one socket.

    Parameters
    ----------
    socket_path
        Made by `start` with mode 0600, removed by `stop`.
    """

    def __init__(self, node: Node, arena: Arena, socket_path: Path, metrics_address: str = "") -> None:
        self._node = node
        self._arena = arena
        self._path = socket_path
        self._metrics_address = metrics_address
        self._server: Any = None
        self._health: Any = None

    async def start(self) -> None:
        """Answer from now on; the caller holds the data directory's lock.

        Raises
        ------
        AlreadyRunning
            Somebody answers on the socket.
        ConfigError
            Something that is no socket lies there.
        ResourceShortage
            The socket cannot be made.
        """
        clear_stale_socket(self._path)
        server = grpc.aio.server(
            options=server_options(self._node.config),
            maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
        )
        self._health = health.aio.HealthServicer()
        names = [service.full_name for service in SERVICES]
        servicers = (
            EngineService(self._node, self._arena),
            AdminService(self._node, self._metrics_address),
            self._health,
            reflection.aio.ReflectionServicer(names),
        )
        for service, servicer in zip(SERVICES, servicers, strict=True):
            handlers.add(server, service, servicer, self._node.metrics)
        previous = os.umask(
            0o177
        )  # bind gives the file its mode: nobody else can connect, not even for a moment
        try:
            server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:
            raise ResourceShortage(f"socket is {self._path}: cannot listen on it ({error})") from error
        finally:
            os.umask(previous)
        await server.start()
        self._server = server
        for name in _HEALTHY:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Refuse new calls, give running ones `STOP_GRACE_S`, remove the socket; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.enter_graceful_shutdown()
        await server.stop(STOP_GRACE_S)
        self._path.unlink(missing_ok=True)


def clear_stale_socket(path: Path) -> None:
    """Remove the socket of a dead daemon; raises if it lives, or if `path` is something else."""
    if is_stale_socket(path):
        path.unlink(missing_ok=True)


def is_stale_socket(path: Path) -> bool:
    """Whether a dead daemon's socket is there, or else nothing.

    Raises
    ------
    AlreadyRunning
        Somebody listens on it.
    ConfigError
        There is something else.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"socket is {path}: there is something that is no socket; remove it or choose another"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        code = probe.connect_ex(os.fspath(path))
    if code != errno.ECONNREFUSED:  # also a full backlog: somebody listens
        raise AlreadyRunning(f"socket is {path}: another process listens on it; stop it or choose another")
    return True
