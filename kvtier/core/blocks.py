"""The record that the core keeps of each block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.types import BlockId, Slot

if TYPE_CHECKING:
    from kvtier.core.extents import Extent, Pool
    from kvtier.core.pulls import PullEntry

GHOST: Final = 0
PENDING: Final = 1
RESIDENT: Final = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """What the core needs of a layout."""

    fingerprint: bytes
    block_bytes: int
    slot_bytes: int


class Block:
    """One (key, shard).

    `extent` is None for ghosts; the last three links are the parent's child list. `pull` is what brings a
    pending block (None: an engine stores it, and every other block). `replica` ends where an engine of this
    node stores the same. `depth` counts the blocks before it in its prompt, `uses` how often it was read, or
    stored again though it was here, `continued` how often an engine stored a block behind it.
    """

    __slots__ = (
        "candidate",
        "checksum",
        "continued",
        "depth",
        "extent",
        "first_child",
        "guards",
        "id",
        "index",
        "last",
        "next",
        "orphan",
        "parent",
        "passed",
        "previous",
        "pull",
        "replica",
        "shape",
        "state",
        "uses",
        "verified",
        "verifying",
    )

    def __init__(self, id: BlockId, shape: Shape) -> None:
        self.id = id
        self.shape = shape
        self.state = GHOST
        self.extent: Extent | None = None
        self.index = 0
        self.checksum = b""
        self.guards = 0
        self.last = 0
        self.uses = 0
        self.continued = 0
        self.depth = 0
        self.candidate = False
        self.orphan = False
        self.verified = False
        self.verifying = False
        self.replica = False
        self.passed = -1
        self.pull: PullEntry | None = None
        self.parent: Block | None = None
        self.first_child: Block | None = None
        self.next: Block | None = None
        self.previous: Block | None = None

    def reuse(self) -> int:
        """How often a prompt has come by it: what `Policy.add` calls uses.

        Whoever reads it may also continue it, so the two do not add up. To be continued once is no reuse:
        that was the prompt that stored it.
        """
        again = self.continued - 1
        return again if again > self.uses else self.uses

    def pool(self) -> Pool:
        """The pool its slot belongs to."""
        assert self.extent is not None
        assert self.extent.pool is not None
        return self.extent.pool

    def slot(self) -> Slot:
        """Its slot."""
        assert self.extent is not None
        return self.pool().slot(self.extent, self.index)

    def children(self) -> Iterator[Block]:
        """Pending and resident children."""
        child = self.first_child
        while child is not None:
            following = child.next
            yield child
            child = following
