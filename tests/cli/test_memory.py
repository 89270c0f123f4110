from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.cli.findings import DEGRADED, MISSING, OK, Finding
from kvtier.cli.memory import memory_findings
from kvtier.config import Config
from kvtier.tiers import numa
from tests.tiers.machines import Machine


def found(machine: Machine, shm_dir: Path) -> dict[str, Finding]:
    config = Config(data_dir=shm_dir, run_dir=shm_dir, shm_dir=shm_dir, dram_bytes=64 << 20)
    return {
        each["name"]: each for each in memory_findings(config, root=machine.root, mountinfo=machine.mountinfo)
    }


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
