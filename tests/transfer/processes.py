"""Peers as processes, with all that belongs to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.interfaces import Remote
from kvtier.testing.transfer_tests import PeerProcess

ROOT = Path(__file__).parents[2]


class Peer(PeerProcess):
    """``tests.transfer.peer`` and the processes that it started."""

    def __init__(self, kind: str, node: str, incarnation: int, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.peer", kind, str(seed)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        said = json.loads(self._process.stdout.readline() or "{}")
        if not said:
            self.kill()
            raise AssertionError(f"the {kind} peer did not start")
        self.metadata = bytes.fromhex(said["metadata"])
        self._remote = Remote(node, incarnation, said["address"], 1, 0, self.metadata, 1)

    @property
    def remote(self) -> Remote:
        return self._remote

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def pids(self) -> list[int]:
        return [self._process.pid, *children(self._process.pid)]

    def _signal(self, number: int) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)
            self._process.communicate()


def children(pid: int) -> list[int]:
    """Processes that `pid` started and that live."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(entry.name))
    return found


@contextmanager
def peers(kind: str) -> Iterator[Callable[[str, int, int], Peer]]:
    """Starts peers, or gives those again that still live; they end with the context."""
    started: dict[tuple[str, int, int], Peer] = {}

    def start(node: str, incarnation: int, seed: int) -> Peer:
        which = (node, incarnation, seed)
        if which not in started or not started[which].is_alive:
            started[which] = Peer(kind, node, incarnation, seed)
        return started[which]

    try:
        yield start
    finally:
        for peer in started.values():
            peer.kill()
