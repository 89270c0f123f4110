"""Bytes that are no message, for every method that a descriptor names."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

BROKEN_TAG = b"\xff" * 8
"""No message of protobuf begins so."""
MESSAGES = 25
DEADLINE_S = 20.0


def undecodable(method: MethodDescriptor, seed: int = 7) -> Iterator[bytes]:
    """Random bytes, but for those that happen to be a message of this method."""
    message, rng = GetMessageClass(method.input_type), random.Random(seed)
    left = MESSAGES
    while left:
        raw = BROKEN_TAG if left == MESSAGES else rng.randbytes(rng.randint(1, 300))
        try:
            message.FromString(raw)
        except DecodeError:
            left -= 1
            yield raw


async def send(channel: grpc.aio.Channel, method: MethodDescriptor, raw: bytes) -> None:
    """Call the method with these bytes, and take all that it answers."""
    client, server = (
        "stream" if many else "unary" for many in (method.client_streaming, method.server_streaming)
    )
    path = f"/{method.containing_service.full_name}/{method.name}"
    multi: Any = getattr(channel, f"{client}_{server}")(path)
    call = multi(iter([raw]) if method.client_streaming else raw, timeout=DEADLINE_S)
    if method.server_streaming:
        async for _ in call:
            pass
    else:
        await call


async def all_are_refused(channel: grpc.aio.Channel, service: ServiceDescriptor) -> int:
    """Every method refuses all such bytes as any bad input; how many methods there are."""
    for method in service.methods:
        for raw in undecodable(method):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send(channel, method, raw)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, (method.name, caught.value)
            assert dict(caught.value.trailing_metadata() or ())["kvtier-error"] == "InvalidRequest"
            assert f"the bytes are no {method.input_type.name} message" in (caught.value.details() or "")
    return len(service.methods)
