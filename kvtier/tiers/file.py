"""The NVMe tier: blocks in slab files or on raw block devices, striped over all of them; outlives the node.

What lies on the medium, and how its format may change, is told in `file_format.py`; how extents lie on
stripes in `file_medium.py`; what is found after a crash and why nothing of it is wrong in
`file_recovery.py`; what a checkpoint is worth in `file_extents.py`.

**Never wrong bytes.** A read compares the slot's header with the record that is asked for, and the checksum
of the bytes with both, in the thread that read them. **Hard cap.** All space is set apart when the tier opens
or grows, never beyond the cap; nothing is ever appended. **An error is a miss.** Any error of the device, and
an operation that has not come back within `deadline_s`, quarantines the tier: every call is a `TierFault` at
once, until `probe` has found that the device takes and gives bytes again and that the kernel has returned
all that was asked before. A call that waits in the kernel keeps its caller's buffers until it is back.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final

from kvtier import logs
from kvtier.errors import ConfigError, KvtierError, ResourceShortage, TierFault
from kvtier.interfaces import FileRange, Put, Tier, TierTraits
from kvtier.tiers import file_format, file_packing, file_recovery, file_runs
from kvtier.tiers.file_checkpoints import Checkpoints, Wear
from kvtier.tiers.file_crew import Crew
from kvtier.tiers.file_extents import Extent
from kvtier.tiers.file_format import Place
from kvtier.tiers.file_io import Calls
from kvtier.tiers.file_medium import Medium, Plan
from kvtier.tiers.file_runs import Move
from kvtier.tiers.file_threads import Health, Job, Positions, Scratch
from kvtier.types import PAGE_SIZE_BYTES, BlockRecord, Slot, TierKind, whole_pages

DEFAULT_THREADS: Final = 8
DEFAULT_KEEP_FREE_BYTES: Final = 256 << 20
DROPS_A_JOB: Final = 64
RECOVERED_BATCH: Final = 4096
_ZERO_PAGE: Final = memoryview(mmap.mmap(-1, PAGE_SIZE_BYTES))

_log = logs.get("file")


class FileTier(Tier):
    """Slots on files and devices; implements `Tier`, `Growing`, `Durable` and `Failing`.

    Use one object for one `open` and `close`, from one event loop.

    Parameters
    ----------
    node_id
        32 hexadecimal digits: a medium of another node is refused.
    paths
        Directories (made if missing), block devices, or existing files, to be used together for good.
    capacity_bytes
        Hard cap on the space that they take together, as `du` counts it.
    extent_bytes
        Whole pages; no slot is larger.
    deadline_s
        See above.
    threads
        Operations that the device is asked at once.
    codec
        One of `file_packing.CHOICES`; what is on the medium is read whatever this says.
    catalogue_bytes
        For tests: space of a checkpoint in each stripe, where the proportion (1/256) is too little for
        very small blocks.
    keep_free_bytes
        What a file system keeps for others.
    calls
        The kernel, or what stands for it in tests.
    clock_s, now_s
        Monotonic time, and the wall clock's.
    """

    kind: ClassVar[TierKind] = TierKind.NVME
    traits: ClassVar[TierTraits] = TierTraits(
        frees_at_once=False, header_bytes=PAGE_SIZE_BYTES, outlives=True
    )
    arena_id: ClassVar[int] = 0

    def __init__(
        self,
        *,
        node_id: str,
        paths: Sequence[Path],
        capacity_bytes: int,
        extent_bytes: int,
        deadline_s: float = 5.0,
        threads: int = DEFAULT_THREADS,
        codec: str = "raw",
        catalogue_bytes: int | None = None,
        keep_free_bytes: int = DEFAULT_KEEP_FREE_BYTES,
        calls: Calls | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        if deadline_s <= 0 or threads <= 0:
            raise ConfigError(f"deadline_s is {deadline_s}, threads is {threads}: allowed is above 0")
        self._health = Health(deadline_s, clock_s)
        plan = Plan(node_id, tuple(paths), capacity_bytes, extent_bytes, catalogue_bytes, keep_free_bytes)
        self._medium = Medium(plan, self._health, calls or Calls())
        self._pack = file_packing.make_pack(codec, self._medium.rates, clock_s)
        self._crew = Crew(self._health, threads)
        self._extents: list[Extent] = []
        self._allocated_bytes = 0
        self._capacity_bytes = 0
        self._positions = Positions()
        self._wear = Wear(self._medium, now_s)
        self._checkpoints = Checkpoints(self._medium, self._extents, self._positions, self._wear, self._crew)
        self._is_open = False
        self._calls = 0
        self._step: asyncio.Task[None] | None = None
        self._owed_drops: set[tuple[int, int]] = set()

    # ---- what it is

    @property
    def capacity_bytes(self) -> int:
        """What slots may lie in once all space could be had; known when it is open."""
        return self._capacity_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes from offset 0 that space stands behind."""
        return self._allocated_bytes

    @property
    def extent_bytes(self) -> int:
        """Size of an extent."""
        return self._medium.extent_bytes

    @property
    def notices(self) -> tuple[str, ...]:
        """What an operator should know: no O_DIRECT, too little space."""
        notices = list(self._medium.notices)
        if self._allocated_bytes < self._capacity_bytes:
            notices.append(
                f"{self._allocated_bytes} of {self._capacity_bytes} bytes: the file system has no more space "
                "that is not left to others; grows when there is"
            )
        return tuple(notices)

    @property
    def read_bytes(self) -> int:
        """Read from the medium since it was opened, headers included."""
        return sum(stripe.read_bytes for stripe in self._medium.stripes)

    @property
    def written_bytes(self) -> int:
        """Written to the medium since it was opened, everything included."""
        return self._wear.since_open_bytes

    @property
    def written_today_bytes(self) -> int:
        """Written since midnight UTC, by earlier daemons too: what endurance is given in."""
        return self._wear.today_bytes

    # ---- life

    async def open(self) -> None:
        """Find or make the medium, and find the blocks on it; a second call changes nothing.

        Raises
        ------
        ConfigError
            A path is unusable, or holds another node's blocks, another geometry or another version.
        AlreadyRunning
            A live daemon has one of the paths.
        ResourceShortage
            A file system is full, or a device fails or does not answer.
        """
        if self._crew.is_started:
            return
        self._crew.start()
        try:
            await self._crew.keep(lambda scratch: self._medium.open())
            self._capacity_bytes = self._medium.extents * self.extent_bytes
            self._extents[:] = [Extent() for _ in range(self._medium.extents)]
            await self._recover()
            self._allocated_bytes = self._medium.allocated_extents * self.extent_bytes
            self._is_open = True
        except BaseException as error:
            await self.close()
            if isinstance(error, TierFault):
                raise ResourceShortage(
                    f"{error}: repair the device, or leave it out of nvme_paths"
                ) from error
            raise

    async def _recover(self) -> None:
        began_s = time.monotonic()
        found = file_recovery.Recovery(self._medium, self._extents)
        await self._crew.keep(lambda scratch: found.read_tables())
        for jobs in (found.scans, found.checks):
            await self._crew.settled(jobs(), leave=True)
        await self._crew.keep(lambda scratch: found.drop_doubles())
        await self._crew.settled(self._zeroing(found.garbage), leave=True)
        for extent in self._extents:
            extent.epoch = -1
        self._checkpoints.epoch = found.epoch + 1
        self._positions.next = found.position
        self._wear.resume(found.catalogues, found.position)
        _log.info(
            "found blocks",
            count=found.blocks,
            scanned_extents=len(found.scanned),
            discarded=len(found.garbage),
            seconds=round(time.monotonic() - began_s, 3),
        )

    async def close(self) -> None:
        """Write a checkpoint and let go of all paths; idempotent. What the kernel still has is left to it."""
        if not self._crew.is_started:
            return
        self._crew.close()
        was_open, self._is_open = self._is_open, False
        try:
            if was_open and not self._health.fault:
                await self._checkpoints.write()
        except TierFault as error:
            _log.warning("no checkpoint at the end", error=str(error))
        finally:
            if await self._crew.stop():
                self._medium.close()
            else:  # a descriptor is not reused while the kernel works on it
                _log.error("the device still does not answer: its files stay open until the process ends")
            self._allocated_bytes = 0

    def recovered(self) -> Iterator[list[tuple[Slot, BlockRecord]]]:
        """What `open` found, in batches; to be taken before anything is written."""
        return file_recovery.batches(self._extents, self.arena_id, RECOVERED_BATCH)

    def grow(self) -> int:
        """Take space that has become free, in the background; returns what is usable now."""
        if not self._is_open or self._health.fault:
            return self._allocated_bytes
        self._allocated_bytes = self._medium.allocated_extents * self.extent_bytes
        if self._allocated_bytes < self._capacity_bytes and (self._step is None or self._step.done()):
            self._step = asyncio.get_running_loop().create_task(self._extend())
        return self._allocated_bytes

    async def _extend(self) -> None:
        with self._logged("the tier cannot grow now and tries again"):
            await self._crew.keep(lambda scratch: self._grow_step())

    def _grow_step(self) -> None:
        try:
            self._medium.extend()
        except OSError as error:
            self._health.quarantine(f"taking space failed: {error}")
            raise TierFault(self._health.fault) from error

    # ---- faults

    @property
    def fault(self) -> str:
        """See `kvtier.interfaces.Failing`."""
        return self._health.fault

    async def probe(self) -> bool:
        """Try a page of each stripe, opening again what was taken away; owed drops are made up for.

        False at once while anything that was asked before has not come back.
        """
        if not self._is_open:
            return False
        if not self._health.fault:
            return True
        if self._calls or self._crew.is_keeping:
            return False
        try:
            await self._crew.keep(self._probe)
        except (TierFault, OSError):
            return False
        self._health.clear()
        _log.info("the device works again")
        return True

    def _probe(self, scratch: Scratch) -> None:
        owed = list(self._owed_drops)  # more may come meanwhile
        with self._health.probing():
            self._medium.reopen()
            for job in self._zeroing(owed):
                job(scratch)
            for stripe in self._medium.stripes:
                stripe.flush()
        self._owed_drops.difference_update(owed)

    # ---- bytes

    async def read(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], into: Sequence[memoryview]
    ) -> list[int]:
        """See `Tier.read`: header and checksum of every block are compared with its record."""
        self._check_all(slots, records, into)
        moves = self._moves(slots, records, into)
        for slot, move in zip(slots, moves, strict=True):
            row = self._extents[slot.extent].row(self._index(slot)) if self._is_slot(slot) else b""
            move.form = file_format.form_of(row, move.record.block_bytes)
        medium = self._medium.number
        wrong: list[int] = []

        def job(run: list[Move]) -> Job:
            return lambda scratch: wrong.extend(_read(run, medium, scratch))

        with self._call():  # leaves the extents as they are
            await self._crew.settled([job(run) for run in file_runs.runs(moves)])
        return sorted(wrong)

    async def write(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], payloads: Sequence[memoryview]
    ) -> None:
        """See `Tier.write`: each block goes out with its header, neighbours in one call."""
        self._check_all(slots, records, payloads)
        with self._call(slot.extent for slot in slots):
            await self._begin_writing(slots)
            moves = self._moves(slots, records, payloads)
            await self._crew.settled([self._writing(run) for run in file_runs.runs(moves)])
            self._note_written(slots, moves)

    async def _begin_writing(self, slots: Sequence[Slot]) -> None:
        """From here on the slots hold nothing that anybody believes."""
        for slot in slots:
            extent = self._extents[slot.extent]
            if extent.slot_bytes != slot.size_bytes:
                extent.serve(slot.size_bytes)
                self._owed_drops = {place for place in self._owed_drops if place[0] != slot.extent}
            extent.set_row(self._index(slot), None)
        await self._checkpoints.mark(slot.extent for slot in slots)

    def _note_written(self, slots: Sequence[Slot], moves: Sequence[Move]) -> None:
        for slot, move in zip(slots, moves, strict=True):
            extent = self._extents[slot.extent]
            if extent.generation == move.place.generation:
                extent.set_row(self._index(slot), move.header)
            self._owed_drops.discard((slot.extent, self._index(slot)))

    # ---- bytes that others move

    def ranges(self, slots: Sequence[Slot], records: Sequence[BlockRecord]) -> list[FileRange | None]:
        """See `kvtier.interfaces.OnFiles`: blocks that lie here as they are."""
        self._check_all(slots, records)
        if fault := self._health.fault:
            raise TierFault(fault)
        found: list[FileRange | None] = []
        for slot, record in zip(slots, records, strict=True):
            row = self._extents[slot.extent].row(self._index(slot)) if self._is_slot(slot) else b""
            form = file_format.form_of(row, record.block_bytes)
            is_here = any(row) and form == file_format.raw_form(record.block_bytes)
            found.append(self._range(slot, record) if is_here else None)
        return found

    def _range(self, slot: Slot, record: BlockRecord) -> FileRange:
        stripe, begin = self._medium.place(slot.extent)
        offset_bytes = begin + slot.offset_bytes - slot.extent * self.extent_bytes + PAGE_SIZE_BYTES
        size_bytes = whole_pages(record.block_bytes)
        return FileRange(stripe.file, stripe.identity(), offset_bytes, size_bytes, PAGE_SIZE_BYTES)

    async def write_by(self, slots: Sequence[Slot], records: Sequence[BlockRecord], put: Put) -> list[int]:
        """See `kvtier.interfaces.OnFiles`: the headers are written behind the blocks, by the tier itself.

        What is killed in between leaves slots whose headers are old, and whose bytes do not match them.
        """
        self._check_all(slots, records)
        with self._call(slot.extent for slot in slots):
            await self._begin_writing(slots)
            pairs = zip(slots, records, strict=True)
            moved = sorted(set(await put([self._range(slot, record) for slot, record in pairs])))
            whole = [slots[i] for i in moved]
            moves = self._moves(whole, [records[i] for i in moved], [memoryview(b"")] * len(moved))
            await self._crew.settled([self._heading(move) for move in moves])
            self._note_written(whole, moves)
            return moved

    def _heading(self, move: Move) -> Job:
        def job(scratch: Scratch) -> None:
            move.stripe.check_path()
            position = self._positions.begin(move.place.slot_bytes, self._health.refusal)
            try:
                move.header[:] = file_format.pack_header(
                    self._medium.number, move.record, move.place, move.form, position
                )
                move.stripe.note_written(whole_pages(move.record.block_bytes))
                move.stripe.store(move.offset_bytes, bytes(move.header).ljust(PAGE_SIZE_BYTES, b"\0"))
            finally:
                self._positions.end(position)

        return job

    def _writing(self, run: list[Move]) -> Job:
        def job(scratch: Scratch) -> None:
            run[0].stripe.check_path()
            self._pack(run)  # before its turn begins: others may not have to wait for it
            size_bytes = sum(move.place.slot_bytes for move in run)
            first = position = self._positions.begin(size_bytes, self._health.refusal)
            try:
                for move in run:
                    move.header[:] = file_format.pack_header(
                        self._medium.number, move.record, move.place, move.form, position
                    )
                    position += move.place.slot_bytes
                for part in file_runs.runs(run):
                    file_runs.write_run(part, scratch)
            finally:
                self._positions.end(first)

        return job

    async def drop(self, slots: Sequence[Slot]) -> None:
        """Write zeros over the headers, and flush: what was there does not come back after a restart either.

        While the device is quarantined this is a `TierFault`, and made up for when it is back.
        """
        self._check_open()
        for slot in slots:
            self._check(slot)
        places = [(slot.extent, self._index(slot)) for slot in slots if self._is_slot(slot)]
        for number, index in places:
            self._extents[number].set_row(index, None)
        self._owed_drops.update(places)
        with self._call(slot.extent for slot in slots):
            await self._checkpoints.mark(number for number, _ in places)
            await self._crew.settled(self._zeroing(places))
            stripes = {self._medium.place(number)[0] for number, _ in places}
            await self._crew.settled([lambda scratch, s=stripe: s.flush() for stripe in stripes])  # type: ignore[misc]
            self._owed_drops.difference_update(places)

    def _zeroing(self, places: Sequence[tuple[int, int]]) -> list[Job]:
        def job(some: Sequence[tuple[int, int]]) -> Job:
            def work(scratch: Scratch) -> None:
                for number, index in some:
                    stripe, begin = self._medium.place(number)
                    stripe.write(begin + index * self._extents[number].slot_bytes, [_ZERO_PAGE])

            return work

        return [job(places[first : first + DROPS_A_JOB]) for first in range(0, len(places), DROPS_A_JOB)]

    async def checkpoint(self) -> None:
        """See `kvtier.interfaces.Durable`; in the background, beside reads and writes."""
        self._check_open()
        await self._checkpoints.write_if_changed()

    # ---- checks

    def _check_open(self) -> None:
        if not self._is_open:
            raise TierFault("the file tier is not open")

    def _check_all(
        self,
        slots: Sequence[Slot],
        records: Sequence[BlockRecord],
        buffers: Sequence[memoryview] | None = None,
    ) -> None:
        self._check_open()
        rooms = [slot.size_bytes for slot in slots] if buffers is None else [its.nbytes for its in buffers]
        if not len(slots) == len(records) == len(rooms):
            raise TierFault(f"{len(slots)} slots, {len(records)} records and {len(rooms)} buffers were given")
        for slot, record, room_bytes in zip(slots, records, rooms, strict=True):
            self._check(slot)
            if not 0 < record.block_bytes <= min(slot.size_bytes - PAGE_SIZE_BYTES, room_bytes):
                raise TierFault(
                    f"{record.block_bytes} bytes do not fit {slot} and a buffer of {room_bytes} bytes"
                )

    def _check(self, slot: Slot) -> None:
        begin, size = slot.offset_bytes - slot.extent * self.extent_bytes, slot.size_bytes
        if (
            slot.arena != self.arena_id
            or size <= PAGE_SIZE_BYTES
            or size % PAGE_SIZE_BYTES
            or not 0 <= slot.extent < self._allocated_bytes // self.extent_bytes
            or not 0 <= begin <= self.extent_bytes - size
            or begin % size
        ):
            raise TierFault(
                f"{slot} is no slot of the file tier, which has {self._allocated_bytes} bytes in extents of "
                f"{self.extent_bytes}"
            )

    def _is_slot(self, slot: Slot) -> bool:
        """Whether the extent serves slots of this size now; what it served before is gone already."""
        return self._extents[slot.extent].slot_bytes == slot.size_bytes

    def _index(self, slot: Slot) -> int:
        return (slot.offset_bytes - slot.extent * self.extent_bytes) // slot.size_bytes

    def _moves(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], buffers: Sequence[memoryview]
    ) -> list[Move]:
        moves = []
        for number, (slot, record, buffer) in enumerate(zip(slots, records, buffers, strict=True)):
            stripe, begin = self._medium.place(slot.extent)
            place = Place(slot.offset_bytes, slot.size_bytes, self._extents[slot.extent].generation)
            offset_bytes = begin + slot.offset_bytes - slot.extent * self.extent_bytes
            memory = buffer.cast("B")[: record.block_bytes]  # none, where others move the bytes
            form = file_format.raw_form(record.block_bytes)
            moves.append(Move(number, stripe, offset_bytes, place, record, memory, form))
        return moves

    # ---- waiting for threads

    @contextmanager
    def _call(self, changes: Iterable[int] = ()) -> Iterator[None]:
        """One call of the node, which may change these extents: refused while the tier is quarantined,
        counted while it is under way."""
        if fault := self._health.fault:
            raise TierFault(fault)
        extents = [self._extents[number] for number in set(changes)]
        self._calls += 1
        for extent in extents:
            extent.busy += 1
        try:
            yield
        finally:
            self._calls -= 1
            for extent in extents:
                extent.busy -= 1

    @contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        try:
            yield
        except KvtierError as error:
            _log.warning(what, error=str(error))


def _read(run: list[Move], medium: bytes, scratch: Scratch) -> list[int]:
    run[0].stripe.check_path()
    return file_runs.read_run(run, medium, scratch)
