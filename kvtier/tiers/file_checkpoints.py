"""What the file tier writes down of itself while it runs: marks in the table, checkpoints, wear.

Why a checkpoint and the marks together are right after a crash is told in `file_extents`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvtier.errors import TierFault
from kvtier.tiers import file_extents, file_format
from kvtier.tiers.file_crew import Crew
from kvtier.tiers.file_extents import Extent
from kvtier.tiers.file_format import Catalogue
from kvtier.tiers.file_medium import Medium
from kvtier.tiers.file_threads import Positions

_DAY_S: Final = 86400


class Wear:
    """Bytes that were written to the medium, by earlier daemons too.

    Parameters
    ----------
    now_s
        The wall clock.
    """

    def __init__(self, medium: Medium, now_s: Callable[[], float]) -> None:
        self._medium = medium
        self._now_s = now_s
        self._before_bytes = 0
        self._day = 0
        self._day_begin_bytes = 0

    @property
    def since_open_bytes(self) -> int:
        """Since the medium was opened, everything included."""
        return sum(stripe.written_bytes for stripe in self._medium.stripes)

    @property
    def ever_bytes(self) -> int:
        """Since the medium was made."""
        return self._before_bytes + self.since_open_bytes

    @property
    def today_bytes(self) -> int:
        """Since midnight UTC."""
        return self.ever_bytes - self.day()[1]

    def day(self) -> tuple[int, int]:
        """The UTC day (days since 1970), and `ever_bytes` when it began."""
        day = int(self._now_s() // _DAY_S)
        if day != self._day:
            self._day, self._day_begin_bytes = day, self.ever_bytes
        return self._day, self._day_begin_bytes

    def resume(self, catalogues: Sequence[Catalogue | None], position: int) -> None:
        """Go on from what the latest catalogue says, and from the position that writes have come to."""
        latest = max((c for c in catalogues if c is not None), key=lambda c: c.epoch, default=None)
        if latest is not None:
            self._day, self._day_begin_bytes = latest.day, latest.day_begin_bytes
            self._before_bytes = latest.written_bytes - latest.position
        self._before_bytes += position - self.since_open_bytes
        self.day()


class Checkpoints:
    """Marks extents before they change, and writes catalogues. Used from the tier's event loop.

    Parameters
    ----------
    extents
        The tier's own, filled when it opens.

    Attributes
    ----------
    epoch
        The present one; higher than any on the medium.
    """

    def __init__(
        self, medium: Medium, extents: list[Extent], positions: Positions, wear: Wear, crew: Crew
    ) -> None:
        self.epoch = 0
        self._medium = medium
        self._extents = extents
        self._positions = positions
        self._wear = wear
        self._crew = crew
        self._is_covered = False

    async def mark(self, numbers: Iterable[int]) -> None:
        """Return when the table says of these extents that they change in this epoch.

        Raises
        ------
        TierFault
            It could not be written: nothing in these extents may be changed.
        """
        wanted = sorted(set(numbers))
        while True:  # a checkpoint, or another slot size, may come in between
            for number in wanted:
                extent = self._extents[number]
                if extent.epoch != self.epoch and extent.marking is None:
                    extent.marking = asyncio.create_task(self._write_mark(number, extent))
            tasks = [task for number in wanted if (task := self._extents[number].marking) is not None]
            if not tasks:
                return
            await asyncio.wait(tasks)
            for task in tasks:
                if (error := task.result()) is not None:
                    raise error

    async def _write_mark(self, number: int, extent: Extent) -> TierFault | None:
        now = (self.epoch, extent.generation)
        page = file_format.pack_table_entry(self._medium.number, number, extent.entry(self.epoch))
        stripe, offset_bytes = self._medium.table_page(number)
        try:
            await self._crew.settled([lambda scratch: stripe.store(offset_bytes, page)])
        except TierFault as error:
            return error
        finally:
            extent.marking = None
        if now == (self.epoch, extent.generation):
            extent.epoch = self.epoch
        return None

    async def write_if_changed(self) -> None:
        """Write a checkpoint beside reads and writes, unless the last one left nothing out and holds."""
        if not self._is_covered or any(self._has_changed(extent) for extent in self._extents):
            self._is_covered = False  # also if it fails
            self._is_covered = await self.write()

    def _has_changed(self, extent: Extent) -> bool:
        """Since the last checkpoint."""
        return extent.epoch == self.epoch or bool(extent.busy) or extent.marking is not None

    async def write(self) -> bool:
        """Write a checkpoint; whether nothing was left out because it was changing.

        Raises
        ------
        TierFault
            The device failed, or does not answer: the last checkpoint still holds.
        """
        self.epoch += 1
        covered = [
            (number, extent)
            for number, extent in enumerate(self._extents)
            if extent.slot_bytes and not extent.busy and extent.marking is None
        ]
        day, day_begin_bytes = self._wear.day()
        counters = (self._positions.settled, self._wear.ever_bytes, day, day_begin_bytes)
        epoch = self.epoch
        is_whole = len(covered) == sum(extent.slot_bytes > 0 for extent in self._extents)
        await self._crew.keep(lambda scratch: self._write_catalogues(epoch, covered, counters))
        return is_whole

    def _write_catalogues(
        self, epoch: int, covered: Sequence[tuple[int, Extent]], counters: tuple[int, int, int, int]
    ) -> None:
        count = len(self._medium.stripes)
        for stripe, superblock in zip(self._medium.stripes, self._medium.superblocks, strict=True):
            own = [pair for pair in covered if pair[0] % count == superblock.stripe]
            catalogue = file_extents.catalogue_of(own, superblock.catalogue_bytes, epoch, counters)
            stripe.store(superblock.catalogue_offset(epoch), catalogue.pack(superblock.medium))
            stripe.flush()
