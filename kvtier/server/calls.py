"""What every call has in common: its time is measured, its errors become statuses."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from kvtier import logs
from kvtier.core import messages as m
from kvtier.errors import Conflict, KvtierError
from kvtier.metrics import Metrics
from kvtier.node import Node
from kvtier.server import errors

Request = TypeVar("Request")
Response = TypeVar("Response")
Service = TypeVar("Service", bound="Measured")
R = TypeVar("R", bound=m.Reply)

log = logs.get("server")


class Measured(Protocol):
    """A service with a registry."""

    metrics: Metrics


class BugError(KvtierError):
    """What a caller sees of a bug: nothing of its inside."""


async def run(node: Node, event: m.Request, kind: type[R]) -> R:
    """The node's reply, which has to be of the kind that belongs to the call."""
    reply = await node.execute(event)
    if not isinstance(reply, kind):
        raise Conflict("call_id was used for a call of another kind before: send fresh random bytes")
    return reply


async def refuse(context: Any, metrics: Metrics, method: str, error: Exception) -> None:
    """End a call with `error`; a bug is logged here and told as INTERNAL."""
    if not isinstance(error, KvtierError):
        log.error("a bug in the server", method=method, exc_info=error)
        error = BugError("a bug in kvtier: the daemon's log has the details")
    metrics.rpc_errors.labels(method, type(error).__name__).inc()
    await errors.abort(context, error)


def unary(
    method: Callable[[Service, Request], Awaitable[Response]],
) -> Callable[[Service, Request, Any], Awaitable[Response]]:
    """A gRPC method from one that takes only the request."""
    name = method.__name__

    @functools.wraps(method)
    async def call(self: Service, request: Request, context: Any) -> Response:
        begin_s = time.perf_counter()
        try:
            return await method(self, request)
        except Exception as error:
            await refuse(context, self.metrics, name, error)
            raise AssertionError("unreachable") from error
        finally:
            self.metrics.rpc_seconds.labels(name).observe(time.perf_counter() - begin_s)

    return call
