from __future__ import annotations

import mmap
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.build import memory_of
from kvtier.config import Config, FarRegion
from kvtier.errors import ConfigError, ResourceShortage
from kvtier.tiers import binding, numa, shm
from kvtier.tiers.arena import Arena
from tests.tiers.machines import Machine
from tests.tiers.test_arena import shm_dir  # noqa: F401
from tests.tiers.test_far import numa_map, real_node  # noqa: F401

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Two sockets with an expander each, and a node that has CPUs and no memory."""
    built = Machine(tmp_path)
    built.node(0, cpus="0-3", total_kb=1 << 20, distance="10 21 17 31 21")
    built.node(1, cpus="4-7", total_kb=1 << 20, distance="21 10 31 17 21")
    built.node(2, cpus="", total_kb=4 << 20, distance="17 31 10 40 31")
    built.node(3, cpus="", total_kb=2 << 20, distance="31 17 40 10 31")
    built.node(4, cpus="8", total_kb=0, distance="21 21 31 31 10")
    return built


def test_the_nodes_of_the_arena(machine: Machine) -> None:
    nodes = numa.memory_nodes(machine.root)
    assert binding.near_nodes(None, nodes, frozenset({0})) == ()
    assert binding.near_nodes(3, nodes, frozenset({0})) == (3,)
    assert binding.near_nodes("auto", nodes, frozenset({1, 2})) == (0,)
    assert binding.near_nodes("auto", nodes, frozenset({3, 4, 8})) == (0, 1)
    assert binding.near_nodes("auto", nodes, frozenset({8})) == (), "no memory lies next to it"
    for absent in (4, 5, 1023):
        with pytest.raises(ConfigError, match=rf"numa_node names NUMA node {absent}.*here 0, 1, 2, 3$"):
            binding.near_nodes(absent, nodes, frozenset({0}))
    with pytest.raises(ConfigError, match="none that the kernel shows"):
        binding.near_nodes(0, [], frozenset({0}))


def test_what_files_take_counts_as_room(machine: Machine) -> None:
    text = "Node 2 MemTotal: 8192 kB\nNode 2 MemFree: 1024 kB\nNode 2 Active(file): 2048 kB\n"
    text += "Node 2 Inactive(file): 1024 kB\nNode 2 Active(anon): 4096 kB\n"
    (machine.root / "devices/system/node/node2/meminfo").write_text(text)
    nodes = numa.memory_nodes(machine.root)
    (node,) = (its for its in nodes if its.node == 2)
    assert node.available_bytes == 4 * MIB
    binding.check_room("far_memory", 4 * MIB, [2], nodes)
    with pytest.raises(ResourceShortage, match="needs 4194305 bytes on NUMA node 2, but only 4194304"):
        binding.check_room("far_memory", 4 * MIB + 1, [2], nodes)
    binding.check_room("dram_bytes", 1 << 50, [], nodes)


def test_the_order_of_far_memory(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "own_cpus", lambda: frozenset({0}))

    def far(**options: object) -> list[int | None]:
        values = {"far_memory": "any:64MiB,3:64MiB,2:64MiB,1:64MiB", "dram_bytes": 64 * MIB}
        config = Config(data_dir=tmp_path, run_dir=tmp_path, **(values | options))
        return [region.node for region in memory_of(config, root=machine.root).far]

    assert far() == [1, 2, 3, None], "nodes with CPUs, then the nearest"
    assert far(numa_node=1) == [1, 3, 2, None]
    assert far(far_memory="") == []
    with pytest.raises(ConfigError, match="far_memory names NUMA node 7"):
        far(far_memory="7:64MiB")
    with pytest.raises(ConfigError, match="numa_node names NUMA node 4"):
        far(numa_node=4)


def test_huge_pages_that_are_not_to_be_had(machine: Machine, tmp_path: Path) -> None:
    machine.mounts([(str(tmp_path), "tmpfs", "tmpfs", "rw")])
    values = {"data_dir": tmp_path, "run_dir": tmp_path, "shm_dir": tmp_path, "dram_bytes": 64 * MIB}
    config = Config(huge_pages="require", **values)
    wanted = rf"huge_pages is 'require', but .*huge=never: mount -o remount,huge=advise {tmp_path}$"
    with pytest.raises(ResourceShortage, match=wanted):
        memory_of(config, root=machine.root, mountinfo=machine.mountinfo)
    machine.mounts([(str(tmp_path), "tmpfs", "tmpfs", "rw,huge=always")])
    assert memory_of(config, root=machine.root, mountinfo=machine.mountinfo).far == ()


def test_a_node_that_no_kernel_gives_is_refused_with_a_reason() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        why = binding.bind(page, [1023])
    assert why, "there are not so many nodes"


def test_what_is_configured() -> None:
    def config(**values: object) -> Config:
        return Config(data_dir="/tmp/x", run_dir="/tmp/x", dram_bytes=64 * MIB, **values)

    assert (config().numa_node, config().far_memory, config().huge_pages) == (None, (), "advise")
    for given, node in ((3, 3), ("3", 3), (" AUTO ", "auto"), ("none", None), ("", None)):
        assert config(numa_node=given).numa_node == node
    for wrong in (-1, 1024, "-1", "1,2", "near", True, 1.5, [0]):
        with pytest.raises(ConfigError, match="numa_node"):
            config(numa_node=wrong)
    parsed = config(far_memory=" 1:64GiB, any:100MiB,2:1GiB ").far_memory
    assert parsed == (FarRegion(1, 64 << 30), FarRegion(None, 64 * MIB), FarRegion(2, 1 << 30))
    assert config(far_memory=["1:64MiB"]).far_memory == (FarRegion(1, 64 * MIB),)
    for bad in (
        "1",
        "1:",
        ":1GiB",
        "auto:1GiB",
        "none:1GiB",
        "1:-1",
        "1:1GiB,1:2GiB",
        "x:1GiB",
        7,
        "1:1MiB",
        "1:1000000TiB",
        "1024:1GiB",
        True,
        [7],
    ):
        with pytest.raises(ConfigError, match="far_memory"):
            config(far_memory=bad)
    with pytest.raises(ConfigError, match="huge_pages"):
        config(huge_pages="yes")


# ---- the arena


def make_arena(directory: Path, **options: object) -> Arena:
    values: dict[str, object] = {
        "node_id": "a1" * 16,
        "incarnation": 1,
        "capacity_bytes": 16 * MIB,
        "extent_bytes": 4 * MIB,
        "shm_dir": directory,
    }
    return Arena(**(values | options))  # type: ignore[arg-type]


async def test_the_arena_is_bound_before_it_is_touched(real_node: int, shm_dir: Path) -> None:  # noqa: F811
    for bound_to, policy in (((real_node,), f" bind:{real_node} "), ((), " default ")):
        arena = make_arena(shm_dir, bound_to=bound_to)
        await arena.open()
        try:
            assert arena._mapping is not None
            line = numa_map(shm.address_of(arena._mapping))
            assert policy in line
            assert f" N{real_node}={16 * MIB // mmap.PAGESIZE}" in line or not bound_to
            assert arena.notices == []
        finally:
            await arena.close()


async def test_an_arena_on_a_node_that_is_too_small_is_refused(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.node(5, cpus="", total_kb=16 << 10, distance="")
    nodes = numa.memory_nodes(machine.root)
    monkeypatch.setattr(numa, "memory_nodes", lambda: nodes)
    arena = make_arena(tmp_path, bound_to=(5,))
    with pytest.raises(ResourceShortage, match="dram_bytes needs 16777216 bytes on NUMA node 5"):
        await arena.open()
    assert [its for its in tmp_path.iterdir() if its.name.startswith("kvtier")] == []


@pytest.fixture
def huge_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A mount as the README names it; skipped, with what the machine has, where that cannot be had."""
    directory = tmp_path / "huge"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m,huge=advise", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs with huge=advise cannot be mounted here: {mounted.stderr.strip()}")
    has, setting = numa.huge_page_choice(directory)
    if has and numa.huge_page_bytes() <= 4 * MIB:
        yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)
    if not has or numa.huge_page_bytes() > 4 * MIB:
        pytest.skip(f"no huge pages on this machine: {setting}, {numa.huge_page_bytes()} bytes each")


