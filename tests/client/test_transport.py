"""gRPC as the client speaks it: against grpcio's own server, and against peers that are none."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.client.transport import MAX_FRAME_BYTES, Connection, Deadline, Status, decode_headers
from kvtier.errors import DeadlineExceeded, KvtierError, LimitExceeded, Unavailable

LIMIT = 16 << 20
PATIENT_S = 30.0


class Peer(grpc.GenericRpcHandler):
    """/echo/one, /echo/many (one message a byte of the request), /echo/grow, /echo/fail, /echo/hang."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def service(self, details: Any) -> Any:
        method = details.method.rsplit("/", 1)[1]
        if method in ("one", "grow", "fail", "hang"):
            return grpc.unary_unary_rpc_method_handler(getattr(self, method))
        if method in ("many", "endless"):
            return grpc.unary_stream_rpc_method_handler(getattr(self, method))
        return None

    def one(self, request: bytes, context: Any) -> bytes:
        return request

    def grow(self, request: bytes, context: Any) -> bytes:
        return bytes(int(request))

    def many(self, request: bytes, context: Any) -> Iterator[bytes]:
        for byte in request:
            yield bytes([byte]) * 1000

    def fail(self, request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("kvtier-error", "UnknownId"),))
        context.abort(grpc.StatusCode.NOT_FOUND, request.decode())
        raise AssertionError

    def hang(self, request: bytes, context: Any) -> bytes:
        context.add_callback(self.left.set)
        self.left.wait(PATIENT_S)
        return b""

    def endless(self, request: bytes, context: Any) -> Iterator[bytes]:
        context.add_callback(self.left.set)
        while not self.left.is_set():
            yield bytes(1000)


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def path(tmp_path: Path, peer: Peer) -> Iterator[str]:
    options = [("grpc.max_receive_message_length", LIMIT), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(8), options=options)
    server.add_generic_rpc_handlers((peer,))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    yield f"{tmp_path}/s"
    peer.left.set()
    server.stop(0).wait()


def deadline() -> Deadline:
    return Deadline(PATIENT_S)


def ask(connection: Connection, method: str, body: bytes, until: Deadline | None = None) -> list[bytes]:
    return list(connection.call(f"/echo/{method}".encode(), body, until or deadline()))


# ---- grpcio's server


def test_one_connection_carries_call_after_call(path: str) -> None:
    connection = Connection(path, deadline())
    for number in range(500):
        body = os.urandom(number % 300)
        assert ask(connection, "one", body) == [body]
        assert connection.is_fresh()
    connection.close()


def test_a_call_that_was_begun_is_one_call(path: str) -> None:
    connection = Connection(path, deadline())
    for size in (0, 3, 200_000):
        body = os.urandom(size)
        until = deadline()
        connection.begin(b"/echo/one", until)
        assert ask(connection, "one", body, until) == [body]
        assert ask(connection, "one", b"x") == [b"x"]
        assert connection.is_fresh()
    connection.begin(b"/echo/fail", until)
    with pytest.raises(Status, match="why"):
        ask(connection, "fail", b"why", until)
    assert connection.is_fresh()
    connection.close()


@pytest.mark.parametrize("size", [0, 1, 5, MAX_FRAME_BYTES - 5, MAX_FRAME_BYTES, 70_000, 5 << 20, LIMIT - 64])
def test_messages_of_any_size_pass_the_flow_control(path: str, size: int) -> None:
    connection = Connection(path, deadline())
    body = os.urandom(size)
    for _ in range(3):
        assert ask(connection, "one", body) == [body]
    assert [len(answer) for answer in ask(connection, "grow", b"%d" % size)] == [size]
    connection.close()


def test_the_windows_are_opened_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.client.transport.RECEIVE_WINDOW_BYTES", 1 << 20)
    connection = Connection(path, deadline())
    for _ in range(20):
        assert [len(answer) for answer in ask(connection, "grow", b"500000")] == [500_000]
    connection.close()


def test_a_stream(path: str) -> None:
    connection = Connection(path, deadline())
    assert ask(connection, "many", b"") == []
    assert ask(connection, "many", b"abc" * 50) == [bytes([byte]) * 1000 for byte in b"abc" * 50]
    assert ask(connection, "one", b"x") == [b"x"]
    connection.close()


@pytest.mark.parametrize("message", ["plain", "100 % of ümlauts\nand lines", "x" * 3000])
def test_a_status_with_its_message_and_metadata(path: str, message: str) -> None:
    connection = Connection(path, deadline())
    for _ in range(2):
        with pytest.raises(Status) as caught:
            ask(connection, "fail", message.encode())
        assert caught.value.code == 5
        assert caught.value.message == message
        assert caught.value.fields[b"kvtier-error"] == b"UnknownId"
    assert ask(connection, "one", b"x") == [b"x"], "a status leaves the connection as it was"
    connection.close()


