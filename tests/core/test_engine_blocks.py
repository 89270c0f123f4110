"""What engines have in their own memory: known, bounded, published apart, never offered."""

from __future__ import annotations

import pytest

from kvtier.core import messages as m
from kvtier.errors import InvalidRequest, LimitExceeded, UnknownId
from kvtier.types import BlockId, Key, TierKind
from tests.core.world import World, chain, make_layout

KEYS = chain("a", 4)


def ids(*keys: Key) -> set[BlockId]:
    return {BlockId(key, 0) for key in keys}


def holders(w: World, keys: list[Key]) -> list[tuple[int, str]]:
    return [(place.index, place.holder) for place in w.core.engine_blocks.places(keys)]


def test_it_is_shown_and_published_and_never_offered() -> None:
    w = World(has_index=True)
    assert w.report(KEYS) == m.Noted(4)
    assert w.in_hbm == ids(*KEYS)
    assert holders(w, KEYS) == [(index, "e") for index in range(4)]
    w.register("f", make_layout())
    for engine in ("e", "f"):
        offer = w.lookup(KEYS, engine=engine)
        assert (offer.blocks, offer.tiers, offer.reason) == (0, {}, "missing")
        assert [find.first for find in w.told(m.Find)] == [0], "elsewhere it may be loadable"
        assert w.load(KEYS, engine=engine).lease == 0
    assert w.acquire(KEYS).lease == 0
    assert w.pin(KEYS) == m.Pinned(0, 0)
    assert w.evict(KEYS) == m.Evicted(0, 0)
    assert w.match(KEYS) == 0
    assert w.core.places(KEYS) == []
    assert [block.key for block in w.in_hbm - ids(*KEYS)] == []
    assert w.tier().blocks == 0


def test_the_place_of_the_node_itself_stays() -> None:
    w = World(has_index=True)
    w.store(KEYS)
    w.report(KEYS)
    assert w.published == dict.fromkeys(ids(*KEYS), TierKind.DRAM)
    assert w.in_hbm == ids(*KEYS)
    w.report([], KEYS[2:])
    assert w.published == dict.fromkeys(ids(*KEYS), TierKind.DRAM)
    assert w.in_hbm == ids(*KEYS[:2])
    w.evict(KEYS)
    assert (w.published, w.in_hbm) == ({}, ids(*KEYS[:2]))


def test_the_last_holder_withdraws_it() -> None:
    w = World(has_index=True)
    w.register("f", make_layout())
    w.report(KEYS)
    w.report(KEYS[:2], engine="f")
    assert w.told(m.Publish) == []
    w.report([], KEYS)
    assert w.in_hbm == ids(*KEYS[:2])
    assert holders(w, KEYS) == [(0, "f"), (1, "f")]
    w.die("f")
    assert w.in_hbm == set()
    assert w.core.engine_blocks.keys() == []


@pytest.mark.parametrize("again", [True, False])
def test_a_dead_engine_has_nothing_and_comes_back_with_nothing(again: bool) -> None:
    w = World(has_index=True)
    w.report(KEYS)
    w.die()
    assert w.in_hbm == set()
    with pytest.raises(UnknownId):
        w.report(KEYS)
    if again:
        w.register("e", make_layout())
        assert holders(w, KEYS) == []
        assert w.report(KEYS[:1]) == m.Noted(1)


def test_a_registration_that_is_repeated_changes_nothing() -> None:
    """The same process says again who it is: its memory is as it was."""
    w = World(has_index=True)
    w.report(KEYS)
    w.register("e", make_layout())
    assert w.told(m.Publish) == []
    assert len(holders(w, KEYS)) == 4


def test_clear_and_what_comes_with_it() -> None:
    w = World(has_index=True)
    w.report(KEYS)
    more = chain("b", 1)
    assert w.report([*KEYS[:1], *more], clear=True) == m.Noted(2)
    (publish,) = w.told(m.Publish)
    assert (publish.tier, set(publish.added), set(publish.removed)) == (
        TierKind.HBM,
        ids(*more),
        ids(*KEYS[1:]),
    ), "what comes back at once is not told"
    assert w.report([], clear=True) == m.Noted(0)
    assert w.in_hbm == set()


def test_what_was_named_longest_ago_is_forgotten() -> None:
    w = World(has_index=True, max_engine_blocks=3)
    w.register("f", make_layout())
    w.report(KEYS[:3])
    w.report(KEYS[:1])
    assert w.report(KEYS[3:]) == m.Noted(3)
    assert w.in_hbm == ids(KEYS[0], KEYS[2], KEYS[3])
    w.report(KEYS[1:3], engine="f")
    assert w.report(chain("b", 8)) == m.Noted(3)
    assert w.in_hbm == ids(*chain("b", 8)[5:], *KEYS[1:3])
    assert w.core.stats().engines[0].resident_blocks == 3
    assert w.core.stats().engines[1].resident_blocks == 2


def test_nothing_is_published_without_an_index() -> None:
    w = World()
    w.report(KEYS)
    assert w.instructions == []
    assert len(holders(w, KEYS)) == 4
    w.die()
    assert w.instructions == []


def test_reports_are_bounded_and_refused_whole() -> None:
    w = World(has_index=True, max_keys_per_call=4)
    w.report(KEYS[:2])
    for added, removed, error in (
        (chain("b", 5), [], LimitExceeded),
        ([], chain("b", 5), LimitExceeded),
        ([b"short"], [], InvalidRequest),
        (KEYS[2:], [b"short"], InvalidRequest),
    ):
        with pytest.raises(error):
            w.report(added, removed, clear=True)
    assert len(holders(w, KEYS)) == 2


def test_a_repeat_gives_the_first_answer() -> None:
    w = World(has_index=True)
    event = m.ReportResident(w.call_id(), "e", KEYS)
    assert w.do(event) == m.Noted(4)
    w.report([], KEYS[:1])
    assert w.do(event) == m.Noted(4)
    assert (w.instructions, len(holders(w, KEYS))) == ([], 3)
