"""What `kvtier check` says of memory nodes, expanders (CXL, HBM) and huge pages."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from kvtier.cli.findings import DEGRADED, MISSING, OK, Finding, finding
from kvtier.cli.output import size_text
from kvtier.config import Config
from kvtier.tiers import numa, sysfs
from kvtier.tiers.numa import HugePages, MemoryNode


def memory_findings(
    config: Config, *, root: Path = sysfs.SYSFS, mountinfo: Path = sysfs.MOUNTINFO
) -> list[Finding]:
    """Lines on NUMA nodes, memory without CPUs, and the pages that the arena gets."""
    nodes = numa.memory_nodes(root)
    return [
        _nodes(nodes),
        *_expanders(nodes),
        _shared_pages(config, root, mountinfo),
        _reserved_pages(config, numa.huge_pages(root)),
    ]


def _nodes(nodes: Sequence[MemoryNode]) -> Finding:
    name = "memory nodes"
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
        f"numactl --cpunodebind={first} --membind={first} kvtier serve, next to the GPUs and disks it serves",
    )


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
    """Pages that the arena gets as it is: files in a tmpfs, with `madvise`."""
    huge, setting = numa.huge_page_choice(config.shm_dir, root=root, mountinfo=mountinfo)
    if huge:
        return finding("huge pages", OK, f"the arena asks for them, {setting}")
    why = f"the arena gets ordinary pages, {setting}: copies and registration for GPUs cost more"
    mount = sysfs.mount_of(config.shm_dir, mountinfo)
    point = shlex.quote(mount.point if mount else str(config.shm_dir))
    return finding("huge pages", DEGRADED, why, f"mount -o remount,huge=advise {point}")


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
