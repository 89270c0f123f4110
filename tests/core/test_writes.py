"""Reserve, commit, abort, and what becomes of writers that nobody hears of."""

from __future__ import annotations

import pytest

from kvtier.core import messages as m
from kvtier.errors import Conflict, InvalidRequest, KvtierError, LimitExceeded, UnknownId
from tests.core.world import PAGE, B, G, P, R, World, chain, checksum, make_layout


def test_nothing_is_visible_before_its_commit() -> None:
    w = World()
    keys = chain("a", 3)
    reserved = w.reserve(keys)
    assert reserved.states == [G, G, G]
    assert [slot.offset_bytes for slot in reserved.slots] == [0, PAGE, 2 * PAGE]
    assert w.match(keys) == 0
    assert w.lookup(keys).blocks == 0
    assert w.commit(reserved.reservation, keys[:2]).blocks == 2
    assert w.match(keys) == 2
    w.commit(reserved.reservation, keys[2:])
    assert w.match(keys) == 3


def test_a_block_whose_parent_is_pending_becomes_reachable_with_it() -> None:
    w = World()
    keys = chain("a", 2)
    reserved = w.reserve(keys)
    w.commit(reserved.reservation, keys[1:])
    assert w.match(keys) == 0
    w.commit(reserved.reservation, keys[:1])
    assert w.match(keys) == 2


def test_one_key_is_given_to_one_writer() -> None:
    w = World()
    w.register("f", make_layout())
    keys = chain("a", 3)
    assert w.store(keys[:1]) == [G]
    w.reserve(keys[:2])
    assert w.reserve(keys, engine="f").states == [P, B, G]


def test_shards_are_stored_apart() -> None:
    w = World()
    keys = chain("a", 2)
    w.store(keys)
    assert w.match(keys, shards=2) == 0
    assert w.store(keys[:1], shard=1) == [G]
    assert w.match(keys, shards=2) == 1
    assert w.lookup(keys, shard_count=2).blocks == 1


def test_a_full_tier_gives_fewer_never_a_wait() -> None:
    w = World(slots=8)
    first = chain("a", 6)
    assert w.reserve(first).states == [G] * 6
    states = w.reserve(chain("b", 4)).states
    assert states == [G, G, R, R]
    assert w.core.stats().counters.refused_blocks == 2


def test_after_a_refusal_everything_is_refused() -> None:
    w = World(slots=4)
    keys = chain("a", 3)
    reserved = w.reserve(keys)
    w.commit(reserved.reservation, keys[1:])
    w.abort(reserved.reservation, keys[:1])
    w.reserve(chain("b", 2))
    # keys[0] is lost, keys[1:] are orphans: room comes from nowhere, since the chain protects itself
    assert w.reserve(keys).states == [R, R, R]


def test_old_blocks_make_room_and_the_own_chain_does_not() -> None:
    w = World(slots=8)
    old = chain("old", 4)
    mine = chain("mine", 8)
    w.store(mine[:4])
    w.store(old)
    assert w.store(mine) == [P] * 4 + [G] * 4
    assert w.match(mine) == 8
    assert w.match(old) == 0


def test_a_chain_longer_than_the_tier_keeps_its_beginning() -> None:
    w = World(slots=8)
    w.store(chain("old", 8))
    keys = chain("a", 12)
    assert w.store(keys) == [G] * 8 + [R] * 4
    assert w.match(keys) == 8
    assert w.store(keys[8:], keys[7]) == [R] * 4
    assert w.match(keys) == 8


def test_one_engine_cannot_occupy_everything_with_unfinished_stores() -> None:
    w = World(slots=16, max_unfinished_fraction=0.25)
    assert w.reserve(chain("a", 6)).states == [G] * 4 + [R] * 2
    assert w.reserve(chain("b", 1)).states == [R]
    w.register("f", make_layout())
    assert w.reserve(chain("b", 1), engine="f").states == [G]


def test_an_expired_reservation_frees_its_keys_and_not_its_slots() -> None:
    w = World(slots=8)
    keys = chain("a", 4)
    late = w.reserve(keys)
    w.tick(61)
    assert w.tier().quarantined_bytes == 4 * PAGE
    again = w.reserve(keys)
    assert again.states == [G] * 4
    assert not {s.offset_bytes for s in late.slots} & {s.offset_bytes for s in again.slots}
    w.commit(again.reservation, keys)
    with pytest.raises(UnknownId, match="expired"):
        w.commit(late.reservation, keys)
    w.tick(1e6)
    assert w.tier().quarantined_bytes == 4 * PAGE, "no timer may end a quarantine"
    assert w.abort(late.reservation, keys[:1]).blocks == 1
    assert w.abort(late.reservation).blocks == 3
    assert w.tier().quarantined_bytes == 0
    with pytest.raises(UnknownId):
        w.abort(late.reservation)
    assert w.match(keys) == 4


