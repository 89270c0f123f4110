"""Least recently used first."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from kvtier.types import BlockId

_SLACK: Final = 64


class LruPolicy:
    """The candidate whose last access is oldest goes first; within one access, the deepest.

    Every access of a block gives it a new stamp. The heap holds the stamp under which each candidate
    was entered; a candidate that was touched since is entered again when its old stamp surfaces, so
    that touching costs no heap operation. Stamps of former candidates stay as garbage until they
    surface or are half of the heap, whichever comes first: O(log n) amortised each, memory O(candidates).
    """

    def __init__(self) -> None:
        self._next_stamp = 0
        self._last: dict[BlockId, int] = {}
        self._entered: dict[BlockId, int] = {}
        self._owner: dict[int, BlockId] = {}
        self._heap: list[int] = []

    def touch(self, blocks: Sequence[BlockId]) -> None:
        """Ancestors come first in `blocks` and get the later stamps."""
        self._last.update(zip(reversed(blocks), count(self._next_stamp), strict=False))
        self._next_stamp += len(blocks)

    def add(self, block: BlockId) -> None:
        """`block` was touched before."""
        self._enter(block, self._last[block])
        self._compact()

    def withdraw(self, block: BlockId) -> None:
        """Its stamp stays in the heap without an owner."""
        del self._owner[self._entered.pop(block)]
        self._compact()

    def forget(self, block: BlockId) -> None:
        """Works for candidates and others."""
        entered = self._entered.pop(block, None)
        if entered is not None:
            del self._owner[entered]
            self._compact()
        self._last.pop(block, None)

    def victim(self) -> BlockId | None:
        """The candidate with the oldest access."""
        heap = self._heap
        while heap:
            stamp = heap[0]
            block = self._owner.get(stamp)
            if block is not None and self._last[block] == stamp:
                return block
            heappop(heap)
            if block is not None:
                del self._owner[stamp]
                self._enter(block, self._last[block])
        return None

    def _enter(self, block: BlockId, stamp: int) -> None:
        # A stamp that is still in the heap as garbage is taken over: its second copy is garbage then.
        self._entered[block] = stamp
        self._owner[stamp] = block
        heappush(self._heap, stamp)

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._owner) + _SLACK:
            self._heap = list(self._owner)
            heapify(self._heap)

    def check(self, resident: set[BlockId], candidates: set[BlockId]) -> None:
        """Assert that exactly these blocks are known, and that garbage is bounded."""
        assert self._last.keys() == resident, "policy and core disagree on what is resident"
        assert self._entered.keys() == candidates, "policy and core disagree on the candidates"
        assert self._owner == {stamp: block for block, stamp in self._entered.items()}
        assert self._owner.keys() <= set(self._heap)
        assert len(self._heap) <= 2 * len(self._owner) + _SLACK, "the heap is mostly garbage"
