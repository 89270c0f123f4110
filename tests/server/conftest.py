from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from kvtier.daemon import Daemon
from tests.server import harness
from tests.server.harness import RawEngine, Wire


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory of shared memory that has to be empty at the end."""
    path = Path(tempfile.mkdtemp(prefix=f"kvtier-test-{os.getpid()}-", dir="/dev/shm"))
    yield path
    left = sorted(path.iterdir())
    for file in left:
        file.unlink()
    path.rmdir()
    assert not left, f"left in shared memory: {left}"


@pytest.fixture
async def daemon(tmp_path: Path, shm: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(harness.config(tmp_path, shm))
    await daemon.start()
    yield daemon
    await daemon.stop()


@pytest.fixture
async def wire(daemon: Daemon) -> AsyncIterator[Wire]:
    wire = Wire(daemon.socket)
    yield wire
    await wire.close()


@pytest.fixture
def make_engine(daemon: Daemon, wire: Wire) -> Iterator[Callable[..., RawEngine]]:
    made: list[RawEngine] = []

    def make(**values: object) -> RawEngine:
        made.append(RawEngine(wire, daemon.config.run_dir, **values))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
async def engine(make_engine: Callable[..., RawEngine]) -> RawEngine:
    engine = make_engine()
    await engine.register()
    return engine
