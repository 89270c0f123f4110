from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client.harness import DaemonProcess, Engine


def _shm_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=f"kvtier-client-{os.getpid()}-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def shm() -> Iterator[Path]:
    yield from _shm_directory()


@pytest.fixture
def own_daemon(tmp_path: Path, shm: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons that a test may kill."""
    started: list[DaemonProcess] = []

    def start(**options: object) -> DaemonProcess:
        started.append(DaemonProcess(tmp_path, shm, **options))
        return started[-1]

    yield start
    for daemon in started:
        daemon.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One for all tests of a module."""
    for shm_directory in _shm_directory():
        daemon = DaemonProcess(tmp_path_factory.mktemp("node"), shm_directory)
        yield daemon
        daemon.close()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(socket: str, **options: object) -> Engine:
        made.append(Engine(socket, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.close()
