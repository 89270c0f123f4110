"""Carries the core's demotes and fetches out, and watches the media below the top tier. Decides only how.

A fetch reads in batches, two at a time; the first is small, so that an engine can begin to copy early. One
that is for a peer lets those for engines go first, batch by batch, as long as its time allows.
Demotes go `DEMOTES_AT_ONCE` at a time, so that one is compared with its checksums while another is written,
and wait for fetches and for their budget of bytes a second: nothing waits for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from kvtier import logs
from kvtier.batching import BATCHES_IN_FLIGHT, batches, settle
from kvtier.config import Config
from kvtier.core import messages as m
from kvtier.errors import KvtierError, TierFault
from kvtier.hashing import Hasher
from kvtier.interfaces import Durable, Failing, Mapped, Metered, Tier
from kvtier.metrics import Metrics
from kvtier.types import Slot, TierKind

PROBE_S: Final = 1.0
"""A tier that failed is tried again so often."""
CHECKPOINT_S: Final = 30.0
"""After a crash a tier that outlives the node has to look through what changed in so long."""
CHECKPOINT_SHARE: Final = 0.01
"""Checkpoints take at most this part of the time: those of a large medium are long."""
DEMOTES_AT_ONCE: Final = 2
MAX_YIELD_S: Final = 1.0
"""A demote lets fetches go first, but no longer than this."""

# Why a fetch brought less than it was asked for: `PullEnded.fault`.
CORRUPT: Final = "corrupt"
FAILED: Final = "tier"
CANCELLED: Final = "cancelled"

Report = Callable[[m.Event], object]

log = logs.get("tiering")


class Tiering:
    """Lives on the node's loop.

    Parameters
    ----------
    top
        The tier that engines read.
    below
        Open tiers, the fastest first; the node closes them, after all that was begun here has ended. Each
        tier but the last one is `Mapped`: what is copied down is read from the slots themselves.
    report
        The core's ear.
    """

    def __init__(
        self,
        top: Tier,
        below: Mapping[TierKind, Tier],
        hasher: Hasher,
        config: Config,
        metrics: Metrics,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._top = top
        self._below = below
        self._mapped = {tier.kind: tier for tier in (top, *below.values()) if isinstance(tier, Mapped)}
        self._hasher = hasher
        self._batch_bytes = config.pull_batch_bytes
        self._rate = config.demote_bytes_per_s
        self._metrics = metrics
        self._report = report
        self._clock = clock
        self._down: set[TierKind] = set()
        self._fetching = 0
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._fetching_for_engines = 0
        self._have_engines_all = asyncio.Event()
        self._have_engines_all.set()
        # One for each tier, so that a medium that hangs holds up no other; bounded by CoreConfig.max_demotes.
        self._demotes: dict[TierKind, asyncio.Queue[m.Demote]] = {kind: asyncio.Queue() for kind in below}
        self._paid_until_s = dict.fromkeys(below, 0.0)

    async def recover(self) -> None:
        """Tell the core what tiers that outlive the node have found; before anything else happens."""
        for kind, tier in self._below.items():
            if isinstance(tier, Durable):
                blocks = 0
                for batch in tier.recovered():
                    blocks += len(batch)
                    self._report(m.Recovered(kind, batch, is_last=False))
                    await asyncio.sleep(0)
                self._report(m.Recovered(kind, [], is_last=True))
                log.info("blocks of an earlier life", tier=kind.name.lower(), count=blocks)

    def background(self) -> Sequence[Coroutine[Any, Any, None]]:
        """What has to run, until cancelled."""
        if not self._below:
            return ()
        demotes = (self._demote_forever(kind) for kind in self._below for _ in range(DEMOTES_AT_ONCE))
        return (*demotes, self._watch_forever(), self._checkpoint_forever())

    @property
    def notices(self) -> list[str]:
        """What an operator should know of the tiers."""
        notices = [f"tier {self._top.kind.name.lower()}: {its}" for its in getattr(self._top, "notices", ())]
        for kind, tier in self._below.items():
            name = kind.name.lower()
            if isinstance(tier, Failing) and tier.fault:
                notices.append(f"tier {name} is out of use until it works again: {tier.fault}")
            notices += [f"tier {name}: {notice}" for notice in getattr(tier, "notices", ())]
        return notices

    @property
    def moved_bytes(self) -> dict[TierKind, dict[str, int]]:
        """What the media below have read and written, and written since midnight UTC."""
        return {
            kind: {
                "read": tier.read_bytes,
                "written": tier.written_bytes,
                "written_today": tier.written_today_bytes,
            }
            for kind, tier in self._below.items()
            if isinstance(tier, Metered)
        }

    # ---- up

    async def fetch(self, fetch: m.Fetch) -> None:
        """Report `Arrived` for what is here and right, and at last exactly one `PullEnded`.

        Raises nothing but `CancelledError`, and that after the `PullEnded`: then nothing writes the slots.
        """
        run = _Run(fetch, self._report, self._metrics)
        timer = asyncio.get_running_loop().call_later(fetch.timeout_s, run.overdue)
        self._count(fetch, 1)
        try:
            await self._read(run)
        except TierFault as error:
            run.fault = FAILED
            self._failed(fetch.tier, error)
        except asyncio.CancelledError:
            run.fault = CANCELLED
            raise
        finally:
            self._count(fetch, -1)
            timer.cancel()
            run.end()

    def _count(self, fetch: m.Fetch, change: int) -> None:
        self._fetching += change
        self._fetching_for_engines += 0 if fetch.yields else change
        _set(self._is_quiet, not self._fetching)
        _set(self._have_engines_all, not self._fetching_for_engines)

    async def _read(self, run: _Run) -> None:
        fetch, tier = run.fetch, self._below[run.fetch.tier]
        waiting = deque(batches(len(fetch.records), fetch.records[0].block_bytes, self._batch_bytes))
        flying: deque[tuple[slice, asyncio.Task[list[int]]]] = deque()
        try:
            while waiting or flying:
                if fetch.yields and not flying and not run.is_overdue:
                    await self._let_engines_first(fetch.timeout_s)
                most = 1 if fetch.yields and self._fetching_for_engines else BATCHES_IN_FLIGHT
                while waiting and len(flying) < most and not run.is_overdue:
                    batch = waiting.popleft()
                    flying.append((batch, asyncio.create_task(self._read_batch(tier, fetch, batch))))
                if not flying:
                    return  # it is too late for the rest
                batch, task = flying[0]
                wrong = await asyncio.shield(task)
                flying.popleft()
                if not run.arrived(batch, wrong):
                    return
        finally:
            for _, task in flying:
                task.cancel()
            await settle([task for _, task in flying])

    async def _let_engines_first(self, most_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._have_engines_all.wait()

    async def _read_batch(self, tier: Tier, fetch: m.Fetch, batch: slice) -> list[int]:
        views = [self._memory(self._top.kind, slot) for slot in fetch.slots[batch]]
        try:
            return await tier.read(fetch.sources[batch], fetch.records[batch], views)
        finally:
            for view in views:
                view.release()

    def _memory(self, kind: TierKind, slot: Slot) -> memoryview:
        return self._mapped[kind].view(slot)

    # ---- down

    def demote(self, demote: m.Demote) -> None:
        """Do it when there is time; the core waits for `Demoted`, nobody else does."""
        self._demotes[demote.tier].put_nowait(demote)

    async def _demote_forever(self, kind: TierKind) -> None:
        while True:
            demote = await self._demotes[kind].get()
            size_bytes = sum(record.block_bytes for record in demote.records)
            await self._take_turn(kind, size_bytes)
            self._report(await self._copy_down(demote))

    async def _take_turn(self, kind: TierKind, size_bytes: int) -> None:
        """Wait while fetches run, for a bounded time, and until the budget allows so many bytes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_YIELD_S):
                await self._is_quiet.wait()
        if self._rate:
            begin_s = max(self._clock(), self._paid_until_s[kind])
            self._paid_until_s[kind] = begin_s + size_bytes / self._rate
            await asyncio.sleep(max(0.0, begin_s - self._clock()))

    async def _copy_down(self, demote: m.Demote) -> m.Demoted:
        """The bytes are compared with their checksums first: nothing wrong goes where it would stay."""
        views = [
            self._memory(demote.source, slot)[: record.block_bytes]
            for slot, record in zip(demote.sources, demote.records, strict=True)
        ]
        checksums = [record.checksum for record in demote.records]
        corrupt = await self._hasher.differing(views, checksums)
        self._metrics.verified_bytes.labels("demote").inc(sum(its.block_bytes for its in demote.records))
        if corrupt:
            self._metrics.mismatches.labels("demote").inc(len(corrupt))
        good = sorted(set(range(len(demote.records))) - set(corrupt))
        records = [demote.records[i] for i in good]
        payloads = [self._memory(demote.source, demote.sources[i]) for i in good]
        try:
            await self._below[demote.tier].write([demote.slots[i] for i in good], records, payloads)
        except TierFault as error:
            self._failed(demote.tier, error)
            return m.Demoted(demote.demote, (), corrupt, FAILED)
        finally:
            for payload in payloads:
                payload.release()
        written_bytes = sum(record.block_bytes for record in records)
        self._metrics.demoted_bytes.labels(demote.tier.name.lower()).inc(written_bytes)
        return m.Demoted(demote.demote, good, corrupt)

    # ---- media that fail and come back

    def _failed(self, kind: TierKind, error: TierFault) -> None:
        name = kind.name.lower()
        self._metrics.tier_faults.labels(name).inc()
        log.warning("a tier failed", tier=name, error=str(error))
        self._look_at(kind)

    def _look_at(self, kind: TierKind) -> None:
        tier = self._below[kind]
        if isinstance(tier, Failing) and tier.fault and kind not in self._down:
            self._down.add(kind)
            log.error("a tier is out of use until it answers", tier=kind.name.lower(), why=tier.fault)
            self._report(m.TierDown(kind))

    async def _watch_forever(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            for kind, tier in self._below.items():
                self._look_at(kind)
                if kind in self._down and isinstance(tier, Failing) and await tier.probe():
                    self._down.discard(kind)
                    log.info("a tier is back", tier=kind.name.lower())
                    self._report(m.TierUp(kind))

    async def _checkpoint_forever(self) -> None:
        took_s = 0.0
        while True:
            await asyncio.sleep(max(CHECKPOINT_S, took_s / CHECKPOINT_SHARE))
            begin_s = self._clock()
            for kind, tier in self._below.items():
                if isinstance(tier, Durable) and kind not in self._down:
                    try:
                        await tier.checkpoint()
                    except KvtierError as error:
                        log.warning("no checkpoint", tier=kind.name.lower(), error=str(error))
            took_s = self._clock() - begin_s


def _set(event: asyncio.Event, on: bool) -> None:
    if on:
        event.set()
    else:
        event.clear()


class _Run:
    """What has become of one fetch so far."""

    def __init__(self, fetch: m.Fetch, report: Report, metrics: Metrics) -> None:
        self.fetch = fetch
        self.fault = ""
        self.is_overdue = False
        self._report = report
        self._metrics = metrics
        self._wrong: Sequence[bytes] = ()

    def arrived(self, batch: slice, wrong: Sequence[int]) -> bool:
        """A batch has been read; False where the fetch ends with it."""
        records = self.fetch.records[batch]
        good = wrong[0] if wrong else len(records)
        tier = self.fetch.tier.name.lower()
        if wrong:
            self.fault = CORRUPT
            self._wrong = [records[position].block.key for position in wrong]
            self._metrics.mismatches.labels("fetch").inc(len(wrong))
            log.warning("blocks of a tier are not what they should be", tier=tier, count=len(wrong))
        if good and not self.is_overdue:
            self._metrics.fetched_bytes.labels(tier).inc(sum(its.block_bytes for its in records[:good]))
            self._report(m.Arrived(self.fetch.pull, [record.checksum for record in records[:good]]))
        return not wrong and not self.is_overdue

    def overdue(self) -> None:
        """Nobody waits for the rest any more."""
        self.is_overdue = True
        self._report(m.Overdue(self.fetch.pull))

    def end(self) -> None:
        """Nothing writes the slots any more."""
        self._report(m.PullEnded(self.fetch.pull, self.fault, self._wrong))
