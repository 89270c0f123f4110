"""A tier that fails when it is told to: errors, operations that do not come back, blocks that went bad.

What is stopped is late, not lost: when it goes on, it reads or writes the buffers that it was given, as a
device does that has not answered for a while. So whoever gives a slot away too early is found out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvtier.errors import TierFault
from kvtier.interfaces import Durable, Failing, Growing, Tier
from kvtier.types import BlockRecord, Slot


class LastingTier(Growing, Durable, Failing, Protocol):
    """What the wrapped tier has beside `Tier`."""


class FaultyTier(Tier):
    """Passes everything on to `inner`, less what was told to fail. Used from one event loop.

    The operations are named ``read``, ``write``, ``drop``, ``probe`` and ``checkpoint``.
    """

    def __init__(self, inner: Tier) -> None:
        assert isinstance(inner, Growing)
        assert isinstance(inner, Durable)
        assert isinstance(inner, Failing)
        self.inner = inner
        self.kind = inner.kind  # type: ignore[misc]
        self.traits = inner.traits  # type: ignore[misc]
        self.arena_id = getattr(inner, "arena_id", 0)
        self.begun: Counter[str] = Counter()
        self._lasting: LastingTier = inner
        self._errors: Counter[str] = Counter()
        self._gates: dict[str, asyncio.Event] = {}
        self._waiting = 0
        self._bad: set[Slot] = set()
        self._fault = ""

    # ---- what goes wrong

    def fail(self, operation: str, times: int = 1) -> None:
        """The next so many of these raise `TierFault`, having done nothing."""
        self._errors[operation] += times

    def stop(self, *operations: str) -> None:
        """These do not come back, nor touch anything, until `go`."""
        for operation in operations:
            self._gates.setdefault(operation, asyncio.Event())

    def go(self, *operations: str) -> None:
        """What was stopped is carried out now; without names: everything."""
        for operation in operations or tuple(self._gates):
            self._gates.pop(operation).set()

    def spoil(self, slots: Sequence[Slot]) -> None:
        """Reads find these slots wrong, and leave garbage in their buffers, until they are written again."""
        self._bad.update(slots)

    def quarantine(self, reason: str) -> None:
        """What begins from now on is a `TierFault`, until a probe succeeds (`stop` it, or let it)."""
        self._fault = reason

    @property
    def stopped(self) -> int:
        """Operations that wait for `go`."""
        return self._waiting

    async def _begin(self, operation: str) -> None:
        self.begun[operation] += 1
        if operation != "probe" and self.fault:
            raise TierFault(self.fault)
        cancelled: asyncio.CancelledError | None = None
        self._waiting += 1
        try:
            while (gate := self._gates.get(operation)) is not None:
                waiting = asyncio.ensure_future(gate.wait())
                while not waiting.done():
                    try:
                        await asyncio.wait([waiting])
                    except asyncio.CancelledError as error:  # the device does not know of that
                        cancelled = error
        finally:
            self._waiting -= 1
        if cancelled is not None:
            raise cancelled
        if self._errors[operation]:
            self._errors[operation] -= 1
            raise TierFault(f"{operation} failed, as it was told to")

    # ---- Tier

    @property
    def capacity_bytes(self) -> int:
        """Of the inner tier."""
        return self.inner.capacity_bytes

    @property
    def allocated_bytes(self) -> int:
        """Of the inner tier."""
        return self.inner.allocated_bytes

    @property
    def extent_bytes(self) -> int:
        """Of the inner tier."""
        return self.inner.extent_bytes

    async def open(self) -> None:
        """Open the inner tier."""
        await self.inner.open()

    async def read(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], into: Sequence[memoryview]
    ) -> list[int]:
        """Read, with spoiled slots found wrong."""
        await self._begin("read")
        wrong = set(await self.inner.read(slots, records, into))
        for position, slot in enumerate(slots):
            if slot in self._bad:
                wrong.add(position)
                into[position].cast("B")[: records[position].block_bytes] = (
                    b"!" * records[position].block_bytes
                )
        return sorted(wrong)

    async def write(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], payloads: Sequence[memoryview]
    ) -> None:
        """Write; then the slots are not spoiled any more."""
        await self._begin("write")
        await self.inner.write(slots, records, payloads)
        self._bad.difference_update(slots)

    async def drop(self, slots: Sequence[Slot]) -> None:
        """Drop."""
        await self._begin("drop")
        await self.inner.drop(slots)

    async def close(self) -> None:
        """Close the inner tier."""
        await self.inner.close()

    # ---- Growing, Durable, Failing

    def grow(self) -> int:
        """Grow the inner tier."""
        return self._lasting.grow()

    def recovered(self) -> Iterator[list[tuple[Slot, BlockRecord]]]:
        """What the inner tier found."""
        return self._lasting.recovered()

    async def checkpoint(self) -> None:
        """Write the inner tier's checkpoint."""
        await self._begin("checkpoint")
        await self._lasting.checkpoint()

    @property
    def fault(self) -> str:
        """What `quarantine` said, or the inner tier says."""
        return self._fault or self._lasting.fault

    async def probe(self) -> bool:
        """End the quarantine, unless something is still stopped or the probe was told to fail."""
        try:
            if self._waiting:
                return False
            await self._begin("probe")
        except TierFault:
            return False
        if not await self._lasting.probe():
            return False
        self._fault = ""
        return True
