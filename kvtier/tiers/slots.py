"""Slots of tiers that are one piece of memory: where each lies, and whether it is one."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import TierFault
from kvtier.types import PAGE_SIZE_BYTES, BlockRecord, Slot


def offset_of(slot: Slot, *, arena: int, allocated_bytes: int, extent_bytes: int) -> int:
    """Offset of a slot that lies inside one allocated extent of this arena; raises `TierFault`."""
    begin, size = slot.offset_bytes, slot.size_bytes
    if (
        slot.arena != arena
        or size <= 0
        or begin < 0
        or begin % PAGE_SIZE_BYTES
        or begin + size > allocated_bytes
        or begin // extent_bytes != slot.extent
        or (begin + size - 1) // extent_bytes != slot.extent
    ):
        raise TierFault(
            f"{slot} is no slot of arena {arena}, which has {allocated_bytes} bytes "
            f"in extents of {extent_bytes}"
        )
    return begin


def check_counts(
    slots: Sequence[Slot], records: Sequence[BlockRecord], buffers: Sequence[memoryview]
) -> None:
    """One record and one buffer for each slot, or `TierFault`."""
    if not len(slots) == len(records) == len(buffers):
        raise TierFault(f"{len(slots)} slots, {len(records)} records and {len(buffers)} buffers were given")


def bytes_of(slot: Slot, record: BlockRecord, buffer: memoryview) -> memoryview:
    """The part of a buffer that the block takes; `TierFault` where it does not fit both."""
    size_bytes = record.block_bytes
    if not 0 <= size_bytes <= min(slot.size_bytes, buffer.nbytes):
        raise TierFault(f"{size_bytes} bytes do not fit {slot} and a buffer of {buffer.nbytes} bytes")
    return buffer.cast("B")[:size_bytes]
