"""A seeded simulation of one node: ``python -m kvtier.testing.simulator --seeds 0:200 --steps 2000``.

The real core runs against engines that stall, fail, lie dead and come late, over a network that loses
and repeats messages, on a machine that flips bits and restarts its daemon. One seed gives one history.
It must hold that a load that was reported valid returned exactly what was committed under its keys,
that `CacheCore.check` passes after every event, and that nothing is left when all have gone.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvtier.core import messages as m
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.core.policies import POLICIES
from kvtier.testing.simulated_engine import SimulatedEngine, Sleep, Task, make_chain, make_layout
from kvtier.testing.simulated_node import DEVICE, DISK, FAR, SimulatedNode
from kvtier.testing.simulated_tier import SimulatedTier
from kvtier.types import PAGE_SIZE_BYTES, TierKind

CALL_TIMEOUT_S = 0.5
MAX_ATTEMPTS = 3
MAX_ENGINES = 4


@dataclass(slots=True)
class PendingCall:
    """One request under way; whichever answer comes first counts."""

    engine: SimulatedEngine
    request: m.Request
    resume: Callable[[Any], None]
    attempts: int = 0
    done: bool = False


@dataclass(slots=True)
class Result:
    """What a history contained, so that a test can see that it was worth running."""

    seed: int
    steps: int
    seconds: float
    loaded_blocks: int
    counts: dict[str, int] = field(default_factory=dict)


class Simulation:
    """One history.

    Parameters
    ----------
    seed
        Decides everything: sizes, times, who does what, and what goes wrong.
    check_every
        `CacheCore.check` after each event, or after every so many.
    below
        Whether there is a disk below; None: the seed decides that, too.
    far
        Whether there is far memory between it and the top; None: the seed decides, where there is a disk.
    policy
        By name; None: the seed decides.
    device
        Whether there is device memory, with second copies of what is read often.
    """

    def __init__(
        self,
        seed: int,
        check_every: int = 1,
        below: bool | None = None,
        far: bool | None = None,
        policy: str | None = None,
        device: bool = False,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.steps = 0
        self.check_every = check_every
        self.closing = False
        self.tasks = 0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._names = itertools.count()
        self.loss = self.rng.choice((0.0, 0.02, 0.1))
        self.repeats = self.rng.choice((0.0, 0.1))
        ttl_s = self.rng.choice((1.0, 3.0))
        if below is None:
            below = bool(seed % 3)
        if far is None:
            far = below and bool(seed % 2)
        more = self._below(seed) if below or far else {}
        config = CoreConfig(
            lease_ttl_s=ttl_s,
            hold_ttl_s=ttl_s,
            reservation_ttl_s=self.rng.choice((1.0, 3.0)),
            max_leased_fraction=self.rng.choice((0.3, 0.6, 1.0)),
            max_unfinished_fraction=self.rng.choice((0.3, 1.0)),
            **more,
        )
        extent_bytes = PAGE_SIZE_BYTES * self.rng.choice((4, 6, 8))
        capacity_bytes = extent_bytes * self.rng.choice((4, 8, 16))
        if below or far:
            capacity_bytes = min(capacity_bytes, 4 * extent_bytes)  # so that much has to go down
        frees_at_once = self.rng.random() < 0.6
        tier = TierSpec(TierKind.DRAM, capacity_bytes, capacity_bytes, extent_bytes, frees_at_once)
        self.layouts = [make_layout(pages) for pages in self.rng.choice(((1,), (1, 2), (1, 2, 3)))]
        self.shards = self.rng.choice((1, 1, 2))
        disk = self._disk(extent_bytes) if below else None
        between = self._far(seed, extent_bytes) if far else None
        if policy is None:
            policy = random.Random(f"policy/{seed}").choice(sorted(POLICIES))
        above = self._device(seed, extent_bytes) if device else None
        self.node = SimulatedNode(self.rng, config, tier, disk, between, policy, above)
        self.tier = SimulatedTier(self)
        self.engines: list[SimulatedEngine] = []
        self.everyone: list[SimulatedEngine] = []

    def _below(self, seed: int) -> dict[str, Any]:
        rng = random.Random(f"below/{seed}")
        return {
            "demote_high_fraction": rng.choice((0.05, 0.3, 0.6)),
            "admit_after_uses": rng.choice((1, 1, 2)),
            "admit_by_worth": random.Random(f"admit/{seed}").random() < 0.3,
            "max_demotes": rng.choice((1, 3)),
            "demote_batch_bytes": PAGE_SIZE_BYTES * rng.choice((1, 4, 16)),
            "max_fetches": rng.choice((2, 8)),
            "max_fetched_fraction": rng.choice((0.3, 1.0)),
        }

    def _disk(self, extent_bytes: int) -> TierSpec:
        extent_bytes += 2 * PAGE_SIZE_BYTES
        size = extent_bytes * self.rng.choice((3, 8, 24))
        frees_at_once = self.rng.random() < 0.3
        return TierSpec(
            TierKind.NVME, size, size, extent_bytes, frees_at_once, DISK, PAGE_SIZE_BYTES, outlives=True
        )

    @staticmethod
    def _far(seed: int, extent_bytes: int) -> TierSpec:
        size = extent_bytes * random.Random(f"far/{seed}").choice((2, 4, 8))
        return TierSpec(TierKind.FAR, size, size, extent_bytes, arena=FAR)

    @staticmethod
    def _device(seed: int, extent_bytes: int) -> TierSpec:
        size = extent_bytes * random.Random(f"device/{seed}").choice((1, 2, 4))
        return TierSpec(TierKind.HBM, size, size, extent_bytes, arena=DEVICE)

    # ---- clock and tasks

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action` so much later."""
        heapq.heappush(self._queue, (self.now_s + seconds, next(self._order), action))

    def spawn(self, engine: SimulatedEngine, task: Task) -> None:
        """Let an engine do something."""
        self.tasks += 1
        self._advance(engine, task, None)

    def _advance(self, engine: SimulatedEngine, task: Task, value: Any) -> None:
        if engine.dead:
            self.tasks -= 1
            task.close()
            return
        try:
            wish = task.send(value)
        except StopIteration:
            self.tasks -= 1
            return
        if isinstance(wish, Sleep):
            self.after(wish.seconds, lambda: self._advance(engine, task, None))
        else:
            self._send(PendingCall(engine, wish.request, lambda reply: self._advance(engine, task, reply)))

    # ---- network

    def _send(self, call: PendingCall) -> None:
        call.attempts += 1
        if not call.engine.mute and self.rng.random() >= self.loss:
            self.after(self.rng.expovariate(500), lambda: self._deliver(call))
        if self.rng.random() < self.repeats:
            self.after(self.rng.uniform(0, 5), lambda: self._deliver(call))
        self.after(CALL_TIMEOUT_S, lambda: self._timeout(call, call.attempts))

    def _deliver(self, call: PendingCall) -> None:
        if call.engine.dead:
            return  # its connection is gone, and so is what was in it
        reply = self.handle(call.request)
        if self.rng.random() >= self.loss:
            self.after(self.rng.expovariate(500), lambda: self._answer(call, reply))

    def _answer(self, call: PendingCall, reply: Any) -> None:
        if not call.done:
            call.done = True
            call.resume(reply)

    def _timeout(self, call: PendingCall, attempt: int) -> None:
        if call.done or attempt != call.attempts:
            return
        if call.attempts < MAX_ATTEMPTS and not call.engine.dead:
            self._send(call)
        else:
            self._answer(call, None)

    # ---- the node

    def handle(self, event: m.Event) -> Any:
        """Let the node handle an event, and see to what it is told to do; returns the reply or fault."""
        check = self.steps % self.check_every == 0
        reply, instructions = self.node.handle(event, self.now_s, check=check)
        incarnation = self.node.incarnation
        for instruction in instructions:
            delay_s = self.rng.expovariate(5)
            if isinstance(instruction, m.Verify):
                self.after(delay_s, lambda v=instruction: self._verify(v, incarnation))  # type: ignore[misc]
            elif isinstance(instruction, m.Drop):
                self.after(delay_s, lambda d=instruction: self._drop(d, incarnation))  # type: ignore[misc]
            elif isinstance(instruction, m.Demote):
                self.tier.run(self.tier.demote(instruction))
            elif isinstance(instruction, m.Fetch):
                self.tier.run(self.tier.fetch(instruction))
        return reply

    def _verify(self, instruction: m.Verify, incarnation: int) -> None:
        if incarnation == self.node.incarnation:
            self.handle(m.Verified(instruction.verify, self.node.verify(instruction)))

    def _drop(self, drop: m.Drop, incarnation: int) -> None:
        if incarnation == self.node.incarnation:
            self.node.delete(drop)
            self.handle(m.Dropped(drop.tier, drop.slots))

    # ---- what happens by itself

    def _every(self, period_s: float, action: Callable[[], None], *, always: bool = False) -> None:
        def again() -> None:
            if self.closing and not always:
                return
            action()
            self.after(period_s if always else self.rng.expovariate(1 / period_s), again)

        self.after(self.rng.uniform(0, period_s), again)

    def _work(self) -> None:
        alive = [engine for engine in self.engines if not engine.mute]
        if alive:
            engine = self.rng.choice(alive)
            self.spawn(engine, engine.work())

    def _join(self) -> None:
        if sum(not engine.mute for engine in self.engines) < MAX_ENGINES:
            layout = self.rng.choice(self.layouts)
            engine = SimulatedEngine(f"e-{next(self._names)}", layout, self.shards, self.node, self.rng)
            self.engines.append(engine)
            self.everyone.append(engine)
            self.spawn(engine, engine.register())

    def _kill(self, engine: SimulatedEngine | None = None) -> None:
        """From here on it says nothing more; its copies may go on until its death is proven."""
        alive = [engine for engine in self.engines if not engine.mute]
        if engine is None and alive:
            engine = self.rng.choice(alive)
        if engine is not None:
            engine.mute = True
            victim = engine
            self.after(self.rng.uniform(0, 2), lambda: self._buried(victim))

    def _buried(self, engine: SimulatedEngine) -> None:
        engine.dead = True
        self.engines.remove(engine)
        self.node.bury(engine)
        self.handle(m.EngineDied(engine.name))

    def _restart(self) -> None:
        self.node.start(self.now_s)
        if self.node.below is not None:
            self.tier.restarted()

    def _break_or_mend(self) -> None:
        if self.tier.is_down:
            self.tier.come_back()
        elif self.rng.random() < 0.3:
            self.tier.go_down()

    def _grow(self) -> None:
        tier = self.node.core.stats().tiers[0]
        if tier.allocated_bytes < tier.capacity_bytes:
            more = min(tier.capacity_bytes, tier.allocated_bytes + self.node.tier.extent_bytes)
            self.handle(m.Grow(tier.kind, more))

    def _administer(self) -> None:
        keys = make_chain(self.rng.choice(self.layouts), [self.rng.randrange(2) for _ in range(4)])
        keys = keys[self.rng.randrange(4) :] if self.rng.random() < 0.3 else keys
        id = self.rng.randbytes(16)
        requests: list[m.Request] = [
            m.Pin(id, keys, self.rng.uniform(0.1, 5)),
            m.Unpin(id, None, keys),
            m.Evict(id, keys),
        ]
        self.handle(self.rng.choice(requests))

    # ---- the history

    def run(self, steps: int) -> Result:
        """So many events, then peace: all engines die, all times run out, and nothing may be left."""
        self._every(0.3, lambda: self.handle(m.Tick()), always=True)
        self._every(0.05, self._work)
        self._every(1.0, self._join)
        self._every(self.rng.choice((3.0, 20.0)), self._kill)
        self._every(self.rng.choice((1.5, 15.0, 1000.0)), self._restart)
        self._every(self.rng.choice((3.0, 1000.0)), self.node.corrupt_something)
        self._every(2.0, self._administer)
        self._every(1.0, lambda: self.handle(m.Scrub(2)))
        self._every(2.0, self._grow)
        if self.node.below is not None:
            self._every(2.0, self._break_or_mend)
        self._join()
        while self.steps < steps:
            self._step()
        self._close()
        loaded = sum(engine.loaded for engine in self.everyone)
        return Result(self.seed, self.steps, self.now_s, loaded, dict(self.node.counts))

    def _step(self) -> None:
        self.now_s, _, action = heapq.heappop(self._queue)
        self.steps += 1
        action()

    def _close(self) -> None:
        self.closing = True
        for engine in list(self.engines):
            if not engine.mute:
                self._kill(engine)
        end_s = self.now_s + 60.0
        while self.now_s < end_s:
            self._step()
        assert self.tasks == 0, "a simulated task never ended"
        for chain in self._all_chains():
            self.handle(m.Evict(self.rng.randbytes(16), chain))
        if self.node.core.copying:
            self._evict_again()
        end_s = self.now_s + 60.0
        while self.now_s < end_s:
            self._step()
        self.node.assert_empty(self.now_s)

    def _evict_again(self) -> None:
        """What was being copied at the first time has ended by now."""
        for _ in range(3):
            end_s = self.now_s + 20.0
            while self.now_s < end_s:
                self._step()
            keys = [key for keys in self.node.core.ids().values() for key in keys]
            self.handle(m.Evict(self.rng.randbytes(16), keys or [bytes(32)]))

    def _all_chains(self) -> Iterator[list[bytes]]:
        for layout in self.layouts:
            for branch in range(3):
                yield make_chain(layout, [branch])
        yield [key for blocks in self.node.core.residency.shards.values() for key in blocks] or [bytes(32)]


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 and the seed on stderr as soon as one history fails."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.testing.simulator", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="FIRST:END, or one seed")
    parser.add_argument("--steps", type=int, default=2000, help="events of each history")
    parser.add_argument("--check-every", type=int, default=1, help="check invariants after so many events")
    parser.add_argument("--device", action="store_true", help="with device memory")
    args = parser.parse_args(argv)
    first, _, end = args.seeds.partition(":")
    loaded = steps = 0
    seeds = range(int(first), int(end) if end else int(first) + 1)
    for seed in seeds:
        try:
            result = Simulation(seed, args.check_every, device=args.device).run(args.steps)
        except Exception:
            traceback.print_exc()
            print(f"seed {seed} failed: --seeds {seed} --steps {args.steps}", file=sys.stderr)
            return 1
        loaded += result.loaded_blocks
        steps += result.steps
    print(f"{len(seeds)} seeds, {steps} events, {loaded} blocks loaded and right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
