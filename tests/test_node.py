"""The node with a real core: verification before visibility, background work, media that fail."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import xxhash

from kvtier import node as node_module
from kvtier.build import build, core_config, tier_spec
from kvtier.config import Config
from kvtier.core import messages as m
from kvtier.core.cache import CacheCore
from kvtier.errors import Corruption, LimitExceeded, TierFault, Unavailable, UnknownId
from kvtier.hashing import INLINE_BYTES
from kvtier.identity import Identity, open_identity
from kvtier.interfaces import Tier, TierTraits
from kvtier.liveness import EngineLocks, prepare_run_dir
from kvtier.metrics import Metrics
from kvtier.node import Node
from kvtier.types import SAMPLE_EVERY_BLOCKS, BlockId, BlockRecord, Key, Slot, TierKind
from tests.server.conftest import shm  # noqa: F401
from tests.server.harness import DEADLINE_S, LAYOUT, chain, config

ENGINE = "engine"
KEYS = chain(1, 4)
MANY = chain(2, INLINE_BYTES // LAYOUT.block_bytes + 8)


def call_id() -> bytes:
    return os.urandom(16)


def content(key: Key) -> bytes:
    return (key * LAYOUT.block_bytes)[: LAYOUT.block_bytes]


def checksums(keys: Sequence[Key]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(content(key)) for key in keys]


def records(keys: Sequence[Key]) -> list[BlockRecord]:
    return [
        BlockRecord(BlockId(key, 0), None, LAYOUT.fingerprint(), LAYOUT.block_bytes, checksum)
        for key, checksum in zip(keys, checksums(keys), strict=True)
    ]


class Harness:
    """A node, and one engine whose lock this process holds."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.core = node.core

    async def register(self) -> None:
        reply = await self.node.execute(
            m.RegisterEngine(call_id(), ENGINE, LAYOUT, LAYOUT.fingerprint(), "test")
        )
        assert reply == m.Registered(LAYOUT.slot_bytes)

    async def reserve(self, keys: Sequence[Key]) -> m.Reserved:
        reply = await self.node.execute(m.Reserve(call_id(), ENGINE, None, keys, 0, LAYOUT.fingerprint()))
        assert isinstance(reply, m.Reserved)
        slots = [slot for slot in reply.slots if slot is not None]
        assert len(slots) == len(keys)
        payloads = [memoryview(content(key)) for key in keys]
        await self.node.tiers[TierKind.DRAM].write(slots, records(keys), payloads)
        return reply

    def commit(self, reserved: m.Reserved, keys: Sequence[Key], wrong: int = 0) -> m.Commit:
        """The first `wrong` checksums are not those of the bytes."""
        sums = [bytes(16)] * wrong + checksums(keys)[wrong:]
        return m.Commit(call_id(), ENGINE, reserved.reservation, keys, sums)

    async def store(self, keys: Sequence[Key]) -> list[Slot]:
        reserved = await self.reserve(keys)
        assert await self.node.execute(self.commit(reserved, keys)) == m.Committed(len(keys))
        return [slot for slot in reserved.slots if slot is not None]

    def verified_bytes(self, where: str) -> float:
        value = self.node.metrics.registry.get_sample_value("kvtier_verified_bytes_total", {"where": where})
        return value or 0.0

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"never: {what}"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(make: Callable[[Identity], Any], config: Config) -> AsyncIterator[Harness]:
    identity = open_identity(config.data_dir)
    prepare_run_dir(config.run_dir)
    node = await make(identity)
    await node.start()
    lock = lock_of(config)
    harness = Harness(node)
    try:
        await harness.register()
        yield harness
        node.core.check()
    finally:
        await node.stop()
        await node.stop()
        identity.release()
        os.close(lock)


