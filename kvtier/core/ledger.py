"""Who pays for what is protected.

A ledger counts, for one engine or for all pins, the bytes of every block that its leases protect:
the leased blocks and all their ancestors, each once however many leases share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.core.blocks import Block


class Ledger:
    """Counted like `Block.guards`: direct entries plus the number of children that are entered.

    `closed` once its owner is gone; holds may be charged to it until they run out.
    """

    __slots__ = ("bytes", "closed", "counts")

    def __init__(self) -> None:
        self.counts: dict[Block, int] = {}
        self.bytes = 0
        self.closed = False

    def add(self, block: Block) -> None:
        """Enter the prefix that ends in `block`; a walk up to the first ancestor that is entered."""
        counts = self.counts
        slots = 0
        at: Block | None = block
        while at is not None:
            if at in counts:
                counts[at] += 1
                break
            counts[at] = 1
            if at.extent is not None:
                slots += 1
            at = at.parent
        self.bytes += slots * block.shape.slot_bytes  # a chain has one layout

    def remove(self, block: Block) -> None:
        """Undo one `add`."""
        counts = self.counts
        slots = 0
        at: Block | None = block
        while at is not None:
            count = counts[at]
            if count != 1:
                counts[at] = count - 1
                break
            del counts[at]
            if at.extent is not None:
                slots += 1
            at = at.parent
        self.bytes -= slots * block.shape.slot_bytes

    def cost(self, block: Block) -> int:
        """Bytes that `add` would charge."""
        total = 0
        at: Block | None = block
        while at is not None and at not in self.counts:
            if at.extent is not None:
                total += at.shape.slot_bytes
            at = at.parent
        return total

    def cut(self, block: Block) -> None:
        """`block` is about to lose its slot and its parent."""
        if block in self.counts:
            self.bytes -= block.shape.slot_bytes
            if block.parent is not None:
                self.remove(block.parent)

    def join(self, block: Block) -> None:
        """`block`, a ghost until now, has got a slot and a parent."""
        if block in self.counts:
            self.bytes += block.shape.slot_bytes
            if block.parent is not None:
                self.add(block.parent)
