from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.engine import Engine
from tests.connectors.models import write_llama


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("connector")


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    return write_llama(home / "model")


@pytest.fixture(scope="module")
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def daemon(home: Path, shm: Path) -> Iterator[Any]:
    from tests.connectors.daemon import Daemon

    daemon = Daemon(home, shm)
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def make_engine(home: Path, model: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(extra: dict[str, Any], **options: Any) -> Engine:
        made.append(Engine(home, options.pop("model", model), extra, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
