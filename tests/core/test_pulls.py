"""Blocks that come from other nodes: what is asked for, offered, told and cut, and what goes first."""

from __future__ import annotations

import pytest

from kvtier.core import messages as m
from kvtier.core.rates import FORGIVEN_AFTER_S
from kvtier.errors import InvalidRequest, UnknownId
from kvtier.types import BlockId, TierKind
from tests.core.world import PAGE, B, G, P, R, World, chain, checksum, here, make_layout


def world(slots: int = 16, **options: object) -> World:
    return World(slots, **{"has_index": True, "max_pulled_fraction": 1.0, **options})  # type: ignore[arg-type]


# ---- what is asked for


def test_only_what_is_neither_here_nor_coming_is_looked_for() -> None:
    w = world()
    keys = chain("a", 8)
    w.store(keys[:2])
    assert w.lookup(keys).reason == "missing"
    assert [find.first for find in w.told(m.Find)] == [2]
    w.lookup(keys[:2])
    assert not w.told(m.Find), "all of it is here"
    offer, pulls = w.locate(keys, "aaa", first=2)
    assert (offer.blocks, offer.coming, offer.reason) == (5, 3, "missing")
    assert [pull.keys for pull in pulls] == [keys[2:5]]
    again = w.lookup(keys)
    assert (again.blocks, again.coming) == (5, 3)
    assert [find.first for find in w.told(m.Find)] == [5]
    w.lookup(keys[:5])
    assert not w.told(m.Find), "all of it is here or coming"
    offer, pulls = w.locate(keys, "aaa", request="other", first=5)
    assert (offer.blocks, offer.coming) == (8, 6)
    assert [pull.keys for pull in pulls] == [keys[5:]], "nothing is pulled twice"


def test_nothing_is_looked_for_without_an_index_or_room() -> None:
    alone = World()
    alone.lookup(chain("a", 2))
    assert not alone.instructions
    w = world(max_pulls=1)
    _, (pull,) = w.locate(chain("a", 1), "a")
    w.lookup(chain("b", 1))
    assert not w.told(m.Find)
    w.end(pull)
    w.lookup(chain("b", 1))
    assert w.told(m.Find)


def test_what_an_engine_is_storing_is_not_fetched_and_the_reverse() -> None:
    w = world()
    keys = chain("a", 6)
    reserved = w.reserve(keys[:2])
    w.lookup(keys)
    assert not w.told(m.Find), "the next block is being stored here"
    w.abort(reserved.reservation)
    w.lookup(keys)
    find = w.told(m.Find)[0]
    reserved = w.reserve(keys[:2])
    offer, pulls = w.answer(find, "a" * 6)
    assert (offer.blocks, pulls) == (0, [])
    w.commit(reserved.reservation, keys[:2])
    offer, pulls = w.locate(keys, "aa", first=2)
    assert w.store(keys) == [P, P, B, B, G, G]
    w.arrive(pulls[0], 2)
    w.end(pulls[0])
    assert w.match(keys) == 6


def test_a_block_behind_what_is_stored_here_is_not_offered() -> None:
    w = world()
    keys = chain("a", 6)
    w.store(keys)
    w.evict(keys)
    w.lookup(keys)
    find = w.told(m.Find)[0]
    w.reserve(keys[:1])
    _, pulls = w.answer(find, "a" * 6)
    assert not pulls
    w.reserve(keys[1:3], keys[0])
    assert not w.answer(find, "a" * 6)[1]


def test_a_second_answer_starts_no_second_pull() -> None:
    w = world()
    keys = chain("a", 4)
    w.lookup(keys)
    find = w.told(m.Find)[0]
    first, (pull,) = w.answer(find, "aaaa")
    second, pulls = w.answer(find, "aaaa")
    assert not pulls
    assert (second.blocks, second.coming) == (first.blocks, first.coming) == (4, 4)
    w.arrive(pull, 4)
    w.end(pull)
    third, pulls = w.answer(find, "aaaa")
    assert (third.blocks, third.coming, pulls) == (4, 0, [])
    assert w.core.stats().counters.hit_blocks == 12, "the lookup itself had no hit, each answer four"


