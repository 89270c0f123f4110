"""Which candidates might be copied down a tier, in the order in which they would be evicted."""

from __future__ import annotations

from collections.abc import Mapping, Set

from kvtier.core.policies.heap import LazyHeap
from kvtier.interfaces import Policy
from kvtier.types import BlockId


class Coldest:
    """A policy that remembers besides which blocks wait to be looked at for a demote, by their turns.

    What demotes pass over is looked at again when it is a candidate anew, or was read, that is after its next
    access.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._waiting = LazyHeap()
        self.came = policy.came
        self.victim = policy.victim
        self.turn = policy.turn

    def add(self, block: BlockId, accessed: int, uses: int, depth: int, after: BlockId | None = None) -> None:
        """As `Policy`; the candidate waits."""
        self.policy.add(block, accessed, uses, depth, after)
        self._waiting.put(block, self.policy.turn(block, accessed, uses, depth))

    def withdraw(self, block: BlockId) -> None:
        """As `Policy`."""
        self.policy.withdraw(block)
        self._waiting.discard(block)

    def forget(self, block: BlockId) -> None:
        """As `Policy`."""
        self.policy.forget(block)
        self._waiting.discard(block)

    def check(self, candidates: Mapping[BlockId, int], residents: Set[BlockId]) -> None:
        """See `Policy.check`."""
        self.policy.check(candidates, residents)
        self._waiting.check()
        assert self._waiting.keys.keys() <= residents, "what is gone waits for a demote"

    # ---- for demotes

    def wait(self, block: BlockId, accessed: int, uses: int, depth: int) -> None:
        """Look at this block, which is resident."""
        self._waiting.put(block, self.policy.turn(block, accessed, uses, depth))

    def peek(self) -> BlockId | None:
        """The one whose turn comes first."""
        return self._waiting.peek()

    def take(self) -> BlockId | None:
        """The same, which does not wait any longer."""
        block = self._waiting.peek()
        if block is not None:
            self._waiting.discard(block)
        return block
