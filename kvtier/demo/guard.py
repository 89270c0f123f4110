"""Runs one command and leaves no descendant of it behind, whatever happens to whom.

`python -m kvtier.demo.guard PARENT_PID GRACE_S LOG -- COMMAND...` runs COMMAND with stdout and stderr in
LOG. The guard is what every orphan below it is handed to (child subreaper) and is told by the kernel when
its parent dies, so the tree ends in each of these cases:

- SIGTERM, SIGINT, SIGHUP, or the parent's death (kill -9 included): SIGTERM to COMMAND, SIGKILL to all
  that is left after GRACE_S;
- SIGUSR1: SIGKILL at once;
- COMMAND ends: SIGKILL to what it left.

Trackers of Python's multiprocessing get a little longer: they end on their own once their clients are gone
and remove the shared memory that those leaked. Exits with COMMAND's status (128 + signal where a signal
ended it). Standard library only: this process lives as long as what it guards.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_STOP: Final = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_WATCHED: Final = _STOP | {signal.SIGUSR1, signal.SIGCHLD}
_TRACKER: Final = b"multiprocessing.resource_tracker"
TRACKER_GRACE_S: Final = 3.0
KILL_DEADLINE_S: Final = 10.0
"""A process that SIGKILL does not end within this time is stuck in the kernel: the guard gives up on it."""


def main() -> int:
    """Entry point of ``python -m kvtier.demo.guard``."""
    parent, grace_s, log, separator, *command = sys.argv[1:]
    assert separator == "--"
    assert command
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the kernel was asked to tell
        return 128 + signal.SIGTERM

    def in_the_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # where the guard itself is killed with -9
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)

    with Path(log).open("ab") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=in_the_child
        )
    status = _watch(child.pid, float(grace_s))
    _kill_descendants()
    return status


def _watch(child: int, grace_s: float) -> int:
    """Wait until the child ended or has to be killed; its exit status, 137 where it did not end itself."""
    deadline: float | None = None
    while True:
        remaining_s = 3600.0 if deadline is None else deadline - time.monotonic()
        if remaining_s <= 0:
            return 128 + signal.SIGKILL
        info = signal.sigtimedwait(_WATCHED, remaining_s)
        if info is None:
            continue
        if info.si_signo == signal.SIGUSR1:
            return 128 + signal.SIGKILL
        if info.si_signo in _STOP and deadline is None:
            deadline = time.monotonic() + grace_s
            os.kill(child, signal.SIGTERM)
        status = _reap().get(child)
        if status is not None:
            return status


def _reap() -> dict[int, int]:
    """Collect every child that has ended: pid -> exit status."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    """SIGKILL until nothing is left: what a dying process leaves behind is handed to the guard and found."""
    start = time.monotonic()
    while (pids := descendants(os.getpid())) and time.monotonic() - start < KILL_DEADLINE_S:
        spare_trackers = time.monotonic() - start < TRACKER_GRACE_S
        for pid in pids:
            if spare_trackers and _is_tracker(pid):
                continue
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reap()


def descendants(root: int) -> list[int]:
    """Every process below `root`, from one look at /proc; zombies included."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_bytes()
            except OSError:
                continue
            parent = int(stat.rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _is_tracker(pid: int) -> bool:
    try:
        return _TRACKER in Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
