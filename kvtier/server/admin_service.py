"""What operators ask: translated, nothing decided."""

from __future__ import annotations

from dataclasses import asdict

import kvtier
from kvtier.core import messages as m
from kvtier.core.stats import BlockPlace, EngineStats, TierStats
from kvtier.errors import LimitExceeded
from kvtier.node import Node
from kvtier.server import admin_nodes, wire
from kvtier.server.calls import run, unary
from kvtier.v1 import admin_pb2 as pb
from kvtier.v1 import admin_pb2_grpc

_FRAME_BYTES = 1024


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Lives on the node's loop.

    Parameters
    ----------
    metrics_address
        ``host:port`` of the metrics, empty where there are none.
    """

    def __init__(self, node: Node, metrics_address: str) -> None:
        self.metrics = node.metrics
        self._node = node
        self._metrics_address = metrics_address
        self._max_keys = node.config.max_keys_per_call

    @unary
    async def GetStatus(self, request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        """All that an operator may want to see."""
        node, stats = self._node, self._node.stats()
        tiers = [self._tier(tier) for tier in stats.tiers]
        status = pb.GetStatusResponse(
            node_id=node.identity.node_id,
            incarnation=node.identity.incarnation,
            version=kvtier.__version__,
            uptime_s=node.uptime_s,
            state="growing" if any(map(_is_growing, tiers)) else "serving",
            tiers=tiers,
            engines=[self._engine(engine) for engine in stats.engines],
            counters=pb.Counters(**asdict(stats.counters)),
            metrics_address=self._metrics_address,
            notices=self._notices(tiers),
        )
        admin_nodes.fill_status(status, node)
        return status

    @unary
    async def ListNodes(self, request: pb.ListNodesRequest) -> pb.ListNodesResponse:
        """Who shares the index, this node first."""
        return pb.ListNodesResponse(nodes=admin_nodes.list_nodes(self._node))

    @unary
    async def GetNode(self, request: pb.GetNodeRequest) -> pb.GetNodeResponse:
        """One of them."""
        return pb.GetNodeResponse(node=admin_nodes.get_node(self._node, request.node))

    @unary
    async def LookupPrefix(self, request: pb.LookupPrefixRequest) -> pb.LookupPrefixResponse:
        """Where each block of a prefix lies: here, and as the index says of other nodes."""
        keys = wire.lookup_prefix(request, self._max_keys)
        places = [self._place(place) for place in self._node.places(keys)]
        if request.everywhere and self._node.remote is not None:
            shards = 1 + max((place.shard for place in places), default=0)
            places += await admin_nodes.hints(self._node.remote, keys, shards)
        places.sort(key=lambda place: (place.index, place.shard, place.hint))
        found = {place.index for place in places}
        blocks = next((i for i in range(len(keys)) if i not in found), len(keys))
        response = pb.LookupPrefixResponse(blocks=blocks, places=places)
        limit_bytes = self._node.config.max_message_bytes - _FRAME_BYTES
        if response.ByteSize() > limit_bytes:
            raise LimitExceeded(
                f"{len(places)} places make {response.ByteSize()} bytes, "
                f"a message has at most {limit_bytes}: ask for fewer keys"
            )
        return response

    @unary
    async def EvictPrefix(self, request: pb.EvictPrefixRequest) -> pb.EvictPrefixResponse:
        """Drop a prefix and all that continues it."""
        reply = await run(self._node, wire.evict(request, self._max_keys), m.Evicted)
        return pb.EvictPrefixResponse(evicted=reply.blocks, kept=reply.kept)

    @unary
    async def PinPrefix(self, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
        """Protect a prefix."""
        reply = await run(self._node, wire.pin(request, self._max_keys), m.Pinned)
        return pb.PinPrefixResponse(pinned=reply.blocks, pin_id=reply.pin)

    @unary
    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest) -> pb.UnpinPrefixResponse:
        """End that protection."""
        reply = await run(self._node, wire.unpin(request, self._max_keys), m.Unpinned)
        return pb.UnpinPrefixResponse(unpinned=reply.pins)

    def _place(self, place: BlockPlace) -> pb.BlockPlace:
        identity = self._node.identity
        return pb.BlockPlace(
            index=place.index,
            shard=place.block.shard,
            node_id=identity.node_id,
            incarnation=identity.incarnation,
            tier=place.tier,
            arena_id=place.slot.arena,
            offset_bytes=place.slot.offset_bytes,
            size_bytes=place.slot.size_bytes,
            pinned=place.pinned,
            leases=place.leases,
            replica=place.replica,
            holder=place.holder,
        )

    def _tier(self, stats: TierStats) -> pb.TierStatus:
        return pb.TierStatus(
            tier=stats.kind,
            name=stats.kind.name.lower(),
            capacity_bytes=stats.capacity_bytes,
            allocated_bytes=stats.allocated_bytes,
            resident_bytes=stats.resident_bytes,
            reserved_bytes=stats.reserved_bytes,
            quarantined_bytes=stats.quarantined_bytes,
            draining_bytes=stats.draining_bytes,
            leased_bytes=stats.leased_bytes,
            pinned_bytes=stats.pinned_bytes,
            old_arena_bytes=self._node.old_arena_bytes(stats.kind),
            blocks=stats.blocks,
        )

    def _engine(self, stats: EngineStats) -> pb.EngineStatus:
        return pb.EngineStatus(
            engine_id=stats.engine,
            description=stats.description,
            fingerprint=stats.fingerprint,
            slot_bytes=stats.slot_bytes,
            leased_bytes=stats.leased_bytes,
            reserved_bytes=stats.reserved_bytes,
            quarantined_bytes=stats.quarantined_bytes,
            registered_s=self._node.age_s(stats.registered_at_s),
            resident_blocks=stats.resident_blocks,
        )

    def _notices(self, tiers: list[pb.TierStatus]) -> list[str]:
        config = self._node.config
        notices = [
            f"tier {tier.name} has {tier.allocated_bytes} of {tier.capacity_bytes} bytes: engines still map "
            f"{tier.old_arena_bytes} bytes of an earlier daemon; it grows as they let go"
            for tier in tiers
            if _is_growing(tier) and tier.old_arena_bytes
        ]
        notices += self._node.tiering.notices
        notices += [
            f"{name} is off: wrong bytes are noticed later or not at all"
            for name in ("verify_loads", "verify_commits")
            if getattr(config, name) == "off"
        ]
        if config.scrub_bytes_per_s == 0:
            notices.append("scrub_bytes_per_s is 0: blocks are not verified in the background")
        return notices


def _is_growing(tier: pb.TierStatus) -> bool:
    return tier.allocated_bytes < tier.capacity_bytes