def test_an_answer_that_nobody_waits_for_is_refused() -> None:
    w = world()
    keys = chain("a", 4)
    w.store(keys[:1])
    w.lookup(keys)
    find = w.told(m.Find)[0]
    w.release_hold()
    with pytest.raises(UnknownId, match="asked anew"):
        w.answer(find, "aaa")
    w.lookup(keys)
    w.store(chain("b", 1))
    w.lookup(chain("b", 1))
    with pytest.raises(UnknownId, match="asked anew"):
        w.answer(find, "aaa")
    assert w.lookup(chain("b", 1)).blocks == 1
    w.die()
    with pytest.raises(UnknownId, match="not registered"):
        w.answer(find, "aaa")
    assert w.core.stats().pulls == 0


def test_answers_that_are_none() -> None:
    w = world()
    w.lookup(chain("a", 2))
    find = w.told(m.Find)[0]
    for first, places in ((3, [[]]), (-1, [[]]), (0, []), (0, [[], []])):
        with pytest.raises(InvalidRequest, match="places"):
            w.do(m.Located(find.lookup, first, places))


def test_a_key_twice_in_a_lookup_is_pulled_once() -> None:
    w = world()
    a, b = chain("a", 2)
    offer, (pull,) = w.locate([a, b, a, b], "aaaa")
    assert pull.keys == [a, b]
    assert offer.blocks == 2


def test_other_layouts_and_other_parents_end_the_tail() -> None:
    w = world(32)
    w.register("f", make_layout(2))
    keys = chain("a", 4)
    w.store(keys[2:3])
    offer, pulls = w.locate(keys, "aaaa")
    assert offer.blocks == 2, "the third one is here, but as the begin of a prompt"
    w.end(pulls[0])
    w.evict(keys)
    w.store(keys, engine="f")
    assert w.lookup(keys).blocks == 0
    assert not w.answer(w.told(m.Find)[0], "aaaa")[1]
    w.die("f")


# ---- from whom


def test_the_longest_run_is_taken_and_gaps_are_skipped() -> None:
    w = world(32)
    keys = chain("a", 10)
    offer, pulls = w.locate(keys, ["ab", "b", "b", "ab", "a", "a", "a", "", "a", "a"])
    assert [(pull.node, pull.keys) for pull in pulls] == [("b", keys[:4]), ("a", keys[4:7])]
    assert (offer.blocks, offer.coming) == (7, 7), "nobody has the eighth"


def test_a_tail_has_at_most_four_segments() -> None:
    w = world(32)
    keys = chain("a", 12)
    offer, pulls = w.locate(keys, "aabbccddeeff")
    assert [pull.node for pull in pulls] == ["a", "b", "c", "d"]
    assert offer.blocks == 8


def test_what_is_here_between_two_gaps_is_not_pulled() -> None:
    w = world(32)
    keys = chain("a", 8)
    _, (first, second) = w.locate(keys, "aaaabbbb")
    w.arrive(second, 4)
    w.end(second)
    w.end(first, "timeout")
    assert w.match(keys) == 0
    offer, (third,) = w.locate(keys, "aaaabbbb", first=0)
    assert third.keys == keys[:4], "the rest is here already, though nobody could reach it"
    assert (offer.blocks, offer.coming) == (8, 8)
    w.arrive(third, 4)
    assert w.match(keys) == 8


def test_a_peer_that_failed_or_is_slow_weighs_less() -> None:
    w = world(64)
    _, (pull,) = w.locate(chain("a", 4), "aaaa")
    assert pull.node == "a"
    w.end(pull, "timeout")
    _, (pull,) = w.locate(chain("b", 4), ["ab"] * 4)
    assert pull.node == "b"
    w.now_s += 0.004
    w.arrive(pull, 4)
    w.end(pull)
    _, (pull,) = w.locate(chain("c", 4), ["ab"] * 4)
    assert pull.node == "b"
    w.end(pull)
    w.tick(FORGIVEN_AFTER_S)
    _, (pull,) = w.locate(chain("d", 4), ["ab"] * 4)
    assert pull.node == "a", "it is forgiven after a while"
    peers = {peer.node: peer for peer in w.core.stats().peers}
    assert (peers["a"].failed_pulls, peers["a"].running, peers["b"].pulled_blocks) == (1, 1, 4)


def test_a_peer_that_is_busy_weighs_less() -> None:
    w = world(64)
    w.locate(chain("a", 4), ["ab"] * 4, request="1")
    _, (pull,) = w.locate(chain("b", 4), ["ab"] * 4, request="2")
    assert pull.node == "b"


