from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.tiers import numa, sysfs
from tests.tiers.machines import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Two sockets, one of them with an expander behind it, and a faster one next to the other."""
    built = Machine(tmp_path)
    built.node(0, cpus="0-3", total_kb=1 << 20, distance="10 21 17 31", pages="8")
    built.node(1, cpus="4-7", total_kb=1 << 20, distance="21 10 31 17")
    built.node(2, cpus="", total_kb=4 << 20, distance="17 31 10 40")
    built.node(3, cpus="", total_kb=2 << 20, distance="31 17 40 10")
    built.node(4, cpus="", total_kb=0, distance="")  # possible, not there
    tiers = built.root / "devices/virtual/memory_tiering"
    built.write(tiers / "memory_tier4", nodelist="0-1")
    built.write(tiers / "memory_tier22", nodelist="2-3")
    return built


def test_nodes_with_and_without_cpus(machine: Machine) -> None:
    nodes = numa.memory_nodes(machine.root)
    assert [node.node for node in nodes] == [0, 1, 2, 3]
    assert [node.is_expander for node in nodes] == [False, False, True, True]
    assert nodes[0].cpus == (0, 1, 2, 3)
    assert (nodes[2].total_bytes, nodes[2].free_bytes) == (4 << 30, 2 << 30)
    assert [node.kernel_tier for node in nodes] == [4, 4, 22, 22]
    assert nodes[0].huge_pages == (numa.HugePages(2 << 20, 8, 8),)
    assert nodes[0].huge_pages[0].free_bytes == 16 << 20


def test_distances_and_the_order_of_placement(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.node(0, cpus="0-3", total_kb=1 << 20, distance="10 21 17 31")
    machine.node(1, cpus="4-7", total_kb=1 << 20, distance="21 10 31 17")
    machine.node(2, cpus="", total_kb=4 << 20, distance="17 31 10 40")
    machine.node(3, cpus="", total_kb=2 << 20, distance="31 17 40 10")
    nodes = numa.memory_nodes(machine.root)
    assert nodes[0].distance_to(3) == 31
    assert [node.node for node in numa.placement_order(nodes, 0)] == [0, 1, 2, 3]
    assert [node.node for node in numa.placement_order(nodes, 1)] == [1, 0, 3, 2]
    assert numa.nodes_of_cpus(nodes, frozenset({1, 5})) == [0, 1]
    assert numa.nodes_of_cpus(nodes, frozenset({7})) == [1]


def test_distances_that_do_not_fit_the_nodes_are_not_believed(machine: Machine) -> None:
    nodes = numa.memory_nodes(machine.root)  # five nodes, lines of four
    assert all(node.distances == () for node in nodes)
    assert (nodes[0].distance_to(0), nodes[0].distance_to(2)) == (10, 20)
    assert [node.node for node in numa.placement_order(nodes, 0)] == [0, 1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"\0\xff", b"0-", b"99999999999999999999", b"Node 0 MemTotal: kB"])
def test_garbage(machine: Machine, content: bytes) -> None:
    for path in (machine.root / "devices").rglob("*"):
        if path.is_file():
            path.write_bytes(content)
    assert [node for node in numa.memory_nodes(machine.root) if node.is_expander] == []


def test_nothing_at_all(tmp_path: Path) -> None:
    assert numa.memory_nodes(tmp_path) == []
    assert numa.huge_pages(tmp_path) == []
    assert numa.placement_order([], 0) == []
    assert numa.huge_page_choice(tmp_path, root=tmp_path, mountinfo=tmp_path / "none")[0] is False


def test_huge_pages_of_the_machine(machine: Machine) -> None:
    base = machine.root / "kernel/mm/hugepages"
    machine.write(base / "hugepages-1048576kB", nr_hugepages="2", free_hugepages="1")
    machine.write(base / "hugepages-2048kB", nr_hugepages="512", free_hugepages="100")
    machine.write(base / "hugepages-64kB", nr_hugepages="3", free_hugepages="7")  # more free than there are
    assert numa.huge_pages(machine.root) == [
        numa.HugePages(2 << 20, 512, 100),
        numa.HugePages(1 << 30, 2, 1),
    ]


@pytest.mark.parametrize(
    ("general", "kind", "options", "expected"),
    [
        ("always within_size advise [never] deny force", "tmpfs", "rw,size=1g,huge=advise", True),
        ("always within_size advise [never] deny force", "tmpfs", "rw,huge=always", True),
        ("always within_size [advise] never deny force", "tmpfs", "rw", False),
        ("always within_size advise never [deny] force", "tmpfs", "rw,huge=always", False),
        ("always within_size advise never deny [force]", "tmpfs", "rw", True),
        ("", "ext4", "rw,huge=always", False),
    ],
)
def test_which_setting_decides_on_huge_pages(
    machine: Machine, tmp_path: Path, general: str, kind: str, options: str, expected: bool
) -> None:
    machine.write(machine.root / "kernel/mm/transparent_hugepage", shmem_enabled=general)
    machine.mounts([(str(tmp_path), kind, kind, options)])
    chosen, why = numa.huge_page_choice(tmp_path, root=machine.root, mountinfo=machine.mountinfo)
    assert chosen is expected
    assert why


def test_this_machine() -> None:
    nodes = numa.memory_nodes()
    if not (sysfs.SYSFS / "devices/system/node/node0").exists():
        pytest.skip("this kernel shows no NUMA node")
    assert nodes[0].total_bytes > 0
    assert numa.nodes_of_cpus(nodes, numa.own_cpus())
