"""The HBM tier, checksums and cuFile on a real CUDA device; skipped, with the probed reason, without one."""

from __future__ import annotations

import multiprocessing
import random
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from kvtier.errors import ResourceShortage, Unavailable
from kvtier.testing.tier_tests import MakeTier, TierTests, slot_of, write_all
from kvtier.tiers import cufile, device
from kvtier.tiers.device_hash import digests
from kvtier.tiers.gds import Gds, make_mover
from kvtier.tiers.hbm import HbmTier
from kvtier.types import PAGE_SIZE_BYTES
from tests.tiers.file_harness import BLOCK, Blocks, make_file_tier

DEVICE = "cuda:0"
MIB = 1 << 20
TIMEOUT_S = 60.0
WHY_NOT = device.why_not(DEVICE)
WHY_NO_GDS = WHY_NOT or cufile.why_not()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is one")]


def make(incarnation: int = 1, capacity_bytes: int = 4 * MIB) -> HbmTier:
    return HbmTier(incarnation=incarnation, capacity_bytes=capacity_bytes, extent_bytes=MIB, device=DEVICE)


class TestHbmOnCuda(TierTests):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        incarnations = iter(range(1, 100))
        return lambda: make(next(incarnations))


def _read_and_answer(handle: bytes, offset: int, size: int, conn: Connection) -> None:
    slab = device.import_slab(handle)
    found = bytearray(size)
    slab.copy_out([(offset, memoryview(found))])
    slab.copy_in([(offset, memoryview(bytes(reversed(found))))])
    conn.send_bytes(bytes(found))
    conn.recv_bytes()
    slab.close()


async def test_another_process_maps_the_slab_by_ipc() -> None:
    tier = make()
    await tier.open()
    slot, payload = slot_of(tier, 1, 2), random.Random(3).randbytes(PAGE_SIZE_BYTES)
    await write_all(tier, [slot], [payload])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    args = (tier.handle(), tier.offset_of(slot), len(payload), there)
    engine = context.Process(target=_read_and_answer, args=args)
    engine.start()
    try:
        assert here.poll(TIMEOUT_S), "the other process does not answer"
        assert here.recv_bytes() == payload
        back = bytearray(len(payload))
        tier.slab.copy_out([(tier.offset_of(slot), memoryview(back))])
        assert back == payload[::-1]
        here.send_bytes(b"done")
        engine.join(TIMEOUT_S)
        assert engine.exitcode == 0
    finally:
        engine.kill()
        await tier.close()


async def test_too_much_memory_is_refused_and_leaves_the_device_usable() -> None:
    with pytest.raises(ResourceShortage, match="hbm_bytes"):
        await make(capacity_bytes=1 << 50).open()
    tier = make()
    await tier.open()
    await tier.close()


def test_a_handle_of_another_device_maps_nothing() -> None:
    slab = device.allocate(DEVICE, MIB)
    handle = slab.handle()
    with pytest.raises(Unavailable):
        device.import_slab(handle.replace(b'"ipc": "', b'"ipc": "00'))
    slab.close()


@pytest.mark.parametrize("size", [241, 1025, 24 << 10, 720 << 10, MIB])
def test_checksums_on_the_device(size: int) -> None:
    memory = np.random.default_rng(5).integers(0, 256, 4 * MIB, np.uint8)
    offsets = [0, 4096, 2 * MIB]
    expected = [xxhash.xxh3_128_digest(memory[at : at + size]) for at in offsets]
    assert digests(torch.from_numpy(memory).to(DEVICE), offsets, size) == expected


@pytest.mark.skipif(bool(WHY_NO_GDS), reason=WHY_NO_GDS or "cuFile opens")
async def test_cufile_moves_blocks_both_ways(tmp_path: Path) -> None:
    told: dict[tuple[str, str], int] = {}

    def report(way: str, how: str, blocks: int) -> None:
        told[way, how] = told.get((way, how), 0) + blocks

    slab = device.allocate(DEVICE, 4 * MIB)
    tier = make_file_tier(tmp_path / "t")
    await tier.open()
    direct = Gds(tier, slab, make_mover(slab), report)
    blocks = await Blocks(20).write(tier)
    offsets = [i * 4 * 4096 for i in range(20)]
    assert await direct.load(blocks.slots, blocks.records, offsets) == []
    for at, payload in zip(offsets, blocks.payloads, strict=True):
        back = bytearray(BLOCK)
        slab.copy_out([(at, memoryview(back))])
        assert back == payload
    await tier.drop(blocks.slots)
    await direct.store(blocks.slots, blocks.records, offsets)
    assert await blocks.wrong(tier) == []
    assert direct.mode in ("direct", "compatibility")
    # A file system that cuFile does not take is a fallback, not a failure; then nothing of cuFile was tested.
    if ("read", "refused") in told:
        pytest.skip(f"cuFile refuses files in {tmp_path}")
    assert told == {("read", "direct"): 20, ("write", "direct"): 20}
    await direct.close()
    await tier.close()
    slab.close()
