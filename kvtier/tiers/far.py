"""The tier of far memory: memory of other NUMA nodes, CXL expanders for one, below the arena and above NVMe.

Each region is an anonymous mapping of this process, bound to its node: no engine maps it, nothing of it
outlives the daemon, whichever way that dies. All regions make one tier, the nearest one first: its extents
have the lowest offsets, which the core fills first. Blocks do not move from one region to another.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeVar

import numpy as np
import xxhash

from kvtier import logs, machine
from kvtier.errors import ConfigError, ResourceShortage, TierFault
from kvtier.interfaces import Tier, TierTraits
from kvtier.tiers import binding, numa, shm
from kvtier.tiers.numa import MemoryNode
from kvtier.types import PAGE_SIZE_BYTES, BlockRecord, Slot, TierKind

THREADS: Final = 2
"""Copies at once: one thread hardly fills the link to a far node, many take it from the engines."""

T = TypeVar("T")
_log = logs.get("far")


@dataclass(slots=True)
class Region:
    """Memory of one node; `node` None: wherever the kernel puts it."""

    node: int | None
    size_bytes: int
    mapping: mmap.mmap | None = None
    bytes: memoryview | None = None
    notices: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For messages."""
        return "any node" if self.node is None else f"node {self.node}"


class FarMemory(Tier):
    """Implements `Tier` and `Mapped` (for demotes from here, not for engines).

    Memory is taken and touched by `open`; after it, copies run in `THREADS` threads that release the GIL.
    What `read` gives has the checksum of its record, or is named as wrong.

    Parameters
    ----------
    regions
        (NUMA node or None, bytes), each once, the nearest first; whole extents.
    extent_bytes
        Unit of allocation, whole pages.
    nodes
        The machine's nodes as they are known.
    huge_pages
        ``off``: ordinary pages; ``advise`` and ``require`` ask for huge ones (whether they are to be had is
        for the caller to check).
    on_progress
        Told (bytes ready, bytes wanted) on the event loop that opens the tier.
    """

    kind: ClassVar[TierKind] = TierKind.FAR
    traits: ClassVar[TierTraits] = TierTraits(frees_at_once=True)

    def __init__(
        self,
        regions: Sequence[tuple[int | None, int]],
        *,
        extent_bytes: int,
        nodes: Sequence[MemoryNode] = (),
        huge_pages: str = "advise",
        on_progress: Callable[[int, int], object] | None = None,
    ) -> None:
        if extent_bytes <= 0 or extent_bytes % mmap.PAGESIZE:
            raise ConfigError(f"extent_bytes is {extent_bytes}: allowed is a multiple of {mmap.PAGESIZE}")
        for _, size_bytes in regions:
            if size_bytes <= 0 or size_bytes % extent_bytes:
                raise ConfigError(
                    f"far_memory has {size_bytes} bytes: allowed is a multiple of {extent_bytes}"
                )
        self._regions = [Region(node, size_bytes) for node, size_bytes in regions]
        self._begins = [sum(its.size_bytes for its in self._regions[:i]) for i in range(len(regions))]
        self._capacity_bytes = sum(its.size_bytes for its in self._regions)
        self._extent_bytes = extent_bytes
        self._nodes = nodes
        self._is_huge = huge_pages != "off" and extent_bytes % numa.huge_page_bytes() == 0
        self._on_progress = on_progress
        self._stopping = threading.Event()
        self._is_open = False
        self._pool: ThreadPoolExecutor | None = None

    @property
    def capacity_bytes(self) -> int:
        """The hard cap, of all regions."""
        return self._capacity_bytes

    @property
    def allocated_bytes(self) -> int:
        """All of it, or nothing before `open` and after `close`."""
        return self._capacity_bytes if self._is_open else 0

    @property
    def extent_bytes(self) -> int:
        """Size of an extent."""
        return self._extent_bytes

    @property
    def notices(self) -> list[str]:
        """What is not as it was asked for."""
        return [f"{region.name}: {notice}" for region in self._regions for notice in region.notices]

    # ---- the life of the medium

    async def open(self) -> None:
        """Map, bind and touch the memory; a second call changes nothing.

        Raises
        ------
        ConfigError
            A region names a node that has no memory.
        ResourceShortage
            There is not so much memory; names `far_memory`.
        """
        if self._pool is not None:
            return
        loop = asyncio.get_running_loop()
        report = self._on_progress

        def progress(done_bytes: int) -> None:
            if report is not None:
                loop.call_soon_threadsafe(report, done_bytes, self._capacity_bytes)

        self._stopping.clear()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvtier-far")
        try:
            await self._run(self._open, progress)
        except BaseException:
            await self.close()
            raise
        self._is_open = True

    async def close(self) -> None:
        """Give the memory back; idempotent."""
        self._stopping.set()
        self._is_open = False
        pool, self._pool = self._pool, None
        if pool is None:
            return
        await asyncio.to_thread(pool.shutdown)
        for region in self._regions:
            _release(region)

    def _open(self, progress: Callable[[int], None]) -> None:
        for region in self._regions:
            if region.node is not None:
                binding.require("far_memory", region.node, self._nodes)
                binding.check_room("far_memory", region.size_bytes, [region.node], self._nodes)
        available = machine.memory_available_bytes()
        if self._capacity_bytes > available:
            raise ResourceShortage(
                f"far_memory is {self._capacity_bytes} bytes, but only {available} bytes of memory are "
                "available: lower it"
            )
        done_bytes = 0
        for region in self._regions:
            try:
                done_bytes = self._take(region, done_bytes, progress)
            except OSError as error:
                raise ResourceShortage(
                    f"far_memory: {region.size_bytes} bytes of {region.name} are not to be had ({error}): "
                    "lower it"
                ) from error
            if self._stopping.is_set():
                return

    def _take(self, region: Region, done_bytes: int, progress: Callable[[int], None]) -> int:
        mapping = mmap.mmap(-1, region.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region.mapping, region.bytes = mapping, memoryview(mapping)
        if region.node is not None and (why := binding.bind(mapping, [region.node])):
            region.notices.append(f"its memory is not bound there: {why}")
            _log.warning("far memory is not bound to its node", node=region.node, why=why)
        shm.keep_private(mapping)
        for offset_bytes in range(0, region.size_bytes, shm.CHUNK_BYTES):
            if self._stopping.is_set():
                return done_bytes
            size_bytes = min(shm.CHUNK_BYTES, region.size_bytes - offset_bytes)
            shm.advise(mapping, offset_bytes, size_bytes, huge=self._is_huge)
            shm.populate(mapping, offset_bytes, size_bytes)
            done_bytes += size_bytes
            progress(done_bytes)
        return done_bytes

    # ---- bytes

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes themselves, writable; valid until `close`. Raises `TierFault`."""
        begin = self._checked(slot)
        index = bisect_right(self._begins, begin) - 1
        content = self._regions[index].bytes
        assert content is not None
        begin -= self._begins[index]
        return content[begin : begin + slot.size_bytes]

    async def read(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], into: Sequence[memoryview]
    ) -> list[int]:
        """Fill each buffer; what then has not the checksum of its record is wrong.

        Raises `TierFault` before any byte is copied.
        """
        pairs = [(buffer, view) for view, buffer in self._pairs(slots, records, into)]
        checksums = [record.checksum for record in records]
        return await self._run(_copy_and_compare, pairs, checksums)

    async def write(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], payloads: Sequence[memoryview]
    ) -> None:
        """Write each payload; raises `TierFault` before any byte is copied."""
        await self._run(_copy, self._pairs(slots, records, payloads))

    async def drop(self, slots: Sequence[Slot]) -> None:
        """Nothing to do for memory but to check the slots; raises `TierFault`."""
        for slot in slots:
            self._checked(slot)

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        """Also where it is cancelled it ends only when the thread has."""
        assert self._pool is not None
        running = asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args))
        cancelled = False
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                cancelled = True
                if not self._is_open:
                    self._stopping.set()
        if cancelled:
            running.exception()
            raise asyncio.CancelledError
        return running.result()

    def _pairs(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], buffers: Sequence[memoryview]
    ) -> list[tuple[memoryview, memoryview]]:
        """Each block's bytes in its slot, and in its buffer."""
        self._check_open()
        if not len(slots) == len(records) == len(buffers):
            raise TierFault(
                f"{len(slots)} slots, {len(records)} records and {len(buffers)} buffers were given"
            )
        pairs = []
        for slot, record, buffer in zip(slots, records, buffers, strict=True):
            size_bytes, view = record.block_bytes, self.view(slot)
            if size_bytes > slot.size_bytes or size_bytes > buffer.nbytes:
                raise TierFault(f"{size_bytes} bytes do not fit {slot} and a buffer of {buffer.nbytes} bytes")
            pairs.append((view[:size_bytes], buffer.cast("B")[:size_bytes]))
        return pairs

    def _check_open(self) -> None:
        if not self._is_open:
            raise TierFault("far memory is not open")

    def _checked(self, slot: Slot) -> int:
        """Offset of a slot that lies inside one extent, and so inside one region."""
        self._check_open()
        begin, size = slot.offset_bytes, slot.size_bytes
        if (
            slot.arena != 0
            or size <= 0
            or begin < 0
            or begin % PAGE_SIZE_BYTES
            or begin + size > self._capacity_bytes
            or begin // self._extent_bytes != slot.extent
            or (begin + size - 1) // self._extent_bytes != slot.extent
        ):
            raise TierFault(
                f"{slot} is no slot of far memory, which has {self._capacity_bytes} bytes in extents of "
                f"{self._extent_bytes}"
            )
        return begin


def _copy(pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
    for target, source in pairs:  # numpy releases the GIL, a memoryview's slice assignment does not
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _copy_and_compare(
    pairs: Sequence[tuple[memoryview, memoryview]], checksums: Sequence[bytes]
) -> list[int]:
    """Block by block, so that each is hashed while it is in cache; compared is what has arrived."""
    wrong = []
    for position, (pair, expected) in enumerate(zip(pairs, checksums, strict=True)):
        _copy([pair])
        if xxhash.xxh3_128_digest(pair[0]) != expected:
            wrong.append(position)
    return wrong


def _release(region: Region) -> None:
    region.notices.clear()
    if region.bytes is not None:
        region.bytes.release()
        region.bytes = None
    if region.mapping is not None:
        try:
            region.mapping.close()
        except BufferError:
            _log.debug("a view of far memory is still in use: it is unmapped with the last view")
        region.mapping = None
