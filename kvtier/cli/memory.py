"""What `kvtier check` says of memory nodes, expanders (CXL, HBM) and huge pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtier.cli.findings import DEGRADED, MISSING, OK, Finding, finding
from kvtier.cli.output import size_text
from kvtier.config import Config, FarRegion
from kvtier.errors import KvtierError
from kvtier.tiers import binding, huge, numa, sysfs
from kvtier.tiers.numa import HugePages, MemoryNode


def memory_findings(
    config: Config,
    *,
    root: Path = sysfs.SYSFS,
    mountinfo: Path = sysfs.MOUNTINFO,
    is_running: bool = False,
) -> list[Finding]:
    """Lines on NUMA nodes, memory without CPUs, far memory, and the pages that these get.

    `is_running`: the daemon has its memory, so there need not be so much again.
    """
    nodes = numa.memory_nodes(root)
    return [
        _nodes(config, nodes, is_running=is_running),
        *_expanders(nodes),
        *(_far_region(region, nodes, is_running=is_running) for region in config.far_memory),
        _shared_pages(config, root, mountinfo),
        _reserved_pages(config, numa.huge_pages(root)),
    ]


def _nodes(config: Config, nodes: Sequence[MemoryNode], *, is_running: bool) -> Finding:
    name = "memory nodes"
    if config.numa_node is not None:
        return _bound(name, config, nodes, is_running=is_running)
    if not nodes:
        why = "the kernel shows none: everything counts as equally near"
        return finding(name, DEGRADED, why, "a kernel with CONFIG_NUMA")
    with_cpus = [node for node in nodes if node.cpus]
    why = ", ".join(
        f"node {node.node}: {size_text(node.total_bytes)}, {len(node.cpus)} CPUs" for node in with_cpus
    )
    own = numa.nodes_of_cpus(nodes, numa.own_cpus())
    if len(own) < 2:
        return finding(name, OK, why)
    first = own[0]
    return finding(
        name,
        DEGRADED,
        f"{why}; the daemon may run on all of {', '.join(map(str, own))}, so its memory may lie on any",
        f"set numa_node to one of them, and run it there: numactl --cpunodebind={first} kvtier serve "
        f"--numa-node {first}, next to the GPUs and disks it serves",
    )


def _bound(name: str, config: Config, nodes: Sequence[MemoryNode], *, is_running: bool) -> Finding:
    """Where the arena's node is configured: whether it is here, has the room, and the kernel lets us."""
    try:
        near = binding.near_nodes(config.numa_node, nodes, numa.own_cpus())
        if not is_running:
            binding.check_room("dram_bytes", config.dram_bytes, near, nodes)
    except KvtierError as error:
        todo = "set numa_node to another one, or dram_bytes to less"
        return finding(name, MISSING, str(error), todo, needed=True)
    if not near:
        why = "numa_node is 'auto', but the kernel shows no memory next to this process's CPUs"
        return finding(name, DEGRADED, f"{why}: the arena is not bound", "set numa_node to none")
    where = f"the arena comes from node {', '.join(map(str, near))}"
    return _allowed(name, where, near, "dram_bytes")


def _allowed(name: str, where: str, nodes: Sequence[int], what: str) -> Finding:
    """Whether memory can be bound to these nodes, by trying it."""
    refused = binding.try_bind(nodes)
    if refused:
        todo = "in a container: add the capability SYS_NICE, or set its cpuset to that node"
        return finding(name, DEGRADED, f"{where}, but it is not bound there: {refused}", todo)
    return finding(name, OK, f"{where}, bound before {what} is touched")


def _far_region(region: FarRegion, nodes: Sequence[MemoryNode], *, is_running: bool) -> Finding:
    size = size_text(region.size_bytes)
    if region.node is None:
        return finding("far memory any", OK, f"{size}, wherever the kernel puts it")
    name = f"far memory {region.node}"
    try:
        binding.require("far_memory", region.node, nodes)
        if not is_running:
            binding.check_room("far_memory", region.size_bytes, [region.node], nodes)
    except KvtierError as error:
        todo = "name another node in far_memory, or less of it"
        return finding(name, MISSING, str(error), todo, needed=True)
    return _allowed(name, f"{size} of node {region.node}", [region.node], "it")


def _expanders(nodes: Sequence[MemoryNode]) -> list[Finding]:
    found = [_expander(node, nodes) for node in nodes if node.is_expander]
    if found:
        return found
    why = "no memory without CPUs (CXL, HBM)"
    todo = "nothing, unless the machine has some: then `daxctl reconfigure-device --mode=system-ram dax0.0`"
    return [finding("memory expander", MISSING, why, todo)]


def _expander(node: MemoryNode, nodes: Sequence[MemoryNode]) -> Finding:
    near = min(
        (each for each in nodes if each.cpus), key=lambda each: each.distance_to(node.node), default=None
    )
    where = "no node with CPUs is known"
    if near:
        factor = near.distance_to(node.node) / numa.SAME_NODE_DISTANCE
        where = f"{factor:.1f} times as far from node {near.node} as its own"
    rank = "" if node.kernel_tier is None else f", the kernel's memory tier {node.kernel_tier}"
    why = f"{size_text(node.total_bytes)} without CPUs, {size_text(node.free_bytes)} free, {where}{rank}"
    return finding(f"memory expander {node.node}", OK, why)


def _shared_pages(config: Config, root: Path, mountinfo: Path) -> Finding:
    """Pages that the arena and far memory get as they are: with `madvise`."""
    if config.huge_pages == "off":
        return finding("huge pages", DEGRADED, "huge_pages is 'off'", "set huge_pages to 'advise'")
    fault = huge.fault(config, root=root, mountinfo=mountinfo)
    if fault is None:
        _, setting = numa.huge_page_choice(config.shm_dir, root=root, mountinfo=mountinfo)
        return finding("huge pages", OK, f"the arena asks for them, {setting}")
    if config.huge_pages == "require":
        why = f"huge_pages is 'require', but {fault.why}"
        return finding("huge pages", MISSING, why, fault.todo, needed=True)
    why = f"{fault.why}: copies and registration for GPUs cost more"
    return finding("huge pages", DEGRADED, why, fault.todo)


def _reserved_pages(config: Config, pages: Sequence[HugePages]) -> Finding:
    """Pages that are set aside at boot or by sysctl; nothing takes them unless it is told to."""
    name, wanted = "huge pages reserved", size_text(config.dram_bytes)
    why = ", ".join(f"{each.free} of {each.total} of {size_text(each.page_bytes)} are free" for each in pages)
    if any(each.free_bytes >= config.dram_bytes for each in pages):
        return finding(name, OK, f"{why}: enough for dram_bytes, {wanted}")
    if not pages:
        return finding(name, MISSING, "the kernel has no huge pages", "a kernel with CONFIG_HUGETLBFS")
    smallest = pages[0]
    count = -(-config.dram_bytes // smallest.page_bytes)
    todo = f"optional: sysctl vm.nr_hugepages={count} (of {size_text(smallest.page_bytes)})"
    return finding(name, MISSING, f"{why}: not enough for dram_bytes, {wanted}", todo)
