"""Blocks between slots of the file tier and device memory, past the memory of this process where that works.

What moves the bytes is a **mover**: cuFile for a CUDA slab (`cufile.py`), plain reads and writes for device
``cpu``, whose slab is memory. Whatever it does not do, a whole batch or one block of it, goes through host
memory and the tier instead (the arena's way), and is counted.

**Never wrong bytes.** A block that was read directly counts only when its checksum, XXH3-128 of *all* of its
bytes, computed on the device (`device_hash.py`), is the one it was committed with. No sample. One that does
not match is read again by the tier, which compares header and checksum, and only the tier's word makes it
wrong. The header is not read directly: a checksum that matches leaves nothing for it to say.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
import xxhash

from kvtier import logs
from kvtier.errors import TierFault, Unavailable
from kvtier.interfaces import FileRange, OnFiles, Tier
from kvtier.tiers import device_hash
from kvtier.tiers.device import CpuSlab, Slab
from kvtier.types import BlockRecord, Slot

PAUSE_S: Final = 10.0
"""After the mover itself has failed, all goes through host memory for so long."""
BOUNCE_BYTES: Final = 32 << 20
"""Host memory that blocks pass at once where they are not moved directly."""
MAX_FILES: Final = 64
READ, WRITE = "read", "write"
# How a block went: `Report`.
DIRECT: Final = "direct"
CODED: Final = "not raw"
REFUSED: Final = "refused"
FAILED: Final = "failed"
MISMATCH: Final = "mismatch"
PAUSED: Final = "paused"

Report = Callable[[str, str, int], object]
"""Told (`READ` or `WRITE`, `DIRECT` or why not, blocks)."""
_T = TypeVar("_T")

_log = logs.get("gds")


class Op(NamedTuple):
    """Whole pages between a file and the slab."""

    fd: int
    offset_bytes: int
    slab_bytes: int
    size_bytes: int


class Mover(Protocol):
    """Moves bytes between files and one slab. Used by one thread at a time.

    Attributes
    ----------
    mode
        For operators: how the bytes go.
    """

    mode: str

    def add_file(self, fd: int) -> None:
        """Get ready for a file, opened for reading and writing; raises `Unavailable`."""
        ...

    def move(self, ops: Sequence[Op], *, writing: bool) -> list[bool]:
        """Whether each was done whole; when this ends or raises, nothing moves any more.

        Raises
        ------
        Unavailable
            Nothing is known of any of them.
        """
        ...

    def close(self) -> None:
        """Let go of slab and files; idempotent."""
        ...


class CpuMover:
    """Reads and writes of a slab that is this process's memory, with O_DIRECT where there is."""

    mode = "cpu"

    def __init__(self, slab: CpuSlab) -> None:
        self._slab = slab

    def add_file(self, fd: int) -> None:
        """Nothing to do."""

    def move(self, ops: Sequence[Op], *, writing: bool) -> list[bool]:
        """See `Mover`."""
        return [self._move(op, os.pwritev if writing else os.preadv) for op in ops]

    def _move(self, op: Op, call: Callable[[int, list[memoryview], int], int]) -> bool:
        try:
            view = self._slab.view(op.slab_bytes, op.size_bytes)
            return call(op.fd, [view], op.offset_bytes) == op.size_bytes
        except OSError as error:
            _log.info("a direct operation failed", error=str(error))
            return False

    def close(self) -> None:
        """Nothing to do."""


def make_mover(slab: Slab) -> Mover:
    """What can move bytes for this slab; raises `Unavailable` with the reason in one line."""
    if isinstance(slab, CpuSlab):
        return CpuMover(slab)
    from kvtier.tiers.cufile import CuFileMover

    return CuFileMover(slab)


