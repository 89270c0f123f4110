"""Simulated arenas: real bytes that say whose they are, and who may write and who writes each page."""

from __future__ import annotations

import struct
from typing import Final

from kvtier.hashing import checksum
from kvtier.testing.fleet_world import World
from kvtier.testing.simulated_node import PageId, pages_of
from kvtier.types import PAGE_SIZE_BYTES, BlockId, Slot

_TAG: Final = struct.Struct("<32sHHIQ16x")
_REPEATS: Final = PAGE_SIZE_BYTES // _TAG.size

Version = tuple[int, int]
"""The engine that wrote a block, and a number for each of its stores: no two wrote the same bytes."""
Owner = tuple[str, int]
"""``("store", reservation)`` or ``("pull", pull)``."""


def make_page(block: BlockId, number: int, version: Version) -> bytes:
    """What page `number` of a block holds where `version` of it was written."""
    return _TAG.pack(block.key, block.shard, number, *version) * _REPEATS


def make_block(block: BlockId, pages: int, version: Version) -> list[bytes]:
    """All pages of a block."""
    return [make_page(block, number, version) for number in range(pages)]


def version_of(block: BlockId, content: bytes) -> Version | None:
    """Whose bytes these are: None where they are not one whole version of exactly this block."""
    key, shard, _, writer, count = _TAG.unpack_from(content)
    pages = len(content) // PAGE_SIZE_BYTES
    if BlockId(key, shard) != block or content != b"".join(
        make_block(BlockId(*block), pages, (writer, count))
    ):
        return None
    return writer, count


def checksum_of(pages: list[bytes]) -> bytes:
    """The checksum that travels with a block."""
    return checksum(memoryview(b"".join(pages)))


class Arena:
    """The memory of one daemon; engines and peers may reach it longer than the daemon lives.

    Attributes
    ----------
    owners
        Who was given each page to write, as the core's messages say. What is in it may change nothing else.
    running
        Copies that may write a page at any time.
    flipped
        Pages in which a bit has flipped since they were written.
    """

    def __init__(self, world: World, number: int, size_bytes: int) -> None:
        self.world = world
        self.number = number
        self.memory = bytearray(size_bytes)
        self.pages = size_bytes // PAGE_SIZE_BYTES
        self.owners: dict[PageId, Owner] = {}
        self.running: dict[PageId, object] = {}
        self.flipped: dict[PageId, None] = {}

    def read(self, slot: Slot) -> bytes:
        """The slot's bytes as they are."""
        return bytes(self.memory[slot.offset_bytes : slot.offset_bytes + slot.size_bytes])

    def read_page(self, page: PageId) -> bytes:
        """One page."""
        return bytes(self.memory[page[1] * PAGE_SIZE_BYTES : (page[1] + 1) * PAGE_SIZE_BYTES])

    def own(self, slot: Slot, owner: Owner) -> None:
        """The core gives a slot to a writer; nobody else may have it or still write it."""
        for page in pages_of(slot):
            if page in self.owners:
                self.world.violate(f"page {page} of {self.owners[page]} was given to {owner}")
            if page in self.running:
                self.world.violate(f"page {page} was given to {owner} while a copy into it still runs")
            self.owners[page] = owner

    def disown(self, slot: Slot, owner: Owner) -> None:
        """The core takes it that `owner` writes the slot no more."""
        for page in pages_of(slot):
            if self.owners.get(page) == owner:
                del self.owners[page]
                if page in self.running:
                    self.world.violate(f"{owner} ended while its copy into page {page} still runs")

    def begin(self, slot: Slot, writer: object) -> None:
        """From now on `writer` may write the slot at any time."""
        for page in pages_of(slot):
            if page in self.running:
                self.world.violate(f"two copies run into page {page}")
            if page not in self.owners:
                self.world.violate(f"a copy into page {page} begins, which nobody was given")
            self.running[page] = writer

    def end(self, slot: Slot, writer: object) -> None:
        """The copy has completed, or whoever did it is proven dead."""
        for page in pages_of(slot):
            if self.running.get(page) is writer:
                del self.running[page]

    def write(self, page: PageId, content: bytes, writer: object) -> None:
        """One page of a copy."""
        if self.running.get(page) is not writer:
            self.world.violate(f"a copy writes page {page}, which is not its own")
        self.memory[page[1] * PAGE_SIZE_BYTES : (page[1] + 1) * PAGE_SIZE_BYTES] = content
        self.flipped.pop(page, None)

    def flip(self, page: PageId) -> None:
        """A bit flips."""
        self.memory[page[1] * PAGE_SIZE_BYTES + self.world.rng.randrange(PAGE_SIZE_BYTES)] ^= 1
        self.flipped[page] = None

    def is_flipped(self, slot: Slot) -> bool:
        """Whether wrong bytes of a slot are the machine's fault."""
        return any(page in self.flipped for page in pages_of(slot))

    def bury(self, writer_of: object) -> None:
        """Proof of death: none of the copies of this process goes on."""
        self.running = {
            page: w for page, w in self.running.items() if getattr(w, "process", w) is not writer_of
        }
