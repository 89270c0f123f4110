"""All that concerns other nodes, behind one object that the node asks: index, membership, publisher, pulls.

It decides nothing: which places count is a matter of fact (who lives, in which incarnation, who keeps
failing), what to do with them the core says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvtier import logs
from kvtier.config import Config
from kvtier.core import messages as m
from kvtier.errors import Fenced, KvtierError
from kvtier.interfaces import Index, Transfer
from kvtier.metrics import Metrics
from kvtier.remote.holdings import Holdings
from kvtier.remote.life import Life
from kvtier.remote.membership import Membership
from kvtier.remote.publisher import Publisher
from kvtier.types import PROTOCOL_VERSION, BlockId, Key, Location, NodeRecord, TierKind

if TYPE_CHECKING:
    from kvtier.remote.link import PeerLink, Peers
    from kvtier.remote.pulls import Puller

FIRST_FIND_KEYS: Final = 64
FIND_GROWTH: Final = 4
"""A lookup asks the index for few keys first, then for so many times as many: most tails are nowhere."""
GARBAGE_LOG_S: Final = 60.0
"""Garbage in the index is logged so often at most."""
UNANSWERED_LOG_S: Final = 60.0
"""Likewise lookups that it did not answer; each is in the metric `kvtier_index_faults`."""
LENT: Final = frozenset({TierKind.DRAM, TierKind.FAR, TierKind.NVME})
"""Peers read each other's arenas, and what is brought there for them. HBM is for operators and routing alone:
the index is not asked for it here, and what somebody wrote in its place does not count.
"""
MAX_FIND_BLOCKS: Final = 4096
"""Blocks in one question to the index, all shards together."""
MAX_DENIED_BLOCKS: Final = 1024
"""Of one call of a peer; and no call is listened to while so many changes wait for the index."""
FIRST_RETRY_S: Final = 0.25
MAX_RETRY_S: Final = 5.0
PRIVATE_INDEX: Final = "private: other nodes cannot see this one"
NO_INDEX: Final = "none: this node shares nothing"

Report = Callable[[m.Arrived | m.PullEnded], object]

log = logs.get("remote")


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node that lives, as this one sees it.

    Attributes
    ----------
    state
        ``up``, ``failing`` (calls to it fail: it is not asked for a while) or ``unreached`` (not tried yet).
    last_error
        Of the last call that failed; empty where the last one did not.
    transfer
        By which bytes came from it last; empty until some have.
    """

    record: NodeRecord
    is_self: bool
    state: str
    last_error: str = ""
    transfer: str = ""