def test_quarantine_counts_against_the_engine() -> None:
    w = World(slots=16, max_unfinished_fraction=0.25)
    w.reserve(chain("a", 4))
    w.tick(61)
    assert w.reserve(chain("b", 1)).states == [R]
    w.die()
    w.register("e", make_layout())
    assert w.reserve(chain("b", 1)).states == [G]


def test_death_frees_reserved_and_quarantined_slots_and_leases() -> None:
    w = World(slots=16)
    keys = chain("a", 2)
    w.store(keys)
    w.reserve(chain("b", 3))
    w.tick(61)
    w.reserve(chain("c", 3))
    w.load(keys)
    w.die()
    tier = w.tier()
    assert (tier.reserved_bytes, tier.quarantined_bytes, tier.leased_bytes) == (0, 0, 0)
    assert w.core.stats().engines == []
    assert w.core.stats().counters.dead_engines == 1
    w.die()  # nobody: nothing
    assert w.core.stats().counters.dead_engines == 1


def test_a_commit_a_little_late_but_before_the_tick_counts() -> None:
    w = World()
    keys = chain("a", 1)
    reserved = w.reserve(keys)
    w.now_s = 60.5
    assert w.commit(reserved.reservation, keys).blocks == 1


def test_abort_takes_some_or_all() -> None:
    w = World()
    keys = chain("a", 5)
    reserved = w.reserve(keys)
    w.commit(reserved.reservation, keys[:1])
    assert w.abort(reserved.reservation, keys[4:]).blocks == 1
    assert w.abort(reserved.reservation).blocks == 3
    assert w.tier().reserved_bytes == 0
    assert w.match(keys) == 1


def test_reserved_slots_are_those_a_commit_would_show() -> None:
    w = World()
    keys = chain("a", 3)
    reserved = w.reserve(keys)
    assert w.core.reserved_slots("e", reserved.reservation, keys[1:]) == reserved.slots[1:]
    with pytest.raises(UnknownId):
        w.core.reserved_slots("e", reserved.reservation, chain("b", 1))
    w.register("f", make_layout())
    with pytest.raises(Conflict):
        w.core.reserved_slots("f", reserved.reservation, keys)


def test_a_repeat_returns_the_first_reply_and_nothing_else() -> None:
    w = World()
    keys = chain("a", 2)
    event = m.Reserve(w.call_id(), "e", None, keys, 0, w.fingerprint("e"))
    first = w.do(event)
    commit = m.Commit(w.call_id(), "e", first.reservation, keys, [checksum(key) for key in keys])
    assert w.do(commit) == w.do(commit) == m.Committed(2)
    assert w.do(event) is first
    w.register("f", make_layout())
    other = m.Reserve(event.call_id, "f", None, keys, 0, w.fingerprint("f"))
    assert w.do(other).states == [P, P], "an id counts for one engine only"


def test_replies_are_bounded_by_count_and_by_blocks() -> None:
    w = World(max_replies=3, max_reply_blocks=1000)
    first = m.Pin(w.call_id(), chain("a", 1), 1.0)
    w.store(chain("a", 1))
    pinned = w.do(first)
    assert w.do(first) == pinned
    for _ in range(3):
        w.pin(chain("a", 1))
    assert w.do(first) != pinned
    w = World(max_replies=1000, max_reply_blocks=8)
    event = m.Reserve(w.call_id(), "e", None, chain("a", 9), 0, w.fingerprint("e"))
    reserved = w.do(event)
    assert w.do(event) is reserved, "the newest is kept whatever it weighs"
    w.reserve(chain("b", 1))
    assert w.do(event) is not reserved


def _cases() -> list[tuple[str, type[KvtierError]]]:
    return [
        ("call id", InvalidRequest),
        ("unregistered", UnknownId),
        ("short key", InvalidRequest),
        ("short parent", InvalidRequest),
        ("no keys", InvalidRequest),
        ("too many keys", LimitExceeded),
        ("twice", InvalidRequest),
        ("own parent", InvalidRequest),
        ("parent missing", UnknownId),
        ("shard", InvalidRequest),
        ("other layout", Conflict),
        ("other parent", Conflict),
        ("begins twice", Conflict),
        ("commit unknown", UnknownId),
        ("commit foreign", Conflict),
        ("commit not reserved", UnknownId),
        ("commit twice", InvalidRequest),
        ("commit again", UnknownId),
        ("few checksums", InvalidRequest),
        ("short checksum", InvalidRequest),
        ("abort unknown", UnknownId),
        ("abort foreign", Conflict),
        ("abort not reserved", UnknownId),
    ]


