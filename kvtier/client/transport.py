"""gRPC on a Unix socket, as much of it as an engine needs: one call at a time on a blocking connection.

Why not grpcio, which the daemon uses: a call through it costs an engine 140 us of CPU and two threads'
wake-ups, here 40 us and none (0.25 instead of 0.4 ms a call); and its core cannot be trusted
across a fork: a child either hangs in its first call or has to be forked at a moment when no thread of
gRPC's own is at work, which nobody can know. Here there is nothing but sockets.

The other side is always kvtier's daemon, so this speaks only what that needs: HTTP/2 frames with the usual
flow control, plain header literals (a header table of size 0 is asked for, and gRPC's server does not use
Huffman codes), unary and server-streaming calls. Whatever else arrives ends the connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Generator
from typing import Final
from urllib.parse import unquote

from kvtier.errors import DeadlineExceeded, KvtierError, LimitExceeded, Unavailable

MAX_MESSAGE_BYTES: Final = 64 << 20
MAX_HEADER_BYTES: Final = 64 << 10
MAX_FRAME_BYTES: Final = 16_384
"""What a peer may send in one frame, HTTP/2's own default."""
RECEIVE_WINDOW_BYTES: Final = 1 << 30
RECEIVE_BYTES: Final = 64 << 10
MAX_STREAM_ID: Final = 1 << 30
MAX_TIMEOUT_S: Final = 86_400.0
"""No deadline is later than this: the kernel's and Python's clocks end somewhere."""
IDLE_READ_TIMEOUT_S: Final = 0.02
"""Reading what an idle connection has received ends after this, and the connection with it."""
SPIN_S: Final = 300e-6
"""So long, about as long as an answer takes, a call looks for it again and again before it sleeps: to wake up
takes as long as a third of the whole call. Other threads of the process run meanwhile (no GIL is held)."""
SPIN_AGAIN_S: Final = 3 * SPIN_S
"""Unless the last answer on the connection took longer: then the node is busy, and sleep is better."""

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    0,
    1,
    3,
    4,
    6,
    7,
    8,
    9,
)
_END_STREAM = _ACK = 0x1
_END_HEADERS: Final = 0x4
_PADDED: Final = 0x8
_PRIORITY: Final = 0x20
_SETTING_TABLE_SIZE, _SETTING_PUSH, _SETTING_WINDOW, _SETTING_FRAME = 1, 2, 4, 5
_DEFAULT_WINDOW: Final = 65_535
_MAX_WINDOW: Final = 2**31 - 1
_FRAME_HEAD_BYTES: Final = 9
_GRPC_MESSAGE_PREFIX: Final = 5
_RST_ENHANCE_YOUR_CALM: Final = 11


class Deadline:
    """A moment on the monotonic clock, `MAX_TIMEOUT_S` from now at the latest."""

    __slots__ = ("_at_s",)

    def __init__(self, timeout_s: float) -> None:
        self._at_s = time.monotonic() + min(timeout_s, MAX_TIMEOUT_S)

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


class Status(Exception):  # a gRPC status, most of which are errors
    """The status that ended a call, where it is not OK."""

    def __init__(self, code: int, message: str, fields: dict[bytes, bytes]) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fields = fields


class _Protocol(Exception):
    """The peer sent something that this does not speak."""


