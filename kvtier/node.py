"""Runs the core: carries its instructions out, feeds what happened back, owns the clock.

Everything here runs on one event loop, so that core and node need no locks. The node decides nothing: it
checks what the core cannot see (bytes of slots, locks of processes) and does what the core says. What
concerns other nodes it hands on to `Remote`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from kvtier import logs
from kvtier.config import Config
from kvtier.core import messages as m
from kvtier.core.cache import CacheCore
from kvtier.core.stats import BlockPlace, CoreStats
from kvtier.errors import Conflict, Corruption, KvtierError, LimitExceeded, TierFault, Unavailable
from kvtier.hashing import Hasher
from kvtier.identity import Identity
from kvtier.interfaces import Failing, Growing, Tier
from kvtier.liveness import EngineLocks
from kvtier.metrics import Metrics
from kvtier.remote.arrivals import Arrivals
from kvtier.remote.remote import Remote
from kvtier.tiering import PROBE_S, Tiering
from kvtier.types import BlockId, BlockRecord, Key, Slot, TierKind, sampled

DROP_ATTEMPTS: Final = 5
DROP_RETRY_S: Final = 1.0
MAX_COMMITS_IN_VERIFICATION: Final = 256
"""A commit outlives its call, so the server's bound on calls does not bound these."""
MAX_SCRUB_BLOCKS: Final = 128
"""Blocks that one tick asks for at most, however small they are."""
_TYPICAL_BLOCK_BYTES: Final = 1 << 20

log = logs.get("node")