class Gds:
    """See the module. Lives on one event loop; its mover runs in a thread of its own.

    Parameters
    ----------
    tier
        An open tier whose slots are ranges of files.
    slab
        Where `offsets` are; the caller owns these ranges until a call has ended.
    mover
        None: everything goes through host memory.
    report
        See `Report`: what metrics are made of.
    """

    def __init__(
        self,
        tier: Tier,
        slab: Slab,
        mover: Mover | None,
        report: Report = lambda way, how, blocks: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        assert isinstance(tier, OnFiles), "only slots on files can be read past this process"
        self._tier = tier
        self._on_files: OnFiles = tier
        self._slab = slab
        self._mover = mover
        self._report = report
        self._clock_s = clock_s
        self._paused_until_s = float("-inf")
        self._fds: dict[tuple[Path, tuple[int, int]], int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvtier-gds")

    @property
    def mode(self) -> str:
        """How bytes go: the mover's word, or through host memory."""
        return "host memory" if self._mover is None else self._mover.mode

    async def load(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], offsets: Sequence[int]
    ) -> list[int]:
        """Slots of the tier -> slab, verified; returns the positions whose slot holds something else.

        Raises
        ------
        TierFault
            The medium or the device failed; all ranges of the slab hold anything.
        """
        self._check(records, offsets)
        ranges = self._on_files.ranges(slots, records)
        there = [i for i, its in enumerate(ranges) if its is not None]
        self._tell(READ, CODED, len(slots) - len(there))
        moved = await self._move([(ranges[i], offsets[i]) for i in there], writing=False)
        right = await self._run(lambda: self._verified([there[i] for i in moved], records, offsets))
        self._tell(READ, MISMATCH, len(moved) - len(right))
        self._tell(READ, DIRECT, len(right))
        rest = sorted(set(range(len(slots))) - right)
        wrong: list[int] = []
        for group in _groups(rest, records):
            buffers = [memoryview(bytearray(records[i].block_bytes)) for i in group]
            bad = await self._tier.read([slots[i] for i in group], [records[i] for i in group], buffers)
            wrong += [group[i] for i in bad]
            good = [at for at in range(len(group)) if at not in set(bad)]
            copies = [(offsets[group[at]], buffers[at]) for at in good]
            await self._run(partial(self._slab.copy_in, copies))
        return sorted(wrong)

    async def store(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], offsets: Sequence[int]
    ) -> None:
        """Slab -> slots of the tier, with their headers. The records' checksums are the caller's promise.

        Raises
        ------
        TierFault
            As of `Tier.write`.
        """
        self._check(records, offsets)

        async def put(ranges: Sequence[FileRange]) -> Sequence[int]:
            tails = [
                (at + record.block_bytes, its.size_bytes - record.block_bytes)
                for its, record, at in zip(ranges, records, offsets, strict=True)
                if its.size_bytes > record.block_bytes
            ]
            await self._run(lambda: self._slab.zero(tails))  # what fills up a page may be another's block
            return await self._move(list(zip(ranges, offsets, strict=True)), writing=True)

        done = await self._on_files.write_by(slots, records, put)
        self._tell(WRITE, DIRECT, len(done))
        for group in _groups(sorted(set(range(len(slots))) - set(done)), records):
            buffers = [memoryview(bytearray(records[i].block_bytes)) for i in group]
            copies = [(offsets[i], buffer) for i, buffer in zip(group, buffers, strict=True)]
            await self._run(partial(self._slab.copy_out, copies))
            await self._tier.write([slots[i] for i in group], [records[i] for i in group], buffers)

    async def close(self) -> None:
        """Let go of files and buffers; idempotent. The slab and the tier are their owners'."""
        mover, self._mover = self._mover, None
        if mover is not None:
            await self._run(mover.close)
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            if fd >= 0:
                os.close(fd)
        self._thread.shutdown()

    # ---- direct

    async def _move(self, pairs: Sequence[tuple[FileRange | None, int]], *, writing: bool) -> list[int]:
        """Positions that were moved whole; why the others were not is counted."""
        mover, way = self._mover, WRITE if writing else READ
        if not pairs:
            return []
        if mover is None or self._clock_s() < self._paused_until_s:
            self._tell(way, PAUSED, len(pairs))
            return []
        try:
            return await self._run(lambda: self._move_now(mover, pairs, writing))
        except Unavailable as error:
            self._paused_until_s = self._clock_s() + PAUSE_S
            self._tell(way, FAILED, len(pairs))
            _log.warning("direct storage failed: blocks go through host memory", error=str(error))
            return []

    def _move_now(
        self, mover: Mover, pairs: Sequence[tuple[FileRange | None, int]], writing: bool
    ) -> list[int]:
        way = WRITE if writing else READ
        ops: list[Op] = []
        positions: list[int] = []
        for position, (its, at) in enumerate(pairs):
            assert its is not None
            fd = self._fd(mover, its)
            if fd is not None:
                self._slab.check(at, its.size_bytes)
                ops.append(Op(fd, its.offset_bytes, at, its.size_bytes))
                positions.append(position)
        self._tell(way, REFUSED, len(pairs) - len(ops))
        done = mover.move(ops, writing=writing) if ops else []
        moved = [position for position, whole in zip(positions, done, strict=True) if whole]
        self._tell(way, FAILED, len(ops) - len(moved))
        return moved

    def _fd(self, mover: Mover, its: FileRange) -> int | None:
        """The file, opened once; None where it is not the tier's, or the mover does not take it."""
        key = (its.path, its.identity)
        if (known := self._fds.get(key)) is not None:
            return known if known >= 0 else None
        if len(self._fds) >= MAX_FILES:
            return None
        fd = -1
        try:
            fd = _open(its.path)
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != its.identity:
                raise Unavailable("it was replaced")
            mover.add_file(fd)
        except (OSError, Unavailable) as error:
            _log.info("a file cannot be moved to and from directly", path=str(its.path), error=str(error))
            if fd >= 0:
                os.close(fd)
            self._fds[key] = -1  # not tried again: what takes its place has another identity
            return None
        self._fds[key] = fd
        return fd

    def _verified(
        self, positions: Sequence[int], records: Sequence[BlockRecord], offsets: Sequence[int]
    ) -> set[int]:
        """Those of these positions whose bytes in the slab have the checksum of the record."""
        by_size: dict[int, list[int]] = {}
        for position in positions:
            by_size.setdefault(records[position].block_bytes, []).append(position)
        right: set[int] = set()
        for size_bytes, its in by_size.items():
            found = self._checksums([offsets[i] for i in its], size_bytes)
            right.update(i for i, sum in zip(its, found, strict=True) if sum == records[i].checksum)
        return right

    def _checksums(self, offsets: Sequence[int], size_bytes: int) -> list[bytes]:
        if isinstance(self._slab, CpuSlab) or size_bytes < device_hash.LONG_FROM_BYTES:
            buffers = [np.empty(size_bytes, np.uint8).data for _ in offsets]
            self._slab.copy_out(list(zip(offsets, buffers, strict=True)))
            return [xxhash.xxh3_128_digest(buffer) for buffer in buffers]
        try:
            return device_hash.digests(self._slab.tensor(), offsets, size_bytes)
        except RuntimeError as error:
            raise TierFault(f"checksums on {self._slab.device} failed: {error}") from error

    # ---- the rest

    def _check(self, records: Sequence[BlockRecord], offsets: Sequence[int]) -> None:
        if len(records) != len(offsets):
            raise TierFault(f"{len(records)} records and {len(offsets)} offsets were given")
        for record, at in zip(records, offsets, strict=True):
            self._slab.check(at, record.block_bytes)

    def _tell(self, way: str, how: str, blocks: int) -> None:
        if blocks:
            self._report(way, how, blocks)

    async def _run(self, work: Callable[[], _T]) -> _T:
        """In the thread, to its end: who cancels waits all the same, since the slab is being moved to."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            running.exception()
            raise cancelled
        return running.result()


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return os.open(path, flags)


def _groups(positions: Sequence[int], records: Sequence[BlockRecord]) -> list[list[int]]:
    """Positions whose blocks take `BOUNCE_BYTES` together, at least one."""
    groups: list[list[int]] = []
    size_bytes = BOUNCE_BYTES
    for position in positions:
        size_bytes += records[position].block_bytes
        if size_bytes > BOUNCE_BYTES:
            groups.append([])
            size_bytes = records[position].block_bytes
        groups[-1].append(position)
    return groups
