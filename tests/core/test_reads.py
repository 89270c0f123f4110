"""Lookup, load, release: holds and leases, and when a read does not count."""

from __future__ import annotations

import pytest

from kvtier.core import messages as m
from kvtier.errors import Conflict, InvalidRequest, LimitExceeded, UnknownId
from kvtier.types import TierKind
from tests.core.world import PAGE, G, R, World, chain, checksum, make_layout


def test_lookup_offers_the_leading_run() -> None:
    w = World()
    keys = chain("a", 6)
    w.store(keys[:4])
    offer = w.lookup(keys)
    assert (offer.blocks, offer.reason, offer.tiers) == (4, "missing", {TierKind.DRAM: 4})
    assert offer.estimate_s == pytest.approx(0.001 + 4 * PAGE / 4e9)
    assert w.lookup(keys[:3]).reason == ""
    assert w.lookup(chain("b", 2)).blocks == 0
    assert w.lookup([]).blocks == 0
    counters = w.core.stats().counters
    assert (counters.lookups, counters.lookup_blocks, counters.hit_blocks) == (4, 11, 7)


def test_keys_that_are_no_chain_match_no_further() -> None:
    w = World()
    a, b = chain("a", 2), chain("b", 2)
    w.store(a)
    w.store(b)
    assert w.lookup([a[0], b[1]]).blocks == 1
    assert w.lookup([a[0], b[0]]).blocks == 1
    assert w.lookup(a[1:]).blocks == 1, "the tail alone may be asked for"


def test_another_layout_never_matches() -> None:
    w = World()
    w.register("f", make_layout(2))
    keys = chain("a", 1)
    w.store(keys)
    assert w.lookup(keys, engine="f").blocks == 0
    assert w.load(keys, engine="f").lease == 0


def test_a_hold_protects_until_its_time_is_over() -> None:
    w = World(slots=4)
    keys = chain("a", 4)
    w.store(keys)
    w.lookup(keys[:2])
    assert w.store(chain("b", 4)) == [G, G, R, R]
    assert w.match(keys) == 2
    w.tick(29.9)
    assert w.core.stats().holds == 1
    w.tick(0.1)
    assert w.core.stats().holds == 0
    w.store(chain("c", 4))
    assert w.match(keys) == 0


def test_asking_again_renews_and_replaces_the_hold() -> None:
    w = World()
    keys = chain("a", 4)
    w.store(keys)
    w.lookup(keys)
    w.tick(20)
    w.lookup(keys[:2])
    w.tick(20)
    assert w.core.stats().holds == 1
    assert w.tier().leased_bytes == 2 * PAGE
    w.lookup(chain("b", 1))
    assert w.core.stats().holds == 0


def test_load_takes_over_what_was_held_shard_by_shard() -> None:
    w = World()
    w.register("worker", make_layout())
    keys = chain("a", 2)
    w.store(keys)
    w.store(keys, shard=1)
    assert w.lookup(keys, shard_count=2).blocks == 2
    assert w.core.stats().engines[0].leased_bytes == 4 * PAGE
    leased = w.load(keys, engine="worker")
    assert leased.checksums == [checksum(key) for key in keys]
    assert w.core.stats().holds == 1
    assert [engine.leased_bytes for engine in w.core.stats().engines] == [2 * PAGE, 2 * PAGE]
    other = w.load(keys, engine="worker", shard=1)
    assert w.core.stats().holds == 0
    assert w.release(leased.lease, engine="worker").valid
    assert w.release(other.lease, engine="worker").valid
    assert w.tier().leased_bytes == 0
    assert w.core.stats().counters.loaded_blocks == 4


def test_load_of_nothing_gives_no_lease() -> None:
    w = World()
    leased = w.load(chain("a", 2))
    assert (leased.lease, leased.slots, leased.checksums) == (0, [], [])
    assert w.core.stats().leases == 0


def test_a_lease_protects_and_then_expires() -> None:
    w = World(slots=4)
    keys = chain("a", 4)
    w.store(keys)
    lease = w.load(keys).lease
    assert w.store(chain("b", 1)) == [R]
    w.tick(30)
    assert w.core.stats().counters.expired_leases == 1
    assert w.store(chain("b", 4)) == [G] * 4
    assert w.release(lease) == m.Released(False)
    with pytest.raises(UnknownId):
        w.release(lease)


def test_a_lease_that_ran_out_before_the_tick_is_not_valid() -> None:
    w = World()
    keys = chain("a", 1)
    w.store(keys)
    lease = w.load(keys).lease
    w.now_s = 30.0
    assert not w.release(lease).valid
    counters = w.core.stats().counters
    assert (counters.loaded_blocks, counters.failed_loads, counters.expired_leases) == (0, 1, 1)


def test_expired_leases_are_remembered_up_to_a_bound() -> None:
    w = World(max_expired_leases=2)
    keys = chain("a", 1)
    w.store(keys)
    leases = [w.load(keys).lease for _ in range(3)]
    w.tick(30)
    with pytest.raises(UnknownId):
        w.release(leases[0])
    assert not w.release(leases[1]).valid


