"""What other nodes ask of this one: translated for the core, and the bytes of its arena. Decides nothing.

The core grants leases and ends them. What is kept here of a lease is only what `Read` may touch, and it is
dropped no later than the core drops the lease, since it counts from before the core was asked.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvtier import logs
from kvtier.core import messages as m
from kvtier.core.config import CALL_ID_BYTES
from kvtier.errors import Conflict, DeadlineExceeded, InvalidRequest, KvtierError, ProtocolMismatch, UnknownId
from kvtier.interfaces import Transfer
from kvtier.node import Node
from kvtier.server import peer_wire as wire
from kvtier.server.calls import refuse, run, unary
from kvtier.tiers.arena import Arena
from kvtier.transfer.coding import RAW_NAME, Encoder, raw_message
from kvtier.types import PROTOCOL_VERSION, Slot
from kvtier.v1 import peer_pb2 as pb
from kvtier.v1 import peer_pb2_grpc

SERVE_S: Final = 1.0
"""While leases are out, transfers are told so long in advance that they may be read from."""
SERVE_EVERY_S: Final = 0.5
MAX_STRANGERS: Final = 1024
"""Nodes of another protocol version that are remembered, so that each is logged once."""

log = logs.get("peer-service")


@dataclass(frozen=True, slots=True)
class _Grant:
    """What a peer may read: these slots, by offset, until `deadline_s`."""

    node: str
    slots: dict[int, Slot]
    block_bytes: int
    fingerprint: bytes
    deadline_s: float


class PeerService(peer_pb2_grpc.PeerServiceServicer):
    """Lives on the node's loop.

    Parameters
    ----------
    transfers
        What peers may read with, the best first; may still be filled later.
    """

    def __init__(
        self,
        node: Node,
        arena: Arena,
        transfers: Sequence[Transfer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = node.metrics
        self._node = node
        self._arena = arena
        self._transfers = transfers
        self._clock = clock
        self._max_keys = node.config.max_keys_per_call
        self._base_address = int(np.frombuffer(arena.memory, np.uint8).ctypes.data)
        self._grants: dict[int, _Grant] = {}
        self._newest_lease = 0
        self._serving: asyncio.Task[None] | None = None
        self._strangers: set[str] = set()
        self._encoder = Encoder(self.metrics.count_stream) if node.config.transfer_codec == "auto" else None

    async def close(self) -> None:
        """No transfer is told anything any more, and nothing is encoded; idempotent."""
        if self._encoder is not None:
            self._encoder.close()
        task, self._serving = self._serving, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # ---- who this is

    @unary
    async def Hello(self, request: pb.HelloRequest) -> pb.HelloResponse:
        """Who this node is now, and how to read from it."""
        try:
            wire.hello(request)
        except ProtocolMismatch as error:
            self._log_stranger(request.node_id, error)
            raise
        identity = self._node.identity
        answer = pb.HelloResponse(
            protocol_version=PROTOCOL_VERSION,
            node_id=identity.node_id,
            incarnation=identity.incarnation,
            arena_id=self._arena.arena_id,
            arena_bytes=self._arena.capacity_bytes,
            base_address=self._base_address,
        )
        if request.wants_metadata:
            for transfer in self._transfers:
                answer.transfers.add(name=transfer.name, metadata=transfer.metadata())
        return answer

    def _log_stranger(self, node: str, error: ProtocolMismatch) -> None:
        with suppress(InvalidRequest):
            node = wire.node_id(node)
            if node not in self._strangers and len(self._strangers) < MAX_STRANGERS:
                self._strangers.add(node)
                log.warning("a peer cannot use this node", node=node, why=str(error))

    # ---- leases

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.AcquireResponse:
        """Lease what is here of the keys."""
        begin_s = time.perf_counter()
        try:
            left_s = context.time_remaining()
            if left_s is not None and left_s <= 0:  # this process was stopped meanwhile, say
                raise DeadlineExceeded("the caller's time was over before it was served: ask again")
            return await self._acquire(request)
        except Exception as error:
            await refuse(context, self.metrics, "Acquire", error)
            raise AssertionError("unreachable") from error
        finally:
            self.metrics.rpc_seconds.labels("Acquire").observe(time.perf_counter() - begin_s)

    async def _acquire(self, request: pb.AcquireRequest) -> pb.AcquireResponse:
        me = (self._node.identity.node_id, self._node.identity.incarnation)
        event = wire.acquire(request, me, self._max_keys, self._arena.extent_bytes)
        asked_s = self._clock()
        reply = await run(self._node, event, m.Leased)
        if reply.lease:
            if not all(wire.fits(slot, request.block_bytes) for slot in reply.slots):
                await self._end(event.peer, reply.lease)
                raise Conflict(
                    f"block_bytes is {request.block_bytes}, but blocks of this layout have another size "
                    "here: the two sides differ in version"
                )
            self._grant(event, reply, request.block_bytes, asked_s + reply.lease_ttl_s)
            await self._serve()
        return wire.leased(reply, self._arena.arena_id)

    def _grant(self, event: m.Acquire, reply: m.Leased, block_bytes: int, deadline_s: float) -> None:
        """Remember a new lease. The core counts leases up, so one that is not newer is a repeated answer,
        and its lease may have ended.
        """
        if reply.lease <= self._newest_lease:
            return
        self._newest_lease = reply.lease
        slots = {slot.offset_bytes: slot for slot in reply.slots}
        self._grants[reply.lease] = _Grant(event.peer, slots, block_bytes, event.fingerprint, deadline_s)

    async def _end(self, node: str, lease: int) -> None:
        with suppress(KvtierError):
            name = m.peer_name(node)
            await self._node.execute(m.Release(call_id=os.urandom(CALL_ID_BYTES), engine=name, lease=lease))

    @unary
    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest) -> pb.ReleaseLeaseResponse:
        """End a lease; blocks that the peer found corrupt are verified."""
        event = wire.release(request, self._max_keys)
        grant = self._grants.get(request.lease_id)
        if grant is not None and grant.node == request.node_id:
            del self._grants[request.lease_id]  # first: no byte is read under a lease that has ended
        if event.corrupt_keys:
            log.warning("a peer found wrong bytes", node=request.node_id, count=len(event.corrupt_keys))
        reply = await run(self._node, event, m.Released)
        return pb.ReleaseLeaseResponse(valid=reply.valid)

    async def _serve(self) -> None:
        """Transfers can be read from before the peer hears of its lease, and as long as any is out."""
        if self._serving is None:
            await self._tell_transfers()
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_task(self._serve_while_leased())

    async def _serve_while_leased(self) -> None:
        try:
            while self._has_grants():
                await self._tell_transfers()
                await asyncio.sleep(SERVE_EVERY_S)
        finally:
            self._serving = None

    def _has_grants(self) -> bool:
        now_s = self._clock()
        for lease in [lease for lease, grant in self._grants.items() if grant.deadline_s <= now_s]:
            del self._grants[lease]
        return bool(self._grants)

    async def _tell_transfers(self) -> None:
        for transfer in tuple(self._transfers):
            try:
                await transfer.serve(SERVE_S)
            except Exception as error:  # peers then fail to read with it, and take another one
                log.error("a bug in a transfer", transfer=transfer.name, exc_info=error)

    # ---- bytes

    async def Read(self, request: pb.ReadRequest, context: Any) -> None:
        """The bytes of leased slots, in order, as long as the lease lasts."""
        try:
            read = wire.read(request, self._max_keys)
            grant = self._granted(read.node, read.lease)
            views = self._views(grant, read)
            async with asyncio.timeout(grant.deadline_s - self._clock()):  # also where nobody takes the bytes
                async with aclosing(self._messages(grant, read, views)) as messages:
                    async for message in messages:
                        self._granted(read.node, read.lease)
                        if not await _write(context, message):
                            return
        except TimeoutError:
            await refuse(context, self.metrics, "Read", _lease_over())
        except Exception as error:
            await refuse(context, self.metrics, "Read", error)

    async def _messages(
        self, grant: _Grant, read: wire.Read, views: Sequence[memoryview]
    ) -> AsyncGenerator[bytes, None]:
        """Each made no earlier than needed, or a few pieces earlier where they go through a codec."""
        encoder = self._encoder
        if encoder is not None and encoder.takes(read.codecs):
            pieces = wire.chunks(views)
            coded = encoder.messages(pieces, grant.fingerprint, read.codecs, read.bytes_per_s)
            async with aclosing(coded) as messages:
                async for message in messages:
                    yield message
            return
        for piece in wire.chunks(views):
            message = raw_message(piece)
            size_bytes = sum(map(len, piece))
            self.metrics.count_stream("out", RAW_NAME, size_bytes, len(message))
            yield message

    def _granted(self, node: str, lease: int) -> _Grant:
        grant = self._grants.get(lease)
        if grant is None or grant.node != node or self._clock() >= grant.deadline_s:
            raise _lease_over()
        return grant

    def _views(self, grant: _Grant, read: wire.Read) -> list[memoryview]:
        if len(read.offsets) > len(grant.slots):
            raise InvalidRequest(
                f"{len(read.offsets)} slots were sent, the lease has {len(grant.slots)}: send each once"
            )
        views = []
        for offset, size in zip(read.offsets, read.sizes, strict=True):
            slot = grant.slots.get(offset)
            if slot is None or size > grant.block_bytes:
                raise InvalidRequest("a slot is not under this lease, or smaller than was asked for")
            views.append(self._arena.view(slot)[:size])
        return views


def _lease_over() -> UnknownId:
    return UnknownId("the lease is over, or was never given to this node: acquire again")


async def _write(context: Any, message: bytes) -> bool:
    """False where the peer is gone."""
    try:
        await context.write(message)
    except Exception as error:  # whatever the transport raises then
        log.info("a peer left a read", error=type(error).__name__)
        return False
    return True
