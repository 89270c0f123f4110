from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import Config
from kvtier.index import open_index
from kvtier.testing.index_tests import MakeIndex
from tests.index import servers
from tests.index.servers import DEBIAN, NO_DEBIAN, Server

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.running(Server(tmp_path_factory.mktemp("valkey"))) as (server,):
        yield server


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if DEBIAN is None:
        pytest.skip(NO_DEBIAN)
    with servers.running(Server(tmp_path_factory.mktemp("debian"), binary=DEBIAN)) as (server,):
        yield server


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    if DEBIAN is None:
        pytest.skip(f"{NO_DEBIAN} (the embedded Valkey has no TLS)")
    with servers.secured(tmp_path_factory.mktemp("secured") / "redis", DEBIAN) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with servers.cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Server], list[Server]]]:
    with servers.watched(tmp_path_factory.mktemp("watched")) as both:
        yield both


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A node's configuration with keys of this test's own; patient, since the machine may be busy."""
    prefix = f"kvtier-test-{uuid.uuid4().hex}"

    def make(**values: Any) -> Config:
        fields = {
            "data_dir": tmp_path,
            "run_dir": tmp_path,
            "dram_bytes": "64MiB",
            "index_prefix": prefix,
            "index_timeout_s": 2.0,
            "heartbeat_s": values.get("dead_after_s", 15.0) / 3,
        }
        return Config(**(fields | values))

    return make


def index_maker(make_config: MakeConfig, **values: Any) -> MakeIndex:
    """For `IndexTests`: indexes at one address."""

    def make(*, ttl_s: float = 3600.0, dead_after_s: float = 15.0) -> Any:
        return open_index(make_config(index_ttl_s=ttl_s, dead_after_s=dead_after_s, **values))

    return make
