"""The DRAM tier: one file of shared memory in fixed-size extents, mapped by the engines of the node.

The file has its full size from the start; memory stands behind its first `allocated_bytes` only, and
slots lie below that. Arenas of earlier daemons that engines still map count against the cap, so a
restarted daemon may open with less than its cap, or nothing, and grows as engines move over. Their
names and locks, and how an engine maps an arena safely, are told in `leftovers.py`.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from kvtier import logs
from kvtier.errors import ConfigError, ResourceShortage, TierFault
from kvtier.interfaces import Tier, TierTraits
from kvtier.tiers import binding, leftovers, numa, shm, shortage
from kvtier.tiers import slots as slot_rules
from kvtier.tiers.leftovers import OldArena
from kvtier.types import BlockRecord, Slot, TierKind

Progress = Callable[[int, int], object]
"""Called with (bytes ready, bytes wanted), on the event loop that opened the arena."""

GROW_STEP_BYTES: Final = 1 << 30
"""One background step allocates at most so much before `grow` reports it (one extent at least)."""
ENOUGH_HUGE: Final = 0.9
"""Share of the arena in huge pages, below which an arena that requires them says so."""
_INLINE_COPY_BYTES: Final = 256 << 10

_log = logs.get("arena")


class Arena(Tier):
    """Shared memory that engines on this node map; implements `Tier`, `Mapped` and `Growing`.

    Memory is allocated, given back and counted on one thread of its own, so that the event loop never
    waits for the kernel. Use one object for one `open` and `close`.

    Parameters
    ----------
    node_id, incarnation
        Identity of this daemon; the caller holds the lock of its data directory.
    capacity_bytes
        Hard cap over this arena and all older ones of this node; a multiple of `extent_bytes`.
    extent_bytes
        Unit of allocation, whole pages.
    shm_dir
        Where the file lies; a tmpfs.
    old_arena_deadline_s
        How long after `open` engines may keep memory of older arenas; then it is taken from under them
        (what they map reads as zeros, and no lease of a dead daemon is valid).
    bound_to
        NUMA nodes that all its memory comes from; none: it lies where the kernel puts it. Where the kernel
        refuses that, the arena goes on without, and `notices` says so.
    huge_pages
        ``off``: ordinary pages. ``advise``: huge ones are asked for. ``require``: also `notices` where they
        are few (whether the kernel gives any is for the caller to check).
    on_progress
        Told how far `open` is.
    clock_s
        Monotonic time; a parameter for tests.
    """

    kind: ClassVar[TierKind] = TierKind.DRAM
    traits: ClassVar[TierTraits] = TierTraits(frees_at_once=True)

    def __init__(
        self,
        *,
        node_id: str,
        incarnation: int,
        capacity_bytes: int,
        extent_bytes: int,
        shm_dir: Path = Path("/dev/shm"),
        old_arena_deadline_s: float = 30.0,
        bound_to: Sequence[int] = (),
        huge_pages: str = "advise",
        on_progress: Progress | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if extent_bytes <= 0 or extent_bytes % mmap.PAGESIZE:
            raise ConfigError(f"extent_bytes is {extent_bytes}: allowed is a multiple of {mmap.PAGESIZE}")
        if capacity_bytes <= 0 or capacity_bytes % extent_bytes:
            raise ConfigError(f"dram_bytes is {capacity_bytes}: allowed is a multiple of {extent_bytes}")
        self._node_id = node_id
        self._incarnation = incarnation
        self._capacity_bytes = capacity_bytes
        self._extent_bytes = extent_bytes
        self._shm_dir = shm_dir
        self._deadline_after_s = old_arena_deadline_s
        self._bound_to = tuple(bound_to)
        self._is_huge = huge_pages != "off" and extent_bytes % numa.huge_page_bytes() == 0
        self._needs_huge = huge_pages == "require"
        self._unbound = ""
        self._few_huge = ""
        self._on_progress = on_progress
        self._clock_s = clock_s
        self._deadline_s = 0.0
        self._allocated_bytes = 0
        self._owner_fd: int | None = None
        self._fd: int | None = None
        self._mapping: mmap.mmap | None = None
        self._bytes: memoryview | None = None
        self._old: tuple[OldArena, ...] = ()
        self._old_lock = threading.Lock()  # between the worker's closing of descriptors and readers of them
        self._stopping = threading.Event()
        self._complained = False
        self._worker: ThreadPoolExecutor | None = None
        self._step: Future[None] | None = None

    @property
    def capacity_bytes(self) -> int:
        """The hard cap, older arenas included; also the size of the file that engines map."""
        return self._capacity_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes from offset 0 that memory stands behind."""
        return self._allocated_bytes

    @property
    def extent_bytes(self) -> int:
        """Size of an extent."""
        return self._extent_bytes

    @property
    def arena_id(self) -> int:
        """What `Slot.arena` has to be."""
        return self._incarnation & 0xFFFFFFFF

    @property
    def path(self) -> Path:
        """The file that engines map."""
        return leftovers.arena_path(self._shm_dir, self._node_id, self._incarnation)

    @property
    def old_arena_bytes(self) -> int:
        """Memory of older arenas of this node that engines still map, measured now."""
        with self._old_lock:
            return sum(old.used_bytes for old in self._old)

    @property
    def notices(self) -> list[str]:
        """What is not as it was asked for."""
        return [notice for notice in (self._unbound, self._few_huge) if notice]

    # ---- the life of the medium

    async def open(self) -> None:
        """Remove leftovers, allocate, map and touch the memory; a second call changes nothing.

        Raises
        ------
        ResourceShortage
            Memory, the file system or a limit of the process is too small; names `dram_bytes`.
        AlreadyRunning
            A live daemon has this node's arena.
        """
        if self._worker is not None:
            return
        loop = asyncio.get_running_loop()
        report = self._on_progress

        def progress(done_bytes: int, wanted_bytes: int) -> None:
            if report is not None:
                loop.call_soon_threadsafe(report, done_bytes, wanted_bytes)

        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvtier-arena")
        try:
            await loop.run_in_executor(self._worker, self._open, progress)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Unmap and remove the arena, give its memory back; engines keep a mapping that reads zeros."""
        self._stopping.set()
        worker, self._worker = self._worker, None
        if worker is None:
            return
        # The thread's own queue orders this behind a step that still runs (at most one chunk of work).
        closing = worker.submit(self._close)
        try:
            await asyncio.shield(asyncio.wrap_future(closing))
        finally:
            worker.shutdown()  # whoever cancels this waits all the same: nothing may be left behind

    def grow(self) -> int:
        """Let the worker look after older arenas and take what has become free; never waits.

        Returns what is usable now: the effect of a step is seen by a later call.

        Raises
        ------
        ResourceShortage
            Somebody removed the arena's file: no engine can map it any more, so the daemon has to start anew.
        """
        if self._worker is None or self._bytes is None:
            return 0
        if self._fd is not None and not leftovers.leads_to(self.path, self._fd):
            raise ResourceShortage(
                f"the arena's file {self.path} was removed by somebody else: start the daemon again, and "
                "keep cleaners (systemd's RemoveIPC, for one) away from shm_dir"
            )
        if self._step is not None and self._step.done():
            self._step.result()  # a bug in a step surfaces here
            self._step = None
        pending = self._old or self._allocated_bytes < self._capacity_bytes
        if pending and self._step is None:
            self._step = self._worker.submit(self._grow)
        return self._allocated_bytes

    # ---- bytes

    @property
    def memory(self) -> memoryview:
        """The whole arena as mapped here, valid until `close`; memory lies behind `allocated_bytes` only."""
        assert self._bytes is not None
        return self._bytes

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes themselves, writable; valid until `close`. Raises `TierFault`."""
        begin = self._checked(slot)
        assert self._bytes is not None
        return self._bytes[begin : begin + slot.size_bytes]

    async def read(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], into: Sequence[memoryview]
    ) -> list[int]:
        """Fill each buffer; memory keeps no records, so no slot is ever found wrong.

        Raises `TierFault` before any byte is copied.
        """
        pairs = self._pairs(slots, records, into)
        await self._copy([(buffer, view) for view, buffer in pairs])
        return []

    async def write(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], payloads: Sequence[memoryview]
    ) -> None:
        """Write each payload; raises `TierFault` before any byte is copied."""
        await self._copy(self._pairs(slots, records, payloads))

    async def drop(self, slots: Sequence[Slot]) -> None:
        """Nothing to do for memory but to check the slots; raises `TierFault`."""
        for slot in slots:
            self._checked(slot)

    def _pairs(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], buffers: Sequence[memoryview]
    ) -> list[tuple[memoryview, memoryview]]:
        """Each block's bytes in its slot, and in its buffer."""
        slot_rules.check_counts(slots, records, buffers)
        pairs = []
        for slot, record, buffer in zip(slots, records, buffers, strict=True):
            view = self.view(slot)
            memory = slot_rules.bytes_of(slot, record, buffer)
            pairs.append((view[: record.block_bytes], memory))
        return pairs

    def _checked(self, slot: Slot) -> int:
        """Offset of a slot that lies inside one allocated extent of this arena."""
        if self._bytes is None:
            raise TierFault(f"the arena {self.path.name} is not open")
        return slot_rules.offset_of(
            slot,
            arena=self.arena_id,
            allocated_bytes=self._allocated_bytes,
            extent_bytes=self._extent_bytes,
        )

    async def _copy(self, pairs: list[tuple[memoryview, memoryview]]) -> None:
        if sum(target.nbytes for target, _ in pairs) <= _INLINE_COPY_BYTES:
            _copy_all(pairs)
        else:
            await asyncio.to_thread(_copy_all, pairs)

    # ---- the worker's side: nothing below runs on the event loop

    def _open(self, progress: Progress) -> None:
        self._owner_fd = leftovers.own(self._shm_dir, self._node_id)
        try:
            self._old = tuple(leftovers.retire_own(self._shm_dir, self._node_id))
            for path in leftovers.remove_orphans(self._shm_dir, self._node_id):
                _log.info("removed the arena of a dead daemon", path=str(path))
            self._deadline_s = self._clock_s() + self._deadline_after_s
            wanted_bytes = self._room_bytes()
            shortage.check(self._capacity_bytes, wanted_bytes, self._shm_dir)
            self._check_nodes(wanted_bytes)
            progress(0, wanted_bytes)
            self._create()
            self._extend(wanted_bytes, progress)
            self._count_huge()
        except OSError as error:
            raise ResourceShortage(shortage.explain(error, self._capacity_bytes, self._shm_dir)) from error

    def _create(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o600)
        os.fchmod(self._fd, 0o600)
        os.ftruncate(self._fd, self._capacity_bytes)
        self._mapping = mmap.mmap(self._fd, self._capacity_bytes)
        self._bytes = memoryview(self._mapping)
        if self._bound_to and (why := binding.bind(self._mapping, self._bound_to)):
            where = ", ".join(map(str, self._bound_to))
            self._unbound = f"its memory is not bound to NUMA node {where}: {why}"
            _log.warning("the arena is not bound to its NUMA node", nodes=where, why=why)

    def _check_nodes(self, wanted_bytes: int) -> None:
        if self._bound_to and not self._unbound:
            binding.check_room("dram_bytes", wanted_bytes, self._bound_to, numa.memory_nodes())

    def _count_huge(self) -> None:
        """Even where huge pages are allowed, memory in small pieces gives none."""
        assert self._mapping is not None
        if not self._needs_huge or self._stopping.is_set():
            return
        found = shm.huge_bytes(self._mapping)
        if found < self._allocated_bytes * ENOUGH_HUGE:
            self._few_huge = (
                f"only {found} of {self._allocated_bytes} bytes lie in huge pages, since memory is in small "
                "pieces: echo 1 > /proc/sys/vm/compact_memory, then start the daemon again"
            )
            _log.warning("few huge pages", huge_bytes=found, allocated_bytes=self._allocated_bytes)

    def _extend(self, target_bytes: int, progress: Progress | None = None) -> None:
        """Allocate and touch up to `target_bytes`, extent by extent; stops early on `close`."""
        while self._allocated_bytes < target_bytes:
            begin, end = self._allocated_bytes, self._allocated_bytes + self._extent_bytes
            for offset_bytes in range(begin, end, shm.CHUNK_BYTES):
                if self._stopping.is_set():
                    return
                self._back(offset_bytes, min(shm.CHUNK_BYTES, end - offset_bytes))
            self._allocated_bytes = end
            if progress is not None:
                progress(end, target_bytes)

    def _back(self, offset_bytes: int, size_bytes: int) -> None:
        assert self._fd is not None
        assert self._mapping is not None
        shm.advise(self._mapping, offset_bytes, size_bytes, huge=self._is_huge)
        if self._is_huge:
            shm.populate_first(self._mapping, offset_bytes, size_bytes)
        shm.allocate(self._fd, offset_bytes, size_bytes)
        shm.populate(self._mapping, offset_bytes, size_bytes)

    def _room_bytes(self) -> int:
        """What this arena may have: the cap less what older ones still take, in whole extents."""
        room_bytes = max(0, self._capacity_bytes - self.old_arena_bytes)
        return room_bytes // self._extent_bytes * self._extent_bytes

    def _grow(self) -> None:
        before_bytes = self._allocated_bytes
        try:
            self._settle_old()
            step_bytes = max(GROW_STEP_BYTES // self._extent_bytes, 1) * self._extent_bytes
            target_bytes = min(self._room_bytes(), before_bytes + step_bytes)
            self._check_nodes(max(0, target_bytes - before_bytes))
            self._extend(target_bytes)
        except (OSError, ResourceShortage) as error:
            self._give_back()
            if not self._complained:
                why = str(error)
                if isinstance(error, OSError):
                    why = shortage.explain(error, self._capacity_bytes, self._shm_dir)
                _log.warning("the arena cannot grow now and tries again", error=why)
            self._complained = True
        else:
            self._complained = False
        if self._allocated_bytes > before_bytes:
            _log.info("the arena grew", allocated_bytes=self._allocated_bytes)

    def _give_back(self) -> None:
        """Return what a failed step got of the next extent: what is not usable is not taken either."""
        assert self._fd is not None
        if self._allocated_bytes < self._capacity_bytes:
            shm.punch(self._fd, self._allocated_bytes, self._extent_bytes)

    def _settle_old(self) -> None:
        """Remove older arenas that no engine maps any more; past the deadline take their memory."""
        free = [old for old in self._old if old.is_free()]
        with self._old_lock:
            self._old = tuple(old for old in self._old if old not in free)
        for old in free:
            old.remove()
        if self._clock_s() < self._deadline_s:
            return
        for old in self._old:
            if taken_bytes := old.used_bytes:
                _log.warning(
                    "took memory from engines that still map it", path=str(old.path), bytes=taken_bytes
                )
                old.punch()

    def _close(self) -> None:
        """Give everything back; also what a failed `_open` left."""
        if self._bytes is not None:
            self._bytes.release()
            self._bytes = None
        if self._mapping is not None:
            try:
                self._mapping.close()
            except BufferError:
                _log.debug("a view of the arena is still in use: it is unmapped with the last view")
            self._mapping = None
        self._allocated_bytes = 0
        with self._old_lock:
            kept, self._old = self._old, ()
        if self._fd is not None:
            mine = leftovers.retire(self.path, self._fd)
            self._fd = None
            kept += (mine,) if mine is not None else ()
        for old in kept:
            if old.is_free():
                old.remove()
            else:
                old.punch()
                os.close(old.fd)
        if self._owner_fd is not None:
            leftovers.disown(self._shm_dir, self._node_id, self._owner_fd)
            self._owner_fd = None


def _copy_all(pairs: list[tuple[memoryview, memoryview]]) -> None:
    for target, source in pairs:  # numpy releases the GIL, a memoryview's slice assignment does not
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
