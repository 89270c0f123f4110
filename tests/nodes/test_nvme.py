"""A daemon with an NVMe tier, as an engine sees it: more than memory holds, and still there after a death."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.types import Key, TierKind
from tests.client.conftest import own_daemon, shm  # noqa: F401
from tests.client.harness import LAYOUT, DaemonProcess, Engine, chain, until
from tests.nodes.harness import Node, nothing_is_held, prompt

PROMPTS = 12
BLOCKS = 64
DRAM_BLOCKS = 256
COMPUTE_S = 1.0
"""What the engine says that a block takes it: so much that any load is faster."""
Start = Callable[..., DaemonProcess]


@pytest.fixture
def start(own_daemon: Start, tmp_path: Path) -> Start:  # noqa: F811
    def with_nvme(**options: object) -> DaemonProcess:
        values: dict[str, object] = {"nvme_paths": tmp_path / "nvme", "nvme_bytes": "64MiB"}
        return own_daemon(**(values | options))

    return with_nvme


@pytest.fixture
def engine() -> Iterator[Callable[[DaemonProcess], Engine]]:
    made: list[Engine] = []

    def make(daemon: DaemonProcess) -> Engine:
        made.append(Engine(daemon.socket, BLOCKS))
        return made[-1]

    yield make
    for each in made:
        each.close()


def tier(daemon: DaemonProcess, kind: TierKind) -> object:
    (found,) = (its for its in daemon.status().tiers if its.tier == kind)
    return found


def nvme_blocks(daemon: DaemonProcess) -> int:
    return int(tier(daemon, TierKind.NVME).blocks)  # type: ignore[attr-defined]


def metric(daemon: DaemonProcess, name: str) -> float:
    """One line of a scrape, by its name and labels."""
    with urllib.request.urlopen(f"http://{daemon.status().metrics_address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found is not None, f"there is no {name}"
    return float(found[1])


def fill(daemon: DaemonProcess, engine: Engine) -> dict[str, np.ndarray]:
    """Store more than memory holds; name of a prompt -> its bytes. Most lies on the medium in the end."""
    stored = {}
    rng = np.random.default_rng(5)
    for number in range(PROMPTS):
        engine.memory[:] = rng.integers(0, 256, engine.memory.shape, np.uint8)
        name = f"prompt {number}"
        keys = chain(name, BLOCKS)
        have = 0
        while have < BLOCKS:  # a store that finds no room takes less: demotes make room
            result = engine.client.store(
                keys[have - 1] if have else None, keys[have:], engine.pages, range(have, BLOCKS)
            )
            have += result.committed
        stored[name] = engine.memory.copy()
        want = (number + 1) * BLOCKS - DRAM_BLOCKS * 7 // 8
        until(lambda need=want: nvme_blocks(daemon) >= need, "the coldest are copied down")
    return stored


def load(engine: Engine, name: str) -> int:
    """How many blocks of this prompt come; what comes is in the engine's memory."""
    keys = chain(name, BLOCKS)
    engine.memory[:] = 0
    offer = engine.client.lookup(f"request {name}", keys, block_compute_s=COMPUTE_S)
    if not offer.blocks:
        return 0
    result = engine.client.load(f"request {name}", keys[: offer.blocks], engine.pages, range(offer.blocks))
    return int(result.loaded)


def compare(engine: Engine, loaded: int, stored: np.ndarray) -> None:
    assert np.array_equal(engine.memory[:, :loaded], stored[:, :loaded]), "wrong bytes"


@pytest.mark.slow
def test_more_than_memory_holds_also_after_a_death(
    start: Start, engine: Callable[[DaemonProcess], Engine]
) -> None:
    daemon = start()
    first = engine(daemon)
    stored = fill(daemon, first)
    for name, content in stored.items():
        assert load(first, name) == BLOCKS, name
        compare(first, BLOCKS, content)
    assert daemon.status().counters.stored_blocks == PROMPTS * BLOCKS
    below = nvme_blocks(daemon)
    first.close()
    daemon.kill()

    daemon.start()
    assert nvme_blocks(daemon) == below, "it is all there at once"
    second = engine(daemon)
    loaded = 0
    for name, content in stored.items():
        count = load(second, name)
        compare(second, count, content)
        loaded += count
    assert loaded >= below, "what was on the medium is loaded"


def damage(directory: Path) -> None:
    """Flip a byte in each page that lies behind a header."""
    (slab,) = (its for its in directory.iterdir() if its.stat().st_size > 1 << 20)
    content = bytearray(slab.read_bytes())
    for begin in range(1 << 20, len(content), 4096):
        content[begin + 1000] ^= 0x40
    slab.write_bytes(content)


@pytest.mark.slow
def test_damaged_blocks_are_a_miss_and_are_told(
    start: Start, engine: Callable[[DaemonProcess], Engine], tmp_path: Path
) -> None:
    daemon = start(metrics_port=0)
    first = engine(daemon)
    stored = fill(daemon, first)
    first.close()
    daemon.close()
    damage(tmp_path / "nvme")
    daemon.start()
    second = engine(daemon)
    for name, content in stored.items():
        compare(second, load(second, name), content)
    assert metric(daemon, 'kvtier_checksum_mismatches_total{where="fetch"}') > 0
    assert "are not what they should be" in daemon.log.read_text()


def test_a_directory_of_another_node_is_refused(start: Start, tmp_path: Path) -> None:
    daemon = start()
    daemon.close()
    (tmp_path / "data" / "node.json").unlink()
    with pytest.raises(AssertionError, match="holds blocks of node"):
        daemon.start()


def test_paths_without_room_are_refused(start: Start) -> None:
    with pytest.raises(AssertionError, match="nvme_bytes"):
        start(nvme_bytes=0)