class Connection:
    """One connection; used by one thread at a time. After any exception it is of no use any more.

    Raises
    ------
    Unavailable
        Nobody listens, or the peer does not speak gRPC.
    DeadlineExceeded
        It did not answer in time.
    """

    def __init__(self, path: str, deadline: Deadline) -> None:
        self.is_usable = True
        self._buffer = b""
        self._spins = True
        self._sent_at_s = 0.0
        self._stream_id = -1
        self._is_begun = False
        self._received_bytes = 0
        self._window = _DEFAULT_WINDOW
        self._stream_window = self._initial_window = _DEFAULT_WINDOW
        self._max_frame = MAX_FRAME_BYTES
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        settings = b"".join(
            struct.pack(">HI", *setting)
            for setting in (
                (_SETTING_TABLE_SIZE, 0),
                (_SETTING_PUSH, 0),
                (_SETTING_WINDOW, RECEIVE_WINDOW_BYTES),
            )
        )
        try:
            self._socket.settimeout(deadline.timeout_s(float("inf")))
            self._socket.connect(path)
            window = struct.pack(">I", RECEIVE_WINDOW_BYTES - _DEFAULT_WINDOW)
            self._socket.sendall(
                _PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window)
            )
        except TimeoutError:
            self.close()
            raise DeadlineExceeded(f"{path} does not accept connections in time") from None
        except OSError as error:
            self.close()
            raise Unavailable(
                f"nobody answers at {path} ({error.strerror or error}): start the daemon"
            ) from None

    def is_fresh(self) -> bool:
        """Whether it may be used once more: the peer has neither closed it nor said that it will.

        Nobody reads while no call runs, so what the peer sent meanwhile is read here first: pings, and after
        those that nobody answered the end of the connection.
        """
        if not self.is_usable or self._stream_id >= MAX_STREAM_ID:
            return False
        try:
            self._read_what_waits()
        except (KvtierError, _Protocol, OSError, IndexError, ValueError, struct.error):
            self.is_usable = False
        return self.is_usable

    def _read_what_waits(self) -> None:
        deadline = Deadline(IDLE_READ_TIMEOUT_S)
        while True:
            if len(self._buffer) < _frame_end(self._buffer):
                self._socket.settimeout(0)
                try:
                    part = self._socket.recv(RECEIVE_BYTES)
                except BlockingIOError:
                    return
                if not part:
                    raise ConnectionResetError("it was closed")
                self._buffer += part
                deadline.timeout_s(IDLE_READ_TIMEOUT_S)  # a peer that never ends to talk is no use
            else:
                kind, flags, stream, payload = self._next_frame(deadline)
                self._control(kind, stream, payload, flags, deadline)

    def begin(self, path: bytes, deadline: Deadline) -> None:
        """Send the head of a call now; `call` with the same path and deadline then sends the rest.

        A peer that has been asleep wakes up meanwhile, which takes it longer than to answer.
        """
        try:
            self._write(self._head(path, deadline), deadline)
            self._is_begun = True
        except TimeoutError:
            self.close()
            raise DeadlineExceeded("the node does not read what is sent to it") from None
        except OSError as error:
            self.close()
            raise Unavailable(f"the connection to the node broke ({error.strerror or error})") from None

    def call(self, path: bytes, body: bytes, deadline: Deadline) -> Generator[bytes]:
        """The messages that answer `body`; ends with the status OK.

        A call that is left before its end closes the connection, which cancels it.

        Raises
        ------
        Status
            The call was answered with another status.
        Unavailable, DeadlineExceeded, LimitExceeded
            It was not answered.
        """
        is_done = False
        try:
            yield from self._call(path, body, deadline)
            is_done = True
        except Status:
            is_done = True
            raise
        except TimeoutError:
            raise DeadlineExceeded("the node did not answer in time") from None
        except OSError as error:
            raise Unavailable(f"the connection to the node broke ({error.strerror or error})") from None
        except (_Protocol, IndexError, ValueError, struct.error) as error:
            raise Unavailable(f"what answers on the socket is no kvtier daemon ({error})") from None
        finally:
            if not is_done:
                self.close()

    def shut_down(self) -> None:
        """From another thread: a call that waits fails now."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent; in a forked child it leaves the parent's connection alone."""
        self.is_usable = False
        self._socket.close()

    # ---- one call

    def _call(self, path: bytes, body: bytes, deadline: Deadline) -> Generator[bytes]:
        self._send(path, body, deadline)
        message = bytearray()
        is_first = True
        while True:
            kind, flags, payload = self._stream_frame(deadline)
            if is_first:
                self._spins = time.perf_counter() - self._sent_at_s < SPIN_AGAIN_S
                is_first = False
            if kind == _DATA:
                message += _without_padding(flags, payload)
                while (end := _message_end(message)) and len(message) >= end:
                    yield bytes(message[_GRPC_MESSAGE_PREFIX:end])
                    del message[:end]
                if flags & _END_STREAM:
                    raise _Protocol("a call ended without a status")
            elif kind == _HEADERS and flags & _END_STREAM:
                if message:
                    raise _Protocol("a message was cut off")
                _check_status(decode_headers(payload))
                return

    def _send(self, path: bytes, body: bytes, deadline: Deadline) -> None:
        data = b"\0" + struct.pack(">I", len(body)) + body
        out = [] if self._is_begun else [self._head(path, deadline)]
        self._is_begun = False
        begin = 0
        while begin < len(data):
            room = min(self._window, self._stream_window, self._max_frame)
            if room <= 0:
                self._write(b"".join(out), deadline)
                out = []
                if not self._wait_for_room(deadline):
                    self.is_usable = False  # answered before all was said: after this call it is of no use
                    break
                continue
            part = data[begin : begin + room]
            begin += len(part)
            self._window -= len(part)
            self._stream_window -= len(part)
            out.append(_frame(_DATA, _END_STREAM if begin == len(data) else 0, self._stream_id, part))
        self._write(b"".join(out), deadline)
        self._sent_at_s = time.perf_counter()

    def _head(self, path: bytes, deadline: Deadline) -> bytes:
        self._stream_id += 2
        self._stream_window = self._initial_window
        headers = _request_headers(path, deadline.timeout_s(float("inf")))
        return _frame(_HEADERS, _END_HEADERS, self._stream_id, headers)

    def _wait_for_room(self, deadline: Deadline) -> bool:
        """Wait until the peer takes more; False where it answers instead."""
        while min(self._window, self._stream_window) <= 0:
            kind, flags, stream, payload = self._next_frame(deadline)
            if stream == self._stream_id and kind in (_HEADERS, _DATA):
                self._buffer = _frame(kind, flags, stream, payload) + self._buffer
                return False
            self._control(kind, stream, payload, flags, deadline)
        return True

    def _stream_frame(self, deadline: Deadline) -> tuple[int, int, bytes]:
        """The next frame of this call's stream; headers come whole and without padding."""
        while True:
            kind, flags, stream, payload = self._next_frame(deadline)
            if kind == _DATA:
                self._count(len(payload), deadline)
            if stream != self._stream_id or kind not in (_DATA, _HEADERS):
                self._control(kind, stream, payload, flags, deadline)
                continue
            if kind == _HEADERS:
                payload = _without_padding(flags, payload)[5 if flags & _PRIORITY else 0 :]
                while not flags & _END_HEADERS:
                    kind, more, stream, part = self._next_frame(deadline)
                    if kind != _CONTINUATION or stream != self._stream_id:
                        raise _Protocol("headers were cut off")
                    payload += part
                    flags |= more & _END_HEADERS
                    if len(payload) > MAX_HEADER_BYTES:
                        raise _Protocol("headers are too long")
                kind = _HEADERS
            return kind, flags, payload

    # ---- frames

    def _control(self, kind: int, stream: int, payload: bytes, flags: int, deadline: Deadline) -> None:
        """Everything that is no part of an answer."""
        if kind == _RST_STREAM and stream == self._stream_id:
            (code,) = struct.unpack(">I", payload)
            if code == _RST_ENHANCE_YOUR_CALM:
                raise LimitExceeded("the node has too much to do: try again later")
            raise Unavailable(f"the node broke the call off (HTTP/2 error {code})")
        if kind == _WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if stream == 0:
                self._window = min(_MAX_WINDOW, self._window + more)
            elif stream == self._stream_id:
                self._stream_window = min(_MAX_WINDOW, self._stream_window + more)
        elif kind == _SETTINGS and not flags & _ACK:
            self._settings(payload)
            self._write(_frame(_SETTINGS, _ACK, 0, b""), deadline)
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload), deadline)
        elif kind == _GOAWAY:
            self.is_usable = False  # after this call
            (last,) = struct.unpack(">I", payload[:4])
            if self._stream_id > last:
                raise Unavailable("the node is going away")

    def _settings(self, payload: bytes) -> None:
        for setting, value in struct.iter_unpack(">HI", payload):
            if setting == _SETTING_WINDOW:
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif setting == _SETTING_FRAME:
                self._max_frame = max(MAX_FRAME_BYTES, value)

    def _count(self, size: int, deadline: Deadline) -> None:
        """Open the connection's window again when half of it is used up."""
        self._received_bytes += size
        if self._received_bytes >= RECEIVE_WINDOW_BYTES // 2:
            self._write(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._received_bytes)), deadline)
            self._received_bytes = 0

    def _next_frame(self, deadline: Deadline) -> tuple[int, int, int, bytes]:
        """Kind, flags, stream, payload."""
        buffer = self._buffer
        while len(buffer) < (end := _frame_end(buffer)):
            part = self._receive(deadline)
            if not part:
                raise ConnectionResetError("it was closed")
            buffer += part
        self._buffer = buffer[end:]
        stream = int.from_bytes(buffer[5:9], "big") & 0x7FFF_FFFF
        return buffer[3], buffer[4], stream, buffer[_FRAME_HEAD_BYTES:end]

    def _receive(self, deadline: Deadline) -> bytes:
        """What has arrived, at least one byte; nothing where the peer has closed the connection."""
        if self._spins:
            self._socket.settimeout(0)
            until_s = self._sent_at_s + SPIN_S
            while time.perf_counter() < until_s:
                with contextlib.suppress(BlockingIOError):
                    return self._socket.recv(RECEIVE_BYTES)
        self._socket.settimeout(deadline.timeout_s(float("inf")))
        return self._socket.recv(RECEIVE_BYTES)

    def _write(self, data: bytes, deadline: Deadline) -> None:
        self._socket.settimeout(deadline.timeout_s(float("inf")))
        self._socket.sendall(data)


