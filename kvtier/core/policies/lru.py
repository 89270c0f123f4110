"""Least recently used first."""

from __future__ import annotations

from collections.abc import Mapping, Set

from kvtier.core.policies.heap import LazyHeap
from kvtier.types import BlockId


class LruPolicy:
    """The candidate whose latest access is oldest goes first; nothing is remembered of any other block."""

    def __init__(self) -> None:
        self._heap = LazyHeap()

    def came(self, block: BlockId) -> None:
        """Nothing: only candidates count."""

    def add(self, block: BlockId, accessed: int, uses: int, depth: int, after: BlockId | None = None) -> None:
        """Enter a candidate."""
        self._heap.put(block, accessed)

    def withdraw(self, block: BlockId) -> None:
        """Nothing is remembered of it."""
        self._heap.discard(block)

    def forget(self, block: BlockId) -> None:
        """Nothing is remembered of it."""
        self._heap.discard(block)

    def victim(self) -> BlockId | None:
        """The candidate with the oldest access."""
        return self._heap.peek()

    @staticmethod
    def turn(block: BlockId, accessed: int, uses: int, depth: int) -> float:
        """The latest access."""
        return accessed

    def check(self, candidates: Mapping[BlockId, int], residents: Set[BlockId]) -> None:
        """See `Policy.check`."""
        assert self._heap.keys == dict(candidates), "policy and core disagree on the candidates"
        self._heap.check()
