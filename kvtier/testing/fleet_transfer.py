"""A simulated NIXL: bytes travel by themselves once a transfer has begun, and nothing can call them back.

Only destroying the agent ends what is under way, and with it everything else that the agent does.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Final

from kvtier.errors import TransferFault
from kvtier.interfaces import Remote, Transfer
from kvtier.testing.fleet_memory import Arena
from kvtier.testing.fleet_world import Process, World
from kvtier.testing.simulated_node import PageId, pages_of
from kvtier.types import Slot

DESTROY_S: Final = 0.02
_METADATA: Final = struct.Struct("<II")


@dataclass(slots=True)
class Fates:
    """Shares of transfers that go wrong, and the mean time of a page."""

    never: float = 0.0
    partly: float = 0.0
    wrong: float = 0.0
    slow: float = 0.0
    page_s: float = 0.0005


class Copy:
    """One transfer under way: pages read from the peer and written here, at times of their own."""

    def __init__(
        self, agent: SimulatedTransfer, source: Arena, moves: Sequence[tuple[PageId, PageId]]
    ) -> None:
        self.agent = agent
        self.process = agent.process
        self.source = source
        self.moves = list(moves)
        self.ended: asyncio.Future[str] = agent.world.loop.create_future()
        world, fates = agent.world, agent.fates
        self.page_s = fates.page_s * (world.rng.uniform(10, 2000) if world.chance(fates.slow) else 1.0)
        self.stops_at = world.rng.randrange(len(moves)) if world.chance(fates.never) else -1
        self.fails_at = world.rng.randrange(len(moves)) if world.chance(fates.partly) else -1
        self.is_wrong = world.chance(fates.wrong)
        if world.chance(0.3):
            world.rng.shuffle(self.moves)  # the order of pages is nobody's promise
        self._next()

    def _next(self) -> None:
        world = self.agent.world
        world.loop.call_later(world.rng.expovariate(1 / self.page_s), self._read, 0)

    def _read(self, at: int) -> None:
        world = self.agent.world
        if self.ended.done() or at == self.stops_at:
            return
        if at == self.fails_at:
            self.stop("the peer closed the connection")
            return
        origin, _ = self.moves[at]
        content = self.source.read_page(origin)
        if self.is_wrong and world.chance(0.5):
            world.count("wrong page")
            content = self.source.read_page((origin[0], world.rng.randrange(self.source.pages)))
        world.loop.call_later(world.rng.expovariate(1 / self.page_s), self._write, at, content)

    def _write(self, at: int, content: bytes) -> None:
        if self.ended.done():
            return
        self.agent.arena.write(self.moves[at][1], content, self)
        if at + 1 < len(self.moves):
            self._read(at + 1)
        else:
            self.stop("")

    def stop(self, fault: str) -> None:
        """Nothing is written any more."""
        if not self.ended.done():
            self.ended.set_result(fault)
            for _, target in self.moves:
                if self.agent.arena.running.get(target) is self:
                    del self.agent.arena.running[target]


class SimulatedTransfer(Transfer):
    """One daemon's agent, or the one that was begun after it was destroyed.

    Parameters
    ----------
    find
        The transfer of this name that serves an arena.
    """

    def __init__(
        self, process: Process, arena: Arena, fates: Fates, find: Callable[[int, str], SimulatedTransfer]
    ) -> None:
        self.process = process
        self.agent = 0
        self.world: World = process.world
        self.arena = arena
        self.fates = fates
        self._find = find
        self._copies: dict[Copy, None] = {}

    async def open(self, memory: memoryview) -> None:
        """Always works."""

    def metadata(self) -> bytes:
        """Which arena, and which agent."""
        return _METADATA.pack(self.arena.number, self.agent)

    async def pull(
        self,
        remote: Remote,
        sources: Sequence[int],
        sizes: Sequence[int],
        into: Sequence[int],
        timeout_s: float,
    ) -> None:
        """See `Transfer.pull`."""
        number, agent = _METADATA.unpack(remote.metadata)
        peer = self._find(number, self.name)
        source = peer.arena
        if agent != peer.agent or (peer.process.dead and self.world.chance(0.5)):
            raise TransferFault("the peer's agent is not known")
        moves = [
            move
            for begin, size, target in zip(sources, sizes, into, strict=True)
            for move in self._moves(source, begin, size, target)
        ]
        copy = Copy(self, source, moves)
        for size, target in zip(sizes, into, strict=True):
            self.arena.begin(Slot(self.arena.number, 0, target, size), copy)
        self._copies[copy] = None
        try:
            async with asyncio.timeout(timeout_s):
                fault = await asyncio.shield(copy.ended)
        except TimeoutError:
            await self._destroy_surely()
            raise TransferFault("the transfer did not end in time: its agent was destroyed") from None
        except asyncio.CancelledError:
            await self._destroy_surely()
            raise
        finally:
            self._copies.pop(copy, None)
        if fault:
            raise TransferFault(fault)

    def _moves(self, source: Arena, begin: int, size: int, target: int) -> list[tuple[PageId, PageId]]:
        origin = pages_of(Slot(source.number, 0, begin, size))
        return list(zip(origin, pages_of(Slot(self.arena.number, 0, target, size)), strict=True))

    async def _destroy_surely(self) -> None:
        self.world.count("agent destroyed")
        task = self.process.spawn(self.destroy())
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(task)

    async def destroy(self) -> None:
        """Takes a while in which bytes still arrive; then every copy of this agent has failed."""
        await asyncio.sleep(self.world.rng.expovariate(1 / DESTROY_S))
        self.stop_now()

    def stop_now(self) -> None:
        """The agent is gone: its process died, or it was destroyed. The next one is another."""
        self.agent += 1
        for copy in list(self._copies):
            copy.stop("the agent was destroyed")

    async def serve(self, seconds: float) -> None:
        """Needs nothing."""

    async def forget(self, node: str) -> None:
        """Nothing is kept of peers."""

    async def close(self) -> None:
        """The agent is gone."""
        self.stop_now()


class FirstTransfer(SimulatedTransfer):
    """What nodes prefer."""

    name: ClassVar[str] = "first"


class SecondTransfer(SimulatedTransfer):
    """What they fall back to."""

    name: ClassVar[str] = "second"
