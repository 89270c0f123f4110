"""Statuses become the errors that the node raised; deadlines bound every call."""

from __future__ import annotations

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