@pytest.mark.parametrize(("case", "error"), _cases())
def test_bad_input_is_refused_and_changes_nothing(case: str, error: type[KvtierError]) -> None:
    w = World(max_keys_per_call=8)
    w.register("f", make_layout(2))
    keys = chain("a", 4)
    w.store(keys[:2])
    reserved = w.reserve(keys[2:], keys[1])
    w.commit(reserved.reservation, keys[2:3])
    fp, id = w.fingerprint("e"), w.call_id()
    sums = [checksum(key) for key in keys]
    number = reserved.reservation
    bad: dict[str, m.Event] = {
        "call id": m.Reserve(b"short", "e", None, keys, 0, fp),
        "unregistered": m.Reserve(id, "nobody", None, keys, 0, fp),
        "short key": m.Reserve(id, "e", None, [keys[0], b"x" * 31], 0, fp),
        "short parent": m.Reserve(id, "e", b"", keys, 0, fp),
        "no keys": m.Reserve(id, "e", None, [], 0, fp),
        "too many keys": m.Reserve(id, "e", None, chain("b", 9), 0, fp),
        "twice": m.Reserve(id, "e", None, [keys[0], keys[0]], 0, fp),
        "own parent": m.Reserve(id, "e", keys[1], keys[1:], 0, fp),
        "parent missing": m.Reserve(id, "e", chain("x", 1)[0], keys, 0, fp),
        "shard": m.Reserve(id, "e", None, keys, 4096, fp),
        "other layout": m.Reserve(id, "e", None, keys, 0, w.fingerprint("f")),
        "other parent": m.Reserve(id, "e", keys[0], keys[2:], 0, fp),
        "begins twice": m.Reserve(id, "e", None, keys[1:], 0, fp),
        "commit unknown": m.Commit(id, "e", 1, keys[3:], sums[3:]),
        "commit foreign": m.Commit(id, "f", number, keys[3:], sums[3:]),
        "commit not reserved": m.Commit(id, "e", number, [keys[3], keys[0]], sums[:2]),
        "commit twice": m.Commit(id, "e", number, [keys[3]] * 2, sums[:2]),
        "commit again": m.Commit(id, "e", number, keys[2:], sums[2:]),
        "few checksums": m.Commit(id, "e", number, keys[3:], []),
        "short checksum": m.Commit(id, "e", number, keys[3:], [b"x" * 15]),
        "abort unknown": m.Abort(id, "e", 1),
        "abort foreign": m.Abort(id, "f", number),
        "abort not reserved": m.Abort(id, "e", number, keys[2:]),
    }
    before = w.core.stats()
    with pytest.raises(error) as raised:
        w.do(bad[case])
    assert len(str(raised.value)) > 20, "the message says what to do"
    assert w.core.stats() == before
    assert w.commit(number, keys[3:]).blocks == 1
    assert w.match(keys) == 4


def test_a_parent_of_another_layout_is_refused() -> None:
    w = World()
    w.register("f", make_layout(2))
    keys = chain("a", 2)
    w.store(keys[:1])
    with pytest.raises(Conflict, match="another layout"):
        w.reserve(keys[1:], keys[0], engine="f")
    with pytest.raises(Conflict, match="another layout"):
        w.reserve(keys, engine="f")


def test_the_place_of_a_lost_block_is_kept_for_its_layout() -> None:
    w = World()
    w.register("f", make_layout(2))
    keys = chain("a", 2)
    reserved = w.reserve(keys)
    w.commit(reserved.reservation, keys[1:])
    w.abort(reserved.reservation)
    with pytest.raises(Conflict, match="another layout"):
        w.reserve(keys[:1], engine="f")
    assert w.store(keys) == [G, P]
    assert w.match(keys) == 2


def test_reservations_of_an_earlier_incarnation_are_unknown() -> None:
    old, new = World(seed=1), World(seed=2)
    keys = chain("a", 2)
    reserved = old.reserve(keys)
    new.reserve(keys)
    with pytest.raises(UnknownId):
        new.commit(reserved.reservation, keys)
    with pytest.raises(UnknownId):
        new.abort(reserved.reservation)
