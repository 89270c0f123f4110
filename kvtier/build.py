"""Config -> Node: the one place that names concrete classes."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.config import Config
from kvtier.core.cache import CacheCore
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.core.policies import LruPolicy
from kvtier.identity import Identity
from kvtier.interfaces import Tier
from kvtier.liveness import EngineLocks
from kvtier.metrics import Metrics
from kvtier.node import Node
from kvtier.tiers.arena import Arena


async def build(
    config: Config,
    identity: Identity,
    metrics: Metrics,
    on_progress: Callable[[int, int], None] | None = None,
) -> Node:
    """A node whose tiers are open and that is not started yet; its `stop` closes them.

    Parameters
    ----------
    on_progress
        Told (bytes ready, bytes wanted) while memory is allocated and touched.

    Raises
    ------
    ResourceShortage
        The machine lacks what `config` asks for; nothing is left behind.
    """
    arena = Arena(
        node_id=identity.node_id,
        incarnation=identity.incarnation,
        capacity_bytes=config.dram_bytes,
        extent_bytes=config.extent_bytes,
        shm_dir=config.shm_dir,
        old_arena_deadline_s=config.old_arena_deadline_s,
        on_progress=on_progress,
    )
    await arena.open()
    try:
        core = CacheCore(
            core_config(config), [tier_spec(arena, arena.arena_id)], LruPolicy, seed=identity.incarnation
        )
        return Node(
            core=core,
            tiers=[arena],
            identity=identity,
            locks=EngineLocks(config.run_dir),
            config=config,
            metrics=metrics,
        )
    except BaseException:
        await arena.close()
        raise


def tier_spec(tier: Tier, arena_id: int = 0) -> TierSpec:
    """A tier as the core sees it."""
    return TierSpec(
        kind=tier.kind,
        capacity_bytes=tier.capacity_bytes,
        allocated_bytes=tier.allocated_bytes,
        extent_bytes=tier.extent_bytes,
        frees_at_once=tier.traits.frees_at_once,
        arena=arena_id,
    )


def core_config(config: Config) -> CoreConfig:
    """The part of the configuration that the core decides by."""
    return CoreConfig(
        lease_ttl_s=config.lease_ttl_s,
        hold_ttl_s=config.hold_ttl_s,
        reservation_ttl_s=config.reservation_ttl_s,
        max_engines=config.max_engines,
        max_keys_per_call=config.max_keys_per_call,
        max_leases_per_engine=config.max_leases_per_engine,
        max_holds=config.max_holds,
        max_leased_fraction=config.max_leased_fraction,
        max_unfinished_fraction=config.max_unfinished_fraction,
        max_pinned_fraction=config.max_pinned_fraction,
        max_replies=config.max_replies,
        has_index=False,
        max_pulls=config.max_pulls,
        max_pulled_fraction=config.max_pulled_fraction,
        max_given_fraction=config.max_given_fraction,
        pull_bytes_per_s=config.pull_bytes_per_s,
        pull_floor_s=config.pull_floor_s,
    )
