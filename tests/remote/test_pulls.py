"""Pulls from a real owner over real gRPC, and everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.batching import FIRST_BATCH_BLOCKS, batches
from kvtier.core import messages as m
from kvtier.errors import TransferFault
from kvtier.remote import pulls
from kvtier.server import peer_wire
from kvtier.types import Key, NodeRecord
from kvtier.v1 import peer_pb2 as pb
from tests.remote.peering import (
    BLOCK_BYTES,
    DEADLINE_S,
    FINGERPRINT,
    LAYOUT,
    OWNER_ID,
    Asker,
    Bent,
    Owner,
    OwnerProcess,
    Proxy,
    chain,
    config,
    free_port,
    offer,
    raw_server,
    shared_memory,
    until,
)

KEYS = chain(1, 40)
SHORT_S = 1.0
"""Of pulls that have to run into their end; nothing else waits for it."""


@pytest.fixture
def shm() -> Iterator[Path]:
    with shared_memory() as path:
        yield path


@pytest.fixture
async def make_owner(tmp_path: Path, shm: Path) -> AsyncIterator[Callable[..., Awaitable[Owner]]]:
    made: list[Owner] = []

    async def make(incarnation: int = 7, transfers: Sequence[Bent] = (), **values: Any) -> Owner:
        settings = config(tmp_path / f"owner{len(made)}", shm, **values)
        made.append(await Owner(settings, incarnation, transfers=transfers).start())
        return made[-1]

    yield make
    for owner in made:
        await owner.stop()


@pytest.fixture
async def owner(make_owner: Callable[..., Awaitable[Owner]]) -> Owner:
    owner = await make_owner()
    await owner.store(KEYS)
    return owner


@pytest.fixture
async def make_asker(tmp_path: Path, shm: Path) -> AsyncIterator[Callable[..., Awaitable[Asker]]]:
    made: list[Asker] = []

    async def make(**values: Any) -> Asker:
        bend = values.pop("bend", lambda transfer: [transfer])
        clock = values.pop("clock", time.monotonic)
        made.append(await Asker(config(tmp_path / "asker", shm, **values), bend, clock).start())
        return made[-1]

    yield make
    for asker in made:
        await asker.stop()


@pytest.fixture
async def bent(make_asker: Callable[..., Awaitable[Asker]]) -> tuple[Asker, Bent]:
    """An asker whose only transfer does what the test says."""
    made: list[Bent] = []

    def bend(transfer: Any) -> list[Bent]:
        made.append(Bent(transfer))
        return made

    return await make_asker(bend=bend), made[0]


@pytest.fixture
async def asker(make_asker: Callable[..., Awaitable[Asker]]) -> Asker:
    return await make_asker()


def knows(asker: Asker, *owners: Owner, **values: Any) -> None:
    asker.peers.update([owner.record(**values) for owner in owners])


async def all_given_back(owner: Owner) -> None:
    await until(lambda: owner.leases == 0, "the lease is given back")


async def pull_until_whole(asker: Asker, record: NodeRecord, keys: Sequence[Key]) -> None:
    """As lookups do, one after the other, whatever becomes of them."""
    end_s = time.monotonic() + DEADLINE_S
    while await asker.pull(record, keys) != (len(keys), ""):
        assert time.monotonic() < end_s, "the peer was never used again"
        await asyncio.sleep(0.02)


# ---- what should happen


async def test_whole(owner: Owner, asker: Asker) -> None:
    knows(asker, owner)
    assert await asker.pull(owner.record(), KEYS) == (len(KEYS), "")
    assert asker.counted("whole") == 1
    value = asker.metrics.registry.get_sample_value
    assert value("kvtier_pulled_bytes_total", {"transfer": "stream"}) == len(KEYS) * BLOCK_BYTES
    assert value("kvtier_verified_bytes_total", {"where": "pull"}) == len(KEYS) * BLOCK_BYTES
    assert value("kvtier_transfers_running", {"transfer": "stream"}) == 0
    await all_given_back(owner)
    link = asker.peers.get(OWNER_ID)
    assert link is not None
    assert link.is_reached
    assert link.last_error == ""


async def test_what_the_peer_does_not_have_is_no_fault(owner: Owner, asker: Asker) -> None:
    knows(asker, owner)
    some = KEYS[:10] + chain(99, 10)
    assert await asker.pull(owner.record(), some) == (10, "")
    assert await asker.pull(owner.record(), chain(98, 5)) == (0, "")
    assert await asker.pull(owner.record(), KEYS, fingerprint=bytes(32)) == (0, "")
    assert asker.counted("part", pulls.MISSING) == 1
    assert asker.counted("none", pulls.MISSING) == 2
    await all_given_back(owner)


async def test_the_first_blocks_are_there_while_later_ones_travel(
    owner: Owner, bent: tuple[Asker, Bent]
) -> None:
    asker, transfer = bent
    knows(asker, owner)
    transfer.gate, transfer.gate_after = asyncio.Event(), 1
    arrived = 0

    def report(event: m.Arrived | m.PullEnded) -> None:
        nonlocal arrived
        if isinstance(event, m.Arrived):
            arrived += len(event.checksums)

    task = asyncio.create_task(asker.puller.run(asker.pull_of(owner.record(), KEYS), report))
    await until(lambda: arrived, "the first batch arrived")
    assert arrived == FIRST_BATCH_BLOCKS
    await until(lambda: transfer.running == pulls.BATCHES_IN_FLIGHT, "two batches are in flight")
    transfer.gate.set()
    await task
    assert arrived == len(KEYS)
    assert transfer.most_running == pulls.BATCHES_IN_FLIGHT
    assert transfer.sizes == [4, 8, 16, 12]


async def test_many_at_once(owner: Owner, asker: Asker) -> None:
    knows(asker, owner)
    results = await asyncio.gather(*(asker.pull(owner.record(), KEYS[: 5 + i]) for i in range(20)))
    assert results == [(5 + i, "") for i in range(20)]
    await all_given_back(owner)


def test_batches() -> None:
    assert batches(0, 100, 1000) == []
    assert batches(3, 100, 1000) == [slice(0, 3)]
    assert batches(40, 100, 1000) == [slice(0, 4), slice(4, 12), slice(12, 22), slice(22, 32), slice(32, 40)]
    assert batches(3, 1000, 100) == [slice(0, 1), slice(1, 2), slice(2, 3)]


# ---- wrong bytes


async def test_a_wrong_block_ends_the_pull_and_the_owner_checks_it(
    owner: Owner, bent: tuple[Asker, Bent]
) -> None:
    asker, transfer = bent
    knows(asker, owner)

    def spoil(number: int, into: Sequence[int]) -> None:
        if number == 1:
            assert transfer.memory is not None
            transfer.memory[into[2]] ^= 1

    transfer.spoil = spoil
    assert await asker.pull(owner.record(), KEYS) == (4 + 2, pulls.CORRUPT)
    assert asker.counted("part", pulls.CORRUPT) == 1
    value = asker.metrics.registry.get_sample_value
    assert value("kvtier_checksum_mismatches_total", {"where": "pull"}) == 1
    await all_given_back(owner)
    assert owner.metrics.registry.get_sample_value("kvtier_verified_bytes_total", {"where": "background"})
    assert len(owner.node.places(KEYS)) == len(KEYS), "the owner found its own bytes right"


async def test_bytes_that_are_wrong_at_the_owner_are_gone_there_afterwards(
    owner: Owner, asker: Asker
) -> None:
    knows(asker, owner)
    owner.arena.view(owner.slot(KEYS[20]))[77] ^= 0x10
    assert await asker.pull(owner.record(), KEYS) == (20, pulls.CORRUPT)
    await until(lambda: not owner.node.places(KEYS[20:21]), "the owner dropped the block")


async def test_a_peer_that_promises_and_never_brings(
    owner: Owner, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again a bounded number of times, within the pull's own time."""
    knows(asker, owner)
    asked: list[int] = []

    def promise(reply: m.Leased, arena: int) -> pb.AcquireResponse:
        asked.append(len(reply.slots))
        return pb.AcquireResponse(
            lease_id=reply.lease, arena_id=arena, lease_ttl_s=reply.lease_ttl_s, coming=len(reply.slots)
        )

    monkeypatch.setattr(peer_wire, "leased", promise)
    begin_s = time.monotonic()
    assert await asker.pull(owner.record(), KEYS, timeout_s=0.5) == (0, pulls.TIMEOUT)
    assert time.monotonic() - begin_s < 5.0
    assert 2 <= len(asked) <= pulls.MAX_ASKS
    assert asker.counted("none", pulls.TIMEOUT) == 1
    await all_given_back(owner)
    link = asker.peers.get(OWNER_ID)
    assert link is not None
    assert not link.last_error, "it answers: its breaker is not told"
    asked.clear()
    monkeypatch.setattr(pulls, "MAX_ASKS", 3)
    assert await asker.pull(owner.record(), KEYS) == (0, pulls.TIMEOUT)
    assert len(asked) == 3


