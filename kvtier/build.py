"""Config -> Node: the one place that names concrete classes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from kvtier import logs
from kvtier.config import Config, FarRegion
from kvtier.core.cache import CacheCore
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.core.policies import POLICIES
from kvtier.errors import ResourceShortage
from kvtier.hashing import Hasher
from kvtier.identity import Identity
from kvtier.index import open_index
from kvtier.index.embedded import EmbeddedIndex
from kvtier.interfaces import Index, Tier, Transfer
from kvtier.liveness import EngineLocks
from kvtier.metrics import Metrics
from kvtier.node import Node
from kvtier.remote.holdings import holdings_of
from kvtier.remote.life import Life
from kvtier.remote.link import Peers
from kvtier.remote.pulls import Puller
from kvtier.remote.remote import Remote
from kvtier.tiers import binding, huge, numa, preflight
from kvtier.tiers.arena import Arena
from kvtier.tiers.far import FarMemory
from kvtier.tiers.file import FileTier
from kvtier.tiers.hbm import HbmTier
from kvtier.tiers.numa import MemoryNode
from kvtier.tiers.nvmeof import inspect
from kvtier.tiers.silence import existing, silence
from kvtier.tiers.sysfs import MOUNTINFO, SYSFS

log = logs.get("build")


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a node needs to share with others: the index, and its life in it."""

    index: Index
    life: Life


def make_index(config: Config) -> Index | None:
    """The index that is configured, not opened yet; None where there is none.

    Raises
    ------
    ConfigError
        Its address is none.
    """
    return None if config.has_no_index else open_index(config)


def is_shared(index: Index) -> bool:
    """Whether other nodes can be in it: with a private one there is nobody to talk to."""
    return not isinstance(index, EmbeddedIndex)


async def build(
    config: Config,
    identity: Identity,
    metrics: Metrics,
    on_progress: Callable[[int, int], None] | None = None,
    begin_to_share: Callable[[], Awaitable[Sharing | None]] | None = None,
) -> Node:
    """A node whose tiers are open and that is not started yet; its `stop` closes them.

    Parameters
    ----------
    identity
        Names the arena; the node has the identity of its life in the index, where it has one.
    on_progress
        Told (bytes ready, bytes wanted) while memory is allocated and touched.
    begin_to_share
        Called when the tiers are open: registering fences whoever else has this identity, so a start that
        fails for lack of memory or of a medium must not have done it. None: the node keeps to itself.

    Raises
    ------
    ResourceShortage
        The machine lacks what `config` asks for; nothing is left behind.
    ConfigError
        Certificates for peers cannot be used, the NVMe tier's paths belong to something else, or there is no
        such NUMA node.
    AlreadyRunning
        A live daemon has the arena or one of the NVMe tier's paths.
    """
    memory = await asyncio.to_thread(memory_of, config)
    arena = Arena(
        node_id=identity.node_id,
        incarnation=identity.incarnation,
        capacity_bytes=config.dram_bytes,
        extent_bytes=config.extent_bytes,
        shm_dir=config.shm_dir,
        old_arena_deadline_s=config.old_arena_deadline_s,
        bound_to=memory.near,
        huge_pages=config.huge_pages,
        on_progress=on_progress,
    )
    async with AsyncExitStack() as opened:
        tiers: list[Tier] = [arena]
        if config.far_memory:
            tiers.append(far_tier(config, memory, on_progress))
        if config.nvme_paths:
            await _look_below(config)
            tiers.append(file_tier(config, identity))
        if config.hbm_bytes:
            tiers.append(hbm_tier(config, identity))
        for tier in tiers:
            opened.push_async_callback(tier.close)
            await tier.open()
        sharing = None if begin_to_share is None else await begin_to_share()
        if sharing is not None:
            identity = sharing.life.identity
        core = CacheCore(
            core_config(config, has_index=sharing is not None),
            [tier_spec(tier) for tier in tiers],
            POLICIES[config.policy],
            seed=identity.incarnation,
        )
        hasher = Hasher({tier.kind: tier for tier in tiers})
        node = Node(
            core=core,
            tiers=tiers,
            identity=identity,
            locks=EngineLocks(config.run_dir),
            config=config,
            metrics=metrics,
            hasher=hasher,
            remote=None if sharing is None else _remote(sharing, core, arena, hasher, config, metrics),
        )
        opened.pop_all()
        return node


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the machine's memory is to be taken from: nodes of the arena, and far memory, nearest first."""

    nodes: list[MemoryNode]
    near: tuple[int, ...]
    far: tuple[FarRegion, ...]


