"""What a block is worth decides: the prefill time that it saves, by how often prompts come by it.

``worth = (1 + reuse) * (1 + depth / DEPTH_OF_DOUBLE)``, where

reuse
    How often a prompt has come by the block: it was read, stored again though it was here, or continued anew
    (a block with many descendants, past ones included). Each earlier life here counts as one, of as many
    blocks as are resident. What came back once is far more likely to come back than what never did.
depth
    Computing a block takes its share of the model's weights, and attention to all that is before it, which
    grows with the depth: the deeper, the more prefill time is saved.

Against that stand the bytes and the time of loading. Both are the same for all blocks of one instance, since
there is one for each tier and slot size: worth by byte and worth are the same order. Whether loading pays at
all is weighed for each lookup, against the time that its engine takes to compute.

**Aging.** Worth halves with each *lifetime* that a block is not accessed, and what is worth least goes first.
Since all halve alike, the order of two blocks does not change while time passes: it is that of
``accessed + lifetime * log2(worth)``. So a heap will do, and each doubling of its worth gives a block one
more lifetime. Its length is measured: how long blocks of worth 1 stay, in accesses, smoothed over what has
gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Set
from math import log2
from typing import Final

from kvtier.core.policies.heap import LazyHeap
from kvtier.types import BlockId

DEPTH_OF_DOUBLE: Final = 1024
"""Blocks before one that takes twice as long to compute as the first: some 16k to 32k tokens, where models of
1 to 10 billion parameters spend as much on attention as on weights."""
MAX_REUSE: Final = 15
"""More counts as this, so that what was hot once is gone after a few lifetimes."""
_WEIGHT: Final = 1 / 64


class WorthPolicy:
    """The candidate of least worth goes first.

    O(log n) amortised a call. Memory is O(resident blocks): of what is gone, at most as many blocks are
    remembered as are resident.
    """

    def __init__(self) -> None:
        self._due = LazyHeap()
        self._known: dict[BlockId, tuple[int, float]] = {}
        """Of candidates: the latest access, and the binary logarithm of their worth."""
        self._earlier: dict[BlockId, int] = {}
        """How many earlier lives resident blocks had."""
        self._gone: OrderedDict[BlockId, int] = OrderedDict()
        self._resident = 0
        self._now = 0
        """The latest access of any block."""
        self._lifetime: float | None = None
        self._victim: BlockId | None = None

    # ---- what the core says

    def came(self, block: BlockId) -> None:
        """One that was here before has not lost all of its worth."""
        self._resident += 1
        if (earlier := self._gone.pop(block, 0)) > 0:
            self._earlier[block] = earlier

    def add(self, block: BlockId, accessed: int, uses: int, depth: int, after: BlockId | None = None) -> None:
        """Enter a candidate, with the worth that it has now."""
        if accessed > self._now:
            self._now = accessed
        worth = self._worth(block, uses, depth)
        self._known[block] = (accessed, worth)
        self._due.put(block, accessed + self._lifetimes(worth))

    def withdraw(self, block: BlockId) -> None:
        """Its worth is determined anew when it is a candidate again."""
        del self._known[block]
        self._due.discard(block)

    def forget(self, block: BlockId) -> None:
        """Remember that it was here."""
        self._due.discard(block)
        self._resident -= 1
        earlier = self._earlier.pop(block, 0)
        known = self._known.pop(block, None)
        if known is not None and block == self._victim:
            self._measure(*known)
        self._gone[block] = min(earlier + 1, MAX_REUSE)
        while len(self._gone) > self._resident:
            self._gone.popitem(last=False)

    # ---- worth and time

    def _worth(self, block: BlockId, uses: int, depth: int) -> float:
        reuse = min(uses + self._earlier.get(block, 0), MAX_REUSE)
        return log2((1 + reuse) * (1 + depth / DEPTH_OF_DOUBLE))

    def _lifetimes(self, worth: float) -> float:
        """So much later is it due, in accesses. Before anything has gone, a lifetime is all time so far."""
        return worth * (self._now if self._lifetime is None else self._lifetime)

    def _measure(self, accessed: int, worth: float) -> None:
        """One goes that was last accessed then: a block of worth 1 would have gone the earlier."""
        lifetime = (self._now - accessed) / (1 + worth)
        if self._lifetime is None:
            self._lifetime = lifetime
        else:
            self._lifetime += _WEIGHT * (lifetime - self._lifetime)

    # ---- who goes

    def victim(self) -> BlockId | None:
        """The candidate that is due first."""
        self._victim = self._due.peek()
        return self._victim

    def turn(self, block: BlockId, accessed: int, uses: int, depth: int) -> float:
        """When it is due, in accesses."""
        return accessed + self._lifetimes(self._worth(block, uses, depth))

    def check(self, candidates: Mapping[BlockId, int], residents: Set[BlockId]) -> None:
        """See `Policy.check`."""
        known = {block: accessed for block, (accessed, _) in self._known.items()}
        assert known == dict(candidates), "policy and core disagree on the candidates"
        assert self._due.keys.keys() == candidates.keys(), "a candidate would never go"
        assert all(self._due.keys[block] >= accessed for block, accessed in candidates.items())
        self._due.check()
        assert self._earlier.keys() <= residents, "an earlier life is remembered of what is gone"
        assert self._resident == len(residents)
        assert len(self._gone) <= self._resident, "more is remembered than is here"
        assert not self._gone.keys() & residents, "what is here counts as gone"
