from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.cli import storage
from kvtier.cli.findings import DEGRADED, MISSING, OK, Finding
from kvtier.tiers import silence
from tests.tiers.machines import LOCAL, SAFE, TCP, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def lines(machine: Machine, *paths: Path) -> list[Finding]:
    return storage.storage_findings(
        [str(path) for path in paths], root=machine.root, mountinfo=machine.mountinfo
    )


def test_a_remote_disk_with_the_defaults(machine: Machine, tmp_path: Path) -> None:
    controller = machine.controller("nvme0", **TCP)
    machine.disk("nvme0n1", controller, os.stat(tmp_path).st_dev, queue__io_timeout="30000")
    path, wait, loss = lines(machine, tmp_path)
    assert (path["name"], path["state"], path["needed"]) == (f"nvme {tmp_path}", DEGRADED, False)
    for word in ("nvme0n1", "tcp", "10.0.0.1", "live", "631 s at most", "free"):
        assert word in path["why"]
    assert (wait["name"], wait["state"]) == ("nvme nvme0n1", DEGRADED)
    assert "fast_io_fail_tmo" in wait["todo"]
    assert "ctrl_loss_tmo" in loss["todo"]
    twice = lines(machine, tmp_path, machine.root)
    assert len(twice) == 4  # the same controller is complained of once


def test_a_remote_disk_that_is_set_right(machine: Machine, tmp_path: Path) -> None:
    controller = machine.controller("nvme0", **{**TCP, **SAFE})
    machine.disk("nvme0n1", controller, os.stat(tmp_path).st_dev, queue__io_timeout="3000")
    (line,) = lines(machine, tmp_path)
    assert line["state"] == OK
    assert "I/O waits 5 s at most" in line["why"]


def test_a_target_that_is_away_is_needed(machine: Machine, tmp_path: Path) -> None:
    controller = machine.controller("nvme0", **{**TCP, **SAFE, "state": "connecting"})
    machine.disk("nvme0n1", controller, os.stat(tmp_path).st_dev, queue__io_timeout="3000")
    assert [(each["state"], each["needed"]) for each in lines(machine, tmp_path)] == [(MISSING, True)] * 2


def test_a_local_drive_is_fine_and_says_what_its_timeout_is(machine: Machine, tmp_path: Path) -> None:
    controller = machine.controller("nvme0", **LOCAL)
    machine.disk("nvme0n1", controller, os.stat(tmp_path).st_dev, queue__io_timeout="30000")
    (line,) = lines(machine, tmp_path)
    assert line["state"] == OK
    assert "reset after 31 s" in line["why"]


def test_memory_is_no_disk(machine: Machine, tmp_path: Path) -> None:
    machine.mounts([(str(tmp_path), "tmpfs", "tmpfs", "rw")])
    (line,) = lines(machine, tmp_path)
    assert (line["state"], line["needed"]) == (DEGRADED, False)
    assert "memory" in line["why"]
    assert line["todo"]


def test_a_path_that_is_not_there(machine: Machine, tmp_path: Path) -> None:
    (line,) = lines(machine, tmp_path / "none")
    assert (line["state"], line["needed"]) == (MISSING, True)
    assert "No such file" in line["why"]


def test_a_path_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a dead mount does to `os.stat`; no machine is asked to have one."""
    monkeypatch.setattr(silence, "_STAT", "import time; time.sleep(60)")
    assert "does not answer within 0.2 s" in silence.silence(tmp_path, 0.2)


def test_a_directory_that_may_be_made(tmp_path: Path) -> None:
    far = tmp_path / "a" / "b"
    assert silence.silence(far, 30.0, may_be_made=True) == ""
    assert silence.existing(far) == tmp_path
    (tmp_path / "file").touch()
    assert "Not a directory" in silence.silence(tmp_path / "file" / "a", 30.0, may_be_made=True)


def test_nothing_is_written(tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    (line,) = storage.storage_findings([str(tmp_path)])
    assert line["why"]
    assert set(tmp_path.iterdir()) == before
