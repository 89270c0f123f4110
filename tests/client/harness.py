"""A real daemon as a process of its own, and an engine's memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvtier.client import AdminClient, EngineClient, Pages
from kvtier.errors import KvtierError
from kvtier.types import Key, Layout, LayoutKind, LayoutOrder, Namespace, chain_keys
from kvtier.v1 import admin_pb2

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
LAYOUT = Layout(LayoutKind.GQA, 4, 2, 32, "bfloat16", 32, LayoutOrder.HND, 2 * 2 * 32 * 32 * 2)
PATIENT = {"lookup_timeout_s": 5.0, "call_timeout_s": 5.0, "load_floor_s": 5.0}
"""Deadlines that a busy machine does not reach."""


def until(condition: Callable[[], object], what: str) -> None:
    """Poll until `condition` holds."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.02)


class DaemonProcess:
    """`kvtier serve` on directories of its own; started when constructed.

    `program`: Python that does so in another way.
    """

    def __init__(self, home: Path, shm: Path, program: str | None = None, **options: object) -> None:
        self.home = home
        run = ["-m", "kvtier.cli.main", "serve"] if program is None else ["-c", program]
        self._command = [sys.executable, *run]
        self.socket = str(home / "run" / "kvtier.sock")
        self.log = home / "daemon.log"
        values = {
            "data_dir": home / "data",
            "run_dir": home / "run",
            "shm_dir": shm,
            "dram_bytes": "8MiB",
            "extent_bytes": "1MiB",
            "metrics_port": -1,
            "engine_poll_s": 0.05,
            "tick_s": 0.05,
            **options,
        }
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")} | {
            f"KVTIER_{name.upper()}": str(value) for name, value in values.items()
        }
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self, program: str | None = None) -> None:
        """Anew; this once by another `program`, if given."""
        command = self._command if program is None else [sys.executable, "-c", program]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=self._environment,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        until(self._answers, "the daemon answers")

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            self.status()
        except KvtierError:
            return False
        return True

    def status(self) -> admin_pb2.GetStatusResponse:
        with AdminClient(self.socket) as admin:
            return admin.status()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()


class Engine:
    """A client and pages of `blocks` blocks with random content."""

    def __init__(self, socket: str, blocks: int = 64, layout: Layout = LAYOUT, **options: object) -> None:
        self.layout = layout
        self.blocks = blocks
        self.client = EngineClient(socket, layout, **(PATIENT | options))  # type: ignore[arg-type]
        shape = (layout.num_layers, blocks, layout.layer_block_bytes)
        self.memory = np.random.default_rng().integers(0, 256, shape, np.uint8)
        self.pages = Pages.from_tensors(list(self.memory), layout)

    def rows(self, ids: Sequence[int]) -> np.ndarray:
        return self.memory[:, list(ids)].copy()

    def store(self, keys: Sequence[Key], ids: Sequence[int], parent: Key | None = None) -> np.ndarray:
        """Store all of it and return the bytes."""
        result = self.client.store(parent, keys, self.pages, ids)
        assert result.committed == len(keys), result
        return self.rows(ids)

    def close(self) -> None:
        self.client.close()


def chain(name: str, count: int, layout: Layout = LAYOUT) -> list[Key]:
    """Keys of a prompt."""
    root = Namespace(name.encode(), "bfloat16", layout.fingerprint(), layout.block_tokens).root()
    return chain_keys(root, [1] * (count * layout.block_tokens), layout.block_tokens)


def mapped_arenas() -> list[str]:
    """Lines of this process's memory map that show an arena."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/kvtier-" in line and (".arena" in line or ".old" in line)]
