"""What others are told of this node's blocks: each in the fastest tier that it can be had from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core.blocks import RESIDENT, Block
from kvtier.core.messages import Publish
from kvtier.types import BlockId, TierKind

if TYPE_CHECKING:
    from kvtier.core.forest import Forest

Changes = dict[TierKind, dict[BlockId, None]]


class Publishing:
    """Changes since the last `take`; what comes and goes in between is not told.

    Attributes
    ----------
    forests
        Of all tiers, fastest first.
    published
        Blocks that others believe to be here.
    """

    def __init__(self) -> None:
        self.forests: list[Forest] = []
        self.published = 0
        self.added: Changes = {}
        self.removed: Changes = {}

    def show(self, forest: Forest, block: Block) -> None:
        """A block of one tier can be had from now on."""
        if len(self.forests) > 1:
            if self._faster(forest, block.id):
                return
            below = self._slower(forest, block.id)
            if below is not None:
                self._remove(below)
        self._add(block)

    def hide(self, forest: Forest, block: Block) -> None:
        """It cannot be had from this tier any more: it goes, or no prompt reaches it."""
        if len(self.forests) > 1:
            if self._faster(forest, block.id):
                return
            below = self._slower(forest, block.id)
            if below is not None:
                self._add(below)
        self._remove(block)

    def take(self) -> list[Publish]:
        """All changes; removals first where a block may be in both, having moved from tier to tier."""
        if not self.added and not self.removed:
            return []
        added, removed = self.added, self.removed
        self.added, self.removed = {}, {}
        kinds = sorted(added.keys() | removed.keys())
        if len(self.forests) > 1:
            told = [Publish(kind, [], list(removed.get(kind, ()))) for kind in kinds]
            told += [Publish(kind, list(added.get(kind, ())), []) for kind in kinds]
        else:
            told = [Publish(kind, list(added.get(kind, ())), list(removed.get(kind, ()))) for kind in kinds]
        return [change for change in told if change.added or change.removed]

    def _faster(self, forest: Forest, id: BlockId) -> bool:
        for other in self.forests:
            if other is forest:
                return False
            if _shown(other, id) is not None:
                return True
        return False

    def _slower(self, forest: Forest, id: BlockId) -> Block | None:
        begin = self.forests.index(forest) + 1
        return next((found for its in self.forests[begin:] if (found := _shown(its, id)) is not None), None)

    def _add(self, block: Block) -> None:
        self.published += 1
        _change(block, self.added, self.removed)

    def _remove(self, block: Block) -> None:
        self.published -= 1
        _change(block, self.removed, self.added)


def _shown(forest: Forest, id: BlockId) -> Block | None:
    block = forest.get(id.key, id.shard)
    return None if block is None or block.state != RESIDENT or block.orphan else block


def _change(block: Block, to: Changes, undone: Changes) -> None:
    """Enter a change, or take its opposite back where nobody has been told of that yet."""
    kind = block.pool().tier.spec.kind
    if block.id in undone.get(kind, ()):
        del undone[kind][block.id]
    else:
        to.setdefault(kind, {})[block.id] = None
