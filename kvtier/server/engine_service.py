"""What engines say: translated into the core's events, and its replies back. Decides nothing."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from kvtier.core import messages as m
from kvtier.core.config import CALL_ID_BYTES
from kvtier.errors import KvtierError
from kvtier.node import Node
from kvtier.server import wire
from kvtier.server.calls import log, refuse, run, unary
from kvtier.tiers.arena import Arena
from kvtier.tiers.hbm import HbmTier
from kvtier.types import TierKind
from kvtier.v1 import engine_pb2 as pb
from kvtier.v1 import engine_pb2_grpc

LEAVE_GRACE_S: Final = 1.0
"""A load that its client has left keeps its lease so long: the release may be on its way."""


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Lives on the node's loop."""

    def __init__(self, node: Node, arena: Arena) -> None:
        self.metrics = node.metrics
        self._node = node
        self._arena = arena
        self._max_keys = node.config.max_keys_per_call
        self._device_memory = _export(node)
        self._ending: set[asyncio.Task[None]] = set()  # at most one a lease

    @unary
    async def Register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        """Say who the engine is; the answer says where the arena is."""
        event = wire.register(request)
        device_memory = self._device_memory if event.maps_device else None
        event = replace(event, maps_device=device_memory is not None)
        reply = await run(self._node, event, m.Registered)
        config = self._node.config
        return pb.RegisterResponse(
            node_id=self._node.identity.node_id,
            incarnation=self._node.identity.incarnation,
            arena=pb.Arena(
                arena_id=self._arena.arena_id,
                path=str(self._arena.path),
                size_bytes=self._arena.capacity_bytes,
                allocated_bytes=self._arena.allocated_bytes,
            ),
            lease_ttl_s=config.lease_ttl_s,
            reservation_ttl_s=config.reservation_ttl_s,
            max_keys_per_call=config.max_keys_per_call,
            slot_bytes=reply.slot_bytes,
            verify_loads=config.verify_loads,
            device_memory=device_memory,
        )

    @unary
    async def Lookup(self, request: pb.LookupRequest) -> pb.LookupResponse:
        """Hold what can be loaded."""
        return wire.offered(await run(self._node, wire.lookup(request, self._max_keys), m.Offered))

    async def Load(self, request: pb.LoadRequest, context: Any) -> None:
        """Lease and name the slots, those of blocks that are still coming as they arrive.

        A client that leaves before the end of the stream leaves no lease: it ends after `LEAVE_GRACE_S`,
        time enough for the release of a load that was cut. One that leaves when everything was sent leaves it
        until `lease_ttl_s`: a repeat under the same call_id tells it the lease again.
        """
        begin_s = time.perf_counter()
        try:
            reply = await run(self._node, wire.load(request, self._max_keys), m.Leased)
        except Exception as error:
            await refuse(context, self.metrics, "Load", error)
        else:
            # Only now: what other nodes take is not the time of this call.
            self.metrics.rpc_seconds.labels("Load").observe(time.perf_counter() - begin_s)
            await self._tell(reply, request.engine_id, context)

    async def _tell(self, reply: m.Leased, engine: str, context: Any) -> None:
        told = False
        try:
            for message in wire.leased(reply, TierKind.DRAM):
                await context.write(message)
            if reply.coming:
                await self._tell_more(reply, context)
            left_s = context.time_remaining()
            told = left_s is None or left_s > 0  # after its deadline the client has given up
        except Exception as error:  # whatever the transport raises where the client is gone
            log.info("a client left a load", engine=engine, error=type(error).__name__)
        finally:
            if not told and reply.lease:
                self._end_soon(engine, reply.lease)

    async def _tell_more(self, reply: m.Leased, context: Any) -> None:
        left = reply.coming
        try:
            async with asyncio.timeout(reply.lease_ttl_s):
                async for more in self._node.arrivals.stream(reply.lease):
                    left = 0 if more.is_last else max(0, left - len(more.slots))
                    for message in wire.ready(reply, more, left, TierKind.DRAM):
                        await context.write(message)
        except TimeoutError:
            log.warning("blocks did not come while their lease lasted", lease=reply.lease)

    def _end_soon(self, engine: str, lease: int) -> None:
        """Release a lease that its client may never have heard of, or is about to release itself."""
        task = asyncio.get_running_loop().create_task(self._end(engine, lease))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, engine: str, lease: int) -> None:
        await asyncio.sleep(LEAVE_GRACE_S)
        with suppress(KvtierError):  # it may have ended meanwhile
            await self._node.execute(m.Release(call_id=os.urandom(CALL_ID_BYTES), engine=engine, lease=lease))

    @unary
    async def Release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        """End a lease or a hold."""
        reply = await run(self._node, wire.release(request, self._max_keys), m.Released)
        return pb.ReleaseResponse(valid=reply.valid)

    @unary
    async def Reserve(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        """Slots for new blocks."""
        return wire.reserved(await run(self._node, wire.reserve(request, self._max_keys), m.Reserved))

    @unary
    async def Commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        """Make written blocks visible."""
        reply = await run(self._node, wire.commit(request, self._max_keys), m.Committed)
        return pb.CommitResponse(committed=reply.blocks)

    @unary
    async def Abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        """Give slots back."""
        reply = await run(self._node, wire.abort(request, self._max_keys), m.Aborted)
        return pb.AbortResponse(freed=reply.blocks)

    @unary
    async def ReportResident(self, request: pb.ReportResidentRequest) -> pb.ReportResidentResponse:
        """Note what the engine's own memory has."""
        reply = await run(self._node, wire.report_resident(request, self._max_keys), m.Noted)
        return pb.ReportResidentResponse(blocks=reply.blocks)


def _export(node: Node) -> pb.DeviceMemory | None:
    """What engines map the node's device memory by; None where it has none, or none that can be exported."""
    tier = node.tiers.get(TierKind.HBM)
    if not isinstance(tier, HbmTier):
        return None
    try:
        return pb.DeviceMemory(device=tier.device, handle=tier.handle(), size_bytes=tier.capacity_bytes)
    except KvtierError as error:
        log.error("engines cannot read device memory: nothing is copied there", why=str(error))
        return None
