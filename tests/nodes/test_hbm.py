"""A daemon with an HBM tier on device `cpu`, as engines see it: shared memory stands for device memory."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiers import device as devices
from kvtier.types import TierKind
from tests.client.conftest import make_engine, own_daemon, shm  # noqa: F401
from tests.client.harness import LAYOUT, ROOT, DaemonProcess, Engine, chain, until
from tests.nodes.test_nvme import metric, tier

PROMPTS = 3
BLOCKS = 48
HBM_BLOCKS = 64
"""One prompt and a part of the next."""
Start = Callable[..., DaemonProcess]
Make = Callable[..., Engine]


@pytest.fixture
def start(own_daemon: Start) -> Start:  # noqa: F811
    def with_hbm(**options: object) -> DaemonProcess:
        values: dict[str, object] = {
            "hbm_bytes": f"{HBM_BLOCKS * LAYOUT.slot_bytes}",
            "hbm_device": "cpu",
            "verify_loads": "all",
            "scrub_bytes_per_s": 0,
            "index": "none",
        }
        return own_daemon(**(values | options))

    return with_hbm


def fill(engine: Engine) -> dict[str, np.ndarray]:
    """Store all prompts; name -> bytes."""
    stored = {}
    for number in range(PROMPTS):
        engine.memory[:] = np.random.default_rng(number).integers(0, 256, engine.memory.shape, np.uint8)
        name = f"prompt {number}"
        stored[name] = engine.store(chain(name, BLOCKS), range(BLOCKS))
    return stored


def load(engine: Engine, name: str, count: int = BLOCKS) -> int:
    """How many blocks of this prompt come."""
    keys = chain(name, count)
    engine.memory[:] = 0
    return engine.client.load(f"request {time.monotonic_ns()}", keys, engine.pages, range(count)).loaded


def compare(engine: Engine, loaded: int, stored: np.ndarray) -> None:
    assert np.array_equal(engine.rows(range(loaded)), stored[:, :loaded]), "wrong bytes"


def promoted(daemon: DaemonProcess) -> int:
    return int(tier(daemon, TierKind.HBM).blocks)  # type: ignore[attr-defined]


def promote(daemon: DaemonProcess, engine: Engine, name: str, stored: np.ndarray) -> None:
    """Load a prompt until it comes from device memory, as far as it fits."""
    assert load(engine, name) == BLOCKS
    compare(engine, BLOCKS, stored)
    until(lambda: promoted(daemon) >= BLOCKS, "it is copied")


def from_device(engine: Engine, name: str, stored: np.ndarray) -> int:
    """How many blocks of a prompt, loaded whole and right, came from device memory."""
    before = engine.client.stats().device_blocks
    assert load(engine, name) == BLOCKS
    compare(engine, BLOCKS, stored)
    return engine.client.stats().device_blocks - before


def slabs() -> list[str]:
    """Lines of this process's memory map that show a node's device memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "kvtier-slab" in line]


def test_what_is_used_often_comes_from_device_memory(start: Start, make_engine: Make) -> None:  # noqa: F811
    daemon = start(metrics_port=0)
    engine = make_engine(daemon.socket)
    stored = fill(engine)
    time.sleep(0.2)
    assert promoted(daemon) == 0, "to be stored is no use"
    promote(daemon, engine, "prompt 0", stored["prompt 0"])
    assert not slabs(), "mapped when a load names a copy"
    assert from_device(engine, "prompt 0", stored["prompt 0"]) == BLOCKS
    assert len(slabs()) == 1
    assert engine.client.stats().corrupt_blocks == 0
    assert metric(daemon, 'kvtier_tier_block_events_total{event="fetched",tier="hbm"}') == BLOCKS
    assert metric(daemon, 'kvtier_demoted_bytes_total{tier="hbm"}') == BLOCKS * LAYOUT.block_bytes
    assert [its.name for its in daemon.status().tiers] == ["dram", "hbm"]


def test_caps_hold_and_all_is_right_while_prompts_push_each_other_out(
    start: Start,
    make_engine: Make,  # noqa: F811
) -> None:
    daemon = start()
    engine = make_engine(daemon.socket)
    stored = fill(engine)
    for turn in range(12):
        name = f"prompt {turn // 2 % PROMPTS}"  # each twice, since those between have pushed it out
        from_device(engine, name, stored[name])
        time.sleep(0.1)  # a tick or two
        its = tier(daemon, TierKind.HBM)
        used = its.resident_bytes + its.reserved_bytes  # type: ignore[attr-defined]
        assert used <= its.allocated_bytes == HBM_BLOCKS * LAYOUT.slot_bytes  # type: ignore[attr-defined]
    assert engine.client.stats().device_blocks > 0
    assert engine.client.stats().corrupt_blocks == 0


