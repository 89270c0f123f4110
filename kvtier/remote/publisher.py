"""Tells the index which blocks this node has: at once, again after a loss, and slowly all the time.

Changes wait in a bounded set until the index has taken them. Where that overflows, or where the index has
lost what it knew, all that is resident is published anew, throttled. A slow sweep over everything renews
what would run out and heals whatever differs; some blocks are looked up now and then, so that an index that
has lost some (a failover to an old replica, a reply that never came) is told soon. One that keeps failing to
answer for them is told everything too: somebody may have written values there that are too large to be read
in time, and a publication replaces these unread. One change to the index runs at a time, so that what is sent
later is newer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

from kvtier import logs
from kvtier.config import Config
from kvtier.errors import KvtierError
from kvtier.interfaces import Index
from kvtier.types import BlockId, NodeRecord, TierKind

FLUSH_BATCH_BLOCKS: Final = 1024
SWEEP_BATCH_BLOCKS: Final = 512
GATHER_S: Final = 0.005
"""Changes of so long a time become one call."""
RECONCILE_S: Final = 600.0
"""A slow sweep takes so long, or a third of the locations' TTL if that is shorter."""
CHECK_EVERY_S: Final = 30.0
CHECK_BLOCKS: Final = 256
"""So many blocks, drawn at random, are looked up in each check: nine of ten find out that 1 % is lost."""
CHECK_CALL_BLOCKS: Final = 64
"""In calls of so many: each stays far within `index_timeout_s`."""
MAX_SILENT_CHECKS: Final = 2
"""After so many checks in a row without an answer everything is published, once in `RECONCILE_S` at most."""
CALL_TIMEOUT_S: Final = 5.0
FIRST_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 2.0

log = logs.get("publisher")


