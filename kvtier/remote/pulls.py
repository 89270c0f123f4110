"""Carries the core's pulls out: lease, bytes, verification, end. Decides only how, never what.

A pull's batches are in flight two at a time, and one is verified while the next ones travel. The first is
small, so that an engine can begin to copy early. What the peer has to read from a tier below its arena first
is asked for again, until it has come or the pull's time is over.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvtier import logs
from kvtier.batching import BATCHES_IN_FLIGHT, batches, settle
from kvtier.config import Config
from kvtier.core import messages as m
from kvtier.errors import (
    Corruption,
    DeadlineExceeded,
    KvtierError,
    ProtocolMismatch,
    TransferFault,
    Unavailable,
)
from kvtier.hashing import Hasher
from kvtier.interfaces import Remote, Transfer
from kvtier.metrics import Metrics
from kvtier.remote.answers import Acquired, Peer
from kvtier.remote.link import PeerLink, Peers
from kvtier.types import Key, Slot

MIN_RETRY_S: Final = 0.01
"""With less time left no other transfer is tried."""

MAX_ASKS: Final = 64
"""A peer is asked so often for the blocks of one pull."""
FIRST_PAUSE_S: Final = 0.002
PAUSE_GROWTH: Final = 2
PAUSES_IN_TIME: Final = 32
"""Before it is asked again: each pause is longer than the one before, up to this part of the pull's time."""
MIN_ASK_S: Final = 0.02
MIN_ASK_SHARE: Final = 0.1
"""With less time left, in seconds or of the pull's time, it is not: no answer would count as its fault."""

# Why a pull brought less than it was asked for: `PullEnded.fault`, and the reason in the metrics.
GONE: Final = "gone"
FAILING: Final = "failing"
TIMEOUT: Final = "timeout"
UNREACHABLE: Final = "unreachable"
PROTOCOL: Final = "protocol"
REFUSED: Final = "refused"
TRANSFER: Final = "transfer"
LEASE: Final = "lease"
CORRUPT: Final = "corrupt"
CANCELLED: Final = "cancelled"
BUG: Final = "bug"
MISSING: Final = "missing"
"""Only in the metrics: the peer gave all it had."""

Report = Callable[[m.Arrived | m.PullEnded], object]

log = logs.get("pulls")


class LeaseEnded(TransferFault):
    """The bytes came too late: by then the peer may have had something else in its slots."""


