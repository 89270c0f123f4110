"""A simulated shared index: what `kvtier.interfaces.Index` promises, and every way in which it only hints.

Expiry is by its own clock. An operation that timed out may still be applied, or be applied late; all that
it knows can be lost. What a node says drops what was there of the node, whichever of its lives said it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from kvtier.errors import Fenced, IndexFault, KvtierError
from kvtier.interfaces import Index
from kvtier.testing.fleet_world import Process, World
from kvtier.types import BlockId, Location, NodeRecord, TierKind

SITE: Final = "index"
CALL_TIMEOUT_S: Final = 1.0
MAX_LOCATIONS: Final = 8


@dataclass(slots=True)
class Entry:
    """One location of a block, until `deadline_s`."""

    incarnation: int
    tier: TierKind
    deadline_s: float


class SharedIndex:
    """What the server holds."""

    def __init__(self, world: World, ttl_s: float, dead_after_s: float) -> None:
        self.world = world
        self.process = Process(world, SITE)
        self.is_down = False
        self._ttl_s = ttl_s
        self._dead_after_s = dead_after_s
        self.entries: dict[BlockId, dict[str, Entry]] = {}
        self.records: dict[str, tuple[NodeRecord, float]] = {}
        self.latest: dict[str, tuple[int, str]] = {}

    def lose_everything(self) -> None:
        """Flushed, or replaced by an empty one."""
        self.entries.clear()
        self.records.clear()
        self.latest.clear()

    def register(self, record: NodeRecord) -> int:
        """See `Index.register`."""
        known, _ = self.latest.get(record.node, (0, ""))
        incarnation = max(record.incarnation, known + 1)
        self.latest[record.node] = (incarnation, record.instance)
        self.records.pop(record.node, None)
        return incarnation

    def heartbeat(self, record: NodeRecord) -> bool:
        """See `Index.heartbeat`."""
        incarnation, instance = self.latest.get(record.node, (0, record.instance))
        is_younger = incarnation > record.incarnation
        if is_younger or (incarnation == record.incarnation and instance != record.instance):
            raise Fenced(f"incarnation {incarnation} of this node is registered")
        known = self._record(record.node)
        self.latest[record.node] = (record.incarnation, record.instance)
        self.records[record.node] = (record, self.world.now_s + self._dead_after_s)
        return known is not None and known.incarnation == record.incarnation

    def leave(self, record: NodeRecord) -> None:
        """See `Index.leave`."""
        known = self._record(record.node)
        if known is not None and known.incarnation == record.incarnation:
            del self.records[record.node]

    def nodes(self) -> list[NodeRecord]:
        """See `Index.nodes`."""
        return [record for record, deadline_s in self.records.values() if self.world.now_s < deadline_s]

    def publish(self, record: NodeRecord, blocks: Sequence[BlockId], tier: TierKind) -> None:
        """See `Index.publish`."""
        for block in blocks:
            places = self.live(block)
            places.pop(record.node, None)
            places[record.node] = Entry(record.incarnation, tier, self.world.now_s + self._ttl_s)
            while len(places) > MAX_LOCATIONS:
                del places[next(iter(places))]
            self.entries[block] = places

    def withdraw(self, record: NodeRecord, blocks: Sequence[BlockId]) -> None:
        """See `Index.withdraw`."""
        for block in blocks:
            entry = self.entries.get(block, {}).get(record.node)
            if entry is not None and entry.incarnation <= record.incarnation:
                del self.entries[block][record.node]

    def find(self, blocks: Sequence[BlockId]) -> list[tuple[Location, ...]]:
        """See `Index.find`."""
        return [
            tuple(Location(node, entry.incarnation, entry.tier) for node, entry in self.live(block).items())
            for block in blocks
        ]

    def live(self, block: BlockId) -> dict[str, Entry]:
        """What has not run out of one block's locations."""
        entries = self.entries.get(block, {})
        return {node: entry for node, entry in entries.items() if self.world.now_s < entry.deadline_s}

    def _record(self, node: str) -> NodeRecord | None:
        record, deadline_s = self.records.get(node, (None, 0.0))
        return record if self.world.now_s < deadline_s else None


class IndexClient(Index):
    """One daemon's connection to it."""

    name: ClassVar[str] = "simulated"

    def __init__(self, shared: SharedIndex, site: str) -> None:
        self._shared = shared
        self._site = site

    async def _ask(self, operation: Callable[[], Any]) -> Any:
        world = self._shared.world

        async def apply(_: Process) -> Any:
            return operation()

        def server() -> Process | None:
            return None if self._shared.is_down else self._shared.process

        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):  # one TCP connection repeats nothing
                return await world.call(self._site, SITE, server, apply, may_repeat=False)
        except Fenced:
            raise
        except (KvtierError, TimeoutError) as error:
            world.count("index fault")
            raise IndexFault(str(error) or "the index did not answer in time") from error

    async def open(self) -> None:
        """Connect; one that is down at first may come."""

    async def register(self, record: NodeRecord) -> int:
        """See `Index.register`."""
        return int(await self._ask(lambda: self._shared.register(record)))

    async def heartbeat(self, record: NodeRecord) -> bool:
        """See `Index.heartbeat`."""
        return bool(await self._ask(lambda: self._shared.heartbeat(record)))

    async def leave(self, record: NodeRecord) -> None:
        """See `Index.leave`."""
        await self._ask(lambda: self._shared.leave(record))

    async def nodes(self) -> list[NodeRecord]:
        """See `Index.nodes`."""
        return list(await self._ask(self._shared.nodes))

    async def publish(self, record: NodeRecord, blocks: Sequence[BlockId], tier: TierKind) -> None:
        """See `Index.publish`."""
        chosen = list(blocks)
        await self._ask(lambda: self._shared.publish(record, chosen, tier))

    async def withdraw(self, record: NodeRecord, blocks: Sequence[BlockId]) -> None:
        """See `Index.withdraw`."""
        chosen = list(blocks)
        await self._ask(lambda: self._shared.withdraw(record, chosen))

    async def find(self, blocks: Sequence[BlockId]) -> list[tuple[Location, ...]]:
        """See `Index.find`."""
        chosen = list(blocks)
        return list(await self._ask(lambda: self._shared.find(chosen)))

    async def close(self) -> None:
        """Nothing is kept."""
