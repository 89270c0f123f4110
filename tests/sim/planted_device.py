"""Bugs planted into what the core does with device memory: the simulator has to find each from outside.

They are run without `CacheCore.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvtier.core import messages as m
from kvtier.core.blocks import Block
from kvtier.core.cache import CacheCore
from kvtier.core.copies import Copies
from kvtier.core.leases import Lease, Leases

Plant = Callable[[pytest.MonkeyPatch], None]


def leases_do_not_guard_their_copies(patch: pytest.MonkeyPatch) -> None:
    lend, end = Copies.lend, Leases.end

    def wrong_lend(self: Copies, run: Sequence[Block]) -> list[Block | None]:
        copies = lend(self, run)
        for copy in copies:
            if copy is not None:
                self.unguard(copy)
        return copies

    def wrong_end(self: Leases, lease: Lease) -> None:
        lease.copies = []
        end(self, lease)

    patch.setattr(Copies, "lend", wrong_lend)
    patch.setattr(Leases, "end", wrong_end)


def targets_of_promotes_go_back_on_a_timer(patch: pytest.MonkeyPatch) -> None:
    tick, demoted = CacheCore._tick, CacheCore._demoted

    def wrong_tick(self: CacheCore, event: m.Tick, now_s: float) -> list[m.Action]:
        assert self.promotes is not None
        for id in list(self.promotes.running):
            self.promotes.ended(m.Demoted(id, [], (), ""), now_s)
        return tick(self, event, now_s)

    def wrong_demoted(self: CacheCore, event: m.Demoted, now_s: float) -> list[m.Action]:
        running = any(event.demote in demotes.running for demotes in self.copying)
        return demoted(self, event, now_s) if running else []

    patch.setattr(CacheCore, "_tick", wrong_tick)
    patch.setattr(CacheCore, "_demoted", wrong_demoted)


def leases_of_wrong_copies_stay_valid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "copies_lost", lambda self, copies: None)


PLANTS: tuple[Plant, ...] = (
    leases_do_not_guard_their_copies,
    targets_of_promotes_go_back_on_a_timer,
    leases_of_wrong_copies_stay_valid,
)