def _frame_end(buffer: bytes) -> int:
    """Where the first frame ends, or its head where that is not all here."""
    if len(buffer) < _FRAME_HEAD_BYTES:
        return _FRAME_HEAD_BYTES
    size = int.from_bytes(buffer[:3], "big")
    if size > MAX_FRAME_BYTES:
        raise _Protocol("a frame is too long")
    return _FRAME_HEAD_BYTES + size


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _without_padding(flags: int, payload: bytes) -> bytes:
    if not flags & _PADDED:
        return payload
    if payload[0] >= len(payload):
        raise _Protocol("a frame is all padding")
    return payload[1 : len(payload) - payload[0]]


def _message_end(data: bytearray) -> int:
    """Where the first message ends; 0 where its length is not here yet."""
    if len(data) < _GRPC_MESSAGE_PREFIX:
        return 0
    size = int.from_bytes(data[1:_GRPC_MESSAGE_PREFIX], "big")
    if data[0] or size > MAX_MESSAGE_BYTES:
        raise _Protocol("a message is compressed or too long")
    return _GRPC_MESSAGE_PREFIX + size


# ---- headers (HPACK with an empty dynamic table)


def _literal(name: bytes, value: bytes) -> bytes:
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


_METHOD_POST_SCHEME_HTTP: Final = b"\x83\x86"
_PSEUDO_HEADERS: Final = _METHOD_POST_SCHEME_HTTP + _literal(b":authority", b"localhost")
_OTHER_HEADERS: Final = _literal(b"te", b"trailers") + _literal(b"content-type", b"application/grpc")