def test_rates_are_measured_over_all_pulls_of_a_peer() -> None:
    layout = make_layout(256)  # 1 MiB
    w = world(256 * 64, extent_pages=256, layout=layout)
    for number in range(40):
        _, (pull,) = w.locate(chain(str(number), 5), ["p"] * 5)
        w.now_s += 0.5 + 0.01
        w.arrive(pull, 1)
        for index in range(1, 5):
            w.now_s += 0.01
            w.arrive(pull, 1, index)
        w.end(pull)
    (peer,) = w.core.stats().peers
    assert peer.bytes_per_s == pytest.approx(100 * 2**20, rel=0.05)
    assert peer.round_trip_s == pytest.approx(0.5, rel=0.05)
    assert peer.pulled_blocks == 200
    lost = chain("x", 60)
    offer, (pull,) = w.locate(lost, ["p"] * 60, compute_s=0.02)
    assert offer.estimate_s == pytest.approx(0.5 + 0.6 + 60 * 2**20 / 4e9 + 0.001, rel=0.05)
    assert pull.timeout_s == pytest.approx(2 * (0.5 + 0.6), rel=0.05)


def test_what_lies_in_a_peers_lower_tier_is_measured_by_itself() -> None:
    """Its disk is part of what is measured there, and of nothing else."""
    layout = make_layout(256)  # 1 MiB
    w = world(256 * 64, extent_pages=256, layout=layout, pull_bytes_per_s=1e9, fetch_bytes_per_s=5e8)
    offer, (pull,) = w.locate(chain("a", 8), ["P"] * 8)
    assert offer.estimate_s == pytest.approx(0.004 + 8 * 2**20 / 5e8 + 8 * 2**20 / 4e9 + 0.001, rel=0.01)
    for index in range(8):
        w.now_s += 0.1
        w.arrive(pull, 1, index)
    w.end(pull)
    for number in range(20):
        _, (pull,) = w.locate(chain(f"b{number}", 2), ["p"] * 2)
        w.now_s += 0.001
        w.arrive(pull, 2)
        w.end(pull)
    peers = {(peer.node, peer.tier): peer for peer in w.core.stats().peers}
    assert peers["p", TierKind.NVME].pulled_blocks == 8
    assert peers["p", TierKind.DRAM].pulled_blocks == 40
    assert peers["p", TierKind.NVME].bytes_per_s < 4e8
    assert peers["p", TierKind.DRAM].bytes_per_s > 1e9


def test_a_copy_in_memory_is_preferred_where_it_is_faster() -> None:
    w = world(64)
    _, (pull,) = w.locate(chain("a", 4), ["Pq"] * 4)
    assert pull.node == "q"
    w.end(pull, "timeout")
    _, (pull,) = w.locate(chain("b", 4), ["Pq"] * 4)
    assert pull.node == "p", "what fails is not fast"


def test_a_tail_in_two_tiers_of_a_peer_is_two_pulls_over_one_way() -> None:
    layout = make_layout(256)  # 1 MiB
    w = world(256 * 64, extent_pages=256, layout=layout, pull_bytes_per_s=1e9, fetch_bytes_per_s=2e9)
    keys = chain("a", 16)
    offer, pulls = w.locate(keys, "p" * 8 + "P" * 8)
    assert [pull.keys for pull in pulls] == [keys[:8], keys[8:]]
    assert offer.blocks == 16
    _, (pull,) = w.locate(chain("b", 16), "q" * 16, compute_s=0.0024)
    w.end(pull)
    offer, pulls = w.locate(chain("c", 16), "r" * 8 + "R" * 8, compute_s=0.00125)
    assert (offer.blocks, offer.reason) == (0, "slow"), "16 MiB need 17 ms on one way, whatever they lie in"


# ---- what pays


def test_only_what_pays_is_offered() -> None:
    layout = make_layout(256)  # 1 MiB: about 1 ms at 1 GB/s, and 3 ms before the first
    w = world(256 * 64, extent_pages=256, layout=layout)
    keys = chain("a", 16)
    offer, pulls = w.locate(keys, "a" * 16, compute_s=0.001)
    assert (offer.blocks, offer.reason, pulls) == (0, "slow", [])
    offer, pulls = w.locate(keys[:2], "a" * 2, compute_s=0.0025)
    assert (offer.blocks, pulls) == (0, []), "two blocks do not pay for the round trip"
    offer, pulls = w.locate(keys, "a" * 16, compute_s=0.0025)
    assert (offer.blocks, len(pulls)) == (16, 1)
    impatient = w.lookup(keys, request="fast", compute_s=0.0001)
    assert (impatient.blocks, impatient.reason) == (0, "slow"), "it comes, but not fast enough"
    assert not w.told(m.Find)
    assert w.lookup(keys, request="unknown").blocks == 16


