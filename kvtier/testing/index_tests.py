"""What every index has to pass, as a pytest class to subclass.

.. code-block:: python

    class TestMyIndex(IndexTests):
        @pytest.fixture
        def make_index(self, my_server):
            prefix = fresh_prefix()
            return lambda **options: MyIndex(my_server, prefix, **options)

`make_index` returns a callable that makes a closed index; all that one test makes share what they store, and
nobody else does. Its options are ``ttl_s`` and ``dead_after_s``. Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

import pytest
import pytest_asyncio

from kvtier.errors import Fenced, IndexFault
from kvtier.interfaces import Index
from kvtier.types import MAX_SHARDS, BlockId, Location, NodeRecord, TierKind

DEADLINE_S = 10.0
"""Whatever ends by itself has to have ended by then."""


class MakeIndex(Protocol):
    """Makes a closed index; see the module."""

    def __call__(self, *, ttl_s: float = 3600.0, dead_after_s: float = 15.0) -> Index:
        """One more view of what the test stores."""
        ...


def record_of(node: int, incarnation: int = 1, **fields: object) -> NodeRecord:
    """A node's record; each call is another daemon."""
    record = NodeRecord(
        node=f"{node:032x}",
        incarnation=incarnation,
        instance=uuid.uuid4().hex,
        name=f"node-{node}",
        address=f"127.0.0.1:{20_000 + node}",
        protocol_version=1,
        capacity_bytes=1 << 40,
        resident_bytes=node,
        load=0.25,
    )
    return replace(record, **fields)  # type: ignore[arg-type]


def blocks_of(count: int, seed: int = 0, shard: int = 0) -> list[BlockId]:
    """Blocks with random keys, the same for the same seed."""
    rng = random.Random(seed)
    return [BlockId(rng.randbytes(32), shard) for _ in range(count)]


def place(record: NodeRecord, tier: TierKind = TierKind.DRAM) -> Location:
    """The location that a node's publication makes."""
    return Location(record.node, record.incarnation, tier)


async def eventually(holds: Callable[[], Awaitable[bool]], deadline_s: float = DEADLINE_S) -> None:
    """Wait until something holds."""
    end_s = time.monotonic() + deadline_s
    while not await holds():
        assert time.monotonic() < end_s, "it does not happen"
        await asyncio.sleep(0.02)


async def begin(index: Index, record: NodeRecord) -> NodeRecord:
    """Register and say that the node lives."""
    record = replace(record, incarnation=await index.register(record))
    assert await index.heartbeat(record)
    return record


async def found(index: Index, blocks: Sequence[BlockId], *, in_hbm: bool = False) -> list[set[Location]]:
    """What `find` says of the nodes that live now, for comparison; also that no place is named twice."""
    await index.nodes()
    return await found_at_once(index, blocks, in_hbm=in_hbm)


async def found_at_once(
    index: Index, blocks: Sequence[BlockId], *, in_hbm: bool = False
) -> list[set[Location]]:
    """What `find` says, whichever nodes it knows of."""
    answer = await index.find(blocks, in_hbm=in_hbm)
    assert len(answer) == len(blocks)
    for places in answer:
        assert len(set(places)) == len(places)
    return [set(places) for places in answer]


