"""Which slot each block lies in, and which block gives its slot to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.core.blocks import RESIDENT, Block
from kvtier.core.config import TierSpec
from kvtier.core.extents import Extent, Place, Pool, TierMap
from kvtier.core.forest import Forest
from kvtier.core.messages import Publish
from kvtier.core.publishing import Publishing
from kvtier.core.stats import Counters
from kvtier.interfaces import Policy
from kvtier.types import Key, Slot, TierKind


class Residency(Forest):
    """All blocks of a tier; the only writer of `Block`, `Extent` and `Pool`."""

    def __init__(
        self,
        specs: Sequence[TierSpec],
        policy: Callable[[], Policy],
        counters: Counters,
        *,
        publishing: Publishing | None = None,
        demotes: bool = False,
    ) -> None:
        super().__init__(specs, policy, publishing=publishing, demotes=demotes)
        self.drops: dict[TierKind, list[Slot]] = {}
        self._counters = counters

    # ---- slots

    def free(self, place: Place) -> None:
        """The slot holds nothing that anybody needs: reuse it, at once or when its bytes are deleted."""
        extent, index = place
        pool = extent.pool
        assert pool is not None
        tier = pool.tier
        if tier.spec.frees_at_once:
            pool.release(extent, index)
            return
        slot = pool.slot(extent, index)
        tier.draining[slot] = place
        tier.draining_bytes += pool.slot_bytes
        pool.draining += 1
        extent.draining += 1
        extent.stuck += 1
        self.drops.setdefault(tier.spec.kind, []).append(slot)

    def dropped(self, kind: TierKind, slots: Sequence[Slot]) -> None:
        """The bytes of these slots are deleted."""
        tier = self.tiers[kind]
        for slot in slots:
            extent, index = tier.draining.pop(slot)
            pool = extent.pool
            assert pool is not None
            tier.draining_bytes -= pool.slot_bytes
            pool.draining -= 1
            extent.draining -= 1
            extent.stuck -= 1
            pool.release(extent, index)

    def quarantine(self, place: Place) -> None:
        """Nobody knows whether the slot is still written: keep it from everybody."""
        extent, _ = place
        assert extent.pool is not None
        extent.stuck += 1
        extent.pool.tier.quarantined_bytes += extent.pool.slot_bytes

    def unquarantine(self, place: Place) -> None:
        """Proof that nobody writes the slot any more."""
        extent, _ = place
        assert extent.pool is not None
        extent.stuck -= 1
        extent.pool.tier.quarantined_bytes -= extent.pool.slot_bytes
        self.free(place)

    def changes(self) -> list[Publish]:
        """What others have to be told since the last call, of all tiers that publish together."""
        return [] if self.publishing is None else self.publishing.take()

    # ---- eviction

    def evict(self, block: Block) -> None:
        """Drop an unguarded leaf."""
        assert block.candidate
        self._counters.evicted_blocks += 1
        self.free(self.lose(block))

    def evict_below(self, top: Block) -> int:
        """Drop an unguarded block and all that continue it, deepest first; returns how many."""
        order = [top]
        for block in order:
            order.extend(block.children())
        for block in reversed(order):
            self.evict(block)
        return len(order)

    def evict_named(self, keys: Sequence[Key]) -> tuple[int, int]:
        """Drop these blocks and all that continue them; guarded ones stay. Returns dropped and kept."""
        evicted = kept = 0
        stack = [b for key in keys for shard in self.shards if (b := self.get(key, shard)) is not None]
        seen: set[Block] = set()
        while stack:
            block = stack.pop()
            if block in seen:
                continue
            seen.add(block)
            if block.state == RESIDENT and not block.guards:
                evicted += self.evict_below(block)
            else:
                kept += block.state == RESIDENT
                stack.extend(block.children())
        return evicted, kept

    def make_room(self, tier: TierMap, pool: Pool, wanted: int) -> None:
        """Get `wanted` slots of this size free or draining, as far as guards allow.

        In this order: a free extent; orphans of this size; replicas of this size; then whichever was used
        longest ago, this size's victim or a whole extent of another size, so that a size nobody uses any
        more gives way.
        """
        others: list[Extent] | None = None
        coming = pool.draining
        if not tier.spec.frees_at_once and pool.free + coming < wanted:
            coming += tier.draining_extents(pool) * pool.slots_per_extent
        while pool.free + coming < wanted:
            if pool.take_extent():
                continue
            if pool.orphans:
                coming += self._evict_for(tier, next(iter(pool.orphans)))
                continue
            if (replica := self._victim(pool.replicas)) is not None:
                coming += self._evict_for(tier, replica)
                continue
            victim = self._victim(pool.policy)
            if others is None:
                others = tier.coldest_first(pool)
            while others and others[-1].pool in (None, pool):
                others.pop()
            if others and (victim is None or others[-1].last < victim.last):
                coming += self._take_over(tier, pool, others.pop())
            elif victim is not None:
                coming += self._evict_for(tier, victim)
            else:
                return

    def _victim(self, policy: Policy) -> Block | None:
        id = policy.victim()
        return None if id is None else self.shards[id.shard][id.key]

    def _evict_for(self, tier: TierMap, victim: Block) -> int:
        self.evict(victim)
        return 0 if tier.spec.frees_at_once else 1

    def _take_over(self, tier: TierMap, pool: Pool, extent: Extent) -> int:
        for block in list(extent.blocks):
            if block is not None and block.extent is extent:
                self.evict_below(block)
        return 0 if tier.spec.frees_at_once else pool.slots_per_extent
