"""Copies of what the core knows, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvtier.core.blocks import RESIDENT, Block
from kvtier.core.extents import TierMap
from kvtier.core.lower import LowerTier
from kvtier.core.stats import BlockPlace, CoreStats, TierStats
from kvtier.types import BlockId, Key, TierKind

if TYPE_CHECKING:
    from kvtier.core.cache import CacheCore


def places_of(core: CacheCore, keys: Sequence[Key]) -> list[BlockPlace]:
    """Every place of every block that is named, whatever its shard; by key, shard and tier."""
    leases: dict[Block, int] = {}
    for lease in core.leases.leases.values():
        for leased in (*lease.blocks, *lease.copies):
            leases[leased] = leases.get(leased, 0) + 1
    pinned = core.pins.ledger.counts
    shards = sorted({shard for residency in core.residencies for shard in residency.shards})
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
        for shard in shards
        for residency in core.residencies
        if (block := residency.get(key, shard)) is not None and block.state == RESIDENT
    ]


def tier_of(core: CacheCore, id: BlockId) -> TierKind | None:
    """The tier that a block is published in: the fastest that a prompt can reach it in; None: nowhere."""
    for residency in (core.residency, *core.lower):
        block = residency.get(id.key, id.shard)
        if block is not None and block.state == RESIDENT and not block.orphan:
            return block.pool().tier.spec.kind
    return None


def stats_of(core: CacheCore) -> CoreStats:
    """A copy of all figures."""
    pins = core.pins.ledger
    leased_bytes = sum(ledger.bytes for ledger in core.residency.ledgers if ledger is not pins)
    top = _tier_stats(next(iter(core.residency.tiers.values())), leased_bytes, pins.bytes)
    return CoreStats(
        tiers=[top, *(_lower_stats(core, tier) for tier in core.lower), *_device_stats(core)],
        engines=[
            replace(engine.stats(), resident_blocks=core.engine_blocks.count(engine.name))
            for engine in core.engines.by_name.values()
        ],
        counters=core.counters.copy(),
        holds=len(core.leases.holds),
        leases=len(core.leases.leases),
        pins=len(core.pins),
        pulls=core.pulls.pulling.running,
        peers=[source.stats() for source in core.pulls.sources.by_place.values()],
    )


def _tier_stats(tier: TierMap, leased_bytes: int, pinned_bytes: int) -> TierStats:
    return TierStats(
        kind=tier.spec.kind,
        capacity_bytes=tier.spec.capacity_bytes,
        allocated_bytes=tier.allocated_bytes,
        resident_bytes=tier.resident_bytes,
        reserved_bytes=tier.reserved_bytes,
        quarantined_bytes=tier.quarantined_bytes,
        draining_bytes=tier.draining_bytes,
        leased_bytes=leased_bytes,
        pinned_bytes=pinned_bytes,
        blocks=tier.blocks,
        replica_bytes=tier.replica_bytes,
    )


def _lower_stats(core: CacheCore, tier: LowerTier) -> TierStats:
    return replace(
        _tier_stats(tier.map, 0, 0),
        is_down=tier.is_down,
        demotes=sum(len(demotes.running) for demotes in core.copying if demotes.lower is tier),
        fetches=tier.source.running,
        fetch_bytes_per_s=1 / tier.source.s_per_byte,
        evicted_blocks=tier.dropped_blocks.evicted_blocks,
        **asdict(tier.counts),
    )


def _device_stats(core: CacheCore) -> list[TierStats]:
    """Of device memory, if there is such a tier: nothing is fetched from it, so there is no rate."""
    return [] if core.copies is None else [replace(_lower_stats(core, core.copies), fetch_bytes_per_s=0.0)]
