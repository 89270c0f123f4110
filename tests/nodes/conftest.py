from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nodes.harness import Node, Valkey


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=f"kvtier-nodes-{os.getpid()}-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    server = Valkey(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def make_node(tmp_path: Path, shm: Path, valkey: Valkey) -> Iterator[Callable[..., Node]]:
    """Starts nodes by name, each with an engine; all share `valkey`."""
    nodes: list[Node] = []

    def make(name: str, **options: object) -> Node:
        nodes.append(Node(tmp_path / name, shm, valkey.url, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
