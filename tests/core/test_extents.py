"""Slots of an extent: the lowest free one first, whatever was claimed out of turn before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.config import TierSpec
from kvtier.core.extents import TierMap
from kvtier.core.policies.lru import LruPolicy
from kvtier.types import Slot, TierKind

SLOTS, PAGE = 24, 4096


@given(st.lists(st.tuples(st.sampled_from("atrrc"), st.integers(0, SLOTS - 1)), max_size=60))
@settings(deadline=None)
def test_the_lowest_free_slot_is_always_the_next(steps: list[tuple[str, int]]) -> None:
    size_bytes = SLOTS * PAGE
    tier = TierMap(TierSpec(TierKind.NVME, size_bytes, size_bytes, size_bytes), LruPolicy)
    pool = tier.pool(PAGE)
    assert pool.take_extent()
    held = {index for _, index in pool.allocate(1)}  # one of them stays, or the extent would be given back
    for step, number in steps:
        free = sorted(set(range(SLOTS)) - held)
        if step == "a":
            count = min(number, len(free))
            taken = [index for _, index in pool.allocate(count)]
            assert taken == free[:count]
            held |= set(taken)
        elif step == "r" and number and number in held:
            held.remove(number)
            pool.release(tier.extents[0], number)
        elif step == "c":
            place = tier.claim(Slot(0, 0, number * PAGE, PAGE))
            assert (place is not None) == (number not in held)
            held.add(number)
        assert pool.free == SLOTS - len(held)
    assert [index for _, index in pool.allocate(pool.free)] == sorted(set(range(SLOTS)) - held)
