"""Pulls with real NIXL between real processes, and streams where it fails."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvtier.batching import FIRST_BATCH_BLOCKS
from kvtier.core import messages as m
from kvtier.remote import pulls
from kvtier.transfer.nixl import NixlTransfer
from kvtier.types import NodeRecord
from tests.remote.peering import (
    BLOCK_BYTES,
    DEADLINE_S,
    OWNER_ID,
    Asker,
    Owner,
    OwnerProcess,
    chain,
    config,
    content,
    real_transfers,
    shared_memory,
    until,
)

pytestmark = pytest.mark.slow
COUNT = 200
KEYS = chain(5, COUNT)


@pytest.fixture
def shm() -> Iterator[Path]:
    with shared_memory() as path:
        yield path


@pytest.fixture
def process(tmp_path: Path, shm: Path) -> Iterator[OwnerProcess]:
    process = OwnerProcess(tmp_path / "process", shm, 5, COUNT, has_nixl=True)
    yield process
    process.end()


@pytest.fixture
async def owner(tmp_path: Path, shm: Path) -> AsyncIterator[Owner]:
    owner = await Owner(config(tmp_path / "owner", shm), transfers=real_transfers()).start()
    await owner.store(KEYS)
    yield owner
    await owner.stop()


@pytest.fixture
async def asker(tmp_path: Path, shm: Path) -> AsyncIterator[Asker]:
    settings = config(tmp_path / "asker", shm)
    asker = await Asker(settings, lambda stream: [NixlTransfer("127.0.0.1"), stream]).start()
    yield asker
    await asker.stop()


def pulled_bytes(asker: Asker, transfer: str) -> float:
    return asker.metrics.registry.get_sample_value("kvtier_pulled_bytes_total", {"transfer": transfer}) or 0.0


def agent_pid(transfer: object) -> int:
    assert isinstance(transfer, NixlTransfer)
    assert transfer._agent is not None
    return transfer._agent.pid


async def test_every_byte_comes_by_nixl(process: OwnerProcess, asker: Asker) -> None:
    asker.peers.update([process.record])
    for _ in range(3):
        assert await asker.pull(process.record, KEYS) == (COUNT, "")
    results = await asyncio.gather(*(asker.pull(process.record, KEYS[:9]) for _ in range(8)))
    assert results == [(9, "")] * 8
    assert pulled_bytes(asker, "nixl") == (3 * COUNT + 8 * 9) * BLOCK_BYTES
    assert pulled_bytes(asker, "stream") == 0


async def test_an_owner_whose_agent_began_anew(owner: Owner, asker: Asker) -> None:
    """What was said in the first hello is stale: it is said again, or the bytes come as a stream."""
    asker.peers.update([owner.record()])
    assert await asker.pull(owner.record(), KEYS) == (COUNT, "")
    nixl = owner.transfers[0]
    old = agent_pid(nixl)
    os.kill(old, signal.SIGKILL)
    # Its memory is still mapped here: UCX may notice only after the first batches, which then are right.
    arrived, fault = await asker.pull(owner.record(), KEYS)
    assert (arrived, fault) == (COUNT, "") or (0 < arrived < COUNT and fault == "transfer")
    end_s = time.monotonic() + DEADLINE_S
    while (arrived, fault) != (COUNT, ""):
        assert time.monotonic() < end_s, "the owner was never used again"
        await asyncio.sleep(0.1)
        arrived, fault = await asker.pull(owner.record(), KEYS)
    assert asker.counted("whole") == 2
    await until(lambda: nixl.metadata() and agent_pid(nixl) != old, "another agent took over")
    link = asker.peers.get(OWNER_ID)
    assert link is not None
    link._penalties.clear()  # as if the while were over
    before = pulled_bytes(asker, "nixl")
    await until_nixl(asker, owner.record(), before)


async def until_nixl(asker: Asker, record: NodeRecord, before: float) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while pulled_bytes(asker, "nixl") == before:
        assert time.monotonic() < end_s, "NIXL was never used again"
        assert await asker.pull(record, KEYS) == (COUNT, "")
        link = asker.peers.get(record.node)
        assert link is not None
        link._penalties.clear()
        await asyncio.sleep(0.1)


async def test_the_own_agent_dies(owner: Owner, asker: Asker) -> None:
    asker.peers.update([owner.record()])
    assert await asker.pull(owner.record(), KEYS) == (COUNT, "")
    os.kill(agent_pid(asker.transfers[0]), signal.SIGKILL)
    assert await asker.pull(owner.record(), KEYS) == (COUNT, "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_owner_is_killed_or_stopped_in_the_middle(
    process: OwnerProcess, asker: Asker, number: signal.Signals
) -> None:
    """Its daemon, not its agent: what has arrived by then is right, and nothing else is visible."""
    asker.peers.update([process.record])
    assert await asker.pull(process.record, KEYS) == (COUNT, "")
    for position in range(COUNT):
        asker.arena.view(asker.slot(position))[:BLOCK_BYTES] = bytes(BLOCK_BYTES)
    arrived = 0
    ends: list[str] = []

    def report(event: m.Arrived | m.PullEnded) -> None:
        nonlocal arrived
        if isinstance(event, m.PullEnded):
            ends.append(event.fault)
            return
        for _ in event.checksums:
            assert asker.bytes_at(arrived) == content(KEYS[arrived])
            arrived += 1
        if not ends and arrived == len(event.checksums):  # the first batch
            process.signal(number)

    await asker.puller.run(asker.pull_of(process.record, KEYS, timeout_s=3.0), report)
    assert len(ends) == 1
    assert arrived in (*range(FIRST_BATCH_BLOCKS, COUNT), COUNT)
    if arrived < COUNT:
        assert ends[0] in {pulls.TRANSFER, pulls.TIMEOUT}
    pull_after = await asker.pull(process.record, KEYS, timeout_s=1.0)
    assert pull_after[0] == 0, "no lease can be had"
    assert pull_after[1] in {pulls.TIMEOUT, pulls.UNREACHABLE, pulls.FAILING}


async def test_cancelled_in_the_middle(process: OwnerProcess, asker: Asker) -> None:
    asker.peers.update([process.record])
    assert await asker.pull(process.record, KEYS) == (COUNT, "")
    for tenths_ms in range(0, 150, 15):
        events: list[m.Arrived | m.PullEnded] = []
        task = asyncio.create_task(asker.puller.run(asker.pull_of(process.record, KEYS), events.append))
        await asyncio.sleep(0)
        await asyncio.sleep(tenths_ms / 10_000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [type(event) for event in events].count(m.PullEnded) == 1
        assert isinstance(events[-1], m.PullEnded)
    assert await asker.pull(process.record, KEYS) == (COUNT, "")