def test_methods_and_messages_that_the_peer_refuses(path: str) -> None:
    connection = Connection(path, deadline())
    with pytest.raises(Status) as caught:
        ask(connection, "none", b"")
    assert caught.value.code == 12
    with pytest.raises((Status, KvtierError)) as refused:
        ask(connection, "one", bytes(LIMIT + 1))
    assert not isinstance(refused.value, Status) or refused.value.code == 8
    connection.close()


def test_a_deadline_ends_a_call_on_both_sides(path: str, peer: Peer) -> None:
    connection = Connection(path, deadline())
    with pytest.raises((DeadlineExceeded, Status)) as caught:
        ask(connection, "hang", b"", Deadline(0.2))
    assert not isinstance(caught.value, Status) or caught.value.code == 4
    assert peer.left.wait(PATIENT_S)
    connection.close()


def test_a_stream_that_is_left_is_cancelled(path: str, peer: Peer) -> None:
    connection = Connection(path, deadline())
    answers = connection.call(b"/echo/endless", b"", deadline())
    assert next(answers) == bytes(1000)
    answers.close()
    assert not connection.is_usable
    assert peer.left.wait(PATIENT_S)


def test_a_call_that_waits_is_ended_from_another_thread(path: str) -> None:
    connection = Connection(path, deadline())
    threading.Timer(0.1, connection.shut_down).start()
    with pytest.raises(Unavailable):
        ask(connection, "hang", b"")


def test_a_server_that_stops(tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Peer(),))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    connection = Connection(f"{tmp_path}/s", deadline())
    assert ask(connection, "one", b"x") == [b"x"]
    server.stop(0).wait()
    with pytest.raises(Unavailable):
        ask(connection, "one", b"x")
    assert not connection.is_fresh()
    with pytest.raises(Unavailable):
        Connection(f"{tmp_path}/s", deadline())


@pytest.mark.parametrize("option", ["grpc.max_connection_idle_ms", "grpc.max_connection_age_ms"])
def test_a_connection_that_lay_idle_until_the_server_closed_it_is_not_fresh(
    tmp_path: Path, option: str
) -> None:
    server = grpc.server(
        ThreadPoolExecutor(2), options=[(option, 300), ("grpc.max_connection_age_grace_ms", 1)]
    )
    server.add_generic_rpc_handlers((Peer(),))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    connection = Connection(f"{tmp_path}/s", deadline())
    assert ask(connection, "one", b"x") == [b"x"]
    until_s = time.monotonic() + PATIENT_S
    while connection.is_fresh() and time.monotonic() < until_s:
        time.sleep(0.7)  # idle: nobody reads meanwhile
    assert not connection.is_fresh()
    server.stop(0).wait()


def test_pings_are_answered_before_the_next_call(tmp_path: Path) -> None:
    path = tmp_path / "peer"
    said = bytearray()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        connection = Connection(str(path), deadline())
        peer, _ = server.accept()
        with peer:
            peer.settimeout(PATIENT_S)
            ping = frame(6, 0, 0, b"12345678")
            peer.sendall(frame(4, 0, 0, b"") + ping + ping[:5])
            assert connection.is_fresh()
            peer.sendall(ping[5:])
            assert connection.is_fresh()
            while said.count(frame(6, 1, 0, b"12345678")) < 2:
                said += peer.recv(65536)
            peer.sendall(frame(7, 0, 0, struct.pack(">II", 0, 0)))
            assert not connection.is_fresh()
    connection.close()


# ---- peers that are none


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


OK = frame(1, 5, 1, b"\x40\x0bgrpc-status\x010")
HEAD = frame(1, 4, 1, b"\x88")
DATA = frame(0, 0, 1, b"\0\0\0\0\1x")


def answer_with(data: bytes, act: Callable[[Connection], Any], tmp_path: Path) -> Any:
    """What `act` makes of a peer that sends `data` and hangs up."""
    path = tmp_path / f"peer-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                try:
                    peer.sendall(data)
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(65536):
                        pass
                except OSError:
                    pass  # it has hung up first

        thread = threading.Thread(target=serve)
        thread.start()
        connection = Connection(str(path), deadline())
        try:
            return act(connection)
        finally:
            connection.close()
            thread.join(PATIENT_S)
            path.unlink()


