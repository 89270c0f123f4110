"""Nothing of a supervised process outlives it, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.demo.guard import descendants
from kvtier.demo.processes import DemoFailed, Interrupted, Supervised, interruptible

# A child that will not hear SIGTERM, a grandchild in a session of its own, and that one's child.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    os.fork()
print("up", flush=True)
time.sleep(300)
"""
LEAKING = """
from multiprocessing import shared_memory
import time
memory = shared_memory.SharedMemory(create=True, size=4096)
print("name", memory.name, flush=True)
time.sleep(300)
"""
LEAVING = """
import os, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(300)
os._exit(7)
"""
POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("up", flush=True)
time.sleep(300)
"""
PARENT = """
import pathlib, sys, time
from kvtier.demo.processes import Supervised
process = Supervised("x", [sys.executable, "-c", sys.argv[1]], log=pathlib.Path(sys.argv[2]), grace_s=0.2)
time.sleep(300)
"""


def wait_for(what: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path("/proc", str(pid)).exists()]


def stubborn(tmp_path: Path, grace_s: float = 0.2) -> tuple[Supervised, list[int]]:
    process = Supervised("stubborn", [sys.executable, "-c", STUBBORN], log=tmp_path / "log", grace_s=grace_s)
    process.wait_until(lambda: process.tail().count("up") == 3, timeout_s=20)
    pids = process.pids()
    assert len(pids) == 4  # the guard, the child, two below it
    return process, pids


@pytest.mark.parametrize("end", [Supervised.stop, Supervised.kill])
def test_the_whole_tree_ends(tmp_path: Path, end: Callable[[Supervised], int]) -> None:
    process, pids = stubborn(tmp_path)
    assert end(process) == 128 + signal.SIGKILL
    assert alive(pids) == []
    assert end(process) == 128 + signal.SIGKILL  # again is fine


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    process = Supervised("leaves", [sys.executable, "-c", LEAVING], log=tmp_path / "log")
    assert process.wait(20) == 7
    assert alive([int(pid) for pid in process.tail().split()]) == []


def test_a_command_that_stops_by_itself_is_not_killed(tmp_path: Path) -> None:
    with Supervised("polite", [sys.executable, "-c", POLITE], log=tmp_path / "log") as process:
        process.wait_until(lambda: process.tail() == "up", timeout_s=20)
        assert process.stop() == 5


def test_kill_leaves_no_shared_memory(tmp_path: Path) -> None:
    process = Supervised("leaking", [sys.executable, "-c", LEAKING], log=tmp_path / "log")
    process.wait_until(lambda: process.tail().startswith("name "), timeout_s=20)
    memory = Path("/dev/shm", process.tail().split()[1])
    assert memory.exists()
    process.kill()
    assert not memory.exists()


def test_an_end_before_readiness_shows_the_log(tmp_path: Path) -> None:
    code = "print('the reason'); raise SystemExit(3)"
    with (
        Supervised("failing", [sys.executable, "-c", code], log=tmp_path / "log") as process,
        pytest.raises(DemoFailed, match=r"failing ended with status 3 before it was ready\nthe reason"),
    ):
        process.wait_until(lambda: False, timeout_s=20)


def test_waiting_for_readiness_is_bounded(tmp_path: Path) -> None:
    with (
        Supervised("slow", ["sleep", "300"], log=tmp_path / "log") as process,
        pytest.raises(DemoFailed, match="slow was not ready within 0 s"),
    ):
        process.wait_until(lambda: False, timeout_s=0.1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_everything(tmp_path: Path, signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    pids: list[int] = []

    def interrupted() -> None:
        nonlocal pids
        with interruptible():
            _, pids = stubborn(tmp_path)  # nobody holds on to it: `interruptible` does
            os.kill(os.getpid(), signum)
            time.sleep(20)

    with pytest.raises(Interrupted) as caught:
        interrupted()
    assert caught.value.signum == signum
    assert alive(pids) == []
    assert signal.getsignal(signum) is before


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_death_of_the_parent_ends_the_tree(tmp_path: Path, signum: signal.Signals) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, STUBBORN, str(log)])
    try:
        wait_for(lambda: log.exists() and log.read_text().count("up") == 3)
        pids = descendants(parent.pid)
        assert len(pids) == 4
    finally:
        parent.send_signal(signum)
        parent.wait()
    wait_for(lambda: alive(pids) == [])


def test_the_death_of_the_guard_ends_the_command(tmp_path: Path) -> None:
    process = Supervised("x", ["sleep", "300"], log=tmp_path / "log")
    wait_for(lambda: len(process.pids()) == 2)
    guard, command = process.pids()
    os.kill(guard, signal.SIGKILL)
    wait_for(lambda: alive([command]) == [])
    process.stop()
