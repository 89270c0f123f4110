"""A daemon with far memory between its arena and NVMe, as an engine sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier.cli.probes import PROBES
from kvtier.tiers import binding, numa
from kvtier.types import TierKind
from tests.client.conftest import own_daemon, shm  # noqa: F401
from tests.client.harness import ROOT, DaemonProcess, Engine, chain, until
from tests.nodes.test_nvme import BLOCKS, DRAM_BLOCKS, compare, engine, load, metric, tier  # noqa: F401

PROMPTS = 20
"""Five times what the arena holds, and more than far memory does."""
FAR_BLOCKS = 3 * DRAM_BLOCKS
NODES = numa.memory_nodes()
NODE = next((str(node.node) for node in NODES if node.total_bytes), "")
"""A real node where the kernel shows one; a second region stands for a far one."""
FAR = f"{NODE}:12MiB,any:12MiB" if NODE else "any:24MiB"
Start = Callable[..., DaemonProcess]


def blocks(daemon: DaemonProcess, kind: TierKind) -> int:
    return int(tier(daemon, kind).blocks)  # type: ignore[attr-defined]


def caps_hold(daemon: DaemonProcess, slab: Path) -> None:
    caps = {TierKind.DRAM: 8 << 20, TierKind.FAR: 24 << 20, TierKind.NVME: 64 << 20}
    tiers = daemon.status().tiers
    for its in tiers[:2]:
        assert its.capacity_bytes == caps[its.tier]
    assert tiers[2].capacity_bytes <= caps[TierKind.NVME], "what the medium needs for itself is part of it"
    assert [its.name for its in tiers] == ["dram", "far", "nvme"], "the fastest first"
    for its in tiers:
        used = its.resident_bytes + its.reserved_bytes + its.quarantined_bytes + its.draining_bytes
        assert used <= its.allocated_bytes <= its.capacity_bytes
    assert sum(file.stat().st_blocks * 512 for file in slab.iterdir()) <= caps[TierKind.NVME]


def fill(daemon: DaemonProcess, client: Engine, slab: Path) -> dict[str, np.ndarray]:
    """Store all prompts, each when those before are copied down; name -> bytes."""
    stored = {}
    rng = np.random.default_rng(9)
    for number in range(PROMPTS):
        client.memory[:] = rng.integers(0, 256, client.memory.shape, np.uint8)
        name = f"prompt {number}"
        keys = chain(name, BLOCKS)
        have = 0
        while have < BLOCKS:  # a store that finds no room takes less: demotes make room
            parent = keys[have - 1] if have else None
            have += client.client.store(parent, keys[have:], client.pages, range(have, BLOCKS)).committed
        stored[name] = client.memory.copy()
        count = (number + 1) * BLOCKS
        if count > FAR_BLOCKS * 3 // 4:
            until(lambda need=count: blocks(daemon, TierKind.NVME) == need, "all is copied down to NVMe")
        elif count > DRAM_BLOCKS * 3 // 4:
            until(lambda need=count: blocks(daemon, TierKind.FAR) == need, "all is copied down")
            assert blocks(daemon, TierKind.NVME) == 0, "far memory has room for it"
        caps_hold(daemon, slab)
    return stored


@pytest.mark.slow
def test_five_times_the_arena_comes_back_through_far_memory_and_nvme(
    own_daemon: Start,  # noqa: F811
    engine: Callable[[DaemonProcess], Engine],  # noqa: F811
    tmp_path: Path,
) -> None:
    slab = tmp_path / "nvme"
    daemon = own_daemon(far_memory=FAR, nvme_paths=slab, nvme_bytes="64MiB", metrics_port=0)
    first = engine(daemon)
    stored = fill(daemon, first, slab)
    assert blocks(daemon, TierKind.FAR) > FAR_BLOCKS - BLOCKS, "it is full"
    for name in reversed(stored):  # the youngest are nearest
        assert load(first, name) == BLOCKS, name
        compare(first, BLOCKS, stored[name])
        caps_hold(daemon, slab)
    block_bytes = first.layout.block_bytes
    from_far, from_nvme = (
        metric(daemon, f'kvtier_fetched_bytes_total{{tier="{name}"}}') for name in ("far", "nvme")
    )
    assert from_far >= DRAM_BLOCKS * block_bytes
    assert from_nvme >= DRAM_BLOCKS * block_bytes
    assert metric(daemon, 'kvtier_tier_block_events_total{event="wrong",tier="far"}') == 0
    assert metric(daemon, 'kvtier_demoted_bytes_total{tier="far"}') >= PROMPTS * BLOCKS * block_bytes
    first.close()
    daemon.kill()

    daemon.start()
    assert blocks(daemon, TierKind.FAR) == 0, "far memory does not outlive the daemon"
    assert blocks(daemon, TierKind.NVME) == PROMPTS * BLOCKS
    second = engine(daemon)
    for name, content in stored.items():
        assert load(second, name) == BLOCKS, name
        compare(second, BLOCKS, content)


@pytest.mark.slow
def test_without_nvme_far_memory_is_the_last_tier(
    own_daemon: Start,  # noqa: F811
    engine: Callable[[DaemonProcess], Engine],  # noqa: F811
) -> None:
    daemon = own_daemon(far_memory="any:24MiB", huge_pages="off")
    client = engine(daemon)
    stored = {}
    for number in range(10):
        client.memory[:] = np.random.default_rng(number).integers(0, 256, client.memory.shape, np.uint8)
        name = f"prompt {number}"
        stored[name] = client.memory.copy()
        assert client.client.store(None, chain(name, BLOCKS), client.pages, range(BLOCKS)).committed == BLOCKS
        count = (number + 1) * BLOCKS
        if count > DRAM_BLOCKS * 3 // 4:
            until(lambda need=count: blocks(daemon, TierKind.FAR) == need, "all is copied down")
    for name, content in stored.items():
        assert load(client, name) == BLOCKS
        compare(client, BLOCKS, content)


def test_a_near_arena_is_bound_or_says_why_not(own_daemon: Start) -> None:  # noqa: F811
    if not NODE:
        pytest.skip("the kernel shows no NUMA nodes: nothing can be bound")
    refused = binding.try_bind([int(NODE)])
    print(f"nodes: {[(node.node, node.total_bytes) for node in NODES]}; binding: {refused or 'allowed'}")
    daemon = own_daemon(numa_node="auto", far_memory=f"{NODE}:1MiB")
    notices = [notice for notice in daemon.status().notices if "bound" in notice]
    assert len(notices) == (2 if refused else 0)
    policies = Path(f"/proc/{daemon.process.pid}/numa_maps")
    if not refused and policies.exists():
        lines = [line for line in policies.read_text().splitlines() if f" bind:{NODE} " in line]
        assert any("kvtier" in line for line in lines), "the arena's file"
        assert any("anon=" in line for line in lines), "far memory"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"numa_node": 1023}, "numa_node names NUMA node 1023"),
        ({"far_memory": "1023:1MiB"}, "far_memory names NUMA node 1023"),
        ({"huge_pages": "require"}, "extent_bytes is 1048576"),
    ],
)
def test_what_is_not_here_is_refused_at_start_and_by_check(
    own_daemon: Start,  # noqa: F811
    options: dict[str, object],
    why: str,
    tmp_path: Path,
    shm: Path,  # noqa: F811
) -> None:
    with pytest.raises(AssertionError, match=why):
        own_daemon(**options)
    values = {"data-dir": tmp_path / "d", "run-dir": tmp_path / "r", "shm-dir": shm, "dram-bytes": "8MiB"}
    values |= {"extent-bytes": "1MiB"} | {name.replace("_", "-"): value for name, value in options.items()}
    arguments = [f"--{name}={value}" for name, value in values.items()]
    arguments += [f"--skip={name}" for name in PROBES]
    command = [sys.executable, "-m", "kvtier.cli.main", "check", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1, done.stderr
    bad = [
        each for each in json.loads(done.stdout)["checks"] if each["state"] == "missing" and each["needed"]
    ]
    assert any(why in each["why"] for each in bad)