def test_the_bytes_do_come_from_there_and_wrong_ones_are_found(
    start: Start,
    make_engine: Make,  # noqa: F811
) -> None:
    daemon = start()
    engine = make_engine(daemon.socket)
    stored = fill(engine)["prompt 0"]
    promote(daemon, engine, "prompt 0", stored)
    session = engine.client._link._session
    assert session is not None
    assert session.mapped is not None
    arena = session.mapped.bytes[: 8 << 20]
    kept = arena.copy()
    arena[:] = 0
    assert from_device(engine, "prompt 0", stored) == BLOCKS, "the arena holds nothing but zeros"
    arena[:] = kept

    device = session.device("cpu")
    assert device is not None
    device._slab.zero([(0, device.size_bytes)])
    assert load(engine, "prompt 0") == 0, "every load is verified"
    assert engine.client.stats().corrupt_blocks == 1
    for _ in range(BLOCKS):  # each load finds one, whose copy then goes
        if load(engine, "prompt 0") == BLOCKS:
            break
    compare(engine, BLOCKS, stored)
    assert daemon.status().counters.corrupt_blocks == 0, "the arena's blocks were never wrong"


def test_engines_that_do_not_or_cannot_map_it_read_the_arena(
    start: Start,
    make_engine: Make,  # noqa: F811
) -> None:
    daemon = start()
    blind = make_engine(daemon.socket, device_memory=False)
    stored = fill(blind)["prompt 0"]
    for _ in range(3):
        assert from_device(blind, "prompt 0", stored) == 0
    time.sleep(0.2)
    assert promoted(daemon) == 0, "for nobody"

    engine = make_engine(daemon.socket)
    promote(daemon, engine, "prompt 0", stored)
    session = engine.client._link._session
    assert session is not None
    handle = session._reply.device_memory.handle
    session._reply.device_memory.handle = handle.replace(b'"inode": ', b'"inode": 1')
    assert from_device(engine, "prompt 0", stored) == 0, "what it would map is gone"
    assert not slabs()
    assert from_device(blind, "prompt 0", stored) == 0


@pytest.mark.slow
def test_a_daemon_killed_while_engines_read_device_memory(
    start: Start,
    make_engine: Make,  # noqa: F811
) -> None:
    daemon = start()
    engine = make_engine(daemon.socket, load_floor_s=1.0, call_timeout_s=1.0)
    stored = fill(engine)
    for _ in range(5):
        promote(daemon, engine, "prompt 0", stored["prompt 0"])
        assert from_device(engine, "prompt 0", stored["prompt 0"]) == BLOCKS
        killer = threading.Timer(0.05, daemon.kill)
        killer.start()
        right = 0
        while (loaded := load(engine, "prompt 0")) or killer.is_alive():
            compare(engine, loaded, stored["prompt 0"])
            right += loaded == BLOCKS
        assert right, "it was killed between loads or in one of them"
        killer.join()
        daemon.start()
        missing = lambda: engine.client.lookup("new", chain("new", 1)).reason == "missing"  # noqa: E731
        until(missing, "the new daemon answers")
        until(lambda: not slabs(), "the dead daemon's memory is given up")
        assert promoted(daemon) == 0, "nothing of it outlives the daemon"
        until(lambda: tier(daemon, TierKind.DRAM).allocated_bytes == 8 << 20, "the arena is whole")  # type: ignore[attr-defined]
        stored = fill(engine)


def test_a_device_that_is_not_here_is_refused_by_name(tmp_path: Path) -> None:
    if not devices.why_not("cuda:0"):
        pytest.skip("there is a CUDA device here")
    options = ["--hbm-bytes", "64MiB", "--index", "none", "--data-dir", f"{tmp_path}/data"]
    more = ["--run-dir", f"{tmp_path}/run", "--dram-bytes", "64MiB", "--metrics-port", "-1"]
    ended = subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", "serve", *options, *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode not in (0, -9)
    assert "hbm_bytes is 67108864 on hbm_device cuda:0, but" in ended.stderr
