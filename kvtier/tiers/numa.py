"""Memory as the machine has it: NUMA nodes, their CPUs and distances, memory without CPUs, huge pages.

A node of memory without CPUs is an expander: CXL memory, or HBM next to the processor. Pure reads of sysfs;
what is missing or garbage is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.tiers import sysfs
from kvtier.tiers.sysfs import MOUNTINFO, SYSFS

SAME_NODE_DISTANCE: Final = 10
"""What the firmware writes for a node and itself; others are in proportion."""
_NODE: Final = re.compile(r"node([0-9]{1,5})")
_HUGE: Final = re.compile(r"hugepages-([0-9]{1,10})kB")
_MEMINFO: Final = re.compile(r"Node +[0-9]+ +([\w()]+): +([0-9]{1,16}) kB")
_USUAL_HUGE_PAGE_BYTES: Final = 2 << 20
_TIER: Final = re.compile(r"memory_tier([0-9]{1,5})")
_HUGE_OPTIONS: Final = frozenset({"huge=always", "huge=within_size", "huge=advise"})


@dataclass(frozen=True, slots=True)
class HugePages:
    """Reserved huge pages of one size: how many there are, and how many of them nobody uses."""

    page_bytes: int
    total: int
    free: int

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be taken."""
        return self.free * self.page_bytes


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """One NUMA node.

    Attributes
    ----------
    distances
        (node, distance) to every node that is online, itself included; empty where the kernel does not say.
    kernel_tier
        Rank among the kernel's memory tiers, smaller is faster; None on kernels without them.
    cached_bytes
        Files that the kernel could forget.
    """

    node: int
    cpus: tuple[int, ...]
    total_bytes: int
    free_bytes: int
    distances: tuple[tuple[int, int], ...]
    kernel_tier: int | None
    huge_pages: tuple[HugePages, ...]
    cached_bytes: int = 0

    @property
    def available_bytes(self) -> int:
        """What can be taken without swapping, as far as the kernel says."""
        return self.free_bytes + self.cached_bytes

    @property
    def is_expander(self) -> bool:
        """Memory without CPUs: CXL or HBM."""
        return not self.cpus and self.total_bytes > 0

    def distance_to(self, node: int) -> int:
        """In tenths of a local access; a node that is not listed counts as twice as far as the own one."""
        fallback = SAME_NODE_DISTANCE if node == self.node else 2 * SAME_NODE_DISTANCE
        return dict(self.distances).get(node, fallback)


def memory_nodes(root: Path = SYSFS) -> list[MemoryNode]:
    """Every node with CPUs or memory, by number; empty where the kernel shows none."""
    directory = root / "devices/system/node"
    found = [match for match in map(_NODE.fullmatch, sysfs.names(directory)) if match]
    online = sorted(int(match[1]) for match in found)
    tiers = _kernel_tiers(root)
    nodes = [_read_node(directory / f"node{node}", node, online, tiers.get(node)) for node in online]
    return [node for node in nodes if node.cpus or node.total_bytes]


def nodes_of_cpus(nodes: Sequence[MemoryNode], cpus: frozenset[int]) -> list[int]:
    """The nodes that these CPUs belong to: on which a process that runs there first finds its memory."""
    return [node.node for node in nodes if cpus.intersection(node.cpus)]


def placement_order(nodes: Sequence[MemoryNode], near: int) -> list[MemoryNode]:
    """Nodes with memory, best first: those with CPUs, then expanders; each by distance from node `near`."""
    with_memory = [node for node in nodes if node.total_bytes]
    return sorted(
        with_memory, key=lambda node: (node.is_expander, _distance(nodes, near, node.node), node.node)
    )


def huge_pages(root: Path = SYSFS) -> list[HugePages]:
    """Huge pages of the whole machine, one entry for each size, the smallest first."""
    return _read_huge_pages(root / "kernel/mm/hugepages")