class Node:
    """One daemon's core and tiers. Not thread-safe: every call from the loop that `start` ran on.

    Parameters
    ----------
    tiers
        Open, the fastest first, which engines write and read, and device memory, if there is some, last; the
        node closes them in `stop`.
    locks
        The node closes them in `stop`.
    remote
        Other nodes; None where there is no index. The node stops it in `stop`.
    hasher
        Compares slots of `tiers` with checksums; the node closes it.
    clock
        Monotonic seconds.
    seed
        Which blocks of a commit are verified by sampling; None: unpredictable.
    """

    def __init__(
        self,
        *,
        core: CacheCore,
        tiers: Sequence[Tier],
        identity: Identity,
        locks: EngineLocks,
        config: Config,
        metrics: Metrics,
        hasher: Hasher | None = None,
        remote: Remote | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self.core = core
        self.tiers = {tier.kind: tier for tier in tiers}
        self.identity = identity
        self.config = config
        self.metrics = metrics
        self.remote = remote
        self.arrivals = Arrivals()
        self.failed: asyncio.Future[BaseException] | None = None
        self._locks = locks
        self._clock = clock
        self._started_s = clock()
        self._random = random.Random(seed)
        self._hasher = hasher or Hasher(self.tiers)
        self._allocated_bytes = {tier.kind: tier.allocated_bytes for tier in tiers}
        top, *below = tiers
        lower = {tier.kind: tier for tier in below}
        self.tiering = Tiering(top, lower, self._hasher, config, metrics, self._handle, clock)
        self._commits: dict[tuple[str, bytes], asyncio.Task[m.Reply]] = {}
        self._find: m.Find | None = None
        self._verifies: asyncio.Queue[m.Verify] = asyncio.Queue()  # bounded by CoreConfig.max_verifies
        self._verifying = False
        self._scrub_bytes = 0.0
        self._scrub_block_bytes = _TYPICAL_BLOCK_BYTES
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self.is_left_waiting = False

    # ---- life

    async def start(self) -> None:
        """Find what an earlier life left; begin to tick, to watch engines and tiers, and to verify."""
        self.failed = asyncio.get_running_loop().create_future()
        removed = self._locks.sweep(set())
        if removed:
            log.info("removed lock files of dead engines", count=len(removed))
        await self.tiering.recover()
        for work in self.tiering.background():
            self._spawn(work)
        self._spawn(self._every(self.config.tick_s, self._tick))
        self._spawn(self._every(self.config.engine_poll_s, self._watch_engines))
        self._spawn(self._verify_in_background())

    def join(self, peer_address: str = "") -> None:
        """Begin to share with other nodes, which reach this one at `peer_address` (empty: they cannot)."""
        if self.remote is not None:
            self._spawn(self._share(self.remote, peer_address))

    async def _share(self, remote: Remote, peer_address: str) -> None:
        await remote.run(peer_address)
        self._end_with(await remote.fenced)

    async def stop(self) -> None:
        """End all that runs in the background, then close the tiers; idempotent.

        Bounded: where a medium does not answer, the tiers stay open, since it may still write into memory,
        and `is_left_waiting` says so.
        """
        if self._stopping:
            return
        self._stopping = True
        tasks = [*self._tasks, *self._commits.values()]
        for task in tasks:
            task.cancel()
        if tasks:  # one that waits for a medium ends when the medium answers
            _, late = await asyncio.wait(tasks, timeout=2 * self.config.tier_deadline_s)
            self.is_left_waiting = bool(late)
        if self.remote is not None:
            await self.remote.stop()  # no transfer writes a slot from here on
        if self.is_left_waiting:
            log.error("a medium does not answer: what waits for it ends with the process")
            self._locks.close()
            return
        await asyncio.to_thread(self._hasher.close)  # no thread reads a slot from here on
        for tier in self.tiers.values():
            await tier.close()
        self._locks.close()

    # ---- requests

    async def execute(self, request: m.Request) -> m.Reply:
        """Carry one request out; raises from `kvtier.errors` and then has changed nothing.

        Awaits only where a commit has more to hash than the loop should (a caller that is cancelled meanwhile
        does not stop the commit), and where other nodes may have what a lookup misses.
        """
        if self._stopping:
            raise Unavailable("the node is stopping: try again later")
        if isinstance(request, m.Commit):
            return await self._commit(request)
        if isinstance(request, m.Lookup):
            return await self._lookup(request)
        if isinstance(request, m.RegisterEngine) and not self._locks.held(request.engine):
            raise Conflict(
                f"engine lock is not held: lock engines/{request.engine}.lock in {self.config.run_dir} first"
            )
        reply = self._apply(request)
        if isinstance(request, m.Release) and request.lease is not None:
            self.arrivals.end(request.lease)
        elif isinstance(request, m.Acquire) and isinstance(reply, m.Leased) and self.remote is not None:
            rest = request.keys[len(reply.slots) + reply.coming :]
            self.remote.deny([BlockId(key, request.shard) for key in rest])
        return reply

    async def _lookup(self, request: m.Lookup) -> m.Reply:
        """What this node has is offered in any case; other nodes can only add to it."""
        reply = self._apply(request)
        find, self._find = self._find, None
        if find is None or self.remote is None:
            return reply
        located = await self.remote.find(find)
        if located is None:
            return reply
        try:
            return self._apply(located)
        except KvtierError as error:  # meanwhile the engine died, or the hold was released
            log.debug("a lookup changed while the index was asked", error=str(error))
            return reply

    def places(self, keys: Sequence[Key]) -> list[BlockPlace]:
        """Where every shard of these blocks lies, in engines' own memory too."""
        return self.core.places(keys) + self.core.engine_blocks.places(keys)

    def stats(self) -> CoreStats:
        """What the core counts."""
        return self.core.stats()

    def old_arena_bytes(self, kind: TierKind) -> int:
        """Memory of dead daemons' arenas that engines still map and that counts against the cap."""
        return int(getattr(self.tiers[kind], "old_arena_bytes", 0))

    @property
    def uptime_s(self) -> float:
        """Seconds since the node was made."""
        return self._clock() - self._started_s

    def age_s(self, at_s: float) -> float:
        """Seconds since a moment on the core's clock."""
        return max(0.0, self._clock() - at_s)

    # ---- commits: verification before visibility

    async def _commit(self, event: m.Commit) -> m.Reply:
        first = self.core.replies.get(event.engine, event.call_id)
        if first is not None:
            return first
        name = (event.engine, event.call_id)
        task = self._commits.get(name)
        if task is None:
            slots = self.core.reserved_slots(event.engine, event.reservation, event.keys)
            chosen = self._choose(len(slots))
            if not chosen:
                return self._apply(event)
            some = [slots[i] for i in chosen]
            checksums = [event.checksums[i] for i in chosen]
            block_bytes = self.core.engines.get(event.engine).shape.block_bytes
            kind = TierKind.DRAM
            if self._hasher.is_inline(kind, len(some), block_bytes):
                wrong = self._hasher.mismatches_now(kind, some, block_bytes, checksums)
                return self._finish_commit(event, wrong, len(some), block_bytes)
            if len(self._commits) >= MAX_COMMITS_IN_VERIFICATION:
                raise LimitExceeded(f"{len(self._commits)} commits are being verified: commit again later")
            # A repeat that arrives meanwhile waits for the same task; both get its one answer.
            task = asyncio.create_task(self._verify_and_commit(event, some, block_bytes, checksums))
            self._commits[name] = task
            task.add_done_callback(lambda done: self._forget_commit(name, done))
        return await asyncio.shield(task)

    async def _verify_and_commit(
        self, event: m.Commit, slots: list[Slot], block_bytes: int, checksums: list[bytes]
    ) -> m.Reply:
        # While the bytes are hashed the reservation may end (abort, death): then the core refuses.
        wrong = await self._hasher.mismatches(TierKind.DRAM, slots, block_bytes, checksums)
        return self._finish_commit(event, wrong, len(slots), block_bytes)

    def _finish_commit(self, event: m.Commit, wrong: int, checked: int, block_bytes: int) -> m.Reply:
        self.metrics.verified_bytes.labels("commit").inc(checked * block_bytes)
        if wrong:
            self.metrics.mismatches.labels("commit").inc(wrong)
            log.warning("commit refused: wrong checksums", engine=event.engine, wrong=wrong, checked=checked)
            raise Corruption(
                f"{wrong} of {checked} checked blocks do not have the checksum they were committed with: "
                "nothing was committed; compute it after the copy has completed, or abort"
            )
        return self._apply(event)

    def _forget_commit(self, name: tuple[str, bytes], done: asyncio.Task[m.Reply]) -> None:
        del self._commits[name]
        if not done.cancelled():
            done.exception()  # whoever waited has it; nobody may have

    def _choose(self, count: int) -> Sequence[int]:
        match self.config.verify_commits:
            case "off":
                return ()
            case "sample":
                return sampled(count, self._random.randrange)
            case _:
                return range(count)

    # ---- the core's actions

    def _apply(self, event: m.Request) -> m.Reply:
        reply = self._handle(event)
        assert reply is not None, f"{type(event).__name__} has no reply"
        return reply

    def _handle(self, event: m.Event) -> m.Reply | None:
        try:
            actions = self.core.handle(event, self._clock())
        except KvtierError:
            raise
        except Exception as error:  # a bug: the core may be half changed, so nothing of it is trusted
            self._fail(error)
            raise
        reply: m.Reply | None = None
        for action in actions:
            match action:
                case m.Verify():
                    self._verifies.put_nowait(action)
                case m.Drop():
                    self._spawn(self._drop(action))
                case m.Lost():
                    self.metrics.lost_blocks.labels(action.reason).inc(len(action.blocks))
                    log.warning("blocks lost", count=len(action.blocks), reason=action.reason)
                case m.Find():
                    self._find = action
                case m.Ready():
                    self.arrivals.add(action)
                case m.Publish() | m.Pull():
                    self._tell_others(action)
                case m.Fetch():
                    self._spawn(self.tiering.fetch(action))
                case m.Demote():
                    self.tiering.demote(action)
                case m.Leased(coming=coming) if coming and not isinstance(event, m.Acquire):
                    self.arrivals.expect(action.lease, self._clock() + action.lease_ttl_s)
                    reply = action
                case _:
                    reply = action
        if self.remote is not None and isinstance(event, m.TierDown | m.TierUp):
            self.remote.tiers_changed()
        return reply

    def _tell_others(self, action: m.Publish | m.Pull) -> None:
        assert self.remote is not None, "the core speaks of other nodes, but there are none"
        if isinstance(action, m.Publish):
            self.remote.publish(action)
        else:
            self._spawn(self.remote.pull(action, self._handle))

    async def _drop(self, action: m.Drop) -> None:
        tier = self.tiers[action.tier]
        attempt = 0
        while attempt < DROP_ATTEMPTS:
            try:
                await tier.drop(action.slots)
            except TierFault as error:
                self.metrics.tier_faults.labels(action.tier.name.lower()).inc()
                log.warning("a delete failed", tier=action.tier.name.lower(), error=str(error))
            else:
                self._handle(m.Dropped(tier=action.tier, slots=action.slots))
                return
            if isinstance(tier, Failing) and tier.fault:  # it says itself when it works again
                await asyncio.sleep(PROBE_S)
            else:
                await asyncio.sleep(DROP_RETRY_S * 2**attempt)
                attempt += 1
        # Not known to be free, so the bytes stay charged: less room, never a slot with two owners.
        log.error("slots given up", tier=action.tier.name.lower(), count=len(action.slots))

    # ---- background

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """A bug: tell whoever runs the node, who stops it. Engines then miss; they never read wrong bytes."""
        log.critical("a bug in the node", exc_info=error)
        self._end_with(error)

    def _end_with(self, error: BaseException) -> None:
        if self.failed is not None and not self.failed.done():
            self.failed.set_result(error)

    async def _every(self, period_s: float, work: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(period_s)
            work()

    def _tick(self) -> None:
        self._handle(m.Tick())
        self.arrivals.expire(self._clock())
        for tier in self.tiers.values():
            if isinstance(tier, Growing):
                self._grow(tier)
        self._scrub()

    def _grow(self, tier: Tier) -> None:
        assert isinstance(tier, Growing)
        allocated_bytes = tier.grow()
        if allocated_bytes > self._allocated_bytes[tier.kind]:
            self._allocated_bytes[tier.kind] = allocated_bytes
            log.info("tier grew", tier=tier.kind.name.lower(), allocated_bytes=allocated_bytes)
            self._handle(m.Grow(tier=tier.kind, allocated_bytes=allocated_bytes))

    def _watch_engines(self) -> None:
        """Proof of death is the kernel dropping the flock; the file goes after the core has let go."""
        known = list(self.core.engines.by_name)
        for engine in known:
            if not self._locks.held(engine):
                log.warning("engine died", engine=engine)
                self._handle(m.EngineDied(engine=engine))
                self._locks.remove(engine)
        try:
            self._locks.sweep(set(known))
        except OSError as error:  # the directory is gone, or this process has no descriptor left
            log.warning("lock files cannot be listed", error=str(error))

    def _scrub(self) -> None:
        """Ask for as many blocks as the budget allows, if the last ones are done."""
        allowance_bytes = self.config.scrub_bytes_per_s * self.config.tick_s
        self._scrub_bytes = min(self._scrub_bytes + allowance_bytes, allowance_bytes)
        if self._scrub_bytes <= 0 or self._verifying or not self._verifies.empty():
            return
        blocks = int(self._scrub_bytes) // self._scrub_block_bytes
        self._handle(m.Scrub(blocks=min(max(1, blocks), MAX_SCRUB_BLOCKS)))

    async def _verify_in_background(self) -> None:
        while True:
            self._verifying = False
            action = await self._verifies.get()
            self._verifying = True
            self._scrub_block_bytes = action.block_bytes
            self._scrub_bytes -= action.block_bytes
            intact = await self._is_intact(action)
            self._handle(m.Verified(verify=action.verify, intact=intact))

    async def _is_intact(self, action: m.Verify) -> bool:
        self.metrics.verified_bytes.labels("background").inc(action.block_bytes)
        try:
            record = BlockRecord(action.block, None, action.fingerprint, action.block_bytes, action.checksum)
            wrong = await self._hasher.wrong(action.tier, [action.slot], [record])
        except TierFault as error:
            self.metrics.tier_faults.labels(action.tier.name.lower()).inc()
            log.warning("a block cannot be read", tier=action.tier.name.lower(), error=str(error))
            return False
        if wrong:
            self.metrics.mismatches.labels("background").inc()
            log.warning("a block has wrong bytes", tier=action.tier.name.lower())
        return not wrong
