"""What a block is worth decides: the prefill time that it saves, by how often prompts come by it.

``worth = (1 + reuse) * (1 + depth / DEPTH_OF_DOUBLE)``, where

reuse
    How often a prompt has come by the block: it was read, stored again though it was here, or continued anew (a
    block with many descendants, past ones included); also in an earlier life here, of which a bounded number
    is remembered. A block that came back once is far more likely to come back than one that never did.
depth
    Computing a block takes its share of the model's weights, and attention to all that is before it, which
    grows with the depth: the deeper, the more prefill time is saved.

Against that stand the bytes and the time of loading. Both are the same for all blocks of one instance, since
there is one for each tier and slot size: worth by byte and worth are the same order. Whether loading pays at all
is weighed for each lookup, against the time that its engine takes to compute.

**Aging.** Worth halves with each *lifetime* that a block is not accessed: the time that a block of worth 1 now
stays, measured in accesses. What is worth least by then goes first. Since all halve alike, their order does not
change while time passes: it is that of ``accessed + lifetime * log2(worth)``, so that a heap will do, and each
doubling of its worth gives a block one more lifetime.
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


class WorthPolicy:
    """The candidate of least worth goes first.

    O(log n) amortised a call. Memory is O(resident blocks): of what is gone, the reuse of at most as many
    blocks is remembered as are resident.
    """

    def __init__(self) -> None:
        self._due = LazyHeap()
        self._reuse: dict[BlockId, int] = {}
        """Of candidates."""
        self._earlier: dict[BlockId, int] = {}
        """Reuse of resident blocks in earlier lives."""
        self._gone: OrderedDict[BlockId, int] = OrderedDict()
        self._resident = 0
        self._now = 0
        """The latest access of any block."""
        self._passed = 0.0
        """Everything that was due by then has gone: what is accessed at this number and worth 1 goes next."""

    # ---- what the core says

    def came(self, block: BlockId) -> None:
        """One that was here before has not lost all of its worth."""
        self._resident += 1
        if (earlier := self._gone.pop(block, 0)) > 0:
            self._earlier[block] = earlier

    def add(
        self, block: BlockId, accessed: int, uses: int, depth: int, after: BlockId | None = None
    ) -> None:
        """Enter a candidate, with the worth that it has now."""
        if accessed > self._now:
            self._now = accessed
        self._reuse[block] = min(uses + self._earlier.get(block, 0), MAX_REUSE)
        self._due.put(block, self.turn(block, accessed, uses, depth))

    def withdraw(self, block: BlockId) -> None:
        """Its worth is determined anew when it is a candidate again."""
        del self._reuse[block]
        self._due.discard(block)

    def forget(self, block: BlockId) -> None:
        """Remember how often prompts came by it, its coming included."""
        self._due.discard(block)
        self._resident -= 1
        reuse = self._reuse.pop(block, 0)
        self._earlier.pop(block, None)
        self._gone[block] = min(reuse + 1, MAX_REUSE)
        while len(self._gone) > self._resident:
            self._gone.popitem(last=False)

    # ---- who goes

    def victim(self) -> BlockId | None:
        """The candidate that is due first."""
        block = self._due.peek()
        if block is not None:
            self._passed = max(self._passed, self._due.keys[block])
        return block

    def turn(self, block: BlockId, accessed: int, uses: int, depth: int) -> float:
        """When it is due, in accesses."""
        reuse = min(uses + self._earlier.get(block, 0), MAX_REUSE)
        if not reuse and not depth:
            return accessed
        lifetime = max(0.0, self._now - self._passed)
        return accessed + lifetime * log2((1 + reuse) * (1 + depth / DEPTH_OF_DOUBLE))

    def check(self, candidates: Mapping[BlockId, int], residents: Set[BlockId]) -> None:
        """See `Policy.check`."""
        assert self._due.keys.keys() == candidates.keys(), "policy and core disagree on the candidates"
        assert self._reuse.keys() == candidates.keys()
        assert all(self._due.keys[block] >= accessed for block, accessed in candidates.items())
        self._due.check()
        assert self._earlier.keys() <= residents, "an earlier life is remembered of what is gone"
        assert self._resident == len(residents)
        assert len(self._gone) <= self._resident, "more is remembered than is here"
        assert not self._gone.keys() & residents, "what is here counts as gone"
