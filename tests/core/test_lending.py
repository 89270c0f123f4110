"""What peers are lent of the tier below: fetched for them, a few at a time, behind this node's engines."""

from __future__ import annotations

import pytest

from kvtier.core import messages as m
from kvtier.types import BlockId, Key, TierKind
from tests.core.test_fetches import sunk
from tests.core.world import PAGE, World, chain, checksum, make_layout

NVME = TierKind.NVME


def world(slots: int = 8, nvme: int = 16, **options: object) -> World:
    defaults: dict[str, object] = {
        "demote_high_fraction": 0.01,
        "max_fetched_fraction": 1.0,
        "max_lent_fraction": 1.0,
        "max_given_fraction": 1.0,
        "nvme_frees_at_once": True,
        "has_index": True,
    }
    return World(slots, nvme=nvme, **(defaults | options))  # type: ignore[arg-type]


def names(fetch: m.Fetch) -> list[Key]:
    return [record.block.key for record in fetch.records]


def test_what_lies_below_is_fetched_for_a_peer_that_waits() -> None:
    w = world()
    keys = chain("a", 4)
    sunk(w, keys)
    assert set(w.published.values()) == {NVME}
    assert w.acquire(keys) == m.Leased(0, [], [], 30.0), "it would not ask again"
    first, (fetch,) = w.lend(keys)
    assert (first.slots, first.coming) == ([], 4)
    assert first.lease, "what comes has its place under the lease"
    assert fetch.yields
    assert (names(fetch), fetch.tier) == (keys, NVME)
    assert w.tier().leased_bytes == 4 * PAGE
    assert w.fetched(fetch, 3) == [], "a peer is told nothing, it asks"
    second, fetches = w.lend(keys)
    assert (second.slots, second.coming, fetches) == (fetch.slots[:3], 1, [])
    assert second.checksums == [checksum(key) for key in keys[:3]]
    w.fetched(fetch, 1, 3)
    w.end(fetch)
    third, fetches = w.lend(keys[3:])
    assert (third.slots, third.coming, fetches) == (fetch.slots[3:], 0, [])
    for lease in (first, second, third):
        assert w.release(lease.lease, engine="peer:p").valid
    assert w.core.stats().counters.given_blocks == 4, "each is given once"
    assert w.published == dict.fromkeys([BlockId(key, 0) for key in keys], TierKind.DRAM)
    assert w.tier().replica_bytes == 4 * PAGE, "it is the first to go"


def test_what_is_fetched_for_peers_goes_first_and_is_published_below_again() -> None:
    w = world(8)
    old, keys = chain("old", 4), chain("a", 4)
    sunk(w, keys)
    w.store(old)
    leased, (fetch,) = w.lend(keys)
    w.fetched(fetch, 4)
    w.end(fetch)
    w.release(leased.lease, engine="peer:p")
    w.store(chain("new", 2))
    assert w.match(old) == 4
    assert w.published[BlockId(keys[3], 0)] is NVME
    assert w.published[BlockId(keys[0], 0)] is TierKind.DRAM


def test_it_comes_a_few_at_a_time() -> None:
    w = world(8, max_lent_fraction=0.25)
    keys = chain("a", 6)
    sunk(w, keys)
    leases, got = [], 0
    while got < 6:
        leased, fetches = w.lend(keys[got:])
        assert len(leased.slots) + leased.coming == 6 - got, "all of it may come"
        assert all(len(fetch.slots) <= 2 for fetch in fetches)
        for fetch in fetches:
            w.fetched(fetch, 2)
            w.end(fetch)
        got += len(leased.slots)
        leases.append(leased.lease)
    assert w.match(keys) == 6
    for lease in leases[1:]:
        assert w.release(lease, engine="peer:p").valid


def test_a_peer_gets_its_share_and_no_more() -> None:
    w = world(8, max_given_fraction=0.5)
    keys = chain("a", 8)
    sunk(w, keys)
    leased, (fetch,) = w.lend(keys)
    assert (leased.coming, len(fetch.slots)) == (4, 4)
    w.fetched(fetch, 4)
    w.end(fetch)
    leased, fetches = w.lend(keys)
    assert (len(leased.slots), leased.coming, fetches) == (4, 0, [])
    again, fetches = w.lend(keys[4:])
    assert (again.lease, again.coming, fetches) == (0, 0, []), "its prefix counts for what is behind it, too"


def test_engines_have_the_rest_of_the_budget() -> None:
    w = world(8, max_lends=1, max_lends_per_peer=1, max_fetches=2)
    for name in "abc":
        sunk(w, chain(name, 2))
    first, (fetch,) = w.lend(chain("a", 2))
    second, fetches = w.lend(chain("b", 2), "q")
    assert (second.lease, second.coming, fetches) == (0, 2, []), "its turn comes"
    offer, (own,) = w.fetch(chain("c", 2))
    assert offer.blocks == 2
    assert not own.yields
    w.end(fetch)
    second, fetches = w.lend(chain("b", 2), "q")
    assert fetches
    w.end(fetches[0])
    w.end(own)
    assert w.release(first.lease, engine="peer:p").valid


