"""Calls to the node: connections, deadlines, and statuses translated back into the one tree of errors."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Generator
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import FileDescriptor

from kvtier import errors
from kvtier.client.transport import Connection, Deadline, Status
from kvtier.errors import DeadlineExceeded, KvtierError, Unavailable
from kvtier.v1 import admin_pb2, engine_pb2

__all__ = ["ERROR_METADATA", "Begun", "Deadline", "Wire", "translate"]

ERROR_METADATA: Final = b"kvtier-error"
MAX_ERROR_CHARS: Final = 500
MAX_IDLE_CONNECTIONS: Final = 16
"""Connections kept for the next call; each call that runs has one of its own."""

_BY_CODE: Final[dict[int, type[KvtierError]]] = {
    1: Unavailable,  # CANCELLED
    3: errors.InvalidRequest,  # INVALID_ARGUMENT
    4: DeadlineExceeded,
    5: errors.UnknownId,  # NOT_FOUND
    8: errors.LimitExceeded,  # RESOURCE_EXHAUSTED
    9: errors.Conflict,  # FAILED_PRECONDITION
    12: errors.ProtocolMismatch,  # UNIMPLEMENTED
    14: Unavailable,
    15: errors.Corruption,  # DATA_LOSS
}


def _methods(file: FileDescriptor) -> dict[str, tuple[bytes, Any]]:
    """Path and class of the answer for each method of a file's services."""
    return {
        method.name: (
            f"/{service.full_name}/{method.name}".encode(),
            message_factory.GetMessageClass(method.output_type),
        )
        for service in file.services_by_name.values()
        for method in service.methods
    }


_METHODS: Final = _methods(engine_pb2.DESCRIPTOR) | _methods(admin_pb2.DESCRIPTOR)


def translate(status: Status) -> KvtierError:
    """The error that the node raised, or what the status means."""
    message = (status.message or f"gRPC status {status.code}")[:MAX_ERROR_CHARS]
    name = status.fields.get(ERROR_METADATA, b"").decode("ascii", "replace")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, KvtierError):
        return kind(message)
    return _BY_CODE.get(status.code, KvtierError)(message)


class Begun:
    """A call of which the node knows already that it comes. For one thread; `drop` it or make it."""

    __slots__ = ("_connection", "_deadline", "method")

    def __init__(self, connection: Connection, method: str, deadline: Deadline) -> None:
        self._connection: Connection | None = connection
        self._deadline = deadline
        self.method = method

    def take(self, timeout_s: float) -> Connection | None:
        """Its connection, once.

        None where the node, which counts from the announcement, would give it less than half of `timeout_s`:
        what came between took so long that the call is better made anew.
        """
        if self._deadline.left_s() < timeout_s / 2:
            self.drop()
        connection, self._connection = self._connection, None
        return connection

    def drop(self) -> None:
        """Do without the call, if it was not made; idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class Wire:
    """Calls to the daemon at one socket. Thread-safe; connects when a call needs it."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._is_closed = False
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._all: weakref.WeakSet[Connection] = weakref.WeakSet()

    def begin(self, method: str, timeout_s: float) -> Begun:
        """Announce a call that will be made soon, and be answered within `timeout_s` from now.

        Raises `Unavailable` or `DeadlineExceeded`.
        """
        deadline = Deadline(timeout_s)
        connection = self._idle_connection() or self._connect(deadline)
        connection.begin(_METHODS[method][0], deadline)
        return Begun(connection, method, deadline)

    def call(self, method: str, request: Any, timeout_s: float, begun: Begun | None = None) -> Any:
        """One answer within `timeout_s`; raises from `kvtier.errors` only."""
        answers = list(self.stream(method, request, timeout_s, begun))
        if len(answers) != 1:
            raise Unavailable(f"the node gave {len(answers)} answers to a call of {method}")
        return answers[0]

    def stream(
        self, method: str, request: Any, timeout_s: float, begun: Begun | None = None
    ) -> Generator[Any]:
        """The answers of a call, all within `timeout_s`; closing the generator cancels it.

        A connection that lay idle may turn out to be closed just now; the call is then made again on a new
        one. (Its `call_id` makes sure that the node carries it out once.)
        """
        assert begun is None or begun.method == method
        deadline = Deadline(timeout_s)
        connection = begun.take(timeout_s) if begun is not None else None
        if connection is None:
            connection = self._idle_connection()
        if connection is not None:
            has_answer = False
            try:
                with contextlib.closing(self._stream_on(connection, method, request, deadline)) as answers:
                    for answer in answers:
                        has_answer = True
                        yield answer
                return
            except Unavailable as error:
                if has_answer or connection.is_usable or isinstance(error, DeadlineExceeded):
                    raise
        yield from self._stream_on(self._connect(deadline), method, request, deadline)

    def _stream_on(
        self, connection: Connection, method: str, request: Any, deadline: Deadline
    ) -> Generator[Any]:
        path, kind = _METHODS[method]
        answers = connection.call(path, request.SerializeToString(), deadline)
        try:
            for answer in answers:
                yield kind.FromString(answer)
        except Status as status:
            raise translate(status) from None
        except ValueError as error:  # protobuf's DecodeError
            raise Unavailable(f"the node's answer to {method} is garbled ({error})") from None
        finally:
            answers.close()
            self._give_back(connection)

    def close(self) -> None:
        """Calls that run fail now; idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            running = [connection for connection in self._all if connection not in idle]
        for connection in idle:
            connection.close()
        for connection in running:
            connection.shut_down()

    def after_fork(self) -> None:
        """In the child: the parent's connections are none of ours."""
        for connection in list(self._all):
            connection.close()
        self._reset()

    def _idle_connection(self) -> Connection | None:
        with self._lock:
            if self._is_closed:
                raise Unavailable("the client is closed")
            while self._idle:
                connection = self._idle.pop()
                if connection.is_fresh():
                    return connection
                connection.close()
        return None

    def _connect(self, deadline: Deadline) -> Connection:
        connection = Connection(self._path, deadline)
        with self._lock:
            if self._is_closed:
                connection.close()
                raise Unavailable("the client is closed")
            self._all.add(connection)
        return connection

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._is_closed and connection.is_usable and len(self._idle) < MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        with contextlib.suppress(OSError):
            connection.close()
