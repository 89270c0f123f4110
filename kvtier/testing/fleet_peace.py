"""How a history of a fleet ends: all trouble stops, time passes, and then everything must be in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.core.blocks import Block
from kvtier.testing.fleet_daemon import Daemon
from kvtier.testing.fleet_engine import FleetEngine
from kvtier.testing.fleet_transfer import Fates
from kvtier.testing.fleet_world import Weather
from kvtier.types import BlockId, Key, Layout, TierKind

if TYPE_CHECKING:
    from kvtier.testing.fleet import Fleet

SETTLE_S: Final = 20.0
"""Longer than any time of a history: leases, heartbeats, breakers, calls that hang, pulls, the index' TTL."""
STOP_S: Final = 5.0
"""A daemon that is being stopped has ended by then."""
PUBLISH_S: Final = 6.0
"""Where nothing goes wrong, changes are in the index so soon: at once, or with the slow sweep."""
REPUBLISH_S: Final = 3.0
"""And everything so soon after it was lost: within some heartbeats, long before the slow sweep comes by."""
AMPLE_CHANGES: Final = 1000
AMPLE_S: Final = 1000.0
MAX_PROBES: Final = 8
MAX_ATTEMPTS: Final = 6
"""Blocks of which an ancestor was lost are in the index until somebody asks for them."""


Places = dict[tuple[BlockId, str], tuple[int, TierKind]]


async def make_peace(fleet: Fleet) -> None:
    """Stop what goes wrong, wait, and judge what is left."""
    world = fleet.world
    world.is_calm = True
    world.weather = Weather()
    world.cut.clear()
    world.slow.clear()
    world.detours.clear()
    fleet.index.is_down = False
    for name in ("never", "partly", "wrong", "slow"):
        setattr(fleet.fates, name, getattr(Fates(), name))
    for site in fleet.sites.values():
        for engine in list(site.engines):
            engine.die()
    _start_missing(fleet)
    await asyncio.sleep(STOP_S)
    _start_missing(fleet)
    await asyncio.sleep(SETTLE_S)
    _nothing_is_promised(fleet)
    _one_life_each(fleet)
    _index_is_truth(fleet)
    await _all_loads_everywhere(fleet)
    await asyncio.sleep(PUBLISH_S)
    if fleet.config.max_unpublished >= AMPLE_CHANGES:  # else only the TTL ends what was forgotten
        _index_is_truth(fleet)
    fleet.index.lose_everything()
    await asyncio.sleep(REPUBLISH_S)
    _index_is_truth(fleet)
    _nothing_is_promised(fleet)


def _start_missing(fleet: Fleet) -> None:
    """Somebody restarts what is down, but for the older one of two with one identity."""
    for site in fleet.sites.values():
        if not any(its.site.node == site.node for its in fleet.daemons()):
            fleet.start(site)


def _nothing_is_promised(fleet: Fleet) -> None:
    for daemon in fleet.daemons():
        judge, core = daemon.judge, daemon.node_now().core
        stats = core.stats()
        left = [stats.holds, stats.leases, len(judge.pulls), len(judge.leases), len(judge.offers)]
        tier = stats.tiers[0]
        left += [tier.reserved_bytes, tier.quarantined_bytes, tier.draining_bytes, tier.leased_bytes]
        if any(left):
            fleet.world.violate(f"{daemon.name} has holds, leases, pulls or unfinished bytes left: {left}")
        if daemon.arena.running or daemon.arena.owners:
            fleet.world.violate(f"{daemon.name} has slots that somebody may still write")


def _one_life_each(fleet: Fleet) -> None:
    """Each identity is served by exactly one daemon, and every node sees all others as they are."""
    daemons = fleet.daemons()
    lives = {its.site.node: its.incarnation for its in daemons}
    if len(lives) != len(daemons) or lives.keys() != {site.node for site in fleet.sites.values()}:
        fleet.world.violate(f"{len(daemons)} daemons serve {len(lives)} identities")
    for daemon in daemons:
        assert daemon.remote is not None
        seen = {node: its.incarnation for node, its in daemon.remote.membership.live.items()}
        if seen | {daemon.site.node: daemon.incarnation} != lives:
            fleet.world.violate(f"{daemon.name} sees {len(seen)} other nodes, or other lives of them")


def _index_is_truth(fleet: Fleet) -> None:
    """The index has what is there: nothing missing, nothing more, nothing of a life that is over."""
    truth: Places = {}
    for daemon in fleet.daemons():
        for block, tier in daemon.judge.published.items():
            truth[block, daemon.site.node] = (daemon.incarnation, tier)
    said = fleet.index.places()
    missing, more = len(truth.items() - said.items()), len(said.items() - truth.items())
    if missing or more:
        fleet.world.violate(f"the index lacks {missing} places and has {more} that are not")


async def _all_loads_everywhere(fleet: Fleet) -> None:
    probes = [
        (daemon, layout, keys)
        for daemon in fleet.daemons()
        for layout in fleet.layouts
        for keys in _chains_elsewhere(fleet, daemon, layout)
    ]
    fleet.rng.shuffle(probes)
    for daemon, layout, keys in probes[:MAX_PROBES]:
        await _probe(fleet, daemon, layout, keys)


def _chains_elsewhere(fleet: Fleet, asker: Daemon, layout: Layout) -> list[list[Key]]:
    """The longest prompts that other daemons have."""
    fingerprint = layout.fingerprint()
    chains: list[list[Key]] = []
    for daemon in fleet.daemons():
        find = daemon.node_now().core.residency.get
        ends = [find(*block) for block in daemon.judge.published if daemon is not asker]
        for end in ends:
            if end is None or end.orphan or end.first_child is not None:
                continue
            if end.shape.fingerprint == fingerprint:
                chains.append(_prompt_of(end))
    return chains


def _prompt_of(block: Block) -> list[Key]:
    keys = [block.id.key]
    while block.parent is not None:
        block = block.parent
        keys.append(block.id.key)
    return keys[::-1]


async def _probe(fleet: Fleet, daemon: Daemon, layout: Layout, keys: list[Key]) -> None:
    """An engine on `daemon` must get what others have of these keys, as far as its shares allow."""
    engine = FleetEngine(fleet, daemon.site, fleet.next_engine(), layout)
    await engine.register()
    offered = None
    for attempt in range(MAX_ATTEMPTS):
        request, loaded = f"{engine.name}/{attempt}", 0
        offered = await engine.ask(m.Lookup(engine.name, request, keys, 1, layout.fingerprint(), AMPLE_S))
        if isinstance(offered, m.Offered) and offered.blocks:
            loaded = await engine.load_shard(request, keys[: offered.blocks], 0)
        if loaded >= (expected := _expected(fleet, daemon, layout, keys)):
            break  # less may be expected than before: what turned out corrupt lives nowhere any more
        await asyncio.sleep(1.0)
    else:
        fleet.world.violate(f"{daemon.name} loaded {loaded} of {expected} blocks that others have: {offered}")
    engine.die()
    await asyncio.sleep(1.0)
    fleet.world.count("probe")


def _expected(fleet: Fleet, asker: Daemon, layout: Layout, keys: list[Key]) -> int:
    core, config = asker.node_now().core, fleet.core_config
    have = max(its.node_now().core.match(keys, 1) for its in fleet.daemons() if its is not asker)
    here = core.match(keys, 1)
    allocated = core.stats().tiers[0].allocated_bytes
    share = min(config.max_pulled_fraction, config.max_given_fraction, config.max_leased_fraction)
    return max(here, min(have, int(allocated * share) // layout.slot_bytes))