def test_neither_paths_nor_room_is_no_such_tier(own_daemon: Start) -> None:  # noqa: F811
    daemon = own_daemon()
    assert [its.tier for its in daemon.status().tiers] == [TierKind.DRAM]
    assert LAYOUT.slot_bytes * DRAM_BLOCKS == daemon.status().tiers[0].capacity_bytes


@pytest.mark.slow
def test_a_medium_that_goes_away_is_told_and_used_again(
    start: Start, engine: Callable[[DaemonProcess], Engine], tmp_path: Path
) -> None:
    daemon = start(metrics_port=0)
    client = engine(daemon)
    slab, away = tmp_path / "nvme" / "kvtier.slab", tmp_path / "away"
    slab.rename(away)
    stored: dict[str, np.ndarray] = {}

    def is_noticed() -> bool:
        """Memory goes on, however full it gets."""
        name = f"prompt {len(stored)}"
        client.client.store(None, chain(name, BLOCKS), client.pages, range(BLOCKS))
        stored[name] = client.memory.copy()
        compare(client, load(client, name), stored[name])
        client.memory[:] = stored[name]
        return any("nvme is out of use" in notice for notice in daemon.status().notices)

    until(is_noticed, "the status says so")
    assert metric(daemon, 'kvtier_tier_up{tier="nvme"}') == 0
    assert metric(daemon, 'kvtier_tier_faults_total{tier="nvme"}') > 0
    assert "out of use" in daemon.log.read_text()
    away.rename(slab)
    until(lambda: not daemon.status().notices, "it is used again")
    assert metric(daemon, 'kvtier_tier_up{tier="nvme"}') == 1
    until(lambda: nvme_blocks(daemon) > 0, "blocks are copied down again")


LENT_PROMPTS = 8
LENT_BLOCKS = 24
"""Of each prompt: 1 MiB a block, so that all of them are three times what the first node's memory holds."""


def nvme_places(node: Node, keys: list[Key]) -> int:
    """How many blocks lie below at another node, by what `kvtier lookup` prints."""
    command = [sys.executable, "-m", "kvtier.cli.main", "lookup", "--json", "--keys-file", "-"]
    done = subprocess.run(
        [*command, "--socket", str(node.daemon.socket)],
        input="\n".join(key.hex() for key in keys),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    places = json.loads(done.stdout)["places"]
    return sum(place["tier"] == "nvme" and place["hint"] and place["name"] == "a" for place in places)


@pytest.fixture
def lender(
    make_node: Callable[..., Node], tmp_path: Path
) -> tuple[Node, Node, list[tuple[list[Key], np.ndarray]]]:
    """Node a, which has stored three times what its memory holds, and b; and the prompts with their bytes."""
    a = make_node(
        "a",
        dram_bytes="64MiB",
        nvme_paths=tmp_path / "nvme",
        nvme_bytes="512MiB",
        demote_high_fraction=0.01,
        max_given_fraction=0.5,
    )
    prompts = []
    rng = np.random.default_rng(7)
    for number in range(LENT_PROMPTS):
        keys = prompt(LENT_BLOCKS)
        a.engine.memory[:] = rng.integers(0, 256, a.engine.memory.shape, np.uint8)
        prompts.append((keys, a.store(keys, range(LENT_BLOCKS))))
        want = (number + 1) * LENT_BLOCKS
        until(lambda need=want: nvme_blocks(a.daemon) == need, "it is copied down")
    return a, make_node("b"), prompts


def starts_anew(a: Node, b: Node) -> None:
    before = a.status().incarnation
    a.daemon.kill()
    a.daemon.start()
    assert a.status().incarnation > before
    until(lambda: [peer.incarnation for peer in b.peers()] == [a.status().incarnation], "b sees the new life")
    until(lambda: a.status().unpublished == 0 and a.status().index_reachable, "all is published")


@pytest.mark.slow
def test_a_node_that_was_killed_lends_all_that_its_nvme_holds(
    lender: tuple[Node, Node, list[tuple[list[Key], np.ndarray]]],
) -> None:
    a, b, prompts = lender
    starts_anew(a, b)
    every = [key for keys, _ in prompts for key in keys]
    until(lambda: nvme_places(b, every) == len(every), "b sees places below")
    for keys, wanted in prompts:
        b.fetches_all(keys, wanted)
        b.evict(keys)  # its own memory does not hold all of them
    assert b.status().counters.pulled_blocks >= len(every)
    until(lambda: nothing_is_held(a), "every lease is given back")
    assert a.metric("kvtier_fetched_bytes_total", tier="nvme") >= len(every) << 20


@pytest.mark.slow
def test_what_is_damaged_at_a_peer_is_a_miss(
    lender: tuple[Node, Node, list[tuple[list[Key], np.ndarray]]], tmp_path: Path
) -> None:
    a, b, prompts = lender
    a.daemon.kill()
    damage(tmp_path / "nvme")
    a.daemon.start()
    until(lambda: [peer.incarnation for peer in b.peers()] == [a.status().incarnation], "b sees the new life")
    until(lambda: a.status().unpublished == 0 and a.status().index_reachable, "all is published")
    every = [key for keys, _ in prompts for key in keys]
    until(lambda: nvme_places(b, every) > 0, "b sees places below")

    def has_noticed() -> bool:
        for keys, wanted in prompts:
            loaded, _ = b.fetch(keys, wanted)  # compares what comes
            assert loaded < len(keys)
        return a.metric("kvtier_checksum_mismatches_total", where="fetch") > 0

    until(has_noticed, "a has noticed")
    assert b.metric("kvtier_checksum_mismatches_total") == 0, "not a wrong byte has left a"
