"""Engines fork: the child has a channel, an id and a lock of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.client.harness import ROOT, DaemonProcess


@pytest.mark.parametrize("mode", ["unused", "used", "busy", "stuck"])
def test_forks(daemon: DaemonProcess, mode: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.client.fork_engine", mode, daemon.socket, str(daemon.process.pid)],
        cwd=ROOT,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
