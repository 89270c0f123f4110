"""Engines fork: the child has a channel, an id and a lock of its own, or it misses; it never hangs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.client.harness import ROOT, DaemonProcess


@pytest.mark.parametrize("mode", ["unused", "used", "busy", "stuck", "imported-first"])
def test_forks(daemon: DaemonProcess, mode: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.client.fork_engine", mode, daemon.socket, str(daemon.process.pid)],
        cwd=ROOT,
        timeout=200,
        env={k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
