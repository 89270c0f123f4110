"""Blocks that come from peers and from the tiers below: which slots they get, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvtier.core import messages as m
from kvtier.core.blocks import RESIDENT, Block, Shape
from kvtier.core.choices import Tail
from kvtier.core.config import CoreConfig
from kvtier.core.engines import Engine
from kvtier.core.extents import Place
from kvtier.core.leases import Leases
from kvtier.core.lower import LowerTier
from kvtier.core.plans import Budget, Plans
from kvtier.core.rates import Source
from kvtier.core.residency import Residency
from kvtier.core.stats import Counters
from kvtier.errors import InvalidRequest, UnknownId
from kvtier.types import CHECKSUM_SIZE_BYTES, BlockId, BlockRecord, Key, TierKind

_TIMES_EXPECTED: Final = 2.0
"""A pull or fetch is cut after so many times what it is expected to take."""


@dataclass(slots=True, eq=False)
class PullEntry:
    """A pull that runs: `blocks` are a chain, of which the first `arrived` are here.

    The slots of the others are its own until it has ended, whoever wants or no longer wants them.

    Attributes
    ----------
    tier, below
        Of a fetch: where it reads, and the guarded blocks that it reads, one for each at its begin.
    late
        Slots of a fetch that is overdue: quarantined, while its blocks are lost.
    peer
        Of a fetch: the peer that it is for; empty where it is for an engine.
    """

    id: int
    source: Source
    incarnation: int
    blocks: list[Block]
    block_bytes: int
    slot_bytes: int
    since_s: float
    alone: bool
    tier: LowerTier | None = None
    peer: str = ""
    below: list[Block] = field(default_factory=list)
    late: list[Place] = field(default_factory=list)
    is_overdue: bool = False
    arrived: int = 0

    @property
    def makes_replicas(self) -> bool:
        """Whether what this brings goes first under pressure: another node has it, or it was for one."""
        return self.tier is None or bool(self.peer)

    @property
    def kind(self) -> TierKind | None:
        """The tier of this node that it comes from."""
        return None if self.tier is None else self.tier.kind

    def left_s(self) -> float:
        """Expected time until all of it is here."""
        if self.arrived:
            return self.source.transfer_s()
        return self.source.expected_s()


class Pulls(Plans):
    """All pulls and fetches that run, each kind bounded in number and bytes."""

    def __init__(
        self,
        config: CoreConfig,
        residency: Residency,
        lower: Sequence[LowerTier],
        leases: Leases,
        counters: Counters,
    ) -> None:
        super().__init__(config, residency, lower, leases)
        self._counters = counters
        self.running: dict[int, PullEntry] = {}

    def located(
        self, event: m.Located, engine: Engine, first_id: int, now_s: float
    ) -> tuple[m.Offered, list[m.Pull | m.Fetch]]:
        """Begin to pull what is worth it, then offer anew; raises where nobody waits for that any more."""
        lookup = event.lookup
        if not 0 <= event.first <= len(lookup.keys) or len(event.places) != lookup.shard_count:
            raise InvalidRequest("places are not those of the lookup: send them for each shard, from `first`")
        if not self._leases.is_current(lookup, event.first):
            raise UnknownId("the request was released, loaded or asked anew while the index was asked")
        tail, short = self._plan(lookup, event.first, event.places, self.pulling, engine, now_s)
        offer, pulls = self._start(tail, short, lookup, event.first, engine, first_id, now_s)
        if offer.reason == "missing" and lookup.block_compute_s and self.is_below(lookup, offer.blocks):
            offer = replace(offer, reason="slow")  # or it would have been fetched before anybody was asked
        return offer, pulls

    def promote(
        self, lookup: m.Lookup, first: int, engine: Engine, first_id: int, now_s: float
    ) -> tuple[m.Offered, list[m.Pull | m.Fetch]]:
        """Begin to fetch what is worth it of the tail from `first` on, which was just offered; offer anew."""
        if self.fetching.running >= self.fetching.most or self.fetching.room_bytes(self._tier()) <= 0:
            return self._start(None, "limit", lookup, first, engine, first_id, now_s)
        places = self._below(lookup, first)
        tail, short = self._plan(lookup, first, places, self.fetching, engine, now_s)
        return self._start(tail, short, lookup, first, engine, first_id, now_s)

    def _start(
        self,
        tail: Tail | None,
        short: str,
        lookup: m.Lookup,
        first: int,
        engine: Engine,
        first_id: int,
        now_s: float,
    ) -> tuple[m.Offered, list[m.Pull | m.Fetch]]:
        pulls = [] if tail is None else self._begin(tail, lookup, engine, first_id, now_s)
        if short != "missing":  # room was made, perhaps, for blocks that were then left away
            self._tier().pool(engine.shape.slot_bytes).give_back()
        return self._leases.lookup(lookup, engine, now_s, first, short), pulls

    # ---- begin

    def _begin(
        self, tail: Tail, lookup: m.Lookup, engine: Engine, first_id: int, now_s: float
    ) -> list[m.Pull | m.Fetch]:
        entries: list[PullEntry] = []
        for segment in tail.segments:
            begin, shard, source = segment.begin, segment.shard, segment.source
            tier = next((tier for tier in self._lower if tier.source is source), None)
            entry = PullEntry(
                first_id + len(entries),
                source,
                segment.incarnation,
                [],
                engine.shape.block_bytes,
                engine.shape.slot_bytes,
                now_s,
                alone=not source.running,
                tier=tier,
            )
            above = self._residency.get(lookup.keys[begin - 1], shard) if begin else None
            self._admit(entry, lookup.keys[begin : segment.end], shard, above, engine.shape)
            entries.append(entry)
        # Only now: what one source has to bring for all of them is part of the time of each.
        return [self._order(entry) for entry in entries]

    def lend(
        self,
        below: Sequence[Block],
        above: Block | None,
        tier: LowerTier,
        shape: Shape,
        peer: str,
        id: int,
        now_s: float,
    ) -> m.Fetch:
        """Begin to fetch a chain of blocks of a tier below, which continues `above`, for a peer."""
        entry = PullEntry(
            id,
            tier.source,
            0,
            [],
            shape.block_bytes,
            shape.slot_bytes,
            now_s,
            alone=False,  # it yields, so how long its first bytes take says nothing of the tier
            tier=tier,
            peer=peer,
        )
        self._admit(entry, [block.id.key for block in below], below[0].id.shard, above, shape)
        fetch = self._order(entry)
        assert isinstance(fetch, m.Fetch)
        return fetch

    def lent_to(self, peer: str) -> int:
        """Fetches that run for this peer."""
        return sum(entry.peer == peer for entry in self.running.values())

    def _order(self, entry: PullEntry) -> m.Pull | m.Fetch:
        timeout_s = max(self._config.pull_floor_s, _TIMES_EXPECTED * entry.source.expected_s())
        slots = [block.slot() for block in entry.blocks]
        shape = entry.blocks[0].shape
        if entry.tier is not None:
            records = [
                BlockRecord(
                    below.id,
                    None if block.parent is None else block.parent.id.key,
                    shape.fingerprint,
                    shape.block_bytes,
                    below.checksum,
                )
                for block, below in zip(entry.blocks, entry.below, strict=True)
            ]
            sources = [below.slot() for below in entry.below]
            return m.Fetch(
                entry.id, entry.tier.kind, sources, records, slots, timeout_s, yields=bool(entry.peer)
            )
        return m.Pull(
            pull=entry.id,
            node=entry.source.node,
            incarnation=entry.incarnation,
            shard=entry.blocks[0].id.shard,
            keys=[block.id.key for block in entry.blocks],
            slots=slots,
            block_bytes=entry.block_bytes,
            fingerprint=shape.fingerprint,
            timeout_s=timeout_s,
        )

    def _admit(
        self, entry: PullEntry, keys: Sequence[Key], shard: int, above: Block | None, shape: Shape
    ) -> None:
        places: list[Place] = self._tier().pool(shape.slot_bytes).allocate(len(keys))
        for key, place in zip(keys, places, strict=True):
            above = self._residency.admit(BlockId(key, shard), above, shape, place)
            above.pull = entry
            entry.blocks.append(above)
        self.running[entry.id] = entry
        for budget in self._budgets(entry):
            budget.running += 1
            budget.filling_bytes += len(keys) * shape.slot_bytes
        if entry.tier is None:
            self.sources.use(entry.source)
        else:
            self._read_below(entry, entry.tier)
        entry.source.started(len(keys) * shape.block_bytes)

    def _read_below(self, entry: PullEntry, tier: LowerTier) -> None:
        """What a fetch reads stays there, each block by itself: any of them may turn out to be wrong."""
        accessed = self._residency.accesses + 1
        for block in entry.blocks:
            below = tier.get(block.id.key, block.id.shard)
            assert below is not None
            tier.guard(below)
            tier.renew(below, accessed)
            entry.below.append(below)
        tier.use(entry.below)

    def _budgets(self, entry: PullEntry) -> tuple[Budget, ...]:
        if entry.tier is None:
            return (self.pulling,)
        return (self.fetching, self.lending) if entry.peer else (self.fetching,)

    # ---- what comes of it

    def arrived(self, event: m.Arrived, now_s: float) -> None:
        """The next blocks are here: they can be read, and are told to the leases that wait for them."""
        entry = self.running[event.pull]
        count = len(event.checksums)
        blocks = entry.blocks[entry.arrived : entry.arrived + count]
        assert len(blocks) == count, "a pull brought more than it was to bring"
        assert all(len(checksum) == CHECKSUM_SIZE_BYTES for checksum in event.checksums)
        if not blocks:
            return
        size_bytes = count * entry.block_bytes
        if entry.arrived:
            entry.source.arrived(size_bytes, now_s)
        else:
            entry.source.first_arrived(size_bytes, now_s - entry.since_s, now_s, alone=entry.alone)
        entry.arrived += count
        assert not entry.is_overdue, "nothing arrives of what is overdue"
        residency = self._residency
        for block, checksum in zip(blocks, event.checksums, strict=True):
            residency.commit(block, checksum)
        for block, below in zip(blocks, entry.below[entry.arrived - count : entry.arrived], strict=False):
            if below.state == RESIDENT:  # else another fetch has found it wrong, and this one right
                assert block.checksum == below.checksum, "other bytes arrived than were asked for"
                block.uses = below.uses
                block.continued = below.continued
        residency.touch(blocks)
        for block in blocks:
            residency.unguard(block)
        for budget in self._budgets(entry):
            budget.filling_bytes -= count * entry.slot_bytes
        if entry.tier is None:
            self._counters.pulled_blocks += count
        else:
            entry.tier.counts.fetched_blocks += count
        self._leases.arrived(blocks)

    def overdue(self, event: m.Overdue, now_s: float) -> None:
        """A fetch that takes too long: nobody waits for it any more.

        1. A disk does not answer; the engine computes what it was offered, and stores it.
        2. The slot that the read was to fill goes to another block.
        3. The disk answers after all, into a slot that holds somebody else's bytes.

        So step 2 must not happen: the keys are free for others from now on, the slots are not.
        """
        entry = self.running[event.pull]
        assert entry.tier is not None, "only fetches are left running"
        assert not entry.is_overdue, "a fetch is overdue once"
        entry.is_overdue = True
        if not entry.peer:  # else it may only have let engines go first
            entry.source.fail(now_s)
        rest = entry.blocks[entry.arrived :]
        del entry.blocks[entry.arrived :]
        if rest:
            self._leases.never_arrive(rest)
        for block in reversed(rest):
            self._residency.unguard(block)
            place = self._residency.lose(block)
            self._residency.quarantine(place)
            entry.late.append(place)

    def ended(self, event: m.PullEnded, now_s: float) -> list[Block]:
        """Nothing writes to its slots any more: what has not come gives its slots back.

        Returns what a tier below has lost, since the fetch has found it wrong there.
        """
        entry = self.running.pop(event.pull)
        rest = entry.blocks[entry.arrived :]
        missing = len(rest) + len(entry.late)
        entry.source.ended(
            missing * entry.block_bytes,
            entry.arrived,
            entry.incarnation,
            now_s,
            failed=bool(event.fault),
            told=entry.is_overdue,
        )
        for budget in self._budgets(entry):
            budget.running -= 1
            budget.filling_bytes -= missing * entry.slot_bytes
        lost: list[Block] = []
        if entry.tier is None:
            self._counters.failed_pulls += bool(event.fault)
        else:
            entry.tier.counts.failed_fetches += bool(event.fault) or entry.is_overdue
            lost = self._leave_below(entry, entry.tier, event)
        if rest:
            self._leases.never_arrive(rest)
        for block in reversed(rest):
            self._residency.unguard(block)
            self._residency.free(self._residency.lose(block))
        for place in entry.late:
            self._residency.unquarantine(place)
        return lost

    @staticmethod
    def _leave_below(entry: PullEntry, tier: LowerTier, event: m.PullEnded) -> list[Block]:
        """Nothing reads its source slots any more; what was found to be wrong there goes."""
        wrong = set(event.wrong)
        lost: list[Block] = []
        for below in reversed(entry.below):
            tier.unguard(below)
            if below.id.key in wrong:
                lost += tier.lose_wrong([below])
        return lost
