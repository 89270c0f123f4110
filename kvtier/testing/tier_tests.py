"""What every tier has to pass, as a pytest class to subclass.

.. code-block:: python

    class TestMyTier(TierTests):
        @pytest.fixture
        def make_tier(self, tmp_path):
            return lambda: MyTier(tmp_path, capacity_bytes=4 << 20, extent_bytes=1 << 20)

`make_tier` returns a callable that makes a closed tier of at least two extents of at least eight pages,
each call on the same medium, one open at a time. Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest
import pytest_asyncio

from kvtier.errors import TierFault
from kvtier.hashing import checksum
from kvtier.interfaces import Durable, Failing, Growing, Mapped, Tier
from kvtier.types import PAGE_SIZE_BYTES, BlockId, BlockRecord, Slot

MakeTier = Callable[[], Tier]
FINGERPRINT = hashlib.sha256(b"tier tests").digest()


def slot_of(tier: Tier, extent: int, index: int, block_bytes: int = PAGE_SIZE_BYTES) -> Slot:
    """The slot `index` of an extent that serves blocks of `block_bytes` (whole pages)."""
    size_bytes = block_bytes + tier.traits.header_bytes
    offset_bytes = extent * tier.extent_bytes + index * size_bytes
    return Slot(getattr(tier, "arena_id", 0), extent, offset_bytes, size_bytes)


def record_of(payload: bytes, shard: int = 0, fingerprint: bytes = FINGERPRINT) -> BlockRecord:
    """The record of a block whose key is made from its content; every second one has a parent."""
    key = hashlib.sha256(payload).digest()
    parent = hashlib.sha256(key).digest() if key[0] % 2 else None
    return BlockRecord(BlockId(key, shard), parent, fingerprint, len(payload), checksum(memoryview(payload)))


async def read_all(tier: Tier, slots: Sequence[Slot], payloads: Sequence[bytes]) -> list[bytes | None]:
    """What lies in each slot if these payloads are expected there; None where the tier finds it wrong."""
    buffers = [bytearray(len(payload)) for payload in payloads]
    records = [record_of(payload) for payload in payloads]
    wrong = await tier.read(slots, records, [memoryview(buffer) for buffer in buffers])
    assert wrong == sorted(set(wrong))
    return [None if position in wrong else bytes(buffer) for position, buffer in enumerate(buffers)]


async def write_all(tier: Tier, slots: Sequence[Slot], payloads: Sequence[bytes]) -> None:
    """Write bytes, read-only ones as they come from a socket, each under a record of its own."""
    records = [record_of(payload) for payload in payloads]
    await tier.write(slots, records, [memoryview(payload) for payload in payloads])


@pytest.mark.asyncio
class TierTests:
    """Subclass it, give `make_tier`, and the medium is tested. Random content is seeded."""

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        """Override: a callable that makes a closed tier."""
        raise NotImplementedError("a subclass of TierTests defines the fixture make_tier")

    @pytest_asyncio.fixture
    async def tier(self, make_tier: MakeTier) -> AsyncIterator[Tier]:
        """An open tier."""
        tier = make_tier()
        await tier.open()
        yield tier
        await tier.close()

    @pytest.fixture
    def content(self) -> Callable[[int], bytes]:
        """Makes so many random bytes."""
        return random.Random(0).randbytes

    # ---- life

    async def test_sizes(self, tier: Tier) -> None:
        """Cap and allocation are whole extents, at least two of them, of at least eight pages."""
        assert tier.capacity_bytes % tier.extent_bytes == 0
        assert tier.allocated_bytes % tier.extent_bytes == 0
        assert 2 * tier.extent_bytes <= tier.allocated_bytes <= tier.capacity_bytes
        assert tier.extent_bytes % PAGE_SIZE_BYTES == 0
        assert tier.extent_bytes >= 8 * PAGE_SIZE_BYTES
        assert tier.traits.header_bytes % PAGE_SIZE_BYTES == 0
        assert tier.traits.outlives == isinstance(tier, Durable)

    async def test_open_and_close_twice(self, make_tier: MakeTier, content: Callable[[int], bytes]) -> None:
        """A second open keeps what is there; a second close, or one without open, does nothing."""
        never_opened = make_tier()
        await never_opened.close()
        tier = make_tier()
        await tier.open()
        slot, payload = slot_of(tier, 0, 0), content(PAGE_SIZE_BYTES)
        await write_all(tier, [slot], [payload])
        await tier.open()
        assert await read_all(tier, [slot], [payload]) == [payload]
        await tier.close()
        await tier.close()

    async def test_closed_is_a_fault(self, make_tier: MakeTier) -> None:
        """Before open and after close every use is a `TierFault`."""
        tier = make_tier()
        slot = slot_of(tier, 0, 0)
        for _ in range(2):
            with pytest.raises(TierFault):
                await read_all(tier, [slot], [b"x"])
            with pytest.raises(TierFault):
                await write_all(tier, [slot], [b"x"])
            with pytest.raises(TierFault):
                await tier.drop([slot])
            await tier.open()
            await tier.close()

    async def test_opens_again_after_close(self, make_tier: MakeTier) -> None:
        """The medium can be used by the next daemon."""
        for _ in range(3):
            tier = make_tier()
            await tier.open()
            await write_all(tier, [slot_of(tier, 1, 0)], [b"again"])
            await tier.close()

    # ---- bytes

    async def test_reads_what_was_written(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """Whole slots, in the order in which they are named."""
        slots = [slot_of(tier, index % 2, index // 2) for index in range(8)]
        payloads = [content(PAGE_SIZE_BYTES) for _ in slots]
        await write_all(tier, slots, payloads)
        assert await read_all(tier, slots, payloads) == payloads
        assert await read_all(tier, slots[::-1], payloads[::-1]) == payloads[::-1]
        assert await read_all(tier, [slots[3], slots[3]], [payloads[3]] * 2) == [payloads[3]] * 2

    async def test_a_block_may_be_shorter_than_its_slot(
        self, tier: Tier, content: Callable[[int], bytes]
    ) -> None:
        """What is not a whole page lies at the start of the slot, and only so much is read."""
        slot = slot_of(tier, 0, 1)
        for size_bytes in (1, 511, 4095):
            payload = content(size_bytes)
            await write_all(tier, [slot], [payload])
            buffer = bytearray(b"?" * PAGE_SIZE_BYTES)
            assert await tier.read([slot], [record_of(payload)], [memoryview(buffer)]) == []
            assert buffer == payload + b"?" * (PAGE_SIZE_BYTES - size_bytes)

    async def test_buffers_may_be_larger_than_the_block(
        self, tier: Tier, content: Callable[[int], bytes]
    ) -> None:
        """As whole slots of another tier are; they may lie anywhere in memory."""
        payload = content(PAGE_SIZE_BYTES - 100)
        for shift in (0, 1, 512):
            larger = bytes(shift) + payload + b"more"
            slot = slot_of(tier, 0, shift % 3)
            await tier.write([slot], [record_of(payload)], [memoryview(larger)[shift:]])
            assert await read_all(tier, [slot], [payload]) == [payload]

    async def test_slots_at_the_border_of_extents(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """The last slot of one extent and the first of the next are neighbours and do not touch."""
        last = tier.extent_bytes // slot_of(tier, 0, 0).size_bytes - 1
        slots = [slot_of(tier, 0, last - 1), slot_of(tier, 0, last), slot_of(tier, 1, 0), slot_of(tier, 1, 1)]
        payloads = [content(PAGE_SIZE_BYTES) for _ in slots]
        await write_all(tier, slots, payloads)
        for index in (1, 2):
            payloads[index] = content(PAGE_SIZE_BYTES)
            await write_all(tier, [slots[index]], [payloads[index]])
            assert await read_all(tier, slots, payloads) == payloads

    async def test_slots_of_every_size(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """One page, some pages, and a whole extent; the very last byte of the tier too."""
        end = tier.allocated_bytes // tier.extent_bytes - 1
        largest = tier.extent_bytes - tier.traits.header_bytes
        for block_bytes in (PAGE_SIZE_BYTES, 3 * PAGE_SIZE_BYTES, largest):
            index = tier.extent_bytes // (block_bytes + tier.traits.header_bytes) - 1
            slots = [slot_of(tier, extent, index, block_bytes) for extent in (0, end)]
            payloads = [content(block_bytes) for _ in slots]
            await write_all(tier, slots, payloads)
            assert await read_all(tier, slots, payloads) == payloads
            await tier.drop(slots)

    async def test_many_at_once(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """Concurrent calls on different slots do not mix."""
        slots = [slot_of(tier, index % 2, index // 2) for index in range(8)]
        payloads = [content(PAGE_SIZE_BYTES) for _ in slots]
        pairs = list(zip(slots, payloads, strict=True))
        await asyncio.gather(*(write_all(tier, [slot], [payload]) for slot, payload in pairs))
        found = await asyncio.gather(*(read_all(tier, [slot], [payload]) for slot, payload in pairs))
        assert [one for (one,) in found] == payloads

    async def test_nothing_at_once(self, tier: Tier) -> None:
        """Empty batches are fine."""
        assert await tier.read([], [], []) == []
        await tier.write([], [], [])
        await tier.drop([])

    async def test_drop_and_reuse(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """After drop a slot is written anew, its neighbour is as it was; then in another size too."""
        block_bytes = 2 * PAGE_SIZE_BYTES
        slots = [slot_of(tier, 0, index, block_bytes) for index in range(2)]
        payloads = [content(block_bytes) for _ in slots]
        await write_all(tier, slots, payloads)
        await tier.drop([slots[0]])
        assert await read_all(tier, [slots[1]], [payloads[1]]) == [payloads[1]]
        payloads[0] = content(block_bytes)
        await write_all(tier, [slots[0]], [payloads[0]])
        assert await read_all(tier, slots, payloads) == payloads
        await tier.drop(slots)
        smaller = [slot_of(tier, 0, index) for index in range(3)]
        fresh = [content(PAGE_SIZE_BYTES) for _ in smaller]
        await write_all(tier, smaller, fresh)
        assert await read_all(tier, smaller, fresh) == fresh

    async def test_a_cancelled_call_leaves_the_buffers_alone(
        self, tier: Tier, content: Callable[[int], bytes]
    ) -> None:
        """When it has ended, nothing is written to its buffers any more."""
        slots = [slot_of(tier, 0, index) for index in range(4)]
        payloads = [content(PAGE_SIZE_BYTES) for _ in slots]
        await write_all(tier, slots, payloads)
        records = [record_of(payload) for payload in payloads]
        for wait in range(8):
            buffers = [bytearray(PAGE_SIZE_BYTES) for _ in slots]
            reading = asyncio.ensure_future(tier.read(slots, records, [memoryview(one) for one in buffers]))
            for _ in range(wait):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            for buffer in buffers:
                buffer[:] = b"?" * PAGE_SIZE_BYTES
            assert await read_all(tier, slots, payloads) == payloads
            assert all(buffer == b"?" * PAGE_SIZE_BYTES for buffer in buffers)

    # ---- faults

    def wrong_slots(self, tier: Tier) -> list[Slot]:
        """Slots that do not exist, each for one reason."""
        extent_bytes, page = tier.extent_bytes, PAGE_SIZE_BYTES
        right = slot_of(tier, 0, 0)
        arena, size = right.arena, right.size_bytes
        end_extent = tier.allocated_bytes // extent_bytes
        return [
            Slot(arena, end_extent, tier.allocated_bytes, size),
            Slot(arena, end_extent + 10**6, tier.allocated_bytes + 10**6 * extent_bytes, size),
            Slot(arena, 0, extent_bytes - page, 2 * page),
            Slot(arena, 0, 0, extent_bytes + page),
            Slot(arena, -1, -size, size),
            Slot(arena, 1, 0, size),
            Slot(arena, 0, extent_bytes, size),
            Slot(arena, 0, 0, 0),
            Slot(arena, 0, page, -page),
            Slot(arena + 1, 0, 0, size),
        ]

    async def test_wrong_slots_are_faults(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """Named alone or behind a right one, a wrong slot is a `TierFault` and changes nothing."""
        right, payload = slot_of(tier, 0, 0), content(PAGE_SIZE_BYTES)
        await write_all(tier, [right], [payload])
        for wrong in self.wrong_slots(tier):
            for slots in ([wrong], [right, wrong]):
                with pytest.raises(TierFault):
                    await write_all(tier, slots, [b"bad"] * len(slots))
                with pytest.raises(TierFault):
                    await read_all(tier, slots, [b"bad"] * len(slots))
                with pytest.raises(TierFault):
                    await tier.drop(slots)
            assert await read_all(tier, [right], [payload]) == [payload], wrong

    async def test_buffers_that_do_not_fit(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """Too many bytes for a slot, too small a buffer, or other counts are a `TierFault`."""
        slots = [slot_of(tier, 0, 0), slot_of(tier, 0, 1)]
        payloads = [content(PAGE_SIZE_BYTES) for _ in slots]
        await write_all(tier, slots, payloads)
        records = [record_of(payload) for payload in payloads]
        large = [replace(records[0], block_bytes=PAGE_SIZE_BYTES + 1), records[1]]
        buffers = [memoryview(bytearray(2 * PAGE_SIZE_BYTES)) for _ in range(3)]
        short = [buffers[0][: PAGE_SIZE_BYTES - 1], buffers[1]]
        for bad_records, bad_buffers in (
            (large, buffers[:2]),
            (records, short),
            (records[:1], buffers[:2]),
            ([*records, records[0]], buffers[:2]),
            (records, buffers[:1]),
            (records, buffers),
        ):
            with pytest.raises(TierFault):
                await tier.write(slots, bad_records, bad_buffers)
            with pytest.raises(TierFault):
                await tier.read(slots, bad_records, bad_buffers)
        assert await read_all(tier, slots, payloads) == payloads

    # ---- what only some tiers have

    async def test_views_are_the_slots_themselves(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """A `Mapped` tier shows the bytes that `read` and `write` move."""
        if not isinstance(tier, Mapped):
            pytest.skip(f"{type(tier).__name__} is not Mapped: it has no views")
        slot, payload = slot_of(tier, 1, 2), content(PAGE_SIZE_BYTES)
        await write_all(tier, [slot], [payload])
        view = tier.view(slot)
        assert view.nbytes == slot.size_bytes
        assert view == payload
        view[:5] = b"hello"
        changed = b"hello" + payload[5:]
        assert await read_all(tier, [slot], [changed]) == [changed]
        for wrong in self.wrong_slots(tier):
            with pytest.raises(TierFault):
                tier.view(wrong)

    async def test_growth_ends_at_the_cap(self, tier: Tier) -> None:
        """A `Growing` tier never passes its cap and never shrinks."""
        if not isinstance(tier, Growing):
            pytest.skip(f"{type(tier).__name__} is not Growing: it opens with all its bytes")
        before_bytes = tier.allocated_bytes
        for _ in range(3):
            assert before_bytes <= tier.grow() <= tier.capacity_bytes
            before_bytes = tier.allocated_bytes

    async def test_a_durable_tier_recovers_what_was_not_dropped(
        self, make_tier: MakeTier, content: Callable[[int], bytes]
    ) -> None:
        """Slots and whole records; what was dropped or overwritten does not come back."""
        tier = make_tier()
        if not isinstance(tier, Durable):
            pytest.skip(f"{type(tier).__name__} is not Durable: it does not outlive the node")
        await tier.open()
        assert list(tier.recovered()) == []
        slots = [slot_of(tier, index % 2, index // 2) for index in range(8)]
        payloads = [content(PAGE_SIZE_BYTES - index) for index in range(8)]
        await write_all(tier, slots, payloads)
        await tier.drop(slots[:2])
        await tier.checkpoint()
        await tier.drop(slots[2:4])
        payloads[2] = content(100)
        payloads[4] = content(101)
        await write_all(tier, [slots[2], slots[4]], [payloads[2], payloads[4]])
        await tier.close()
        kept = [2, 4, 5, 6, 7]
        for _ in range(2):
            tier = make_tier()
            assert isinstance(tier, Durable)
            await tier.open()
            found = [pair for batch in tier.recovered() for pair in batch]
            assert sorted(found, key=lambda pair: slots.index(pair[0])) == [
                (slots[index], record_of(payloads[index])) for index in kept
            ]
            expected = [payloads[index] for index in kept]
            assert await read_all(tier, [slots[index] for index in kept], expected) == expected
            await tier.close()

    async def test_a_durable_tier_tells_other_blocks_apart(
        self, tier: Tier, content: Callable[[int], bytes]
    ) -> None:
        """Another key, shard, layout, size or checksum than the record asked for is found wrong."""
        if not isinstance(tier, Durable):
            pytest.skip(f"{type(tier).__name__} is not Durable: it keeps no records")
        slot, payload = slot_of(tier, 0, 0), content(PAGE_SIZE_BYTES)
        await write_all(tier, [slot], [payload])
        right = record_of(payload)
        buffer, *more = (memoryview(bytearray(PAGE_SIZE_BYTES)) for _ in range(3))
        for other in (
            replace(right, block=BlockId(bytes(32), 0)),
            replace(right, block=BlockId(right.block.key, 1)),
            replace(right, fingerprint=bytes(32)),
            replace(right, block_bytes=right.block_bytes - 1),
            replace(right, checksum=bytes(16)),
        ):
            assert await tier.read([slot], [other], [buffer]) == [0]
            assert await tier.read([slot, slot, slot], [right, other, right], [buffer, *more]) == [1]
        empty = slot_of(tier, 0, 1)
        assert await tier.read([empty, slot], [right, right], [buffer, more[0]]) == [0]
        await tier.drop([slot])
        assert await tier.read([slot], [right], [buffer]) == [0]

    async def test_a_failing_tier_is_well_at_first(self, tier: Tier) -> None:
        """It says so, and a probe agrees."""
        if not isinstance(tier, Failing):
            pytest.skip(f"{type(tier).__name__} is not Failing: memory does not stop working")
        assert tier.fault == ""
        assert await tier.probe()
