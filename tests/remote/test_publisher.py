"""The index ends equal to what a node has, whatever happened between: on a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvtier.config import Config
from kvtier.index.codec import Keys, entry_head
from kvtier.remote import publisher as publisher_module
from kvtier.remote.publisher import (
    CHECK_BLOCKS,
    CHECK_CALL_BLOCKS,
    FLUSH_BATCH_BLOCKS,
    MAX_SILENT_CHECKS,
    SWEEP_BATCH_BLOCKS,
    Publisher,
)
from kvtier.types import BlockId, NodeRecord, TierKind
from tests.remote.harness import DEADLINE_S, Cuttable, blocks, record, until

MakeIndex = Callable[..., Awaitable[Cuttable]]
Settings = Callable[..., Config]


class Holder:
    """A node's blocks, its publisher, and a look at the index by somebody else."""

    def __init__(self, index: Cuttable, reader: Cuttable, config: Config, record: NodeRecord) -> None:
        self.index = index
        self.reader = reader
        self.record = record
        self.config = config
        self.here: dict[BlockId, TierKind] = {}
        self.faults: list[str] = []
        self.done = {"publish": 0, "withdraw": 0}
        self.publisher = Publisher(
            index,
            lambda: self.record,
            config,
            residents=lambda: list(self.here),
            tier_of=lambda block: self.here.get(block),
            on_fault=self.faults.append,
            on_done=self._count,
        )
        self.task = asyncio.create_task(self.publisher.run())

    def _count(self, change: str, count: int) -> None:
        self.done[change] += count

    def add(self, some: Sequence[BlockId], tier: TierKind = TierKind.DRAM) -> None:
        self.here |= dict.fromkeys(some, tier)
        self.publisher.add(tier, some)

    def remove(self, some: Sequence[BlockId]) -> None:
        for block in some:
            self.here.pop(block, None)
        self.publisher.remove(some)

    async def settled(self) -> None:
        await until(lambda: not self.publisher.unpublished, "all is published")

    async def published(self, some: Sequence[BlockId]) -> dict[BlockId, TierKind]:
        """Which of these blocks the index says that this node has, and where."""
        await self.reader.nodes()
        found = await self.reader.find(some)
        return {
            block: place.tier
            for block, places in zip(some, found, strict=True)
            for place in places
            if place.node == self.record.node
        }

    async def equals(self, some: Sequence[BlockId]) -> bool:
        return await self.published(some) == {block: self.here[block] for block in some if block in self.here}


@pytest.fixture
async def make_holder(make_index: MakeIndex, settings: Settings) -> Any:
    made: list[Holder] = []

    async def make(node: int = 1, **values: Any) -> Holder:
        config = settings(dead_after_s=60.0, **values)
        index, reader = await make_index(config), await make_index(settings(dead_after_s=60.0))
        its = record(node)
        its = replace(its, incarnation=await index.register(its))
        index.calls.clear()
        index.sizes.clear()
        made.append(Holder(index, reader, config, its))
        return made[-1]

    yield make
    for holder in made:
        holder.task.cancel()
        (result,) = await asyncio.gather(holder.task, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError), result