def test_one_peer_does_not_take_all_turns() -> None:
    w = world(8, max_lends=4, max_lends_per_peer=1)
    for name in "ab":
        sunk(w, chain(name, 2))
    assert w.lend(chain("a", 2))[1]
    assert not w.lend(chain("b", 2))[1]
    assert w.lend(chain("b", 2), "q")[1]


def test_what_comes_before_is_fetched_too() -> None:
    """A peer that has the first blocks asks for the tail: nothing reaches that without what comes before."""
    w = world(8)
    keys = chain("a", 6)
    sunk(w, keys)
    leased, (fetch,) = w.lend(keys[4:])
    assert (names(fetch), leased.slots, leased.coming) == (keys, [], 2)
    w.fetched(fetch, 6)
    w.end(fetch)
    assert w.lend(keys[4:])[0].slots == fetch.slots[4:]


def test_it_continues_what_is_here() -> None:
    w = world(8)
    keys = chain("a", 6)
    sunk(w, keys)
    w.store(keys[:2])
    leased, (fetch,) = w.lend(keys)
    assert (len(leased.slots), leased.coming, names(fetch)) == (2, 4, keys[2:])


@pytest.mark.parametrize("event", [m.PullEnded, m.Overdue])
def test_what_does_not_come_is_a_miss(event: type) -> None:
    w = world(8)
    keys = chain("a", 4)
    sunk(w, keys)
    first, (fetch,) = w.lend(keys)
    w.fetched(fetch, 1)
    if event is m.PullEnded:
        w.do(m.PullEnded(fetch.pull, "corrupt", keys[1:]))
        assert w.in_nvme(keys) == 1
        assert w.published.keys() == {BlockId(keys[0], 0)}
    else:
        w.do(m.Overdue(fetch.pull))
        assert w.core.lower[0].source.failures == 0, "it may only have let engines go first"
        w.end(fetch)
    second, _ = w.lend(keys)
    assert len(second.slots) == 1
    assert (second.coming == 0) == (event is m.PullEnded)
    assert w.release(first.lease, engine="peer:p").valid
    assert w.release(second.lease, engine="peer:p").valid


def test_nothing_is_lent_of_a_tier_that_is_down_or_of_another_layout() -> None:
    w = world(8)
    w.register("f", make_layout(2))
    keys = chain("a", 4)
    sunk(w, keys)
    other = m.Acquire(w.call_id(), "p", keys, 0, w.fingerprint("f"), waits=True)
    assert w.do(other) == m.Leased(0, [], [], 30.0)
    w.do(m.TierDown(NVME))
    assert w.lend(keys) == (m.Leased(0, [], [], 30.0), [])
    w.do(m.TierUp(NVME))
    assert w.lend(keys)[0].coming == 4


def test_keys_that_are_no_chain() -> None:
    w = world(16, nvme=32)
    a, b = chain("a", 3), chain("b", 3)
    sunk(w, a)
    sunk(w, b)
    leased, (fetch,) = w.lend([a[0], b[1], a[1]])
    assert (leased.coming, names(fetch)) == (1, a[:1])
    w.fetched(fetch, 1)
    w.end(fetch)
    leased, fetches = w.lend([a[0], b[1]])
    assert (len(leased.slots), leased.coming, fetches) == (1, 0, [])


def test_two_peers_that_wait_for_each_other_do_not() -> None:
    w = world(8, max_pulled_fraction=1.0)
    keys = chain("a", 4)
    _, (pull,) = w.locate(keys, "pppp")
    leased, fetches = w.lend(keys)
    assert (leased, fetches) == (m.Leased(0, [], [], 30.0), []), "what a peer brings is nobody's to wait for"
    w.arrive(pull, 2)
    assert len(w.lend(keys)[0].slots) == 2


def test_a_repeat_gets_the_first_answer_and_fetches_nothing() -> None:
    w = world(8)
    keys = chain("a", 4)
    sunk(w, keys)
    event = m.Acquire(w.call_id(), "p", keys, 0, w.fingerprint("e"), waits=True)
    first = w.do(event)
    assert w.do(event) == first
    assert not w.told(m.Fetch)
    assert w.core.stats().leases == 1


def test_leases_that_are_too_many_fetch_nothing() -> None:
    w = world(8, max_leases_per_engine=1)
    keys = chain("a", 4)
    sunk(w, keys[:2])
    sunk(w, chain("b", 2))
    w.lend(keys[:2])
    with pytest.raises(Exception, match="leases"):
        w.lend(chain("b", 2))
    assert w.core.pulls.lending.running == 1