def test_releases_of_leases_that_are_not_ones_own() -> None:
    w = World()
    w.register("f", make_layout())
    keys = chain("a", 1)
    w.store(keys)
    lease = w.load(keys).lease
    for wrong in (0, 1, lease + 1):
        with pytest.raises(UnknownId):
            w.release(wrong)
    with pytest.raises(UnknownId):
        w.release(lease, engine="f")
    assert w.release(lease).valid
    other = World(seed=2)
    with pytest.raises(UnknownId):
        other.release(lease)


def test_release_names_exactly_one_thing() -> None:
    w = World()
    with pytest.raises(InvalidRequest):
        w.do(m.Release(w.call_id(), "e"))
    with pytest.raises(InvalidRequest):
        w.do(m.Release(w.call_id(), "e", 1, "r"))
    assert w.release_hold("never") == m.Released(False)
    w.store(chain("a", 1))
    w.lookup(chain("a", 1))
    assert w.release_hold() == m.Released(True)
    assert w.tier().leased_bytes == 0


def test_one_engine_cannot_lease_everything() -> None:
    w = World(slots=16, max_leased_fraction=0.25)
    keys = chain("a", 8)
    w.store(keys)
    offer = w.lookup(keys)
    assert (offer.blocks, offer.reason) == (4, "limit")
    assert w.lookup(keys, "other").blocks == 4, "what is shared is paid once"
    assert len(w.load(keys).slots) == 4
    w.store(chain("b", 2))
    assert w.lookup(chain("b", 2), "third").reason == "limit"
    assert w.load(chain("b", 2), "fourth").lease == 0
    w.register("f", make_layout())
    assert w.lookup(chain("b", 2), "fifth", engine="f").blocks == 2


def test_the_limit_counts_ancestors_that_are_not_asked_for() -> None:
    w = World(slots=16, max_leased_fraction=0.25)
    keys = chain("a", 8)
    w.store(keys)
    assert w.lookup(keys[3:]).blocks == 1
    assert w.tier().leased_bytes == 4 * PAGE
    assert w.lookup(keys[4:]).blocks == 0


def test_what_was_held_can_be_loaded_even_if_its_ancestors_came_back_meanwhile() -> None:
    """A found seed of the simulator (146).

    1. A prefix is held; a block in its middle turns out corrupt, so that the hold costs less. 2. The engine
    spends the difference on another hold. 3. The corrupt block is stored again: the first hold costs what
    it did, and the engine is above its limit. 4. What was offered must load all the same.
    """
    w = World(slots=16, max_leased_fraction=0.25)
    keys, other = chain("a", 4), chain("b", 2)
    w.store(keys)
    w.store(other)
    (verify,) = _report(w, keys, [keys[1]])
    assert w.lookup(keys, "first").blocks == 4
    w.do(m.Verified(verify.verify, intact=False))
    assert w.lookup(other, "second").blocks == 2
    w.store(keys)
    assert w.tier().leased_bytes == 6 * PAGE
    assert len(w.load(keys, "first").slots) == 4


def test_bounds_on_leases_and_holds() -> None:
    w = World(max_leases_per_engine=1, max_holds=1)
    keys = chain("a", 1)
    w.store(keys)
    w.load(keys)
    with pytest.raises(LimitExceeded):
        w.load(keys)
    assert w.lookup(keys, "one").blocks == 1
    offer = w.lookup(keys, "two")
    assert (offer.blocks, offer.reason) == (0, "limit")
    assert w.lookup(keys, "one").blocks == 1


def test_the_estimate_follows_what_was_measured() -> None:
    w = World(slots=4096, extent_pages=4096)
    keys = chain("a", 1024)
    w.store(keys)
    for i in range(40):
        lease = w.load(keys, f"r{i}").lease
        w.now_s += 1.0
        w.release(lease)
    assert w.lookup(keys).estimate_s == pytest.approx(1.0, rel=0.05)


def test_bad_input() -> None:
    w = World(max_keys_per_call=4)
    w.register("f", make_layout(2))
    fp = w.fingerprint("e")
    keys = chain("a", 2)
    before = w.core.stats()
    bad: list[tuple[type[Exception], m.Event]] = [
        (UnknownId, m.Lookup("nobody", "r", keys, 1, fp)),
        (Conflict, m.Lookup("f", "r", keys, 1, fp)),
        (InvalidRequest, m.Lookup("e", "r", [b"x"], 1, fp)),
        (InvalidRequest, m.Lookup("e", "", keys, 1, fp)),
        (InvalidRequest, m.Lookup("e", "r", keys, 0, fp)),
        (InvalidRequest, m.Lookup("e", "r", keys, 4097, fp)),
        (LimitExceeded, m.Lookup("e", "r", chain("b", 5), 1, fp)),
        (UnknownId, m.Load(w.call_id(), "nobody", "r", keys, 0)),
        (InvalidRequest, m.Load(w.call_id(), "e", "r", [], 0)),
        (InvalidRequest, m.Load(w.call_id(), "e", "r" * 257, keys, 0)),
        (InvalidRequest, m.Load(w.call_id(), "e", "r", keys, -1)),
        (InvalidRequest, m.Load(b"", "e", "r", keys, 0)),
        (InvalidRequest, m.Release(w.call_id(), "e", 1, None, [b"x"])),
    ]
    for error, event in bad:
        with pytest.raises(error):
            w.do(event)
    assert w.core.stats() == before