async def test_what_comes_later_is_read_under_leases_of_its_own(
    owner: Owner, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some at each ask: every one lands in its own slot, and the leases before are given back."""
    knows(asker, owner)
    real = peer_wire.leased
    most: list[int] = []

    def few(reply: m.Leased, arena: int) -> pb.AcquireResponse:
        most.append(owner.leases)
        some = replace(reply, slots=reply.slots[:7], checksums=reply.checksums[:7])
        return real(replace(some, coming=len(reply.slots) - len(some.slots)), arena)

    monkeypatch.setattr(peer_wire, "leased", few)
    assert await asker.pull(owner.record(), KEYS) == (len(KEYS), "")
    assert len(most) == -(-len(KEYS) // 7)
    assert max(most) <= 3, "at most the present one, the one before, and one on its way back"
    await all_given_back(owner)


async def test_every_batch_that_is_all_wrong(owner: Owner, bent: tuple[Asker, Bent]) -> None:
    asker, transfer = bent
    knows(asker, owner)

    def spoil(number: int, into: Sequence[int]) -> None:
        assert transfer.memory is not None
        for offset in into:
            transfer.memory[offset : offset + BLOCK_BYTES] = bytes(BLOCK_BYTES)

    transfer.spoil = spoil
    assert await asker.pull(owner.record(), KEYS) == (0, pulls.CORRUPT)
    assert await asker.pull(owner.record(), KEYS) == (0, pulls.FAILING)


async def test_a_slot_that_gets_other_bytes_under_the_pull(owner: Owner, bent: tuple[Asker, Bent]) -> None:
    """The owner gives the slot away though a lease is out, which it never does: the checksum still tells."""
    asker, transfer = bent
    knows(asker, owner)
    transfer.gate, transfer.gate_after = asyncio.Event(), 2
    task = asyncio.create_task(asker.pull(owner.record(), KEYS))
    await until(lambda: transfer.running and transfer.pulls >= 3, "the third batch waits")
    owner.arena.view(owner.slot(KEYS[14]))[:BLOCK_BYTES] = bytes(BLOCK_BYTES)
    transfer.gate.set()
    assert await task == (14, pulls.CORRUPT)


# ---- leases


async def test_a_lease_that_ran_out_makes_nothing_visible(
    make_owner: Callable[..., Awaitable[Owner]], bent: tuple[Asker, Bent]
) -> None:
    owner = await make_owner(lease_ttl_s=0.3)
    await owner.store(KEYS)
    asker, transfer = bent
    knows(asker, owner)
    transfer.gate, transfer.gate_after = asyncio.Event(), 1
    task = asyncio.create_task(asker.pull(owner.record(), KEYS))
    await until(lambda: transfer.pulls >= 2, "later batches wait")
    await all_given_back(owner)  # by its clock
    assert (await owner.evict(KEYS)).blocks == len(KEYS)
    transfer.gate.set()
    arrived, fault = await task
    assert arrived <= FIRST_BATCH_BLOCKS
    assert fault in {pulls.LEASE, pulls.TRANSFER}
    assert asker.counted("none", fault) + asker.counted("part", fault) == 1


async def test_bytes_that_come_when_the_lease_is_over_by_the_own_clock(
    owner: Owner, make_asker: Callable[..., Awaitable[Asker]]
) -> None:
    """They are even right; but nobody can know, but for the checksum."""
    made: list[Bent] = []
    passed_s = 0.0

    def bend(transfer: Any) -> list[Bent]:
        made.append(Bent(transfer))
        return made

    def spoil(number: int, into: Sequence[int]) -> None:
        nonlocal passed_s
        if number == 0:
            passed_s = owner.config.lease_ttl_s

    asker = await make_asker(bend=bend, clock=lambda: time.monotonic() + passed_s)
    made[0].spoil = spoil
    knows(asker, owner)
    assert await asker.pull(owner.record(), KEYS, timeout_s=1000.0) == (0, pulls.LEASE)
    assert made[0].running == 0
    await all_given_back(owner)


async def test_leased_slots_are_not_evicted(owner: Owner, bent: tuple[Asker, Bent]) -> None:
    asker, transfer = bent
    knows(asker, owner)
    transfer.gate, transfer.gate_after = asyncio.Event(), 0
    task = asyncio.create_task(asker.pull(owner.record(), KEYS))
    await until(lambda: transfer.running, "the first batch waits")
    evicted = await owner.evict(KEYS)
    assert (evicted.blocks, evicted.kept) == (0, len(KEYS))
    transfer.gate.set()
    assert await task == (len(KEYS), "")


# ---- transfers that fail


async def test_another_transfer_takes_over_and_goes_first_for_a_while(
    make_owner: Callable[..., Awaitable[Owner]], make_asker: Callable[..., Awaitable[Asker]]
) -> None:
    first, second = [], []

    def bend(transfer: Any) -> list[Bent]:
        first.append(Bent(transfer, "nixl"))
        second.append(Bent(transfer, "stream"))
        return [first[0], second[0]]

    asker = await make_asker(bend=bend)
    owner = await make_owner(transfers=[offer("nixl"), offer("stream")])
    await owner.store(KEYS)
    knows(asker, owner)
    first[0].faults = [TransferFault("the fabric is down")] * 2
    assert await asker.pull(owner.record(), KEYS) == (len(KEYS), "")
    assert first[0].pulls == pulls.BATCHES_IN_FLIGHT
    assert await asker.pull(owner.record(), KEYS) == (len(KEYS), "")
    assert first[0].pulls == pulls.BATCHES_IN_FLIGHT
    value = asker.metrics.registry.get_sample_value
    assert value("kvtier_pulled_bytes_total", {"transfer": "stream"}) == 2 * len(KEYS) * BLOCK_BYTES
    link = asker.peers.get(OWNER_ID)
    assert link is not None
    assert link.last_error == ""
    # And if the second fails as well, the first one gets its chance again, within the same pull.
    second[0].faults = [TransferFault("reset")] * 2
    assert await asker.pull(owner.record(), KEYS) == (len(KEYS), "")
    assert first[0].pulls > pulls.BATCHES_IN_FLIGHT


async def test_stale_metadata_is_asked_for_again(
    make_owner: Callable[..., Awaitable[Owner]], make_asker: Callable[..., Awaitable[Asker]]
) -> None:
    """The owner began its transfer anew, in the same life: what was cached of it leads nowhere."""
    made: list[Bent] = []

    def bend(transfer: Any) -> list[Bent]:
        made.append(Bent(transfer, "nixl"))
        return made

    asker = await make_asker(bend=bend)
    own = offer("nixl")
    owner = await make_owner(transfers=[own])
    await owner.store(KEYS)
    knows(asker, owner)
    own.said = made[0].needs = b"first"
    assert await asker.pull(owner.record(), KEYS) == (len(KEYS), "")
    own.said = made[0].needs = b"second"
    assert await asker.pull(owner.record(), KEYS) == (len(KEYS), "")
    assert made[0].forgotten == [OWNER_ID]


async def test_a_fault_after_some_blocks_keeps_them(owner: Owner, bent: tuple[Asker, Bent]) -> None:
    asker, transfer = bent
    knows(asker, owner)
    transfer.faults = [None, None, TransferFault("the peer died")]
    assert await asker.pull(owner.record(), KEYS) == (12, pulls.TRANSFER)
    await all_given_back(owner)


async def test_no_transfer_in_common(make_owner: Callable[..., Awaitable[Owner]], asker: Asker) -> None:
    owner = await make_owner(transfers=[offer("pigeon")])
    await owner.store(KEYS)
    knows(asker, owner)
    assert await asker.pull(owner.record(), KEYS) == (0, pulls.TRANSFER)
    link = asker.peers.get(OWNER_ID)
    assert link is not None
    assert "pigeon" in link.last_error
    await all_given_back(owner)


async def test_a_bug_in_a_transfer_ends_the_pull(owner: Owner, bent: tuple[Asker, Bent]) -> None:
    asker, transfer = bent
    knows(asker, owner)
    transfer.faults = [None, ZeroDivisionError("a bug")]
    arrived, fault = await asker.pull(owner.record(), KEYS)
    assert fault == pulls.BUG
    assert arrived == 4
    assert transfer.running == 0
    await all_given_back(owner)


# ---- peers that are not as they should be


async def test_an_unknown_peer_and_one_of_another_life(owner: Owner, asker: Asker) -> None:
    assert await asker.pull(owner.record(), KEYS) == (0, pulls.GONE)
    knows(asker, owner)
    assert await asker.pull(owner.record(incarnation=6), KEYS) == (0, pulls.GONE)


async def test_a_restarted_peer(make_owner: Callable[..., Awaitable[Owner]], asker: Asker) -> None:
    port = free_port()
    old = await make_owner(7, peer_port=port)
    await old.store(KEYS)
    knows(asker, old)
    before = old.record()
    assert await asker.pull(before, KEYS) == (len(KEYS), "")
    await old.stop()
    new = await make_owner(8, peer_port=port)
    await new.store(KEYS)
    # The index does not know yet: whoever answers there now is another life, which refuses.
    arrived, fault = await asker.pull(before, KEYS)
    assert arrived == 0
    assert fault in {pulls.UNREACHABLE, pulls.REFUSED, pulls.FAILING}
    knows(asker, new)
    assert await asker.pull(before, KEYS) == (0, pulls.GONE)
    assert await asker.pull(new.record(), KEYS) == (len(KEYS), "")


async def test_nobody_listens(asker: Asker, owner: Owner) -> None:
    record = owner.record(address=f"127.0.0.1:{free_port()}")
    asker.peers.update([record])
    assert await asker.pull(record, KEYS) == (0, pulls.UNREACHABLE)
    assert await asker.pull(record, KEYS) == (0, pulls.FAILING)
    assert asker.counted("none", pulls.FAILING) == 1


async def test_a_peer_that_answers_nonsense(asker: Asker, owner: Owner) -> None:
    async with raw_server({"Hello": lambda _: b"\xff" * 40}) as address:
        record = owner.record(address=address)
        asker.peers.update([record])
        assert await asker.pull(record, KEYS) == (0, pulls.UNREACHABLE)


async def test_a_peer_that_is_too_slow(owner: Owner, asker: Asker) -> None:
    proxy = Proxy(owner.server.address)
    record = owner.record(address=await proxy.start())
    try:
        asker.peers.update([record])
        proxy.swallow()
        assert await asker.pull(record, KEYS, timeout_s=0.2) == (0, pulls.TIMEOUT)
        assert await asker.pull(record, KEYS, timeout_s=DEADLINE_S) == (0, pulls.FAILING), (
            "nobody waits again"
        )
        proxy.heal()
        await pull_until_whole(asker, record, KEYS)
    finally:
        await proxy.stop()


async def test_a_black_hole_in_the_middle_and_recovery_without_a_hand(owner: Owner, asker: Asker) -> None:
    proxy = Proxy(owner.server.address)
    record = owner.record(address=await proxy.start())
    try:
        asker.peers.update([record])
        proxy.hole_after_bytes = 20 * BLOCK_BYTES
        arrived, fault = await asker.pull(record, KEYS, timeout_s=SHORT_S)
        assert fault == pulls.TIMEOUT
        assert arrived < len(KEYS)
        while not asker.counted("none", pulls.FAILING):
            await asker.pull(record, KEYS, timeout_s=0.05)
        proxy.heal()
        await pull_until_whole(asker, record, KEYS)
    finally:
        await proxy.stop()


# ---- ends by others


async def test_a_cancelled_pull_waits_for_its_transfers_and_ends_once(
    owner: Owner, bent: tuple[Asker, Bent]
) -> None:
    asker, transfer = bent
    knows(asker, owner)
    for waits_at in (0, 1, 2):
        transfer.gate, transfer.gate_after = asyncio.Event(), transfer.pulls + waits_at
        ends: list[m.Arrived | m.PullEnded] = []

        def report(event: m.Arrived | m.PullEnded, ends: list[Any] = ends) -> None:
            if isinstance(event, m.PullEnded):
                assert transfer.running == 0, "a transfer may still write"
                ends.append(event)

        task = asyncio.create_task(asker.puller.run(asker.pull_of(owner.record(), KEYS), report))
        await until(lambda: transfer.running, "a batch waits")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [event.fault for event in ends] == [pulls.CANCELLED]  # type: ignore[union-attr]
        await all_given_back(owner)


async def test_a_pull_cancelled_at_any_moment_ends_once_and_leaves_no_lease(
    owner: Owner, asker: Asker
) -> None:
    """Wherever it is by then: a pull takes some 10 ms."""
    knows(asker, owner)
    faults = []
    for tenths_ms in range(0, 200, 5):
        events: list[m.Arrived | m.PullEnded] = []
        task = asyncio.create_task(asker.puller.run(asker.pull_of(owner.record(), KEYS), events.append))
        await asyncio.sleep(tenths_ms / 10_000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not events and task.cancelled() and not tenths_ms:
            continue  # it had not begun
        ends = [event for event in events if isinstance(event, m.PullEnded)]
        assert ends == events[-1:]
        faults.append(ends[0].fault)
    assert pulls.CANCELLED in faults
    await all_given_back(owner)


async def test_a_peer_that_is_dropped_in_the_middle(owner: Owner, bent: tuple[Asker, Bent]) -> None:
    asker, transfer = bent
    knows(asker, owner)
    transfer.gate, transfer.gate_after = asyncio.Event(), 1
    task = asyncio.create_task(asker.pull(owner.record(), KEYS))
    await until(lambda: transfer.pulls >= 2, "later batches wait")
    asker.peers.update([])
    await until(lambda: transfer.forgotten == [OWNER_ID], "the transfer forgot it")
    transfer.gate.set()
    arrived, fault = await task
    # The transfer notices it, or the link does, or it comes too late to matter.
    assert fault in {pulls.TRANSFER, pulls.UNREACHABLE, ""}
    assert arrived < len(KEYS) or not fault


# ---- real processes

MANY = 200


@pytest.fixture
def process(tmp_path: Path, shm: Path) -> Iterator[OwnerProcess]:
    process = OwnerProcess(tmp_path / "process", shm, 5, MANY)
    yield process
    process.end()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_owner_is_killed_or_stopped_in_the_middle(
    process: OwnerProcess, bent: tuple[Asker, Bent], number: signal.Signals
) -> None:
    asker, transfer = bent
    asker.peers.update([process.record])
    keys = chain(5, MANY)
    transfer.gate, transfer.gate_after = asyncio.Event(), 2
    task = asyncio.create_task(asker.pull(process.record, keys, timeout_s=5.0))
    await until(lambda: transfer.pulls >= 4, "later batches wait")
    process.signal(number)
    transfer.gate.set()
    arrived, fault = await task
    assert arrived == 12
    assert fault in ({pulls.TRANSFER} if number is signal.SIGKILL else {pulls.TIMEOUT})
    assert transfer.running == 0
    if number is signal.SIGSTOP:
        while not asker.counted("none", pulls.FAILING):
            await asker.pull(process.record, keys, timeout_s=0.05)
        process.signal(signal.SIGCONT)
        await pull_until_whole(asker, process.record, keys)
    else:
        arrived, fault = await asker.pull(process.record, keys)
        assert arrived == 0
        assert fault in {pulls.UNREACHABLE, pulls.FAILING}


def test_the_layout_of_these_tests_is_small() -> None:
    assert LAYOUT.fingerprint() == FINGERPRINT
    assert LAYOUT.slot_bytes * MANY <= 4 << 20
