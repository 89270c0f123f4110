"""Invariants of what runs between tiers and nodes: pulls, fetches, demotes, and what is published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from kvtier.core.blocks import GHOST, PENDING, RESIDENT, Block
from kvtier.core.demotes import Demotes
from kvtier.core.lower import MAX_SHAPES, LowerTier
from kvtier.core.promotes import MAX_WAITING
from kvtier.core.pulls import PullEntry
from kvtier.core.rates import MAX_FAILURES, MAX_SOURCES, Source
from kvtier.core.residency import Residency
from kvtier.types import BlockId, TierKind

if TYPE_CHECKING:
    from kvtier.core.cache import CacheCore


def blocks_of(residency: Residency) -> list[Block]:
    """All blocks and ghosts of a tier."""
    return [block for shard in residency.shards.values() for block in shard.values()]


def demote_sources(core: CacheCore, residency: Residency) -> Iterable[Block]:
    """What demotes guard in this tier, once for each."""
    return [
        source
        for demotes in core.copying
        if demotes.upper is residency
        for entry in demotes.running.values()
        for source in entry.sources
    ]


def direct_guards_below(core: CacheCore, blocks: list[Block]) -> Counter[Block]:
    """Direct reasons to stay in a lower tier: to be written, read by a fetch, read by a demote."""
    here = set(blocks)
    direct = Counter(block for block in blocks if block.state == PENDING)
    for entry in core.pulls.running.values():
        direct.update(block for block in entry.below if block in here)
    for demotes in core.demotes:
        for demote in demotes.running.values():
            direct.update(block for block in demote.sources if block in here)
    for lease in core.leases.leases.values():
        direct.update(block for block in lease.copies if block in here)
    return direct


def check_pulls(core: CacheCore, blocks: list[Block]) -> None:
    """What each pull and fetch may still write is its own, and all of them keep within their bounds."""
    pulls, config = core.pulls, core.config
    tier = next(iter(core.residency.tiers.values()))
    filling: Counter[str] = Counter()
    running: Counter[str] = Counter()
    for id, entry in pulls.running.items():
        assert entry.id == id
        _check_pull(entry)
        for kind in _kinds(entry):
            running[kind] += 1
            filling[kind] += (len(entry.blocks) - entry.arrived + len(entry.late)) * entry.slot_bytes
    pulled = [block for block in blocks if block.pull is not None]
    owned = sum(len(entry.blocks) - entry.arrived for entry in pulls.running.values())
    assert len(pulled) == owned, "a block belongs to a pull that does not run"
    assert all(block.state == RESIDENT for block in blocks if block.replica)
    for peer in {entry.peer for entry in pulls.running.values()} - {""}:
        assert pulls.lent_to(peer) <= config.max_lends_per_peer
    for budget, kind in ((pulls.pulling, "pull"), (pulls.fetching, "fetch"), (pulls.lending, "lend")):
        assert budget.running == running[kind], "the pulls that run are not those that are counted"
        assert budget.filling_bytes == filling[kind], "bytes of pulls do not add up"
        assert budget.running <= budget.most
        assert budget.filling_bytes <= tier.allocated_bytes * budget.share
    assert pulls.pulling.most == config.max_pulls
    _check_sources(core)


def _kinds(entry: PullEntry) -> tuple[str, ...]:
    if entry.tier is None:
        assert not entry.peer, "a peer is lent what another node has to bring"
        return ("pull",)
    return ("fetch", "lend") if entry.peer else ("fetch",)


def _check_pull(entry: PullEntry) -> None:
    assert entry.blocks or entry.late
    assert not entry.late or entry.is_overdue
    assert not entry.is_overdue or len(entry.blocks) == entry.arrived
    rest = entry.blocks[entry.arrived :]
    assert all(block.pull is not entry for block in entry.blocks[: entry.arrived])
    for block in rest:
        assert block.state == PENDING, "a slot that a pull may still write is not its own"
        assert block.pull is entry, "a slot that a pull may still write is not its own"
    for above, block in pairwise(rest):
        assert block.parent is above, "a pull's blocks are no chain"
    wanted = 0 if entry.tier is None else len(entry.blocks) + len(entry.late)
    assert len(entry.below) == wanted, "a fetch guards other blocks than it reads"
    assert (entry.source is entry.tier.source) if entry.tier is not None else not entry.late


def _check_sources(core: CacheCore) -> None:
    pulls = core.pulls
    running: Counter[Source] = Counter()
    outstanding: Counter[Source] = Counter()
    by_place = pulls.sources.by_place
    for entry in pulls.running.values():
        source = entry.source
        running[source] += 1
        outstanding[source] += (len(entry.blocks) - entry.arrived + len(entry.late)) * entry.block_bytes
        assert entry.tier is not None or by_place.get((source.node, source.tier)) is source
    own = [tier.source for tier in core.lower]
    assert not set(own) & set(by_place.values()), "a tier counts as a peer's"
    for source in (*own, *by_place.values()):
        assert (source.running, source.outstanding_bytes) == (running[source], outstanding[source])
        assert source.s_per_byte > 0 <= source.round_trip_s
        assert 0 <= source.failures <= MAX_FAILURES
    assert len(by_place) <= MAX_SOURCES


def check_lower(core: CacheCore) -> None:
    """Each lower tier is below the one before it, and what is pending in it is what demotes write."""
    uppers: list[Residency] = [core.residency, *core.lower]
    assert [its.upper for its in core.demotes] == uppers[:-1]
    assert [its.lower for its in core.demotes] == core.lower
    for demotes in core.copying:
        _check_demotes(core, demotes)
        tier = demotes.lower
        assert not tier.unverified, "what every read verifies is to be scrubbed"
        assert not tier.ledgers
        assert len(tier._shapes) <= MAX_SHAPES
        for block in blocks_of(tier):
            assert not block.replica
            assert not block.verifying
            assert block.pull is None


def _check_demotes(core: CacheCore, demotes: Demotes) -> None:
    targets: list[Block] = []
    for id, entry in demotes.running.items():
        assert entry.id == id
        assert len(entry.sources) == len(entry.targets) > 0
        assert len(set(entry.sources)) == len(entry.sources)
        for index, (source, target) in enumerate(zip(entry.sources, entry.targets, strict=True)):
            assert source.id == target.id
            assert source.state == RESIDENT or index in entry.lost, "a source went while it is read"
            assert target.state == PENDING, "a slot that a demote may still write is not its own"
            _check_shape(demotes.lower, target)
        targets += entry.targets
    assert len(set(targets)) == len(targets), "two demotes write one block"
    pending = {block for block in blocks_of(demotes.lower) if block.state == PENDING}
    assert set(targets) == pending, "a pending block that no demote writes"
    assert len(demotes.running) <= core.config.max_demotes


def check_copies(core: CacheCore) -> None:
    """What lies in device memory lies in the top tier, too, with the same bytes, and leases protect both."""
    copies, promotes = core.copies, core.promotes
    if copies is None or promotes is None:
        assert not any(lease.copies for lease in core.leases.leases.values())
        return
    assert (promotes.upper, promotes.lower) == (core.residency, copies)
    for copy in blocks_of(copies):
        if copy.state == RESIDENT:
            block = core.residency.get(*copy.id)
            assert block is not None, "a copy outlives its block"
            assert block.state == RESIDENT, "a copy outlives its block"
            assert copy.checksum == block.checksum, "a copy of other bytes"
            assert copy.shape.fingerprint == block.shape.fingerprint
    assert all(block.state == RESIDENT for block in promotes.waiting), "what is gone waits for a promote"
    assert len(promotes.waiting) <= MAX_WAITING
    for lease in core.leases.leases.values():
        if lease.valid:
            read = lease.blocks[: lease.ready]
            assert {copy.id for copy in lease.copies} <= {block.id for block in read}
            assert all(copy.state == RESIDENT for copy in lease.copies), "a leased copy went"


def _check_shape(tier: LowerTier, target: Block) -> None:
    assert target.pool().slot_bytes == target.shape.slot_bytes
    assert target.shape.slot_bytes >= target.shape.block_bytes + tier.map.spec.header_bytes


def check_publishing(core: CacheCore) -> None:
    """Published is what a prompt can reach, once, and all changes were handed out."""
    publishing = core.residency.publishing
    assert (publishing is not None) == core.config.has_index
    if publishing is None:
        return
    assert publishing.forests == [core.residency, *core.lower]
    assert not publishing.added, "instructions were made and not handed out"
    assert not publishing.removed, "instructions were made and not handed out"
    places: dict[BlockId, TierKind] = {}
    for residency in publishing.forests:
        for shard in residency.shards.values():
            for block in shard.values():
                if block.state == RESIDENT and not block.orphan and block.id not in places:
                    places[block.id] = block.pool().tier.spec.kind
    assert publishing.published == len(places), "what is published is not what can be had here"
    assert all(block.state != GHOST or block.extent is None for block in blocks_of(core.residency))