# ---- corruption


def _report(w: World, keys: list[bytes], wrong: list[bytes]) -> list[m.Verify]:
    released = w.release(w.load(keys).lease, wrong)
    assert released.valid
    return [i for i in w.instructions if isinstance(i, m.Verify)]


def test_a_block_reported_corrupt_is_verified_and_dropped_with_what_follows_first_to_go() -> None:
    w = World(slots=8)
    keys = chain("a", 4)
    w.store(keys)
    (verify,) = _report(w, keys, [keys[1]])
    assert (verify.block, verify.checksum, verify.block_bytes) == ((keys[1], 0), checksum(keys[1]), PAGE)
    assert w.match(keys) == 4, "not before the node has looked"
    w.do(m.Verified(verify.verify, intact=False))
    assert w.instructions == [m.Lost([verify.block], "corrupt")]
    assert w.match(keys) == 1
    assert w.match(keys[2:]) == 0, "an orphan is never offered"
    w.store(chain("b", 4))
    w.store(chain("c", 2))
    assert w.match(chain("b", 4)) == 4, "orphans go before everything else"
    assert w.match(keys) == 1
    assert w.core.stats().counters.corrupt_blocks == 1


def test_a_false_report_changes_nothing() -> None:
    w = World()
    keys = chain("a", 2)
    w.store(keys)
    (verify,) = _report(w, keys, [keys[0], keys[0], chain("x", 1)[0]])
    w.do(m.Verified(verify.verify, intact=True))
    assert w.match(keys) == 2
    assert w.instructions == []


def test_leases_on_a_corrupt_block_are_not_valid_any_more() -> None:
    w = World(slots=4)
    keys = chain("a", 3)
    w.store(keys)
    reading = w.load(keys).lease
    short = w.load(keys[:1], "short").lease
    (verify,) = _report(w, keys, [keys[1]])
    w.do(m.Verified(verify.verify, intact=False))
    assert not w.release(reading).valid
    assert w.release(short).valid
    assert w.tier().leased_bytes == 0


def test_a_corrupt_block_can_be_stored_again_and_its_descendants_come_back() -> None:
    w = World()
    keys = chain("a", 4)
    w.store(keys)
    w.pin(keys)
    (verify,) = _report(w, keys, [keys[1]])
    w.do(m.Verified(verify.verify, intact=False))
    assert w.store(keys).count(G) == 1
    assert w.match(keys) == 4
    assert w.tier().pinned_bytes == 4 * PAGE
    w.tick(61)
    assert w.tier().pinned_bytes == 0


@pytest.mark.parametrize("position", [1, 2, 3])
def test_a_pin_still_protects_what_stands_above_a_lost_block(position: int) -> None:
    w = World(slots=8)
    keys = chain("a", 4)
    w.store(keys)
    w.pin(keys)
    (verify,) = _report(w, keys, [keys[position]])
    w.do(m.Verified(verify.verify, intact=False))
    w.store(chain("b", 8))
    assert w.match(keys) == position
    assert w.store(keys).count(G) == 1
    assert w.tier().pinned_bytes == 4 * PAGE
    w.tick(61)
    assert w.tier().pinned_bytes == 0
    assert w.evict(keys).kept == 0


def test_a_block_is_verified_once_at_a_time_and_so_many_at_all() -> None:
    w = World(max_verifies=2)
    keys = chain("a", 4)
    w.store(keys)
    assert len(_report(w, keys, keys[:1])) == 1
    assert len(_report(w, keys, keys)) == 1
    assert len(_report(w, keys, keys)) == 0


def test_scrub_visits_each_block_once() -> None:
    w = World()
    keys = chain("a", 5)
    w.store(keys)
    seen: list[bytes] = []
    for _ in range(4):
        w.do(m.Scrub(2))
        verifies = list(w.instructions)
        for verify in verifies:
            assert isinstance(verify, m.Verify)
            seen.append(verify.block.key)
            w.do(m.Verified(verify.verify, intact=True))
    assert seen == keys


def test_a_block_under_verification_stays() -> None:
    w = World(slots=4)
    keys = chain("a", 4)
    w.store(keys)
    w.do(m.Scrub(4))
    assert w.store(chain("b", 1)) == [R]
    assert w.evict(keys) == m.Evicted(0, 4)
