"""Bugs planted into what the core does with a tier below: the simulator has to find each from outside.

They are run without `CacheCore.check`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtier.core import messages as m
from kvtier.core.blocks import Block
from kvtier.core.cache import CacheCore
from kvtier.core.demotes import Demotes
from kvtier.core.extents import Place, Pool, TierMap
from kvtier.core.lower import LowerTier
from kvtier.core.pulls import PullEntry, Pulls
from kvtier.types import Slot

Plant = Callable[[pytest.MonkeyPatch], None]


def slots_of_what_is_overdue_are_given_back_at_once(patch: pytest.MonkeyPatch) -> None:
    overdue = Pulls.overdue

    def wrong(self: Pulls, event: m.Overdue, now_s: float) -> None:
        overdue(self, event, now_s)
        entry = self.running[event.pull]
        for place in entry.late:
            self._residency.unquarantine(place)
        entry.late.clear()

    patch.setattr(Pulls, "overdue", wrong)


def slots_of_fetches_go_back_on_a_timer(patch: pytest.MonkeyPatch) -> None:
    tick, ended, arrived, overdue = CacheCore._tick, Pulls.ended, Pulls.arrived, Pulls.overdue

    def wrong_tick(self: CacheCore, event: m.Tick, now_s: float) -> list[m.Action]:
        for id, entry in list(self.pulls.running.items()):
            if now_s - entry.since_s > 0.05:
                self.pulls.ended(m.PullEnded(id, "late"), now_s)
        return tick(self, event, now_s)

    def known(its: Any) -> Any:
        return lambda self, event, now_s: its(self, event, now_s) if event.pull in self.running else None

    patch.setattr(CacheCore, "_tick", wrong_tick)
    for name, its in (("ended", ended), ("arrived", arrived), ("overdue", overdue)):
        patch.setattr(Pulls, name, known(its))


def targets_of_demotes_go_back_on_a_timer(patch: pytest.MonkeyPatch) -> None:
    tick, demoted = CacheCore._tick, CacheCore._demoted

    def wrong_tick(self: CacheCore, event: m.Tick, now_s: float) -> list[m.Action]:
        for demotes in self.demotes:
            for id in list(demotes.running):
                demotes.ended(m.Demoted(id, [], (), "late"), now_s)
        return tick(self, event, now_s)

    def wrong_demoted(self: CacheCore, event: m.Demoted, now_s: float) -> list[m.Action]:
        running = any(event.demote in demotes.running for demotes in self.demotes)
        return demoted(self, event, now_s) if running else []

    patch.setattr(CacheCore, "_tick", wrong_tick)
    patch.setattr(CacheCore, "_demoted", wrong_demoted)


def what_is_copied_down_may_be_evicted_meanwhile(patch: pytest.MonkeyPatch) -> None:
    admit, ended = Demotes._admit, Demotes.ended

    def wrong_admit(self: Demotes, sources: list[Block], pool: Pool) -> list[Block]:
        targets = admit(self, sources, pool)
        for source in sources:
            self.upper.unguard(source)
        return targets

    def wrong_ended(self: Demotes, event: m.Demoted, now_s: float) -> list[Block]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.upper, "unguard", lambda block: None)
            return ended(self, event, now_s)

    patch.setattr(Demotes, "_admit", wrong_admit)
    patch.setattr(Demotes, "ended", wrong_ended)


def what_is_fetched_may_be_evicted_meanwhile(patch: pytest.MonkeyPatch) -> None:
    read, leave = Pulls._read_below, Pulls._leave_below

    def wrong_read(self: Pulls, entry: PullEntry, tier: LowerTier) -> None:
        read(self, entry, tier)
        for block in entry.below:
            tier.unguard(block)

    def wrong_leave(entry: PullEntry, tier: LowerTier, event: m.PullEnded) -> list[Block]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(tier, "unguard", lambda block: None)
            leave(entry, tier, event)
        return []

    patch.setattr(Pulls, "_read_below", wrong_read)
    patch.setattr(Pulls, "_leave_below", staticmethod(wrong_leave))


def what_a_fetch_has_read_stays_guarded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pulls, "_leave_below", staticmethod(lambda entry, tier, event: []))


def what_was_found_to_be_wrong_stays(patch: pytest.MonkeyPatch) -> None:
    leave = Pulls._leave_below

    def wrong(entry: PullEntry, tier: LowerTier, event: m.PullEnded) -> list[Block]:
        return leave(entry, tier, replace(event, wrong=()))

    patch.setattr(Pulls, "_leave_below", staticmethod(wrong))


def what_was_not_written_counts_as_written(patch: pytest.MonkeyPatch) -> None:
    ended = Demotes.ended

    def wrong(self: Demotes, event: m.Demoted, now_s: float) -> list[Block]:
        every = range(len(self.running[event.demote].sources))
        return ended(self, replace(event, written=list(every), corrupt=()), now_s)

    patch.setattr(Demotes, "ended", wrong)


def targets_that_were_not_written_are_never_given_back(patch: pytest.MonkeyPatch) -> None:
    ended = Demotes.ended

    def wrong(self: Demotes, event: m.Demoted, now_s: float) -> list[Block]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(LowerTier, "free", lambda self, place: None)
            return ended(self, event, now_s)

    patch.setattr(Demotes, "ended", wrong)


def a_tier_that_is_down_is_used_all_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheCore, "_tier_down", lambda self, event, now_s: [])


def slots_below_are_reused_before_their_bytes_are_deleted(patch: pytest.MonkeyPatch) -> None:
    def wrong_free(self: LowerTier, place: Place) -> None:
        extent, index = place
        pool = extent.pool
        assert pool is not None
        if not self.map.spec.frees_at_once:
            self.drops.setdefault(self.kind, []).append(pool.slot(extent, index))
        pool.release(extent, index)

    patch.setattr(LowerTier, "free", wrong_free, raising=False)
    patch.setattr(LowerTier, "dropped", lambda self, kind, slots: None, raising=False)


def evictions_by_hand_spare_the_tier_below(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LowerTier, "evict_named", lambda self, keys: (0, 0), raising=False)


def a_block_is_here_as_soon_as_its_fetch_begins(patch: pytest.MonkeyPatch) -> None:
    begin = Pulls._begin

    def wrong(self: Pulls, *args: Any) -> list[Any]:
        begun = begin(self, *args)
        for order in begun:
            self.arrived(m.Arrived(order.pull, [order.records[0].checksum]), args[-1])
        return begun

    def arrived(self: Pulls, event: m.Arrived, now_s: float) -> None:
        entry = self.running[event.pull]
        left = len(entry.blocks) - entry.arrived
        its(self, replace(event, checksums=event.checksums[:left]), now_s)

    its = Pulls.arrived
    patch.setattr(Pulls, "_begin", wrong)
    patch.setattr(Pulls, "arrived", arrived)


def recovered_blocks_lie_in_slots_that_stay_free(patch: pytest.MonkeyPatch) -> None:
    claim = Pool.claim

    def wrong(self: Pool, number: int, index: int) -> Place | None:
        place = claim(self, number, index)
        if place is not None:
            place[0].free.append(index)
            self.free += 1
        return place

    patch.setattr(Pool, "claim", wrong)


def recovered_blocks_are_looked_for_in_the_next_free_slot(patch: pytest.MonkeyPatch) -> None:
    claim = TierMap.claim

    def wrong(self: TierMap, slot: Slot) -> Place | None:
        place = claim(self, slot)
        pool = self.pool(slot.size_bytes)
        if place is None or not pool.free:
            return place
        other = pool.allocate(1)[0]
        pool.release(*place)
        return other

    patch.setattr(TierMap, "claim", wrong)


PLANTS: list[Plant] = [
    slots_of_what_is_overdue_are_given_back_at_once,
    slots_of_fetches_go_back_on_a_timer,
    targets_of_demotes_go_back_on_a_timer,
    what_is_copied_down_may_be_evicted_meanwhile,
    what_is_fetched_may_be_evicted_meanwhile,
    what_a_fetch_has_read_stays_guarded,
    what_was_found_to_be_wrong_stays,
    what_was_not_written_counts_as_written,
    targets_that_were_not_written_are_never_given_back,
    a_tier_that_is_down_is_used_all_the_same,
    slots_below_are_reused_before_their_bytes_are_deleted,
    evictions_by_hand_spare_the_tier_below,
    a_block_is_here_as_soon_as_its_fetch_begins,
    recovered_blocks_lie_in_slots_that_stay_free,
    recovered_blocks_are_looked_for_in_the_next_free_slot,
]
