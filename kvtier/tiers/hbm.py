"""The HBM tier: a slab of device memory that the node owns, for the hottest prefixes; engines map it by IPC.

Extents and slots are the arena's. What differs: the bytes are no memory of this process, so there are no
views, and every read and write is a copy over the bus, batched on the slab's stream, in a thread of its own.
Device ``cpu`` stands for HBM where there is none. Nothing outlives the node; nothing is verified here, as in
the arena: checksums travel with the blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

from kvtier import logs
from kvtier.errors import ConfigError, ResourceShortage, TierFault, Unavailable
from kvtier.interfaces import Tier, TierTraits
from kvtier.tiers import device as devices
from kvtier.tiers import slots as slot_rules
from kvtier.tiers.device import Copy, Slab
from kvtier.types import PAGE_SIZE_BYTES, BlockRecord, Slot, TierKind

_T = TypeVar("_T")

_log = logs.get("hbm")


class HbmTier(Tier):
    """Device memory in fixed-size extents; implements `Tier`. Use one object for one `open` and `close`.

    Parameters
    ----------
    incarnation
        Of this daemon: slots of an earlier one are recognised.
    capacity_bytes
        Hard cap, taken whole at `open`; a multiple of `extent_bytes`.
    device
        ``cuda:N`` or ``cpu``.
    """

    kind: ClassVar[TierKind] = TierKind.HBM
    traits: ClassVar[TierTraits] = TierTraits(frees_at_once=True)

    def __init__(
        self, *, incarnation: int, capacity_bytes: int, extent_bytes: int, device: str = "cuda:0"
    ) -> None:
        if extent_bytes <= 0 or extent_bytes % PAGE_SIZE_BYTES:
            raise ConfigError(f"extent_bytes is {extent_bytes}: allowed is a multiple of {PAGE_SIZE_BYTES}")
        if capacity_bytes <= 0 or capacity_bytes % extent_bytes:
            raise ConfigError(f"hbm_bytes is {capacity_bytes}: allowed is a multiple of {extent_bytes}")
        self.device = devices.check_device(device)
        self._incarnation = incarnation
        self._capacity_bytes = capacity_bytes
        self._extent_bytes = extent_bytes
        self._slab: Slab | None = None
        self._worker: ThreadPoolExecutor | None = None

    @property
    def capacity_bytes(self) -> int:
        """The hard cap."""
        return self._capacity_bytes

    @property
    def allocated_bytes(self) -> int:
        """All of it while the tier is open."""
        return 0 if self._slab is None else self._capacity_bytes

    @property
    def extent_bytes(self) -> int:
        """Size of an extent."""
        return self._extent_bytes

    @property
    def arena_id(self) -> int:
        """What `Slot.arena` has to be."""
        return self._incarnation & 0xFFFFFFFF

    @property
    def slab(self) -> Slab:
        """The memory itself; `TierFault` while the tier is not open."""
        if self._slab is None:
            raise TierFault("the HBM tier is not open")
        return self._slab

    def handle(self) -> bytes:
        """What an engine of this user and machine maps the slab by (`kvtier.tiers.device.import_slab`)."""
        return self.slab.handle()

    # ---- life

    async def open(self) -> None:
        """Take the memory; a second call changes nothing.

        Raises
        ------
        ResourceShortage
            The device is not here, or has too little memory left; names `hbm_bytes` and `hbm_device`.
        """
        if self._worker is not None:
            return
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvtier-hbm")
        try:
            self._slab = await self._run(lambda: devices.allocate(self.device, self._capacity_bytes))
        except BaseException as error:
            await self.close()
            if isinstance(error, Unavailable):
                raise ResourceShortage(
                    f"hbm_bytes is {self._capacity_bytes} on hbm_device {self.device}, but {error}: lower it,"
                    " name another device, or set it to 0 for no such tier"
                ) from error
            raise
        _log.info("took device memory", device=self.device, bytes=self._capacity_bytes)

    async def close(self) -> None:
        """Give the memory back; idempotent. Engines that map it have no valid lease any more."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        closing = worker.submit(self._close)  # behind whatever copy still runs
        try:
            await asyncio.shield(asyncio.wrap_future(closing))
        finally:
            worker.shutdown()

    def _close(self) -> None:
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.close()

    # ---- bytes

    async def read(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], into: Sequence[memoryview]
    ) -> list[int]:
        """Fill each buffer; memory keeps no records, so no slot is ever found wrong."""
        slab, copies = self.slab, self._copies(slots, records, into)
        if copies:
            await self._run(lambda: slab.copy_out(copies))
        return []

    async def write(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], payloads: Sequence[memoryview]
    ) -> None:
        """Write each payload; raises `TierFault`, before any byte is copied where a slot is none."""
        slab, copies = self.slab, self._copies(slots, records, payloads)
        if copies:
            await self._run(lambda: slab.copy_in(copies))

    async def drop(self, slots: Sequence[Slot]) -> None:
        """Nothing to do for memory but to check the slots; raises `TierFault`."""
        for slot in slots:
            self.offset_of(slot)

    def offset_of(self, slot: Slot) -> int:
        """Where a slot begins in the slab; raises `TierFault` where it is none."""
        if self._slab is None:
            raise TierFault("the HBM tier is not open")
        return slot_rules.offset_of(
            slot,
            arena=self.arena_id,
            allocated_bytes=self._capacity_bytes,
            extent_bytes=self._extent_bytes,
        )

    def _copies(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], buffers: Sequence[memoryview]
    ) -> list[Copy]:
        slot_rules.check_counts(slots, records, buffers)
        return [
            (self.offset_of(slot), slot_rules.bytes_of(slot, record, buffer))
            for slot, record, buffer in zip(slots, records, buffers, strict=True)
        ]

    async def _run(self, work: Callable[[], _T]) -> _T:
        """In the tier's thread. Who cancels it waits all the same: the copy has the caller's buffers."""
        if self._worker is None:
            raise TierFault("the HBM tier is not open")
        running = asyncio.get_running_loop().run_in_executor(self._worker, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                try:
                    await asyncio.wait([running])
                except asyncio.CancelledError:
                    continue
            running.exception()
            raise
