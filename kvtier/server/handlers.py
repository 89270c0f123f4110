"""How services are put on a server: as the generated code does it, but for what cannot be decoded.

grpc answers bytes that are no message of the method with INTERNAL, and logs a traceback for each: whoever
reaches the port could fill the log. Here a request is decoded to a message or to `Undecodable`, and the call
that gets the latter ends like every call with bad input: INVALID_ARGUMENT, counted, nothing logged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kvtier.errors import InvalidRequest
from kvtier.metrics import Metrics
from kvtier.server.calls import refuse

_KINDS: Final[dict[tuple[bool, bool], Callable[..., Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether the client, and whether the server sends a stream."""


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Stands for a request that is none: bytes that are no message of this name."""

    message: str

    def error(self) -> InvalidRequest:
        """What the caller is told."""
        return InvalidRequest(f"the bytes are no {self.message} message: send what the .proto file says")


def add(
    server: Any,
    service: ServiceDescriptor,
    servicer: Any,
    metrics: Metrics,
    *,
    serialised: Collection[str] = (),
) -> None:
    """Let `server` answer all methods of `service` by those of `servicer` that bear their names.

    Parameters
    ----------
    servicer
        Its methods are coroutines, or async generators where they answer with a stream.
    serialised
        Methods whose answers are bytes already.
    """
    handlers = {
        method.name: _handler(method, getattr(servicer, method.name), metrics, method.name in serialised)
        for method in service.methods
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.add_registered_method_handlers(service.full_name, handlers)


def _handler(method: MethodDescriptor, call: Any, metrics: Metrics, is_serialised: bool) -> Any:
    return _KINDS[method.client_streaming, method.server_streaming](
        _guarded(call, method, metrics),
        request_deserializer=_decoder(GetMessageClass(method.input_type)),
        response_serializer=None if is_serialised else GetMessageClass(method.output_type).SerializeToString,
    )


def _decoder(message: type[Message]) -> Callable[[bytes], Message | Undecodable]:
    name = message.DESCRIPTOR.name

    def decode(raw: bytes) -> Message | Undecodable:
        try:
            return message.FromString(raw)
        except DecodeError:
            return Undecodable(name)

    return decode


def _guarded(call: Any, method: MethodDescriptor, metrics: Metrics) -> Any:
    """`call`, which sees only what could be decoded; of its own kind, since grpc looks at that."""

    async def message(request: Any, context: Any) -> Any:
        if isinstance(request, Undecodable):
            await refuse(context, metrics, method.name, request.error())
        return request

    async def messages(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield await message(request, context)

    async def decoded(request: Any, context: Any) -> Any:
        return messages(request, context) if method.client_streaming else await message(request, context)

    if inspect.isasyncgenfunction(call):

        @functools.wraps(call)
        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            async with aclosing(call(await decoded(request, context), context)) as answers:
                async for answer in answers:
                    yield answer

        return generate

    @functools.wraps(call)
    async def answer(request: Any, context: Any) -> Any:
        return await call(await decoded(request, context), context)

    return answer