async def test_a_mount_with_advice_gives_the_arena_huge_pages(huge_tmpfs: Path) -> None:
    found = {}
    for choice in ("off", "advise", "require"):
        arena = make_arena(huge_tmpfs, huge_pages=choice)
        await arena.open()
        try:
            assert arena._mapping is not None
            found[choice] = shm.huge_bytes(arena._mapping)
            assert arena.allocated_bytes == 16 * MIB
            assert shm.used_bytes(arena._fd or -1) == 16 * MIB, "not a byte above the cap"
            assert bool(arena.notices) == (choice == "require" and found[choice] < 15 * MIB)
        finally:
            await arena.close()
    assert found["off"] == 0
    assert found["advise"] >= 8 * MIB, "all of it, unless memory is in small pieces"


async def test_a_mount_that_is_too_small_is_still_a_clear_error(huge_tmpfs: Path) -> None:
    (huge_tmpfs / "other").write_bytes(bytes(56 * MIB))
    arena = make_arena(huge_tmpfs, huge_pages="require")
    with pytest.raises(ResourceShortage, match="dram_bytes"):
        await arena.open()
    assert [its.name for its in huge_tmpfs.iterdir()] == ["other"]


async def test_required_huge_pages_that_the_kernel_does_not_give_are_told(shm_dir: Path) -> None:  # noqa: F811
    has, setting = numa.huge_page_choice(shm_dir)
    if has:
        pytest.skip(f"/dev/shm has huge pages on this machine: {setting}")
    arena = make_arena(shm_dir, huge_pages="require")
    await arena.open()
    try:
        assert "bytes lie in huge pages" in arena.notices[0]
    finally:
        await arena.close()
