"""Blocks between file slots and a slab past host memory, on device `cpu`; every way in which it may fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from kvtier.errors import TierFault, Unavailable
from kvtier.interfaces import OnFiles
from kvtier.testing.tier_tests import record_of
from kvtier.tiers import cufile, gds
from kvtier.tiers.device import CpuSlab
from kvtier.tiers.file import FileTier
from kvtier.tiers.gds import CpuMover, Gds, Op, make_mover
from tests.codecs.blocks import bfloat16
from tests.tiers.file_harness import BLOCK, Blocks, Medium, abandon, make_file_tier

MIB = 1 << 20
SLAB = 4 * MIB
STEP = 4 * 4096  # a slot in the slab

Told = dict[tuple[str, str], int]


@pytest.fixture
def slab() -> Iterator[CpuSlab]:
    slab = CpuSlab.allocate(SLAB)
    yield slab
    slab.close()


@pytest_asyncio.fixture
async def tier(tmp_path: Path) -> AsyncIterator[FileTier]:
    tier = make_file_tier(tmp_path / "a", tmp_path / "b")
    await tier.open()
    yield tier
    await tier.close()


@pytest.fixture
def told() -> Told:
    return {}


def make(tier: FileTier, slab: CpuSlab, told: Told, mover: gds.Mover | None = None, **options: object) -> Gds:
    def report(way: str, how: str, blocks: int) -> None:
        told[way, how] = told.get((way, how), 0) + blocks

    return Gds(tier, slab, mover or make_mover(slab), report, **options)  # type: ignore[arg-type]


def offsets(count: int) -> list[int]:
    """Slots of the slab, not in order."""
    return [STEP * ((7 * i) % count) for i in range(count)]


def content(slab: CpuSlab, at: int, size: int) -> bytes:
    return bytes(slab.view(at, size))


class Moody(CpuMover):
    """Does the real thing, except where it is told not to."""

    def __init__(self, slab: CpuSlab) -> None:
        super().__init__(slab)
        self.failing: set[int] = set()
        self.fault = ""
        self.refuses = False
        self.scribbles = False
        self.calls = 0
        self.slab = slab

    def add_file(self, fd: int) -> None:
        if self.refuses:
            raise Unavailable("not this file system")

    def move(self, ops: Sequence[Op], *, writing: bool) -> list[bool]:
        self.calls += 1
        if self.fault:
            raise Unavailable(self.fault)
        good = [op for i, op in enumerate(ops) if i not in self.failing]
        done = iter(super().move(good, writing=writing))
        if self.scribbles:
            for op in good:
                self.slab.view(op.slab_bytes, 1)[0] ^= 1
        return [i not in self.failing and next(done) for i in range(len(ops))]


async def test_blocks_go_straight_into_the_slab_and_back(tier: FileTier, slab: CpuSlab, told: Told) -> None:
    assert isinstance(tier, OnFiles)
    direct = make(tier, slab, told)
    blocks = await Blocks(40).write(tier)
    at = offsets(40)
    before = tier.read_bytes
    assert await direct.load(blocks.slots, blocks.records, at) == []
    assert [content(slab, where, BLOCK) for where in at] == blocks.payloads
    assert told == {("read", "direct"): 40}
    assert tier.read_bytes == before  # nothing of it passed the tier
    await tier.drop(blocks.slots)
    written = tier.written_bytes
    await direct.store(blocks.slots, blocks.records, at)
    assert tier.written_bytes - written >= 40 * (4096 + BLOCK)  # it wears the device as well
    assert told["write", "direct"] == 40
    assert await blocks.wrong(tier) == []  # headers and checksums as the tier's own
    await direct.close()
    await direct.close()


@pytest.mark.parametrize("size", [1, 240, 241, 4095, 4097, BLOCK - 1])
async def test_sizes_that_are_no_whole_pages(tier: FileTier, slab: CpuSlab, told: Told, size: int) -> None:
    direct = make(tier, slab, told)
    blocks = Blocks(3, size, seed=size)
    slots = (await Blocks(3, size).write(tier)).slots
    at = [0, STEP, 2 * STEP]
    slab.copy_in([(0, memoryview(b"\xee" * SLAB))])  # what others left there
    slab.copy_in([(where, memoryview(its)) for where, its in zip(at, blocks.payloads, strict=True)])
    await direct.store(slots, blocks.records, at)
    blocks.slots = slots
    assert await blocks.wrong(tier) == []
    for its in tier.ranges(slots, blocks.records):
        assert its is not None
        with its.path.open("rb") as file:
            file.seek(its.offset_bytes)
            page = file.read(its.size_bytes)
        assert page[size:] == bytes(its.size_bytes - size)  # and of that nothing reaches the disk
    slab.copy_in([(0, memoryview(b"\xee" * SLAB))])
    assert await direct.load(slots, blocks.records, at) == []
    assert [content(slab, where, size) for where in at] == blocks.payloads
    await direct.close()


async def test_what_was_written_directly_is_there_after_a_restart(
    tmp_path: Path, slab: CpuSlab, told: Told
) -> None:
    tier = make_file_tier(tmp_path / "t")
    await tier.open()
    direct = make(tier, slab, told)
    blocks = Blocks(20)
    slots = (await Blocks(20, seed=1).write(tier)).slots  # something else is there before
    blocks.slots = slots
    slab.copy_in([(i * STEP, memoryview(payload)) for i, payload in enumerate(blocks.payloads)])
    await direct.store(slots, blocks.records, [i * STEP for i in range(20)])
    await direct.close()
    await abandon(tier)
    tier = make_file_tier(tmp_path / "t")
    await tier.open()
    found = [pair for batch in tier.recovered() for pair in batch]
    assert sorted(found, key=lambda pair: slots.index(pair[0])) == blocks.pairs()
    assert await blocks.wrong(tier) == []
    await tier.close()


async def test_operations_that_fail_go_through_host_memory(tier: FileTier, slab: CpuSlab, told: Told) -> None:
    mover = Moody(slab)
    direct = make(tier, slab, told, mover)
    blocks = await Blocks(10).write(tier)
    mover.failing = {0, 4, 9}
    at = offsets(10)
    assert await direct.load(blocks.slots, blocks.records, at) == []
    assert [content(slab, where, BLOCK) for where in at] == blocks.payloads
    assert told == {("read", "direct"): 7, ("read", "failed"): 3}
    await tier.drop(blocks.slots)
    await direct.store(blocks.slots, blocks.records, at)
    assert await blocks.wrong(tier) == []
    assert told["write", "failed"] == 3
    await direct.close()


async def test_a_mover_that_fails_is_left_alone_for_a_while(
    tier: FileTier, slab: CpuSlab, told: Told
) -> None:
    now = [100.0]
    mover = Moody(slab)
    direct = make(tier, slab, told, mover, clock_s=lambda: now[0])
    blocks = await Blocks(4).write(tier)
    at = offsets(4)
    mover.fault = "the driver is gone"
    for _ in range(3):
        assert await direct.load(blocks.slots, blocks.records, at) == []
        assert [content(slab, where, BLOCK) for where in at] == blocks.payloads
    assert mover.calls == 1
    assert told == {("read", "failed"): 4, ("read", "paused"): 8}
    mover.fault = ""
    now[0] += gds.PAUSE_S
    assert await direct.load(blocks.slots, blocks.records, at) == []
    assert told["read", "direct"] == 4
    await direct.close()


async def test_bytes_that_came_wrong_directly_are_read_again(
    tier: FileTier, slab: CpuSlab, told: Told
) -> None:
    mover = Moody(slab)
    mover.scribbles = True
    direct = make(tier, slab, told, mover)
    blocks = await Blocks(5).write(tier)
    assert await direct.load(blocks.slots, blocks.records, offsets(5)) == []
    assert [content(slab, where, BLOCK) for where in offsets(5)] == blocks.payloads
    assert told == {("read", "mismatch"): 5}
    await direct.close()


async def test_damage_on_the_medium_is_never_a_hit(tmp_path: Path, slab: CpuSlab, told: Told) -> None:
    tier = make_file_tier(tmp_path / "t")
    await tier.open()
    direct = make(tier, slab, told)
    blocks = await Blocks(6).write(tier)
    medium = Medium(tmp_path / "t")
    medium.flip(medium.offset_of(blocks.slots[1]) + 4096 + 77)
    first, last = medium.offset_of(blocks.slots[2]), medium.offset_of(blocks.slots[5])
    medium.put(last, medium.get(first, 4096 + BLOCK))  # a whole slot under another key
    assert await direct.load(blocks.slots, blocks.records, offsets(6)) == [1, 5]
    assert told == {("read", "direct"): 4, ("read", "mismatch"): 2}
    await direct.close()
    await tier.close()


async def test_slots_that_hold_nothing_are_wrong(tier: FileTier, slab: CpuSlab, told: Told) -> None:
    direct = make(tier, slab, told)
    blocks = await Blocks(3).write(tier)
    await tier.drop(blocks.slots[1:2])
    assert tier.ranges(blocks.slots, blocks.records)[1] is None
    assert await direct.load(blocks.slots, blocks.records, offsets(3)) == [1]
    await direct.close()


async def test_payloads_of_a_codec_are_decoded_by_the_tier(tmp_path: Path, slab: CpuSlab, told: Told) -> None:
    tier = make_file_tier(tmp_path / "t", codec="zstd")
    await tier.open()
    direct = make(tier, slab, told)
    size = 60 << 10
    blocks = Blocks(3, size)
    blocks.payloads = [bfloat16(size // 2, i)[:size] for i in range(3)]
    blocks.records = [record_of(payload) for payload in blocks.payloads]
    await blocks.write(tier)
    assert tier.ranges(blocks.slots, blocks.records) == [None] * 3
    at = [0, MIB, 2 * MIB]
    assert await direct.load(blocks.slots, blocks.records, at) == []
    assert [content(slab, where, size) for where in at] == blocks.payloads
    assert told == {("read", "not raw"): 3}
    await direct.close()
    await tier.close()


async def test_a_file_that_was_replaced_or_refused_is_not_touched(
    tmp_path: Path, slab: CpuSlab, told: Told
) -> None:
    tier = make_file_tier(tmp_path / "t")
    await tier.open()
    blocks = await Blocks(4).write(tier)
    mover = Moody(slab)
    mover.refuses = True
    refusing = make(tier, slab, told, mover)
    assert await refusing.load(blocks.slots, blocks.records, offsets(4)) == []
    assert told == {("read", "refused"): 4}
    await refusing.close()
    file = tmp_path / "t" / "kvtier.slab"
    os.rename(file, tmp_path / "elsewhere")
    file.write_bytes(b"other")
    direct = make(tier, slab, told)
    await direct.store(blocks.slots, blocks.records, offsets(4))  # to what the tier has open
    assert await blocks.wrong(tier) == []
    assert told["write", "refused"] == 4
    assert file.read_bytes() == b"other"
    await direct.close()
    await tier.close()


async def test_a_quarantined_tier_is_a_fault(tier: FileTier, slab: CpuSlab, told: Told) -> None:
    direct = make(tier, slab, told)
    blocks = await Blocks(2).write(tier)
    tier._health.quarantine("it does not answer")
    with pytest.raises(TierFault, match="does not answer"):
        await direct.load(blocks.slots, blocks.records, offsets(2))
    with pytest.raises(TierFault, match="does not answer"):
        await direct.store(blocks.slots, blocks.records, offsets(2))
    assert told == {}
    tier._health.clear()
    await direct.close()


async def test_ranges_outside_the_slab_are_faults(tier: FileTier, slab: CpuSlab, told: Told) -> None:
    direct = make(tier, slab, told)
    blocks = await Blocks(2).write(tier)
    for bad in ([0, SLAB], [-4096, 0], [0, SLAB - BLOCK + 1], [0]):
        with pytest.raises(TierFault):
            await direct.load(blocks.slots, blocks.records, bad)
        with pytest.raises(TierFault):
            await direct.store(blocks.slots, blocks.records, bad)
    assert await blocks.wrong(tier) == []
    await direct.close()


async def test_a_cancelled_load_leaves_the_slab_alone(tier: FileTier, slab: CpuSlab, told: Told) -> None:
    direct = make(tier, slab, told)
    blocks = await Blocks(8).write(tier)
    for wait in range(8):
        loading = asyncio.ensure_future(direct.load(blocks.slots, blocks.records, offsets(8)))
        for _ in range(wait):
            await asyncio.sleep(0)
        loading.cancel()
        await asyncio.wait([loading])
        slab.zero([(0, SLAB)])
        await asyncio.sleep(0.002)
        assert not np.frombuffer(slab.view(0, SLAB), np.uint8).any()
    await direct.close()


def test_without_cuda_the_probe_says_why_in_one_line() -> None:
    why = cufile.why_not()
    if not why:
        pytest.skip("cuFile opens here")
    assert "\n" not in why
    assert len(why) < 300


def test_properties_say_which_mode_it_is() -> None:
    nothing = cufile.Properties((0, 0), False, False, False, 128, 0, 0)
    assert nothing.mode == "compatibility"
    assert cufile.Properties((2, 22), True, False, False, 128, 0, 0).mode == "direct"
    assert cufile.Properties((2, 22), False, False, False, 128, 0, 0).mode == "compatibility"
    assert cufile.Properties((0, 0), True, False, False, 128, 0, 0).mode == "compatibility"
    assert cufile.Properties((0, 0), False, False, True, 128, 0, 0).mode == "direct"
