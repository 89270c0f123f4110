"""What other nodes may lease: a party of its own each, with its own share and bounds."""

from __future__ import annotations

import pytest

from kvtier.core import messages as m
from kvtier.errors import InvalidRequest, LimitExceeded, UnknownId
from tests.core.world import PAGE, G, R, World, chain, checksum, make_layout


def test_a_peer_leases_what_is_here() -> None:
    w = World(max_given_fraction=1.0)
    keys = chain("a", 4)
    w.store(keys)
    leased = w.acquire([*keys, *chain("b", 1)])
    assert leased.checksums == [checksum(key) for key in keys]
    assert (len(leased.slots), leased.coming, leased.lease_ttl_s) == (4, 0, 30.0)
    assert w.acquire(chain("b", 1)).lease == 0
    assert w.acquire(keys[2:]).lease, "a pull asks for the tail alone"
    assert w.tier().leased_bytes == 4 * PAGE
    assert w.evict(keys) == m.Evicted(0, 4)
    assert w.release(leased.lease, engine="peer:p").valid
    counters = w.core.stats().counters
    assert (counters.given_blocks, counters.loaded_blocks) == (4, 0)
    assert [engine.engine for engine in w.core.stats().engines] == ["e"]


def test_a_peer_is_not_given_what_is_coming_or_of_another_layout() -> None:
    w = World(has_index=True, max_pulled_fraction=1.0, max_given_fraction=1.0)
    w.register("f", make_layout(2))
    keys = chain("a", 4)
    w.store(keys[:1])
    _, (pull,) = w.locate(keys, "qqq")
    assert len(w.acquire(keys).slots) == 1
    w.arrive(pull, 2)
    assert len(w.acquire(keys).slots) == 3
    assert w.acquire(keys, engine="f").lease == 0


def test_each_peer_has_its_share() -> None:
    w = World(8, max_given_fraction=0.5, max_leases_per_engine=2)
    keys = chain("a", 8)
    w.store(keys)
    assert len(w.acquire(keys).slots) == 4
    assert len(w.acquire(keys).slots) == 4, "the same blocks are charged once"
    with pytest.raises(LimitExceeded, match="leases"):
        w.acquire(keys)
    assert len(w.acquire(keys, "q").slots) == 4
    assert len(w.load(keys).slots) == 8


def test_peers_are_bounded_and_forgotten() -> None:
    w = World(max_peers=2, lease_ttl_s=10.0)
    keys = chain("a", 2)
    w.store(keys)
    lease = w.acquire(keys, "p").lease
    w.acquire(chain("b", 1), "q")
    with pytest.raises(LimitExceeded, match="max_peers"):
        w.acquire(keys, "r")
    w.tick(9)
    assert w.release(lease, engine="peer:p").valid
    w.tick(1)
    w.acquire(keys, "r")
    assert set(w.core.engines.peers) == {"peer:p", "peer:r"}
    w.tick(10)
    w.tick(10)
    assert not w.core.engines.peers
    assert w.tier().leased_bytes == 0


def test_leases_of_peers_run_out() -> None:
    w = World(4, lease_ttl_s=10.0, max_given_fraction=1.0)
    keys = chain("a", 4)
    w.store(keys)
    lease = w.acquire(keys).lease
    assert w.store(chain("b", 1)) == [R]
    w.tick(5)
    w.acquire(keys[:1])
    w.tick(5)
    assert w.store(chain("b", 1)) == [G]
    assert w.release(lease, engine="peer:p") == m.Released(False)
    with pytest.raises(UnknownId):
        w.release(lease, engine="peer:p")
    assert w.core.stats().counters.failed_loads == 0


def test_a_repeated_acquire_gets_its_first_answer() -> None:
    w = World()
    keys = chain("a", 2)
    w.store(keys)
    event = m.Acquire(w.call_id(), "p", keys, 0, w.fingerprint("e"))
    first = w.do(event)
    assert w.do(event) == first
    assert w.core.stats().leases == 1


def test_what_a_peer_may_not_do() -> None:
    w = World()
    keys = chain("a", 4)
    w.store(keys)
    w.lookup(keys)
    lease = w.acquire(keys).lease
    mine = w.load(keys, request="other").lease
    with pytest.raises(InvalidRequest, match="lease"):
        w.release_hold(engine="peer:p")
    for engine, id in (("peer:p", mine), ("peer:q", lease), ("e", lease)):
        with pytest.raises(UnknownId):
            w.release(id, engine=engine)
    for name in ("", "peer:p", "p" * 65, "P"):
        with pytest.raises(InvalidRequest, match="node id"):
            w.acquire(keys, name)
    with pytest.raises(InvalidRequest):
        w.register("peer:p", make_layout())
    with pytest.raises(UnknownId):
        w.load(keys, engine="peer:p")


def test_a_peer_can_only_doubt_what_it_read() -> None:
    w = World()
    keys, other = chain("a", 2), chain("b", 2)
    w.store(keys)
    w.store(other)
    lease = w.acquire(keys).lease
    w.release(lease, corrupt=[*other, *keys[1:]], engine="peer:p")
    assert [verify.block.key for verify in w.told(m.Verify)] == keys[1:]
    (verify,) = w.told(m.Verify)
    again = w.acquire(keys).lease
    w.do(m.Verified(verify.verify, intact=False))
    assert not w.release(again, engine="peer:p").valid
    assert w.match(keys) == 1
