"""A real `kvtier serve` of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvtier.client import AdminClient
from kvtier.errors import KvtierError

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 30.0


class Daemon:
    """One daemon process, and its directory, which outlives it."""

    def __init__(self, home: Path, shm: Path, **options: Any) -> None:
        self.home, self.shm = home, shm
        self.options = {
            "data_dir": home / "data",
            "run_dir": home / "run",
            "shm_dir": shm,
            "dram_bytes": "64MiB",
            "extent_bytes": "4MiB",
            "metrics_port": -1,
            "engine_poll_s": 0.1,
            "old_arena_deadline_s": 2,
        } | options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        return str(self.home / "run" / "kvtier.sock")

    def start(self) -> None:
        environ = {f"KVTIER_{name.upper()}": str(value) for name, value in self.options.items()}
        with (self.home / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvtier.cli.main", "serve"],
                env=os.environ | environ,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self.process.poll() is None, self.log()
            try:
                self.status()
                return
            except KvtierError:
                assert time.monotonic() < deadline_s, self.log()
                time.sleep(0.05)

    def status(self) -> Any:
        admin = AdminClient(self.socket)
        try:
            return admin.status()
        finally:
            admin.close()

    def blocks(self) -> int:
        return sum(tier.blocks for tier in self.status().tiers)

    def wait_for_blocks(self, count: int) -> None:
        deadline_s = time.monotonic() + 10
        while self.blocks() != count:
            assert time.monotonic() < deadline_s, (self.blocks(), count)
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()

    def corrupt(self) -> int:
        """Flip bytes all over the arena, behind the daemon's back; returns how many."""
        (arena,) = self.shm.glob("*.arena")
        flipped = 0
        with arena.open("r+b") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            for offset in range(64, size_bytes, 4096):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 0xFF]))
                flipped += 1
        return flipped

    def log(self) -> str:
        return (self.home / "daemon.log").read_text(errors="replace")[-4000:]
