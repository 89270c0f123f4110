"""Least recently used first."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from kvtier.types import BlockId

_SLACK: Final = 64


class LruPolicy:
    """The candidate whose last access is oldest goes first.

    Every access gives its blocks one new stamp. Within an access ancestors need no later one: they
    become candidates only after what continues them has gone. The heap holds the stamp under which each
    candidate was entered; one that was touched since is entered again when its old stamp surfaces, so
    that touching costs no heap operation. Entries of former candidates stay as garbage until they
    surface or are half of the heap, whichever comes first: O(log n) amortised, memory O(candidates).
    """

    def __init__(self) -> None:
        self._accesses = 0
        self._last: dict[BlockId, int] = {}
        self._entered: dict[BlockId, int] = {}
        self._heap: list[tuple[int, BlockId]] = []

    def touch(self, blocks: Sequence[BlockId]) -> None:
        """One access to all of them."""
        self._accesses += 1
        self._last.update(dict.fromkeys(blocks, self._accesses))

    def add(self, block: BlockId) -> None:
        """`block` was touched before."""
        self._enter(block)
        self._compact()

    def withdraw(self, block: BlockId) -> None:
        """Its entry stays in the heap as garbage."""
        del self._entered[block]
        self._compact()

    def forget(self, block: BlockId) -> None:
        """Works for candidates and others."""
        self._last.pop(block, None)
        if self._entered.pop(block, None) is not None:
            self._compact()

    def victim(self) -> BlockId | None:
        """The candidate with the oldest access."""
        heap = self._heap
        while heap:
            stamp, block = heap[0]
            entered = self._entered.get(block)
            if entered == stamp and self._last[block] == stamp:
                return block
            heappop(heap)
            if entered == stamp:
                self._enter(block)
        return None

    def _enter(self, block: BlockId) -> None:
        stamp = self._last[block]
        self._entered[block] = stamp
        heappush(self._heap, (stamp, block))

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entered) + _SLACK:
            self._heap = [(stamp, block) for block, stamp in self._entered.items()]
            heapify(self._heap)

    def check(self, resident: set[BlockId], candidates: set[BlockId]) -> None:
        """Assert that exactly these blocks are known, and that garbage is bounded."""
        assert self._last.keys() == resident, "policy and core disagree on what is resident"
        assert self._entered.keys() == candidates, "policy and core disagree on the candidates"
        assert {(stamp, block) for block, stamp in self._entered.items()} <= set(self._heap)
        assert len(self._heap) <= 2 * len(self._entered) + _SLACK, "the heap is mostly garbage"
