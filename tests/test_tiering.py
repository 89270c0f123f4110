"""Demotes and fetches of a node: real arena, real file tier, faults in between."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from kvtier import tiering as tiering_module
from kvtier.batching import FIRST_BATCH_BLOCKS
from kvtier.config import Config
from kvtier.core import messages as m
from kvtier.hashing import Hasher
from kvtier.interfaces import Tier
from kvtier.metrics import Metrics
from kvtier.testing.faulty_tier import FaultyTier
from kvtier.testing.tier_tests import record_of
from kvtier.tiering import CANCELLED, CORRUPT, DEMOTES_AT_ONCE, FAILED, Tiering
from kvtier.tiers.arena import Arena
from kvtier.tiers.far import FarMemory
from kvtier.tiers.file import FileTier
from kvtier.types import PAGE_SIZE_BYTES, BlockRecord, Slot, TierKind
from tests.server.conftest import shm  # noqa: F401

NODE = "a1" * 16
EXTENT = 1 << 20
BLOCK = 32 << 10
COUNT = 3 * FIRST_BATCH_BLOCKS
NVME = TierKind.NVME
DEADLINE_S = 30.0


async def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        await asyncio.sleep(0.005)


class Rig:
    """A tiering with what it works on; `events` is what the core would have been told."""

    def __init__(self, arena: Arena, medium: FileTier, config: Config) -> None:
        self.arena = arena
        self.medium = medium
        self.tier = FaultyTier(medium)
        self.hasher = Hasher({arena.kind: arena})
        self.events: list[m.Event] = []
        self.tiering = Tiering(arena, {NVME: self.tier}, self.hasher, config, Metrics(), self.events.append)
        self.tasks = [asyncio.create_task(work) for work in self.tiering.background()]
        self.payloads = [random.Random(i).randbytes(BLOCK) for i in range(COUNT)]
        self.records = [record_of(payload) for payload in self.payloads]

    def up(self, index: int) -> Slot:
        """A slot of the arena."""
        return Slot(self.arena.arena_id, 0, index * BLOCK, BLOCK)

    def down(self, index: int) -> Slot:
        """A slot of the file tier."""
        size = BLOCK + PAGE_SIZE_BYTES
        return Slot(0, 0, index * size, size)

    def fill(self) -> None:
        """Put the blocks into the first slots of the arena."""
        for index, payload in enumerate(self.payloads):
            self.arena.view(self.up(index))[:BLOCK] = payload

    async def demote(self, indices: Sequence[int] = range(COUNT)) -> m.Demoted:
        self.events.clear()
        self.tiering.demote(
            m.Demote(
                7,
                TierKind.DRAM,
                [self.up(i) for i in indices],
                NVME,
                [self.down(i) for i in indices],
                [self.records[i] for i in indices],
            )
        )
        await until(lambda: self.told(m.Demoted), "the demote ends")
        (demoted,) = self.told(m.Demoted)
        assert isinstance(demoted, m.Demoted)
        return demoted

    def fetch(self, timeout_s: float = DEADLINE_S) -> asyncio.Task[None]:
        """Into the slots of the arena behind those that `fill` uses."""
        self.events.clear()
        fetch = m.Fetch(
            9,
            NVME,
            [self.down(i) for i in range(COUNT)],
            self.records,
            [self.up(COUNT + i) for i in range(COUNT)],
            timeout_s,
        )
        return asyncio.create_task(self.tiering.fetch(fetch))

    def told(self, kind: type) -> list[m.Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def arrived(self) -> int:
        """How many blocks have arrived; their bytes are right."""
        checksums = [c for event in self.events if isinstance(event, m.Arrived) for c in event.checksums]
        assert checksums == [record.checksum for record in self.records[: len(checksums)]]
        for index in range(len(checksums)):
            assert self.arena.view(self.up(COUNT + index)) == self.payloads[index]
        return len(checksums)

    def end(self) -> m.PullEnded:
        (ended,) = self.told(m.PullEnded)
        assert isinstance(ended, m.PullEnded)
        assert self.events[-1] is ended
        return ended

    async def close(self) -> None:
        self.tier.go()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.hasher.close()
        await self.medium.close()
        await self.arena.close()


def file_tier(directory: Path) -> FileTier:
    return FileTier(
        node_id=NODE, paths=[directory], capacity_bytes=8 << 20, extent_bytes=EXTENT, keep_free_bytes=0
    )


@pytest_asyncio.fixture
async def rig(
    tmp_path: Path,
    shm: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Rig]:
    monkeypatch.setattr(tiering_module, "PROBE_S", 0.02)
    arena = Arena(
        node_id=NODE,
        incarnation=1,
        capacity_bytes=2 * EXTENT,
        extent_bytes=EXTENT,
        shm_dir=shm,
        old_arena_deadline_s=1.0,
    )
    await arena.open()
    medium = file_tier(tmp_path / "nvme")
    await medium.open()
    assert list(medium.recovered()) == []
    config = Config(data_dir=tmp_path, run_dir=tmp_path, pull_batch_bytes=1 << 20, demote_bytes_per_s=0)
    rig = Rig(arena, medium, config)
    yield rig
    await rig.close()


async def test_down_and_up_again(rig: Rig) -> None:
    rig.fill()
    assert await rig.demote() == m.Demoted(7, list(range(COUNT)), [])
    await rig.fetch()
    assert rig.arrived() == COUNT
    assert rig.end() == m.PullEnded(9)
    assert len(rig.told(m.Arrived)) == 2, "a small batch, and one twice as large"


async def test_what_is_wrong_above_does_not_go_down(rig: Rig) -> None:
    rig.fill()
    rig.arena.view(rig.up(2))[100] ^= 1
    assert await rig.demote() == m.Demoted(7, [0, 1, *range(3, COUNT)], [2])
    await rig.fetch()
    assert rig.arrived() == 2
    assert rig.end() == m.PullEnded(9, CORRUPT, [rig.records[2].block.key])


async def test_what_is_wrong_below_does_not_come_up(rig: Rig) -> None:
    rig.fill()
    await rig.demote()
    last = FIRST_BATCH_BLOCKS + 1
    rig.tier.spoil([rig.down(last)])
    await rig.fetch()
    assert rig.arrived() == last
    assert rig.end() == m.PullEnded(9, CORRUPT, [rig.records[last].block.key])


async def test_a_medium_that_fails_once(rig: Rig) -> None:
    rig.fill()
    rig.tier.fail("write")
    assert await rig.demote() == m.Demoted(7, (), [], FAILED)
    assert await rig.demote() == m.Demoted(7, list(range(COUNT)), [])
    rig.tier.fail("read", 2)
    await rig.fetch()
    assert (rig.arrived(), rig.end().fault) == (0, FAILED)
    await rig.fetch()
    assert (rig.arrived(), rig.end().fault) == (COUNT, "")
    assert not rig.told(m.TierDown)


async def test_a_medium_that_is_gone_and_comes_back(rig: Rig) -> None:
    rig.fill()
    await rig.demote()
    rig.tier.stop("probe")
    rig.tier.quarantine("the cable was pulled")
    await rig.fetch()
    assert rig.arrived() == 0
    assert rig.end().fault == FAILED
    assert [event for event in rig.events if not isinstance(event, m.PullEnded)] == [m.TierDown(NVME)]
    rig.tier.go("probe")
    await until(lambda: rig.told(m.TierUp), "the tier is back")
    await rig.fetch()
    assert rig.arrived() == COUNT


async def test_a_medium_that_nobody_uses_is_watched_too(rig: Rig) -> None:
    rig.tier.stop("probe")
    rig.tier.quarantine("the cable was pulled")
    await until(lambda: rig.told(m.TierDown), "it is noticed")
    rig.tier.go("probe")
    await until(lambda: rig.told(m.TierUp), "the tier is back")
    assert rig.events == [m.TierDown(NVME), m.TierUp(NVME)]


async def test_a_late_fetch_is_overdue_once_and_holds_its_slots_until_it_ends(rig: Rig) -> None:
    rig.fill()
    await rig.demote()
    rig.tier.stop("read")
    task = rig.fetch(timeout_s=0.05)
    await until(lambda: rig.told(m.Overdue), "it is overdue")
    await asyncio.sleep(0.1)
    assert rig.events == [m.Overdue(9)], "the medium may still write the slots"
    rig.tier.go("read")
    await task
    assert rig.events == [m.Overdue(9), m.PullEnded(9)]


async def test_a_cancelled_fetch_ends_when_the_medium_lets_go(rig: Rig) -> None:
    rig.fill()
    await rig.demote()
    rig.tier.stop("read")
    task = rig.fetch()
    await until(lambda: rig.tier.stopped == 2, "two batches are in flight")
    task.cancel()
    await asyncio.sleep(0.05)
    assert not rig.events
    rig.tier.go("read")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.events == [m.PullEnded(9, CANCELLED)]


async def test_demotes_wait_for_fetches_but_not_for_ever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.fill()
    await rig.demote(range(2))
    rig.tier.stop("read")
    task = rig.fetch()
    await until(lambda: rig.tier.stopped, "the fetch runs")
    written = rig.tier.begun["write"]
    rig.tiering.demote(m.Demote(8, TierKind.DRAM, [rig.up(2)], NVME, [rig.down(2)], [rig.records[2]]))
    await asyncio.sleep(0.05)
    assert rig.tier.begun["write"] == written
    await until(lambda: rig.told(m.Demoted), "the fetch hangs, and the demote goes all the same")
    assert not task.done()
    rig.tier.go("read")
    await task


def for_a_peer(rig: Rig, timeout_s: float) -> m.Fetch:
    slots = [Slot(rig.arena.arena_id, 1, EXTENT + i * BLOCK, BLOCK) for i in range(COUNT)]
    return m.Fetch(10, NVME, [rig.down(i) for i in range(COUNT)], rig.records, slots, timeout_s, yields=True)


async def test_a_fetch_for_a_peer_lets_those_for_engines_go_first(rig: Rig) -> None:
    rig.fill()
    await rig.demote()
    rig.tier.stop("read")
    task = rig.fetch()
    await until(lambda: rig.tier.stopped, "the fetch runs")
    await asyncio.sleep(0.05)
    begun = rig.tier.begun["read"]
    lent = asyncio.create_task(rig.tiering.fetch(for_a_peer(rig, DEADLINE_S)))
    await asyncio.sleep(0.05)
    assert rig.tier.begun["read"] == begun, "it waits"
    rig.tier.go("read")
    await task
    await lent
    brought = [
        len(event.checksums) for event in rig.events if isinstance(event, m.Arrived) and event.pull == 10
    ]
    assert sum(brought) == COUNT
    assert [end.pull for end in rig.told(m.PullEnded)] == [9, 10]  # type: ignore[attr-defined]
    for index, payload in enumerate(rig.payloads):
        assert rig.arena.view(for_a_peer(rig, 0).slots[index]) == payload


async def test_a_fetch_for_a_peer_that_waits_too_long_is_over(rig: Rig) -> None:
    rig.fill()
    await rig.demote()
    rig.tier.stop("read")
    task = rig.fetch()
    await until(lambda: rig.tier.stopped, "the fetch runs")
    begun = rig.tier.begun["read"]
    await asyncio.wait_for(rig.tiering.fetch(for_a_peer(rig, 0.05)), DEADLINE_S)
    assert [event.pull for event in rig.told(m.Overdue)] == [10]  # type: ignore[attr-defined]
    assert rig.end().pull == 10
    assert rig.tier.begun["read"] - begun <= 1
    rig.tier.go("read")
    await task


async def test_an_earlier_life_is_told_before_anything_else(rig: Rig, tmp_path: Path) -> None:
    rig.fill()
    await rig.demote()
    await rig.medium.close()
    again = file_tier(tmp_path / "nvme")
    await again.open()
    events: list[m.Event] = []
    config = Config(data_dir=tmp_path, run_dir=tmp_path)
    try:
        await Tiering(rig.arena, {NVME: again}, rig.hasher, config, Metrics(), events.append).recover()
    finally:
        await again.close()
    found: list[tuple[Slot, BlockRecord]] = []
    for event in events:
        assert isinstance(event, m.Recovered)
        found += event.blocks
    assert [event.is_last for event in events if isinstance(event, m.Recovered)][-1:] == [True]
    assert {(slot.offset_bytes, record) for slot, record in found} == {
        (rig.down(i).offset_bytes, record) for i, record in enumerate(rig.records)
    }


async def test_a_chain_of_three_and_a_disk_that_hangs_holds_up_no_other_tier(
    rig: Rig, tmp_path: Path
) -> None:
    far = FarMemory([(None, EXTENT)], extent_bytes=EXTENT)
    await far.open()
    events: list[m.Event] = []
    below: dict[TierKind, Tier] = {far.kind: far, NVME: rig.tier}
    config = Config(data_dir=tmp_path, run_dir=tmp_path, pull_batch_bytes=1 << 20, demote_bytes_per_s=0)
    tiering = Tiering(rig.arena, below, rig.hasher, config, Metrics(), events.append)
    tasks = [asyncio.create_task(work) for work in tiering.background()]
    middle = [Slot(0, 0, i * BLOCK, BLOCK) for i in range(COUNT)]
    upper, lower = [rig.up(i) for i in range(COUNT)], [rig.down(i) for i in range(COUNT)]

    async def end(*ids: int) -> list[m.Demoted]:
        await until(
            lambda: {its.demote for its in events if isinstance(its, m.Demoted)} >= set(ids), "they end"
        )
        return [its for its in events if isinstance(its, m.Demoted) and its.demote in ids]

    try:
        rig.fill()
        tiering.demote(m.Demote(1, TierKind.DRAM, upper, TierKind.FAR, middle, rig.records))
        assert await end(1) == [m.Demoted(1, list(range(COUNT)), [])]
        for index in range(COUNT):
            rig.arena.view(rig.up(index))[:] = bytes(BLOCK)
        far.view(middle[3])[7] ^= 1
        rig.tier.stop("write")
        for number in range(2, 2 + 2 * DEMOTES_AT_ONCE):
            at = slice(number + 2, number + 3)  # each a block of its own
            tiering.demote(m.Demote(number, TierKind.FAR, middle[at], NVME, lower[at], rig.records[at]))
        await until(lambda: rig.tier.stopped, "the disk hangs")
        rig.arena.view(rig.up(0))[:BLOCK] = rig.payloads[0]
        tiering.demote(m.Demote(20, TierKind.DRAM, upper[:1], TierKind.FAR, middle[:1], rig.records[:1]))
        await end(20)
        rig.tier.go("write")
        await end(*range(2, 2 + 2 * DEMOTES_AT_ONCE))
        tiering.demote(m.Demote(30, TierKind.FAR, middle, NVME, lower, rig.records))
        good = [i for i in range(COUNT) if i != 3]
        assert await end(30) == [m.Demoted(30, good, [3])], "wrong bytes go nowhere"
        rig.events = events
        slots = [rig.up(COUNT + i) for i in range(COUNT)]
        for kind, sources in ((TierKind.FAR, middle), (NVME, lower)):
            events.clear()
            await tiering.fetch(m.Fetch(9, kind, sources, rig.records, slots, DEADLINE_S))
            assert rig.arrived() == 3
            assert rig.end() == m.PullEnded(9, CORRUPT, [rig.records[3].block.key])
    finally:
        rig.tier.go()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await far.close()
