"""What a node says of itself, on a real core."""

from __future__ import annotations

import pytest

from kvtier.core import messages as m
from kvtier.remote.holdings import Ids, holdings_of
from kvtier.types import BlockId, TierKind
from tests.core.world import PAGE, World, chain


def test_ids_are_made_when_they_are_asked_for() -> None:
    keys = {shard: [bytes([shard, i]) * 16 for i in range(size)] for shard, size in ((0, 3), (2, 0), (5, 4))}
    ids = Ids(keys)
    wanted = [BlockId(key, shard) for shard, its in keys.items() for key in its]
    assert len(ids) == 7
    assert list(ids) == wanted
    for begin in range(9):
        for end in range(9):
            assert ids[begin:end] == wanted[begin:end]
    with pytest.raises(IndexError):
        ids[7]
    assert len(Ids({})) == 0
    assert Ids({})[0:512] == []


def test_what_a_core_holds() -> None:
    world = World(slots=8)
    keys, pending = chain("here", 4), chain("pending", 2)
    world.store(keys)
    world.reserve(pending)
    holdings = holdings_of(world.core, max_pulls=4)
    assert holdings.capacity_bytes() == 8 * PAGE
    assert holdings.resident_bytes() == 4 * PAGE
    assert set(holdings.residents()) >= {BlockId(key, 0) for key in keys}
    assert {holdings.tier_of(BlockId(key, 0)) for key in keys} == {TierKind.DRAM}
    assert holdings.tier_of(BlockId(pending[0], 0)) is None
    assert holdings.tier_of(BlockId(keys[0], 1)) is None
    assert holdings.load() == 0
    world.evict(keys)
    assert holdings.tier_of(BlockId(keys[0], 0)) is None
    assert holdings.resident_bytes() == 0


def test_blocks_behind_a_lost_one_are_nowhere_until_it_is_back() -> None:
    world = World(slots=8)
    keys = chain("here", 3)
    world.store(keys)
    holdings = holdings_of(world.core, max_pulls=4)
    world.lookup(keys)
    world.release(world.load(keys).lease, corrupt=keys[:1])
    (verify,) = world.told(m.Verify)
    world.do(m.Verified(verify.verify, False))
    assert [holdings.tier_of(BlockId(key, 0)) for key in keys] == [None, None, None]
    world.store(keys)
    assert {holdings.tier_of(BlockId(key, 0)) for key in keys} == {TierKind.DRAM}
