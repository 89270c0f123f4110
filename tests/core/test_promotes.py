"""What is copied into device memory and when, who is told of it, and what becomes of the copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.core import messages as m
from kvtier.core import promotes
from kvtier.core.demotes import RETRY_S
from kvtier.core.policies import POLICIES
from kvtier.types import BlockId, Key, TierKind
from tests.core.world import PAGE, World, chain, checksum, make_layout


def world(slots: int = 16, hbm: int = 8, **options: Any) -> World:
    return World(slots, hbm=hbm, **options)


def use(w: World, keys: Sequence[Key], times: int = 1, engine: str = "e") -> m.Leased:
    for _ in range(times):
        leased = w.load(keys, engine=engine)
        assert w.release(leased.lease, engine=engine).valid
    return leased


def copied(w: World, keys: Sequence[Key]) -> list[Key]:
    """Use a stored prefix once, and let it be copied as far as it is."""
    use(w, keys)
    return w.demote_all()


def in_device(w: World) -> set[Key]:
    keys = [key for blocks in w.core.residency.shards.values() for key in blocks]
    return {place.block.key for place in w.core.places(keys) if place.tier is TierKind.HBM}


def device(w: World) -> Any:
    (stats,) = (its for its in w.core.stats().tiers if its.kind is TierKind.HBM)
    return stats


def test_what_is_loaded_is_copied_when_nobody_reads_and_read_there_next() -> None:
    w = world()
    keys = chain("a", 4)
    w.store(keys)
    leased = w.load(keys)
    assert leased.copies == []
    assert not w.demotes, "a load is more urgent than the next one's speed"
    w.release(leased.lease)
    (promote,) = w.demotes
    assert isinstance(promote, m.Promote)
    assert (promote.source, promote.tier) == (TierKind.DRAM, TierKind.HBM)
    assert promote.sources == leased.slots
    assert [record.block for record in promote.records] == [BlockId(key, 0) for key in keys]
    assert [record.checksum for record in promote.records] == [checksum(key) for key in keys]
    assert {slot.arena for slot in promote.slots} == {6}
    assert use(w, keys).copies == [], "it is still being written"
    w.demoted(promote)
    again = w.load(keys)
    assert (again.slots, again.copies) == (leased.slots, promote.slots)
    assert not w.demotes, "nothing twice"
    assert [place.leases for place in w.core.places(keys[:1])] == [1, 1], "both copies are leased"
    w.release(again.lease)
    assert (device(w).blocks, device(w).demoted_blocks, device(w).fetched_blocks) == (4, 4, 4)
    assert [stats.kind for stats in w.core.stats().tiers] == [TierKind.DRAM, TierKind.HBM]


def test_a_promote_waits_for_reads_only_so_long() -> None:
    w = world(promote_wait_s=1.0)
    keys = chain("a", 4)
    w.store(keys)
    w.load(keys)
    w.tick(0.9)
    assert not w.demotes
    w.tick(0.1)
    assert w.demote_all() == keys


@pytest.mark.parametrize("uses", [1, 2, 4])
def test_only_what_was_used_often_enough_is_copied_and_what_it_continues(uses: int) -> None:
    w = world(promote_after_uses=uses)
    keys = chain("a", 6)
    w.store(keys)
    for _ in range(uses - 2):
        use(w, keys[:4])
        assert not w.demotes
    use(w, keys[2:4])  # its engine has the first two by itself
    w.tick()
    assert w.demote_all() == keys[:4]
    assert in_device(w) == set(keys[:4])


def test_only_engines_that_map_the_device_are_told_and_have_blocks_copied() -> None:
    w = world()
    w.register("blind", w.layouts["e"], maps_device=False)
    keys = chain("a", 4)
    w.store(keys)
    use(w, keys, 3, engine="blind")
    assert not w.demotes
    assert copied(w, keys) == keys
    assert use(w, keys, engine="blind").copies == []
    assert w.acquire(keys).copies == [], "peers read the arena"
    assert len(use(w, keys).copies) == 4


def test_a_prefix_goes_up_in_batches_and_is_told_as_far_as_it_is_there() -> None:
    w = world(max_demotes=1, demote_batch_bytes=3 * PAGE)
    keys = chain("a", 8)
    w.store(keys)
    use(w, keys)
    (first,) = w.demotes
    w.demoted(first)
    (second,) = w.demotes
    assert [record.block.key for record in first.records + second.records] == keys[:6]
    told = use(w, keys).copies
    assert told == [*first.slots, *[None] * 5]
    w.demote_all()
    assert in_device(w) == set(keys)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_leaves_go_first_for_what_is_read_now_and_never_what_is_leased(policy: str) -> None:
    w = world(32, hbm=8, policy=policy)
    old, new = chain("old", 6), chain("new", 6)
    w.store(old)
    w.store(new)
    assert copied(w, old) == old
    lease = w.load(old[:4])
    assert len(lease.copies) == 4
    use(w, new)
    w.tick(1.0)
    assert w.demote_all() == new[:4], "as far as there is room without what is leased"
    assert in_device(w) == {*old[:4], *new[:4]}
    assert device(w).evicted_blocks == 2
    assert w.release(lease.lease).valid
    use(w, new)
    w.demote_all()
    assert {*new} <= in_device(w), "nothing of the old prefix is used any more"


def test_what_does_not_fit_is_forgotten_until_it_is_read_again() -> None:
    w = world(32, hbm=4)
    keys = chain("a", 10)
    w.store(keys)
    assert copied(w, keys) == keys[:4]
    w.tick(10.0)
    assert not w.demotes
    use(w, keys)
    assert not w.demotes, "a prefix does not eat its own beginning"
    assert device(w).blocks == 4


def test_a_copy_ends_with_its_block() -> None:
    w = world(8, hbm=8, demote_high_fraction=1.0)
    keys = chain("a", 4)
    w.store(keys)
    copied(w, keys)
    w.evict(keys[2:])
    assert in_device(w) == set(keys[:2])
    w.store(chain("b", 8))
    assert in_device(w) == set()
    assert (device(w).blocks, device(w).resident_bytes) == (0, 0)
    w.store(keys)
    assert use(w, keys).copies == [], "what was stored anew was never compared with what lay there"


def test_a_block_found_corrupt_while_it_is_copied_is_not_there_afterwards() -> None:
    w = world()
    keys = chain("a", 4)
    w.store(keys)
    use(w, keys)
    (promote,) = w.demotes
    lease = w.load(keys)
    w.release(lease.lease, corrupt=[keys[1]])
    (verify,) = w.told(m.Verify)
    w.do(m.Verified(verify.verify, intact=False))
    w.store(keys[1:2], keys[0])
    w.demoted(promote)
    assert in_device(w) == {keys[0], keys[2], keys[3]}, "its bytes were read when they were wrong"
    assert use(w, keys).copies == [promote.slots[0], None, *promote.slots[2:]]
    assert w.demote_all() == keys[1:2]
    assert in_device(w) == set(keys)


def test_a_source_that_is_found_corrupt_by_its_promote_is_verified() -> None:
    w = world()
    keys = chain("a", 3)
    w.store(keys)
    use(w, keys)
    (promote,) = w.demotes
    w.demoted(promote, [0, 2], corrupt=[1])
    (verify,) = w.told(m.Verify)
    assert verify.block.key == keys[1]
    assert in_device(w) == {keys[0], keys[2]}
    w.do(m.Verified(verify.verify, intact=False))
    assert in_device(w) == {keys[0], keys[2]}


def test_a_copy_that_was_read_wrong_goes_and_whoever_reads_it_knows() -> None:
    w = world()
    keys = chain("a", 4)
    w.store(keys)
    copied(w, keys)
    mine, other, shorter = w.load(keys), w.load(keys), w.load(keys[:2])
    assert w.release(mine.lease, corrupt=[keys[2]]).valid, "its other blocks were right"
    (verify,) = w.told(m.Verify)
    assert verify.tier is TierKind.DRAM, "perhaps it was the block itself"
    assert in_device(w) == {*keys[:2], keys[3]}
    assert device(w).wrong_blocks == 1
    assert not w.release(other.lease).valid, "it may have read the same bytes, and not looked"
    assert w.release(shorter.lease).valid
    w.do(m.Verified(verify.verify, intact=True))
    assert w.match(keys) == 4
    assert use(w, keys).copies[2] is None


def test_a_copy_that_is_called_wrong_twice_goes_once() -> None:
    w = world()
    keys = chain("a", 4)
    w.store(keys)
    copied(w, keys)
    w.release(w.load(keys).lease, corrupt=[keys[2], keys[3], keys[2]])
    assert in_device(w) == set(keys[:2])
    assert device(w).wrong_blocks == 2


def test_a_late_lease_on_a_lost_copy_ends_without_harm() -> None:
    w = world()
    keys = chain("a", 4)
    w.store(keys)
    copied(w, keys)
    first, second = w.load(keys), w.load(keys)
    w.release(first.lease, corrupt=keys)
    for verify in w.told(m.Verify):
        w.do(m.Verified(verify.verify, intact=True))
    use(w, keys)
    assert w.demote_all() == [], "somebody reads"
    w.tick(1.0)
    assert w.demote_all() == keys, "they are copied anew while the void lease lasts"
    w.die()
    assert in_device(w) == set(keys)
    w.evict(keys)
    assert second.copies
    assert device(w).resident_bytes == 0


def test_a_promote_that_failed_leaves_nothing_and_is_tried_later() -> None:
    w = world()
    keys = chain("a", 4)
    w.store(keys)
    use(w, keys)
    w.demoted(w.demotes[0], [], "tier")
    assert (device(w).blocks, device(w).reserved_bytes, device(w).failed_demotes) == (0, 0, 1)
    use(w, keys)
    assert not w.demotes
    w.tick(RETRY_S)
    assert w.demote_all() == keys


def test_targets_belong_to_their_promote_until_it_ends() -> None:
    w = world(hbm=4)
    first, second = chain("a", 4), chain("b", 4)
    w.store(first)
    w.store(second)
    use(w, first)
    (promote,) = w.demotes
    w.die()
    w.evict(first)
    w.register("f", make_layout())
    use(w, second, engine="f")
    w.tick(1e6)
    assert w.demotes == [promote], "no slot is given twice"
    assert w.match(first) == 4, "its sources stay, too"
    w.demoted(promote)
    use(w, second, engine="f")
    assert w.demote_all() == second, "what is read now pushes the others out"


def test_device_memory_is_no_part_of_the_chain_and_not_published() -> None:
    w = world(8, hbm=8, nvme=16, has_index=True, demote_high_fraction=0.1)
    keys = chain("a", 4)
    w.store(keys)
    w.demote_all()
    use(w, keys)
    w.demote_all()
    assert in_device(w) == set(keys)
    assert {w.published[BlockId(key, 0)] for key in keys} == {TierKind.DRAM}
    w.store(chain("b", 8))
    w.demote_all()
    assert in_device(w) == set()
    assert {w.published[BlockId(key, 0)] for key in keys} == {TierKind.NVME}
    offer, (fetch,) = w.fetch(keys, compute_s=1.0)
    assert (offer.blocks, fetch.tier) == (4, TierKind.NVME)
    w.fetched(fetch, 4)
    w.end(fetch)
    assert use(w, keys).copies == []


def test_copies_pushed_out_of_the_arena_by_another_layout_go_too() -> None:
    w = world(16, hbm=16)
    keys = chain("a", 8)
    w.store(keys)
    copied(w, keys)
    w.register("large", make_layout(2))
    large = chain("l", 8)
    w.store(large, engine="large")
    assert in_device(w) == set()
    use(w, large, engine="large")
    assert w.demote_all() == large


def test_what_waits_is_bounded_and_forgotten_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotes, "MAX_WAITING", 2)
    w = world()
    prompts = [chain(name, 2) for name in "abc"]
    for keys in prompts:
        w.store(keys)
    leases = [w.load(keys).lease for keys in prompts]
    assert w.core.promotes is not None
    assert [block.id.key for block in w.core.promotes.waiting] == [prompts[1][1], prompts[2][1]]
    w.release(leases[1])
    w.evict(prompts[1])
    assert [block.id.key for block in w.core.promotes.waiting] == [prompts[2][1]]
    w.tick(1.0)
    assert w.demote_all() == prompts[2]


def test_one_event_tries_a_bounded_number_of_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotes, "MAX_TRIED", 2)
    w = world(hbm=4, max_demotes=8)
    prompts = [chain(name, 4) for name in "abcd"]
    for keys in prompts:
        w.store(keys)
    reader = w.load(prompts[0])
    for keys in prompts:
        w.release(w.load(keys).lease)
    assert w.core.promotes is not None
    assert len(w.core.promotes.waiting) == 4
    w.tick(1.0)
    assert [record.block.key for record in w.demotes[0].records] == prompts[0], "there is room for one only"
    assert len(w.core.promotes.waiting) == 2
    w.tick(1.0)
    assert not w.core.promotes.waiting
    w.release(reader.lease)
