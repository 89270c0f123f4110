"""What the file tier knows of its extents while it runs, and what it writes down of them.

An **epoch** lasts from one checkpoint to the next. Before anything in an extent changes for the first time
in an epoch, its page of the table is written with that epoch. So after a crash the catalogue of epoch *c* is
right for every extent whose page says an epoch below *c*, and the headers of the others are read:

1. epoch *c - 1*: a slot is written or dropped; the page says *c - 1*, or did already;
2. a checkpoint begins: epoch *c* from now on; extents with an operation under way are left out of it;
3. the rows of the others are copied, one extent after the other. What changes meanwhile is marked *c* first;
4. the catalogue is written with epoch *c*, into the area that the last one does not use;
5. a crash: extents marked *c*, and those left out, are scanned. All others are as in the catalogue.

A mark is not flushed before the change behind it: after a power cut either may be lost, and then the
catalogue names a slot that holds something else. It is read, found wrong, and dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np

from kvtier.errors import TierFault
from kvtier.tiers import file_format
from kvtier.tiers.file_format import COVERED_DTYPE, HEADER_BYTES, Catalogue, Rows, TableEntry
from kvtier.types import PAGE_SIZE_BYTES, BlockRecord, Slot


class Extent:
    """One extent of the tier.

    Attributes
    ----------
    slot_bytes
        0 while it serves nothing.
    epoch
        Of its page of the table; -1: to be written before anything else.
    rows
        The header of each slot that holds a block, zeros for the others.
    busy
        Operations under way that may change it.
    marking
        Writes its page of the table now.
    """

    __slots__ = ("busy", "epoch", "generation", "marking", "rows", "slot_bytes")

    def __init__(self) -> None:
        self.slot_bytes = 0
        self.generation = 0
        self.epoch = -1
        self.rows = bytearray()
        self.busy = 0
        self.marking: asyncio.Task[TierFault | None] | None = None

    def entry(self, epoch: int) -> TableEntry:
        """Its page of the table from this epoch on."""
        return TableEntry(self.slot_bytes, self.generation, epoch)

    def serve(self, slot_bytes: int) -> None:
        """Begin anew with another slot size: nothing that was in it counts any more."""
        self.slot_bytes = slot_bytes
        self.generation = (self.generation + 1) % 2**32
        self.epoch = -1
        self.rows = bytearray()

    def row(self, index: int) -> bytearray:
        """The header of slot `index`; empty or zeros where that holds no block."""
        return self.rows[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]

    def set_row(self, index: int, row: bytes | bytearray | None) -> None:
        """The slot `index` holds a block with this header, or none."""
        begin, end = index * HEADER_BYTES, (index + 1) * HEADER_BYTES
        if len(self.rows) < end:
            if row is None:
                return
            self.rows.extend(bytes(end - len(self.rows)))
        self.rows[begin:end] = row if row is not None else bytes(HEADER_BYTES)

    def set_rows(self, indices: Sequence[int], rows: Rows) -> None:
        """What was found after a start."""
        if len(indices):
            every = np.zeros((int(indices[-1]) + 1, HEADER_BYTES), np.uint8)
            every[np.asarray(indices)] = rows
            self.rows = bytearray(every.tobytes())

    def held_rows(self) -> Rows:
        """The headers of all slots that hold a block; a copy."""
        rows = np.frombuffer(bytes(self.rows), np.uint8).reshape(-1, HEADER_BYTES)
        return rows[rows[:, :4].any(axis=1)]


def found(number: int, extent: Extent, arena: int) -> Iterator[tuple[Slot, BlockRecord]]:
    """The blocks of an extent, with where they lie."""
    for offset_bytes, slot_bytes, record in file_format.unpack_places(extent.held_rows()):
        yield Slot(arena, number, offset_bytes, slot_bytes), record


def clean_rows(
    catalogue: Catalogue, extents: dict[int, TableEntry], extent_bytes: int
) -> dict[int, tuple[Sequence[int], Rows]]:
    """Numbers and headers of the slots in those of `extents` that have not changed since the catalogue."""
    known: dict[int, tuple[Sequence[int], Rows]] = {}
    ends = np.cumsum(catalogue.covered["rows"], dtype=np.int64)
    for covered, end in zip(catalogue.covered, ends.tolist(), strict=True):
        number = int(covered["extent"])
        entry = extents.get(number)
        rows = catalogue.rows[end - int(covered["rows"]) : end]
        if entry is None or entry.epoch >= catalogue.epoch or len(rows) != covered["rows"]:
            continue
        if (entry.slot_bytes, entry.generation) != (covered["slot_bytes"], covered["generation"]):
            continue
        places = file_format.places_of(
            rows, number * extent_bytes, extent_bytes, entry.slot_bytes, entry.generation
        )
        if places is not None:
            known[number] = places, rows
    return known


def catalogue_of(
    extents: Sequence[tuple[int, Extent]], area_bytes: int, epoch: int, counters: tuple[int, int, int, int]
) -> Catalogue:
    """A checkpoint of as many of these extents of a stripe as fit; `counters` as in `Catalogue`."""
    left = area_bytes - PAGE_SIZE_BYTES
    covered: list[tuple[int, int, int, int, int]] = []
    rows: list[Rows] = []
    for number, extent in extents:
        held = extent.held_rows()
        left -= COVERED_DTYPE.itemsize + held.nbytes
        if left < 0:
            break
        covered.append((number, extent.generation, extent.slot_bytes, len(held), 0))
        rows.append(held)
    every = np.concatenate([*rows, np.zeros((0, HEADER_BYTES), np.uint8)])
    return Catalogue(epoch, *counters, np.array(covered, COVERED_DTYPE), every)
