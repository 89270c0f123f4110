"""Blocks that come up from the tier below: offered, told, cut, and whose slots those are until they have."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.core import messages as m
from kvtier.errors import UnknownId
from kvtier.types import BlockId, Key, TierKind
from tests.core.world import PAGE, B, G, R, World, chain, checksum, make_layout


def world(slots: int = 8, nvme: int = 16, **options: Any) -> World:
    """Everything that is stored is copied down before it is evicted."""
    made = {"demote_high_fraction": 0.01, "max_fetched_fraction": 1.0, "nvme_frees_at_once": True, **options}
    return World(slots, nvme=nvme, **made)


def sunk(w: World, keys: list[Key], parent: Key | None = None, shard: int = 0) -> None:
    """Let these blocks lie in the tier below alone."""
    w.store(keys, parent, shard=shard)
    w.demote_all()
    slots = w.tier().capacity_bytes // w.core.engines.get("e").shape.slot_bytes
    fill = chain(f"fill/{keys[0].hex()}", slots)
    w.do(m.TierDown(TierKind.NVME))
    w.store(fill)
    w.end_drops()
    w.store(fill)
    w.evict(fill)
    w.end_drops()
    w.do(m.TierUp(TierKind.NVME))
    assert not any(w.core.residency.get(key, shard) for key in keys)


def test_a_lookup_begins_to_fetch_and_offers_what_comes() -> None:
    w = world()
    keys = chain("a", 4)
    sunk(w, keys)
    assert w.match(keys) == 0
    offer, (fetch,) = w.fetch(keys)
    assert (offer.blocks, offer.coming, offer.reason) == (4, 4, "")
    assert offer.tiers == {TierKind.NVME: 4}
    assert [record.block for record in fetch.records] == [BlockId(key, 0) for key in keys]
    assert [record.checksum for record in fetch.records] == [checksum(key) for key in keys]
    assert {slot.arena for slot in fetch.sources} == {9}
    assert {slot.arena for slot in fetch.slots} == {7}
    leased = w.load(keys)
    assert (leased.slots, leased.coming) == ([], 4)
    (ready,) = w.fetched(fetch, 3)
    assert (ready.slots, ready.is_last) == (fetch.slots[:3], False)
    (ready,) = w.fetched(fetch, 1, 3)
    assert ready.is_last
    w.end(fetch)
    assert w.release(leased.lease).valid
    assert (w.match(keys), w.below().blocks, w.below().fetched_blocks) == (4, 4, 4)
    assert w.tier().replica_bytes == 0, "it is this node's own"
    assert not w.demotes, "it lies below already"
    assert w.core.stats().counters.pulled_blocks == 0


def test_what_is_here_is_not_fetched_and_a_second_lookup_waits_for_the_first() -> None:
    w = world()
    keys = chain("a", 6)
    sunk(w, keys)
    w.store(keys[:2])
    offer, (fetch,) = w.fetch(keys)
    assert [record.block.key for record in fetch.records] == keys[2:]
    assert offer.tiers == {TierKind.DRAM: 2, TierKind.NVME: 4}
    again, fetches = w.fetch(keys, request="again")
    assert (again.blocks, again.coming, fetches) == (6, 4, [])
    assert w.store(keys) == [m.ReserveState.PRESENT] * 2 + [B] * 4
    w.fetched(fetch, 4)
    w.end(fetch)
    assert w.fetch(keys, request="third")[1] == []


def test_a_lost_block_above_comes_back_from_below() -> None:
    w = world()
    keys = chain("a", 4)
    w.store(keys)
    w.demote_all()
    leased = w.load(keys)
    w.release(leased.lease, corrupt=keys[1:2])
    (verify,) = w.told(m.Verify)
    w.do(m.Verified(verify.verify, intact=False))
    offer, (fetch,) = w.fetch(keys)
    assert [record.block.key for record in fetch.records] == keys[1:2]
    assert (offer.blocks, offer.coming) == (4, 3)
    w.fetched(fetch, 1)
    w.end(fetch)
    assert w.match(keys) == 4


def test_peers_are_asked_for_what_neither_tier_has() -> None:
    w = world(16, has_index=True, max_pulled_fraction=1.0)
    keys = chain("a", 8)
    sunk(w, keys[:4])
    offer, (fetch,) = w.fetch(keys)
    assert (offer.blocks, offer.reason) == (4, "missing")
    (find,) = w.told(m.Find)
    assert find.first == 4
    offer, (pull,) = w.answer(find, "pppp")
    assert pull.keys == keys[4:]
    assert (offer.blocks, offer.coming, offer.tiers) == (8, 8, {TierKind.NVME: 4, TierKind.DRAM: 4})
    w.fetched(fetch, 4)
    w.arrive(pull, 4)
    w.end(fetch)
    w.end(pull)
    assert w.match(keys) == 8
    assert w.tier().replica_bytes == 4 * PAGE
    assert {peer.node for peer in w.core.stats().peers} == {"p"}, "a tier is no peer"


@pytest.mark.parametrize("frees_at_once", [True, False])
def test_an_overdue_fetch_is_cut_but_keeps_its_slots(frees_at_once: bool) -> None:
    w = world(4, frees_at_once=frees_at_once)
    keys = chain("a", 4)
    sunk(w, keys)
    _, (fetch,) = w.fetch(keys)
    leased = w.load(keys)
    w.fetched(fetch, 1)
    w.do(m.Overdue(fetch.pull))
    (ready,) = w.told(m.Ready)
    assert (ready.first, ready.slots, ready.is_last) == (1, [], True)
    assert (w.tier().quarantined_bytes, w.tier().reserved_bytes) == (3 * PAGE, 0)
    assert w.release(leased.lease).valid
    assert w.store(keys[1:3], keys[0]) == [R, R], "the keys are free, the slots are not"
    w.tick(1e6)
    w.die()
    w.register("e", make_layout())
    assert w.store(keys[1:2], keys[0]) == [R]
    assert w.evict(keys) == m.Evicted(1, 4), "what is read below stays, too"
    w.end(fetch, "timeout")
    w.end_drops()
    assert w.tier().quarantined_bytes == 0
    assert w.store(keys) == [G] * 4
    assert w.below().failed_fetches == 1


def test_what_is_overdue_may_be_fetched_again() -> None:
    w = world(8)
    keys = chain("a", 2)
    sunk(w, keys)
    _, (late,) = w.fetch(keys)
    w.do(m.Overdue(late.pull))
    offer, (fetch,) = w.fetch(keys)
    assert offer.blocks == 2
    assert not set(fetch.slots) & set(late.slots)
    w.fetched(fetch, 2)
    w.end(fetch)
    w.end(late)
    assert w.match(keys) == 2


def test_what_one_fetch_finds_wrong_another_may_have_read_right() -> None:
    """A medium that fails once: the late fetch is told to have found what the second one has read well."""
    w = world(8)
    keys = chain("a", 2)
    sunk(w, keys)
    _, (late,) = w.fetch(keys)
    w.do(m.Overdue(late.pull))
    _, (fetch,) = w.fetch(keys)
    w.do(m.PullEnded(late.pull, "corrupt", keys))
    assert w.in_nvme(keys) == 0
    w.fetched(fetch, 2)
    w.end(fetch)
    assert w.match(keys) == 2


def test_a_failed_fetch_gives_everything_back() -> None:
    w = world(8)
    keys = chain("a", 4)
    sunk(w, keys)
    _, (fetch,) = w.fetch(keys)
    leased = w.load(keys)
    (ready,) = w.end(fetch, "EIO")
    assert ready.is_last
    assert w.release(leased.lease).valid
    assert (w.tier().resident_bytes, w.tier().reserved_bytes, w.below().blocks) == (0, 0, 4)
    assert w.fetch(keys)[0].blocks == 4, "one failure is not the end of it"


def test_what_a_fetch_finds_to_be_wrong_goes_from_the_tier() -> None:
    w = world(8, has_index=True)
    keys = chain("a", 4)
    sunk(w, keys)
    _, (fetch,) = w.fetch(keys)
    w.fetched(fetch, 1)
    w.do(m.PullEnded(fetch.pull, "corrupt", keys[1:2]))
    assert (w.match(keys), w.in_nvme(keys), w.below().wrong_blocks) == (1, 1, 1)
    assert w.published.keys() == {BlockId(keys[0], 0)}
    assert w.below().blocks == 3
    w.store(keys)
    w.demote_all()
    assert w.in_nvme(keys) == 4


def test_evictions_below_spare_what_is_being_read() -> None:
    w = world(8, nvme=8)
    keys = chain("a", 4)
    sunk(w, keys)
    _, (fetch,) = w.fetch(keys)
    w.store(chain("b", 4))
    w.store(chain("c", 4))
    w.demote_all()
    assert w.in_nvme(keys) == 4
    w.fetched(fetch, 4)
    w.end(fetch)
    assert w.below().blocks == 8


def test_only_what_loads_faster_than_it_computes_is_fetched() -> None:
    layout = make_layout(256)  # 1 MiB: half a ms at 2 GB/s
    w = World(
        256 * 32,
        extent_pages=1024,
        layout=layout,
        nvme=256 * 64,
        nvme_extent_pages=2048,
        demote_high_fraction=0.01,
        has_index=True,
    )
    keys = chain("a", 8)
    sunk(w, keys)
    offer, fetches = w.fetch(keys, compute_s=0.0002)
    assert (offer.blocks, offer.reason, fetches) == (0, "slow", [])
    (find,) = w.told(m.Find)
    offer, pulls = w.answer(find, "-" * 8)
    assert (offer.blocks, offer.reason, pulls) == (0, "slow", []), "peers have nothing, the disk is too slow"
    offer, (fetch,) = w.fetch(keys, compute_s=0.01)
    assert offer.blocks == 8
    assert fetch.timeout_s == 0.1, "twice its estimate, but not less than this"
    busy, fetches = w.fetch(chain("a", 8), request="b", compute_s=0.0005)
    assert (busy.blocks, busy.reason) == (0, "slow"), "it comes, but not fast enough"
    for index in range(8):
        w.now_s += 0.1
        w.fetched(fetch, 1, index)
    w.end(fetch)
    assert w.below().fetch_bytes_per_s < 1e9, "it is measured"
    other = chain("b", 8)
    sunk(w, other)
    offer, (fetch,) = w.fetch(other, request="c")
    assert fetch.timeout_s > 0.1
    assert offer.estimate_s == pytest.approx(fetch.timeout_s / 2, rel=0.2)


def test_fetches_are_bounded_apart_from_pulls() -> None:
    w = world(8, nvme=32, max_fetches=1, max_fetched_fraction=0.5, max_pulls=1, has_index=True)
    a, b = chain("a", 6), chain("b", 2)
    sunk(w, a)
    sunk(w, b)
    offer, (fetch,) = w.fetch(a)
    assert (offer.blocks, offer.reason, len(fetch.slots)) == (4, "limit", 4)
    offer, fetches = w.fetch(b, request="b")
    assert (offer.blocks, offer.reason, fetches) == (0, "limit", [])
    _, (pull,) = w.locate(chain("c", 2), "pp", request="c")
    w.end(pull)
    w.end(fetch)
    assert len(w.fetch(b, request="b")[1]) == 1


def test_a_tier_that_is_down_offers_nothing() -> None:
    w = world()
    keys = chain("a", 4)
    sunk(w, keys)
    w.do(m.TierDown(TierKind.NVME))
    offer, fetches = w.fetch(keys)
    assert (offer.blocks, offer.reason, fetches) == (0, "missing", [])
    w.do(m.TierUp(TierKind.NVME))
    assert w.fetch(keys)[0].blocks == 4


def test_all_shards_have_to_come_up() -> None:
    w = world(16, nvme=32)
    keys = chain("a", 4)
    sunk(w, keys)
    sunk(w, keys[:3], shard=1)
    offer, fetches = w.fetch(keys, shard_count=2)
    assert (offer.blocks, offer.coming, offer.reason) == (3, 3, "missing")
    assert {(fetch.records[0].block.shard, len(fetch.records)) for fetch in fetches} == {(0, 3), (1, 3)}
    for fetch in fetches:
        w.fetched(fetch, 3)
        w.end(fetch)
    assert w.match(keys, 2) == 3


def test_a_block_is_published_in_the_fastest_tier_that_has_it() -> None:
    w = world(4, has_index=True, max_given_fraction=1.0)
    keys = chain("a", 4)
    w.store(keys)
    w.demote_all()
    assert set(w.published.values()) == {TierKind.DRAM}
    w.store(chain("b", 2))
    assert [(told.tier, len(told.added), len(told.removed)) for told in w.told(m.Publish)] == [
        (TierKind.DRAM, 2, 0)
    ]
    assert [w.published[BlockId(key, 0)] for key in keys] == [TierKind.DRAM] * 2 + [TierKind.NVME] * 2
    w.demote_all()
    _, (fetch,) = w.fetch(keys)
    assert w.acquire(keys).slots == w.load(keys).slots, "peers get what lies above alone"
    w.fetched(fetch, 2)
    told = w.told(m.Publish)
    assert [(its.tier, len(its.added), len(its.removed)) for its in told] == [
        (TierKind.NVME, 0, 2),
        (TierKind.DRAM, 2, 0),
    ]
    assert w.core.tier_of(BlockId(keys[3], 0)) is TierKind.DRAM


def test_a_released_request_does_not_stop_its_fetch() -> None:
    w = world()
    keys = chain("a", 4)
    sunk(w, keys)
    _, (fetch,) = w.fetch(keys)
    w.release_hold()
    w.fetched(fetch, 4)
    w.end(fetch)
    assert w.match(keys) == 4
    with pytest.raises(UnknownId):
        w.release(12345)
