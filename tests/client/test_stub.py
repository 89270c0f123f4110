"""Statuses become the errors that the node raised; deadlines bound every call."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvtier import errors
from kvtier.client.results import reason_of
from kvtier.client.stub import ERROR_METADATA, Deadline, Wire, translate
from kvtier.server import errors as server_errors
from kvtier.v1 import admin_pb2

TREE = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.KvtierError) and kind is not errors.KvtierError
]


class Status(grpc.RpcError):
    """What gRPC raises."""

    def __init__(self, code: grpc.StatusCode, details: str | None, name: str | None) -> None:
        self._status = (code, details, () if name is None else ((ERROR_METADATA, name),))

    def code(self) -> grpc.StatusCode:
        return self._status[0]

    def details(self) -> str | None:
        return self._status[1]

    def trailing_metadata(self) -> Any:
        return self._status[2]


@pytest.mark.parametrize("kind", TREE)
def test_every_error_of_the_tree_comes_back_as_itself(kind: type[errors.KvtierError]) -> None:
    status = Status(server_errors.status_code(kind("why")), "why", kind.__name__)
    error = translate(status)
    assert type(error) is kind
    assert str(error) == "why"
    assert reason_of(error)


@pytest.mark.parametrize("code", list(grpc.StatusCode))
@pytest.mark.parametrize("name", [None, "dict", "KvtierError", "annotations", "__name__", "Nonsense"])
def test_any_status_becomes_an_error_of_the_tree(code: grpc.StatusCode, name: str | None) -> None:
    assert isinstance(translate(Status(code, None, name)), errors.KvtierError)


def test_both_sides_agree_on_the_metadata() -> None:
    assert ERROR_METADATA == server_errors.ERROR_METADATA


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
        wire.call("GetStatus", admin_pb2.GetStatusRequest(), 5.0, admin=True)
    wire.close()
    wire.close()
    with pytest.raises(errors.Unavailable, match="closed"):
        wire.call("GetStatus", admin_pb2.GetStatusRequest(), 5.0, admin=True)
