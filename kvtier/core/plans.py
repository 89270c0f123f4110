"""Which tail of a lookup is worth bringing here, from peers or from the tiers below, and room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core import messages as m
from kvtier.core.blocks import GHOST, PENDING, RESIDENT, Block, Shape
from kvtier.core.choices import Tail
from kvtier.core.config import CoreConfig
from kvtier.core.engines import Engine
from kvtier.core.extents import TierMap
from kvtier.core.holds import pays
from kvtier.core.leases import Leases
from kvtier.core.lower import LowerTier
from kvtier.core.rates import Sources
from kvtier.core.residency import Residency
from kvtier.types import Key, Location

Places = Sequence[Sequence[Sequence[Location]]]
"""For each shard and key where the block lies."""


@dataclass(slots=True)
class Budget:
    """What runs of one kind: `running` at most `most`, `filling_bytes` at most `share` of the tier."""

    most: int
    share: float
    running: int = 0
    filling_bytes: int = 0

    def room_bytes(self, tier: TierMap) -> int:
        """What more may be filled."""
        return int(tier.allocated_bytes * self.share) - self.filling_bytes


class Plans:
    """What to ask for; decides by what runs, and by what was measured of each source.

    Attributes
    ----------
    pulling, fetching, lending
        Pulls from peers, fetches from the tiers below, and those among them that are for peers.
    """

    def __init__(
        self, config: CoreConfig, residency: Residency, lower: Sequence[LowerTier], leases: Leases
    ) -> None:
        self._config = config
        self._residency = residency
        self._lower = lower
        self._leases = leases
        self.sources = Sources(config, [tier.source for tier in lower])
        self.pulling = Budget(config.max_pulls, config.max_pulled_fraction)
        self.fetching = Budget(config.max_fetches * max(1, len(lower)), config.max_fetched_fraction)
        self.lending = Budget(config.max_lends, config.max_lent_fraction)

    def worth_finding(self, event: m.Lookup, first: int) -> bool:
        """Whether the key where all shards end might be pulled: there is room, and nobody is storing it."""
        if self.pulling.running >= self.pulling.most or self.pulling.room_bytes(self._tier()) <= 0:
            return False
        key = event.keys[first]
        for shard in range(event.shard_count):
            block = self._residency.get(key, shard)
            if block is not None and block.state == PENDING and block.pull is None:
                return False
        return True

    def is_below(self, event: m.Lookup, first: int) -> bool:
        """Whether a tier below has what some shard misses of the key, and no shard misses it altogether."""
        key = event.keys[first]
        found = False
        for shard in range(event.shard_count):
            block = self._residency.get(key, shard)
            if block is not None and block.state != GHOST:
                continue
            if not self._holders(key, shard, event.fingerprint):
                return False
            found = True
        return found

    def _below(self, event: m.Lookup, first: int) -> Places:
        """Where the tiers below have the tail, as an index would say it, up to what is nowhere here."""
        places: list[list[list[Location]]] = []
        for shard in range(event.shard_count):
            blocks = self._residency.shards.get(shard, {})
            here: list[list[Location]] = []
            for key in event.keys[first:]:
                holders = self._holders(key, shard, event.fingerprint)
                block = blocks.get(key)
                if not holders and (block is None or block.state == GHOST):
                    break
                same = here and here[-1] == holders  # one list for a whole run: `choose` looks for that
                here.append(here[-1] if same else holders)
            places.append(here)
        return places

    def _holders(self, key: Key, shard: int, fingerprint: bytes) -> list[Location]:
        found = []
        for tier in self._lower:
            block = None if tier.is_down else tier.get(key, shard)
            if block is not None and block.state == RESIDENT and block.shape.fingerprint == fingerprint:
                found.append(tier.location)
        return found

    def _plan(
        self, lookup: m.Lookup, first: int, places: Places, budget: Budget, engine: Engine, now_s: float
    ) -> tuple[Tail | None, str]:
        """The tail to bring (None: nothing), for which there are slots, and why it is not longer.

        ``places[shard][i]`` belongs to ``lookup.keys[first + i]``.
        """
        runs, here, begin = self._leases.reach(lookup)
        if not first <= begin < len(lookup.keys) or not self._leases.has_room(lookup.request):
            return None, "missing"
        places = [shard[begin - first :] for shard in places]
        end = begin + min(map(len, places))
        missing = [self._missing(lookup.keys, i, begin, end, engine.shape) for i in range(lookup.shard_count)]
        tail = Tail(begin, begin + min(map(len, missing)), engine.shape.block_bytes, missing)
        tail.choose(places, self.sources, now_s)
        coming_s = self._leases.coming_s(runs, here, begin, now_s)
        found = tail.end
        self._bound(tail, lookup, budget, engine, runs)
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

    def _bound(
        self,
        tail: Tail,
        lookup: m.Lookup,
        budget: Budget,
        engine: Engine,
        runs: Sequence[Sequence[Block]],
    ) -> None:
        """Cut the tail to what the budget, both its bytes and its number, and this engine's holds allow."""
        slot_bytes = engine.shape.slot_bytes
        tier = self._tier()
        tail.fit(max(0, budget.room_bytes(tier)) // slot_bytes, tail.missing)
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
        while len(tail.segments) > budget.most - budget.running:
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
