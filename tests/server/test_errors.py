"""Every error has a status, and its class can be found again from the name that travels with it."""

from __future__ import annotations

import inspect

import grpc
import pytest

from kvtier import errors
from kvtier.server.errors import status_code

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
EXPECTED = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownId: grpc.StatusCode.NOT_FOUND,
    errors.Conflict: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.IndexFault: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Corruption: grpc.StatusCode.DATA_LOSS,
}


@pytest.mark.parametrize("error", CLASSES)
def test_status(error: type[errors.KvtierError]) -> None:
    assert issubclass(error, errors.KvtierError)
    assert status_code(error("message")) == EXPECTED.get(error, grpc.StatusCode.INTERNAL)


def test_names_are_enough() -> None:
    assert all(getattr(errors, error.__name__) is error for error in CLASSES)
