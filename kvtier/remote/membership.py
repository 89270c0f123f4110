"""This node's life in the index, and which other nodes live.

Nothing here depends on clocks of different nodes agreeing: the index itself lets records run out, and how
long ago it listed a node is measured on this node's monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from kvtier import logs
from kvtier.config import Config
from kvtier.errors import Fenced, KvtierError
from kvtier.interfaces import Dated, Index
from kvtier.types import NodeRecord

LIST_EVERY_S: Final = 1.0
"""How often the nodes are listed, at most as long as a heartbeat: a dead one leaves so soon after its end."""
FIRST_RETRY_S: Final = 0.1
LEAVE_TIMEOUT_S: Final = 1.0
MAX_CLOCK_APART_S: Final = 30.0
"""Beyond it a wrong clock is told. Sharing does not depend on it, but certificates and logs do."""

T = TypeVar("T")

log = logs.get("membership")


@dataclass(frozen=True, slots=True)
class _Seen:
    record: NodeRecord
    at_s: float


class Membership:
    """Says that this node lives, and listens who else does. Used from the event loop.

    Parameters
    ----------
    record_now
        What to say of this node; its incarnation never changes.
    is_registered
        Whether `Index.register` has succeeded for this incarnation.
    on_change
        Told the other nodes that live whenever one comes, goes, or says something new of itself.
    on_fenced
        Told once that a younger daemon of this identity has taken over; nothing is said to the index
        from then on.
    on_lost
        The index does not know this node (any more): whatever was published has to be published again.
    on_back
        The index answers again.
    on_fault
        Told the operation (``heartbeat``, ``nodes``) that the index did not answer.

    Attributes
    ----------
    live
        The other nodes, by id. A node is in it at most `dead_after_s` longer than the index lists it, also
        where the index cannot be reached.
    is_up
        Whether the index answered last time.
    last_error
        Why not, otherwise empty.
    clock_ahead_s
        How far this node's wall clock is before the index's; None where that is not known.
    """

    def __init__(
        self,
        index: Index,
        record_now: Callable[[], NodeRecord],
        config: Config,
        *,
        is_registered: bool,
        on_change: Callable[[list[NodeRecord]], None],
        on_fenced: Callable[[Fenced], None],
        on_lost: Callable[[], None],
        on_back: Callable[[], None] = lambda: None,
        on_fault: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.live: dict[str, NodeRecord] = {}
        self.is_up = is_registered
        self.is_fenced = False
        self.last_error = ""
        self.clock_ahead_s: float | None = None
        self._is_clock_told = False
        self._index = index
        self._record_now = record_now
        self._config = config
        self._on_change = on_change
        self._on_fenced = on_fenced
        self._on_lost = on_lost
        self._on_back = on_back
        self._on_fault = on_fault
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._list_every_s = min(LIST_EVERY_S, config.heartbeat_s, config.dead_after_s / 3)
        self._is_known = is_registered
        self._hurries = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled, or fenced; the first heartbeat goes out at once."""
        heartbeat_at_s = 0.0
        retry_s = FIRST_RETRY_S
        while True:
            operation = "heartbeat"
            try:
                if self._clock() >= heartbeat_at_s:
                    await self._heartbeat()
                    heartbeat_at_s = self._clock() + self._config.heartbeat_s
                operation = "nodes"
                records = await self._within(self._index.nodes())
            except Fenced as error:
                self._give_up(error)
                return
            except (KvtierError, TimeoutError) as error:
                self._failed(operation, str(error) or "no answer in time")
                await self._pause(retry_s)
                retry_s = min(2 * retry_s, self._config.heartbeat_s)
                heartbeat_at_s = 0.0
            else:
                retry_s = FIRST_RETRY_S
                self._answered(records)
                until_heartbeat_s = max(0.0, heartbeat_at_s - self._clock())
                if await self._pause(min(self._list_every_s, until_heartbeat_s)):
                    heartbeat_at_s = 0.0

    def hurry(self) -> None:
        """What is to be said of this node has changed: say it now, not with the next heartbeat."""
        self._hurries.set()

    async def _pause(self, seconds: float) -> bool:
        """Whether it was cut short."""
        try:
            async with asyncio.timeout(seconds):
                await self._hurries.wait()
        except TimeoutError:
            return False
        self._hurries.clear()
        return True

    async def leave(self) -> None:
        """After `run`: say in the index that this node stops, if that takes at most `LEAVE_TIMEOUT_S`."""
        self.live = {}
        if self.is_fenced or not self._is_known:
            return
        self._is_known = False
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._index.leave(self._record_now())
        except (KvtierError, TimeoutError) as error:
            log.info("the index could not be told that this node stops", error=str(error) or "no answer")

    # ---- what the index says

    async def _heartbeat(self) -> None:
        known = await self._within(self._index.heartbeat(self._record_now()))
        if not (known and self._is_known):
            log.info("this node was new to the index: publishing all that it has")
            self._on_lost()
        self._is_known = True

    async def _within(self, call: Awaitable[T]) -> T:
        async with asyncio.timeout(self._config.heartbeat_s):
            return await call

    def _answered(self, records: list[NodeRecord]) -> None:
        if not self.is_up:
            log.info("the index answers")
            self._on_back()
        self.is_up = True
        self.last_error = ""
        now_s = self._clock()
        me = self._record_now().node
        self._seen = {record.node: _Seen(record, now_s) for record in records if record.node != me}
        self._compare_clocks()
        self._tell()

    def _compare_clocks(self) -> None:
        index_s = self._index.now_s() if isinstance(self._index, Dated) else None
        self.clock_ahead_s = None if index_s is None else time.time() - index_s
        is_apart = self.clock_ahead_s is not None and abs(self.clock_ahead_s) > MAX_CLOCK_APART_S
        if is_apart and not self._is_clock_told:
            log.warning(
                "this machine's clock is not that of the index: blocks are shared all the same, but "
                "certificates and times in logs are off; set the clocks by NTP",
                ahead_s=round(self.clock_ahead_s or 0.0),
            )
        self._is_clock_told = is_apart

    def _failed(self, operation: str, error: str) -> None:
        if self.is_up or not self.last_error:
            log.warning(
                "the index cannot be reached: this node serves what it holds and keeps trying", error=error
            )
        self.is_up = False
        self.last_error = error
        self._on_fault(operation)
        oldest_s = self._clock() - self._config.dead_after_s
        self._seen = {node: seen for node, seen in self._seen.items() if seen.at_s > oldest_s}
        self._tell()

    def _give_up(self, error: Fenced) -> None:
        self.is_fenced = True
        self.is_up = False
        self.last_error = str(error)
        self._seen = {}
        self._tell()
        self._on_fenced(error)

    def _tell(self) -> None:
        live = {node: seen.record for node, seen in self._seen.items()}
        if live != self.live:
            self._log_changes(live)
            self.live = live
            self._on_change(list(live.values()))

    def _log_changes(self, live: dict[str, NodeRecord]) -> None:
        for node, record in live.items():
            known = self.live.get(node)
            if known is None or known.incarnation != record.incarnation:
                log.info("a node is there", node=node, name=record.name, incarnation=record.incarnation)
        for node in self.live.keys() - live.keys():
            log.info("a node is gone", node=node, name=self.live[node].name)