def test_what_does_not_pay_is_left_away_from_the_end() -> None:
    layout = make_layout(256)
    w = world(256 * 64, extent_pages=256, layout=layout)
    for number in range(3):
        _, (pull,) = w.locate(chain(str(number), 1), "b")
        w.end(pull, "timeout")
    keys = chain("a", 20)
    w.store(keys[:2])
    offer, pulls = w.locate(keys, "a" * 10 + "b" * 8, compute_s=0.002)
    assert [pull.node for pull in pulls] == ["a"]
    assert (offer.blocks, offer.reason) == (12, "slow")


# ---- bounds


def test_pulls_are_bounded_in_number_and_bytes() -> None:
    w = world(16, max_pulled_fraction=0.5, max_pulls=2)
    keys = chain("a", 12)
    offer, (pull,) = w.locate(keys, "a" * 12)
    assert (offer.blocks, offer.reason) == (8, "limit")
    w.arrive(pull, 4)
    offer, (more,) = w.locate(keys, "a" * 4, first=8)
    assert (offer.blocks, offer.coming) == (12, 8)
    assert w.core.stats().pulls == 2
    w.end(more)
    _, pulls = w.locate(chain("b", 3), "abc", request="b")
    assert [pull.node for pull in pulls] == ["a"], "there may be two at once"


def test_a_pull_makes_room_but_not_at_the_cost_of_its_own_prompt() -> None:
    w = world(8)
    old, keys = chain("old", 4), chain("a", 8)
    w.store(keys[:4])
    w.store(old)
    w.lookup(keys[:4])
    w.release_hold()
    offer, (pull,) = w.locate(keys, "aaaa")
    assert (offer.blocks, offer.coming) == (8, 4)
    assert w.match(old) == 0
    w.lookup(old, request="old")
    _, pulls = w.answer(w.told(m.Find)[0], "aaaa") if w.told(m.Find) else (None, [])
    assert not pulls, "all room is protected"
    w.arrive(pull, 4)
    w.end(pull)
    assert w.match(keys) == 8


def test_a_pull_without_room_is_none() -> None:
    w = world(8)
    held = chain("held", 7)
    w.store(held)
    w.lookup(held, request="held")
    offer, (pull,) = w.locate(chain("a", 4), "aaaa")
    assert (offer.blocks, offer.reason, len(pull.keys)) == (1, "limit", 1)
    w.lookup(chain("b", 4), request="b")
    assert not w.told(m.Find) or not w.answer(w.told(m.Find)[0], "aaaa")[1]


def test_room_for_a_pull_that_then_does_not_pay_is_given_back() -> None:
    """Too little room leaves too few blocks for the round trip; check() sees an extent that stays taken."""
    w = world(8)
    w.register("other", make_layout())
    held = chain("held", 4)
    w.store(held)
    w.lookup(held, request="held", engine="other")
    offer, pulls = w.locate(chain("a", 8), "a" * 8, compute_s=0.0006)
    assert (offer.blocks, pulls) == (0, [])
    assert w.store(chain("b", 4)) == [G] * 4


def test_an_offer_is_not_longer_than_the_engine_may_hold() -> None:
    w = world(16, max_leased_fraction=0.5)
    keys = chain("a", 12)
    w.store(keys[:3])
    offer, (pull,) = w.locate(keys, "a" * 9)
    assert (offer.blocks, len(pull.keys), offer.reason) == (8, 5, "limit")


def test_without_a_hold_nothing_is_pulled() -> None:
    w = world(max_holds=1)
    w.store(chain("b", 1))
    w.lookup(chain("b", 1), request="other")
    offer, pulls = w.locate(chain("a", 2), "aa")
    assert (offer.blocks, pulls) == (0, [])


