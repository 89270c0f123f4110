"""Channels to peers: what bounds them, who may be called in the clear, and what a status means."""

from __future__ import annotations

from typing import Any, Final

import grpc

from kvtier.config import Config
from kvtier.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    KvtierError,
    LimitExceeded,
    ProtocolMismatch,
    Unavailable,
    UnknownId,
)
from kvtier.remote.tls import Tls, parse_address
from kvtier.transfer.checks import PIECE_BYTES

READ_CHUNK_BYTES: Final = PIECE_BYTES
"""What one message of `PeerService.Read` carries at most."""
READ_MESSAGE_BYTES: Final = READ_CHUNK_BYTES + (64 << 10)
FIRST_RECONNECT_MS: Final = 100
MAX_RECONNECT_MS: Final = 2_000
KEEPALIVE_MS: Final = 20_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
ERROR_METADATA: Final = "kvtier-error"
MAX_MESSAGE_CHARS: Final = 200
"""Of what a peer says of a fault; more is cut off."""

_REFUSALS: Final[dict[str, type[KvtierError]]] = {
    kind.__name__: kind
    for kind in (InvalidRequest, UnknownId, Conflict, ProtocolMismatch, LimitExceeded, Unavailable)
}


def open_channel(address: str, config: Config, tls: Tls | None) -> grpc.aio.Channel:
    """A channel that connects with its first call.

    Raises
    ------
    InvalidRequest
        That is no address.
    Unavailable
        It is off this machine, and may not be called in the clear.
    """
    where = parse_address(address)
    options = _options(config)
    if tls is not None:
        return grpc.aio.secure_channel(where.target, tls.for_client(), options=options)
    if where.is_loopback or config.insecure:
        return grpc.aio.insecure_channel(where.target, options=options)
    raise Unavailable(
        f"peer {where} is off this machine and there is no TLS: set tls_cert_file, tls_key_file and "
        "tls_ca_file on all nodes, or insecure where the network is trusted"
    )


def _options(config: Config) -> list[tuple[str, Any]]:
    """A connection of its own, bounded in everything."""
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", MAX_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.max_receive_message_length", max(config.max_message_bytes, READ_MESSAGE_BYTES)),
        ("grpc.max_send_message_length", config.max_message_bytes),
    ]


def restored(error: grpc.aio.AioRpcError, name: str) -> KvtierError:
    """The error that peer `name` named where it is one of ours, else what the status means; its words are
    cut, since anybody may have written them.
    """
    said = "".join(c if c.isprintable() else " " for c in (error.details() or "")[:MAX_MESSAGE_CHARS])
    message = f"peer {name!r}: {said or error.code().name}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(message)
    named = [value for key, value in error.trailing_metadata() or () if key == ERROR_METADATA]
    return _REFUSALS.get(str(named[0]) if named else "", Unavailable)(message)
