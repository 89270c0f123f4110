"""Three tiers in a chain: memory, far memory, NVMe."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.core import messages as m
from kvtier.core.demotes import RETRY_S
from kvtier.types import BlockId, Key, TierKind
from tests.core.world import PAGE, G, World, chain, checksum

DRAM, FAR, NVME = TierKind.DRAM, TierKind.FAR, TierKind.NVME


def world(slots: int = 8, far: int = 8, nvme: int = 32, **options: Any) -> World:
    return World(
        slots,
        far=far,
        nvme=nvme,
        **{"demote_high_fraction": 0.5, "max_fetched_fraction": 1.0, "nvme_frees_at_once": True} | options,
    )


def where(w: World, key: Key) -> list[TierKind]:
    return [place.tier for place in w.core.places([key])]


def lies_in(w: World, keys: list[Key], kind: TierKind) -> list[Key]:
    return [key for key in keys if kind in where(w, key)]


def test_tiers_are_in_order_of_speed_whatever_their_numbers() -> None:
    assert sorted(TierKind, key=lambda kind: kind.rank) == [TierKind.HBM, DRAM, FAR, NVME]
    w = world()
    assert [tier.kind for tier in w.core.stats().tiers] == [DRAM, FAR, NVME]
    assert [(its.upper, its.lower) for its in w.core.demotes] == [
        (w.core.residency, w.core.lower[0]),
        (w.core.lower[0], w.core.lower[1]),
    ]


def test_each_tier_s_blocks_go_to_the_next_one_when_it_is_fuller_than_its_watermark() -> None:
    w = world()
    first, second = chain("a", 5), chain("b", 3)
    w.store(first)
    (demote,) = w.demotes
    assert (demote.source, demote.tier) == (DRAM, FAR)
    assert {slot.size_bytes for slot in demote.slots} == {PAGE}, "far memory needs no headers"
    assert {slot.arena for slot in demote.slots} == {8}
    w.demoted(demote)
    (demote,) = w.demotes
    assert (demote.source, demote.tier) == (FAR, NVME), "far memory is five eighths full"
    assert [slot.arena for slot in demote.sources] == [8] * 5
    assert [record.block.key for record in demote.records] == first, "ancestors first"
    w.demoted(demote)
    assert all(where(w, key) == [DRAM, FAR, NVME] for key in first), "copies stay until they are evicted"
    w.store(second)
    w.demote_all()
    assert lies_in(w, first + second, NVME) == first + second


def test_what_far_memory_evicts_is_below_and_comes_up_from_there() -> None:
    w = world(8, 8, 64)
    prompts = [chain(f"p{i}", 4) for i in range(10)]
    for keys in prompts:
        assert w.store(keys) == [G] * 4
        w.demote_all()
        for tier in w.core.stats().tiers:
            assert tier.resident_bytes + tier.reserved_bytes <= tier.capacity_bytes
    for keys in prompts:
        assert len(w.core.lower[1].run(keys, 0)) == 4
    from_far = from_nvme = 0
    for number, keys in enumerate(prompts):
        offer, fetches = w.fetch(keys, request=f"r{number}")
        assert offer.blocks == 4
        for fetch in fetches:
            from_far += fetch.tier is FAR
            from_nvme += fetch.tier is NVME
            w.fetched(fetch, len(fetch.records))
            w.end(fetch)
        w.release(w.load(keys, request=f"r{number}").lease)
        w.demote_all()
    assert from_nvme >= 6
    assert from_far + from_nvme >= 8


def test_the_faster_of_two_tiers_is_read() -> None:
    w = world(8, 16, 32, demote_high_fraction=0.25)
    keys = chain("a", 5)
    w.store(keys)
    w.demote_all()
    w.store(chain("b", 8))  # evicts all of it at the top
    w.demote_all()
    assert where(w, keys[0]) == [FAR, NVME]
    _, (fetch,) = w.fetch(keys)
    assert fetch.tier is FAR
    w.do(m.Overdue(fetch.pull))
    w.end(fetch, "late")
    w.release_hold()
    _, (fetch,) = w.fetch(keys)
    assert fetch.tier is NVME, "the one that failed is doubted"


def test_without_nvme_far_memory_is_the_last_tier() -> None:
    w = world(8, 8, 0)
    for number in range(6):
        w.store(chain(f"p{number}", 4))
        w.demote_all()
        assert w.core.stats().tiers[1].resident_bytes <= 8 * PAGE
    assert [tier.kind for tier in w.core.stats().tiers] == [DRAM, FAR]
    assert len(w.core.lower[0].run(chain("p5", 4), 0)) == 4


def test_while_nvme_is_down_far_memory_goes_on() -> None:
    w = world()
    w.do(m.TierDown(NVME))
    old, new = chain("old", 6), chain("new", 6)
    w.store(old)
    w.demote_all()
    w.store(new)
    w.demote_all()
    assert lies_in(w, old + new, NVME) == []
    assert lies_in(w, new, FAR) == new, "the younger ones have taken the place of the older ones"
    assert not lies_in(w, old, FAR) or lies_in(w, old, FAR) == old[: len(lies_in(w, old, FAR))]
    w.tick(RETRY_S)
    w.do(m.TierUp(NVME))
    w.demote_all()
    assert lies_in(w, new, NVME) == new


def test_what_a_demote_finds_wrong_in_far_memory_goes_and_may_come_again() -> None:
    w = world(8, 8, 32)
    keys = chain("a", 5)
    w.store(keys)
    w.demoted(w.demotes[0])
    (demote,) = w.demotes
    w.demoted(demote, [0, 1, 3, 4], corrupt=[2])
    assert lies_in(w, keys, FAR) == [keys[0], keys[1], keys[3], keys[4]]
    assert len(w.core.lower[0].run(keys, 0)) == 2
    assert w.core.stats().tiers[1].wrong_blocks == 1
    assert w.match(keys) == 5, "the top has it still"
    w.release(w.load(keys).lease)
    w.store(chain("b", 1))
    w.demote_all()
    assert len(w.core.lower[0].run(keys, 0)) == 5, "it was copied anew"


def test_what_a_fetch_finds_wrong_is_not_believed_of_a_demote_that_reads_the_same() -> None:
    w = world(8, 8, 32)
    keys = chain("a", 5)
    w.store(keys)
    w.demoted(w.demotes[0])
    (down,) = w.demotes
    assert down.source is FAR
    w.evict(keys)
    w.store(chain("b", 4))
    assert lies_in(w, keys, DRAM) == []
    _, (fetch,) = w.fetch(keys)
    assert fetch.tier is FAR
    w.fetched(fetch, 2)
    w.do(m.PullEnded(fetch.pull, "corrupt", [keys[2]]))
    assert FAR not in where(w, keys[2])
    w.demoted(down)
    assert lies_in(w, keys, NVME) == [keys[0], keys[1], keys[3], keys[4]], "whatever it has written there"
    assert len(w.core.lower[1].run(keys, 0)) == 2


def test_what_the_top_uses_is_young_in_every_tier() -> None:
    w = world(8, 16, 16, demote_high_fraction=0.25)
    used, other = chain("used", 4), chain("other", 4)
    w.store(used)
    w.store(other)
    w.demote_all()
    assert lies_in(w, used + other, NVME) == used + other
    w.release(w.load(used).lease)
    w.core.lower[0].evict_named(used)  # far memory has it no more, but the top and NVMe do
    w.core.check()
    new = [chain(f"n{i}", 4) for i in range(3)]
    for keys in new:
        w.load(used, request="again")
        w.store(keys)
        w.demote_all()
    assert lies_in(w, used, NVME) == used
    assert lies_in(w, other, NVME) != other


@pytest.mark.parametrize("nvme", [0, 32])
def test_evictions_by_hand_reach_every_tier(nvme: int) -> None:
    w = world(8, 8, nvme)
    keys = chain("a", 6)
    w.store(keys)
    w.demote_all()
    assert w.evict(keys) == m.Evicted(6 * (3 if nvme else 2), 0)
    assert all(not where(w, key) for key in keys)
    for tier in w.core.stats().tiers:
        assert tier.resident_bytes == tier.reserved_bytes == tier.draining_bytes == 0


def test_recovered_blocks_are_found_behind_far_memory() -> None:
    w = world(8, 8, 32, outlives=True)
    assert not w.demotes
    keys = chain("a", 3)
    source = World(8, nvme=32, demote_high_fraction=0.1, outlives=False)
    source.store(keys)
    (demote,) = source.demotes
    w.do(m.Recovered(NVME, list(zip(demote.slots, demote.records, strict=True)), is_last=True))
    _, (fetch,) = w.fetch(keys)
    assert fetch.tier is NVME
    assert w.fetched(fetch, 3) == []
    w.end(fetch)
    assert w.match(keys) == 3
    assert [record.checksum for record in fetch.records] == [checksum(key) for key in keys]
    assert w.core.tier_of(BlockId(keys[0], 0)) is DRAM