@pytest.mark.asyncio
class IndexTests:
    """Subclass it, give `make_index`, and the index is tested."""

    @pytest.fixture
    def make_index(self) -> MakeIndex:
        """Override: a callable that makes a closed index."""
        raise NotImplementedError("a subclass of IndexTests defines the fixture make_index")

    @pytest_asyncio.fixture
    async def open_index(self, make_index: MakeIndex) -> AsyncIterator[Callable[..., Awaitable[Index]]]:
        """Makes open indexes and closes them."""
        made: list[Index] = []

        async def make(**options: float) -> Index:
            index = make_index(**options)
            made.append(index)
            await index.open()
            return index

        yield make
        for index in made:
            await index.close()

    @pytest_asyncio.fixture
    async def index(self, open_index: Callable[..., Awaitable[Index]]) -> Index:
        """An open index."""
        return await open_index()

    @pytest_asyncio.fixture
    async def other(self, open_index: Callable[..., Awaitable[Index]]) -> Index:
        """What another node sees of it."""
        return await open_index()

    # ---- life

    async def test_closed_is_a_fault(self, make_index: MakeIndex) -> None:
        """Before open and after close every use is an `IndexFault`; open and close may be repeated."""
        index = make_index()
        await index.close()
        record, blocks = record_of(1), blocks_of(1)
        for _ in range(2):
            for use in (
                lambda: index.register(record),
                lambda: index.heartbeat(record),
                lambda: index.leave(record),
                lambda: index.nodes(),
                lambda: index.publish(record, blocks, TierKind.DRAM),
                lambda: index.withdraw(record, blocks),
                lambda: index.withdraw(record, blocks, in_hbm=True),
                lambda: index.find(blocks),
                lambda: index.find(blocks, in_hbm=True),
            ):
                with pytest.raises(IndexFault):
                    await use()
            await index.open()
            await index.open()
            assert await index.nodes() == []
            await index.close()
            await index.close()

    async def test_nothing_at_once(self, index: Index) -> None:
        """Empty batches are fine, unknown blocks are nowhere."""
        record = await begin(index, record_of(1))
        await index.publish(record, [], TierKind.DRAM)
        await index.withdraw(record, [])
        assert await index.find([]) == []
        assert await index.find(blocks_of(3)) == [(), (), ()]
        await index.withdraw(record, blocks_of(3))
        assert await index.find(blocks_of(3)) == [(), (), ()]

    # ---- nodes

    async def test_what_nodes_say_is_what_others_read(self, index: Index, other: Index) -> None:
        """Every field, in the state of the last heartbeat."""
        first = await begin(index, record_of(1, name="Rechenzentrum Süd", address="[::1]:7"))
        second = await begin(other, record_of(2, 7, address="", load=0.0))
        assert await index.nodes() == [first, second]
        first = replace(first, resident_bytes=2**50, load=1.0, address="host-1.example:65535")
        assert await index.heartbeat(first)
        assert await other.nodes() == [first, second]

    async def test_incarnations_grow(self, index: Index, other: Index) -> None:
        """At least what the node wants, always more than what was; each node by itself."""
        assert await index.register(record_of(1, 1_800_000_000)) == 1_800_000_000
        assert await other.register(record_of(1, 1_800_000_000)) == 1_800_000_001
        assert await index.register(record_of(1, 5)) == 1_800_000_002
        assert await index.register(record_of(1, 1_900_000_000)) == 1_900_000_000
        assert await index.register(record_of(2, 5)) == 5

    async def test_incarnations_of_a_crowd_differ(self, index: Index, other: Index) -> None:
        """Two daemons that start at the same time never get the same one."""
        wanted = [(index, other)[number % 2].register(record_of(1, 9)) for number in range(20)]
        assert sorted(await asyncio.gather(*wanted)) == list(range(9, 29))

    async def test_incarnations_survive_death(self, open_index: Callable[..., Awaitable[Index]]) -> None:
        """A node that is long gone gets a younger one all the same."""
        index = await open_index(dead_after_s=0.2)
        await begin(index, record_of(1, 40))
        await eventually(lambda: _is_empty(index))
        assert await index.register(record_of(1, 3)) == 41
        left = replace(record_of(2, 7))
        left = await begin(index, left)
        await index.leave(left)
        assert await index.register(record_of(2, 3)) == 8

    async def test_a_silent_node_is_dead(self, open_index: Callable[..., Awaitable[Index]]) -> None:
        """After `dead_after_s` it is not listed and does not count; a heartbeat brings it back, as lost."""
        index, patient = await open_index(dead_after_s=0.5), await open_index()
        mortal, other = await begin(index, record_of(1)), await begin(patient, record_of(2))
        blocks = blocks_of(2)
        await index.publish(mortal, blocks, TierKind.DRAM)
        assert await found(patient, blocks) == [{place(mortal)}] * 2
        await eventually(lambda: _lists(patient, other))
        assert await found(patient, blocks) == [set()] * 2
        assert not await index.heartbeat(mortal)
        assert await index.heartbeat(mortal)
        assert await patient.nodes() == [mortal, other]
        assert await found(patient, blocks) == [{place(mortal)}] * 2

    async def test_a_lost_index_learns_of_a_node_by_its_heartbeat(self, index: Index) -> None:
        """A node that could not register begins with a heartbeat; it counts as lost, once."""
        record = record_of(1, 77)
        assert not await index.heartbeat(record)
        assert await index.heartbeat(record)
        assert await index.nodes() == [record]
        assert await index.register(record_of(1, 1)) == 78

    async def test_a_zombie_is_fenced(self, index: Index, other: Index) -> None:
        """It cannot overwrite its successor, list itself, or take the successor out."""
        zombie = await begin(index, record_of(1, 10))
        heir = await begin(other, record_of(1, 10))
        assert heir.incarnation == 11
        for _ in range(2):
            with pytest.raises(Fenced):
                await index.heartbeat(zombie)
        await index.leave(zombie)
        assert await index.nodes() == [heir]
        assert await other.heartbeat(heir)

    async def test_of_two_daemons_the_later_wins(self, index: Index, other: Index) -> None:
        """Whoever registers last goes on, the other one stops; also before the first heartbeat."""
        first, second = record_of(1, 10), record_of(1, 10)
        first = replace(first, incarnation=await index.register(first))
        second = replace(second, incarnation=await other.register(second))
        with pytest.raises(Fenced):
            await index.heartbeat(first)
        assert await other.heartbeat(second)
        assert await index.nodes() == [second]

    async def test_the_same_incarnation_is_not_the_same_daemon(self, index: Index, other: Index) -> None:
        """Two that began without the index with one number: whose heartbeat comes first goes on."""
        first, second = record_of(1, 10), record_of(1, 10)
        assert not await index.heartbeat(first)
        with pytest.raises(Fenced):
            await other.heartbeat(second)
        assert await index.heartbeat(first)

    async def test_a_younger_one_needs_no_registration(self, index: Index, other: Index) -> None:
        """The heartbeat of a younger incarnation takes over; the older is fenced from then on."""
        old = await begin(index, record_of(1, 10))
        young = record_of(1, 12)
        assert not await other.heartbeat(young)
        assert await other.nodes() == [young]
        with pytest.raises(Fenced):
            await index.heartbeat(old)

    async def test_registered_but_never_told(self, index: Index) -> None:
        """The answer to `register` was lost: the daemon goes on with its own number and is not fenced."""
        await index.register(record_of(1, 50))
        record = record_of(1, 10)
        assert await index.register(record) == 51
        await index.heartbeat(record)
        assert await index.heartbeat(record)
        assert await index.nodes() == [record]
        assert await index.register(record_of(1, 10)) == 52

    async def test_leave(self, index: Index, other: Index) -> None:
        """Who leaves is listed and found no longer, at once; leaving twice does nothing."""
        record, stays = await begin(index, record_of(1)), await begin(other, record_of(2))
        blocks = blocks_of(1)
        await index.publish(record, blocks, TierKind.DRAM)
        await index.leave(record)
        await index.leave(record)
        assert await other.nodes() == [stays]
        assert await found(other, blocks) == [set()]

    # ---- locations

    async def test_find_what_was_published(self, index: Index, other: Index) -> None:
        """By whom and where, in the order asked for, repeated ones too; shards do not mix."""
        first, second = await begin(index, record_of(1)), await begin(other, record_of(2))
        blocks = blocks_of(300)
        await index.publish(first, blocks[:200], TierKind.DRAM)
        await other.publish(second, blocks[100:], TierKind.NVME)
        for view in (index, other):
            expected: list[set[Location]] = [{place(first)}] * 100
            expected += [{place(first), place(second, TierKind.NVME)}] * 100
            expected += [{place(second, TierKind.NVME)}] * 100
            assert await found(view, blocks) == expected
            assert await found(view, blocks[::-1]) == expected[::-1]
            assert await found(view, [blocks[0], blocks[150], blocks[0]]) == [
                expected[at] for at in (0, 150, 0)
            ]
            assert await found(view, [block._replace(shard=1) for block in blocks]) == [set()] * 300

    async def test_a_new_node_is_found_without_asking_for_nodes(self, index: Index, other: Index) -> None:
        """`find` learns of nodes by itself."""
        blocks = blocks_of(2)
        first = await begin(index, record_of(1))
        await index.publish(first, blocks, TierKind.DRAM)
        await eventually(lambda: _finds(other, blocks, {place(first)}))
        second = await begin(index, record_of(2))
        await index.publish(second, blocks, TierKind.DRAM)
        await eventually(lambda: _finds(other, blocks, {place(first), place(second)}))

    async def test_every_shard(self, index: Index) -> None:
        """One key in many shards is as many blocks, the first and the last included."""
        record = await begin(index, record_of(1))
        key = blocks_of(1)[0].key
        shards = [0, 1, 255, 256, MAX_SHARDS - 1]
        blocks = [BlockId(key, shard) for shard in shards]
        await index.publish(record, blocks, TierKind.DRAM)
        assert await found(index, blocks) == [{place(record)}] * len(blocks)
        await index.withdraw(record, blocks[1:2])
        assert [bool(places) for places in await index.find(blocks)] == [True, False, True, True, True]

    async def test_many_blocks_in_one_call(self, index: Index) -> None:
        """More than any batch holds."""
        record = await begin(index, record_of(1))
        blocks = blocks_of(10_000)
        await index.publish(record, blocks, TierKind.DRAM)
        for at in range(0, len(blocks), 500):
            assert await found(index, blocks[at : at + 500]) == [{place(record)}] * 500
        await index.withdraw(record, blocks[:9_999])
        assert await found(index, blocks[-2:]) == [set(), {place(record)}]

    async def test_a_block_that_moves(self, index: Index) -> None:
        """The tier of the last publication counts; one location for each node."""
        record = await begin(index, record_of(1))
        blocks = blocks_of(5)
        for tier in (TierKind.DRAM, TierKind.NVME, TierKind.FAR, TierKind.DRAM):
            await index.publish(record, blocks, tier)
            assert await found(index, blocks) == [{place(record, tier)}] * 5

    async def test_withdraw(self, index: Index, other: Index) -> None:
        """Only the node's own, only these blocks; twice is once."""
        first, second = await begin(index, record_of(1)), await begin(other, record_of(2))
        blocks = blocks_of(4)
        await index.publish(first, blocks, TierKind.DRAM)
        await other.publish(second, blocks, TierKind.DRAM)
        await index.nodes()
        for _ in range(2):
            await index.withdraw(first, blocks[:2])
            assert await found(index, blocks) == [{place(second)}] * 2 + [{place(first), place(second)}] * 2

    async def test_an_older_life_does_not_count(self, index: Index, other: Index) -> None:
        """What a node published before its restart is not found, whether or not it publishes again."""
        old = await begin(index, record_of(1, 10))
        blocks = blocks_of(4)
        await index.publish(old, blocks, TierKind.DRAM)
        assert await found(other, blocks) == [{place(old)}] * 4
        heir = await begin(other, record_of(1, 10))
        assert await found(other, blocks) == [set()] * 4
        await other.publish(heir, blocks[:2], TierKind.NVME)
        assert await found(other, blocks) == [{place(heir, TierKind.NVME)}] * 2 + [set()] * 2

    async def test_a_zombie_changes_no_location(self, index: Index, other: Index) -> None:
        """Neither its publication nor its withdrawal touches what its successor has."""
        zombie = await begin(index, record_of(1, 10))
        heir = await begin(other, record_of(1, 10))
        blocks = blocks_of(2)
        await other.publish(heir, blocks, TierKind.DRAM)
        await index.publish(zombie, blocks, TierKind.NVME)
        await index.withdraw(zombie, blocks)
        assert await found(other, blocks) == [{place(heir)}] * 2

    async def test_a_popular_block_has_a_bound(self, index: Index) -> None:
        """Eight nodes at most are named: those that published, or renewed, last."""
        records = [await begin(index, record_of(number)) for number in range(12)]
        blocks = blocks_of(1)
        for record in [*records, records[5]]:
            await index.publish(record, blocks, TierKind.DRAM)
        assert await found(index, blocks) == [{place(record) for record in records[4:]}]
        await index.publish(records[0], blocks, TierKind.DRAM)
        kept = [records[5], *records[6:], records[0]]
        assert await found(index, blocks) == [{place(record) for record in kept}]

    async def test_hbm_is_apart(self, index: Index, other: Index) -> None:
        """What a node's engines have and what it has itself are told and withdrawn without each other."""
        first, second = await begin(index, record_of(1)), await begin(other, record_of(2))
        blocks = blocks_of(3)
        await index.publish(first, blocks[:2], TierKind.HBM)
        assert await found(other, blocks) == [set()] * 3
        assert await found(other, blocks, in_hbm=True) == [{place(first, TierKind.HBM)}] * 2 + [set()]
        await index.publish(first, blocks[1:], TierKind.NVME)
        await other.publish(second, blocks[1:2], TierKind.HBM)
        both = {place(first, TierKind.HBM), place(second, TierKind.HBM)}
        here = {place(first, TierKind.NVME)}
        for view in (index, other):
            assert await found(view, blocks) == [set(), here, here]
            assert await found(view, blocks, in_hbm=True) == [{place(first, TierKind.HBM)}, both, set()]
        await index.withdraw(first, blocks[1:2], in_hbm=True)
        assert await found(other, blocks) == [set(), here, here], "its own place stays"
        assert await found(other, blocks[1:2], in_hbm=True) == [{place(second, TierKind.HBM)}]
        await index.withdraw(first, blocks)
        assert await found(other, blocks) == [set()] * 3
        assert await found(other, blocks[:1], in_hbm=True) == [{place(first, TierKind.HBM)}], (
            "and its engines'"
        )

    async def test_an_older_life_does_not_count_in_hbm(self, index: Index, other: Index) -> None:
        """A restarted node's engines begin anew, and the zombie changes nothing there either."""
        zombie = await begin(index, record_of(1, 10))
        blocks = blocks_of(2)
        await index.publish(zombie, blocks, TierKind.HBM)
        heir = await begin(other, record_of(1, 10))
        assert await found(other, blocks, in_hbm=True) == [set()] * 2
        await other.publish(heir, blocks[:1], TierKind.HBM)
        await index.publish(zombie, blocks, TierKind.HBM)
        await index.withdraw(zombie, blocks, in_hbm=True)
        assert await found(other, blocks, in_hbm=True) == [{place(heir, TierKind.HBM)}, set()]

    async def test_a_crowd_in_hbm_takes_no_place_of_what_can_be_loaded(self, index: Index) -> None:
        """Each has its own bound."""
        records = [await begin(index, record_of(number)) for number in range(10)]
        blocks = blocks_of(1)
        await index.publish(records[0], blocks, TierKind.DRAM)
        for record in records:
            await index.publish(record, blocks, TierKind.HBM)
        assert await found(index, blocks) == [{place(records[0])}]
        named = {place(record, TierKind.HBM) for record in records[2:]}
        assert await found(index, blocks, in_hbm=True) == [named]

    async def test_locations_end(self, open_index: Callable[..., Awaitable[Index]]) -> None:
        """What is not renewed ends after its TTL, also beside what is; renewal prolongs it."""
        short, long = await open_index(ttl_s=1.0), await open_index()
        first, second = await begin(short, record_of(1)), await begin(long, record_of(2))
        blocks = blocks_of(2)
        await short.publish(first, blocks, TierKind.DRAM)
        await long.publish(second, blocks[:1], TierKind.DRAM)
        assert await found(long, blocks) == [{place(first), place(second)}, {place(first)}]
        until_s = time.monotonic() + 2.5
        while time.monotonic() < until_s:
            await short.publish(first, blocks[1:], TierKind.DRAM)
            assert await found(long, blocks[1:]) == [{place(first)}]
            await asyncio.sleep(0.1)
        assert await found(long, blocks[:1]) == [{place(second)}]
        await eventually(lambda: _finds(long, blocks[1:], set()))

    async def test_a_shorter_life_cuts_nobody_elses(
        self, open_index: Callable[..., Awaitable[Index]]
    ) -> None:
        """A publication with a short TTL beside one with a long one ends alone."""
        short, long = await open_index(ttl_s=1.0), await open_index()
        first, second = await begin(short, record_of(1)), await begin(long, record_of(2))
        blocks = blocks_of(1)
        await long.publish(second, blocks, TierKind.DRAM)
        await short.publish(first, blocks, TierKind.DRAM)
        await eventually(lambda: _finds(long, blocks, {place(second)}))
        await short.withdraw(first, blocks)
        assert await found(long, blocks) == [{place(second)}]

    async def test_calls_do_not_mix(self, index: Index) -> None:
        """Many at once, each with its own answer."""
        record = await begin(index, record_of(1))
        batches = [blocks_of(64, seed) for seed in range(24)]
        await asyncio.gather(*(index.publish(record, batch, TierKind.DRAM) for batch in batches[:12]))
        await index.nodes()
        answers = []
        for at in range(0, 24, 4):
            answers += await asyncio.gather(*(index.find(batch) for batch in batches[at : at + 4]))
        assert answers == [[(place(record),)] * 64] * 12 + [[()] * 64] * 12

    async def test_a_call_that_is_cut_does_not_disturb_the_next(self, index: Index) -> None:
        """Cancelled at any moment, an answer is never taken for another call's."""
        record = await begin(index, record_of(1))
        there, gone = blocks_of(200, 1), blocks_of(200, 2)
        await index.publish(record, there, TierKind.DRAM)
        for number in range(30):
            call = asyncio.ensure_future(index.find(gone))
            for _ in range(number % 10):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await eventually(lambda: _finds(index, there, {place(record)}))


async def _is_empty(index: Index) -> bool:
    return await index.nodes() == []


async def _lists(index: Index, *records: NodeRecord) -> bool:
    return await index.nodes() == list(records)


async def _finds(index: Index, blocks: Sequence[BlockId], expected: set[Location]) -> bool:
    """Whether each block has these places; a call that is not answered in time finds nothing."""
    try:
        return await found_at_once(index, blocks) == [expected] * len(blocks)
    except IndexFault:
        return False
