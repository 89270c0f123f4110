"""What goes down a tier and when, whose slots those are meanwhile, and what evictions do there."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.core import messages as m
from kvtier.core.demotes import RETRY_S
from kvtier.types import BlockId, BlockRecord, Slot, TierKind
from tests.core.world import PAGE, G, R, World, chain, checksum, make_layout


def world(slots: int = 8, nvme: int = 16, **options: Any) -> World:
    return World(slots, nvme=nvme, **{"demote_high_fraction": 0.5, **options})


def test_demotes_begin_above_the_watermark_with_what_was_used_longest_ago() -> None:
    w = world()
    first, second = chain("a", 4), chain("b", 2)
    w.store(first)
    assert not w.demotes, "the tier is half full, and no more"
    w.store(second)
    demote, other = w.demotes
    assert [record.block.key for record in demote.records] == first
    assert [record.block.key for record in other.records] == second
    assert demote.records[1] == BlockRecord(
        BlockId(first[1], 0), first[0], make_layout().fingerprint(), PAGE, checksum(first[1])
    )
    assert (demote.source, demote.tier) == (TierKind.DRAM, TierKind.NVME)
    assert {slot.size_bytes for slot in demote.slots} == {2 * PAGE}, "a header lies before the block"
    assert {slot.arena for slot in demote.slots} == {9}
    assert w.below().reserved_bytes == 12 * PAGE
    w.demote_all()
    assert (w.in_nvme(first), w.in_nvme(second)) == (4, 2)
    assert w.match(first) == 4, "they stay where they are, too"
    assert (w.below().blocks, w.below().demoted_blocks, w.below().reserved_bytes) == (6, 6, 0)
    w.store(chain("c", 1))
    assert w.demote_all() == chain("c", 1), "nothing twice"


def test_a_store_never_waits_for_a_demote_except_for_what_is_being_read() -> None:
    w = world(max_demotes=1, demote_batch_bytes=2 * PAGE)
    old = chain("old", 8)
    w.store(old)
    (demote,) = w.demotes
    assert [record.block.key for record in demote.records] == old[:2], "a batch, first blocks first"
    assert w.store(chain("b", 6)) == [G] * 6, "evicted without having been copied"
    assert w.store(chain("c", 3)) == [G] * 3
    w.evict(chain("b", 6) + chain("c", 3))
    assert w.match(old) == 2, "the sources stay until the demote has ended"
    assert w.evict(old) == m.Evicted(0, 2)


def test_batches_follow_each_other_down_a_chain() -> None:
    w = world(16, max_demotes=2, demote_batch_bytes=4 * PAGE)
    keys = chain("a", 14)
    w.store(keys)
    first, second = w.demotes
    assert [record.block.key for record in first.records + second.records] == keys[:8]
    assert not w.told(m.Verify)
    w.demoted(second)
    (_, third) = w.demotes
    assert [record.block.key for record in third.records] == keys[8:12]
    assert w.in_nvme(keys) == 0, "the first ones are still being written"
    w.demoted(first)
    w.demoted(third)
    w.demote_all()
    assert w.in_nvme(keys) == 14


def test_admission_after_some_uses_takes_ancestors_along() -> None:
    w = world(16, admit_after_uses=2)
    keys = chain("a", 4)
    branch = chain("b", 3, keys[1])
    w.store(keys)
    w.store(branch, keys[1])
    w.store(chain("c", 4))
    assert not w.demotes
    w.release(w.load(keys[:3]).lease)
    w.store(chain("d", 1))
    assert w.demote_all() == keys[:3], "used twice, or before something that was; not what continues it"
    w.release(w.load([*keys[:2], *branch]).lease)
    w.tick()
    assert w.demote_all() == branch


def test_what_other_nodes_have_goes_only_with_what_continues_it() -> None:
    w = world(16, has_index=True, max_pulled_fraction=1.0, demote_high_fraction=0.1)
    keys = chain("a", 4)
    _, (pull,) = w.locate(keys, "pppp")
    w.arrive(pull, 4)
    w.end(pull)
    w.release_hold()
    w.tick()
    assert not w.demotes
    w.store(chain("own", 1, keys[1]), keys[1])
    assert w.demote_all() == [*keys[:2], *chain("own", 1, keys[1])]


@pytest.mark.parametrize("frees_at_once", [True, False])
def test_a_target_is_given_back_by_the_end_of_its_demote_alone(frees_at_once: bool) -> None:
    w = world(8, nvme=8, nvme_frees_at_once=frees_at_once)
    keys = chain("a", 8)
    w.store(keys)
    (demote,) = w.demotes
    w.die()
    w.tick(1e6)
    assert w.below().reserved_bytes == 16 * PAGE
    w.demoted(demote, [0, 1, 3], "ENOSPC")
    assert w.below().failed_demotes == 1
    assert w.in_nvme(keys) == 2, "behind what was not written nothing can be reached"
    assert w.below().blocks == 3
    if frees_at_once:
        assert w.below().draining_bytes == 0
    else:
        (drop,) = w.told(m.Drop)
        assert (drop.tier, len(drop.slots)) == (TierKind.NVME, 5), "nobody knows what lies there"
        assert w.below().draining_bytes == 10 * PAGE


def test_a_failure_is_not_repeated_at_once() -> None:
    w = world()
    keys = chain("a", 5)
    w.store(keys)
    (demote,) = w.demotes
    w.demoted(demote, [], "EIO")
    w.end_nvme_drops()
    w.tick(RETRY_S / 2)
    assert not w.demotes
    w.tick(RETRY_S)
    assert w.demote_all() == keys


def test_no_room_below_is_waited_for() -> None:
    w = world(8, nvme=4)
    a, b = chain("a", 4), chain("b", 4)
    w.store(a)
    w.store(b)
    (demote,) = w.demotes
    assert [record.block.key for record in demote.records] == a
    w.demoted(demote)
    (drop,) = w.told(m.Drop)
    assert not w.demotes, "what goes for it is still being deleted"
    assert w.in_nvme(a) == 0
    w.tick()
    assert not w.told(m.Drop), "what is being deleted already counts as room"
    w.do(m.Dropped(TierKind.NVME, drop.slots))
    assert w.demote_all() == b
    assert w.in_nvme(b) == 4


def test_the_tier_below_keeps_what_the_one_above_still_uses() -> None:
    w = world(12, nvme=8, nvme_frees_at_once=True, demote_high_fraction=0.1)
    hot, cold, new = chain("hot", 4), chain("cold", 4), chain("new", 4)
    w.store(hot)
    w.demote_all()
    w.store(cold)
    w.demote_all()
    w.release(w.load(hot).lease)
    w.store(new)
    w.demote_all()
    assert (w.in_nvme(hot), w.in_nvme(cold), w.in_nvme(new)) == (4, 0, 4)
    w.release(w.load(cold).lease)
    w.store(chain("more", 1))
    w.demote_all()
    assert w.in_nvme(cold) == 4, "it was used again"


def test_a_block_lost_while_it_is_copied_is_not_kept_below() -> None:
    w = world(8, nvme=8)
    keys = chain("a", 5)
    w.store(keys)
    (demote,) = w.demotes
    w.do(m.Scrub(2))
    first, second = w.told(m.Verify)
    w.do(m.Verified(first.verify, intact=True))
    w.do(m.Verified(second.verify, intact=False))
    w.store(keys[1:2], keys[0])
    assert w.match(keys) == 5
    w.demoted(demote)
    assert w.in_nvme(keys) == 1, "nobody knows whether the old bytes were copied or the new ones"
    w.end_nvme_drops()
    w.tick()
    w.store(chain("b", 1))
    w.demote_all()
    assert w.in_nvme(keys) == 5


def test_a_source_with_wrong_bytes_is_verified() -> None:
    w = world()
    keys = chain("a", 5)
    w.store(keys)
    (demote,) = w.demotes
    w.demoted(demote, [0, 1, 3, 4], corrupt=[2])
    (verify,) = w.told(m.Verify)
    assert verify.block.key == keys[2]
    w.do(m.Verified(verify.verify, intact=False))
    assert (w.match(keys), w.in_nvme(keys)) == (2, 2)


def test_layouts_of_different_sizes_share_both_tiers() -> None:
    w = world(16, nvme=16)
    w.register("f", make_layout(2))
    small, large = chain("s", 4), chain("l", 4)
    w.store(small)
    w.store(large, engine="f")
    demotes = w.demotes
    assert {slot.size_bytes for demote in demotes for slot in demote.slots} == {2 * PAGE, 3 * PAGE}
    w.demote_all()
    assert w.below().resident_bytes == 4 * 2 * PAGE + 4 * 3 * PAGE


def test_blocks_too_large_for_an_extent_below_stay_above() -> None:
    w = World(32, extent_pages=16, nvme=16, demote_high_fraction=0.1, layout=make_layout(8))
    w.store(chain("a", 2))
    assert not w.demotes, "with a header they have nine pages, an extent has eight"


def test_evictions_reach_every_tier() -> None:
    w = world(8, nvme=16, nvme_frees_at_once=True)
    keys = chain("a", 6)
    w.store(keys)
    w.demote_all()
    places = w.core.places(keys[:1])
    assert [(place.tier, place.slot.arena) for place in places] == [(TierKind.DRAM, 7), (TierKind.NVME, 9)]
    assert w.evict(keys[2:3]) == m.Evicted(8, 0)
    assert (w.match(keys), w.in_nvme(keys), w.below().evicted_blocks) == (2, 2, 4)
    w.store(chain("b", 6))
    (demote,) = w.demotes
    assert w.evict(chain("b", 6)) == m.Evicted(0, 6)
    w.demoted(demote)
    assert w.evict(chain("b", 6)) == m.Evicted(12, 0)


def test_a_tier_that_is_down_gets_nothing_and_keeps_what_it_has() -> None:
    w = world()
    w.do(m.TierDown(TierKind.NVME))
    keys = chain("a", 6)
    w.store(keys)
    assert not w.demotes
    assert w.below().is_down
    w.do(m.TierUp(TierKind.NVME))
    (demote,) = w.demotes
    w.do(m.TierDown(TierKind.NVME))
    w.demoted(demote)
    assert w.in_nvme(keys) == 6, "what was in flight ends as it says"
    w.evict(keys)
    assert w.lookup(keys).blocks == 0


def test_one_tier_knows_nothing_of_all_this() -> None:
    w = World(4, demote_high_fraction=0.01)
    w.store(chain("a", 4))
    w.store(chain("b", 4))
    assert not w.instructions
    assert len(w.core.stats().tiers) == 1


# ---- recovery


def record(key: bytes, parent: bytes | None, shard: int = 0, **changes: Any) -> BlockRecord:
    made = {
        "block": BlockId(key, shard),
        "parent": parent,
        "fingerprint": make_layout().fingerprint(),
        "block_bytes": PAGE,
        "checksum": checksum(key),
    }
    return BlockRecord(**{**made, **changes})  # type: ignore[arg-type]


def slot(index: int, **changes: int) -> Slot:
    made = {"arena": 9, "extent": index // 4, "offset_bytes": index * 2 * PAGE, "size_bytes": 2 * PAGE}
    return Slot(**{**made, **changes})


def chained(keys: list[bytes]) -> list[tuple[Slot, BlockRecord]]:
    return [(slot(i), record(key, keys[i - 1] if i else None)) for i, key in enumerate(keys)]


def test_what_a_tier_found_is_put_back_in_any_order() -> None:
    w = world(outlives=True, has_index=True)
    keys = chain("a", 6)
    found = chained(keys)
    w.do(m.Recovered(TierKind.NVME, found[3:], is_last=False))
    assert w.in_nvme(keys) == 0
    assert not w.told(m.Publish), "nothing of it can be reached yet"
    w.do(m.Recovered(TierKind.NVME, found[2::-1], is_last=False))
    assert w.in_nvme(keys) == 6
    (publish,) = w.told(m.Publish)
    assert (publish.tier, len(publish.added)) == (TierKind.NVME, 6)
    w.store(chain("b", 6))
    assert not w.demotes, "there may be more in the slots that seem free"
    w.do(m.Recovered(TierKind.NVME, [], is_last=True))
    (demote,) = w.demotes
    assert not {slot(i) for i in range(6)} & set(demote.slots)
    assert w.below().recovered_blocks == 6


def test_what_a_tier_found_is_not_believed() -> None:
    w = world(outlives=True)
    a, b, c, d = chain("a", 4)
    other = make_layout(2).fingerprint()
    found = [
        (slot(0), record(a, None)),
        (slot(1), record(a, None)),  # twice
        (slot(0), record(b, a)),  # in a slot that is taken
        (slot(1, offset_bytes=3 * PAGE), record(b, a)),
        (slot(1, size_bytes=PAGE), record(b, a)),
        (slot(4, size_bytes=9 * PAGE), record(b, a)),
        (slot(1, extent=99), record(b, a)),
        (slot(1, extent=-1), record(b, a)),
        (slot(1, arena=8), record(b, a)),
        (slot(1), record(b, b)),
        (slot(1), record(b, a, fingerprint=other)),
        (slot(1), record(b, a, fingerprint=b"short")),
        (slot(1), record(b, a, checksum=b"")),
        (slot(1), record(b, a, block_bytes=2 * PAGE)),
        (slot(1), record(b, a, block_bytes=0)),
        (slot(1), record(b[:31], a)),
        (slot(1), record(b, a[:31])),
        (slot(1), record(b, a, shard=-1)),
        (slot(1), record(c, d)),
        (slot(2), record(d, c)),  # a circle
        (slot(3), record(d, None, fingerprint=other)),  # a child of it has another layout
    ]
    w.do(m.Recovered(TierKind.NVME, found, is_last=True))
    assert w.below().recovered_blocks == 2
    assert (w.in_nvme([a, b]), w.in_nvme([c, d])) == (1, 0)
    w.store(chain("x", 8))
    w.demote_all()
    assert w.in_nvme(chain("x", 8)) == 8


def test_what_is_behind_a_block_that_was_not_found_goes_first() -> None:
    w = world(8, nvme=8, outlives=True, nvme_frees_at_once=True)
    keys = chain("a", 4)
    w.do(m.Recovered(TierKind.NVME, chained(keys)[1:], is_last=True))
    assert w.evict(keys[:1]) == m.Evicted(3, 0)
    w.store(keys)
    w.store(chain("b", 4))
    w.demote_all()
    assert w.in_nvme(keys) == 4


def test_the_place_of_a_block_that_was_not_found_is_filled_by_a_demote() -> None:
    w = world(8, nvme=8, outlives=True)
    keys = chain("a", 6)
    w.do(m.Recovered(TierKind.NVME, chained(keys)[1:3], is_last=True))
    w.store(keys)
    assert w.demote_all() == [keys[0], *keys[3:]]
    assert w.in_nvme(keys) == 6


def test_refused_stores_are_as_before() -> None:
    w = world(4, nvme=4)
    held = chain("held", 4)
    w.store(held)
    w.lookup(held)
    w.demote_all()
    assert w.store(chain("b", 1)) == [R]