class Publisher:
    """Keeps the index equal to what this node has. Used from the event loop; `add` and `remove` never wait.

    Parameters
    ----------
    residents
        All resident blocks, as a list of its own.
    tier_of
        Where a block lies, None where it is not resident (any more).
    on_fault
        Told the operation (``publish``, ``withdraw``) that the index did not answer.
    on_done
        Told the operation and how many locations the index has taken.
    in_hbm
        Whether this is about what engines have in HBM, which is told apart from all other tiers.
    """

    def __init__(
        self,
        index: Index,
        record_now: Callable[[], NodeRecord],
        config: Config,
        *,
        residents: Callable[[], Sequence[BlockId]],
        tier_of: Callable[[BlockId], TierKind | None],
        on_fault: Callable[[str], None] = lambda _: None,
        on_done: Callable[[str, int], None] = lambda _, __: None,
        clock: Callable[[], float] = time.monotonic,
        in_hbm: bool = False,
    ) -> None:
        self._index = index
        self._in_hbm = in_hbm
        self._record_now = record_now
        self._max_unpublished = config.max_unpublished
        self._min_pause_s = SWEEP_BATCH_BLOCKS / config.publish_per_s
        self._period_s = min(RECONCILE_S, config.index_ttl_s / 3)
        self._residents = residents
        self._tier_of = tier_of
        self._on_fault = on_fault
        self._on_done = on_done
        self._clock = clock
        self._added: dict[BlockId, TierKind] = {}
        self._removed: dict[BlockId, None] = {}
        self._in_flight: frozenset[BlockId] = frozenset()
        self._behind = 0
        self._overflows = False
        self._dirty = asyncio.Event()
        self._lost = asyncio.Event()
        self._doubts = asyncio.Event()
        self._turn = asyncio.Lock()
        self._dice = random.Random(record_now().incarnation)
        self._silent_checks = 0
        self._silence_ended_s = -RECONCILE_S

    @property
    def unpublished(self) -> int:
        """Changes that the index has not taken yet, blocks to be published anew included."""
        return len(self._added) + len(self._removed) + len(self._in_flight) + self._behind

    async def run(self) -> None:
        """Tell the index until cancelled; what has not been told then never will be."""
        await asyncio.gather(self._flush_forever(), self._sweep_forever(), self._check_forever())

    # ---- what changed

    def add(self, tier: TierKind, blocks: Sequence[BlockId]) -> None:
        """These blocks became visible in `tier`."""
        for block in blocks:
            self._removed.pop(block, None)
            self._added[block] = tier
        self._keep_bound()
        self._dirty.set()

    def remove(self, blocks: Sequence[BlockId]) -> None:
        """These blocks are gone."""
        if not blocks:
            return
        for block in blocks:
            self._added.pop(block, None)
            self._removed[block] = None
        self._keep_bound()
        self._dirty.set()

    def republish(self) -> None:
        """The index has lost what it knew of this node: tell it everything again."""
        self._behind = max(1, self._behind)
        self._lost.set()

    def doubt(self) -> None:
        """The index was away for a while: see soon whether it still knows what it was told."""
        self._doubts.set()

    def _keep_bound(self) -> None:
        if len(self._added) + len(self._removed) <= self._max_unpublished:
            return
        if self._added:
            # A sweep finds what is resident by itself; what is gone is known here alone.
            self._added.clear()
            self.republish()
        if not self._overflows:
            self._overflows = True
            log.warning("changes wait for the index in vain: it will get all of them in a sweep later")
        while len(self._removed) > self._max_unpublished:
            del self._removed[next(iter(self._removed))]  # a peer that asks for it learns, or its TTL ends it

    # ---- changes, at once

    async def _flush_forever(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            await self._dirty.wait()
            await asyncio.sleep(GATHER_S)
            if await self._flush():
                self._dirty.clear()
                self._overflows = False
                retry_s = FIRST_RETRY_S
            else:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _flush(self) -> bool:
        """Tell the index all that waits; False where it does not answer."""
        while self._removed or self._added:
            if not await (self._flush_removed() if self._removed else self._flush_added()):
                return False
        return True

    async def _flush_removed(self) -> bool:
        batch = list(islice(self._removed, FLUSH_BATCH_BLOCKS))
        for block in batch:
            del self._removed[block]
        if await self._send("withdraw", batch, None):
            return True
        for block in batch:
            if block not in self._added:  # it may have come back meanwhile
                self._removed[block] = None
        self._keep_bound()
        return False

    async def _flush_added(self) -> bool:
        tier = next(iter(self._added.values()))
        batch = [block for block, its in islice(self._added.items(), FLUSH_BATCH_BLOCKS) if its is tier]
        for block in batch:
            del self._added[block]
        if await self._send("publish", batch, tier):
            return True
        for block in batch:
            if block not in self._removed:  # it may be gone meanwhile
                self._added.setdefault(block, tier)
        self._keep_bound()
        return False

    # ---- everything, again and again

    async def _sweep_forever(self) -> None:
        while True:
            is_urgent = self._lost.is_set()
            self._lost.clear()
            begin_s = self._clock()
            blocks = self._residents()
            self._behind = len(blocks) if is_urgent else 0
            if await self._sweep(blocks, is_urgent) and is_urgent:
                seconds = round(self._clock() - begin_s, 3)
                log.info("everything is published again", blocks=len(blocks), seconds=seconds)

    async def _sweep(self, blocks: Sequence[BlockId], is_urgent: bool) -> bool:
        """Publish all of these; False where the index has lost everything meanwhile."""
        batches = -(-len(blocks) // SWEEP_BATCH_BLOCKS)
        pause_s = self._min_pause_s if is_urgent else max(self._min_pause_s, self._period_s / max(1, batches))
        for begin in range(0, len(blocks), SWEEP_BATCH_BLOCKS):
            at_s = self._clock()
            if not is_urgent and await self._is_lost_within(pause_s):
                return False
            if not await self._publish_surely(blocks[begin : begin + SWEEP_BATCH_BLOCKS]):
                return False
            if is_urgent:
                self._behind = max(0, len(blocks) - begin - SWEEP_BATCH_BLOCKS)
                if await self._is_lost_within(pause_s - (self._clock() - at_s)):
                    return False
        return is_urgent or bool(blocks) or not await self._is_lost_within(pause_s)

    async def _publish_surely(self, blocks: Sequence[BlockId]) -> bool:
        """Publish those that are still here, however long it takes; False where the index lost everything."""
        retry_s = FIRST_RETRY_S
        while not await self._publish_present(blocks):
            if await self._is_lost_within(retry_s):
                return False
            retry_s = min(2 * retry_s, MAX_RETRY_S)
        return True

    async def _publish_present(self, blocks: Sequence[BlockId]) -> bool:
        async with self._turn:  # residency is looked at in the same step as the call begins
            by_tier: dict[TierKind, list[BlockId]] = {}
            for block in blocks:
                tier = self._tier_of(block)
                if tier is not None:
                    by_tier.setdefault(tier, []).append(block)
            for tier, present in by_tier.items():
                if not await self._tell("publish", self._index.publish(self._record_now(), present, tier)):
                    return False
                self._on_done("publish", len(present))
        return True

    async def _is_lost_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._lost.wait()
        except TimeoutError:
            return self._lost.is_set()
        return True

    # ---- is it still so?

    async def _check_forever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._doubts.wait()
            self._doubts.clear()
            if not self._behind:  # otherwise it is known to differ, and being told
                await self._check()

    async def _check(self) -> None:
        drawn = self._draw()
        missing = 0
        for begin in range(0, len(drawn), CHECK_CALL_BLOCKS):
            part = drawn[begin : begin + CHECK_CALL_BLOCKS]
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    found = await self._index.find(part, in_hbm=self._in_hbm)
            except (KvtierError, TimeoutError):
                self._on_fault("find")
                self._note_silence()
                break
            # Nobody at all is listed: that this node alone is not may be because so many others are.
            missing += sum(
                self._is_told(block) for block, places in zip(part, found, strict=True) if not places
            )
        else:
            self._silent_checks = 0
        if missing:
            log.warning("the index has forgotten: publishing everything", missing=missing, drawn=len(drawn))
            self.republish()

    def _note_silence(self) -> None:
        self._silent_checks += 1
        now_s = self._clock()
        if self._silent_checks < MAX_SILENT_CHECKS or now_s < self._silence_ended_s + RECONCILE_S:
            return
        self._silence_ended_s = now_s
        log.warning(
            "the index does not answer for this node's blocks: publishing everything, in case their values "
            "are why",
            checks=self._silent_checks,
        )
        self.republish()

    def _draw(self) -> list[BlockId]:
        blocks = self._residents()
        chosen = self._dice.sample(blocks, min(CHECK_BLOCKS, len(blocks)))
        return [block for block in chosen if self._is_told(block)]

    def _is_told(self, block: BlockId) -> bool:
        waits = block in self._added or block in self._in_flight
        return not waits and self._tier_of(block) is not None

    # ---- calls

    async def _send(self, operation: str, batch: Sequence[BlockId], tier: TierKind | None) -> bool:
        self._in_flight = frozenset(batch)
        try:
            async with self._turn:
                record = self._record_now()
                if tier is None:
                    call = self._index.withdraw(record, batch, in_hbm=self._in_hbm)
                else:
                    call = self._index.publish(record, batch, tier)
                done = await self._tell(operation, call)
        finally:
            self._in_flight = frozenset()
        if done:
            self._on_done(operation, len(batch))
        return done

    async def _tell(self, operation: str, call: Awaitable[None]) -> bool:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await call
        except (KvtierError, TimeoutError) as error:
            self._on_fault(operation)
            log.debug("the index did not take changes", operation=operation, error=str(error) or "no answer")
            return False
        return True