def memory_of(config: Config, *, root: Path = SYSFS, mountinfo: Path = MOUNTINFO) -> MemoryPlan:
    """What `config` says of memory, compared with what the machine has.

    Raises
    ------
    ConfigError
        A NUMA node is named that is not here.
    ResourceShortage
        Huge pages are required, and not to be had; says what mends it.
    """
    nodes = numa.memory_nodes(root)
    cpus = numa.own_cpus()
    near = binding.near_nodes(config.numa_node, nodes, cpus)
    if config.numa_node == "auto" and not near:
        log.warning("the arena is not bound: the kernel shows no memory next to this process's CPUs")
    for region in config.far_memory:
        if region.node is not None:
            binding.require("far_memory", region.node, nodes)
    if config.huge_pages == "require" and (fault := huge.fault(config, root=root, mountinfo=mountinfo)):
        raise ResourceShortage(f"huge_pages is 'require', but {fault.why}: {fault.todo}")
    origin = next(iter(near or numa.nodes_of_cpus(nodes, cpus)), 0)
    order = [node.node for node in numa.placement_order(nodes, origin)]
    far = sorted(config.far_memory, key=lambda its: len(order) if its.node is None else order.index(its.node))
    return MemoryPlan(nodes, near, tuple(far))


def far_tier(
    config: Config, memory: MemoryPlan, on_progress: Callable[[int, int], None] | None = None
) -> FarMemory:
    """The tier of far memory, not open yet."""
    return FarMemory(
        memory.far,
        extent_bytes=config.extent_bytes,
        nodes=memory.nodes,
        huge_pages=config.huge_pages,
        on_progress=on_progress,
    )


async def _look_below(config: Config) -> None:
    """Say where I/O of the NVMe tier could block for longer than the tier waits, and what mends it.

    Raises
    ------
    ResourceShortage
        A path does not answer: whoever touched it would wait with it.
    """
    for path in config.nvme_paths:
        fault = await asyncio.to_thread(silence, path, config.tier_deadline_s, may_be_made=True)
        if fault:
            raise ResourceShortage(f"{path}: {fault}; see that it is mounted, or leave it out of nvme_paths")
        storage = await asyncio.to_thread(inspect, existing(path))
        for problem in preflight.problems(storage, config.tier_deadline_s):
            log.warning("the NVMe tier's medium", where=problem.where, why=problem.why, todo=problem.todo)


def file_tier(config: Config, identity: Identity) -> FileTier:
    """The NVMe tier, not open yet."""
    return FileTier(
        node_id=identity.node_id,
        paths=config.nvme_paths,
        capacity_bytes=config.nvme_bytes,
        extent_bytes=config.extent_bytes,
        deadline_s=config.tier_deadline_s,
        codec=config.nvme_codec,
    )


def hbm_tier(config: Config, identity: Identity) -> HbmTier:
    """The tier of device memory, not open yet."""
    return HbmTier(
        incarnation=identity.incarnation,
        capacity_bytes=config.hbm_bytes,
        extent_bytes=config.extent_bytes,
        device=config.hbm_device,
    )


def _remote(
    sharing: Sharing, core: CacheCore, arena: Arena, hasher: Hasher, config: Config, metrics: Metrics
) -> Remote:
    transfers: list[Transfer] = []  # filled when they are open
    identity = sharing.life.identity
    peers = Peers((identity.node_id, identity.incarnation), config, transfers)

    unusable: dict[str, str] = {}

    async def open_all() -> Sequence[Transfer]:
        from kvtier.transfer.opening import open_transfers  # heavy, and the socket answers by now

        report = unusable.__setitem__
        return await open_transfers(
            config, arena.memory, peers.channel_of, identity.node_id, report, metrics.count_stream
        )

    return Remote(
        index=sharing.index,
        peers=peers,
        puller=Puller(peers, transfers, arena.view, hasher, config, metrics),
        transfers=transfers,
        unusable=unusable,
        open_transfers=open_all if is_shared(sharing.index) else None,
        holdings=holdings_of(core, config.max_pulls),
        life=sharing.life,
        config=config,
        metrics=metrics,
    )


def tier_spec(tier: Tier) -> TierSpec:
    """An open tier as the core sees it."""
    return TierSpec(
        kind=tier.kind,
        capacity_bytes=tier.capacity_bytes,
        allocated_bytes=tier.allocated_bytes,
        extent_bytes=tier.extent_bytes,
        frees_at_once=tier.traits.frees_at_once,
        arena=int(getattr(tier, "arena_id", 0)),
        header_bytes=tier.traits.header_bytes,
        outlives=tier.traits.outlives,
    )


def core_config(config: Config, *, has_index: bool = False) -> CoreConfig:
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
        has_index=has_index,
        max_pulls=config.max_pulls,
        max_pulled_fraction=config.max_pulled_fraction,
        max_given_fraction=config.max_given_fraction,
        pull_bytes_per_s=config.pull_bytes_per_s,
        pull_floor_s=config.pull_floor_s,
        demote_high_fraction=config.demote_high_fraction,
        admit_after_uses=config.admit_after_uses,
        admit_by_worth=config.admit_by_worth,
        promote_after_uses=config.promote_after_uses,
    )
