"""The file tier's threads as its event loop sees them: jobs go to them and are waited for to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvtier.errors import TierFault
from kvtier.tiers.file_threads import Batch, Health, Job, Pool


class Crew:
    """Threads for the blocks, and the **keeper**: one more for what has nobody's buffers.

    Used from one event loop, for one `start` and `stop`.

    Parameters
    ----------
    threads
        Operations that the device is asked at once, the keeper's not counted.
    """

    def __init__(self, health: Health, threads: int) -> None:
        self._health = health
        self._threads = threads
        self._pools: list[Pool] = []
        self._io: Pool | None = None
        self._keeper: Pool | None = None
        self._keeping = asyncio.Lock()
        self._left: Batch | None = None

    @property
    def is_started(self) -> bool:
        """Whether it does jobs for the blocks."""
        return self._io is not None

    def start(self) -> None:
        """Start the threads."""
        self._io, self._keeper = Pool(self._threads, "kvtier-file"), Pool(1, "kvtier-file-keeper")
        self._pools = [self._io, self._keeper]

    def close(self) -> None:
        """Begin nothing more for the blocks; the keeper goes on until `stop`."""
        self._io = None

    async def stop(self) -> bool:
        """End all threads; False where the kernel still has some after the deadline."""
        pools = self._pools
        stopped = await asyncio.to_thread(lambda: [pool.stop(self._health.deadline_s) for pool in pools])
        return all(stopped)

    @property
    def is_keeping(self) -> bool:
        """Whether the keeper has a job, be it one that was left behind."""
        return self._keeping.locked() or self._is_kept_busy

    @property
    def _is_kept_busy(self) -> bool:
        """Whether a job that was left behind still runs."""
        return self._left is not None and not self._left.has_ended

    async def keep(self, job: Job) -> None:
        """One job on the keeper's thread, one at a time; it has nobody's buffers: it may be left."""
        async with self._keeping:
            if self._is_kept_busy:
                raise TierFault(self._health.fault or "the device has not answered yet")
            await self._settle(self._keeper, [job], leave=True)

    async def settled(self, jobs: Sequence[Job], *, leave: bool = False) -> None:
        """Do the jobs, and return or raise only when none of them runs any more.

        Whatever ends the wait early (cancellation, a device that does not answer) lets go what has not begun
        and then goes on waiting for the rest: it still has the caller's buffers. With `leave` it has not.

        Raises
        ------
        TierFault
            The device failed, or does not answer; or whatever else a job raised.
        """
        await self._settle(self._io, jobs, leave=leave)

    async def _settle(self, pool: Pool | None, jobs: Sequence[Job], *, leave: bool) -> None:
        if not jobs:
            return
        if pool is None:
            raise TierFault("the file tier is not open")
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        batch = Batch(jobs, lambda: _tell(loop, ended))
        pool.submit(batch)
        cancelled: asyncio.CancelledError | None = None
        stuck = ""
        while not ended.done():
            try:
                await asyncio.wait([ended], timeout=self._health.deadline_s / 4)
            except asyncio.CancelledError as error:
                cancelled = error
                batch.abandon()
            if not ended.done() and self._health.is_stuck:
                stuck = self._health.fault
                batch.abandon()
                if leave and not batch.has_ended:
                    self._left = batch
                    break
        if cancelled is not None:
            raise cancelled
        if batch.error is not None:
            raise batch.error
        if stuck:
            raise TierFault(stuck)


def _tell(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(ended.set_result, None)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return
