"""Least recently used first."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from kvtier.types import BlockId

_SLACK: Final = 64


class LruPolicy:
    """The candidate whose latest access is oldest goes first.

    A heap of (access, block). Entries of former candidates stay as garbage until they surface or are
    half of the heap, whichever comes first: O(log n) amortised, memory O(candidates).
    """

    def __init__(self) -> None:
        self._accessed: dict[BlockId, int] = {}
        self._heap: list[tuple[int, BlockId]] = []

    def add(self, block: BlockId, accessed: int, uses: int, depth: int) -> None:
        """Enter a candidate."""
        self._accessed[block] = accessed
        heappush(self._heap, (accessed, block))
        self._compact()

    def withdraw(self, block: BlockId) -> None:
        """Its entry stays in the heap as garbage."""
        del self._accessed[block]
        self._compact()

    def forget(self, block: BlockId) -> None:
        """Nothing is remembered of blocks that are no candidates."""
        if self._accessed.pop(block, None) is not None:
            self._compact()

    def victim(self) -> BlockId | None:
        """The candidate with the oldest access."""
        heap = self._heap
        while heap:
            accessed, block = heap[0]
            if self._accessed.get(block) == accessed:
                return block
            heappop(heap)
        return None

    def candidates(self) -> Mapping[BlockId, int]:
        """All of them, with their latest accesses."""
        return self._accessed

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._accessed) + _SLACK:
            self._heap = [(accessed, block) for block, accessed in self._accessed.items()]
            heapify(self._heap)

    def check(self, candidates: Mapping[BlockId, int]) -> None:
        """Assert that exactly these blocks are known with these accesses, and that garbage is bounded."""
        assert self._accessed == dict(candidates), "policy and core disagree on the candidates"
        assert {(accessed, block) for block, accessed in candidates.items()} <= set(self._heap)
        assert len(self._heap) <= 2 * len(candidates) + _SLACK, "the heap is mostly garbage"
