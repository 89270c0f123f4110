"""The engine's lock file, against the node's own side of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.client.liveness import EngineLock
from kvtier.errors import Unavailable
from kvtier.liveness import EngineLocks, prepare_run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    prepare_run_dir(tmp_path / "run")
    return tmp_path / "run"


def test_the_node_sees_it_held_until_it_is_closed(run_dir: Path) -> None:
    lock = EngineLock(run_dir)
    locks = EngineLocks(run_dir)
    assert re.fullmatch("[a-z0-9-]{1,64}", lock.engine_id)
    assert locks.held(lock.engine_id)
    assert locks.sweep(set()) == []
    lock.close()
    lock.close()
    assert not locks.held(lock.engine_id)
    assert list((run_dir / "engines").iterdir()) == []
    locks.close()


def test_every_lock_has_an_id_of_its_own(run_dir: Path) -> None:
    locks = [EngineLock(run_dir) for _ in range(20)]
    assert len({lock.engine_id for lock in locks}) == 20
    for lock in locks:
        lock.close()


def test_a_file_that_was_taken_for_a_dead_engines_is_made_anew(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = EngineLocks(run_dir)
    swept: list[str] = []
    lock_it = EngineLock._try_lock

    def sweep_first(self: EngineLock) -> bool:
        if not swept:
            swept.extend(node.sweep(set()))
        return lock_it(self)

    monkeypatch.setattr(EngineLock, "_try_lock", sweep_first)
    lock = EngineLock(run_dir)
    assert len(swept) == 1
    assert lock.engine_id not in swept
    assert node.held(lock.engine_id)
    lock.close()
    node.close()


def test_a_child_that_forgets_leaves_the_lock_with_its_parent(run_dir: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from kvtier.client.liveness import EngineLock
from kvtier.liveness import EngineLocks
lock = EngineLock(Path(sys.argv[1]))
if os.fork() == 0:
    lock.forget()
    os._exit(0)
os.wait()
held = EngineLocks(Path(sys.argv[1])).held(lock.engine_id)
lock.close()
sys.exit(0 if held and not EngineLocks(Path(sys.argv[1])).held(lock.engine_id) else 1)
"""
    subprocess.run([sys.executable, "-c", script, str(run_dir)], check=True, timeout=60)


def test_without_a_daemon_there_is_nothing_to_lock(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="start the daemon"):
        EngineLock(tmp_path / "run")