async def test_changes_are_told_in_batches(make_holder: Any) -> None:
    holder = await make_holder()
    many = blocks(3 * FLUSH_BATCH_BLOCKS)
    for begin in range(0, len(many), 64):  # as commits come
        holder.add(many[begin : begin + 64])
    await holder.settled()
    assert await holder.equals(many)
    assert holder.index.calls == ["publish"] * 3
    holder.remove(many[::2])
    await holder.settled()
    assert await holder.equals(many)
    assert holder.done == {"publish": len(many), "withdraw": len(many) // 2}


async def test_only_the_last_word_on_a_block_counts(make_holder: Any) -> None:
    holder = await make_holder()
    some = blocks(8)
    holder.add(some)
    holder.remove(some[:4])
    holder.add(some[:2])
    await holder.settled()
    assert await holder.equals(some)
    holder.add(some[:2], TierKind.NVME)
    await holder.settled()
    assert (await holder.published(some))[some[0]] is TierKind.NVME
    assert await holder.equals(some)


async def test_a_change_while_a_call_runs(make_holder: Any) -> None:
    """1. B is being published. 2. B goes. 3. The call ends. Then the index must not say that B is here."""
    holder = await make_holder()
    some = blocks(4)
    holder.index.passes.clear()
    holder.add(some)
    await until(lambda: holder.index.calls == ["publish"], "the call runs")
    assert holder.publisher.unpublished == 4
    holder.remove(some[:1])
    holder.add(blocks(1, 100))
    holder.index.passes.set()
    await holder.settled()
    assert await holder.equals(some + blocks(1, 100))


async def test_changes_wait_for_an_index_that_is_away(make_holder: Any) -> None:
    holder = await make_holder()
    some = blocks(100)
    holder.add(some[:50])
    await holder.settled()
    holder.index.is_cut = True
    holder.add(some[50:])
    holder.remove(some[:10])
    await until(lambda: len(holder.faults) >= 3, "it is tried again and again")
    assert holder.publisher.unpublished == 60
    holder.remove(some[50:60])
    holder.add(some[:5])
    holder.index.is_cut = False
    await holder.settled()
    assert await holder.equals(some)


async def test_the_set_of_changes_is_bounded(make_holder: Any) -> None:
    """Beyond the bound additions are forgotten and found again by a sweep; what went is withdrawn."""
    holder = await make_holder(max_unpublished=50)
    some = blocks(500)
    holder.add(some[:40])
    await holder.settled()
    holder.index.is_cut = True
    holder.remove(some[:30])
    for begin in range(40, len(some), 20):
        holder.add(some[begin : begin + 20])
        waiting = len(holder.publisher._added) + len(holder.publisher._removed)
        assert waiting <= 50
    await until(lambda: len(holder.faults) >= 2, "the index is away")
    holder.index.is_cut = False
    await holder.settled()
    assert await holder.equals(some)


async def test_removals_alone_are_bounded_too(make_holder: Any) -> None:
    holder = await make_holder(max_unpublished=50)
    some = blocks(80)
    holder.add(some[:40])
    await holder.settled()
    holder.add(some[40:])
    await holder.settled()
    holder.index.is_cut = True
    holder.remove(some)
    assert len(holder.publisher._removed) == 50
    holder.index.is_cut = False
    await holder.settled()
    assert set(await holder.published(some)) <= set(some[:30]), "the oldest are left to their TTL"


async def test_everything_is_published_anew_after_a_loss(make_holder: Any, valkey: Any) -> None:
    holder = await make_holder()
    some = blocks(3 * SWEEP_BATCH_BLOCKS + 7)
    holder.add(some)
    await holder.settled()
    with valkey.client() as client:
        client.flushall()
    holder.record = replace(holder.record, incarnation=await holder.index.register(holder.record))
    holder.publisher.republish()
    assert holder.publisher.unpublished
    await holder.settled()
    assert await holder.equals(some)
    assert max(holder.index.sizes) <= max(FLUSH_BATCH_BLOCKS, SWEEP_BATCH_BLOCKS)


async def test_a_second_loss_begins_again(make_holder: Any, valkey: Any) -> None:
    holder = await make_holder()
    some = blocks(4 * SWEEP_BATCH_BLOCKS)
    holder.here = dict.fromkeys(some, TierKind.DRAM)
    holder.publisher.republish()
    await until(lambda: holder.done["publish"] >= SWEEP_BATCH_BLOCKS, "the first batch is there")
    with valkey.client() as client:
        client.flushall()
    await holder.index.register(holder.record)
    holder.publisher.republish()
    await holder.settled()
    assert await holder.equals(some)


async def test_a_block_that_goes_during_a_sweep_is_not_published(make_holder: Any) -> None:
    """1. The sweep has listed B. 2. B goes and is withdrawn. 3. The sweep comes to B's batch."""
    holder = await make_holder()
    some = blocks(2 * SWEEP_BATCH_BLOCKS)
    holder.here = dict.fromkeys(some, TierKind.DRAM)
    holder.index.passes.clear()
    holder.publisher.republish()
    await until(lambda: holder.index.calls == ["publish"], "the first batch is on its way")
    holder.remove([some[0], some[-1]])
    holder.index.passes.set()
    await holder.settled()
    assert await holder.equals(some)


async def test_a_sweep_goes_on_where_it_failed(make_holder: Any) -> None:
    holder = await make_holder()
    some = blocks(3 * SWEEP_BATCH_BLOCKS)
    holder.here = dict.fromkeys(some, TierKind.DRAM)
    holder.index.is_cut = True
    holder.publisher.republish()
    await until(lambda: len(holder.faults) >= 2, "it fails")
    assert holder.publisher.unpublished
    holder.index.is_cut = False
    await holder.settled()
    assert await holder.equals(some)


async def test_sweeps_are_throttled(make_holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At `publish_per_s` a batch is followed by the pause that it has earned."""
    pauses: list[float] = []
    holder = await make_holder(publish_per_s=10 * SWEEP_BATCH_BLOCKS)
    within = holder.publisher._is_lost_within

    async def note(seconds: float) -> bool:
        pauses.append(seconds)
        return bool(await within(min(seconds, 0.01)))

    monkeypatch.setattr(holder.publisher, "_is_lost_within", note)
    holder.here = dict.fromkeys(blocks(5 * SWEEP_BATCH_BLOCKS), TierKind.DRAM)
    holder.publisher.republish()
    await holder.settled()
    assert len(pauses) >= 5
    assert all(pause <= 0.1 for pause in pauses[:5])
    assert holder.publisher._min_pause_s == 0.1


async def test_differences_are_healed(
    make_holder: Any, make_index: MakeIndex, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that somebody dropped come back by the slow sweep, without any change here."""
    monkeypatch.setattr(publisher_module, "RECONCILE_S", 0.3)
    holder = await make_holder()
    some = blocks(20)
    holder.add(some)
    await holder.settled()
    await holder.reader.withdraw(holder.record, some[:10])
    assert not await holder.equals(some)
    end = asyncio.get_running_loop().time() + DEADLINE_S
    while not await holder.equals(some):
        assert asyncio.get_running_loop().time() < end, "never healed"
        await asyncio.sleep(0.05)


async def test_an_index_that_forgot_is_found_out(make_holder: Any, valkey: Any) -> None:
    """A failover to a replica that had not heard of the blocks: the node's own record is there."""
    holder = await make_holder()
    some = blocks(200)
    holder.add(some)
    await holder.settled()
    await holder.reader.withdraw(holder.record, some)
    await holder.index.inner.nodes()  # as its membership does all the time
    holder.publisher.doubt()
    await until(lambda: holder.done["publish"] == 400, "all of it is published again")
    assert await holder.equals(some)
    begin = len(holder.index.calls)
    holder.publisher.doubt()
    await until(lambda: holder.index.calls[begin:].count("find") == 4, "all of it is looked at again")
    await holder.settled()
    assert holder.index.calls[begin:] == ["find"] * 4, "and is right"


async def test_a_check_is_asked_in_small_calls(make_holder: Any) -> None:
    """Each stays within `index_timeout_s`, and no block is drawn twice."""
    holder = await make_holder()
    holder.add(blocks(1000))
    await holder.settled()
    await holder.index.inner.nodes()
    begin = len(holder.index.calls)
    holder.publisher.doubt()
    calls = CHECK_BLOCKS // CHECK_CALL_BLOCKS
    await until(lambda: len(holder.index.calls) == begin + calls, "the check is over")
    assert holder.index.calls[begin:] == ["find"] * calls
    assert set(holder.index.sizes[begin:]) == {CHECK_CALL_BLOCKS}
    assert len(set(holder.publisher._draw())) == CHECK_BLOCKS


async def test_a_loss_of_one_percent_is_found_by_nine_checks_of_ten(make_holder: Any) -> None:
    holder = await make_holder()
    some = blocks(3000)
    holder.add(some)
    await holder.settled()
    lost = set(some[::100])
    await holder.reader.withdraw(holder.record, list(lost))
    await holder.index.inner.nodes()
    found = sum(bool(lost & set(holder.publisher._draw())) for _ in range(100))
    assert found >= 80  # 93 are to be expected, 2.5 more or less
    checks = 0
    while holder.done["publish"] == len(some):
        assert checks < 5, "not found"
        checks += 1
        finds = holder.index.calls.count("find")
        holder.publisher.doubt()
        await until(lambda n=finds: holder.index.calls.count("find") == n + 4, "a check")
        await asyncio.sleep(0.05)
    await holder.settled()
    assert await holder.equals(some)


async def test_blocks_on_their_way_are_not_missed(make_holder: Any) -> None:
    """1. Blocks are being published. 2. A check. They are not in the index, and nothing is lost."""
    holder = await make_holder()
    holder.index.passes.clear()
    holder.add(blocks(100))
    await until(lambda: holder.index.calls == ["publish"], "the call runs")
    assert holder.publisher.unpublished == 100
    assert holder.publisher._draw() == []
    holder.index.passes.set()
    await holder.settled()
    assert len(holder.publisher._draw()) == 100


def overwrite(holder: Holder, valkey: Any, some: Sequence[BlockId], value: bytes | None) -> None:
    """What somebody else may do to the values of these blocks; None: another type."""
    with valkey.client() as client:
        for key in Keys(holder.config.index_prefix).blocks(some):
            client.delete(key)
            if value is None:
                client.rpush(key, *range(100))
            else:
                client.set(key, value)


async def silent_checks(holder: Holder, count: int) -> None:
    """So many checks, of which the index answers none."""
    for _ in range(count):
        faults = holder.faults.count("find")
        holder.publisher.doubt()
        await until(lambda n=faults: holder.faults.count("find") == n + 1, "a check without an answer")


async def test_values_that_are_too_large_to_be_read_are_replaced(
    make_holder: Any, valkey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 MiB over each of a node's keys: no check is answered in time; after two it publishes everything."""
    holder = await make_holder(index_timeout_s=0.02)
    some = blocks(100)
    holder.add(some)
    await holder.settled()
    overwrite(holder, valkey, some, bytes(1 << 20))
    await silent_checks(holder, MAX_SILENT_CHECKS - 1)
    assert not holder.publisher.unpublished
    await silent_checks(holder, 1)
    await until(lambda: holder.done["publish"] == 200, "all of it is published again")
    await holder.settled()
    assert await holder.equals(some)
    # Something else may keep the index from answering: so this is not done all the time.
    overwrite(holder, valkey, some, bytes(1 << 20))
    await silent_checks(holder, 2 * MAX_SILENT_CHECKS)
    await asyncio.sleep(0.05)
    assert holder.done["publish"] == 200
    assert not holder.publisher.unpublished
    monkeypatch.setattr(publisher_module, "RECONCILE_S", 0.01)
    await silent_checks(holder, 1)
    await until(lambda: holder.done["publish"] == 300, "it is time again")
    await holder.settled()
    assert await holder.equals(some)


async def test_single_checks_without_an_answer_change_nothing(
    make_holder: Any,
) -> None:
    holder = await make_holder()
    holder.add(blocks(3))
    await holder.settled()
    await holder.index.inner.nodes()
    for number in range(2 * MAX_SILENT_CHECKS):
        holder.index.is_cut = number % MAX_SILENT_CHECKS == 0
        finds = holder.index.calls.count("find")
        holder.publisher.doubt()
        await until(lambda n=finds: holder.index.calls.count("find") == n + 1, "a check")
        await asyncio.sleep(0.05)
    assert holder.faults == ["find"] * 2
    assert holder.done["publish"] == 3
    assert holder.publisher.unpublished == 0


GARBAGE: dict[str, Callable[[NodeRecord, int], bytes | None]] = {
    "of another length": lambda its, now_s: b"x" * 19,
    "too long": lambda its, now_s: b"x" * 1000,
    "of another type": lambda its, now_s: None,
    "of no time": lambda its, now_s: b"\xff" * 160,
    "of nodes that are not": lambda its, now_s: b"".join(
        entry_head(f"{number:032x}", 1, TierKind.DRAM) + (now_s + 80_000).to_bytes(4, "little")
        for number in range(100, 108)
    ),
    "of no incarnation": lambda its, now_s: (
        entry_head(its.node, 2**56 - 1, TierKind.DRAM) + (now_s + 80_000).to_bytes(4, "little")
    ),
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_over_all_values_is_replaced(make_holder: Any, valkey: Any, kind: str) -> None:
    holder = await make_holder()
    some = blocks(50)
    holder.add(some)
    await holder.settled()
    await holder.index.inner.nodes()
    with valkey.client() as client:
        now_s = int(client.time()[0])
    overwrite(holder, valkey, some, GARBAGE[kind](holder.record, now_s))
    assert not await holder.published(some)
    holder.publisher.doubt()
    await until(lambda: holder.done["publish"] == 100, "all of it is published again")
    assert await holder.equals(some)


async def test_a_doubt_without_blocks_or_index_is_harmless(make_holder: Any) -> None:
    holder = await make_holder()
    holder.publisher.doubt()
    await until(lambda: not holder.publisher._doubts.is_set(), "nothing is there to look for")
    holder.add(blocks(3))
    await holder.settled()
    assert holder.index.calls == ["publish"]
    holder.index.is_cut = True
    holder.publisher.doubt()
    await until(lambda: holder.faults == ["find"], "the index is away")
    assert holder.publisher.unpublished == 0


@pytest.mark.slow
async def test_entries_are_renewed_before_they_end(make_holder: Any) -> None:
    holder = await make_holder(index_ttl_s=3.0)
    some = blocks(20)
    gone = blocks(5, 1000)
    holder.add(some + gone)
    await holder.settled()
    for block in gone:  # the node lost them, and the withdrawal too
        del holder.here[block]
    loop = asyncio.get_running_loop()
    end = loop.time() + 6.0
    while loop.time() < end:
        assert len(await holder.published(some)) == len(some)
        await asyncio.sleep(0.1)
    assert await holder.published(gone) == {}


@pytest.mark.slow
async def test_100k_blocks_are_back_within_30_s(make_holder: Any, valkey: Any) -> None:
    """At the default rate, while changes go on and are not held up."""
    holder = await make_holder()
    many = blocks(100_000)
    holder.here = dict.fromkeys(many, TierKind.DRAM)
    holder.publisher.republish()
    await asyncio.sleep(0.1)
    holder.add(blocks(10, 200_000))
    await until(
        lambda: not holder.publisher._added and not holder.publisher._in_flight, "changes go first", 5.0
    )
    assert holder.publisher.unpublished > 50_000
    await until(lambda: not holder.publisher.unpublished, "100,000 blocks are published", 30.0)
    assert await holder.equals(many[::97] + blocks(10, 200_000))
