"""Which candidates might be copied down a tier, coldest first."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.core.policies.lru import LruPolicy
from kvtier.interfaces import Policy
from kvtier.types import BlockId


class Coldest:
    """A policy that remembers besides which blocks wait to be looked at for a demote.

    Eviction follows `policy` alone. Demotes follow the latest access, whatever the policy: what they pass
    over is looked at again when it is a candidate anew, or was read, that is after its next access.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._waiting = LruPolicy()

    def add(self, block: BlockId, accessed: int, uses: int, depth: int) -> None:
        """As `Policy`; the candidate waits."""
        self.policy.add(block, accessed, uses, depth)
        self._waiting.add(block, accessed, uses, depth)

    def withdraw(self, block: BlockId) -> None:
        """As `Policy`."""
        self.policy.withdraw(block)
        self._waiting.forget(block)

    def forget(self, block: BlockId) -> None:
        """As `Policy`."""
        self.policy.forget(block)
        self._waiting.forget(block)

    def victim(self) -> BlockId | None:
        """As `Policy`."""
        return self.policy.victim()

    def check(self, candidates: Mapping[BlockId, int]) -> None:
        """See `Policy.check`."""
        self.policy.check(candidates)
        self._waiting.check(self._waiting.candidates())

    # ---- for demotes

    def wait(self, block: BlockId, accessed: int) -> None:
        """Look at this block, which is resident."""
        self._waiting.forget(block)
        self._waiting.add(block, accessed, 0, 0)

    def peek(self) -> BlockId | None:
        """The coldest that waits."""
        return self._waiting.victim()

    def take(self) -> BlockId | None:
        """The same, which does not wait any longer."""
        block = self._waiting.victim()
        if block is not None:
            self._waiting.forget(block)
        return block
