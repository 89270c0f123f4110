"""Copies of what the core knows, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.core.blocks import RESIDENT, Block
from kvtier.core.stats import BlockPlace, CoreStats, TierStats
from kvtier.types import Key

if TYPE_CHECKING:
    from kvtier.core.cache import CacheCore


def places_of(core: CacheCore, keys: Sequence[Key]) -> list[BlockPlace]:
    """Every place of every block that is named, whatever its shard; in the order of `keys`."""
    leases: dict[Block, int] = {}
    for lease in core.leases.leases.values():
        for leased in lease.blocks:
            leases[leased] = leases.get(leased, 0) + 1
    pinned = core.pins.ledger.counts
    return [
        BlockPlace(
            index,
            block.id,
            block.pool().tier.spec.kind,
            block.slot(),
            leases.get(block, 0),
            block in pinned,
            block.replica,
        )
        for index, key in enumerate(keys)
        for shard in sorted(core.residency.shards)
        if (block := core.residency.get(key, shard)) is not None and block.state == RESIDENT
    ]


def stats_of(core: CacheCore) -> CoreStats:
    """A copy of all figures."""
    pins = core.pins.ledger
    leased_bytes = sum(ledger.bytes for ledger in core.residency.ledgers if ledger is not pins)
    tiers = [
        TierStats(
            kind=kind,
            capacity_bytes=tier.spec.capacity_bytes,
            allocated_bytes=tier.allocated_bytes,
            resident_bytes=tier.resident_bytes,
            reserved_bytes=tier.reserved_bytes,
            quarantined_bytes=tier.quarantined_bytes,
            draining_bytes=tier.draining_bytes,
            leased_bytes=leased_bytes,
            pinned_bytes=pins.bytes,
            blocks=tier.blocks,
            replica_bytes=tier.replica_bytes,
        )
        for kind, tier in core.residency.tiers.items()
    ]
    return CoreStats(
        tiers=tiers,
        engines=[engine.stats() for engine in core.engines.by_name.values()],
        counters=core.counters.copy(),
        holds=len(core.leases.holds),
        leases=len(core.leases.leases),
        pins=len(core.pins),
        pulls=len(core.pulls.running),
        peers=[source.stats() for source in core.pulls.sources.by_node.values()],
    )
