"""Bytes through gRPC: works wherever the peer service does, under its TLS, at a fraction of NIXL's rate.

The peer sends the leased slots in order, in messages of about 1 MiB; each is copied from the message
straight into the arena, on the event loop (some 0.1 ms each).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from kvtier.errors import TransferFault
from kvtier.interfaces import Remote, Transfer
from kvtier.transfer.checks import check_ranges
from kvtier.v1 import peer_pb2 as pb

READ_METHOD: Final = "/kvtier.v1.PeerService/Read"
_DATA_TAG: Final = 0x0A
_MAX_VARINT_BYTES: Final = 5


class StreamTransfer(Transfer):
    """Asks a peer's `PeerService.Read`.

    Parameters
    ----------
    channel_of
        The channel to a peer; raises `TransferFault` where there is none.
    node_id
        Of this node: under which its leases were given.
    """

    name: ClassVar[str] = "stream"

    def __init__(self, channel_of: Callable[[Remote], grpc.aio.Channel], node_id: str) -> None:
        self._channel_of = channel_of
        self._node_id = node_id
        self._memory: memoryview | None = None

    async def open(self, memory: memoryview) -> None:
        """Nothing but gRPC is needed, which is here."""
        self._memory = memory.cast("B")

    def metadata(self) -> bytes:
        """A peer needs nothing but the address."""
        return b""

    async def pull(
        self,
        remote: Remote,
        sources: Sequence[int],
        sizes: Sequence[int],
        into: Sequence[int],
        timeout_s: float,
    ) -> None:
        """See `Transfer`: only this coroutine writes, so nothing does once it has ended."""
        if self._memory is None:
            raise TransferFault("the transfer is not open")
        if not sources and not sizes and not into:
            return
        wanted_bytes = check_ranges(sources, sizes, into, self._memory.nbytes)
        request = pb.ReadRequest(
            node_id=self._node_id,
            lease_id=remote.lease,
            slots=np.asarray(sources, "<u8").tobytes(),
            sizes=np.asarray(sizes, "<u8").tobytes(),
        )
        call: Any = self._channel_of(remote).unary_stream(
            READ_METHOD, request_serializer=pb.ReadRequest.SerializeToString, response_deserializer=None
        )(request)
        try:
            async with asyncio.timeout(timeout_s):
                came_bytes = await self._fill(call, into, sizes)
        except TimeoutError:
            raise TransferFault(f"the peer did not send everything within {timeout_s:.3g} s") from None
        except grpc.aio.AioRpcError as error:
            raise TransferFault(f"the peer ended the stream: {_explain(error)}") from error
        finally:
            call.cancel()
        if came_bytes != wanted_bytes:
            raise TransferFault(f"the peer sent {came_bytes} bytes of {wanted_bytes}")

    async def _fill(self, call: Any, into: Sequence[int], sizes: Sequence[int]) -> int:
        """Write what comes into the places in order; returns how many bytes came."""
        places = iter(zip(into, sizes, strict=True))
        begin = end = came_bytes = 0
        async for message in call:
            memory = self._memory
            if memory is None:
                raise TransferFault("the transfer was closed")
            data = _data(message)
            while data:
                if begin == end:
                    begin, size = next(places, (0, 0))
                    end = begin + size
                    if not size:
                        raise TransferFault(f"the peer sent more than {came_bytes} bytes, unasked for")
                part = data[: end - begin]
                memory[begin : begin + len(part)] = part
                begin += len(part)
                came_bytes += len(part)
                data = data[len(part) :]
        return came_bytes

    async def serve(self, seconds: float) -> None:
        """The peer service answers by itself."""

    async def forget(self, node: str) -> None:
        """Nothing is kept of a peer."""

    async def close(self) -> None:
        """Pulls that still run write nothing from here on."""
        self._memory = None


def _data(message: bytes) -> memoryview:
    """The bytes of a serialised `ReadResponse`; copied only where they are packed in an unusual way."""
    if message[:1] == bytes((_DATA_TAG,)):
        size = shift = 0
        for position in range(1, min(len(message), 1 + _MAX_VARINT_BYTES)):
            size |= (message[position] & 0x7F) << shift
            shift += 7
            if message[position] < 0x80:
                if position + 1 + size == len(message):
                    return memoryview(message)[position + 1 :]
                break
    try:
        return memoryview(pb.ReadResponse.FromString(message).data)
    except DecodeError as error:
        raise TransferFault("the peer sent something that is no bytes of a block") from error


def _explain(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name.lower()}: {(error.details() or '')[:200]}"