@pytest.mark.parametrize("frees_at_once", [True, False])
def test_slots_of_a_pull_are_its_own_until_it_has_ended(frees_at_once: bool) -> None:
    w = world(4, frees_at_once=frees_at_once)
    keys = chain("a", 4)
    _, (pull,) = w.locate(keys, "aaaa")
    w.release_hold()
    w.die()
    w.tick(1e6)
    w.register("e", make_layout())
    assert w.store(chain("b", 1)) == [R], "nobody wants them any more, but they may still be written"
    assert (w.tier().reserved_bytes, w.evict(keys)) == (4 * PAGE, m.Evicted(0, 0))
    w.end(pull, "timeout")
    if not frees_at_once:
        assert w.store(chain("b", 1)) == [R]
        w.end_drops()
    assert w.store(chain("b", 4)) == [G] * 4
    assert w.core.stats().counters.failed_pulls == 1


# ---- loads of what is coming


def test_a_load_is_told_of_blocks_as_they_arrive() -> None:
    w = world()
    keys = chain("a", 6)
    w.store(keys[:2])
    _, (pull,) = w.locate(keys, "aaaa")
    leased = w.load(keys)
    assert (len(leased.slots), leased.coming) == (2, 4)
    assert w.core.stats().holds == 0
    assert w.arrive(pull, 1) == [m.Ready(leased.lease, 2, pull.slots[:1], [checksum(keys[2])], False)]
    assert w.match(keys) == 3
    (ready,) = w.arrive(pull, 3, 1)
    assert (ready.first, ready.slots, ready.is_last) == (3, pull.slots[1:], True)
    assert w.end(pull) == []
    assert w.release(leased.lease).valid
    counters = w.core.stats().counters
    assert (counters.loaded_blocks, counters.pulled_blocks, counters.failed_pulls) == (6, 4, 0)


def test_a_load_before_anything_is_here() -> None:
    w = world()
    keys = chain("a", 3)
    _, (pull,) = w.locate(keys, "aaa")
    leased = w.load(keys)
    assert (leased.lease > 0, leased.slots, leased.coming) == (True, [], 3)
    (ready,) = w.end(pull, "unreachable")
    assert ready == m.Ready(leased.lease, 0, [], [], True)
    assert w.release(leased.lease).valid, "for the nothing that has come"
    assert w.load(keys).lease == 0
    assert w.tier().leased_bytes == 0


def test_a_load_after_the_pull_ended() -> None:
    w = world()
    keys = chain("a", 4)
    _, (pull,) = w.locate(keys, "aaaa")
    w.arrive(pull, 2)
    w.end(pull, "lease")
    leased = w.load(keys)
    assert (len(leased.slots), leased.coming) == (2, 0)


def test_a_pull_that_fails_cuts_leases_and_holds_to_what_has_come() -> None:
    w = world()
    keys = chain("a", 6)
    w.store(keys[:1])
    _, (pull,) = w.locate(keys, "aaaaa")
    leased = w.load(keys)
    w.lookup(keys, request="held")
    w.arrive(pull, 2)
    (ready,) = w.end(pull, "corrupt")
    assert (ready.first, ready.slots, ready.is_last) == (3, [], True)
    assert w.tier().leased_bytes == 3 * PAGE
    assert len(w.load(keys, request="held").slots) == 3
    assert w.release(leased.lease).valid
    assert w.core.stats().counters.loaded_blocks == 3


def test_segments_that_arrive_out_of_order() -> None:
    w = world()
    keys = chain("a", 8)
    _, (first, second) = w.locate(keys, "aaaabbbb")
    leased = w.load(keys)
    assert w.arrive(second, 4) == []
    w.lookup(keys, request="again")
    assert not w.told(m.Find)
    (ready,) = w.arrive(first, 3)
    assert (ready.first, len(ready.slots), ready.is_last) == (0, 3, False)
    (ready,) = w.arrive(first, 1, 3)
    assert (ready.first, ready.slots, ready.is_last) == (3, [*first.slots[3:], *second.slots], True)
    w.end(first)
    w.end(second)
    assert w.release(leased.lease).valid


def test_the_first_segment_fails_and_the_second_is_here() -> None:
    w = world(8)
    keys = chain("a", 8)
    _, (first, second) = w.locate(keys, "aaaabbbb")
    leased = w.load(keys)
    w.arrive(second, 4)
    w.arrive(first, 1)
    (ready,) = w.end(first, "transfer")
    assert (ready.first, ready.is_last) == (1, True)
    assert w.match(keys) == 1
    w.release(leased.lease)
    assert w.store(chain("b", 7)) == [G] * 7, "what nobody can reach goes first"
    assert w.match(keys) == 1


