"""Calls to the node: channel, deadlines, and statuses translated back into the one tree of errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any, Final

from kvtier import errors
from kvtier.client import forks

forks.enable()  # before gRPC is imported

import grpc  # noqa: E402
from grpc.experimental import ChannelOptions  # noqa: E402

from kvtier.errors import DeadlineExceeded, InvalidRequest, KvtierError, Unavailable  # noqa: E402
from kvtier.v1 import admin_pb2_grpc, engine_pb2_grpc  # noqa: E402

ERROR_METADATA: Final = "kvtier-error"
MAX_MESSAGE_BYTES: Final = 64 << 20
MAX_RECONNECT_MS: Final = 1000
MAX_ERROR_CHARS: Final = 500

_OPTIONS: Final[list[tuple[str, Any]]] = [
    # A channel of its own: another client's backoff must not delay this one's recovery.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # Reads a stream in the calling thread: no other thread to wake, and none that a fork would lose.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
]
_BY_CODE: Final[dict[grpc.StatusCode, type[KvtierError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.UnknownId,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceeded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DATA_LOSS: errors.Corruption,
    grpc.StatusCode.UNIMPLEMENTED: errors.ProtocolMismatch,
}


class Deadline:
    """A moment on the monotonic clock."""

    __slots__ = ("_at_s",)

    def __init__(self, timeout_s: float) -> None:
        self._at_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds until then, 0 afterwards."""
        return max(0.0, self._at_s - time.monotonic())

    def is_over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._at_s

    def timeout_s(self, limit_s: float) -> float:
        """For one call; raises `DeadlineExceeded` where no time is left."""
        left_s = self.left_s()
        if left_s <= 0:
            raise DeadlineExceeded(
                "no time was left for the call: raise its timeout, or see why the node is slow"
            )
        return min(left_s, limit_s)


def translate(error: grpc.RpcError) -> KvtierError:
    """The error that the node raised, or what the transport's status means."""
    code = error.code()
    details = str(error.details() or code.name)[:MAX_ERROR_CHARS]
    metadata: Any = error.trailing_metadata() or ()
    names = {str(key): str(value) for key, value in metadata}
    kind = getattr(errors, names.get(ERROR_METADATA, ""), None)
    if isinstance(kind, type) and issubclass(kind, KvtierError):
        return kind(details)
    return _BY_CODE.get(code, KvtierError)(details)


class Wire:
    """One lazily opened channel. Thread-safe; a fork's child opens its own."""

    def __init__(self, socket_path: str) -> None:
        self._target = f"unix:{socket_path}"
        self._lock = threading.Lock()
        self._channel: Any = None
        self._stubs: tuple[Any, Any] | None = None
        self._is_closed = False

    def call(self, method: str, request: Any, timeout_s: float, *, admin: bool = False) -> Any:
        """One answer within `timeout_s`; raises from `kvtier.errors` only."""
        with forks.grpc_call():
            try:
                return getattr(self._open()[admin], method)(request, timeout=timeout_s)
            except grpc.RpcError as error:
                raise translate(error) from None
            except ValueError as error:  # closed meanwhile
                raise Unavailable(f"the channel is closed ({error})") from None

    def stream(self, method: str, request: Any, timeout_s: float) -> Generator[Any]:
        """The answers of a streaming call, all within `timeout_s`; closing the iterator cancels the call."""
        with forks.grpc_call():
            try:
                call = getattr(self._open()[False], method)(request, timeout=timeout_s)
            except ValueError as error:
                raise Unavailable(f"the channel is closed ({error})") from None
            is_done = False
            try:
                while True:
                    try:
                        message = next(call)
                    except StopIteration:
                        is_done = True
                        return
                    except grpc.RpcError as error:
                        is_done = True
                        raise translate(error) from None
                    yield message
            finally:
                if not is_done:
                    call.cancel()

    def end_calls(self) -> None:
        """Calls that run fail now; the next one opens another channel."""
        with self._lock:
            channel, self._channel, self._stubs = self._channel, None, None
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Calls that run are cancelled; idempotent."""
        with self._lock:
            self._is_closed = True
        self.end_calls()

    def after_fork(self) -> None:
        """In the child: the parent's channel is none of ours."""
        self._lock = threading.Lock()
        self._channel = self._stubs = None

    def _open(self) -> tuple[Any, Any]:
        stubs = self._stubs
        if stubs is None:
            with self._lock:
                if self._is_closed:
                    raise Unavailable("the client is closed")
                if self._stubs is None:
                    self._channel = grpc.insecure_channel(self._target, options=_OPTIONS)
                    self._stubs = (
                        engine_pb2_grpc.EngineServiceStub(self._channel),  # type: ignore[no-untyped-call]
                        admin_pb2_grpc.AdminServiceStub(self._channel),  # type: ignore[no-untyped-call]
                    )
                stubs = self._stubs
        return stubs
