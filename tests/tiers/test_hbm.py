"""The HBM tier on device `cpu`: as every tier has to be, and exported to another process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, ResourceShortage, TierFault, Unavailable
from kvtier.interfaces import Mapped
from kvtier.testing.tier_tests import MakeTier, TierTests, read_all, slot_of, write_all
from kvtier.tiers import device
from kvtier.tiers.hbm import HbmTier
from kvtier.types import PAGE_SIZE_BYTES, TierKind

MIB = 1 << 20
CAP, EXTENT = 4 * MIB, MIB
TIMEOUT_S = 60.0


def make(incarnation: int = 1, **options: object) -> HbmTier:
    values = {"capacity_bytes": CAP, "extent_bytes": EXTENT, "device": "cpu"} | options
    return HbmTier(incarnation=incarnation, **values)  # type: ignore[arg-type]


class TestHbmOnCpu(TierTests):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        incarnations = iter(range(1, 100))
        return lambda: make(next(incarnations))

    async def test_it_is_what_the_node_expects(self) -> None:
        tier = make(2**32 + 7)
        assert (tier.kind, tier.arena_id, tier.allocated_bytes) == (TierKind.HBM, 7, 0)
        assert tier.traits.frees_at_once
        assert not isinstance(tier, Mapped)  # a GPU's memory has no views
        await tier.open()
        assert tier.allocated_bytes == tier.capacity_bytes == CAP
        await tier.close()
        assert tier.allocated_bytes == 0


def _read_and_answer(
    handle: bytes, offset: int, size: int, conn: multiprocessing.connection.Connection
) -> None:
    slab = device.import_slab(handle)
    found = bytearray(size)
    slab.copy_out([(offset, memoryview(found))])
    slab.copy_in([(offset, memoryview(bytes(reversed(found))))])
    conn.send_bytes(bytes(found))
    conn.recv_bytes()  # still mapped while the other side looks
    slab.close()


async def test_another_process_reads_and_writes_the_same_bytes() -> None:
    tier = make()
    await tier.open()
    slot, payload = slot_of(tier, 1, 2), random.Random(3).randbytes(PAGE_SIZE_BYTES)
    await write_all(tier, [slot], [payload])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    engine = context.Process(
        target=_read_and_answer, args=(tier.handle(), tier.offset_of(slot), len(payload), there)
    )
    engine.start()
    try:
        assert await asyncio.to_thread(here.poll, TIMEOUT_S)
        assert here.recv_bytes() == payload
        assert await read_all(tier, [slot], [payload]) == [payload[::-1]]
        here.send_bytes(b"done")
        await asyncio.to_thread(engine.join, TIMEOUT_S)
        assert engine.exitcode == 0
    finally:
        engine.kill()
        await tier.close()


async def test_memory_is_zeroed_and_goes_with_its_last_user() -> None:
    tier = make()
    before = len(os.listdir("/proc/self/fd"))
    await tier.open()
    found = bytearray(b"?" * CAP)
    tier.slab.copy_out([(0, memoryview(found))])
    assert found == bytes(CAP)
    engine = device.import_slab(tier.handle())
    handle = tier.handle()
    await tier.close()
    engine.copy_in([(0, memoryview(b"still mapped"))])  # no SIGBUS: a lease that is void harms nobody
    engine.close()
    engine.close()
    with pytest.raises(Unavailable, match="gone"):
        device.import_slab(handle)
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the loop's own, at most


async def test_a_handle_of_something_else_maps_nothing(tmp_path: Path) -> None:
    tier = make()
    await tier.open()
    fields = json.loads(tier.handle())
    file = tmp_path / "other"
    file.write_bytes(bytes(CAP))
    with file.open("r+b") as other:
        for change in ({"fd": other.fileno()}, {"inode": 1}, {"size_bytes": CAP * 2}, {"pid": 2**22}):
            with pytest.raises(Unavailable):
                device.import_slab(json.dumps(fields | change).encode())
    for garbage in (
        b"",
        b"{}",
        b"[]",
        b"\xff" * 9,
        b"7",
        b"x" * 10_000,
        json.dumps(fields | {"kind": "tpu"}).encode(),
    ):
        with pytest.raises(Unavailable):
            device.import_slab(garbage)
    await tier.close()


async def test_a_range_outside_the_slab_is_a_fault() -> None:
    tier = make()
    await tier.open()
    slab = tier.slab
    for offset, size in ((-1, 1), (CAP, 1), (CAP - 10, 11), (2**64, 1)):
        for copy in (slab.copy_in, slab.copy_out):
            with pytest.raises(TierFault):
                copy([(0, memoryview(bytearray(4))), (offset, memoryview(bytearray(size)))])
        with pytest.raises(TierFault):
            slab.zero([(offset, size)])
    await tier.close()
    with pytest.raises(TierFault):
        slab.copy_in([(0, memoryview(b"late"))])


async def test_what_a_machine_lacks_is_said() -> None:
    why = device.why_not("cuda:0")
    if not why:
        pytest.skip("there is a usable cuda:0")
    tier = make(device="cuda:0")
    with pytest.raises(ResourceShortage, match="hbm_bytes is 4194304 on hbm_device cuda:0, but") as caught:
        await tier.open()
    assert why in str(caught.value)
    assert "\n" not in why
    await tier.close()
    with pytest.raises(ResourceShortage, match="hbm_bytes"):
        await make(capacity_bytes=1 << 50).open()


@pytest.mark.parametrize("name", ["", "gpu", "cuda", "cuda:", "cuda:-1", "cuda:0 ", "CPU"])
def test_a_device_that_is_none(name: str) -> None:
    with pytest.raises(ConfigError, match="hbm_device"):
        make(device=name)


@pytest.mark.parametrize(
    "options", [{"capacity_bytes": 0}, {"capacity_bytes": EXTENT + 1}, {"extent_bytes": 100}]
)
def test_sizes_that_are_not_allowed(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        make(**options)
