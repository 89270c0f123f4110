"""The shared index of a simulated fleet: `LocalIndex` behind the simulated network, which only hints.

Expiry is by the index' own clock. An operation that timed out may still be applied, or be applied late; the
server can be down, and all that it knows can be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Final, TypeVar

from kvtier.errors import Fenced, IndexFault, KvtierError
from kvtier.interfaces import Index
from kvtier.testing.fleet_world import Process, World
from kvtier.testing.local_index import LocalIndex, LocalStore
from kvtier.types import BlockId, Location, NodeRecord, TierKind

SITE: Final = "index"
CALL_TIMEOUT_S: Final = 1.0

T = TypeVar("T")


class SharedIndex:
    """The server."""

    def __init__(self, world: World, ttl_s: float, dead_after_s: float) -> None:
        self.world = world
        self.process = Process(world, SITE)
        self.is_down = False
        self.store = LocalStore(clock=lambda: world.now_s)
        self.local = LocalIndex(self.store, ttl_s=ttl_s, dead_after_s=dead_after_s)

    def lose_everything(self) -> None:
        """Flushed, or replaced by an empty one."""
        self.store.clear()

    def places(self) -> dict[tuple[BlockId, str], tuple[int, TierKind]]:
        """Incarnation and tier of each location that has not run out, whoever lives."""
        return {
            (block, node): (incarnation, tier)
            for block, places in self.store.places.items()
            for node, (incarnation, tier, end_s) in places.items()
            if self.world.now_s < end_s
        }


class IndexClient(Index):
    """One daemon's connection to it."""

    name: ClassVar[str] = "simulated"

    def __init__(self, shared: SharedIndex, site: str) -> None:
        self._shared = shared
        self._local = shared.local
        self._site = site

    @property
    def garbage(self) -> int:
        """See `Index`."""
        return self._local.garbage

    async def _ask(self, operation: Callable[[], Awaitable[T]]) -> T:
        world = self._shared.world

        async def apply(_: Process) -> T:
            return await operation()

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
        """See `Index.open`."""
        await self._local.open()

    async def register(self, record: NodeRecord) -> int:
        """See `Index.register`."""
        return await self._ask(lambda: self._local.register(record))

    async def heartbeat(self, record: NodeRecord) -> bool:
        """See `Index.heartbeat`."""
        return await self._ask(lambda: self._local.heartbeat(record))

    async def leave(self, record: NodeRecord) -> None:
        """See `Index.leave`."""
        await self._ask(lambda: self._local.leave(record))

    async def nodes(self) -> list[NodeRecord]:
        """See `Index.nodes`."""
        return await self._ask(self._local.nodes)

    async def publish(self, record: NodeRecord, blocks: Sequence[BlockId], tier: TierKind) -> None:
        """See `Index.publish`."""
        chosen = list(blocks)
        await self._ask(lambda: self._local.publish(record, chosen, tier))

    async def withdraw(self, record: NodeRecord, blocks: Sequence[BlockId], *, in_hbm: bool = False) -> None:
        """See `Index.withdraw`."""
        chosen = list(blocks)
        await self._ask(lambda: self._local.withdraw(record, chosen, in_hbm=in_hbm))

    async def find(self, blocks: Sequence[BlockId], *, in_hbm: bool = False) -> list[tuple[Location, ...]]:
        """See `Index.find`."""
        chosen = list(blocks)
        return await self._ask(lambda: self._local.find(chosen, in_hbm=in_hbm))

    async def close(self) -> None:
        """See `Index.close`: the others' view stays open."""
