"""Blocks that come from peers: what is asked for, which slots it gets, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.core import messages as m
from kvtier.core.blocks import GHOST, PENDING, Block, Shape
from kvtier.core.choices import Segment, Tail
from kvtier.core.config import CoreConfig
from kvtier.core.engines import Engine
from kvtier.core.extents import Place, Pool, TierMap
from kvtier.core.holds import pays
from kvtier.core.leases import Leases
from kvtier.core.rates import Source, Sources
from kvtier.core.residency import Residency
from kvtier.core.stats import Counters
from kvtier.errors import InvalidRequest, UnknownId
from kvtier.types import CHECKSUM_SIZE_BYTES, BlockId, Key

_TIMES_EXPECTED: Final = 2.0
"""A pull is cut after so many times what it is expected to take."""


@dataclass(slots=True, eq=False)
class PullEntry:
    """A pull that runs: `blocks` are a chain, of which the first `arrived` are here.

    The slots of the others are its own until it has ended, whoever wants or no longer wants them.
    """

    id: int
    source: Source
    incarnation: int
    blocks: list[Block]
    block_bytes: int
    since_s: float
    alone: bool
    arrived: int = 0

    def left_s(self, now_s: float) -> float:
        """Expected time until all of it is here."""
        if self.arrived:
            return self.source.transfer_s(0, now_s)
        return self.source.seconds(0, now_s)


class Pulls:
    """All pulls that run, bounded in number and bytes."""

    def __init__(self, config: CoreConfig, residency: Residency, leases: Leases, counters: Counters) -> None:
        self._config = config
        self._residency = residency
        self._leases = leases
        self._counters = counters
        self.sources = Sources(config)
        self.running: dict[int, PullEntry] = {}
        self.filling_bytes = 0

    # ---- what to ask for

    def worth_finding(self, event: m.Lookup, first: int) -> bool:
        """Whether the key where all shards end might be pulled: there is room, and nobody is storing it."""
        if len(self.running) >= self._config.max_pulls or self._room_bytes(self._tier()) <= 0:
            return False
        key = event.keys[first]
        for shard in range(event.shard_count):
            block = self._residency.get(key, shard)
            if block is not None and block.state == PENDING and block.pull is None:
                return False
        return True

    def located(
        self, event: m.Located, engine: Engine, first_id: int, now_s: float
    ) -> tuple[m.Offered, list[m.Pull]]:
        """Begin to pull what is worth it, then offer anew; raises where nobody waits for that any more."""
        lookup = event.lookup
        if not 0 <= event.first <= len(lookup.keys) or len(event.places) != lookup.shard_count:
            raise InvalidRequest("places are not those of the lookup: send them for each shard, from `first`")
        if not self._leases.is_current(lookup, event.first):
            raise UnknownId("the request was released, loaded or asked anew while the index was asked")
        tail, short = self._plan(event, engine, now_s)
        pulls = [] if tail is None else self._begin(tail, lookup, engine, first_id, now_s)
        if short != "missing":  # room was made, perhaps, for blocks that were then left away
            self._tier().pool(engine.shape.slot_bytes).give_back()
        return self._leases.lookup(lookup, engine, now_s, event.first, short), pulls

    def _plan(self, event: m.Located, engine: Engine, now_s: float) -> tuple[Tail | None, str]:
        """The tail to pull (None: nothing), for which there are slots, and why it is not longer."""
        lookup = event.lookup
        runs, here, begin = self._leases.reach(lookup)
        if not event.first <= begin < len(lookup.keys) or not self._leases.has_room(lookup.request):
            return None, "missing"
        places = [shard[begin - event.first :] for shard in event.places]
        end = begin + min(map(len, places))
        missing = [self._missing(lookup.keys, i, begin, end, engine.shape) for i in range(lookup.shard_count)]
        tail = Tail(begin, begin + min(map(len, missing)), engine.shape.block_bytes, missing)
        tail.choose(places, self.sources, now_s)
        coming_s = self._leases.coming_s(runs, here, begin, now_s)
        found = tail.end
        self._bound(tail, lookup, engine, runs)
        bound = tail.end
        if self._cut_to_what_pays(tail, lookup, here, coming_s, now_s):
            paying = tail.end
            self._make_room(tail, lookup, engine.shape)
            if tail.end < paying:
                bound = tail.end
                self._cut_to_what_pays(tail, lookup, here, coming_s, now_s)
        short = "slow" if tail.end < bound else "limit" if tail.end < found else "missing"
        return tail if tail.segments else None, short

    def _missing(self, keys: Sequence[Key], shard: int, begin: int, end: int, shape: Shape) -> list[bool]:
        """For each key from `begin` on whether it is missing, until one can neither be used nor be pulled."""
        blocks = self._residency.shards.get(shard, {})
        above = blocks.get(keys[begin - 1]) if begin else None
        flags: list[bool] = []
        seen: set[Key] = set()
        for key in keys[begin:end]:
            block = blocks.get(key)
            if block is None or block.state == GHOST:
                kin = None if block is None else block.first_child
                if key in seen or (kin is not None and kin.shape.fingerprint != shape.fingerprint):
                    break
                seen.add(key)
                flags.append(True)
            else:
                stored = block.state == PENDING and block.pull is None
                if stored or block.shape.fingerprint != shape.fingerprint:
                    break
                if block.orphan if not flags and not begin else block.parent is not above or above is None:
                    break
                flags.append(False)
            above = block
        return flags

    def _bound(self, tail: Tail, lookup: m.Lookup, engine: Engine, runs: Sequence[Sequence[Block]]) -> None:
        """Cut the tail to what pulls, this engine's holds and the number of pulls allow."""
        slot_bytes = engine.shape.slot_bytes
        tier = self._tier()
        tail.fit(self._room_bytes(tier) // slot_bytes, tail.missing)
        ledger = engine.ledger
        left_bytes = int(tier.allocated_bytes * engine.share) - ledger.bytes
        left_bytes -= sum(ledger.cost(run[tail.begin - 1]) for run in runs if tail.begin)
        charged = [
            [
                is_missing or self._residency.shards[shard][key] not in ledger.counts
                for is_missing, key in zip(missing, lookup.keys[tail.begin : tail.end], strict=False)
            ]
            for shard, missing in enumerate(tail.missing)
        ]
        tail.fit(max(0, left_bytes) // slot_bytes, charged)
        while len(tail.segments) > self._config.max_pulls - len(self.running):
            tail.cut_last()

    def _cut_to_what_pays(
        self, tail: Tail, lookup: m.Lookup, here: int, coming_s: float, now_s: float
    ) -> bool:
        """Leave so much that all beyond what is here is loaded faster than computed; whether anything is."""
        load_s = tail.block_bytes * self._leases.load_s_per_byte[self._tier().spec.kind]
        while tail.segments:
            blocks = tail.end - here
            if pays(lookup, blocks, max(coming_s, tail.seconds(now_s)) + blocks * load_s):
                return True
            tail.cut_last()
        return False

    def _tier(self) -> TierMap:
        return next(iter(self._residency.tiers.values()))

    def _room_bytes(self, tier: TierMap) -> int:
        return int(tier.allocated_bytes * self._config.max_pulled_fraction) - self.filling_bytes

    # ---- begin

    def _begin(
        self, tail: Tail, lookup: m.Lookup, engine: Engine, first_id: int, now_s: float
    ) -> list[m.Pull]:
        pool = self._tier().pool(engine.shape.slot_bytes)
        entries: list[tuple[PullEntry, Segment]] = []
        for segment in tail.segments:
            entry = self._admit(segment, lookup, engine.shape, pool, first_id + len(entries), now_s)
            entries.append((entry, segment))
        return [
            m.Pull(
                pull=entry.id,
                node=segment.source.node,
                incarnation=segment.incarnation,
                shard=segment.shard,
                keys=[block.id.key for block in entry.blocks],
                slots=[block.slot() for block in entry.blocks],
                block_bytes=entry.block_bytes,
                fingerprint=engine.shape.fingerprint,
                timeout_s=max(self._config.pull_floor_s, _TIMES_EXPECTED * segment.source.seconds(0, now_s)),
            )
            for entry, segment in entries
        ]

    def _make_room(self, tail: Tail, lookup: m.Lookup, shape: Shape) -> None:
        """Free as many slots as the tail misses, without eating its own chain; cut it to what there is."""
        residency = self._residency
        tier = self._tier()
        pool = tier.pool(shape.slot_bytes)
        kept: list[Block] = []
        for shard in range(len(tail.missing)):
            for key in lookup.keys[max(0, tail.begin - 1) : tail.end]:
                block = residency.get(key, shard)
                if block is not None and block.state != GHOST:
                    residency.guard(block)
                    kept.append(block)
        wanted = sum(segment.end - segment.begin for segment in tail.segments)
        residency.make_room(tier, pool, wanted)
        for block in reversed(kept):
            residency.unguard(block)
        tail.fit(pool.free, tail.missing)

    def _admit(
        self, segment: Segment, lookup: m.Lookup, shape: Shape, pool: Pool, id: int, now_s: float
    ) -> PullEntry:
        keys = lookup.keys[segment.begin : segment.end]
        places: list[Place] = pool.allocate(len(keys))
        above = self._residency.get(lookup.keys[segment.begin - 1], segment.shard) if segment.begin else None
        source = segment.source
        entry = PullEntry(
            id, source, segment.incarnation, [], shape.block_bytes, now_s, alone=not source.running
        )
        for key, place in zip(keys, places, strict=True):
            above = self._residency.admit(BlockId(key, segment.shard), above, shape, place)
            above.pull = entry
            entry.blocks.append(above)
        self.running[id] = entry
        self.filling_bytes += len(keys) * shape.slot_bytes
        self.sources.use(source)
        source.started(len(keys) * shape.block_bytes)
        return entry

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
        residency = self._residency
        for block, checksum in zip(blocks, event.checksums, strict=True):
            residency.commit(block, checksum)
        residency.touch(blocks)
        for block in blocks:
            residency.unguard(block)
        self.filling_bytes -= count * blocks[0].shape.slot_bytes
        self._counters.pulled_blocks += count
        self._leases.arrived(blocks)

    def ended(self, event: m.PullEnded, now_s: float) -> None:
        """Nothing writes to its slots any more: what has not come gives its slots back."""
        entry = self.running.pop(event.pull)
        rest = entry.blocks[entry.arrived :]
        entry.source.ended(
            len(rest) * entry.block_bytes,
            entry.arrived,
            entry.incarnation,
            now_s,
            failed=bool(event.fault),
        )
        self._counters.failed_pulls += bool(event.fault)
        if not rest:
            return
        self.filling_bytes -= len(rest) * rest[0].shape.slot_bytes
        self._leases.never_arrive(rest)
        for block in reversed(rest):
            self._residency.unguard(block)
            self._residency.free(self._residency.lose(block))
