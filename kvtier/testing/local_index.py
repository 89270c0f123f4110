"""An index in this process's memory: what `kvtier.interfaces.Index` promises and nothing else.

Several `LocalIndex` on one `LocalStore` are several nodes' views of one index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from kvtier.errors import Fenced, IndexFault
from kvtier.interfaces import Index
from kvtier.types import BlockId, Location, NodeRecord, TierKind

MAX_LOCATIONS: Final = 8


Places = dict[BlockId, dict[str, tuple[int, TierKind, float]]]


@dataclass(slots=True)
class LocalStore:
    """What is stored; times are `clock`'s.

    Attributes
    ----------
    owners
        Incarnation and instance that hold each node's identity; they stay.
    records
        What nodes said of themselves, and until when that counts.
    places
        Incarnation, tier and end of each node's location of a block, the one renewed last at the end.
    in_hbm
        The same of what engines have in their own memory.
    """

    clock: Callable[[], float] = time.monotonic
    owners: dict[str, tuple[int, str]] = field(default_factory=dict)
    records: dict[str, tuple[NodeRecord, float]] = field(default_factory=dict)
    places: Places = field(default_factory=dict)
    in_hbm: Places = field(default_factory=dict)

    def clear(self) -> None:
        """Lose everything, as a server that comes back empty."""
        self.owners.clear()
        self.records.clear()
        self.places.clear()
        self.in_hbm.clear()


class LocalIndex(Index):
    """See `Index`. `ttl_s` and `dead_after_s` are what this node's configuration says."""

    name: ClassVar[str] = "local"

    def __init__(self, store: LocalStore, *, ttl_s: float = 3600.0, dead_after_s: float = 15.0) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._dead_after_s = dead_after_s
        self._is_open = False

    @property
    def garbage(self) -> int:
        """Only indexes write here."""
        return 0

    async def open(self) -> None:
        """See `Index`."""
        self._is_open = True

    async def close(self) -> None:
        """See `Index`."""
        self._is_open = False

    def _now_s(self) -> float:
        if not self._is_open:
            raise IndexFault("the index is not open")
        return self._store.clock()

    # ---- nodes

    async def register(self, record: NodeRecord) -> int:
        """See `Index`."""
        now_s = self._now_s()
        known, _ = self._store.owners.get(record.node, (0, ""))
        incarnation = max(record.incarnation, known + 1)
        self._store.owners[record.node] = incarnation, record.instance
        self._remember(replace(record, incarnation=incarnation), now_s)
        return incarnation

    async def heartbeat(self, record: NodeRecord) -> bool:
        """See `Index`."""
        now_s = self._now_s()
        known, instance = self._store.owners.get(record.node, (0, ""))
        if known >= record.incarnation and instance != record.instance:
            raise Fenced(f"another daemon of node {record.node} is registered with incarnation {known}")
        is_known = instance == record.instance and self._is_alive(record.node, now_s)
        self._store.owners[record.node] = max(known, record.incarnation), record.instance
        self._remember(record, now_s)
        return is_known

    async def leave(self, record: NodeRecord) -> None:
        """See `Index`."""
        self._now_s()
        known, instance = self._store.owners.get(record.node, (0, ""))
        if known < record.incarnation or instance == record.instance:
            self._store.records.pop(record.node, None)

    async def nodes(self) -> list[NodeRecord]:
        """See `Index`."""
        now_s = self._now_s()
        alive = [record for node, (record, _) in self._store.records.items() if self._is_alive(node, now_s)]
        return sorted(alive, key=lambda record: record.node)

    def _remember(self, record: NodeRecord, now_s: float) -> None:
        self._store.records[record.node] = record, now_s + self._dead_after_s

    def _is_alive(self, node: str, now_s: float) -> bool:
        return node in self._store.records and self._store.records[node][1] > now_s

    # ---- locations

    async def publish(self, record: NodeRecord, blocks: Sequence[BlockId], tier: TierKind) -> None:
        """See `Index`."""
        now_s = self._now_s()
        stored = self._places(tier is TierKind.HBM)
        for block in blocks:
            places = _present(stored, block, now_s)
            incarnation, _, _ = places.get(record.node, (0, tier, 0.0))
            if incarnation > record.incarnation:
                continue
            places.pop(record.node, None)
            while len(places) >= MAX_LOCATIONS:
                del places[next(iter(places))]
            places[record.node] = record.incarnation, tier, now_s + self._ttl_s
            stored[block] = places

    async def withdraw(self, record: NodeRecord, blocks: Sequence[BlockId], *, in_hbm: bool = False) -> None:
        """See `Index`."""
        now_s = self._now_s()
        stored = self._places(in_hbm)
        for block in blocks:
            places = _present(stored, block, now_s)
            incarnation, _, _ = places.get(record.node, (0, TierKind.DRAM, 0.0))
            if incarnation <= record.incarnation:
                places.pop(record.node, None)
            if not places:
                stored.pop(block, None)

    async def find(self, blocks: Sequence[BlockId], *, in_hbm: bool = False) -> list[tuple[Location, ...]]:
        """See `Index`."""
        now_s = self._now_s()
        stored = self._places(in_hbm)
        alive = {record.node: record.incarnation for record in await self.nodes()}
        return [
            tuple(
                Location(node, incarnation, tier)
                for node, (incarnation, tier, _) in _present(stored, block, now_s).items()
                if alive.get(node) == incarnation
            )
            for block in blocks
        ]

    def _places(self, in_hbm: bool) -> Places:
        return self._store.in_hbm if in_hbm else self._store.places


def _present(stored: Places, block: BlockId, now_s: float) -> dict[str, tuple[int, TierKind, float]]:
    """The places of a block without those that are over; not stored where there are none."""
    places = stored.get(block, {})
    for node in [node for node, (_, _, end_s) in places.items() if end_s <= now_s]:
        del places[node]
    return places
