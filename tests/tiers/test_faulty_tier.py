"""The tier that fails on demand does what it is told to, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvtier.errors import TierFault
from kvtier.testing.faulty_tier import FaultyTier
from kvtier.testing.tier_tests import read_all, record_of, slot_of, write_all
from kvtier.types import Slot
from tests.tiers.file_harness import make_file_tier

PAYLOADS = [b"one" * 1000, b"two" * 1000]


@pytest_asyncio.fixture
async def tier(tmp_path: Path) -> AsyncIterator[FaultyTier]:
    tier = FaultyTier(make_file_tier(tmp_path / "tier"))
    await tier.open()
    await write_all(tier, slots_of(tier), PAYLOADS)
    yield tier
    await tier.close()


def slots_of(tier: FaultyTier) -> list[Slot]:
    return [slot_of(tier, 0, index) for index in range(2)]


async def test_failures_are_counted(tier: FaultyTier) -> None:
    tier.fail("read", 2)
    for _ in range(2):
        with pytest.raises(TierFault, match="told to"):
            await read_all(tier, slots_of(tier), PAYLOADS)
    assert await read_all(tier, slots_of(tier), PAYLOADS) == PAYLOADS
    assert tier.begun["read"] == 3


async def test_a_stopped_read_is_late_and_cannot_be_cancelled(tier: FaultyTier) -> None:
    tier.stop("read")
    buffer = bytearray(3000)
    slot = slots_of(tier)[0]
    reading = asyncio.create_task(tier.read([slot], [record_of(PAYLOADS[0])], [memoryview(buffer)]))
    other = asyncio.create_task(tier.read([slot], [record_of(PAYLOADS[0])], [memoryview(bytearray(3000))]))
    await asyncio.sleep(0.01)
    other.cancel()
    await asyncio.sleep(0.01)
    assert tier.stopped == 2
    assert buffer == bytes(3000)
    assert not await tier.probe()
    tier.go()
    assert await reading == []
    assert buffer == PAYLOADS[0]
    with pytest.raises(asyncio.CancelledError):
        await other
    assert tier.stopped == 0


async def test_spoiled_slots_are_wrong_until_they_are_written(tier: FaultyTier) -> None:
    tier.spoil(slots_of(tier)[1:])
    assert await read_all(tier, slots_of(tier), PAYLOADS) == [PAYLOADS[0], None]
    await write_all(tier, slots_of(tier), PAYLOADS)
    assert await read_all(tier, slots_of(tier), PAYLOADS) == PAYLOADS


async def test_a_quarantine_ends_with_a_probe(tier: FaultyTier) -> None:
    tier.quarantine("the device is gone")
    assert tier.fault == "the device is gone"
    for use in (
        read_all(tier, slots_of(tier), PAYLOADS),
        write_all(tier, slots_of(tier), PAYLOADS),
        tier.drop(slots_of(tier)),
        tier.checkpoint(),
    ):
        with pytest.raises(TierFault, match="is gone"):
            await use
    tier.fail("probe")
    assert not await tier.probe()
    assert await tier.probe()
    assert tier.fault == ""
    assert await read_all(tier, slots_of(tier), PAYLOADS) == PAYLOADS
