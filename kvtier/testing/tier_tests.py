"""What every tier has to pass, as a pytest class to subclass.

.. code-block:: python

    class TestMyTier(TierTests):
        @pytest.fixture
        def make_tier(self, tmp_path):
            return lambda: MyTier(tmp_path, capacity_bytes=4 << 20, extent_bytes=1 << 20)

`make_tier` returns a callable that makes a closed tier of at least two extents of at least four pages,
each call on the same medium, one open at a time. Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import pytest_asyncio

from kvtier.errors import TierFault
from kvtier.interfaces import Growing, Mapped, Tier
from kvtier.types import PAGE_SIZE_BYTES, Slot

MakeTier = Callable[[], Tier]


def slot_of(tier: Tier, extent: int, index: int, size_bytes: int = PAGE_SIZE_BYTES) -> Slot:
    """The slot `index` of an extent that serves slots of `size_bytes`."""
    offset_bytes = extent * tier.extent_bytes + index * size_bytes
    return Slot(getattr(tier, "arena_id", 0), extent, offset_bytes, size_bytes)


async def read_all(tier: Tier, slots: Sequence[Slot]) -> list[bytes]:
    """The whole content of each slot."""
    buffers = [bytearray(slot.size_bytes) for slot in slots]
    await tier.read(slots, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) for buffer in buffers]


async def write_all(tier: Tier, slots: Sequence[Slot], payloads: Sequence[bytes]) -> None:
    """Write bytes, read-only ones as they come from a socket."""
    await tier.write(slots, [memoryview(payload) for payload in payloads])


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
        """Cap and allocation are whole extents, at least two of them, of at least four pages."""
        assert tier.capacity_bytes % tier.extent_bytes == 0
        assert tier.allocated_bytes % tier.extent_bytes == 0
        assert 2 * tier.extent_bytes <= tier.allocated_bytes <= tier.capacity_bytes
        assert tier.extent_bytes % PAGE_SIZE_BYTES == 0
        assert tier.extent_bytes >= 4 * PAGE_SIZE_BYTES

    async def test_open_and_close_twice(self, make_tier: MakeTier, content: Callable[[int], bytes]) -> None:
        """A second open keeps what is there; a second close, or one without open, does nothing."""
        never_opened = make_tier()
        await never_opened.close()
        tier = make_tier()
        await tier.open()
        slot, payload = slot_of(tier, 0, 0), content(PAGE_SIZE_BYTES)
        await write_all(tier, [slot], [payload])
        await tier.open()
        assert await read_all(tier, [slot]) == [payload]
        await tier.close()
        await tier.close()

    async def test_closed_is_a_fault(self, make_tier: MakeTier) -> None:
        """Before open and after close every use is a `TierFault`."""
        tier = make_tier()
        slot = slot_of(tier, 0, 0)
        for _ in range(2):
            with pytest.raises(TierFault):
                await read_all(tier, [slot])
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
        payloads = [content(slot.size_bytes) for slot in slots]
        await write_all(tier, slots, payloads)
        assert await read_all(tier, slots) == payloads
        assert await read_all(tier, slots[::-1]) == payloads[::-1]
        assert await read_all(tier, [slots[3], slots[3]]) == [payloads[3]] * 2

    async def test_a_payload_may_be_shorter_than_its_slot(
        self, tier: Tier, content: Callable[[int], bytes]
    ) -> None:
        """What is not a whole page lies at the start of the slot; a short buffer is filled."""
        slot = slot_of(tier, 0, 1)
        for size_bytes in (1, 511, 4095):
            payload = content(size_bytes)
            await write_all(tier, [slot], [payload])
            buffer = bytearray(size_bytes)
            await tier.read([slot], [memoryview(buffer)])
            assert buffer == payload

    async def test_slots_at_the_border_of_extents(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """The last slot of one extent and the first of the next are neighbours and do not touch."""
        last = tier.extent_bytes // PAGE_SIZE_BYTES - 1
        slots = [slot_of(tier, 0, last - 1), slot_of(tier, 0, last), slot_of(tier, 1, 0), slot_of(tier, 1, 1)]
        payloads = [content(PAGE_SIZE_BYTES) for _ in slots]
        await write_all(tier, slots, payloads)
        for index in (1, 2):
            payloads[index] = content(PAGE_SIZE_BYTES)
            await write_all(tier, [slots[index]], [payloads[index]])
            assert await read_all(tier, slots) == payloads

    async def test_slots_of_every_size(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """One page, some pages, and a whole extent; the very last byte of the tier too."""
        end = tier.allocated_bytes // tier.extent_bytes - 1
        for size_bytes in (PAGE_SIZE_BYTES, 3 * PAGE_SIZE_BYTES, tier.extent_bytes):
            index = tier.extent_bytes // size_bytes - 1
            slots = [slot_of(tier, extent, index, size_bytes) for extent in (0, end)]
            payloads = [content(size_bytes) for _ in slots]
            await write_all(tier, slots, payloads)
            assert await read_all(tier, slots) == payloads

    async def test_many_at_once(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """Concurrent calls on different slots do not mix."""
        slots = [slot_of(tier, index % 2, index // 2) for index in range(8)]
        payloads = [content(slot.size_bytes) for slot in slots]
        await asyncio.gather(
            *(write_all(tier, [slot], [payload]) for slot, payload in zip(slots, payloads, strict=True))
        )
        found = await asyncio.gather(*(read_all(tier, [slot]) for slot in slots))
        assert [one for (one,) in found] == payloads

    async def test_nothing_at_once(self, tier: Tier) -> None:
        """Empty batches are fine."""
        await tier.read([], [])
        await tier.write([], [])
        await tier.drop([])

    async def test_drop_and_reuse(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """After drop a slot is written anew, in another size too; its neighbour is as it was."""
        size_bytes = 2 * PAGE_SIZE_BYTES
        slots = [slot_of(tier, 0, index, size_bytes) for index in range(2)]
        payloads = [content(size_bytes) for _ in slots]
        await write_all(tier, slots, payloads)
        await tier.drop([slots[0]])
        assert await read_all(tier, [slots[1]]) == [payloads[1]]
        smaller = [slot_of(tier, 0, index) for index in range(2)]
        fresh = [content(PAGE_SIZE_BYTES) for _ in smaller]
        await write_all(tier, smaller, fresh)
        assert await read_all(tier, [*smaller, slots[1]]) == [*fresh, payloads[1]]

    # ---- faults

    def wrong_slots(self, tier: Tier) -> list[Slot]:
        """Slots that do not exist, each for one reason."""
        extent_bytes, page = tier.extent_bytes, PAGE_SIZE_BYTES
        arena = slot_of(tier, 0, 0).arena
        end_extent = tier.allocated_bytes // extent_bytes
        return [
            Slot(arena, end_extent, tier.allocated_bytes, page),
            Slot(arena, end_extent + 10**6, tier.allocated_bytes + 10**6 * extent_bytes, page),
            Slot(arena, 0, extent_bytes - page, 2 * page),
            Slot(arena, 0, 0, extent_bytes + page),
            Slot(arena, -1, -page, page),
            Slot(arena, 1, 0, page),
            Slot(arena, 0, extent_bytes, page),
            Slot(arena, 0, 0, 0),
            Slot(arena, 0, page, -page),
            Slot(arena + 1, 0, 0, page),
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
                    await tier.read(slots, [memoryview(bytearray(3)) for _ in slots])
                with pytest.raises(TierFault):
                    await tier.drop(slots)
            assert await read_all(tier, [right]) == [payload], wrong

    async def test_buffers_that_do_not_fit(self, tier: Tier, content: Callable[[int], bytes]) -> None:
        """Too many bytes for a slot, or not one buffer for each slot, is a `TierFault`."""
        slots = [slot_of(tier, 0, 0), slot_of(tier, 0, 1)]
        payloads = [content(PAGE_SIZE_BYTES) for _ in slots]
        await write_all(tier, slots, payloads)
        for bad in ([b"x" * (PAGE_SIZE_BYTES + 1), b"x"], [b"x"], [b"x"] * 3):
            with pytest.raises(TierFault):
                await write_all(tier, slots, bad)
            with pytest.raises(TierFault):
                await tier.read(slots, [memoryview(bytearray(one)) for one in bad])
        assert await read_all(tier, slots) == payloads

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
        assert await read_all(tier, [slot]) == [b"hello" + payload[5:]]
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
