"""A daemon with an NVMe tier, as an engine sees it: more than memory holds, and still there after a death."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.client import AdminClient
from kvtier.types import TierKind
from tests.client.conftest import own_daemon, shm  # noqa: F401
from tests.client.harness import LAYOUT, DaemonProcess, Engine, chain, until
from tests.nodes.harness import Node, prompt

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


@pytest.mark.slow
def test_a_peer_is_asked_for_what_lies_in_its_memory_only(
    make_node: Callable[..., Node], tmp_path: Path
) -> None:
    options = {"nvme_paths": tmp_path / "nvme", "nvme_bytes": "256MiB", "demote_high_fraction": 0.01}
    a, b = make_node("a", **options), make_node("b")
    keys = prompt(20)
    wanted = a.store(keys, range(20))
    until(lambda: nvme_blocks(a.daemon) == len(keys), "all is copied down")
    a.daemon.kill()
    a.daemon.start()
    until(lambda: [peer.state for peer in b.peers()] == ["unreached"], "b sees the new life")
    until(lambda: a.status().unpublished == 0 and a.status().index_reachable, "all is published")
    with AdminClient(b.daemon.socket) as admin:
        until(lambda: len(admin.lookup_prefix(keys, everywhere=True).places) == len(keys), "the index knows")
    assert b.engine.client.lookup("nothing", keys).blocks == 0, "what a does not lend is offered"
    a.fetches_all(keys, wanted)
    b.fetches_all(keys, wanted)
    assert b.status().counters.failed_pulls == 0
