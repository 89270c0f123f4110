"""Bytes through gRPC: works wherever the peer service does, under its TLS, at a fraction of NIXL's rate.

The peer sends the leased slots in order, in messages of about 1 MiB; each is copied from the message
straight into the arena, on the event loop (some 0.1 ms each). Where the way is slower than codecs
(`kvtier.transfer.ways`) the peer is asked for payloads, which are decoded in threads before they are copied.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from kvtier.codecs import CODEC_NAMES
from kvtier.errors import TransferFault
from kvtier.interfaces import Remote, Transfer
from kvtier.transfer.checks import PIECE_BYTES, check_ranges
from kvtier.transfer.coding import (
    AHEAD,
    RAW,
    WIRE_CODECS,
    Count,
    Crew,
    Spoilt,
    count_nothing,
    decode,
    give_up,
)
from kvtier.transfer.ways import RAW_BYTES_PER_S, Way, Ways
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
    codecs
        Wire ids of those that peers may be asked for; none: bytes come as they are.
    raw_bytes_per_s
        Believed of the way to a peer until it has been measured.
    count
        Told what came, for metrics.
    clock
        Monotonic seconds.
    """

    name: ClassVar[str] = "stream"

    def __init__(
        self,
        channel_of: Callable[[Remote], grpc.aio.Channel],
        node_id: str,
        *,
        codecs: Sequence[int] = WIRE_CODECS,
        raw_bytes_per_s: float = RAW_BYTES_PER_S,
        count: Count = count_nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel_of = channel_of
        self._node_id = node_id
        self._codecs = tuple(codecs)
        self._ways = Ways(raw_bytes_per_s)
        self._count = count
        self._clock = clock
        self._memory: memoryview | None = None
        self._crew: Crew | None = None

    async def open(self, memory: memoryview) -> None:
        """Nothing but gRPC is needed, which is here."""
        self._memory = memory.cast("B")
        self._crew = Crew()

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
        way = self._ways.to(remote.node, self._clock())
        codecs = self._codecs if way.wants_codec(self._clock()) else ()
        request = pb.ReadRequest(
            node_id=self._node_id,
            lease_id=remote.lease,
            slots=np.asarray(sources, "<u8").tobytes(),
            sizes=np.asarray(sizes, "<u8").tobytes(),
            codecs=codecs,
            bytes_per_s=way.raw_bytes_per_s if codecs else 0.0,
        )
        call: Any = self._channel_of(remote).unary_stream(
            READ_METHOD, request_serializer=pb.ReadRequest.SerializeToString, response_deserializer=None
        )(request)
        way.began()
        try:
            async with asyncio.timeout(timeout_s):
                came_bytes = await self._fill(call, _Places(into, sizes), codecs, way)
        except Spoilt:
            way.spoilt(self._clock())
            raise
        except TimeoutError:
            raise TransferFault(f"the peer did not send everything within {timeout_s:.3g} s") from None
        except grpc.aio.AioRpcError as error:
            raise TransferFault(f"the peer ended the stream: {_explain(error)}") from error
        finally:
            call.cancel()
            way.ended()
        if came_bytes != wanted_bytes:
            raise TransferFault(f"the peer sent {came_bytes} bytes of {wanted_bytes}")

    async def _fill(self, call: Any, places: _Places, codecs: Collection[int], way: Way) -> int:
        """Write what comes into the places in order; returns how many bytes came."""
        decoding: deque[tuple[list[slice], asyncio.Task[bytearray]]] = deque()
        came_bytes = 0
        try:
            async for message in call:
                part = _part(message)
                _check_part(part, codecs)
                spans = places.take(part.size_bytes)
                came_bytes += part.size_bytes
                if part.codec == RAW:
                    self._write(spans, part.data)
                else:
                    decoding.append((spans, self._decode(part)))
                    if len(decoding) > AHEAD:
                        await self._write_first(decoding)
                self._count("in", CODEC_NAMES[part.codec], part.size_bytes, len(message))
                way.came(part.size_bytes, self._clock(), is_coded=part.codec != RAW)
            while decoding:
                await self._write_first(decoding)
        finally:
            await give_up(task for _, task in decoding)
        return came_bytes

    def _decode(self, part: _Part) -> asyncio.Task[bytearray]:
        if self._crew is None:
            raise TransferFault("the transfer was closed")
        return asyncio.ensure_future(decode(self._crew, part.codec, part.data, part.size_bytes))

    async def _write_first(self, decoding: deque[tuple[list[slice], asyncio.Task[bytearray]]]) -> None:
        spans, task = decoding[0]
        piece = await task
        decoding.popleft()
        self._write(spans, memoryview(piece))

    def _write(self, spans: Sequence[slice], data: memoryview) -> None:
        memory = self._memory
        if memory is None:
            raise TransferFault("the transfer was closed")
        begin = 0
        for span in spans:
            end = begin + span.stop - span.start
            memory[span] = data[begin:end]
            begin = end

    async def serve(self, seconds: float) -> None:
        """The peer service answers by itself."""

    async def forget(self, node: str) -> None:
        """How fast it gave is all that is kept of a peer."""
        self._ways.forget(node)

    async def close(self) -> None:
        """Pulls that still run write nothing from here on; threads that still decode touch no arena."""
        self._memory = None
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()


class _Places:
    """Where bytes go that come in order."""

    def __init__(self, into: Sequence[int], sizes: Sequence[int]) -> None:
        self._places = iter(zip(into, sizes, strict=True))
        self._begin = self._end = 0
        self._taken_bytes = 0

    def take(self, size_bytes: int) -> list[slice]:
        """The next so many bytes of the own arena; raises `TransferFault` where there are not so many."""
        spans = []
        while size_bytes:
            if self._begin == self._end:
                self._begin, size = next(self._places, (0, 0))
                self._end = self._begin + size
                if not size:
                    raise TransferFault(f"the peer sent more than {self._taken_bytes} bytes, unasked for")
            step = min(size_bytes, self._end - self._begin)
            spans.append(slice(self._begin, self._begin + step))
            self._begin += step
            self._taken_bytes += step
            size_bytes -= step
        return spans


@dataclass(frozen=True, slots=True)
class _Part:
    """One message: `data` stands for the next `size_bytes`, as they are or as a payload of `codec`."""

    data: memoryview
    codec: int
    size_bytes: int


def _check_part(part: _Part, codecs: Collection[int]) -> None:
    """Before anything is allocated or decoded at the peer's word."""
    if part.codec == RAW:
        return
    if part.codec not in codecs:
        raise TransferFault(f"the peer sent codec {part.codec}, which it was not asked for")
    if not 0 < part.size_bytes <= PIECE_BYTES or not 0 < len(part.data) < part.size_bytes:
        raise Spoilt(
            f"the peer sent {len(part.data)} bytes as a payload of {part.size_bytes}: allowed are fewer than "
            f"it stands for, and those are {PIECE_BYTES} at most"
        )


def _part(message: bytes) -> _Part:
    """A serialised `ReadResponse`; its bytes are copied only where they are packed in an unusual way."""
    if message[:1] == bytes((_DATA_TAG,)):
        size = shift = 0
        for position in range(1, min(len(message), 1 + _MAX_VARINT_BYTES)):
            size |= (message[position] & 0x7F) << shift
            shift += 7
            if message[position] < 0x80:
                if position + 1 + size == len(message):
                    return _Part(memoryview(message)[position + 1 :], RAW, size)
                break
    try:
        said = pb.ReadResponse.FromString(message)
    except DecodeError as error:
        raise TransferFault("the peer sent something that is no bytes of a block") from error
    data = memoryview(said.data)
    return _Part(data, said.codec, len(data) if said.codec == RAW else said.size_bytes)


def _explain(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name.lower()}: {(error.details() or '')[:200]}"