def test_the_least_that_is_an_answer(tmp_path: Path) -> None:
    assert answer_with(HEAD + DATA + OK, lambda c: ask(c, "one", b""), tmp_path) == [b"x"]
    padded = frame(0, 8, 1, b"\x03\0\0\0\0\1xppp") + frame(1, 4 | 1 | 8, 1, b"\x01\x40\x0bgrpc-status\x010p")
    assert answer_with(HEAD + padded, lambda c: ask(c, "one", b""), tmp_path) == [b"x"]
    cut = frame(1, 1, 1, b"\x40\x0bgrpc-") + frame(9, 4, 1, b"status\x010")
    ping = frame(6, 0, 0, b"12345678") + frame(99, 0, 7, b"?") + frame(2, 0, 1, b"12345")
    assert answer_with(ping + HEAD + DATA + cut, lambda c: ask(c, "one", b""), tmp_path) == [b"x"]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", Unavailable),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Unavailable),
        (HEAD + DATA, Unavailable),
        (HEAD + DATA[:-1], Unavailable),
        (HEAD + frame(0, 1, 1, b"\0\0\0\0\1x"), Unavailable),
        (HEAD + frame(0, 0, 1, b"\1\0\0\0\1x") + OK, Unavailable),
        (HEAD + frame(0, 0, 1, b"\0\xff\xff\xff\xff") + OK, Unavailable),
        (HEAD + frame(0, 0, 1, b"\0\0\0\0\2x") + OK, Unavailable),
        (HEAD + frame(0, 8, 1, b"\x09x") + OK, Unavailable),
        (frame(0, 8, 1, b""), Unavailable),
        (b"\xff\xff\xff" + bytes(6), Unavailable),
        (frame(1, 5, 1, b""), Unavailable),
        (frame(1, 5, 1, b"\x40\x0bgrpc-status\x01x"), Unavailable),
        (frame(1, 5, 1, b"\x40\x8bgrpc-status\x010"), Unavailable),
        (frame(1, 1, 1, b"") + frame(9, 0, 1, bytes(16_000)) * 5, Unavailable),
        (frame(1, 1, 1, b"") + frame(0, 0, 1, b""), Unavailable),
        (frame(3, 0, 1, struct.pack(">I", 2)), Unavailable),
        (frame(3, 0, 1, struct.pack(">I", 11)), LimitExceeded),
        (frame(3, 0, 1, b""), Unavailable),
        (frame(4, 0, 0, b"1"), Unavailable),
        (frame(7, 0, 0, struct.pack(">II", 0, 0)), Unavailable),
        (frame(7, 0, 0, b""), Unavailable),
        (frame(8, 0, 0, b""), Unavailable),
    ],
)
def test_what_is_no_answer(data: bytes, error: type[KvtierError], tmp_path: Path) -> None:
    with pytest.raises(error):
        answer_with(data, lambda connection: ask(connection, "one", b""), tmp_path)


def test_a_peer_that_never_opens_its_window(tmp_path: Path) -> None:
    closed = frame(4, 0, 0, struct.pack(">HI", 4, 0))
    with pytest.raises(Unavailable):
        answer_with(closed, lambda connection: ask(connection, "one", bytes(200_000)), tmp_path)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from([OK, HEAD, DATA]),
            st.builds(
                frame,
                st.integers(0, 10),
                st.integers(0, 255),
                st.integers(0, 3),
                st.binary(max_size=24),
            ),
        ),
        max_size=8,
    )
)
def test_anything_at_all_ends_as_an_answer_or_an_error_of_the_tree(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    directory = tmp_path_factory.getbasetemp()
    with contextlib.suppress(KvtierError, Status):
        answer_with(b"".join(parts), lambda connection: ask(connection, "one", b"question"), directory)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_headers_of_any_bytes(block: bytes) -> None:
    try:
        fields = decode_headers(block)
    except (ValueError, IndexError):
        return
    assert all(name in block and value in block for name, value in fields.items())


def test_headers_as_servers_write_them() -> None:
    assert decode_headers(b"\x20\x88\x5f\x10application/grpc") == {}
    assert decode_headers(b"\x40\x0bgrpc-status\x010\x00\x0cgrpc-message\x00") == {
        b"grpc-status": b"0",
        b"grpc-message": b"",
    }
    long = b"v" * 300
    assert decode_headers(b"\x00\x01n\x7f\xad\x01" + long) == {b"n": long}
    for bad in (
        b"\x80",
        b"\xbe",
        b"\x7e\x01x",
        b"\x3f\xe1\x1f",
        b"\x40\x81a\x01b",
        b"\x40\x7f\xff\xff\xff\xff\xff",
    ):
        with pytest.raises((ValueError, IndexError)):
            decode_headers(bad)
