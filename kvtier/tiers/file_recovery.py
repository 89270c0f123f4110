"""What lies on a medium after a start: from the catalogue where it still holds, from the headers elsewhere.

A slot is written in one call, header first, while the process may be killed and the power may fail:

1. the old header is there, and nothing was written: the old block, whole;
2. the new header is there and not all of the block. Killed: the header's `position` is among the last
   `WINDOW_BYTES`, since no write is begun while an older one is that far behind (`Positions`), and behind
   all that had ended when the last checkpoint was written; so these slots alone are read and compared with
   their checksums (`checks`). Power cut: older ones may be torn too,
   and then are found wrong when they are read;
3. the old header is there and part of the new block: only after a power cut, or with a device that reorders.
   Found wrong when it is read.

A slot is dropped by writing zeros over its header, flushed before the drop is over, and before its next block
is written; so a dropped block never comes back. Two slots with the same block: the node was killed between
writing it anew and dropping the old one. The younger one counts, the other is dropped here.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvtier.tiers import file_extents, file_format, file_runs
from kvtier.tiers.file_extents import Extent
from kvtier.tiers.file_format import HEADER_BYTES, ROW_DTYPE, Catalogue, Rows, TableEntry
from kvtier.tiers.file_medium import Medium
from kvtier.tiers.file_runs import RUN_BYTES, Move
from kvtier.tiers.file_threads import WINDOW_BYTES, Job, Scratch
from kvtier.types import PAGE_SIZE_BYTES, BlockRecord, Slot, whole_pages

_WHOLE_SLOT_BYTES: Final = 32 << 10
"""Extents of slots up to this size are read as a whole: faster than many single pages."""
_CHUNK_BYTES: Final = 1 << 20


@dataclass(slots=True)
class Recovery:
    """One start; `scans`, then `checks` are jobs for threads, `drop_doubles` is last.

    Attributes
    ----------
    catalogues
        For each stripe the latest whole one.
    epoch
        The highest that is anywhere on the medium.
    scanned
        Extents whose headers were read.
    position
        Where the next slot begins.
    garbage
        Places whose header has to be overwritten: torn, or the older of two.
    """

    medium: Medium
    extents: list[Extent]
    catalogues: list[Catalogue | None] = field(default_factory=list)
    epoch: int = 0
    scanned: list[int] = field(default_factory=list)
    position: int = 0
    garbage: list[tuple[int, int]] = field(default_factory=list)

    def read_tables(self) -> None:
        """Read the table and the catalogues of each stripe, and take what the catalogues know."""
        for stripe, superblock in zip(self.medium.stripes, self.medium.superblocks, strict=True):
            latest: Catalogue | None = None
            for area in (0, 1):
                offset_bytes = superblock.catalogue_offset(area)
                page = stripe.load(offset_bytes, PAGE_SIZE_BYTES)
                size_bytes = file_format.catalogue_bytes(superblock.medium, page)
                if not 0 < size_bytes <= superblock.catalogue_bytes:
                    continue
                raw = stripe.load(offset_bytes, size_bytes)
                catalogue = file_format.read_catalogue(superblock.medium, raw)
                if catalogue is not None and (latest is None or catalogue.epoch > latest.epoch):
                    latest = catalogue
            self.catalogues.append(latest)
            table = stripe.load(superblock.table_offset, superblock.extents * PAGE_SIZE_BYTES)
            self._take(superblock.stripe, latest, table)
        self.position = max([self.position, *(c.position for c in self.catalogues if c is not None)])
        self.epoch = max([self.epoch, *(c.epoch for c in self.catalogues if c is not None)])

    def _take(self, stripe: int, catalogue: Catalogue | None, table: memoryview) -> None:
        entries: dict[int, TableEntry] = {}
        count = len(self.medium.stripes)
        for number in range(stripe, len(self.extents), count):
            begin = number // count * PAGE_SIZE_BYTES
            page = table[begin : begin + PAGE_SIZE_BYTES]
            entry = file_format.read_table_entry(self.medium.number, number, page)
            extent = self.extents[number]
            if entry is not None and file_format.may_serve(entry.slot_bytes, self.medium.extent_bytes):
                entries[number] = entry
                extent.slot_bytes, extent.generation, extent.epoch = (
                    entry.slot_bytes,
                    entry.generation,
                    entry.epoch,
                )
                self.epoch = max(self.epoch, entry.epoch)
            elif entry is None and any(page):
                self.scanned.append(number)  # damaged: the headers themselves say what the extent serves
        clean = (
            {} if catalogue is None else file_extents.clean_rows(catalogue, entries, self.medium.extent_bytes)
        )
        for number in entries:
            if number in clean:
                self.extents[number].set_rows(*clean[number])
            else:
                self.scanned.append(number)

    # ---- reading headers

    def scans(self) -> list[Job]:
        """Read the headers of extents that no catalogue knows."""
        return [lambda scratch, number=number: self._scan(number) for number in self.scanned]  # type: ignore[misc]

    def _scan(self, number: int) -> None:
        extent = self.extents[number]
        if not extent.slot_bytes and not self._find_size(number):
            return
        slots = self.medium.extent_bytes // extent.slot_bytes
        rows = self._headers(number, slots)
        base_bytes = number * self.medium.extent_bytes
        indices = file_format.valid_rows(
            self.medium.number, rows, base_bytes, extent.slot_bytes, extent.generation
        )
        extent.set_rows(indices.tolist(), rows[indices])

    def _headers(self, number: int, slots: int) -> Rows:
        """The first bytes of each slot."""
        stripe, begin = self.medium.place(number)
        slot_bytes = self.extents[number].slot_bytes
        rows = np.empty((slots, HEADER_BYTES), np.uint8)
        if slot_bytes <= _WHOLE_SLOT_BYTES:
            memory = stripe.load(begin, slots * slot_bytes)
            rows[:] = np.frombuffer(memory, np.uint8).reshape(slots, slot_bytes)[:, :HEADER_BYTES]
        else:
            page = memoryview(mmap.mmap(-1, PAGE_SIZE_BYTES))
            for index in range(slots):
                stripe.read(begin + index * slot_bytes, [page])
                rows[index] = np.frombuffer(page, np.uint8)[:HEADER_BYTES]
        return rows

    def _find_size(self, number: int) -> bool:
        """The table's page is lost: take slot size and generation from the youngest whole header there is."""
        stripe, begin = self.medium.place(number)
        youngest: file_format.Header | None = None
        for chunk in range(0, self.medium.extent_bytes, _CHUNK_BYTES):
            size_bytes = min(_CHUNK_BYTES, self.medium.extent_bytes - chunk)
            memory = np.frombuffer(stripe.load(begin + chunk, size_bytes), np.uint8)
            for page in memory.reshape(-1, PAGE_SIZE_BYTES):
                header = file_format.read_header(self.medium.number, page[:HEADER_BYTES].tobytes())
                if header is not None and (youngest is None or header.position > youngest.position):
                    youngest = header
        if youngest is None or not file_format.may_serve(youngest.place.slot_bytes, self.medium.extent_bytes):
            return False
        extent = self.extents[number]
        extent.slot_bytes, extent.generation = youngest.place.slot_bytes, youngest.place.generation
        return True

    # ---- which of them count

    def checks(self) -> list[Job]:
        """Compare the blocks that may have been written when the process was killed with their checksums."""
        for extent in self.extents:
            if extent.rows and len(its := _fields(extent)):
                self.position = max(self.position, int((its["position"] + its["slot_bytes"]).max()))
        floor = max(0, self.position - WINDOW_BYTES, self._settled())
        jobs: list[Job] = []
        for number in self.scanned:
            its = _fields(self.extents[number])
            offsets: list[int] = its["offset_bytes"][its["position"] >= floor].tolist()
            step = max(1, RUN_BYTES // max(1, self.extents[number].slot_bytes))
            for first in range(0, len(offsets), step):
                some = offsets[first : first + step]
                jobs.append(lambda scratch, number=number, some=some: self._check(number, some, scratch))  # type: ignore[misc]
        return jobs

    def _settled(self) -> int:
        """Before this position all writes had ended when the node wrote its latest checkpoint."""
        return max((c.position for c in self.catalogues if c is not None), default=0)

    def _check(self, number: int, offsets: Sequence[int], scratch: Scratch) -> None:
        extent = self.extents[number]
        stripe, begin = self.medium.place(number)
        moves: list[Move] = []
        for offset_bytes in offsets:
            index = (offset_bytes - number * self.medium.extent_bytes) // extent.slot_bytes
            header = file_format.unpack_row(extent.row(index))
            size_bytes = header.record.block_bytes
            memory = memoryview(mmap.mmap(-1, whole_pages(size_bytes)))[:size_bytes]
            form = file_format.form_of(extent.row(index), size_bytes)
            where = begin + index * extent.slot_bytes
            moves.append(Move(index, stripe, where, header.place, header.record, memory, form))
        for run in file_runs.runs(moves):
            for index in file_runs.read_run(run, self.medium.number, scratch):
                self._discard(number, index)

    def _discard(self, number: int, index: int) -> None:
        self.extents[number].set_row(index, None)
        self.garbage.append((number, index))

    def drop_doubles(self) -> None:
        """Of two slots with one block the younger one counts."""
        held = [(number, _fields(extent)) for number, extent in enumerate(self.extents) if extent.rows]
        if not held:
            return
        fields = np.concatenate([its for _, its in held])
        names = np.ascontiguousarray(fields["key"]).view("<u8").reshape(-1, 4)[:, 0] ^ fields["shard"]
        order = np.argsort(names, kind="stable")
        again = np.flatnonzero(names[order][1:] == names[order][:-1])
        latest: dict[tuple[bytes, int], np.void] = {}
        for at in np.unique(np.concatenate([again, again + 1])).tolist() if len(again) else []:
            this = fields[order[at]]
            name = (this["key"].tobytes(), int(this["shard"]))
            other = latest.get(name)
            if other is None or this["position"] > other["position"]:
                latest[name], this = this, other
            if this is not None:
                number = int(this["offset_bytes"]) // self.medium.extent_bytes
                within = int(this["offset_bytes"]) - number * self.medium.extent_bytes
                self._discard(number, within // self.extents[number].slot_bytes)

    @property
    def blocks(self) -> int:
        """How many were found."""
        return sum(len(_fields(extent)) for extent in self.extents if extent.rows)


def _fields(extent: Extent) -> np.ndarray:
    return np.ascontiguousarray(extent.held_rows()).view(ROW_DTYPE).reshape(-1)


def batches(extents: Sequence[Extent], arena: int, size: int) -> Iterator[list[tuple[Slot, BlockRecord]]]:
    """All blocks that were found, in order of their places."""
    batch: list[tuple[Slot, BlockRecord]] = []
    for number, extent in enumerate(extents):
        for pair in file_extents.found(number, extent, arena):
            batch.append(pair)
            if len(batch) == size:
                yield batch
                batch = []
    if batch:
        yield batch
