"""Where slots lie: a tier is divided into extents, each serving one slot size.

A *pool* is all that one tier has for one slot size. Free slots are handed out lowest offset first, so
that blocks stored together lie side by side and load as long runs. An extent whose slots are all free
goes back to the tier at once, for whichever size needs it next: no mix of layouts strands memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from kvtier.core.coldest import Coldest
from kvtier.core.config import TierSpec
from kvtier.interfaces import Policy
from kvtier.types import Slot

if TYPE_CHECKING:
    from kvtier.core.blocks import Block


class Extent:
    """A piece of a tier.

    Attributes
    ----------
    pool
        Whose size it serves; None while it is free.
    blocks
        The block in each slot, reserved or resident; None where free, quarantined or draining.
    free, is_sorted
        Heap of the free slots' numbers; whether it is known to be sorted too.
    guarded
        Blocks in it that must stay: leased, pinned, reserved, or ancestors of such.
    stuck, draining
        Slots in it that hold no block and yet are not free; those of them that wait for `Dropped`.
    last
        Access number of the latest access to any of its blocks.
    """

    __slots__ = (
        "blocks",
        "draining",
        "free",
        "guarded",
        "is_sorted",
        "last",
        "listed",
        "number",
        "pool",
        "slots",
        "stuck",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.pool: Pool | None = None
        self.blocks: list[Block | None] = []
        self.slots: list[Slot | None] = []
        self.free: list[int] = []
        self.is_sorted = True
        self.guarded = 0
        self.stuck = 0
        self.draining = 0
        self.last = 0
        self.listed = False


Place = tuple[Extent, int]
"""One slot as the core counts it: extent and number within it."""


class Pool:
    """The extents of one tier that serve one slot size, with their eviction policies.

    `policy` knows the candidates that this node has stored, `replicas` those that it has pulled. `coldest`
    knows which of the former might be demoted (None where there is no tier below).
    """

    def __init__(
        self, tier: TierMap, slot_bytes: int, policy: Policy, replicas: Policy, coldest: Coldest | None = None
    ) -> None:
        self.tier = tier
        self.slot_bytes = slot_bytes
        self.slots_per_extent = tier.spec.extent_bytes // slot_bytes
        self.coldest = coldest
        self.policy = policy if coldest is None else coldest
        self.replicas = replicas
        self.orphans: OrderedDict[Block, None] = OrderedDict()
        self.extents: dict[int, Extent] = {}
        self.free = 0
        self.draining = 0
        self.open: list[int] = []

    def take_extent(self) -> bool:
        """Serve one more extent, if the tier has a free one."""
        if not self.tier.free_extents:
            return False
        self._serve(self.tier.extents[heappop(self.tier.free_extents)])
        return True

    def claim(self, number: int, index: int) -> Place | None:
        """Take one slot out of turn, because of what is in it; None where it is not free."""
        extent = self.tier.extents[number]
        if extent.pool is None:
            self.tier.free_extents.remove(number)  # see `TierMap.order_free_extents`
            self._serve(extent)
        elif extent.pool is not self:
            return None
        free = extent.free
        if not extent.is_sorted:  # a sorted heap stays one while slots are claimed only
            free.sort()
            extent.is_sorted = True
        at = bisect_left(free, index)
        if at == len(free) or free[at] != index:
            return None
        del free[at]
        self.free -= 1
        return extent, index

    def _serve(self, extent: Extent) -> None:
        count = self.slots_per_extent
        extent.pool = self
        extent.blocks = [None] * count
        extent.slots = [None] * count
        extent.free = list(range(count))
        extent.is_sorted = True
        extent.last = 0
        self.extents[extent.number] = extent
        self.free += count
        self._list(extent)

    def allocate(self, count: int) -> list[Place]:
        """`count` free slots, lowest offsets first; there must be so many."""
        assert count <= self.free
        self.free -= count
        taken: list[Place] = []
        while len(taken) < count:
            extent = self.tier.extents[self.open[0]]
            if not extent.free:
                heappop(self.open)
                extent.listed = False
                continue
            extent.is_sorted = False
            while extent.free and len(taken) < count:
                taken.append((extent, heappop(extent.free)))
        return taken

    def release(self, extent: Extent, index: int) -> None:
        """The slot is free again; so is its extent if it was the last one used."""
        assert extent.blocks[index] is None
        heappush(extent.free, index)
        extent.is_sorted = False
        self.free += 1
        if len(extent.free) == self.slots_per_extent:
            self._return(extent)
        else:
            self._list(extent)

    def give_back(self) -> None:
        """Extents that were taken for what did not come after all are free again."""
        for extent in [self.tier.extents[number] for number in self.open]:
            if len(extent.free) == self.slots_per_extent:
                self._return(extent)

    def slot(self, extent: Extent, index: int) -> Slot:
        """The slot as the world outside knows it; made once for each slot of an extent."""
        slot = extent.slots[index]
        if slot is None:
            offset = extent.number * self.tier.spec.extent_bytes + index * self.slot_bytes
            slot = Slot(self.tier.spec.arena, extent.number, offset, self.slot_bytes)
            extent.slots[index] = slot
        return slot

    def _list(self, extent: Extent) -> None:
        if not extent.listed:
            extent.listed = True
            heappush(self.open, extent.number)

    def _return(self, extent: Extent) -> None:
        assert extent.guarded == extent.stuck == extent.draining == 0
        if extent.listed:
            self.open.remove(extent.number)
            heapify(self.open)
            extent.listed = False
        extent.pool = None
        extent.blocks = []
        extent.slots = []
        extent.free = []
        del self.extents[extent.number]
        self.free -= self.slots_per_extent
        heappush(self.tier.free_extents, extent.number)


class TierMap:
    """One tier: its extents, its pools, and the bytes in each state."""

    def __init__(self, spec: TierSpec, policy: Callable[[], Policy], *, demotes: bool = False) -> None:
        self.spec = spec
        self.demotes = demotes
        self.allocated_bytes = 0
        self.resident_bytes = 0
        self.reserved_bytes = 0
        self.quarantined_bytes = 0
        self.draining_bytes = 0
        self.replica_bytes = 0
        self.blocks = 0
        self.extents: list[Extent] = []
        self.free_extents: list[int] = []
        self.pools: dict[int, Pool] = {}
        self.draining: dict[Slot, Place] = {}
        self._policy = policy
        self.grow(spec.allocated_bytes)

    def order_free_extents(self) -> None:
        """Make them a heap again, after all `claim`s: to do it for each would take a square of time."""
        heapify(self.free_extents)

    def grow(self, allocated_bytes: int) -> None:
        """Slots may lie in so many bytes from now on."""
        assert self.allocated_bytes <= allocated_bytes <= self.spec.capacity_bytes
        self.allocated_bytes = allocated_bytes
        while (len(self.extents) + 1) * self.spec.extent_bytes <= allocated_bytes:
            heappush(self.free_extents, len(self.extents))
            self.extents.append(Extent(len(self.extents)))

    def pool(self, slot_bytes: int) -> Pool:
        """The pool of this slot size."""
        pool = self.pools.get(slot_bytes)
        if pool is None:
            policy = self._policy()
            coldest = Coldest(policy) if self.demotes else None
            pool = self.pools[slot_bytes] = Pool(self, slot_bytes, policy, self._policy(), coldest)
        return pool

    def used_bytes(self) -> int:
        """Bytes of slots that are not free."""
        return self.resident_bytes + self.reserved_bytes + self.quarantined_bytes + self.draining_bytes

    def claim(self, slot: Slot) -> Place | None:
        """Take this slot because of what is in it; None where it is none, or not free.

        Whoever names it has read that from a medium: nothing of it is believed.
        """
        number, size_bytes, extent_bytes = slot.extent, slot.size_bytes, self.spec.extent_bytes
        if slot.arena != self.spec.arena or not 0 <= number < len(self.extents):
            return None
        if not 0 < size_bytes <= extent_bytes:
            return None
        index, rest = divmod(slot.offset_bytes - number * extent_bytes, size_bytes)
        if rest or not 0 <= index < extent_bytes // size_bytes:
            return None
        return self.pool(size_bytes).claim(number, index)

    def prune(self) -> None:
        """Forget pools that serve nothing, so that layouts come and go without a trace."""
        for slot_bytes in [size for size, pool in self.pools.items() if not pool.extents]:
            del self.pools[slot_bytes]

    def coldest_first(self, pool: Pool) -> list[Extent]:
        """Extents of other sizes that could be taken over, the one last used longest ago at the end."""
        if len(self.pools) == 1:
            return []
        others = [
            extent
            for other in self.pools.values()
            if other is not pool
            for extent in other.extents.values()
            if not extent.guarded and not extent.stuck
        ]
        others.sort(key=lambda extent: extent.last, reverse=True)
        return others

    def draining_extents(self, pool: Pool) -> int:
        """Extents of other sizes that become free as soon as their slots are reported dropped."""
        return sum(
            1
            for other in self.pools.values()
            if other is not pool and other.draining
            for extent in other.extents.values()
            if extent.draining and extent.draining + len(extent.free) == other.slots_per_extent
        )
