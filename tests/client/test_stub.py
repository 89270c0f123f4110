"""Statuses become the errors that the node raised; deadlines bound every call."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier import errors
from kvtier.client.results import reason_of
from kvtier.client.stub import ERROR_METADATA, Deadline, Wire, translate
from kvtier.client.transport import Status
from kvtier.server import errors as server_errors
from kvtier.v1 import admin_pb2

TREE = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.KvtierError) and kind is not errors.KvtierError
]


@pytest.mark.parametrize("kind", TREE)
def test_every_error_of_the_tree_comes_back_as_itself(kind: type[errors.KvtierError]) -> None:
    code = server_errors.status_code(kind("why")).value[0]
    error = translate(Status(code, "why", {ERROR_METADATA: kind.__name__.encode()}))
    assert type(error) is kind
    assert str(error) == "why"
    assert reason_of(error)


@pytest.mark.parametrize("code", [*(code.value[0] for code in grpc.StatusCode), 99, -1])
@pytest.mark.parametrize("name", [b"", b"dict", b"KvtierError", b"annotations", b"__name__", b"\xff"])
def test_any_status_becomes_an_error_of_the_tree(code: int, name: bytes) -> None:
    assert isinstance(translate(Status(code, "", {ERROR_METADATA: name})), errors.KvtierError)


def test_without_a_name_the_code_says_what_it_is() -> None:
    for kind in (errors.InvalidRequest, errors.UnknownId, errors.LimitExceeded, errors.DeadlineExceeded):
        code = server_errors.status_code(kind("why")).value[0]
        assert type(translate(Status(code, "why", {}))) is kind


def test_both_sides_agree_on_the_metadata() -> None:
    assert ERROR_METADATA.decode() == server_errors.ERROR_METADATA


def test_a_deadline_that_is_over_makes_no_call() -> None:
    deadline = Deadline(0.0)
    assert deadline.is_over()
    assert deadline.left_s() == 0.0
    with pytest.raises(errors.DeadlineExceeded):
        deadline.timeout_s(5.0)
    assert 0 < Deadline(60.0).timeout_s(5.0) <= 5.0
    assert 5.0 < Deadline(60.0).timeout_s(100.0) <= 60.0


def test_nobody_answers(tmp_path: Any) -> None:
    wire = Wire(str(tmp_path / "none.sock"))
    with pytest.raises(errors.Unavailable):
        wire.call("GetStatus", admin_pb2.GetStatusRequest(), 5.0)
    wire.close()
    wire.close()
    with pytest.raises(errors.Unavailable, match="closed"):
        wire.call("GetStatus", admin_pb2.GetStatusRequest(), 5.0)


class _Status(grpc.GenericRpcHandler):
    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


def test_connections_that_the_server_closed_meanwhile_cost_no_call(tmp_path: Path) -> None:
    """As many idle ones as there are: the call must not take one dead connection after the other."""
    path = tmp_path / "s"
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((_Status(),))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    wire = Wire(str(path))
    with ThreadPoolExecutor(6) as threads:
        meeting = threading.Barrier(6)

        def call() -> None:
            meeting.wait(30)
            wire.call("GetStatus", admin_pb2.GetStatusRequest(), 30.0)

        for done in [threads.submit(call) for _ in range(6)]:
            done.result()
    server.stop(0).wait()
    again = grpc.server(ThreadPoolExecutor(8))
    again.add_generic_rpc_handlers((_Status(),))
    again.add_insecure_port(f"unix:{path}")
    again.start()
    for _ in range(8):
        wire.call("GetStatus", admin_pb2.GetStatusRequest(), 30.0)
    wire.close()
    again.stop(0).wait()


def test_a_connection_that_breaks_as_it_is_used_costs_no_call(tmp_path: Path) -> None:
    """1. It lies idle and is whole. 2. The call is sent. 3. The node closes it: nothing was answered."""
    path = tmp_path / "s"
    answer = b"\0\0\x0f\x01\x05\0\0\0\x01\x40\x0bgrpc-status\x010"
    message = b"\0\0\x05\0\0\0\0\0\x01\0\0\0\0\0"
    served: list[int] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(4)

        def read_call(peer: socket.socket) -> None:
            heard = b""
            while b"GetStatus" not in heard:
                heard += peer.recv(65536)

        def serve() -> None:
            for number in range(3):
                peer, _ = server.accept()
                with peer:
                    read_call(peer)
                    served.append(number)
                    if number != 1:
                        peer.sendall(message + answer)
                    if number == 0:
                        read_call(peer)  # and hang up instead of answering it
                    if number == 2:
                        while peer.recv(65536):
                            pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        wire = Wire(str(path))
        wire.call("GetStatus", admin_pb2.GetStatusRequest(), 30.0)
        with pytest.raises(errors.Unavailable):  # the new connection breaks as well: no third attempt
            wire.call("GetStatus", admin_pb2.GetStatusRequest(), 30.0)
        wire.call("GetStatus", admin_pb2.GetStatusRequest(), 30.0)
        wire.close()
        thread.join(30)
    assert served == [0, 1, 2]


def test_a_begun_call_is_made_once_whatever_becomes_of_its_connection(tmp_path: Path) -> None:
    path = tmp_path / "s"
    seen: list[bytes] = []

    class Counting(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            def answer(request: bytes, context: Any) -> bytes:
                seen.append(request)
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    def serve() -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(8))
        server.add_generic_rpc_handlers((Counting(),))
        server.add_insecure_port(f"unix:{path}")
        server.start()
        return server

    wire = Wire(str(path))
    request = admin_pb2.GetStatusRequest()
    with pytest.raises(errors.Unavailable):
        wire.begin("GetStatus", 30.0)
    server = serve()
    begun = wire.begin("GetStatus", 30.0)
    wire.call("GetStatus", request, 30.0)  # another one goes its own way meanwhile
    wire.call("GetStatus", request, 30.0, begun)
    assert len(seen) == 2
    begun.drop()  # nothing is left of it
    wire.call("GetStatus", request, 30.0, begun)
    assert len(seen) == 3

    dropped = wire.begin("GetStatus", 30.0)
    dropped.drop()
    dropped.drop()
    wire.call("GetStatus", request, 30.0, dropped)
    assert len(seen) == 4

    late = wire.begin("GetStatus", 10.0)  # of 30 s it would have less than half
    wire.call("GetStatus", request, 30.0, late)
    assert len(seen) == 5

    begun = wire.begin("GetStatus", 30.0)
    server.stop(0).wait()
    server = serve()  # the daemon was restarted between its announcement and the call
    wire.call("GetStatus", request, 30.0, begun)
    assert len(seen) == 6
    wire.close()
    server.stop(0).wait()
