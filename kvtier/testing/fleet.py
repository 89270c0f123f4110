"""A seeded simulation of a fleet: ``python -m kvtier.testing.fleet --seeds 0:100 --seconds 15``.

Two to six daemons, made of the real core, node, membership and publisher, run in simulated time on simulated
memory, with engines that store and load prefixes which all of them share. The index is lost or cannot be
reached, messages are lost, late and repeated, bytes arrive wrong, partly, late or never, daemons die, and
two of them have one identity. It must hold after every event that nothing wrong was promised, given or loaded
(`fleet_judge`); and in the end, when all of that has stopped, that the index equals what is there and that
every prefix can be loaded everywhere (`fleet_peace`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from kvtier import logs
from kvtier.config import Config
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.metrics import Metrics
from kvtier.testing.fleet_daemon import Daemon, Site
from kvtier.testing.fleet_engine import FleetEngine
from kvtier.testing.fleet_index import SITE, SharedIndex
from kvtier.testing.fleet_memory import Arena
from kvtier.testing.fleet_peace import AMPLE_CHANGES, make_peace
from kvtier.testing.fleet_promises import Truth
from kvtier.testing.fleet_transfer import Fates
from kvtier.testing.fleet_world import Weather, World
from kvtier.testing.simulated_engine import make_layout
from kvtier.types import PAGE_SIZE_BYTES, TierKind

MAX_CLOCK_OFFSET_S: Final = 3600.0
DEAD_AFTER_S: Final = 3.0
INDEX_TTL_S: Final = 15.0
MAX_ENGINES: Final = 2


@dataclass(slots=True)
class Result:
    """What a history contained, so that a test can see that it was worth running."""

    seed: int
    seconds: float
    steps: int
    loaded_blocks: int
    counts: dict[str, int]


class Fleet:
    """One history.

    Parameters
    ----------
    seed
        Decides everything: how many nodes, sizes, times, who does what, and what goes wrong.
    checks_cores
        Whether `CacheCore.check` runs after each event.
    """

    def __init__(self, seed: int, *, checks_cores: bool = True) -> None:
        self.seed = seed
        self.world = World(seed)
        self.rng = rng = self.world.rng
        self.truth = Truth(checks_cores=checks_cores)
        self.arenas: list[tuple[Arena, Daemon]] = []
        self.core_config = self._make_core_config()
        self.tier = self._make_tier()
        self.config = self._make_config()
        self.metrics = Metrics()
        self.fates = Fates(
            never=rng.choice((0.0, 0.03, 0.1)),
            partly=rng.choice((0.0, 0.05, 0.2)),
            wrong=rng.choice((0.0, 0.02, 0.1)),
            slow=rng.choice((0.0, 0.05, 0.3)),
        )
        self.world.weather = Weather(
            loss=rng.choice((0.0, 0.01, 0.05)),
            repeats=rng.choice((0.0, 0.05, 0.2)),
            late=rng.choice((0.0, 0.01, 0.05)),
        )
        self.layouts = [make_layout(pages) for pages in rng.choice(((1,), (1, 2)))]
        self.ways = rng.choice((1, 2))
        self.shards = rng.choice((1, 1, 2))
        self.index = SharedIndex(self.world, INDEX_TTL_S, DEAD_AFTER_S)
        self.sites = self._make_sites()
        self._engines = 0
        self.everyone: list[FleetEngine] = []

    def _make_core_config(self) -> CoreConfig:
        rng = self.rng
        ttl_s = rng.choice((1.0, 3.0))
        return CoreConfig(
            lease_ttl_s=ttl_s,
            hold_ttl_s=ttl_s,
            reservation_ttl_s=rng.choice((1.0, 3.0)),
            max_leased_fraction=rng.choice((0.5, 1.0)),
            max_unfinished_fraction=rng.choice((0.3, 1.0)),
            has_index=True,
            max_pulls=rng.choice((2, 8)),
            max_pulled_fraction=rng.choice((0.3, 0.6)),
            max_given_fraction=rng.choice((0.15, 0.3, 0.6)),
            pull_bytes_per_s=rng.choice((1e6, 1e8)),
            pull_floor_s=rng.choice((0.1, 1.0, 5.0)),
        )

    def _make_tier(self) -> TierSpec:
        extent_bytes = PAGE_SIZE_BYTES * self.rng.choice((4, 8))
        capacity_bytes = extent_bytes * self.rng.choice((4, 8, 16))
        frees_at_once = self.rng.random() < 0.7
        return TierSpec(TierKind.DRAM, capacity_bytes, capacity_bytes, extent_bytes, frees_at_once)

    def _make_config(self) -> Config:
        core = self.core_config
        config = Config(
            dram_bytes=64 << 10,
            extent_bytes=64 << 10,
            tick_s=0.3,
            engine_poll_s=0.3,
            lease_ttl_s=core.lease_ttl_s,
            scrub_bytes_per_s=self.rng.choice((0, 8 * PAGE_SIZE_BYTES)),
            verify_commits=self.rng.choice(("off", "all")),
            heartbeat_s=1.0,
            dead_after_s=DEAD_AFTER_S,
            index_ttl_s=INDEX_TTL_S,
            index_timeout_s=self.rng.choice((0.02, 0.1)),
            max_unpublished=self.rng.choice((4, AMPLE_CHANGES)),
            max_pulls=core.max_pulls,
            max_given_fraction=core.max_given_fraction,
            max_pulled_fraction=core.max_pulled_fraction,
        )
        batch_bytes = PAGE_SIZE_BYTES * self.rng.choice((1, 2, 16))  # far below what operators may choose
        return config.model_copy(update={"pull_batch_bytes": batch_bytes})

    def _make_sites(self) -> dict[str, Site]:
        """Each machine by its address; the last may have a copy of the first one's data directory."""
        rng = self.rng
        count = rng.randint(2, 6)
        nodes = [f"{rng.getrandbits(128):032x}" for _ in range(count)]
        if count > 2 and rng.random() < 0.3:
            nodes[-1] = nodes[0]
        clocks = (0.0, 0.0, 1.0, -1.0, MAX_CLOCK_OFFSET_S, -MAX_CLOCK_OFFSET_S)
        offsets = [MAX_CLOCK_OFFSET_S + rng.choice(clocks) + rng.random() for _ in nodes]
        return {
            f"s{i}:1": Site(f"s{i}:1", node, offset)
            for i, (node, offset) in enumerate(zip(nodes, offsets, strict=True))
        }

    # ---- who is there

    def daemons(self) -> list[Daemon]:
        """Those that serve."""
        found = (site.daemon for site in self.sites.values())
        return [its for its in found if its is not None and its.node is not None and not its.dead]

    def start(self, site: Site) -> None:
        """A daemon begins with an empty arena, unless one runs."""
        if site.daemon is None:
            site.daemon = Daemon(self, site)
            site.daemon.spawn(site.daemon.run())

    def next_engine(self) -> int:
        """A number that no engine had."""
        self._engines += 1
        return self._engines

    def join(self, site: Site) -> FleetEngine:
        """A new engine."""
        engine = FleetEngine(self, site, self.next_engine(), self.rng.choice(self.layouts))
        self.everyone.append(engine)
        engine.spawn(engine.register())
        return engine

    # ---- what happens

    def _every(self, period_s: float, action: Callable[[], None]) -> None:
        async def again() -> None:
            while not self.world.is_calm:
                await asyncio.sleep(self.rng.expovariate(1 / period_s))
                if not self.world.is_calm:
                    action()

        self.world.network.spawn(again())

    def _soon(self, most_s: float, action: Callable[[], object]) -> None:
        self.world.loop.call_later(self.rng.uniform(0, most_s), action)

    def _work(self) -> None:
        engine = self.rng.choice([engine for site in self.sites.values() for engine in site.engines])
        engine.spawn(engine.load() if self.rng.random() < 0.65 else engine.store())

    def _replace_engine(self) -> None:
        site = self.rng.choice(list(self.sites.values()))
        if len(site.engines) >= MAX_ENGINES:
            self.rng.choice(site.engines).die()
        self.join(site)

    def _restart(self) -> None:
        site = self.rng.choice(list(self.sites.values()))
        if site.daemon is not None and self.rng.random() < 0.3:
            self.world.count("stop")
            self.world.network.spawn(site.daemon.stop())
        elif site.daemon is not None:
            self.world.count("crash")
            site.daemon.end()
        self._soon(6.0, lambda: self.start(site))

    def _cut(self) -> None:
        one, other = self.rng.sample([*self.sites, SITE], 2)
        pair = (min(one, other), max(one, other))
        self.world.cut[pair] = None
        self.world.count("partition")
        self._soon(8.0, lambda: self.world.cut.pop(pair, None))

    def _slow_down(self) -> None:
        site = self.rng.choice([*self.sites, SITE])
        self.world.slow[site] = self.rng.choice((5.0, 50.0, 500.0))
        self._soon(5.0, lambda: self.world.slow.pop(site, None))

    def _lose_index(self) -> None:
        self.world.count("index lost")
        self.index.lose_everything()

    def _stop_index(self) -> None:
        self.world.count("index down")
        self.index.is_down = True
        self._soon(8.0, self._start_index)

    def _start_index(self) -> None:
        if self.rng.random() < 0.5:
            self.index.lose_everything()
        self.index.is_down = False

    def _flip(self) -> None:
        daemons = self.daemons()
        if daemons:
            arena = self.rng.choice(daemons).arena
            self.world.count("flipped")
            arena.flip((arena.number, self.rng.randrange(arena.pages)))

    def _detour(self) -> None:
        """Calls to one life of an identity reach another machine, which has another life of it, or none."""
        one, other = self.rng.sample(list(self.sites), 2)
        self.world.detours[one] = other
        self._soon(4.0, lambda: self.world.detours.pop(one, None))

    def _administer(self) -> None:
        daemons = self.daemons()
        if daemons:
            daemon, engine = self.rng.choice(daemons), self.rng.choice(self.everyone)
            daemon.spawn(engine.administer(daemon))

    # ---- the history

    def run(self, seconds: float) -> Result:
        """So many simulated seconds of trouble, then peace."""
        try:
            self.world.loop.run_until_complete(self._until_failure(self._history(seconds)))
        finally:
            self._close()
        if self.world.failure is not None:
            raise self.world.failure
        counts = self.world.counts
        loaded = sum(engine.loaded for engine in self.everyone)
        return Result(self.seed, self.world.now_s, self.world.steps, loaded, dict(counts))

    async def _until_failure(self, history: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(history)
        while not task.done() and self.world.failure is None:
            await asyncio.wait([task], timeout=0.1)
        if self.world.failure is None:
            task.result()

    async def _history(self, seconds: float) -> None:
        rng = self.rng
        for site in self.sites.values():
            self._soon(3.0, lambda site=site: self.start(site))  # type: ignore[misc]
            self.join(site)
        self.index.is_down = rng.random() < 0.1
        if self.index.is_down:
            self._soon(8.0, self._start_index)
        self._every(0.25 / len(self.sites), self._work)
        self._every(3.0, self._replace_engine)
        self._every(1.0, self._administer)
        for periods, action in (
            ((4.0, 15.0, 1000.0), self._restart),
            ((3.0, 10.0, 1000.0), self._cut),
            ((3.0, 1000.0), self._slow_down),
            ((10.0, 1000.0, 1000.0), self._lose_index),
            ((10.0, 1000.0, 1000.0), self._stop_index),
            ((1.0, 5.0, 1000.0), self._flip),
            ((5.0, 1000.0, 1000.0), self._detour),
        ):
            self._every(rng.choice(periods), action)
        await asyncio.sleep(seconds)
        await make_peace(self)

    def _close(self) -> None:
        """Nothing of this history runs on."""
        loop = self.world.loop
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=60))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 and the seed on stderr as soon as one history fails."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.testing.fleet", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FIRST:END, or one seed")
    parser.add_argument("--seconds", type=float, default=15.0, help="simulated seconds of each history")
    args = parser.parse_args(argv)
    first, _, end = args.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    loaded = steps = 0
    for seed in seeds:
        try:
            result = Fleet(seed).run(args.seconds)
        except Exception:
            traceback.print_exc()
            print(f"seed {seed} failed: --seeds {seed} --seconds {args.seconds:g}", file=sys.stderr)
            return 1
        loaded += result.loaded_blocks
        steps += result.steps
    print(f"{len(seeds)} seeds, {steps} events, {loaded} blocks loaded and right")
    return 0


if __name__ == "__main__":
    logs.configure("critical", "console")  # faults are what happens here all the time
    sys.exit(main())