def huge_page_choice(directory: Path, *, root: Path = SYSFS, mountinfo: Path = MOUNTINFO) -> tuple[bool, str]:
    """Whether files in a tmpfs `directory` get huge pages on `madvise`, and which setting says so.

    The mount's own option decides, unless ``shmem_enabled`` is ``deny`` or ``force``.
    """
    general = sysfs.chosen(sysfs.text(root / "kernel/mm/transparent_hugepage/shmem_enabled"))
    if general in ("deny", "force"):
        return general == "force", f"shmem_enabled is {general}"
    mount = sysfs.mount_of(directory, mountinfo)
    if mount is None or mount.kind != "tmpfs":
        kind = "no known mount" if mount is None else mount.kind
        return False, f"{directory} lies in {kind}"
    option = next((each for each in mount.options if each.startswith("huge=")), "huge=never")
    return option in _HUGE_OPTIONS, f"{mount.point} is mounted with {option}"


def anonymous_huge_choice(root: Path = SYSFS) -> tuple[bool, str]:
    """Whether memory that is no file gets huge pages on `madvise`, and which setting says so."""
    setting = sysfs.chosen(sysfs.text(root / "kernel/mm/transparent_hugepage/enabled"))
    why = f"transparent_hugepage/enabled is {setting}" if setting else "the kernel has no such pages"
    return setting in ("always", "madvise"), why


def huge_page_bytes(root: Path = SYSFS) -> int:
    """Size of the huge pages that `madvise` asks for."""
    size_bytes = sysfs.number(root / "kernel/mm/transparent_hugepage/hpage_pmd_size")
    return size_bytes if size_bytes is not None and size_bytes > 0 else _USUAL_HUGE_PAGE_BYTES


def own_cpus() -> frozenset[int]:
    """CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def _distance(nodes: Sequence[MemoryNode], near: int, node: int) -> int:
    origin = next((each for each in nodes if each.node == near), None)
    return origin.distance_to(node) if origin else SAME_NODE_DISTANCE


def _read_node(directory: Path, node: int, online: Sequence[int], kernel_tier: int | None) -> MemoryNode:
    found = dict(_MEMINFO.findall(sysfs.text(directory / "meminfo")))
    distances = sysfs.text(directory / "distance").split()
    valid = len(distances) == len(online) and all(each.isascii() and each.isdigit() for each in distances)
    return MemoryNode(
        node=node,
        cpus=sysfs.numbers(sysfs.text(directory / "cpulist")),
        total_bytes=int(found.get("MemTotal", 0)) * 1024,
        free_bytes=int(found.get("MemFree", 0)) * 1024,
        distances=tuple(zip(online, map(int, distances), strict=True)) if valid else (),
        kernel_tier=kernel_tier,
        huge_pages=tuple(_read_huge_pages(directory / "hugepages")),
        cached_bytes=sum(int(found.get(name, 0)) for name in ("Active(file)", "Inactive(file)")) * 1024,
    )


def _read_huge_pages(directory: Path) -> list[HugePages]:
    found = []
    for match in filter(None, map(_HUGE.fullmatch, sysfs.names(directory))):
        total = sysfs.number(directory / match[0] / "nr_hugepages")
        free = sysfs.number(directory / match[0] / "free_hugepages")
        if total is not None and free is not None and 0 <= free <= total:
            found.append(HugePages(int(match[1]) * 1024, total, free))
    return sorted(found, key=lambda pages: pages.page_bytes)


def _kernel_tiers(root: Path) -> dict[int, int]:
    """Node -> number of its memory tier (kernels of 6.1 and later)."""
    directory = root / "devices/virtual/memory_tiering"
    found = {}
    for match in filter(None, map(_TIER.fullmatch, sysfs.names(directory))):
        for node in sysfs.numbers(sysfs.text(directory / match[0] / "nodelist")):
            found[node] = int(match[1])
    return found