class Puller:
    """Runs pulls, any number at once. Used from the event loop.

    Parameters
    ----------
    transfers
        The best first; may still be filled later.
    arena_view
        The bytes of one of this node's own slots.
    hasher
        Compares in threads.
    clock
        Monotonic seconds.
    """

    def __init__(
        self,
        peers: Peers,
        transfers: Sequence[Transfer],
        arena_view: Callable[[Slot], memoryview],
        hasher: Hasher,
        config: Config,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = peers
        self._transfers = transfers
        self._view = arena_view
        self._hasher = hasher
        self._batch_bytes = config.pull_batch_bytes
        self._metrics = metrics
        self._clock = clock

    async def run(self, pull: m.Pull, report: Report) -> None:
        """Report `Arrived` for what has come and is right, and at last exactly one `PullEnded`.

        Raises nothing but `CancelledError`, and that after the `PullEnded`. No transfer writes to the slots
        any more when it is reported; the lease is given back in the background.
        """
        job = _Job(pull, report, self._peers.get(pull.node), self._clock() + pull.timeout_s)
        fault = CANCELLED
        try:
            fault = await self._try(job)
        finally:
            if job.link is not None and job.acquired is not None:
                job.link.end(job.acquired.lease, pull.shard, job.corrupt_keys)
            self._measure(job, fault)
            report(m.PullEnded(pull.pull, fault))

    async def _try(self, job: _Job) -> str:
        """Why it ended early; empty where the peer gave all it had."""
        try:
            return await self._pull(job)
        except KvtierError as error:
            is_late = self._clock() >= job.deadline_s
            # What its calls raised the link has counted itself. One that gives, but slowly, does not fail.
            if job.link is not None and (
                isinstance(error, Corruption)
                or (isinstance(error, TransferFault) and not (job.arrived and is_late))
            ):
                job.link.failed(error)
            fault = _fault(error, is_late)
            log.warning(
                "a pull failed",
                node=job.pull.node,
                fault=fault,
                error=str(error),
                transfer=job.transfer,
                arrived=job.arrived,
                asked=len(job.pull.keys),
            )
            return fault
        except Exception as error:
            log.error("a bug in a pull", node=job.pull.node, transfer=job.transfer, exc_info=error)
            return BUG

    async def _pull(self, job: _Job) -> str:
        pull, link = job.pull, job.link
        if link is None or link.record.incarnation != pull.incarnation:
            return GONE
        if not link.breaker.admit():
            return FAILING
        await link.hello(pull.timeout_s)
        fault = await self._ask(job, link)
        link.breaker.succeeded()
        return fault

    async def _ask(self, job: _Job, link: PeerLink) -> str:
        """Acquire and read, and again while the peer says that more is coming.

        The lease before is given back only then: until the next is granted it keeps in place what is coming.
        """
        timeout_s = job.pull.timeout_s
        pause_s, most_s = FIRST_PAUSE_S, max(FIRST_PAUSE_S, timeout_s / PAUSES_IN_TIME)
        least_s = max(MIN_ASK_S, timeout_s * MIN_ASK_SHARE)
        asks = 0
        while asks < MAX_ASKS:
            asks += 1
            acquired = await self._acquire(job, link)
            if acquired.slots:
                await self._transfer(job, link, acquired)
            if not acquired.coming:
                return ""
            await asyncio.sleep(pause_s)
            pause_s = min(most_s, PAUSE_GROWTH * pause_s)
            if job.deadline_s - self._clock() < least_s:
                break
        log.info("a peer did not bring all in time", node=job.pull.node, arrived=job.arrived, asks=asks)
        return TIMEOUT

    async def _acquire(self, job: _Job, link: PeerLink) -> Acquired:
        pull = job.pull
        asked_s = self._clock()
        acquired = await link.acquire(
            pull.keys[job.arrived :],
            pull.shard,
            pull.fingerprint,
            pull.block_bytes,
            job.deadline_s - asked_s,
        )
        if job.acquired is not None:
            link.end(job.acquired.lease, pull.shard)
        job.acquired = acquired if acquired.lease else None
        job.lease_end_s = asked_s + acquired.ttl_s
        job.first = job.arrived
        return acquired

    # ---- one transfer after the other, until one works

    async def _transfer(self, job: _Job, link: PeerLink, acquired: Acquired) -> None:
        peer = await link.hello(job.left_s(self._clock()))
        failed: dict[str, str] = {}
        is_renewed = False
        transfer = self._choose(link, peer, failed)
        while True:
            try:
                await self._stream(job, transfer, peer, acquired)
                link.transfer = transfer.name
                return
            except TransferFault as error:
                if job.arrived > job.first:
                    raise
                if job.left_s(self._clock()) < MIN_RETRY_S:
                    link.penalise(transfer.name)  # the peer or the way: the next pull takes another one
                    raise
                failed[transfer.name] = str(error)
            before, peer = peer, await self._ask_again(job, link)
            if peer.offers.get(transfer.name) != before.offers[transfer.name] and not is_renewed:
                is_renewed = True  # it has begun that transfer anew: what we knew of it was stale
                await transfer.forget(peer.node)
                if transfer.name in peer.offers:
                    del failed[transfer.name]
                    continue
            link.penalise(transfer.name)  # the peer answers, so it is the way
            transfer = self._choose(link, peer, failed)

    async def _ask_again(self, job: _Job, link: PeerLink) -> Peer:
        link.doubt()
        return await link.hello(job.left_s(self._clock()))

    def _choose(self, link: PeerLink, peer: Peer, failed: Mapping[str, str]) -> Transfer:
        """The best of those that both have, have not failed in this pull and, if possible, not of late."""
        both = [its for its in self._transfers if its.name in peer.offers and its.name not in failed]
        if not both:
            raise TransferFault(
                "; ".join(f"{name}: {why}" for name, why in failed.items())
                if failed
                else f"no way to read in common: the peer has {', '.join(peer.offers) or 'none'}, this node "
                f"{', '.join(its.name for its in self._transfers) or 'none'}; set transfer alike on both"
            )
        return min(both, key=lambda its: link.penalty(its.name))

    # ---- the bytes

    async def _stream(self, job: _Job, transfer: Transfer, peer: Peer, acquired: Acquired) -> None:
        remote = Remote(
            node=peer.node,
            incarnation=peer.incarnation,
            address=job.address,
            arena=acquired.arena,
            base_address=peer.base_address,
            metadata=peer.offers[transfer.name],
            lease=acquired.lease,
        )
        job.transfer = transfer.name
        running = self._metrics.transfers_running.labels(transfer.name)
        running.inc()
        try:
            await self._pipeline(job, transfer, remote, acquired)
        finally:
            running.dec()

    async def _pipeline(self, job: _Job, transfer: Transfer, remote: Remote, acquired: Acquired) -> None:
        waiting = deque(batches(len(acquired.slots), job.pull.block_bytes, self._batch_bytes))
        flying: deque[tuple[slice, asyncio.Task[None]]] = deque()

        def launch() -> None:
            while waiting and len(flying) < BATCHES_IN_FLIGHT and job.left_s(self._clock()) > 0:
                batch = waiting.popleft()
                flying.append((batch, self._launch(job, transfer, remote, acquired, batch)))

        checking: asyncio.Task[None] | None = None
        try:
            launch()
            while flying:
                batch, task = flying[0]
                await asyncio.wait((task,))
                flying.popleft()
                if _is_good(task):
                    launch()
                if checking is not None:  # what came before is told first, whatever became of this batch
                    await checking
                _raise_from(task)
                checking = asyncio.get_running_loop().create_task(self._verify(job, acquired, batch))
            if checking is not None:
                await checking
            if waiting:
                raise TransferFault("the time of the pull was over before all of it was asked for")
        finally:
            if checking is not None:
                checking.cancel()  # of no effect unless this pull is cancelled
            await settle([*(task for _, task in flying), *([] if checking is None else [checking])])

    def _launch(
        self, job: _Job, transfer: Transfer, remote: Remote, acquired: Acquired, batch: slice
    ) -> asyncio.Task[None]:
        left_s = job.left_s(self._clock())
        sources = acquired.slots[batch]
        sizes = [job.pull.block_bytes] * len(sources)
        into = [slot.offset_bytes for slot in job.pull.slots[job.behind(batch)]]
        return asyncio.get_running_loop().create_task(transfer.pull(remote, sources, sizes, into, left_s))

    async def _verify(self, job: _Job, acquired: Acquired, batch: slice) -> None:
        """Report the leading blocks that are right; raises where one is not, or the lease is over."""
        pull = job.pull
        checksums = acquired.checksums[batch]
        batch = job.behind(batch)
        blocks = [self._view(slot)[: pull.block_bytes] for slot in pull.slots[batch][: len(checksums)]]
        wrong = await self._hasher.differing(blocks, checksums)
        self._metrics.verified_bytes.labels("pull").inc(len(checksums) * pull.block_bytes)
        if self._clock() >= job.lease_end_s:
            raise LeaseEnded("the lease ran out before the bytes were here: the peer or the way is too slow")
        good = wrong[0] if wrong else len(checksums)
        if good:
            job.arrived += good
            self._metrics.pulled_bytes.labels(job.transfer).inc(good * pull.block_bytes)
            job.report(m.Arrived(pull.pull, checksums[:good]))
        if wrong:
            self._metrics.mismatches.labels("pull").inc(len(wrong))
            job.corrupt_keys = [pull.keys[batch][position] for position in wrong]
            raise Corruption(f"{len(wrong)} blocks of the peer have wrong bytes: it was told to check them")

    def _measure(self, job: _Job, fault: str) -> None:
        asked = len(job.pull.keys)
        outcome = "whole" if job.arrived == asked else "part" if job.arrived else "none"
        reason = "" if outcome == "whole" else fault or MISSING
        self._metrics.pulls.labels(outcome, reason).inc()
        if job.transfer:
            took_s = self._clock() - (job.deadline_s - job.pull.timeout_s)
            self._metrics.pull_seconds.labels(job.transfer).observe(took_s)


class _Job:
    """What has become of one pull so far; its present lease begins with block `first`."""

    __slots__ = (
        "acquired",
        "address",
        "arrived",
        "corrupt_keys",
        "deadline_s",
        "first",
        "lease_end_s",
        "link",
        "pull",
        "report",
        "transfer",
    )

    def __init__(self, pull: m.Pull, report: Report, link: PeerLink | None, deadline_s: float) -> None:
        self.pull = pull
        self.report = report
        self.link = link
        self.address = "" if link is None else link.record.address
        self.deadline_s = deadline_s
        self.lease_end_s = 0.0
        self.acquired: Acquired | None = None
        self.arrived = 0
        self.first = 0
        self.corrupt_keys: list[Key] = []
        self.transfer = ""

    def left_s(self, now_s: float) -> float:
        """Until either the pull's time or the lease is over."""
        return min(self.deadline_s, self.lease_end_s) - now_s

    def behind(self, batch: slice) -> slice:
        """A batch of the present lease, counted in the pull."""
        return slice(self.first + batch.start, self.first + batch.stop)


def _is_good(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is None


def _raise_from(task: asyncio.Task[None]) -> None:
    if task.cancelled():
        raise TransferFault("the transfer was cancelled by itself")
    task.result()


def _fault(error: KvtierError, is_late: bool) -> str:
    """The word for it."""
    match error:
        case LeaseEnded():
            return LEASE
        case Corruption():
            return CORRUPT
        case ProtocolMismatch():
            return PROTOCOL
        case DeadlineExceeded():
            return TIMEOUT
        case TransferFault():
            return TIMEOUT if is_late else TRANSFER
        case Unavailable():
            return UNREACHABLE
        case _:
            return REFUSED
