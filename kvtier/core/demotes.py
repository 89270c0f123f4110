"""What is copied down a tier ahead of eviction, so that eviction only drops and a store never waits for it.

Chosen among the candidates of eviction, in the policy's order, while the upper tier is fuller than its
watermark. A block that goes down takes along what it continues, ancestors first, so that a prefix in the
lower tier has no holes. It stays where it was, too, until eviction takes it.

Tiers are a chain (dram, far, nvme): each one's blocks go to the next one alone, from where they lie, once it
is fuller than its own watermark. So each pair of tiers keeps the same rules, and none knows of a third; what
goes down too fast for the middle tier is evicted there without having reached the last one, as at the top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.core import messages as m
from kvtier.core.blocks import GHOST, RESIDENT, Block
from kvtier.core.config import CoreConfig
from kvtier.core.extents import Pool, TierMap
from kvtier.core.lower import LowerTier
from kvtier.core.residency import Residency
from kvtier.types import BlockId, BlockRecord

MAX_EXAMINED: Final = 256
"""Candidates that are looked at for one demote."""
RETRY_S: Final = 1.0
"""No demote begins for so long after one failed, or found no room; what is freed ends the second wait."""


@dataclass(slots=True, eq=False)
class DemoteEntry:
    """A demote that runs: ``sources[i]`` is guarded and goes to ``targets[i]``, which is pending.

    `lost` are positions whose source was lost meanwhile, so that nobody knows what was copied.
    """

    id: int
    sources: list[Block]
    targets: list[Block]
    lost: set[int] = field(default_factory=set)


class Demotes:
    """All demotes from one tier to the one below, bounded in number and bytes."""

    def __init__(self, config: CoreConfig, upper: Residency, lower: LowerTier) -> None:
        self._config = config
        self.upper = upper
        self.lower = lower
        self.running: dict[int, DemoteEntry] = {}
        self._tier: TierMap = next(iter(upper.tiers.values()))
        self._failed_until_s = 0.0
        self._full_until_s = 0.0

    # ---- begin

    def start(self, first_id: int, now_s: float) -> list[m.Demote]:
        """As many as there may be now."""
        started: list[m.Demote] = []
        while self._is_wanted(now_s):
            entry = self._begin(first_id + len(started), now_s)
            if entry is None:
                break
            self.running[entry.id] = entry
            started.append(self._order(entry))
        return started

    def _is_wanted(self, now_s: float) -> bool:
        tier, lower = self._tier, self.lower
        return (
            len(self.running) < self._config.max_demotes
            and not lower.is_down
            and not lower.is_recovering
            and now_s >= self._failed_until_s
            and now_s >= self._full_until_s
            and tier.used_bytes() > tier.allocated_bytes * self._config.demote_high_fraction
        )

    def _begin(self, id: int, now_s: float) -> DemoteEntry | None:
        pool = self._coldest_pool()
        if pool is None:
            return None
        leaves, sources = self._choose(pool)
        if sources:
            shape = self.lower.shape(sources[0].shape)
            target = self.lower.map.pool(shape.slot_bytes)
            self._make_room(target, sources)
            room = min(len(sources), target.free)
            if not room:
                self._full_until_s = now_s + RETRY_S
            del sources[room:]
        for leaf, count in leaves:
            if count > len(sources):
                self._wait(leaf)
        if not sources:
            return None
        return DemoteEntry(id, sources, self._admit(sources, target))

    def _coldest_pool(self) -> Pool | None:
        best: Pool | None = None
        best_last = 0
        for pool in self._tier.pools.values():
            id = None if pool.coldest is None else pool.coldest.peek()
            if id is not None:
                last = self._block(id).last
                if best is None or last < best_last:
                    best, best_last = pool, last
        return best

    def _choose(self, pool: Pool) -> tuple[list[tuple[Block, int]], list[Block]]:
        """Each candidate that was looked at, with how many blocks it needs; and the blocks themselves."""
        assert pool.coldest is not None
        most = max(1, self._config.demote_batch_bytes // pool.slot_bytes)
        leaves: list[tuple[Block, int]] = []
        chosen: dict[Block, None] = {}
        for _ in range(MAX_EXAMINED):
            id = pool.coldest.take() if len(chosen) < most else None
            if id is None:
                break
            leaf = self._block(id)
            chosen.update(dict.fromkeys(self._path(leaf, chosen)))
            leaves.append((leaf, len(chosen)))
        return leaves, list(chosen)[:most]

    def _path(self, leaf: Block, chosen: dict[Block, None]) -> list[Block]:
        """What has to be copied of the prefix that ends in `leaf`, first block first."""
        if self.lower.shape(leaf.shape).slot_bytes > self.lower.map.spec.extent_bytes:
            return []
        path: list[Block] = []
        at: Block | None = leaf
        while at is not None and at not in chosen:
            if at.state != RESIDENT:
                return []  # a writer of it still runs
            twin = self.lower.get(at.id.key, at.id.shard)
            if twin is not None:
                kin = twin.first_child if twin.state == GHOST else twin
                if kin is not None and kin.shape.fingerprint != at.shape.fingerprint:
                    return []
                if twin.state != GHOST and not twin.orphan:
                    break  # there, or on its way
            if path or self._passes(at):
                if twin is None or twin.state == GHOST:
                    path.append(at)
            elif at.passed == at.last:
                break  # from here on upwards nothing passed, and nothing of it was used since
            else:
                at.passed = at.last
            at = at.parent
        path.reverse()
        return path

    def _passes(self, block: Block) -> bool:
        """Admission: used often enough, the store included, and worth what goes for it.

        What other nodes have comes from there.
        """
        if block.replica or block.uses + 1 < self._config.admit_after_uses:
            return False
        return not self._config.admit_by_worth or self.lower.is_worth_more(block)

    def _make_room(self, pool: Pool, sources: Sequence[Block]) -> None:
        """Free as many slots, without eating what the sources continue."""
        lower = self.lower
        twins = [self._twin(block.parent) for block in sources if block.parent is not None]
        kept = [twin for twin in twins if twin is not None and twin.state != GHOST]
        for twin in kept:
            lower.guard(twin)
        lower.make_room(lower.map, pool, len(sources))
        for twin in kept:
            lower.unguard(twin)

    def _admit(self, sources: Sequence[Block], pool: Pool) -> list[Block]:
        targets: list[Block] = []
        for source, place in zip(sources, pool.allocate(len(sources)), strict=True):
            parent = None if source.parent is None else self._twin(source.parent)
            assert (parent is None) == (source.parent is None), "a prefix goes down with holes"
            target = self.lower.admit(source.id, parent, self.lower.shape(source.shape), place)
            self.lower.renew(target, source.last)
            target.uses = source.uses
            target.continued = source.continued
            self.upper.guard(source)
            targets.append(target)
        return targets

    def _order(self, entry: DemoteEntry) -> m.Demote:
        records = [
            BlockRecord(
                source.id,
                None if source.parent is None else source.parent.id.key,
                source.shape.fingerprint,
                source.shape.block_bytes,
                source.checksum,
            )
            for source in entry.sources
        ]
        return m.Demote(
            entry.id,
            self._tier.spec.kind,
            [source.slot() for source in entry.sources],
            self.lower.kind,
            [target.slot() for target in entry.targets],
            records,
        )

    def _block(self, id: BlockId) -> Block:
        return self.upper.shards[id.shard][id.key]

    def _twin(self, block: Block) -> Block | None:
        return self.lower.get(block.id.key, block.id.shard)

    @staticmethod
    def _wait(leaf: Block) -> None:
        """It is looked at (again) when its turn comes."""
        if leaf.state == RESIDENT and not leaf.orphan and not leaf.replica:
            coldest = leaf.pool().coldest
            assert coldest is not None
            coldest.wait(leaf.id, leaf.last, leaf.reuse(), leaf.depth)

    # ---- what comes of it

    def ended(self, event: m.Demoted, now_s: float) -> list[Block]:
        """Nothing is read or written under it any more; returns the sources that were found to be corrupt.

        Targets that were not written give their slots back only now.
        """
        entry = self.running.pop(event.demote)
        self.room_made()
        assert all(0 <= i < len(entry.sources) for i in (*event.written, *event.corrupt))
        written = set(event.written) - entry.lost - set(event.corrupt)
        lower = self.lower
        for index in sorted(written):
            target = entry.targets[index]
            lower.commit(target, entry.sources[index].checksum)
            lower.unguard(target)
        for index in reversed(range(len(entry.targets))):
            if index not in written:
                target = entry.targets[index]
                lower.unguard(target)
                lower.free(lower.lose(target))
        for source in reversed(entry.sources):
            self.upper.unguard(source)
        lower.counts.demoted_blocks += len(written)
        if event.fault:
            lower.counts.failed_demotes += 1
            self._failed_until_s = now_s + RETRY_S
        return [entry.sources[i] for i in event.corrupt if i not in entry.lost]

    def block_lost(self, block: Block) -> None:
        """The upper tier has lost a block, whose slot may hold anything from now on."""
        for entry in self.running.values():
            for index, source in enumerate(entry.sources):
                if source is block:
                    entry.lost.add(index)

    def used(self, block: Block) -> None:
        """A prefix was read that ends in `block`, which need not be a leaf: it may have passed just now."""
        if self._config.admit_after_uses > 1 or self._config.admit_by_worth:
            self._wait(block)

    def room_made(self) -> None:
        """Slots of the lower tier have become free."""
        self._full_until_s = 0.0

    def back(self) -> None:
        """The lower tier works again."""
        self._failed_until_s = self._full_until_s = 0.0
