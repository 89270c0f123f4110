"""S3-FIFO (Yang et al., SOSP 2023): what is not used soon goes soon, so that a scan flushes nothing.

Three queues. What comes enters the *small* one; if it was used by the time it is the oldest there, it moves
to *main*, else it goes and leaves its name in the *ghost* queue; what comes back while its name is there
enters main at once. From main the oldest goes, unless it was used since it was last there: then it begins
anew, at most `MAX_CREDIT` times for so many uses.

Adapted to prompts, where only leaves may go, and each leaf uncovers the block before it:

- The queues hold candidates, that is the ends of prompts, and the share of small is counted in them.
- A block that is uncovered in main takes the place of the one that continued it, with the uses that were
  spent there. So a prompt goes in one piece, up to where others have used it, and not one block a round.
- In small a block's place is that of its latest access: one number for a whole prompt.
- One use is enough to move to main: prompts come back far more rarely than pages of the web.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Set
from typing import Final

from kvtier.core.policies.heap import LazyHeap
from kvtier.types import BlockId

SMALL_SHARE: Final = 0.1
"""Of the candidates; where more are in small, the next victim comes from there."""
MAX_CREDIT: Final = 3
_MAIN: Final = 1 << 60
"""More than any access number."""


class S3FifoPolicy:
    """One small, main and ghost queue.

    Each use of a block moves it once at most, and a move costs O(log n). Memory is O(resident blocks): a name
    for each block in main, and at most as many ghosts as blocks are resident.
    """

    def __init__(self) -> None:
        self._small = LazyHeap()
        self._main = LazyHeap()
        self._uses: dict[BlockId, int] = {}
        self._promoted: dict[BlockId, tuple[int, int]] = {}
        """Resident blocks that belong in main: place, and the uses that were spent."""
        self._ghosts: OrderedDict[BlockId, None] = OrderedDict()
        self._resident = 0
        self._last_place = 0

    # ---- what the core says

    def came(self, block: BlockId) -> None:
        """One that is known as a ghost belongs in main."""
        self._resident += 1
        if block in self._ghosts:
            del self._ghosts[block]
            self._promote(block, 0)

    def add(self, block: BlockId, accessed: int, uses: int, depth: int, after: BlockId | None = None) -> None:
        """Enter a candidate into its queue; one that is uncovered takes the place of `after` in main."""
        self._uses[block] = uses
        state = self._promoted.get(block)
        if state is None and after is not None and (state := self._promoted.get(after)) is not None:
            self._promoted[block] = state
        if state is None:
            self._small.put(block, accessed)
        else:
            self._main.put(block, state[0])

    def withdraw(self, block: BlockId) -> None:
        """It keeps its place in main."""
        del self._uses[block]
        self._small.discard(block)
        self._main.discard(block)

    def forget(self, block: BlockId) -> None:
        """It becomes a ghost, if it was not in main."""
        self._uses.pop(block, None)
        self._resident -= 1
        if self._promoted.pop(block, None) is not None:
            self._main.discard(block)
        else:
            self._small.discard(block)
            self._ghosts[block] = None
        while len(self._ghosts) > self._resident:
            self._ghosts.popitem(last=False)

    # ---- who goes

    def victim(self) -> BlockId | None:
        """See the module."""
        while (small := self._small.peek()) is not None and self._is_small_full():
            uses = self._uses[small]
            if not uses:
                return small
            self._small.discard(small)
            self._promote(small, uses)
            self._main.put(small, self._last_place)
        while (block := self._main.peek()) is not None:
            uses, spent = self._uses[block], self._promoted[block][1]
            credit = min(uses - spent, MAX_CREDIT)
            if credit <= 0:
                return block
            self._promote(block, uses - credit + 1)
            self._main.put(block, self._last_place)
        return None

    def _is_small_full(self) -> bool:
        return len(self._small) > SMALL_SHARE * len(self._uses) or not self._main

    def _promote(self, block: BlockId, spent: int) -> None:
        self._last_place += 1
        self._promoted[block] = (self._last_place, spent)

    def turn(self, block: BlockId, accessed: int, uses: int, depth: int) -> float:
        """Small before main, each by the latest access."""
        return accessed + (_MAIN if uses or block in self._promoted else 0)

    def check(self, candidates: Mapping[BlockId, int], residents: Set[BlockId]) -> None:
        """See `Policy.check`."""
        in_main = candidates.keys() & self._promoted.keys()
        assert self._uses.keys() == candidates.keys(), "policy and core disagree on the candidates"
        assert self._small.keys.keys() == candidates.keys() - in_main, "a candidate is in the wrong queue"
        assert all(self._small.keys[block] == candidates[block] for block in self._small.keys)
        assert self._main.keys == {block: self._promoted[block][0] for block in in_main}
        self._small.check()
        self._main.check()
        assert self._promoted.keys() <= residents, "a place in main is kept for what is gone"
        assert self._resident == len(residents)
        assert len(self._ghosts) <= self._resident, "there are more ghosts than blocks"
        assert not self._ghosts.keys() & residents, "a ghost that is here"