def test_the_second_segment_fails_first() -> None:
    w = world()
    keys = chain("a", 8)
    _, (first, second) = w.locate(keys, "aaaabbbb")
    leased = w.load(keys)
    assert w.end(second, "gone") == []
    (ready,) = w.arrive(first, 4)
    assert (ready.first, len(ready.slots), ready.is_last) == (0, 4, True)
    assert w.release(leased.lease).valid


def test_release_before_everything_has_come() -> None:
    w = world()
    keys = chain("a", 4)
    _, (pull,) = w.locate(keys, "aaaa")
    leased = w.load(keys)
    w.arrive(pull, 1)
    assert w.release(leased.lease).valid
    assert w.core.stats().counters.loaded_blocks == 1, "what was not told was not loaded"
    assert w.arrive(pull, 3, 1) == []
    assert w.match(keys) == 4


def test_death_and_time_end_leases_that_wait() -> None:
    w = world()
    keys = chain("a", 4)
    _, (pull,) = w.locate(keys, "aaaa")
    w.register("worker", make_layout())
    w.load(keys, engine="worker")
    w.load(keys)
    w.die("worker")
    w.tick(30)
    assert w.core.stats().leases == 0
    assert w.arrive(pull, 4) == []
    assert w.core.stats().tiers[0].leased_bytes == 0


def test_a_repeated_load_gets_its_first_answer() -> None:
    w = world()
    keys = chain("a", 4)
    _, (pull,) = w.locate(keys, "aaaa")
    event = m.Load(w.call_id(), "e", "r", keys, 0)
    first = w.do(event)
    w.arrive(pull, 4)
    assert w.do(event) == first
    assert first.coming == 4


def test_a_corrupt_block_ends_a_lease_that_waits() -> None:
    w = world()
    keys = chain("a", 4)
    w.store(keys[:2])
    _, (pull,) = w.locate(keys, "aa")
    w.register("other", make_layout())
    other = w.load(keys[:1], engine="other")
    leased = w.load(keys)
    w.release(other.lease, corrupt=keys[:1], engine="other")
    (verify,) = w.told(m.Verify)
    w.do(m.Verified(verify.verify, intact=False))
    assert [type(action) for action in w.instructions] == [m.Lost, m.Ready, m.Publish]
    assert w.told(m.Ready)[0].is_last
    assert w.arrive(pull, 2) == []
    w.end(pull)
    assert not w.release(leased.lease).valid
    assert w.match(keys) == 0


def test_a_pull_fills_the_place_of_a_lost_block() -> None:
    w = world()
    keys = chain("a", 4)
    w.store(keys)
    w.pin(keys)
    w.do(m.Scrub(2))
    first, second = w.told(m.Verify)
    w.do(m.Verified(first.verify, intact=True))
    w.do(m.Verified(second.verify, intact=False))
    assert w.match(keys) == 1
    _, (pull,) = w.locate(keys, "a", first=1)
    w.end(pull, "timeout")
    assert w.load(keys).coming == 0
    offer, (pull,) = w.locate(keys, "aaa", first=1, request="again")
    assert (offer.blocks, offer.coming, pull.keys) == (4, 3, [keys[1]])
    w.arrive(pull, 1)
    w.end(pull)
    assert w.match(keys) == 4


def test_a_store_behind_what_is_coming() -> None:
    w = world()
    keys = chain("a", 6)
    _, (pull,) = w.locate(keys[:3], "aaa")
    w.store(keys)
    w.arrive(pull, 1)
    w.end(pull, "timeout")
    assert w.match(keys) == 1
    assert w.store(keys[1:3], keys[0]) == [G, G]
    assert w.match(keys) == 6


# ---- shards


