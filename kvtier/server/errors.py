"""The one tree of errors, as gRPC statuses.

The status code tells any gRPC client what kind of fault it was; the class's name travels in the trailing
metadata `kvtier-error`, so that kvtier's own client restores the very class.
"""

from __future__ import annotations

from typing import Final, NoReturn

import grpc
from grpc.aio import ServicerContext

from kvtier import errors

ERROR_METADATA: Final = "kvtier-error"

_CODES: Final[dict[type[errors.KvtierError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownId: grpc.StatusCode.NOT_FOUND,
    errors.Conflict: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Corruption: grpc.StatusCode.DATA_LOSS,
}


def status_code(error: errors.KvtierError) -> grpc.StatusCode:
    """The code of the nearest class of `error` that has one; INTERNAL where none has."""
    for ancestor in type(error).__mro__:
        code = _CODES.get(ancestor)
        if code is not None:
            return code
    return grpc.StatusCode.INTERNAL


async def abort(context: ServicerContext, error: errors.KvtierError) -> NoReturn:  # type: ignore[type-arg]
    """End the call with the status, the message and the class of `error`."""
    metadata = ((ERROR_METADATA, type(error).__name__),)
    await context.abort(status_code(error), str(error), metadata)
    raise AssertionError("a call went on after it was aborted")