class Remote:
    """Used from the event loop. Nothing here raises because of another node or of the index.

    Parameters
    ----------
    index
        Opened in the background by `start`, closed by `stop`.
    transfers
        Filled by `open_transfers`; `peers` and `puller` use the same list.
    unusable
        Transfers that are wanted and do not work here, and why; filled by `open_transfers` too.
    open_transfers
        Opens what works on this machine; None where bytes never travel.
    on_fenced
        See `Membership`.
    """

    def __init__(
        self,
        *,
        index: Index,
        peers: Peers,
        puller: Puller,
        transfers: list[Transfer],
        unusable: Mapping[str, str] | None = None,
        open_transfers: Callable[[], Coroutine[Any, Any, Sequence[Transfer]]] | None,
        holdings: Holdings,
        life: Life,
        config: Config,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.peers = peers
        self.transfers = transfers
        self.unusable: Mapping[str, str] = {} if unusable is None else unusable
        self.peer_address = ""
        self.fenced: asyncio.Future[Fenced] = asyncio.get_running_loop().create_future()
        self._puller = puller
        self._open_transfers = open_transfers
        self._holdings = holdings
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._announced = ""
        self._open_error = ""
        self._record = life.record
        self.membership = Membership(
            index,
            self.record,
            config,
            is_registered=life.is_registered,
            on_change=peers.update,
            on_fenced=self._fenced,
            on_lost=lambda: self._for_publishers(Publisher.republish),
            on_back=lambda: self._for_publishers(Publisher.doubt),
            on_fault=self._count_fault,
            clock=clock,
        )
        self.publisher = self._publisher(holdings.residents, holdings.tier_of)
        self._engine_publisher = self._publisher(
            holdings.engine_residents, holdings.engine_tier_of, in_hbm=True
        )
        self._is_open = life.is_registered
        self._is_stopped = False
        self._garbage = 0
        self._garbage_told_s = -GARBAGE_LOG_S
        self._unanswered = 0
        self._unanswered_told_s = -UNANSWERED_LOG_S

    def _publisher(
        self,
        residents: Callable[[], Sequence[BlockId]],
        tier_of: Callable[[BlockId], TierKind | None],
        *,
        in_hbm: bool = False,
    ) -> Publisher:
        return Publisher(
            self.index,
            self.record,
            self._config,
            residents=residents,
            tier_of=tier_of,
            on_fault=self._count_fault,
            on_done=lambda change, count: self._metrics.published.labels(change).inc(count),
            clock=self._clock,
            in_hbm=in_hbm,
        )

    def _for_publishers(self, what: Callable[[Publisher], None]) -> None:
        for publisher in (self.publisher, self._engine_publisher):
            what(publisher)

    @property
    def unpublished(self) -> int:
        """Changes that the index has not taken yet."""
        return self.publisher.unpublished + self._engine_publisher.unpublished

    def record(self) -> NodeRecord:
        """What this node says of itself now."""
        holdings = self._holdings
        return replace(
            self._record,
            address=self._announced,
            capacity_bytes=holdings.capacity_bytes(),
            resident_bytes=holdings.resident_bytes(),
            load=holdings.load(),
            down=holdings.down(),
        )

    # ---- life

    async def run(self, peer_address: str = "") -> None:
        """Look for others until cancelled, or fenced; an exception is a bug.

        Parameters
        ----------
        peer_address
            Where the peer service answers; others are told when transfers are open. Empty: nowhere.
        """
        self.peer_address = peer_address
        tasks = {asyncio.ensure_future(part) for part in (self._open(), self._share())}
        try:
            while tasks and not self.membership.is_fenced:
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await _end(tasks)

    async def _open(self) -> None:
        if self._open_transfers is not None:
            self.transfers[:] = await self._open_transfers()
        self._announced = self.peer_address
        self.membership.hurry()

    async def _share(self) -> None:
        await self._open_index()
        sharing = (self.publisher.run(), self._engine_publisher.run(), self.membership.run())
        tasks = [asyncio.ensure_future(part) for part in sharing]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await _end(tasks)

    async def stop(self) -> None:
        """Leave the index and close all; nothing is written to the arena afterwards. Idempotent.

        The caller has ended `run` and all pulls.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        await self.membership.leave()
        await self.peers.close()
        for transfer in self.transfers:
            await transfer.close()
        await self.index.close()

    async def _open_index(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._is_open:
            try:
                await self.index.open()
            except KvtierError as error:
                self._count_fault("open")
                if str(error) != self._open_error:
                    log.warning("the index cannot be opened: this node keeps trying", error=str(error))
                self._open_error = str(error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
            else:
                self._is_open = True
                self._open_error = ""

    def _fenced(self, error: Fenced) -> None:
        if not self.fenced.done():
            self.fenced.set_result(error)

    def _note_garbage(self) -> None:
        more = self.index.garbage - self._garbage
        if not more:
            return
        self._garbage += more
        self._metrics.index_garbage.inc(more)
        now_s = self._clock()
        if now_s >= self._garbage_told_s + GARBAGE_LOG_S:
            self._garbage_told_s = now_s
            log.warning(
                "the index holds what no node has written: it is left out; see who else writes there",
                values=self._garbage,
            )

    def _note_unanswered(self, error: str) -> None:
        self._count_fault("find")
        self._unanswered += 1
        now_s = self._clock()
        if now_s >= self._unanswered_told_s + UNANSWERED_LOG_S:
            log.warning(
                "the index did not answer lookups in time: what other nodes have was not offered",
                lookups=self._unanswered,
                error=error,
            )
            self._unanswered, self._unanswered_told_s = 0, now_s

    def _count_fault(self, operation: str) -> None:
        self._metrics.index_faults.labels(operation).inc()

    # ---- what the core says

    def publish(self, action: m.Publish) -> None:
        """Tell the index, when it can be told."""
        publisher = self._engine_publisher if action.tier is TierKind.HBM else self.publisher
        if action.added:
            publisher.add(action.tier, action.added)
        if action.removed:
            publisher.remove(action.removed)

    def tiers_changed(self) -> None:
        """A tier does not work any more, or works again: others are told whether what lies there counts."""
        self.membership.hurry()

    async def pull(self, action: m.Pull, report: Report) -> None:
        """Carry a pull out; ends with exactly one `PullEnded`, also when cancelled."""
        await self._puller.run(action, report)

    async def find(self, find: m.Find) -> m.Located | None:
        """Where the tail of a lookup lies, as far as it counts; None where nothing of it does.

        Costs nothing where no other node lives. Bounded by `index_timeout_s`.
        """
        if not self._usable():
            return None
        lookup = find.lookup
        keys = lookup.keys[find.first :]
        places: list[list[tuple[Location, ...]]] = [[] for _ in range(lookup.shard_count)]
        try:
            async with asyncio.timeout(self._config.index_timeout_s):
                await self._gallop(keys, places)
        except (KvtierError, TimeoutError) as error:
            self._note_unanswered(str(error) or f"no answer within {self._config.index_timeout_s:g} s")
            return None
        self._note_garbage()
        usable = self._usable()  # a node may have died, or begun anew, while the index was asked
        counting = [[self._counting(its, usable) for its in shard] for shard in places]
        if not any(any(shard) for shard in counting):
            return None
        return m.Located(lookup=lookup, first=find.first, places=counting)

    async def _gallop(self, keys: Sequence[Key], places: list[list[tuple[Location, ...]]]) -> None:
        """Ask for more and more of the keys, until one is nowhere: a prompt cannot be loaded beyond it."""
        shards = range(len(places))
        most = max(1, MAX_FIND_BLOCKS // len(shards))
        begin, step = 0, min(FIRST_FIND_KEYS, most)
        while begin < len(keys):
            part = keys[begin : begin + step]
            told = await self.index.find([BlockId(key, shard) for shard in shards for key in part])
            found = [_lent(its) for its in told]
            for shard in shards:
                places[shard] += found[shard * len(part) : (shard + 1) * len(part)]
            if not all(found):
                return
            begin += step
            step = min(FIND_GROWTH * step, most)

    def _usable(self) -> dict[str, NodeRecord]:
        """Nodes that may be asked for blocks."""
        if not self.transfers:
            return {}
        now_s = self._clock()
        usable: dict[str, NodeRecord] = {}
        for node, record in self.membership.live.items():
            if not record.address or record.protocol_version != PROTOCOL_VERSION:
                continue
            link = self.peers.get(node)
            if link is not None and not link.breaker.is_open(now_s):
                usable[node] = record
        return usable

    @staticmethod
    def _counting(places: Sequence[Location], usable: Mapping[str, NodeRecord]) -> tuple[Location, ...]:
        """Those of the present lives of these nodes, in tiers that work."""
        return tuple(
            place
            for place in places
            if (record := usable.get(place.node)) is not None
            and record.incarnation == place.incarnation
            and place.tier not in record.down
        )

    def deny(self, blocks: Sequence[BlockId]) -> None:
        """A peer asked for blocks that are not here: the index is told, in case it said they were."""
        if (
            self.publisher.unpublished < MAX_DENIED_BLOCKS
        ):  # whoever asks for nonsense must not fill the queue
            gone = [block for block in blocks[:MAX_DENIED_BLOCKS] if self._holdings.tier_of(block) is None]
            self.publisher.remove(gone)

    # ---- for operators

    @property
    def index_text(self) -> str:
        """Which index it is, for operators; without user and password."""
        if not self._config.index.strip():
            return PRIVATE_INDEX
        return str(getattr(self.index, "address", self.index.name))

    @property
    def notices(self) -> list[str]:
        """What an operator should know."""
        error = self._open_error or self.membership.last_error
        return [f"the index does not work, so other nodes are not seen: {error}"] if error else []

    @property
    def index_up(self) -> bool:
        """Whether the index answered last time."""
        return self.membership.is_up

    def nodes(self) -> list[NodeView]:
        """This node, then every other one that lives."""
        others = sorted(self.membership.live.values(), key=lambda record: (record.name, record.node))
        return [NodeView(self.record(), True, "up"), *(self._view(record) for record in others)]

    def peers_by_state(self) -> dict[str, int]:
        """How many other nodes are up, failing and unreached."""
        counts = {"up": 0, "failing": 0, "unreached": 0}
        for view in self.nodes()[1:]:
            counts[view.state] += 1
        return counts

    def _view(self, record: NodeRecord) -> NodeView:
        link = self.peers.get(record.node)
        if link is None:
            return NodeView(record, False, "unreached")
        return NodeView(record, False, _state(link, self._clock()), link.last_error, link.transfer)

    async def places(self, blocks: Sequence[BlockId]) -> list[tuple[Location, ...]]:
        """What the index says of these blocks, of nodes that live, this one left out; engines' memory last.

        Raises
        ------
        IndexFault
            It did not answer.
        """
        live = self.membership.live
        found: list[tuple[Location, ...]] = []
        for begin in range(0, len(blocks), MAX_FIND_BLOCKS):
            part = blocks[begin : begin + MAX_FIND_BLOCKS]
            in_hbm = await self.index.find(part, in_hbm=True)
            found += [its + hbm for its, hbm in zip(await self.index.find(part), in_hbm, strict=True)]
        return [self._counting(its, live) for its in found]


def _lent(places: Sequence[Location]) -> tuple[Location, ...]:
    return tuple(place for place in places if place.tier in LENT)


def _state(link: PeerLink, now_s: float) -> str:
    if link.breaker.is_open(now_s):
        return "failing"
    return "up" if link.is_reached else "unreached"


async def _end(tasks: Iterable[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