def test_all_shards_have_to_come() -> None:
    w = world(32)
    keys = chain("a", 6)
    w.store(keys[:2])
    w.store(keys[:4], shard=1)
    offer, pulls = w.locate(keys, "aaab", "--bb", shard_count=2, first=2)
    assert [(pull.shard, pull.node, pull.keys) for pull in pulls] == [
        (0, "a", keys[2:5]),
        (0, "b", keys[5:]),
        (1, "b", keys[4:]),
    ]
    assert (offer.blocks, offer.coming) == (6, 4)
    w.arrive(pulls[2], 2)
    assert w.match(keys, 2) == 2
    w.arrive(pulls[0], 3)
    assert w.match(keys, 2) == 5
    leased = w.load(keys)
    other = w.load(keys, shard=1)
    assert (len(leased.slots), leased.coming, len(other.slots), other.coming) == (5, 1, 6, 0)
    (ready,) = w.end(pulls[1])
    assert (ready.lease, ready.first, ready.is_last) == (leased.lease, 5, True)


def test_one_shard_that_is_nowhere_ends_the_offer() -> None:
    w = world(32)
    keys = chain("a", 6)
    offer, pulls = w.locate(keys, "aaaaaa", "aaa", shard_count=2)
    assert offer.blocks == 3
    assert {(pull.shard, len(pull.keys)) for pull in pulls} == {(0, 3), (1, 3)}
    w.arrive(pulls[0], 3)
    assert w.end(pulls[1], "gone") == []
    assert w.match(keys) == 3
    assert w.match(keys, 2) == 0
    assert w.core.stats().holds == 1
    assert len(w.load(keys).slots) == 3
    assert w.load(keys, shard=1).lease == 0


# ---- replicas


def test_replicas_go_first_until_an_engine_stores_them_too() -> None:
    w = world(8)
    old, keys = chain("old", 4), chain("a", 4)
    w.store(old)
    _, (pull,) = w.locate(keys, "aaaa")
    w.arrive(pull, 4)
    w.end(pull)
    w.release_hold()
    assert w.tier().replica_bytes == 4 * PAGE
    assert [place.replica for place in w.core.places(keys)] == [True] * 4
    w.store(chain("new", 1))
    assert (w.match(keys), w.match(old)) == (3, 4), "though they were used later"
    assert w.store(keys[:2]) == [P, P]
    assert w.tier().replica_bytes == PAGE
    w.store(chain("more", 2))
    assert (w.match(keys), w.match(old)) == (2, 3)


def test_replicas_are_scrubbed_only_when_reported() -> None:
    w = world()
    keys = chain("a", 2)
    _, (pull,) = w.locate(keys, "aa")
    w.arrive(pull, 2)
    w.end(pull)
    w.do(m.Scrub(8))
    assert not w.told(m.Verify), "they were verified as they came"
    leased = w.load(keys)
    w.release(leased.lease, corrupt=keys[1:])
    (verify,) = w.told(m.Verify)
    w.do(m.Verified(verify.verify, intact=False))
    assert w.match(keys) == 1


def test_publications_are_what_is_here() -> None:
    w = world(4)
    keys = chain("a", 4)
    w.store(keys[:3])
    assert w.told(m.Publish) == [m.Publish(TierKind.DRAM, [BlockId(key, 0) for key in keys[:3]], [])]
    w.store(chain("b", 2))
    assert len(w.published) == 4
    w.evict(keys)
    assert w.told(m.Publish) == [m.Publish(TierKind.DRAM, [], [BlockId(keys[1], 0), BlockId(keys[0], 0)])]
    assert len(w.published) == 2
    quiet = World()
    quiet.store(keys)
    assert not quiet.told(m.Publish)


def test_what_lies_behind_a_lost_block_is_withdrawn_until_it_is_back() -> None:
    w = world()
    keys = chain("a", 4)
    w.store(keys)
    leased = w.load(keys)
    w.release(leased.lease, corrupt=keys[1:2])
    (verify,) = w.told(m.Verify)
    w.do(m.Verified(verify.verify, intact=False))
    (publish,) = w.told(m.Publish)
    assert set(publish.removed) == {BlockId(key, 0) for key in keys[1:]}
    assert w.match(keys) == 1
    w.store(keys[1:2], keys[0])
    assert w.match(keys) == 4
    assert w.published.keys() == {BlockId(key, 0) for key in keys}


def test_a_place_of_two_incarnations_is_two_places() -> None:
    w = world()
    keys = chain("a", 4)
    w.lookup(keys)
    find = w.told(m.Find)[0]
    w.do(m.Located(find.lookup, 0, [[[here("a", 1)], [here("a", 1)], [here("a", 2)], [here("a", 2)]]]))
    assert [(pull.incarnation, pull.keys) for pull in w.told(m.Pull)] == [(1, keys[:2]), (2, keys[2:])]
