from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.demo.node import NodeProcess

Kvtier = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def short_dir() -> Iterator[Path]:
    """Sockets' paths are short, pytest's directories are not."""
    with tempfile.TemporaryDirectory(prefix="kvtier-test-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def node(short_dir: Path) -> Iterator[NodeProcess]:
    """A real daemon in a process of its own; its shared memory is gone afterwards."""
    shm = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/dev/shm"))
    try:
        with NodeProcess(short_dir / "node", dram_bytes=16 << 20, extent_bytes=1 << 20, shm_dir=shm) as node:
            yield node
        assert list(shm.iterdir()) == []
    finally:
        subprocess.run(["rm", "-rf", str(shm)], check=True)


@pytest.fixture
def kvtier(tmp_path: Path) -> Kvtier:
    """Runs the command as a user does, with no configuration but what is given."""

    def run(*words: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        return subprocess.run(
            [sys.executable, "-m", "kvtier.cli.main", *words],
            input=stdin,
            env={**inherited, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
