"""The index that the demo's nodes share: reachable with its password only, gone with its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from kvtier.demo.guard import descendants
from kvtier.demo.index import IndexProcess

PARENT = """
import pathlib, sys, time
from kvtier.demo.index import IndexProcess
index = IndexProcess(pathlib.Path(sys.argv[1]))
print(index.url, flush=True)
time.sleep(300)
"""


def client(index: IndexProcess, password: str | None) -> redis.Redis:
    return redis.Redis(port=index.port, password=password)


def test_it_answers_on_the_loopback_to_whoever_knows_the_password(tmp_path: Path) -> None:
    with IndexProcess(tmp_path / "index") as index:
        password = index.password_file.read_text()
        with client(index, password) as allowed:
            assert allowed.ping()
            assert allowed.config_get("bind") == {"bind": "127.0.0.1"}
        for wrong in (None, password[:-1]):
            with client(index, wrong) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
        assert index.options["index"] == f"redis://127.0.0.1:{index.port}"
        assert password not in index.url + index.process.tail()
        assert stat.S_IMODE(index.password_file.stat().st_mode) == 0o600
        pids = index.process.pids()
    assert len(pids) == 3  # the guard, the one that waits, the server
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "index")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("redis://127.0.0.1:")
        pids = descendants(parent.pid)
        assert len(pids) == 3
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(Path("/proc", str(pid)).exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
