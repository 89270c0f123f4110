"""How a history of a fleet ends: all trouble stops, time passes, and then everything must be in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.testing.fleet_daemon import Daemon
from kvtier.testing.fleet_engine import FleetEngine
from kvtier.testing.fleet_transfer import Fates
from kvtier.testing.fleet_world import Weather
from kvtier.types import Key, Layout

if TYPE_CHECKING:
    from kvtier.testing.fleet import Fleet

SETTLE_S: Final = 30.0
"""Longer than any time of a history: leases, heartbeats, breakers, calls that hang, pulls, the index' TTL."""
PUBLISH_S: Final = 10.0
AMPLE_S: Final = 1000.0
MAX_PROBES: Final = 12


async def make_peace(fleet: Fleet) -> None:
    """Stop what goes wrong, wait, and judge what is left."""
    world = fleet.world
    fleet.calm = True
    world.weather = Weather()
    world.cut.clear()
    world.slow.clear()
    world.detours.clear()
    fleet.index.is_down = False
    for name in ("never", "partly", "wrong", "slow"):
        setattr(fleet.fates, name, getattr(Fates(), name))
    for site in fleet.sites.values():
        if not any(its.site.node == site.node for its in fleet.daemons()):
            fleet.start(site)
        for engine in list(site.engines):
            engine.die()
    await asyncio.sleep(SETTLE_S)
    _nothing_is_promised(fleet)
    _one_life_each(fleet)
    _index_is_truth(fleet)
    await _all_loads_everywhere(fleet)
    await asyncio.sleep(PUBLISH_S)
    _nothing_is_promised(fleet)
    _index_is_truth(fleet)


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
    """What counts in the index is what is there: nothing missing, nothing more."""
    truth = {
        (block, daemon.site.node, daemon.incarnation, tier)
        for daemon in fleet.daemons()
        for block, tier in daemon.judge.published.items()
    }
    said = {
        (block, node, entry.incarnation, entry.tier)
        for block in fleet.index.entries
        for node, entry in fleet.index.live(block).items()
    }
    if said != truth:
        fleet.world.violate(
            f"the index lacks {len(truth - said)} blocks and has {len(said - truth)} too many"
        )


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
        if daemon is asker:
            continue
        for block in daemon.judge.published:
            found = daemon.node_now().core.residency.get(block.key, block.shard)
            if found is None or found.shape.fingerprint != fingerprint or found.first_child is not None:
                continue
            chain = []
            while found is not None:
                chain.append(found.id.key)
                found = found.parent
            chains.append(chain[::-1])
    return chains


async def _probe(fleet: Fleet, daemon: Daemon, layout: Layout, keys: list[Key]) -> None:
    """An engine on `daemon` must get what others have of these keys, as far as its shares allow."""
    expected = _expected(fleet, daemon, layout, keys)
    if not expected:
        return  # evicted by an earlier probe
    engine = FleetEngine(fleet, daemon.site, fleet.next_engine(), layout)
    await engine.register()
    lookup = m.Lookup(engine.name, engine.name, keys, 1, layout.fingerprint(), AMPLE_S)
    offered = await engine.ask(lookup)
    blocks = offered.blocks if isinstance(offered, m.Offered) else 0
    loaded = await engine.load_shard(engine.name, keys[:blocks], 0) if blocks else 0
    engine.die()
    await asyncio.sleep(2.0)
    if loaded < expected:
        fleet.world.violate(
            f"{daemon.name} loaded {loaded} of {expected} blocks that others have ({offered!r})"
        )
    fleet.world.count("probe")


def _expected(fleet: Fleet, asker: Daemon, layout: Layout, keys: list[Key]) -> int:
    core, config = asker.node_now().core, fleet.core_config
    have = max(its.node_now().core.match(keys, 1) for its in fleet.daemons() if its is not asker)
    here = core.match(keys, 1)
    allocated = core.stats().tiers[0].allocated_bytes
    share = min(config.max_pulled_fraction, config.max_given_fraction, config.max_leased_fraction)
    return max(here, min(have, int(allocated * share) // layout.slot_bytes))
