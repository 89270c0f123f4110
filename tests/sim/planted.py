"""Bugs planted into the core, one at a time: the simulator has to find each of them from outside.

They are run without `CacheCore.check`, so that what finds them is what an engine would suffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtier.core import messages as m
from kvtier.core.cache import CacheCore
from kvtier.core.extents import Place
from kvtier.core.leases import Leases
from kvtier.core.replies import ReplyCache
from kvtier.core.reservations import Reservations
from kvtier.core.residency import Residency
from kvtier.errors import UnknownId

Plant = Callable[[pytest.MonkeyPatch], None]


def quarantine_ends_on_a_timer(patch: pytest.MonkeyPatch) -> None:
    expire = Reservations.expire

    def wrong(self: Reservations, now_s: float) -> None:
        expire(self, now_s)
        for entry in list(self.expired.values()):
            self._free(entry, list(entry.quarantined))
            self._forget_if_done(entry)

    patch.setattr(Reservations, "expire", wrong)


def leases_do_not_protect(patch: pytest.MonkeyPatch) -> None:
    load, end = Leases.load, Leases.end

    def wrong_load(self: Leases, event: m.Load, lease: int, *args: Any) -> m.Leased:
        reply = load(self, event, lease, *args)
        if reply.lease:
            self._residency.unguard(self.leases[lease].blocks[-1])
        return reply

    def wrong_end(self: Leases, lease: Any) -> None:
        self._residency.guard(lease.blocks[-1])
        end(self, lease)

    patch.setattr(Leases, "load", wrong_load)
    patch.setattr(Leases, "end", wrong_end)


def holds_do_not_protect(patch: pytest.MonkeyPatch) -> None:
    lookup = Leases.lookup

    def wrong(self: Leases, event: m.Lookup, *args: Any) -> m.Offered:
        reply = lookup(self, event, *args)
        hold = self.holds.get(event.request)
        if hold is not None:
            self._uncharge(hold)
            self._unhold(event.request, hold)
        return reply

    patch.setattr(Leases, "lookup", wrong)


def anybody_commits_what_is_pending(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Reservations, reservation: int, engine: Any, keys: list[bytes]) -> Any:
        for entry in self.live.values():
            if all(key in entry.pending for key in keys):
                return entry, [entry.pending[key] for key in keys]
        raise UnknownId("nobody stores this")

    patch.setattr(Reservations, "pending", wrong)


def releases_are_always_valid(patch: pytest.MonkeyPatch) -> None:
    release = Leases.release

    def wrong(self: Leases, *args: Any) -> m.Released:
        return replace(release(self, *args), valid=True)

    patch.setattr(Leases, "release", wrong)


def death_frees_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reservations, "engine_died", lambda self, engine: None)


def death_ends_no_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "engine_died", lambda self, engine: None)
    patch.setattr(Leases, "expire", lambda self, now_s: None)


def repeats_are_done_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplyCache, "get", lambda self, engine, call_id: None)


def ids_repeat_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    init = CacheCore.__init__

    def wrong(self: CacheCore, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "seed": 0})

    patch.setattr(CacheCore, "__init__", wrong)


def leases_survive_corruption(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "block_lost", lambda self, block: None)


def slots_are_reused_before_their_bytes_are_deleted(patch: pytest.MonkeyPatch) -> None:
    def wrong_free(self: Residency, place: Place) -> None:
        extent, index = place
        pool = extent.pool
        assert pool is not None
        if not pool.tier.spec.frees_at_once:
            self.drops.setdefault(pool.tier.spec.kind, []).append(pool.slot(extent, index))
        pool.release(extent, index)

    patch.setattr(Residency, "free", wrong_free)
    patch.setattr(Residency, "dropped", lambda self, kind, slots: None)


def aborts_leave_the_slot_reserved(patch: pytest.MonkeyPatch) -> None:
    free = Residency.free

    def wrong(self: Residency, place: Place) -> None:
        if place[1] != 1:
            free(self, place)

    patch.setattr(Residency, "free", wrong)


def a_block_is_visible_when_it_is_reserved(patch: pytest.MonkeyPatch) -> None:
    reserve = Reservations.reserve

    def wrong(
        self: Reservations, event: m.Reserve, reservation: int, engine: Any, now_s: float
    ) -> m.Reserved:
        reply = reserve(self, event, reservation, engine, now_s)
        if reply.reservation and len(reply.slots) == 1:
            self.commit(reservation, engine, event.keys, [key[:16] for key in event.keys])
        return reply

    patch.setattr(Reservations, "reserve", wrong)


PLANTS: list[Plant] = [
    quarantine_ends_on_a_timer,
    leases_do_not_protect,
    holds_do_not_protect,
    anybody_commits_what_is_pending,
    releases_are_always_valid,
    death_frees_nothing,
    death_ends_no_lease,
    repeats_are_done_again,
    ids_repeat_after_a_restart,
    leases_survive_corruption,
    slots_are_reused_before_their_bytes_are_deleted,
    aborts_leave_the_slot_reserved,
    a_block_is_visible_when_it_is_reserved,
]
