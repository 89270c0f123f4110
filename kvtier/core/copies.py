"""Device memory as the core sees it: second copies of what the top tier has, which engines may read there.

A copy lives no longer than its block in the top tier: nothing is found, fetched, published or recovered here,
and to lose all of it loses nothing. So no block is here that is not there, and a prefix here has no holes but
where something was just found to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.core.blocks import RESIDENT, Block
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.core.lower import LowerTier
from kvtier.core.residency import Residency
from kvtier.interfaces import Policy


class Copies(LowerTier):
    """The copies in device memory. What was read in the top tier is as young here (`LowerTier._victim`)."""

    def __init__(
        self, spec: TierSpec, policy: Callable[[], Policy], config: CoreConfig, top: Residency
    ) -> None:
        super().__init__(spec, policy, config, [top], publishing=None, demotes=False)

    def lend(self, run: Sequence[Block]) -> list[Block | None]:
        """The copy of each of these blocks of the top tier that has one, guarded until it is unguarded."""
        copies = [self._copy(block) for block in run]
        for copy in copies:
            if copy is not None:
                self.guard(copy)
                self.counts.fetched_blocks += 1
        return copies

    def left_top(self, block: Block) -> None:
        """The top tier loses this block, and so its copy goes. (One that is being written: `Promotes`.)"""
        copy = self._copy(block)
        if copy is not None:
            self.dropped_blocks.evicted_blocks += 1
            self.free(self.lose(copy))

    def _copy(self, block: Block) -> Block | None:
        copy = self.get(block.id.key, block.id.shard)
        return None if copy is None or copy.state != RESIDENT else copy
