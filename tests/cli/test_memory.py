from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.cli.findings import DEGRADED, MISSING, OK, Finding
from kvtier.cli.memory import memory_findings
from kvtier.config import Config
from kvtier.tiers import binding, numa
from tests.tiers.machines import Machine


def found(
    machine: Machine, shm_dir: Path, *, is_running: bool = False, **options: object
) -> dict[str, Finding]:
    values: dict[str, object] = {"dram_bytes": 64 << 20, "data_dir": shm_dir, "run_dir": shm_dir}
    config = Config(shm_dir=shm_dir, **(values | options))
    lines = memory_findings(config, root=machine.root, mountinfo=machine.mountinfo, is_running=is_running)
    return {each["name"]: each for each in lines}


def test_one_node_without_anything_special(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.node(0, cpus="0-1", total_kb=1 << 20, distance="10")
    machine.mounts([(str(tmp_path), "tmpfs", "tmpfs", "rw")])
    lines = found(machine, tmp_path)
    assert {name: line["state"] for name, line in lines.items()} == {
        "memory nodes": OK,
        "memory expander": MISSING,
        "huge pages": DEGRADED,
        "huge pages reserved": MISSING,
    }
    assert all(line["todo"] or line["state"] == OK for line in lines.values())
    assert f"mount -o remount,huge=advise {tmp_path}" == lines["huge pages"]["todo"]


def test_two_sockets_an_expander_and_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    machine.node(0, cpus="0-3", total_kb=1 << 20, distance="10 21 24")
    machine.node(1, cpus="4-7", total_kb=1 << 20, distance="21 10 31")
    machine.node(2, cpus="", total_kb=4 << 20, distance="24 31 10")
    pages = machine.root / "kernel/mm/hugepages/hugepages-2048kB"
    machine.write(pages, nr_hugepages="64", free_hugepages="32")
    machine.mounts([(str(tmp_path), "tmpfs", "tmpfs", "rw,huge=advise")])
    monkeypatch.setattr(numa, "own_cpus", lambda: frozenset({0, 5}))
    lines = found(machine, tmp_path)
    assert lines["memory nodes"]["state"] == DEGRADED  # on which of them the arena would lie is chance
    assert "numactl" in lines["memory nodes"]["todo"]
    assert lines["huge pages"]["state"] == OK
    assert lines["huge pages reserved"]["state"] == OK
    expander = lines["memory expander 2"]
    assert expander["state"] == OK
    assert "2.4 times as far from node 0" in expander["why"]
    monkeypatch.setattr(numa, "own_cpus", lambda: frozenset({4, 5}))
    assert found(machine, tmp_path)["memory nodes"]["state"] == OK


def test_a_kernel_that_shows_nothing(tmp_path: Path) -> None:
    lines = found(Machine(tmp_path), tmp_path)
    assert lines["memory nodes"]["state"] == DEGRADED
    assert lines["huge pages reserved"]["state"] == MISSING


@pytest.fixture
def expander(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.node(0, cpus="0-3", total_kb=1 << 20, distance="10 24")
    machine.node(2, cpus="", total_kb=4 << 20, distance="24 10")
    return machine


def test_a_node_that_is_not_here_is_needed_and_missing(expander: Machine, tmp_path: Path) -> None:
    line = found(expander, tmp_path, numa_node=1)["memory nodes"]
    assert (line["state"], line["needed"]) == (MISSING, True)
    assert "numa_node names NUMA node 1: allowed are nodes with memory, here 0, 2" in line["why"]
    line = found(expander, tmp_path, far_memory="1:64MiB")["far memory 1"]
    assert (line["state"], line["needed"]) == (MISSING, True)


def test_a_node_with_too_little_is_missing_unless_the_daemon_has_it(
    expander: Machine, tmp_path: Path
) -> None:
    options = {"numa_node": 0, "dram_bytes": "768MiB", "far_memory": "2:3GiB,any:64MiB"}
    for is_running in (False, True):
        lines = found(expander, tmp_path, is_running=is_running, **options)
        states = {name: lines[name]["state"] for name in ("memory nodes", "far memory 2")}
        assert (MISSING in states.values()) != is_running
        assert lines["far memory any"]["state"] == OK
        if not is_running:
            assert all(lines[name]["needed"] for name in states)
            assert "only 536870912 are available" in lines["memory nodes"]["why"]


def test_whether_memory_can_be_bound_is_tried(
    expander: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "own_cpus", lambda: frozenset({3}))
    refused = binding.try_bind([2])  # on most machines: there is no such node
    lines = found(expander, tmp_path, numa_node="auto", far_memory="2:64MiB")
    assert lines["far memory 2"]["state"] == (DEGRADED if refused else OK)
    assert refused in lines["far memory 2"]["why"]
    assert "node 0" in lines["memory nodes"]["why"]
    assert lines["memory nodes"]["state"] == (DEGRADED if binding.try_bind([0]) else OK)


def test_huge_pages_that_are_required_or_off(expander: Machine, tmp_path: Path) -> None:
    expander.mounts([(str(tmp_path), "tmpfs", "tmpfs", "rw")])
    line = found(expander, tmp_path, huge_pages="require")["huge pages"]
    assert (line["state"], line["needed"]) == (MISSING, True)
    assert line["todo"] == f"mount -o remount,huge=advise {tmp_path}"
    assert found(expander, tmp_path, huge_pages="off")["huge pages"]["state"] == DEGRADED
    expander.mounts([(str(tmp_path), "tmpfs", "tmpfs", "rw,huge=advise")])
    assert found(expander, tmp_path, huge_pages="require")["huge pages"]["state"] == OK
    line = found(expander, tmp_path, huge_pages="require", far_memory="any:64MiB")["huge pages"]
    assert line["state"] == MISSING, "far memory is no file: another setting is its"
    assert line["todo"].endswith("transparent_hugepage/enabled")
    pages = expander.root / "kernel/mm/transparent_hugepage"
    expander.write(pages, enabled="always [madvise] never", hpage_pmd_size=str(2 << 20))
    assert (
        found(expander, tmp_path, huge_pages="require", far_memory="any:64MiB")["huge pages"]["state"] == OK
    )
    line = found(expander, tmp_path, huge_pages="require", extent_bytes="1MiB")["huge pages"]
    assert "extent_bytes is 1048576, and a huge page has 2097152 bytes" in line["why"]
    expander.write(pages, shmem_enabled="always advise [deny] force")
    line = found(expander, tmp_path, huge_pages="require")["huge pages"]
    assert line["todo"].startswith("echo never > ")