def _request_headers(path: bytes, timeout_s: float) -> bytes:
    micros = int(timeout_s * 1e6) + 1
    timeout = b"%du" % micros if micros < 10**8 else b"%dS" % min(int(timeout_s) + 1, 10**8 - 1)
    return _PSEUDO_HEADERS + _literal(b":path", path) + _OTHER_HEADERS + _literal(b"grpc-timeout", timeout)


def decode_headers(block: bytes) -> dict[bytes, bytes]:
    """Fields whose names are spelled out; those of the static table mean nothing to a client of gRPC.

    Raises `ValueError` or `IndexError` for anything that is not HPACK as a peer may use it here.
    """
    fields: dict[bytes, bytes] = {}
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:  # indexed: name and value from the static table
            index, at = _integer(block, at, 7)
            if not 0 < index <= 61:
                raise ValueError("a header refers to a table that is empty")
        elif first & 0xE0 == 0x20:  # the table's size
            size, at = _integer(block, at, 5)
            if size:
                raise ValueError("a header table was refused and is used")
        else:
            index, at = _integer(block, at, 6 if first & 0x40 else 4)
            if index > 61:
                raise ValueError("a header refers to a table that is empty")
            name = b""
            if not index:
                name, at = _string(block, at)
            value, at = _string(block, at)
            if name:
                fields[name] = value
    return fields


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    limit = (1 << bits) - 1
    value = block[at] & limit
    at += 1
    if value < limit:
        return value, at
    for shift in range(0, 28, 7):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise ValueError("a header's number is too long")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    if block[at] & 0x80:
        raise ValueError("a header is Huffman-coded")
    size, at = _integer(block, at, 7)
    if at + size > len(block):
        raise ValueError("a header is cut off")
    return block[at : at + size], at + size


def _check_status(fields: dict[bytes, bytes]) -> None:
    code = int(fields[b"grpc-status"]) if b"grpc-status" in fields else -1
    if code < 0:
        raise _Protocol("a call ended without a status")
    if code:
        raise Status(code, unquote(fields.get(b"grpc-message", b"").decode("utf-8", "replace")), fields)
