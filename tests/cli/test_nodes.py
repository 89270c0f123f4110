"""Two real daemons and an index: what operators see of other nodes."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.cli.probes import PROBES
from kvtier.client import EngineClient, Pages
from kvtier.demo.index import IndexProcess
from kvtier.demo.node import NodeProcess
from kvtier.types import Key, Layout, LayoutKind, LayoutOrder, Namespace, chain_keys
from tests.cli.conftest import Kvtier

LAYOUT = Layout(LayoutKind.GQA, 2, 1, 16, "bfloat16", 16, LayoutOrder.HND, 2 * 16 * 16 * 2)
BLOCKS = 6
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Two:
    """Nodes that share an index; `client` is an engine of each."""

    index: IndexProcess
    nodes: dict[str, NodeProcess]
    clients: dict[str, EngineClient]

    def store(self, name: str, seed: int, *, published: bool = True) -> list[Key]:
        """A chain of its own for every seed, at one node."""
        keys = chain(seed)
        pages = Pages.from_tensors(memory(seed), LAYOUT)
        stored = self.clients[name].store(None, keys, pages, list(range(BLOCKS)))
        assert stored.committed == BLOCKS
        if published:
            self.nodes[name].wait_published()
        return keys

    def load(self, name: str, keys: list[Key]) -> np.ndarray:
        """Bytes of these blocks, from wherever they come."""
        rows, client = memory(0), self.clients[name]
        offer = client.lookup(f"load {keys[0].hex()}", keys)
        assert offer.blocks == len(keys), offer
        result = client.load(
            f"load {keys[0].hex()}", keys, Pages.from_tensors(rows, LAYOUT), [*range(BLOCKS)]
        )
        assert result.loaded == len(keys), result
        return np.concatenate(rows)


def memory(seed: int) -> list[np.ndarray]:
    return [np.full((BLOCKS, LAYOUT.layer_block_bytes), seed, np.uint8) for _ in range(LAYOUT.num_layers)]


def chain(seed: int) -> list[Key]:
    root = Namespace(b"nodes", LAYOUT.dtype, LAYOUT.fingerprint(), LAYOUT.block_tokens).root()
    return chain_keys(root, [seed] * (BLOCKS * LAYOUT.block_tokens), LAYOUT.block_tokens)


@pytest.fixture(scope="module")
def two(short_dir: Path) -> Iterator[Two]:
    shm = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/dev/shm"))
    options: dict[str, object] = {"dram_bytes": 16 << 20, "extent_bytes": 1 << 20, "shm_dir": shm}
    options |= {"heartbeat_s": 0.5, "dead_after_s": 3, "index_timeout_s": 2, "pull_floor_s": 10}
    try:
        with (
            IndexProcess(short_dir / "index") as index,
            NodeProcess(short_dir / "one", node_name="one", **options, **index.options) as one,
            NodeProcess(short_dir / "two", node_name="two", **options, **index.options) as other,
        ):
            nodes = {"one": one, "two": other}
            clients = {
                name: EngineClient(str(node.socket), LAYOUT, lookup_timeout_s=5.0, call_timeout_s=10.0)
                for name, node in nodes.items()
            }
            for node in nodes.values():
                node.wait_peers(2)
            yield Two(index, nodes, clients)
            for client in clients.values():
                client.close()
        killed = one.readiness["node_id"][:12]
        assert [path.name for path in shm.iterdir() if killed not in path.name] == []
    finally:
        subprocess.run(["rm", "-rf", str(shm)], check=True)


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def at(two: Two, name: str) -> tuple[str, ...]:
    return ("--socket", str(two.nodes[name].socket), "--json")


def test_every_place_of_a_block(kvtier: Kvtier, two: Two) -> None:
    keys = two.store("one", 1)
    words = [key.hex() for key in keys]
    ids = {name: node.readiness["node_id"] for name, node in two.nodes.items()}

    seen = json.loads(kvtier("lookup", *words, *at(two, "two")).stdout)
    assert seen["blocks"] == BLOCKS
    assert {(place["name"], place["node_id"], place["hint"]) for place in seen["places"]} == {
        ("one", ids["one"], True)
    }
    assert {place["offset_bytes"] for place in seen["places"]} == {None}
    here = kvtier("lookup", *words, "--here", *at(two, "two"))
    assert (here.returncode, json.loads(here.stdout)["blocks"]) == (1, 0)

    assert (two.load("two", keys) == 1).all()
    two.nodes["two"].wait_published()
    seen = json.loads(kvtier("lookup", *words, *at(two, "two")).stdout)
    assert [(place["index"], place["name"], place["replica"]) for place in seen["places"]] == [
        each for index in range(BLOCKS) for each in ((index, "two", True), (index, "one", None))
    ]
    assert "two" in kvtier("lookup", *words, "--socket", str(two.nodes["one"].socket)).stdout


def test_nodes(kvtier: Kvtier, two: Two) -> None:
    keys = two.store("one", 2)
    two.load("two", keys)
    done = kvtier("nodes", *at(two, "two"))
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    assert listed["index_reachable"] is True
    me, other = listed["nodes"]
    assert (me["name"], me["is_self"]) == ("two", True)
    assert (other["name"], other["is_self"], other["state"]) == ("one", False, "up")
    assert other["node_id"] == two.nodes["one"].readiness["node_id"]
    assert other["address"].startswith("127.0.0.1:")
    assert other["transfer"] in ("nixl", "stream")
    assert other["pulled_blocks"] >= BLOCKS
    assert other["pull_bytes_per_s"] > 0
    assert other["round_trip_s"] > 0
    assert other["failed_pulls"] == 0
    for name in ("one", other["node_id"], other["node_id"][:10]):
        one = kvtier("node", name, *at(two, "two"))
        assert (one.returncode, json.loads(one.stdout)["name"]) == (0, "one")
    table = kvtier("nodes", "--socket", str(two.nodes["two"].socket))
    assert "two (this)" in table.stdout
    assert other["transfer"] in table.stdout


def test_status_speaks_of_index_peers_and_transfers(kvtier: Kvtier, two: Two) -> None:
    status = json.loads(kvtier("status", *at(two, "one")).stdout)
    assert status["index_reachable"] is True
    assert status["unpublished"] == 0
    assert status["peer_address"].startswith("127.0.0.1:")
    assert {each["name"] for each in status["transfers"]} == {"nixl", "stream"}
    assert any(each["usable"] for each in status["transfers"])
    password = two.index.password_file.read_text()
    assert password not in json.dumps(status)
    assert password not in two.nodes["one"].process.log.read_text()
    text = kvtier("status", "--socket", str(two.nodes["one"].socket)).stdout
    assert status["peer_address"] in text


def skipped() -> list[str]:
    return [word for name in PROBES for word in ("--skip", name)]


def report(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads(done.stdout)["checks"]}


@pytest.fixture
def checking(two: Two, short_dir: Path) -> list[str]:
    """`kvtier check` as somebody would call it before a third node is started."""
    home = short_dir / "three"
    words = ["check", "--json", "--data-dir", str(home / "data"), "--run-dir", str(home / "run")]
    words += ["--dram-bytes", "64MiB", "--metrics-port", "0", "--index", two.index.url]
    return [*words, "--index-password-file", str(two.index.password_file), *skipped()]


def test_check_asks_the_index_and_peers(kvtier: Kvtier, two: Two, checking: list[str]) -> None:
    peer = two.nodes["one"].status().peer_address
    done = kvtier(*checking, "--peer", peer)
    assert done.returncode == 0, done.stdout + done.stderr
    found = report(done)
    assert found["index"]["state"] == "ok", found["index"]
    assert "one, two" in found["index"]["why"]
    has_nixl = any(each.name == "nixl" and each.usable for each in two.nodes["one"].status().transfers)
    assert found[f"peer {peer}"]["state"] == ("ok" if has_nixl else "degraded"), found
    assert two.nodes["one"].readiness["node_id"][:12] in found[f"peer {peer}"]["why"]
    assert len(two.nodes["one"].admin.list_nodes().nodes) == 2  # who checks is nobody


def test_check_says_what_does_not_answer(
    kvtier: Kvtier, two: Two, checking: list[str], tmp_path: Path
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        nobody = "127.0.0.1:1"
        deaf = f"127.0.0.1:{silent.getsockname()[1]}"
        wrong = tmp_path / "wrong"
        wrong.write_text("not the password")
        done = kvtier(*checking, "--peer", nobody, "--peer", deaf, "--index-password-file", str(wrong))
    assert done.returncode == 1
    found = report(done)
    for name in ("index", f"peer {nobody}", f"peer {deaf}"):
        assert found[name]["state"] == "missing"
        assert found[name]["todo"]
        assert "Traceback" not in found[name]["why"]
    assert two.index.password_file.read_text() not in done.stdout + done.stderr
    assert kvtier(*checking, "--peer", "no port").returncode == 2


def test_a_node_that_dies_is_no_longer_listed(kvtier: Kvtier, two: Two, short_dir: Path) -> None:
    keys = two.store("one", 3)
    two.nodes["one"].kill()
    until(lambda: len(two.nodes["two"].admin.list_nodes().nodes) == 1)
    assert kvtier("node", "one", *at(two, "two")).returncode == 1
    found = kvtier("lookup", *[key.hex() for key in keys], *at(two, "two"))
    assert (found.returncode, json.loads(found.stdout)["places"]) == (1, [])


def test_without_the_index_the_node_says_so(kvtier: Kvtier, two: Two) -> None:
    two.index.stop()
    until(lambda: not two.nodes["two"].status().index_reachable)
    done = kvtier("nodes", *at(two, "two"))
    assert done.returncode == 1
    assert json.loads(done.stdout)["index_reachable"] is False
    assert "index cannot be reached" in done.stderr
    own = two.store("two", 4, published=False)
    found = kvtier("lookup", *[key.hex() for key in own], *at(two, "two"))
    assert (found.returncode, json.loads(found.stdout)["blocks"]) == (0, BLOCKS)
    assert "index cannot be reached" in found.stderr
