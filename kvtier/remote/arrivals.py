"""Blocks of a lease that are still on their way: what has arrived, for the streams that tell engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvtier.core import messages as m


class _Expected:
    __slots__ = ("changed", "deadline_s", "is_over", "readies")

    def __init__(self, deadline_s: float) -> None:
        self.readies: list[m.Ready] = []
        self.deadline_s = deadline_s
        self.is_over = False
        self.changed = asyncio.Event()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Arrivals:
    """Keeps every `Ready` of a lease until the lease ends, so that a repeated `Load` is told all of them.

    Bounded by the leases that engines may have and by the blocks these name. Used from the event loop.
    """

    def __init__(self) -> None:
        self._expected: dict[int, _Expected] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, lease: int, deadline_s: float) -> None:
        """More blocks of this lease will come until `deadline_s`; a repeat changes nothing."""
        if lease not in self._expected:
            self._expected[lease] = _Expected(deadline_s)

    def add(self, ready: m.Ready) -> None:
        """Some have come; those of a lease that has ended interest nobody."""
        expected = self._expected.get(ready.lease)
        if expected is not None and not expected.is_over:
            expected.readies.append(ready)
            expected.is_over = ready.is_last
            expected.wake()

    def end(self, lease: int) -> None:
        """The lease has ended, and with it every stream that tells of it."""
        expected = self._expected.pop(lease, None)
        if expected is not None:
            expected.is_over = True
            expected.wake()

    def expire(self, now_s: float) -> None:
        """End what has run out."""
        for lease in [lease for lease, its in self._expected.items() if its.deadline_s <= now_s]:
            self.end(lease)

    async def stream(self, lease: int) -> AsyncIterator[m.Ready]:
        """All that has come, then what comes, until the last or the end of the lease."""
        expected = self._expected.get(lease)
        told = 0
        while expected is not None:
            while told < len(expected.readies):
                told += 1
                yield expected.readies[told - 1]
            if expected.is_over:
                return
            await expected.changed.wait()
