"""Blocks in the order of a key, of which any may be taken out."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from kvtier.types import BlockId

_SLACK: Final = 64


class LazyHeap:
    """A heap of (key, block).

    Entries of blocks that were taken out stay as garbage until they surface or are half of the heap,
    whichever comes first: O(log n) amortised, memory O(blocks).
    """

    __slots__ = ("_heap", "keys")

    def __init__(self) -> None:
        self.keys: dict[BlockId, float] = {}
        self._heap: list[tuple[float, BlockId]] = []

    def __len__(self) -> int:
        return len(self.keys)

    def put(self, block: BlockId, key: float) -> None:
        """Enter a block, or give it another key."""
        self.keys[block] = key
        heappush(self._heap, (key, block))
        if len(self._heap) > 2 * len(self.keys) + _SLACK:
            self._compact()

    def discard(self, block: BlockId) -> None:
        """Take a block out, if it is in."""
        if self.keys.pop(block, None) is not None and len(self._heap) > 2 * len(self.keys) + _SLACK:
            self._compact()

    def peek(self) -> BlockId | None:
        """The block with the smallest key."""
        heap = self._heap
        keys = self.keys
        while heap:
            key, block = heap[0]
            if keys.get(block) == key:
                return block
            heappop(heap)
        return None

    def _compact(self) -> None:
        self._heap = [(key, block) for block, key in self.keys.items()]
        heapify(self._heap)

    def check(self) -> None:
        """Assert that every block would be found, and that garbage is bounded."""
        assert {(key, block) for block, key in self.keys.items()} <= set(self._heap)
        assert len(self._heap) <= 2 * len(self.keys) + _SLACK, "the heap is mostly garbage"
