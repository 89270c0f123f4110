"""What an operator asks a node. Unlike an engine's calls these raise: a person wants to know."""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any, Final, Self

from kvtier.client import arguments, forks
from kvtier.client.stub import Wire
from kvtier.errors import InvalidRequest
from kvtier.types import Key, pack_keys
from kvtier.v1 import admin_pb2 as pb

CALL_ID_BYTES: Final = 16
DEFAULT_TIMEOUT_S: Final = 5.0
MAX_PIN_ID: Final = 2**64 - 1


class AdminClient:
    """Blocking, thread-safe; connects with the first call.

    Every method raises from `kvtier.errors`: `Unavailable` where no daemon answers on the socket,
    `DeadlineExceeded` after `timeout_s`, `InvalidRequest` for keys of a wrong length.

    Parameters
    ----------
    socket_path
        The daemon's Unix socket.
    timeout_s
        Deadline of each call.
    """

    def __init__(self, socket_path: str | os.PathLike[str], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._wire = Wire(arguments.socket_path(socket_path))
        self._timeout_s = arguments.seconds("timeout_s", timeout_s)
        forks.watch(self._wire)

    def status(self) -> pb.GetStatusResponse:
        """Tiers, engines and counters of the node."""
        return self._call("GetStatus", pb.GetStatusRequest())  # type: ignore[no-any-return]

    def lookup_prefix(self, keys: Sequence[Key], *, everywhere: bool = False) -> pb.LookupPrefixResponse:
        """Every place of every block of the prefix; `everywhere`: those that the index knows too."""
        request = pb.LookupPrefixRequest(keys=_packed(keys), everywhere=everywhere)
        return self._call("LookupPrefix", request)  # type: ignore[no-any-return]

    def list_nodes(self) -> pb.ListNodesResponse:
        """Every live node that the index lists, this one first."""
        return self._call("ListNodes", pb.ListNodesRequest())  # type: ignore[no-any-return]

    def get_node(self, node: str) -> pb.GetNodeResponse:
        """One of them, by name, id or an unambiguous beginning of its id; raises `UnknownId`."""
        return self._call("GetNode", pb.GetNodeRequest(node=arguments.text("node", node)))  # type: ignore[no-any-return]

    def evict_prefix(self, keys: Sequence[Key]) -> pb.EvictPrefixResponse:
        """Drop these blocks and all that continue them; leased and pinned ones stay."""
        request = pb.EvictPrefixRequest(call_id=new_call_id(), keys=_packed(keys))
        return self._call("EvictPrefix", request)  # type: ignore[no-any-return]

    def pin_prefix(self, keys: Sequence[Key], ttl_s: float) -> pb.PinPrefixResponse:
        """Protect the leading blocks that are here for `ttl_s` seconds."""
        if not arguments.is_number(ttl_s) or not 0 < ttl_s < math.inf:
            raise InvalidRequest(f"ttl_s is {ttl_s!r}: allowed is a number of seconds above 0")
        request = pb.PinPrefixRequest(
            call_id=new_call_id(), keys=_packed(keys), ttl_s=min(ttl_s, sys.float_info.max)
        )
        return self._call("PinPrefix", request)  # type: ignore[no-any-return]

    def unpin_prefix(self, keys: Sequence[Key] = (), *, pin_id: int = 0) -> pb.UnpinPrefixResponse:
        """End one pin, or every pin whose deepest block is ``keys[-1]``."""
        if not arguments.is_count(pin_id, 0, MAX_PIN_ID):
            raise InvalidRequest(f"pin_id is {pin_id!r}: allowed is what pin_prefix has returned")
        request = pb.UnpinPrefixRequest(call_id=new_call_id())
        if pin_id:
            request.pin_id = pin_id
        else:
            request.keys = _packed(keys)
        return self._call("UnpinPrefix", request)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Disconnect; idempotent."""
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, request: Any) -> Any:
        return self._wire.call(method, request, self._timeout_s)


def _packed(keys: Sequence[Key]) -> bytes:
    if not isinstance(keys, Sequence) or not all(isinstance(key, bytes) for key in keys):
        raise InvalidRequest("a list of keys, each of bytes, is wanted: something else was given")
    return pack_keys(keys)


def new_call_id() -> bytes:
    """16 random bytes: a repeat of one call carries the same ones."""
    return secrets.token_bytes(CALL_ID_BYTES)
