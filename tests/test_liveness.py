from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, InvalidRequest
from kvtier.liveness import EngineLocks, prepare_run_dir

ENGINE = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


class Engine:
    def __init__(self, run_dir: Path, engine: str) -> None:
        self.path = run_dir / "engines" / f"{engine}.lock"
        command = [sys.executable, "-c", ENGINE, str(self.path)]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == "locked\n"

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    prepare_run_dir(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def locks(run_dir: Path) -> Iterator[EngineLocks]:
    locks = EngineLocks(run_dir)
    yield locks
    locks.close()
    locks.close()


@pytest.fixture
def engine(run_dir: Path) -> Iterator[Engine]:
    engine = Engine(run_dir, "one-1")
    yield engine
    engine.kill()


def test_an_engine_lives_until_the_kernel_drops_its_lock(locks: EngineLocks, engine: Engine) -> None:
    assert [locks.held("one-1") for _ in range(3)] == [True] * 3
    engine.kill()
    assert not locks.held("one-1")
    assert engine.path.exists()
    locks.remove("one-1")
    assert not engine.path.exists()
    assert not locks.held("one-1")
    locks.remove("one-1")


def test_a_stopped_engine_lives(locks: EngineLocks, engine: Engine) -> None:
    os.kill(engine.child.pid, 19)
    try:
        assert locks.held("one-1")
        locks.remove("one-1")
        assert locks.sweep(set()) == []
        assert engine.path.exists()
    finally:
        os.kill(engine.child.pid, 18)


def test_a_deleted_name_is_no_proof_of_death(locks: EngineLocks, engine: Engine) -> None:
    assert locks.held("one-1")
    engine.path.unlink()
    assert locks.held("one-1")
    engine.kill()
    assert not locks.held("one-1")


def test_an_engine_may_make_its_deleted_file_anew(locks: EngineLocks, run_dir: Path, engine: Engine) -> None:
    assert locks.held("one-1")
    engine.path.unlink()
    fd = os.open(engine.path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    engine.kill()  # its first lock goes, its second stays
    assert locks.held("one-1")
    os.close(fd)
    assert not locks.held("one-1")


def test_without_its_file_an_engine_cannot_register(locks: EngineLocks, engine: Engine) -> None:
    engine.path.unlink()
    assert not locks.held("one-1")


def test_a_sweep_removes_the_dead_and_only_them(locks: EngineLocks, run_dir: Path, engine: Engine) -> None:
    directory = run_dir / "engines"
    for name in ("dead-1.lock", "known.lock", "Not An Engine.lock", "notes.txt"):
        (directory / name).touch()
    (directory / "folder.lock").mkdir()
    assert locks.sweep({"known"}) == ["dead-1"]
    assert sorted(path.name for path in directory.iterdir()) == [
        "Not An Engine.lock",
        "folder.lock",
        "known.lock",
        "notes.txt",
        "one-1.lock",
    ]
    assert locks.held("one-1")


def test_a_sweep_closes_files_of_engines_that_are_not_known(locks: EngineLocks, engine: Engine) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert locks.held("one-1")
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert locks.sweep({"one-1"}) == []
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert locks.sweep(set()) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert locks.held("one-1")


def test_probing_leaves_no_lock_behind(locks: EngineLocks, run_dir: Path) -> None:
    path = run_dir / "engines" / "late.lock"
    path.touch()
    assert not locks.held("late")
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert locks.held("late")
    os.close(fd)
    assert not locks.held("late")


def test_an_engine_that_is_swept_between_create_and_lock_notices(locks: EngineLocks, run_dir: Path) -> None:
    path = run_dir / "engines" / "late.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    assert locks.sweep(set()) == ["late"]
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not path.exists()
    assert not locks.held("late")
    os.close(fd)


def test_links_and_pipes_are_no_locks_and_do_not_block(locks: EngineLocks, run_dir: Path) -> None:
    directory = run_dir / "engines"
    target = run_dir / "target"
    target.touch()
    (directory / "link.lock").symlink_to(target)
    os.mkfifo(directory / "pipe.lock")
    assert not locks.held("link")
    assert not locks.held("pipe")
    locks.sweep(set())
    assert target.exists()


@pytest.mark.parametrize("engine_id", ["", "../socket", "A", "x" * 65, "a/b", "a.b", "a\n", "ä"])
def test_bad_ids_are_refused(locks: EngineLocks, engine_id: str) -> None:
    with pytest.raises(InvalidRequest, match="engine_id"):
        locks.held(engine_id)
    with pytest.raises(InvalidRequest, match="engine_id"):
        locks.remove(engine_id)


# ---- the run directory


def test_the_run_directory_is_made_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        prepare_run_dir(tmp_path / "a" / "run")
    finally:
        os.umask(before)
    for directory in (tmp_path / "a" / "run", tmp_path / "a" / "run" / "engines"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    prepare_run_dir(tmp_path / "a" / "run")


def test_one_that_others_may_only_read_is_fine_and_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    prepare_run_dir(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702])
def test_one_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"run_dir is {tmp_path}: others may write .*{mode:04o}"):
        prepare_run_dir(tmp_path)
    tmp_path.chmod(0o700)
    prepare_run_dir(tmp_path)
    (tmp_path / "engines").chmod(mode)
    with pytest.raises(ConfigError, match=r"others may write to .*engines"):
        prepare_run_dir(tmp_path)


def test_one_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match=f"run_dir is {tmp_path}: .*belongs to user"):
        prepare_run_dir(tmp_path)


def test_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match=f"run_dir is {tmp_path / name}"):
            prepare_run_dir(tmp_path / name)
    with pytest.raises(ConfigError, match="this user can make"):
        prepare_run_dir(Path("/proc/kvtier"))
