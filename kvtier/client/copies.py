"""Paged copies between slots and the engine's pages, and the checksums of slots.

Both sides are arrays of bytes with strides, so that one numpy assignment copies whole runs of blocks over
all layers: numpy then moves one layer's block (or a run of them) a memmove, without the GIL. (Elements
of dtype void would be as fast, but numpy counts elements, not bytes, when it decides to give up the GIL.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import xxhash

from kvtier.client.device import DeviceMapping
from kvtier.client.mapping import ArenaMapping, Bytes, memory_at
from kvtier.types import Layout

LOAD_GROUP_BYTES: Final = 4 << 20
"""A load checks its budget after each group: small against the budget, large against the cost of a step."""
STORE_GROUP_BYTES: Final = 1 << 20
"""A store hashes each group right after its copy, while the bytes are in the core's own cache."""
BEGIN_BEFORE_BYTES: Final = 16 << 20
"""The call that ends a copy is announced when so much, 1-2 ms, is left to copy: a node that was silent
for 5 ms answers 1.5 ms later than one that is awake."""


SlotMemory = ArenaMapping | DeviceMapping


class Copier(Protocol):
    """Moves blocks between slots and pages. Returns when the bytes are there. Thread-safe.

    `offsets` and `ids` are checked by the caller and equally long; what the slots lie in stays mapped.

    Attributes
    ----------
    device
        Kind of device that the pages lie on, ``cpu`` or ``cuda``; device memory that slots lie in is alike.
    """

    device: str
    load_group_bytes: int
    store_group_bytes: int

    def to_pages(self, memory: SlotMemory, offsets: Sequence[int], ids: Sequence[int]) -> None:
        """Slots at `offsets` -> blocks `ids`."""
        ...

    def to_slots(self, arena: ArenaMapping, offsets: Sequence[int], ids: Sequence[int]) -> None:
        """Blocks `ids` -> slots at `offsets`."""
        ...


class Band:
    """Layers that lie at equal distances: one array ``[layers, num_blocks, layer_block_bytes]``."""

    __slots__ = ("first", "last", "memory")

    def __init__(self, first: int, memory: Bytes) -> None:
        self.first = first
        self.last = first + memory.shape[0]
        self.memory = memory


class CpuCopier:
    """Pages in this process's memory."""

    device = "cpu"
    load_group_bytes = LOAD_GROUP_BYTES
    store_group_bytes = STORE_GROUP_BYTES

    def __init__(self, layout: Layout, bands: Sequence[Band]) -> None:
        self._layout = layout
        self._bands = bands

    def to_pages(self, memory: SlotMemory, offsets: Sequence[int], ids: Sequence[int]) -> None:
        """See `Copier`."""
        for begin, end in slot_runs(offsets, self._layout.slot_bytes):
            slots = self._slots(memory, offsets[begin], end - begin)
            first = ids[begin]
            chosen: slice | list[int] = slice(first, first + end - begin)
            if any(ids[i] != first + i - begin for i in range(begin + 1, end)):
                chosen = list(ids[begin:end])
            for band in self._bands:
                band.memory[:, chosen] = slots[band.first : band.last]

    def to_slots(self, arena: ArenaMapping, offsets: Sequence[int], ids: Sequence[int]) -> None:
        """See `Copier`."""
        # Here a list of ids would make numpy gather into a temporary copy first: block by block then.
        for begin, end in joint_runs(offsets, ids, self._layout.slot_bytes):
            slots = self._slots(arena, offsets[begin], end - begin)
            for band in self._bands:
                slots[band.first : band.last] = band.memory[:, ids[begin] : ids[begin] + end - begin]

    def _slots(self, memory: SlotMemory, offset: int, count: int) -> Bytes:
        """Consecutive slots as ``[layers, count, layer_block_bytes]``."""
        layout = self._layout
        shape = (layout.num_layers, count, layout.layer_block_bytes)
        return memory_at(memory.address + offset, shape, (layout.layer_block_bytes, layout.slot_bytes, 1))


def slot_runs(offsets: Sequence[int], slot_bytes: int) -> Iterator[tuple[int, int]]:
    """Maximal runs ``[begin, end)`` of slots that follow each other in memory."""
    begin = 0
    for i in range(1, len(offsets) + 1):
        if i == len(offsets) or offsets[i] != offsets[i - 1] + slot_bytes:
            yield begin, i
            begin = i


def joint_runs(offsets: Sequence[int], ids: Sequence[int], slot_bytes: int) -> Iterator[tuple[int, int]]:
    """Maximal runs in which both slots and blocks follow each other."""
    begin = 0
    for i in range(1, len(offsets) + 1):
        if i == len(offsets) or offsets[i] != offsets[i - 1] + slot_bytes or ids[i] != ids[i - 1] + 1:
            yield begin, i
            begin = i


def groups(count: int, block_bytes: int, group_bytes: int) -> Iterator[tuple[int, int]]:
    """``[begin, end)`` of blocks that make about `group_bytes`, at least one."""
    step = max(1, group_bytes // block_bytes)
    for begin in range(0, count, step):
        yield begin, min(count, begin + step)


def checksum(memory: SlotMemory, offset: int, block_bytes: int) -> bytes:
    """XXH3-128 of the block in a slot, big-endian; releases the GIL."""
    if isinstance(memory, DeviceMapping):
        return xxhash.xxh3_128_digest(memory.block(offset, block_bytes))
    return xxhash.xxh3_128_digest(memory.view[offset : offset + block_bytes])
