"""What is copied from the top tier into device memory: what engines that can read it there read most.

A demote the other way round: the same bounds, targets that belong to nobody else until it has ended,
ancestors before what continues them. What begins it is no watermark but a load. It waits until nobody reads,
for a bounded time: a load is always more urgent than the next one's speed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvtier.core import messages as m
from kvtier.core.blocks import GHOST, Block
from kvtier.core.config import CoreConfig
from kvtier.core.copies import Copies
from kvtier.core.demotes import DemoteEntry, Demotes
from kvtier.core.leases import Leases
from kvtier.core.residency import Residency

MAX_WAITING: Final = 4096
"""Prefixes that wait to be copied; beyond it the one that waits longest is forgotten, until the next read."""
MAX_TRIED: Final = 16
"""Of these so many are looked at for one event, since each costs a walk to its prompt's beginning."""


class Promotes(Demotes):
    """All of them that run, and what waits to be copied: the deepest block of each prefix."""

    def __init__(self, config: CoreConfig, top: Residency, copies: Copies, leases: Leases) -> None:
        super().__init__(config, top, copies)
        self.waiting: OrderedDict[Block, None] = OrderedDict()
        self._leases = leases
        self._since_s = 0.0

    # ---- what waits

    def read(self, run: Sequence[Block], now_s: float) -> None:
        """An engine that maps the device reads these; what was used often enough is copied soon."""
        least = self._config.promote_after_uses - 1  # to store it was the first use
        deepest = next((block for block in reversed(run) if block.uses >= least), None)
        if deepest is None:
            return
        copy = self._twin(deepest)
        if copy is not None and copy.state != GHOST and not copy.orphan:
            return
        if not self.waiting:
            self._since_s = now_s
        self.waiting[deepest] = None
        if len(self.waiting) > MAX_WAITING:
            self.waiting.popitem(last=False)

    def gone(self, block: Block) -> None:
        """The top tier loses this block."""
        self.waiting.pop(block, None)

    # ---- begin

    def start(self, first_id: int, now_s: float) -> list[m.Demote]:
        """As many as there may be now."""
        started: list[m.Demote] = []
        if not self._is_due(now_s):
            return started
        for _ in range(MAX_TRIED):
            if not self.waiting or len(self.running) >= self._config.max_demotes:
                break
            entry = self._begin(first_id + len(started), now_s)
            if entry is not None:
                self.running[entry.id] = entry
                started.append(self._order(entry))
        self._since_s = now_s
        return started

    def _is_due(self, now_s: float) -> bool:
        return bool(
            self.waiting
            and len(self.running) < self._config.max_demotes
            and now_s >= self._failed_until_s
            and (not self._leases.leases or now_s >= self._since_s + self._config.promote_wait_s)
        )

    def _begin(self, id: int, now_s: float) -> DemoteEntry | None:
        """The next batch of the prefix that waits longest; where there is no room for it, it is forgotten."""
        leaf, _ = self.waiting.popitem(last=False)
        sources = self._path(leaf, {})
        most = max(1, self._config.demote_batch_bytes // leaf.shape.slot_bytes)
        has_more = len(sources) > most
        del sources[most:]
        if not sources:
            return None
        pool = self.lower.map.pool(self.lower.shape(leaf.shape).slot_bytes)
        self._make_room(pool, sources)
        has_more = has_more and pool.free >= len(sources)
        del sources[pool.free :]
        if not sources:
            return None
        if has_more:
            self.waiting[leaf] = None
            self.waiting.move_to_end(leaf, last=False)
        return DemoteEntry(id, sources, self._admit(sources, pool))

    def _passes(self, block: Block) -> bool:
        """Whatever waits was used often enough; replicas, too, since this copy is here and not elsewhere."""
        return True

    def _order(self, entry: DemoteEntry) -> m.Demote:
        order = super()._order(entry)
        return m.Promote(order.demote, order.source, order.sources, order.tier, order.slots, order.records)
