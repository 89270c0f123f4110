"""Every invariant of the core, computed anew from first principles and compared with what is kept."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from kvtier.core.blocks import GHOST, PENDING, RESIDENT, Block
from kvtier.core.checks_tiers import (
    blocks_of,
    check_copies,
    check_lower,
    check_publishing,
    check_pulls,
    demote_sources,
    direct_guards_below,
)
from kvtier.core.config import CoreConfig
from kvtier.core.extents import Extent, Place, Pool, TierMap
from kvtier.core.ledger import Ledger
from kvtier.core.residency import Residency

if TYPE_CHECKING:
    from kvtier.core.cache import CacheCore


def check_core(core: CacheCore) -> None:
    """Assert all of it; a failure is a bug of the core, never of its caller."""
    blocks = blocks_of(core.residency)
    direct = _direct_guards(core, blocks)
    _check_residency(core.residency, blocks, direct, _quarantined(core))
    for tier in core.residencies[1:]:
        below = blocks_of(tier)
        _check_residency(tier, below, direct_guards_below(core, below), [])
    _check_ledgers(core, blocks)
    _check_reservations(core)
    check_pulls(core, blocks)
    check_lower(core)
    check_copies(core)
    check_publishing(core)
    core.engine_blocks.check(core.engines.by_name)
    _check_waiting(core)
    _check_bounds(core)


def _check_residency(
    residency: Residency, blocks: list[Block], direct: Counter[Block], quarantined: list[Place]
) -> None:
    _check_forest(residency, blocks)
    _check_guards(blocks, direct)
    for tier in residency.tiers.values():
        _check_tier(tier, blocks, quarantined)
    assert not residency.drops, "instructions were made and not handed out"
    _check_candidates(residency, blocks)


def _quarantined(core: CacheCore) -> list[Place]:
    expired = core.reservations.expired.values()
    places = [place for entry in expired for place in entry.quarantined.values()]
    return places + [place for entry in core.pulls.running.values() for place in entry.late]


def _check_forest(residency: Residency, blocks: list[Block]) -> None:
    for shard, by_key in residency.shards.items():
        for key, block in by_key.items():
            assert block.id == (key, shard), "a block lies under another id"
    known = set(blocks)
    children: dict[Block, list[Block]] = {}
    for block in blocks:
        assert (block.state == GHOST) == (block.extent is None), "exactly ghosts have no slot"
        if block.parent is not None:
            assert block.state != GHOST, "a ghost has a parent"
            assert block.parent in known, "a parent is not here, not even as a ghost"
            children.setdefault(block.parent, []).append(block)
        if block.state != GHOST and not block.orphan:
            assert block.depth == (0 if block.parent is None else block.parent.depth + 1), "depth is wrong"
    for block in blocks:
        listed = list(block.children())
        assert len(set(listed)) == len(listed)
        assert set(listed) == set(children.get(block, ())), "the child list is not the children"
        if block.state == GHOST:
            assert listed or block.guards, "a ghost that nobody refers to"
        assert block.orphan == _is_orphan(block), "orphan is wrong"


def _is_orphan(block: Block) -> bool:
    above = block.parent
    return above is not None and (above.state == GHOST or above.orphan)


def _direct_guards(core: CacheCore, blocks: list[Block]) -> Counter[Block]:
    direct: Counter[Block] = Counter(block for block in blocks if block.state == PENDING)
    direct.update(lease.blocks[-1] for lease in core.leases.leases.values() if lease.blocks)
    direct.update(block for hold in core.leases.holds.values() for block in hold.deepest.values())
    direct.update(block for pin in core.pins.pins.values() for block in pin.deepest)
    direct.update(core.verifies.in_flight.values())
    direct.update(demote_sources(core, core.residency))
    for block in core.verifies.in_flight.values():
        assert block.state == RESIDENT
        assert block.verifying
    assert sum(block.verifying for block in blocks) == len(core.verifies.in_flight)
    return direct


def _check_guards(blocks: list[Block], direct: Counter[Block]) -> None:
    assert direct.keys() <= set(blocks), "something is guarded that is not here"
    for block in blocks:
        guards = direct[block] + sum(child.guards > 0 for child in block.children())
        assert block.guards == guards, f"guards are {block.guards}, reasons {guards}"


def _check_ledgers(core: CacheCore, blocks: list[Block]) -> None:
    entries: dict[int, Counter[Block]] = {id(ledger): Counter() for ledger in core.residency.ledgers}
    for lease in core.leases.leases.values():
        if lease.blocks:
            entries[id(lease.engine.ledger)][lease.blocks[-1]] += 1
    for hold in core.leases.holds.values():
        entries[id(hold.ledger)].update(hold.deepest.values())
    for pin in core.pins.pins.values():
        entries[id(core.pins.ledger)].update(pin.deepest)
    for ledger in core.residency.ledgers:
        _check_ledger(ledger, entries[id(ledger)])
    parties = [*core.engines.by_name.values(), *core.engines.peers.values()]
    registered = {id(party.ledger) for party in parties}
    for ledger in core.residency.ledgers:
        alive = id(ledger) in registered or ledger is core.pins.ledger
        assert alive != ledger.closed, "a ledger outlives its owner, or the reverse"


def _check_ledger(ledger: Ledger, direct: Counter[Block]) -> None:
    covered: set[Block] = set()
    for block in direct:
        at: Block | None = block
        while at is not None and at not in covered:
            covered.add(at)
            at = at.parent
    expected = Counter(direct)
    expected.update(block.parent for block in covered if block.parent is not None)
    assert ledger.counts == dict(expected), "a ledger is not what its leases cover"
    charged = sum(block.shape.slot_bytes for block in covered if block.extent is not None)
    assert ledger.bytes == charged, "a ledger's bytes do not add up"


def _check_tier(tier: TierMap, blocks: list[Block], quarantined: list[Place]) -> None:
    used: dict[tuple[int, int], str] = {}

    def use(extent: Extent, index: int, state: str) -> int:
        place = (extent.number, index)
        assert place not in used, f"slot {place} is {used[place]} and {state}"
        used[place] = state
        assert tier.extents[extent.number] is extent
        assert extent.pool is not None
        return extent.pool.slot_bytes

    total: Counter[str] = Counter()
    for block in blocks:
        if block.extent is not None and block.pool().tier is tier:
            state = "resident" if block.state == RESIDENT else "reserved"
            size_bytes = use(block.extent, block.index, state)
            total[state] += size_bytes
            total["replica"] += size_bytes if block.replica else 0
            assert block.extent.blocks[block.index] is block, "a slot holds another block"
            assert block.pool().slot_bytes == block.shape.slot_bytes
    for extent, index in quarantined:
        total["quarantined"] += use(extent, index, "quarantined")
    for slot, (extent, index) in tier.draining.items():
        total["draining"] += use(extent, index, "draining")
        assert extent.slots[index] == slot
    for state in ("replica", "resident", "reserved", "quarantined", "draining"):
        assert getattr(tier, f"{state}_bytes") == total[state], f"{state} bytes do not add up"
    del total["replica"]
    assert tier.blocks == list(used.values()).count("resident")
    assert sum(total.values()) <= tier.allocated_bytes <= tier.spec.capacity_bytes
    _check_extents(tier, used)


def _check_extents(tier: TierMap, used: dict[tuple[int, int], str]) -> None:
    assert len(tier.extents) == tier.allocated_bytes // tier.spec.extent_bytes
    free_extents = {extent.number for extent in tier.extents if extent.pool is None}
    assert set(tier.free_extents) == free_extents
    assert len(tier.free_extents) == len(free_extents)
    for extent in tier.extents:
        taken = {index: state for (number, index), state in used.items() if number == extent.number}
        pool = extent.pool
        if pool is None:
            assert not taken
            assert extent.guarded == extent.stuck == extent.draining == 0
            assert not extent.listed
            continue
        assert pool.extents.get(extent.number) is extent
        assert taken, "an extent without any block was not given back"
        assert set(extent.free) | taken.keys() == set(range(pool.slots_per_extent))
        assert len(extent.free) + len(taken) == pool.slots_per_extent, "a slot is both free and used"
        states = Counter(taken.values())
        assert extent.stuck == states["quarantined"] + states["draining"]
        assert extent.draining == states["draining"]
        here = [block for block in extent.blocks if block is not None]
        assert len(here) == states["resident"] + states["reserved"]
        assert extent.guarded == sum(block.guards > 0 for block in here)
    for pool in tier.pools.values():
        _check_pool(pool)


def _check_pool(pool: Pool) -> None:
    assert pool.free == sum(len(extent.free) for extent in pool.extents.values())
    assert pool.draining == sum(extent.draining for extent in pool.extents.values())
    listed = [extent.number for extent in pool.extents.values() if extent.listed]
    assert sorted(pool.open) == sorted(listed), "the heap of open extents is not the open extents"
    for extent in pool.extents.values():
        assert extent.listed or not extent.free, "free slots that nobody would find"
        assert extent.pool is pool


def _check_candidates(residency: Residency, blocks: list[Block]) -> None:
    for block in blocks:
        definition = block.state == RESIDENT and block.first_child is None and not block.guards
        assert block.candidate == definition, "a candidate that is none, or the reverse"
    for tier in residency.tiers.values():
        for pool in tier.pools.values():
            here = [block for block in blocks if block.extent is not None and block.pool() is pool]
            orphans = {block for block in here if block.candidate and block.orphan}
            assert pool.orphans.keys() == orphans
            candidates = [block for block in here if block.candidate and not block.orphan]
            for policy, is_replica in ((pool.policy, False), (pool.replicas, True)):
                residents = {b.id for b in here if b.state == RESIDENT and b.replica == is_replica}
                policy.check({b.id: b.last for b in candidates if b.replica == is_replica}, residents)


def _check_reservations(core: CacheCore) -> None:
    live, expired = core.reservations.live, core.reservations.expired
    assert not live.keys() & expired.keys()
    everything = {**live, **expired}
    pending: list[Block] = []
    for id, entry in everything.items():
        assert entry.id == id
        assert (id in live) == bool(entry.pending)
        assert (id in expired) == bool(entry.quarantined)
        assert entry.engine.reservations.get(id) is entry
        assert core.engines.by_name.get(entry.engine.name) is entry.engine, "a dead engine's reservation"
        pending += entry.pending.values()
    shards = core.residency.shards.values()
    everywhere = [block for shard in shards for block in shard.values() if block.state == PENDING]
    assert len(pending) == len(set(pending)), "two reservations share a block"
    stored = {block for block in everywhere if block.pull is None}
    assert set(pending) == stored, "a pending block that nobody stores or pulls, or somebody twice"
    for engine in core.engines.by_name.values():
        own = engine.reservations.values()
        slot_bytes = engine.shape.slot_bytes
        assert engine.reservations.items() <= everything.items()
        assert engine.reserved_bytes == slot_bytes * sum(len(entry.pending) for entry in own)
        assert engine.quarantined_bytes == slot_bytes * sum(len(entry.quarantined) for entry in own)


def _check_waiting(core: CacheCore) -> None:
    waiting: dict[Block, set[int]] = {}
    for id, lease in core.leases.leases.items():
        assert lease.id == id
        assert 0 <= lease.ready <= len(lease.blocks)
        assert lease.told <= lease.ready
        if lease.valid:
            assert all(block.state == RESIDENT for block in lease.blocks[: lease.ready])
            assert all(block.parent is above for above, block in pairwise(lease.blocks))
        if lease.ready < len(lease.blocks):
            assert lease.valid, "a lease waits though it is void"
            assert lease.blocks[lease.ready].pull is not None, "a lease waits for what nobody brings"
            for block in lease.blocks[lease.ready :]:
                assert block.state == RESIDENT or block.pull is not None
            waiting.setdefault(lease.blocks[lease.ready], set()).add(id)
    told = {block: set(leases) for block, leases in core.leases.waiting.items()}
    assert told == waiting, "a lease would not be told what arrives, or one that does not wait would"
    assert core.leases.coming.items() <= core.leases.holds.items()
    assert all(hold.deepest for hold in core.leases.holds.values()), "a hold on nothing"
    assert not core.leases.readies, "instructions were made and not handed out"


def _check_bounds(core: CacheCore) -> None:
    config: CoreConfig = core.config
    core.replies.check({"", *core.engines.by_name, *core.engines.peers})
    assert len(core.engines.by_name) <= config.max_engines
    assert len(core.leases.holds) <= config.max_holds
    assert len(core.pins) <= config.max_pins
    assert len(core.engines.peers) <= config.max_peers
    assert len(core.leases.expired) <= config.max_expired_leases
    assert len(core.verifies.in_flight) <= config.max_verifies
    parties = {**core.engines.by_name, **core.engines.peers}
    for lease in core.leases.leases.values():
        assert parties.get(lease.engine.name) is lease.engine, "a dead engine's lease"
    for name, party in parties.items():
        assert party.name == name
        leases = {id: lease for id, lease in core.leases.leases.items() if lease.engine is party}
        assert party.leases == leases
        assert len(leases) <= config.max_leases_per_engine
    tier = next(iter(core.residency.tiers.values()))
    for peer in core.engines.peers.values():
        assert peer.ledger.bytes <= tier.allocated_bytes * config.max_given_fraction
