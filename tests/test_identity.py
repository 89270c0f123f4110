from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier import identity
from kvtier.errors import AlreadyRunning, ConfigError, ResourceShortage
from kvtier.identity import LOCK_NAME, NODE_NAME, open_identity

CHILD = """
import sys, time
from pathlib import Path
from kvtier.identity import open_identity

mine = open_identity(Path(sys.argv[1]))
print(mine.node_id, mine.incarnation, flush=True)
time.sleep(600)
"""


def start(data_dir: Path) -> tuple[subprocess.Popen[str], str, int]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(data_dir)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    node_id, incarnation = child.stdout.readline().split()
    child.stdout.close()
    return child, node_id, int(incarnation)


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()


def test_the_id_stays_and_the_incarnation_grows(tmp_path: Path) -> None:
    data_dir = tmp_path / "a" / "b"
    seen = []
    for _ in range(4):
        mine = open_identity(data_dir)
        seen.append((mine.node_id, mine.incarnation))
        mine.release()
    assert len({node_id for node_id, _ in seen}) == 1
    incarnations = [incarnation for _, incarnation in seen]
    assert incarnations == sorted(set(incarnations))
    assert incarnations[0] >= int(time.time()) - 60
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((data_dir / LOCK_NAME).stat().st_mode) == 0o600


def test_two_data_directories_are_two_nodes(tmp_path: Path) -> None:
    one, two = open_identity(tmp_path / "one"), open_identity(tmp_path / "two")
    assert one.node_id != two.node_id
    one.release()
    two.release()


def test_the_incarnation_grows_over_kill_9(tmp_path: Path) -> None:
    incarnations = []
    for _ in range(3):
        child, node_id, incarnation = start(tmp_path)
        kill(child)
        incarnations.append(incarnation)
    mine = open_identity(tmp_path)
    assert mine.node_id == node_id
    assert [*incarnations, mine.incarnation] == sorted({*incarnations, mine.incarnation})
    mine.release()


def test_a_live_daemon_is_named_and_nothing_changes(tmp_path: Path) -> None:
    child, _, _ = start(tmp_path)
    try:
        before = (tmp_path / NODE_NAME).read_bytes()
        with pytest.raises(AlreadyRunning, match=rf"data_dir is {tmp_path}: .*pid {child.pid}\b"):
            open_identity(tmp_path)
        assert (tmp_path / NODE_NAME).read_bytes() == before
    finally:
        kill(child)
    open_identity(tmp_path).release()


@pytest.mark.parametrize("garbage", [b"", b"\xff\x00not a pid", b"9" * 5000])
def test_a_pid_that_cannot_be_read_is_unknown(tmp_path: Path, garbage: bytes) -> None:
    mine = open_identity(tmp_path)
    (tmp_path / LOCK_NAME).write_bytes(garbage)
    with pytest.raises(AlreadyRunning, match=r"pid (unknown|9+\))"):
        open_identity(tmp_path)
    mine.release()


def test_a_child_of_the_daemon_does_not_keep_the_lock(tmp_path: Path) -> None:
    mine = open_identity(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False, text=True
    )
    mine.release()
    deadline_s = time.monotonic() + 20
    try:
        while True:  # the kernel lets Popen return a moment before it closes descriptors in the child
            try:
                open_identity(tmp_path).release()
                break
            except AlreadyRunning:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
        assert child.poll() is None
    finally:
        kill(child)
        assert child.stdin is not None
        child.stdin.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"{}",
        b'{"node_id": "xyz", "incarnation": 1}',
        b'{"node_id": 7, "incarnation": 1}',
        b'{"node_id": "0123456789abcdef0123456789abcdef", "incarnation": -1}',
        b'{"node_id": "0123456789abcdef0123456789abcdef", "incarnation": true}',
        b'{"node_id": "0123456789abcdef0123456789abcdef", "incarnation": 1.5}',
        b'{"node_id": "0123456789abcdef0123456789abcdef", "incarnation": 99999999999999999999}',
        b'{"node_id": "../../etc/passwd0123456789abcdef", "incarnation": 1}',
        b"[" * 4000,
    ],
)
def test_a_damaged_file_is_an_error_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NODE_NAME).write_bytes(content)
    with pytest.raises(ConfigError, match=r"data_dir: .*node\.json is damaged.*delete it"):
        open_identity(tmp_path)
    assert (tmp_path / NODE_NAME).read_bytes() == content
    (tmp_path / NODE_NAME).unlink()
    open_identity(tmp_path).release()  # the failed start kept no lock


def test_a_clock_that_goes_back_does_not_turn_the_incarnation_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = open_identity(tmp_path)
    mine.release()
    monkeypatch.setattr(identity.time, "time", lambda: 1000.0)
    later = open_identity(tmp_path)
    later.release()
    assert later.incarnation == mine.incarnation + 1
    monkeypatch.setattr(identity.time, "time", lambda: 9e9)
    assert json.loads((tmp_path / NODE_NAME).read_text())["incarnation"] == later.incarnation
    last = open_identity(tmp_path)
    last.release()
    assert last.incarnation == 9_000_000_000


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for data_dir in (file, file / "below", Path("/proc/kvtier")):
        with pytest.raises(ConfigError, match=f"data_dir is {data_dir}: allowed is a directory"):
            open_identity(data_dir)


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,ro", "tmpfs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:  # not root: permissions do the same
        tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match=f"data_dir is {tmp_path}: allowed is a directory"):
            open_identity(tmp_path)
    finally:
        if mounted.returncode:
            tmp_path.chmod(0o700)
        else:
            subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_disk_is_a_clear_error_and_keeps_the_old_identity(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        mine = open_identity(tmp_path)
        mine.release()
        before = (tmp_path / NODE_NAME).read_bytes()
        filler = tmp_path / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(tmp_path).free))
        with pytest.raises(ResourceShortage, match=f"data_dir is {tmp_path}: its disk is full"):
            open_identity(tmp_path)
        assert (tmp_path / NODE_NAME).read_bytes() == before
        filler.unlink()
        again = open_identity(tmp_path)
        assert (again.node_id, again.incarnation > mine.incarnation) == (mine.node_id, True)
        again.release()
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / LOCK_NAME).symlink_to(target)
    with pytest.raises(ConfigError, match="data_dir is"):
        open_identity(tmp_path)
    assert target.read_bytes() == b"precious"


def test_it_is_on_disk_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync of the new file comes before its rename, and fsync of the directory after it."""
    order = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(fd: int) -> None:
        order.append("fsync dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync file")
        real_fsync(fd)

    def replace(self: Path, target: Path) -> Path:
        order.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    open_identity(tmp_path).release()
    assert order == ["fsync file", "rename", "fsync dir"]


def test_the_incarnation_that_the_index_issues_is_kept(tmp_path: Path) -> None:
    mine = open_identity(tmp_path)
    far = mine.incarnation + 1000
    adopted = mine.adopt(tmp_path, far)
    assert (adopted.node_id, adopted.incarnation) == (mine.node_id, far)
    adopted.release()
    again = open_identity(tmp_path)
    assert again.incarnation == far + 1
    with pytest.raises(AssertionError):
        again.adopt(tmp_path, far)
    again.release()


def test_an_incarnation_that_cannot_be_written_is_not_adopted(tmp_path: Path) -> None:
    mine = open_identity(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(ConfigError, match="data_dir is"):
        mine.adopt(tmp_path, mine.incarnation + 1)
    mine.release()