def lock_of(config: Config) -> int:
    import fcntl

    fd = os.open(config.run_dir / "engines" / f"{ENGINE}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


@pytest.fixture
def run(tmp_path: Path, shm: Path) -> Callable[..., Any]:  # noqa: F811
    """``async with run(**config values) as harness``: on a real arena."""

    def start(**values: Any) -> Any:
        settings = config(tmp_path, shm, dram_bytes=8 << 20, **values)
        return running(lambda identity: build(settings, identity, Metrics()), settings)

    return start


# ---- verification before visibility


@pytest.mark.parametrize("keys", [KEYS, MANY], ids=["on the loop", "beside it"])
@pytest.mark.parametrize(
    ("verify", "wrong", "refused"),
    [("off", 4, False), ("sample", 0, False), ("sample", -1, True), ("all", 0, False), ("all", 1, True)],
)
async def test_commits_are_verified_as_configured(
    run: Callable[..., Any], keys: list[Key], verify: str, wrong: int, refused: bool
) -> None:
    async with run(verify_commits=verify, scrub_bytes_per_s=0) as harness:
        reserved = await harness.reserve(keys)
        commit = harness.commit(reserved, keys, len(keys) if wrong < 0 else wrong)
        if refused:
            with pytest.raises(Corruption, match=r"\d+ of \d+ checked blocks"):
                await harness.node.execute(commit)
            assert harness.core.match(keys, 1) == 0
            assert len(harness.core.reserved_slots(ENGINE, reserved.reservation, keys)) == len(keys)
        else:
            assert await harness.node.execute(commit) == m.Committed(len(keys))
            assert harness.core.match(keys, 1) == len(keys)
        blocks = {"off": 0, "sample": -(-len(keys) // SAMPLE_EVERY_BLOCKS), "all": len(keys)}[verify]
        assert harness.verified_bytes("commit") == blocks * LAYOUT.block_bytes


async def test_a_sample_of_one_block_is_that_block(run: Callable[..., Any]) -> None:
    async with run(verify_commits="sample") as harness:
        reserved = await harness.reserve(KEYS[:1])
        with pytest.raises(Corruption, match="1 of 1"):
            await harness.node.execute(harness.commit(reserved, KEYS[:1], wrong=1))


async def test_repeats_of_a_commit_that_is_being_verified_share_its_answer(run: Callable[..., Any]) -> None:
    async with run() as harness:
        reserved = await harness.reserve(MANY)
        commit = harness.commit(reserved, MANY)
        replies = await asyncio.gather(*(harness.node.execute(commit) for _ in range(4)))
        assert replies == [m.Committed(len(MANY))] * 4
        assert harness.verified_bytes("commit") == len(MANY) * LAYOUT.block_bytes
        assert harness.node.stats().counters.stored_blocks == len(MANY)


async def test_a_commit_outlives_the_call_that_brought_it(run: Callable[..., Any]) -> None:
    async with run() as harness:
        reserved = await harness.reserve(MANY)
        commit = harness.commit(reserved, MANY)
        call = asyncio.create_task(harness.node.execute(commit))
        await asyncio.sleep(0)
        assert harness.core.match(MANY, 1) == 0  # it is being hashed beside the loop
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await harness.node.execute(commit) == m.Committed(len(MANY))
        assert harness.verified_bytes("commit") == len(MANY) * LAYOUT.block_bytes


async def test_commits_in_verification_are_bounded(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "MAX_COMMITS_IN_VERIFICATION", 1)
    async with run() as harness:
        reserved = await harness.reserve(MANY)
        call = asyncio.create_task(harness.node.execute(harness.commit(reserved, MANY)))
        await asyncio.sleep(0)
        with pytest.raises(LimitExceeded, match="later"):
            await harness.node.execute(harness.commit(reserved, MANY))
        assert await call == m.Committed(len(MANY))


async def test_an_abort_while_a_commit_is_being_verified_wins(run: Callable[..., Any]) -> None:
    async with run() as harness:
        reserved = await harness.reserve(MANY)
        call = asyncio.create_task(harness.node.execute(harness.commit(reserved, MANY)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        aborted = await harness.node.execute(m.Abort(call_id(), ENGINE, reserved.reservation))
        assert aborted == m.Aborted(len(MANY))
        with pytest.raises(UnknownId):
            await call
        assert harness.core.match(MANY, 1) == 0


# ---- background verification


async def test_every_committed_block_is_verified_once_in_the_background(run: Callable[..., Any]) -> None:
    async with run(verify_commits="off") as harness:
        await harness.store(KEYS)
        expected = len(KEYS) * LAYOUT.block_bytes
        await harness.until(lambda: harness.verified_bytes("background") == expected, "all are verified")
        ticks = harness.node._clock() + 0.2
        await harness.until(lambda: harness.node._clock() > ticks, "some ticks later")
        assert harness.verified_bytes("background") == expected
        await harness.store(chain(9, 2))
        expected += 2 * LAYOUT.block_bytes
        await harness.until(lambda: harness.verified_bytes("background") == expected, "so are new ones")


async def test_wrong_bytes_are_found_in_the_background(run: Callable[..., Any]) -> None:
    async with run(verify_commits="off") as harness:
        reserved = await harness.reserve(KEYS)
        wrong = [*checksums(KEYS[:3]), bytes(16)]
        await harness.node.execute(m.Commit(call_id(), ENGINE, reserved.reservation, KEYS, wrong))
        await harness.until(lambda: harness.core.match(KEYS, 1) == 3, "the wrong block is gone")
        registry = harness.node.metrics.registry
        assert registry.get_sample_value("kvtier_checksum_mismatches_total", {"where": "background"}) == 1
        assert registry.get_sample_value("kvtier_lost_blocks_total", {"reason": "corrupt"}) == 1
        assert harness.node.stats().counters.corrupt_blocks == 1


async def test_the_budget_bounds_what_is_verified(run: Callable[..., Any]) -> None:
    async with run(verify_commits="off", scrub_bytes_per_s=20 * LAYOUT.block_bytes) as harness:
        begin_s = harness.node._clock()
        await harness.store(chain(5, 12))
        await harness.until(lambda: harness.verified_bytes("background") > 0, "it begins")
        blocks = harness.verified_bytes("background") / LAYOUT.block_bytes
        assert blocks <= 1 + 20 * (harness.node._clock() - begin_s)


async def test_an_engine_that_reports_wrong_bytes_is_believed_only_if_it_is_right(
    run: Callable[..., Any],
) -> None:
    async with run(scrub_bytes_per_s=0) as harness:
        slots = await harness.store(KEYS)
        harness.node.tiers[TierKind.DRAM].view(slots[3])[:4] = b"????"  # type: ignore[attr-defined]
        leased = await harness.node.execute(m.Load(call_id(), ENGINE, "request", KEYS, 0))
        assert isinstance(leased, m.Leased)
        release = m.Release(call_id(), ENGINE, lease=leased.lease, corrupt_keys=[KEYS[0], KEYS[3]])
        await harness.node.execute(release)
        await harness.until(lambda: harness.core.match(KEYS, 1) == 3, "the one that is wrong is gone")
        assert harness.verified_bytes("background") == 2 * LAYOUT.block_bytes


# ---- life


async def test_a_node_that_stops_refuses(run: Callable[..., Any]) -> None:
    async with run() as harness:
        reserved = await harness.reserve(MANY)
        call = asyncio.create_task(harness.node.execute(harness.commit(reserved, MANY)))
        await asyncio.sleep(0)
        await harness.node.stop()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(Unavailable, match="stopping"):
            await harness.register()


async def test_a_medium_that_does_not_answer_holds_no_stop_up(run: Callable[..., Any]) -> None:
    async with run(tier_deadline_s=0.1) as harness:
        answers = asyncio.Event()

        async def wait_for_a_medium() -> None:
            while not answers.is_set():
                with suppress(asyncio.CancelledError):
                    await answers.wait()

        harness.node._spawn(wait_for_a_medium())
        await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            await harness.node.stop()
        assert harness.node.is_left_waiting
        harness.node.tiers[TierKind.DRAM].view(Slot(harness.node.tiers[TierKind.DRAM].arena_id, 0, 0, 4096))
        answers.set()
        await harness.node.tiers[TierKind.DRAM].close()


async def test_expired_leases_are_expired_without_anybody_asking(run: Callable[..., Any]) -> None:
    async with run(lease_ttl_s=0.1, hold_ttl_s=0.1, reservation_ttl_s=0.1) as harness:
        await harness.store(KEYS)
        await harness.node.execute(m.Lookup(ENGINE, "request", KEYS, 1, LAYOUT.fingerprint()))
        await harness.node.execute(m.Load(call_id(), ENGINE, "other", KEYS, 0))
        await harness.reserve(chain(6, 3))
        stats = harness.node.stats
        await harness.until(lambda: stats().leases == stats().holds == 0, "leases and holds run out")
        await harness.until(
            lambda: stats().tiers[0].quarantined_bytes == 3 * LAYOUT.slot_bytes, "the slots are quarantined"
        )


# ---- a medium that frees late, fails to delete, and cannot be mapped


class SlowTier(Tier):
    """Bytes in this process that are not memory to anybody else; deletes when told to, or fails to."""

    kind: ClassVar[TierKind] = TierKind.DRAM
    traits: ClassVar[TierTraits] = TierTraits(frees_at_once=False)
    capacity_bytes = 1 << 20
    allocated_bytes = 1 << 20
    extent_bytes = 1 << 20

    def __init__(self) -> None:
        self.bytes = bytearray(self.capacity_bytes)
        self.drop_faults = 0
        self.read_faults = 0
        self.drops: list[Slot] = []
        self.may_drop = asyncio.Event()

    async def open(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    async def read(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], into: Sequence[memoryview]
    ) -> list[int]:
        await asyncio.sleep(0)
        if self.read_faults:
            self.read_faults -= 1
            raise TierFault("the medium cannot be read")
        for slot, buffer in zip(slots, into, strict=True):
            buffer[:] = self.bytes[slot.offset_bytes : slot.offset_bytes + len(buffer)]
        return []

    async def write(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], payloads: Sequence[memoryview]
    ) -> None:
        for slot, payload in zip(slots, payloads, strict=True):
            self.bytes[slot.offset_bytes : slot.offset_bytes + len(payload)] = payload

    async def drop(self, slots: Sequence[Slot]) -> None:
        await self.may_drop.wait()
        if self.drop_faults:
            self.drop_faults -= 1
            raise TierFault("the medium cannot delete")
        self.drops += slots


@pytest.fixture
def run_slow(tmp_path: Path, shm: Path) -> Callable[..., Any]:  # noqa: F811
    def start(tier: SlowTier, **values: Any) -> Any:
        # Commits are verified in memory alone.
        settings = config(tmp_path, shm, **{"verify_commits": "off"} | values)

        async def make(identity: Identity) -> Node:
            return Node(
                core=CacheCore(core_config(settings), [tier_spec(tier)], seed=identity.incarnation),
                tiers=[tier],
                identity=identity,
                locks=EngineLocks(settings.run_dir),
                config=settings,
                metrics=Metrics(),
            )

        return running(make, settings)

    return start


def draining_bytes(harness: Harness) -> int:
    return harness.node.stats().tiers[0].draining_bytes


async def test_bytes_stay_charged_until_the_delete_has_finished(run_slow: Callable[..., Any]) -> None:
    tier = SlowTier()
    async with run_slow(tier) as harness:
        await harness.store(KEYS)
        assert await harness.node.execute(m.Evict(call_id(), KEYS)) == m.Evicted(4, 0)
        assert draining_bytes(harness) == 4 * LAYOUT.slot_bytes
        tier.may_drop.set()
        await harness.until(lambda: draining_bytes(harness) == 0, "the delete is reported")
        assert len(tier.drops) == 4


async def test_a_delete_that_fails_is_tried_again(
    run_slow: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "DROP_RETRY_S", 0.001)
    tier = SlowTier()
    tier.drop_faults = node_module.DROP_ATTEMPTS - 1
    tier.may_drop.set()
    async with run_slow(tier) as harness:
        await harness.store(KEYS)
        await harness.node.execute(m.Evict(call_id(), KEYS))
        await harness.until(lambda: draining_bytes(harness) == 0, "the last attempt succeeds")
        faults = harness.node.metrics.registry.get_sample_value("kvtier_tier_faults_total", {"tier": "dram"})
        assert faults == node_module.DROP_ATTEMPTS - 1


async def test_slots_that_cannot_be_deleted_are_never_used_again(
    run_slow: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "DROP_RETRY_S", 0.001)
    tier = SlowTier()
    tier.drop_faults = node_module.DROP_ATTEMPTS
    tier.may_drop.set()
    async with run_slow(tier) as harness:
        slots = await harness.store(KEYS)
        await harness.node.execute(m.Evict(call_id(), KEYS))
        await harness.until(lambda: tier.drop_faults == 0, "all attempts are made")
        assert draining_bytes(harness) == 4 * LAYOUT.slot_bytes
        assert set(await harness.store(KEYS)).isdisjoint(slots)


async def test_a_tier_that_is_not_mapped_is_read_to_verify_it(run_slow: Callable[..., Any]) -> None:
    tier = SlowTier()
    tier.may_drop.set()
    async with run_slow(tier) as harness:
        reserved = await harness.reserve(KEYS)
        wrong = [*checksums(KEYS[:3]), bytes(16)]
        await harness.node.execute(m.Commit(call_id(), ENGINE, reserved.reservation, KEYS, wrong))
        expected = 4 * LAYOUT.block_bytes
        await harness.until(lambda: harness.verified_bytes("background") == expected, "all are verified")
        await harness.until(lambda: harness.core.match(KEYS, 1) == 3, "the wrong one is gone")


async def test_a_block_that_cannot_be_read_is_lost(run_slow: Callable[..., Any]) -> None:
    tier = SlowTier()
    tier.may_drop.set()
    tier.read_faults = 1
    async with run_slow(tier, verify_commits="off") as harness:
        await harness.store(KEYS[:1])
        await harness.until(lambda: harness.core.match(KEYS, 1) == 0, "the block is gone")
        assert harness.node.stats().counters.corrupt_blocks == 1
