"""Who gives way: recency, leaves first, extents that change their slot size, tiers that free later."""

from __future__ import annotations

import itertools
import random

import pytest

from kvtier.core import messages as m
from kvtier.errors import ConfigError, Conflict, InvalidRequest, LimitExceeded, UnknownId
from kvtier.types import TierKind
from tests.core.world import PAGE, G, P, R, World, chain, make_layout

pytestmark = pytest.mark.usefixtures("each_policy")


def test_leaves_go_before_ancestors_and_the_least_recent_branch_first() -> None:
    w = World(slots=8)
    stem = chain("stem", 2)
    left, right = chain("left", 3, stem[-1]), chain("right", 3, stem[-1])
    w.store(stem + left)
    w.store(right, stem[-1])
    w.lookup(stem + left)
    w.release_hold()
    w.store(chain("new", 2))
    assert w.match(stem + right) == 3
    assert w.match(stem + left) == 5
    w.store(chain("more", 2))
    assert w.match(stem + right) == 2
    assert w.match(stem + left) == 4, "within the branch the deepest goes first"
    assert w.core.stats().counters.evicted_blocks == 4


@pytest.mark.parametrize("frees_at_once", [True, False])
def test_a_slot_size_that_nobody_uses_any_more_gives_way(frees_at_once: bool) -> None:
    w = World(slots=48, extent_pages=12, frees_at_once=frees_at_once)
    for i in range(60):
        pages = 1 + i % 3
        engine = f"e{i}"
        w.register(engine, make_layout(pages))
        keys = chain(engine, 48 // pages)
        for _ in range(4):  # a tier that frees later needs more than one attempt
            w.store(keys, engine=engine)
            _drain(w)
        assert w.match(keys) == 48 // pages, "the whole tier, whatever was in it before"
        w.die(engine)


def test_two_layouts_in_use_share_the_tier() -> None:
    w = World(slots=32, extent_pages=4)
    w.register("f", make_layout(2))
    rng = random.Random(1)
    for i in range(300):
        engine = rng.choice("ef")
        keys = chain(f"{engine}{i}", 4)
        assert w.store(keys, engine=engine) == [G] * 4
        assert w.match(keys) == 4
    tier = w.tier()
    assert tier.resident_bytes >= tier.allocated_bytes - 2 * 4 * PAGE, "hardly anything lies idle"


def test_a_take_over_spares_extents_with_anything_protected() -> None:
    w = World(slots=8, extent_pages=4)
    w.register("f", make_layout(4))
    keys = chain("a", 8)
    w.store(keys)
    hold = w.lookup(keys[:1])
    assert hold.blocks == 1
    assert w.store(chain("big", 2), engine="f") == [G, R]
    assert w.match(keys) == 4
    w.release_hold()
    assert w.store(chain("large", 2), engine="f") == [G, G]
    assert w.match(keys) == 0


def test_a_take_over_drops_descendants_elsewhere_first() -> None:
    w = World(slots=8, extent_pages=4)
    w.register("f", make_layout(4))
    keys = chain("a", 8)
    w.store(keys)
    w.lookup(keys[:2])
    w.release_hold()
    w.store(chain("big", 1), engine="f")
    assert w.match(keys) == 4, "the extent with the beginning was used last"
    assert w.tier().blocks == 5


def test_no_take_over_from_a_size_that_is_hotter() -> None:
    w = World(slots=8, extent_pages=4)
    w.register("f", make_layout(4))
    hot = chain("hot", 4)
    w.store(chain("big", 1), engine="f")
    w.store(hot)
    assert w.store(chain("bigger", 1), engine="f") == [G]
    assert w.match(hot) == 4, "its own size's victim is older"
    assert w.match(chain("big", 1)) == 0


def test_freed_slots_are_handed_out_lowest_first_and_side_by_side() -> None:
    w = World(slots=16)
    a, b, c = chain("a", 4), chain("b", 4), chain("c", 4)
    for keys in (a, b, c):
        w.store(keys)
    w.evict(b)
    w.evict(a)
    offsets = [slot.offset_bytes // PAGE for slot in w.reserve(chain("d", 8)).slots]
    assert offsets == list(range(8))


def _drain(w: World) -> None:
    pending = list(w.core.residency.tiers[TierKind.DRAM].draining)
    if pending:
        w.do(m.Dropped(TierKind.DRAM, pending))


def test_a_tier_that_frees_later_charges_until_then_and_evicts_no_more_than_needed() -> None:
    w = World(slots=8, frees_at_once=False)
    old = chain("old", 8)
    w.store(old)
    assert w.store(chain("a", 3)) == [R] * 3
    assert w.tier().draining_bytes == 3 * PAGE
    assert w.tier().resident_bytes == 5 * PAGE
    assert w.store(chain("b", 3)) == [R] * 3, "the same slots would do for this one"
    assert w.tier().draining_bytes == 3 * PAGE, "what drains already was counted first"
    assert w.store(chain("c", 4)) == [R] * 4
    assert w.tier().draining_bytes == 4 * PAGE
    _drain(w)
    assert w.store(chain("a", 3)) == [G] * 3
    assert w.match(old) == 4


def test_drop_names_the_slots_of_the_victims() -> None:
    w = World(slots=4, frees_at_once=False)
    keys = chain("a", 4)
    slots = w.reserve(keys)
    w.commit(slots.reservation, keys)
    w.reserve(chain("b", 2))
    assert w.instructions == [m.Drop(TierKind.DRAM, [slots.slots[3], slots.slots[2]])]


def test_grow_adds_room_up_to_the_cap() -> None:
    w = World(slots=16, allocated=4)
    assert w.reserve(chain("a", 6)).states == [G] * 4 + [R] * 2
    w.do(m.Grow(TierKind.DRAM, 10 * PAGE))
    assert w.reserve(chain("b", 5)).states == [G] * 4 + [R], "whole extents only"
    w.do(m.Grow(TierKind.DRAM, 16 * PAGE))
    assert w.reserve(chain("c", 9)).states == [G] * 8 + [R]
    assert w.tier().allocated_bytes == 16 * PAGE


def test_a_tier_without_any_bytes_yet_refuses_and_lives() -> None:
    w = World(slots=16, allocated=0)
    assert w.store(chain("a", 1)) == [R]
    assert w.lookup(chain("a", 1)).blocks == 0


# ---- operators


def test_evict_takes_what_is_named_and_what_follows_except_protected_prefixes() -> None:
    w = World(slots=16)
    stem = chain("stem", 2)
    left, right = chain("left", 2, stem[-1]), chain("right", 2, stem[-1])
    w.store(stem + left)
    w.store(right, stem[-1])
    lease = w.load(stem + left[:1]).lease
    assert w.evict(stem[:1]) == m.Evicted(blocks=3, kept=3)
    assert w.match(stem + left) == 3
    assert w.match(stem + right) == 2
    w.release(lease)
    assert w.evict(stem) == m.Evicted(blocks=3, kept=0)
    assert w.evict(stem) == m.Evicted(0, 0)


def test_evict_leaves_blocks_that_somebody_continues() -> None:
    w = World()
    keys = chain("a", 3)
    w.store(keys[:2])
    reserved = w.reserve(keys[2:], keys[1])
    assert w.evict(keys) == m.Evicted(0, 2)
    w.commit(reserved.reservation, keys[2:])
    assert w.match(keys) == 3


def test_pins_protect_every_shard_until_they_end() -> None:
    w = World(slots=8)
    keys = chain("a", 3)
    w.store(keys)
    w.store(keys[:2], shard=1)
    pinned = w.pin([*keys, chain("x", 1)[0]], ttl_s=10)
    assert pinned.blocks == 3
    assert w.tier().pinned_bytes == 5 * PAGE
    w.store(chain("b", 8))
    assert w.match(keys) == 3
    assert w.match(keys, shards=2) == 2
    assert all(place.pinned for place in w.core.places(keys))
    w.tick(10)
    assert w.core.stats().pins == 0
    assert w.tier().pinned_bytes == 0


def test_unpin_by_id_and_by_keys() -> None:
    w = World()
    keys = chain("a", 3)
    w.store(keys)
    one, two, three = w.pin(keys), w.pin(keys), w.pin(keys[:2])
    assert len({one.pin, two.pin, three.pin}) == 3
    assert w.do(m.Unpin(w.call_id(), one.pin)) == m.Unpinned(1)
    assert w.do(m.Unpin(w.call_id(), one.pin)) == m.Unpinned(0)
    assert w.do(m.Unpin(w.call_id(), None, keys)) == m.Unpinned(1)
    assert w.tier().pinned_bytes == 2 * PAGE
    for event in (m.Unpin(w.call_id()), m.Unpin(w.call_id(), 1, keys)):
        with pytest.raises(InvalidRequest):
            w.do(event)


def test_pins_are_bounded() -> None:
    w = World(slots=16, max_pinned_fraction=0.25, max_pins=2)
    keys = chain("a", 8)
    w.store(keys)
    with pytest.raises(LimitExceeded, match="max_pinned_fraction"):
        w.pin(keys)
    assert w.pin(keys[:4]).blocks == 4
    assert w.pin(keys[:2]).blocks == 2, "shared blocks are counted once"
    with pytest.raises(LimitExceeded, match="max_pins"):
        w.pin(keys[:1])
    for ttl_s in (0.0, -1.0, float("nan"), 31 * 86400.0):
        with pytest.raises(InvalidRequest):
            w.pin(keys[:1], ttl_s)
    assert World().pin(keys) == m.Pinned(0, 0)


def test_places_tell_shard_slot_leases_and_pins() -> None:
    w = World()
    keys = chain("a", 2)
    w.store(keys)
    w.store(keys[:1], shard=3)
    w.load(keys[:1])
    places = w.core.places([*keys, chain("x", 1)[0]])
    assert [(p.index, p.block.shard, p.leases, p.pinned) for p in places] == [
        (0, 0, 1, False),
        (0, 3, 0, False),
        (1, 0, 0, False),
    ]
    assert places[2].slot.arena == 7


@pytest.mark.parametrize(
    "wrong",
    [{"lease_ttl_s": 0.0}, {"max_engines": 0}, {"max_leased_fraction": 1.5}, {"max_pinned_fraction": 0.0}],
)
def test_bounds_that_make_no_sense_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        World(**wrong)  # type: ignore[arg-type]


def test_a_tier_that_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="allocated_bytes"):
        World(slots=4, allocated=8)
    with pytest.raises(ConfigError, match="extent_bytes"):
        World(extent_pages=0)


# ---- registration


def test_registration() -> None:
    w = World(max_engines=2)
    layout = make_layout()
    assert w.register("e", layout).slot_bytes == PAGE
    with pytest.raises(Conflict, match="another layout"):
        w.register("e", make_layout(2))
    with pytest.raises(InvalidRequest, match="fingerprint"):
        w.do(m.RegisterEngine(w.call_id(), "x", layout, make_layout(2).fingerprint()))
    with pytest.raises(InvalidRequest, match="extent_bytes"):
        w.register("x", make_layout(5))
    for name in ("", "UPPER", "a/b", "x" * 65):
        with pytest.raises(InvalidRequest, match="engine id"):
            w.register(name, layout)
    w.register("f", make_layout(3))
    with pytest.raises(LimitExceeded, match="max_engines"):
        w.register("g", layout)
    w.die("f")
    w.register("g", layout)


def test_another_layout_under_a_registered_fingerprint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World()
    same = w.fingerprint("e")
    layout = make_layout(2)
    monkeypatch.setattr(type(layout), "fingerprint", lambda self: same)  # a collision, or an engine that lies
    with pytest.raises(Conflict, match="under this fingerprint"):
        w.do(m.RegisterEngine(w.call_id(), "f", layout, same))


def test_holds_end_with_the_engine_that_asked() -> None:
    w = World(slots=4)
    w.register("worker", make_layout())
    keys = chain("a", 4)
    w.store(keys)
    w.lookup(keys)
    w.die("e")
    assert w.tier().leased_bytes == 0
    assert w.store(chain("b", 4), engine="worker") == [G] * 4
    assert w.match(keys) == 0
    w.register("e", make_layout())
    w.tick(60)
    assert w.tier().leased_bytes == 0


def test_stores_of_shared_prefixes_by_many_engines_interleave() -> None:
    w = World(slots=64, extent_pages=8)
    names = [f"n{i}" for i in range(4)]
    for name in names:
        w.register(name, make_layout())
    keys = chain("a", 24)
    reserved = {name: w.reserve(keys[: 6 * (i + 1)], engine=name) for i, name in enumerate(names)}
    assert [r.states.count(G) for r in reserved.values()] == [6, 6, 6, 6]
    w.die("n1")
    with pytest.raises(UnknownId):  # its blocks are gone, so what follows them is out of reach
        w.reserve(chain("b", 1), keys[12], engine="n0")
    for name in ("n3", "n2", "n0"):
        granted = [k for k, s in zip(keys, reserved[name].states, strict=False) if s is G]
        w.commit(reserved[name].reservation, granted, engine=name)
    assert w.match(keys) == 6
    assert w.store(keys, engine="n0") == [P] * 6 + [G] * 6 + [P] * 12
    assert w.match(keys) == 24


def test_every_order_of_ends_leaves_nothing_guarded() -> None:
    keys = chain("a", 3)
    for order in itertools.permutations(("hold", "lease", "pin", "verify")):
        w = World(slots=4)
        w.store(keys)
        w.lookup(keys[:2], "held")
        lease = w.load(keys, "other").lease
        pin = w.pin(keys[:1]).pin
        w.do(m.Scrub(1))
        (verify,) = w.instructions
        assert isinstance(verify, m.Verify)
        ends: dict[str, m.Event] = {
            "hold": m.Release(w.call_id(), "e", None, "held"),
            "lease": m.Release(w.call_id(), "e", lease),
            "pin": m.Unpin(w.call_id(), pin),
            "verify": m.Verified(verify.verify, intact=False),
        }
        for name in order:
            w.do(ends[name])
        assert w.evict(keys).kept == 0
        assert w.tier().blocks == 0
