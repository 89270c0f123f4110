"""What was offered to requests and stays for them: holds, by the request's id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.core.blocks import PENDING, RESIDENT, Block
from kvtier.core.config import CoreConfig
from kvtier.core.engines import Engine, Party
from kvtier.core.ledger import Ledger
from kvtier.core.messages import Lookup, Offered, Released
from kvtier.core.residency import Residency
from kvtier.core.stats import Counters
from kvtier.types import TierKind


@dataclass(slots=True, eq=False)
class Hold:
    """For each shard the deepest block that was offered to a request."""

    ledger: Ledger
    deepest: dict[int, Block]
    deadline_s: float


class Holds:
    """All holds, oldest first; `coming` are those that were made while blocks of theirs were on their way."""

    def __init__(self, config: CoreConfig, residency: Residency, counters: Counters) -> None:
        self._config = config
        self._residency = residency
        self._counters = counters
        self.holds: OrderedDict[str, Hold] = OrderedDict()
        self.coming: dict[str, Hold] = {}
        self.load_s_per_byte = dict.fromkeys(residency.tiers, 1 / config.load_bytes_per_s)

    # ---- offers

    def reach(self, event: Lookup) -> tuple[list[list[Block]], int, int]:
        """For each shard the leading run, here or coming; how many all shards have here; and in all."""
        residency = self._residency
        runs: list[list[Block]] = []
        keys = event.keys
        here = len(keys)
        for shard in range(event.shard_count):
            run = residency.run(keys, shard, event.fingerprint)
            if len(run) < here:
                here = len(run)
            if len(run) < len(keys):
                residency.extend(run, keys, shard, event.fingerprint)
                keys = keys[: len(run)]
            runs.append(run)
            if not keys:
                break
        return runs, min(here, len(keys)), len(keys)

    def lookup(
        self, event: Lookup, engine: Engine, now_s: float, again: int | None = None, short: str = "missing"
    ) -> Offered:
        """Offer and hold the longest leading run that every shard has and that the engine may hold.

        `again`: so many blocks were offered for the same question just now. `short`: why other nodes give no
        more.
        """
        asked = len(event.keys)
        runs, here, found = self.reach(event)
        old = self.holds.get(event.request)
        if old is not None:
            self._uncharge(old)
        coming_s = self.coming_s(runs, here, found, now_s) if here < found else 0.0
        if coming_s and not pays(event, found - here, coming_s):
            found, short = here, "slow"
        count = self._affordable(engine, runs, found)
        if old is None and len(self.holds) >= self._config.max_holds:
            count = 0
        for run in runs:
            del run[count:]
            if run:
                self._residency.guard(run[-1])
                self._residency.touch(run)
                engine.ledger.add(run[-1])
        if old is not None:
            self._unhold(event.request, old)
        if count:
            deepest = {shard: run[-1] for shard, run in enumerate(runs)}
            hold = Hold(engine.ledger, deepest, now_s + self._config.hold_ttl_s)
            self.holds[event.request] = hold
            if count > here:
                self.coming[event.request] = hold
        self._count(asked, count, again)
        reason = "" if count == asked else "limit" if count < found else short
        coming = max(0, count - here)
        estimate_s, tiers = self._estimate(runs[0] if count else [], here)
        return Offered(
            count, estimate_s + (coming_s if coming else 0), self._config.hold_ttl_s, reason, tiers, coming
        )

    def _count(self, asked: int, count: int, again: int | None) -> None:
        if again is None:
            self._counters.lookups += 1
            self._counters.lookup_blocks += asked
        self._counters.hit_blocks += max(0, count - (again or 0))

    def is_current(self, event: Lookup, offered: int) -> bool:
        """Whether `event`, which was offered so many blocks, is still the latest lookup of its request."""
        hold = self.holds.get(event.request)
        if hold is None:
            return offered == 0
        return all(block.id.key in event.keys for block in hold.deepest.values())

    def has_room(self, request: str) -> bool:
        """Whether the request has a hold, or may get one."""
        return request in self.holds or len(self.holds) < self._config.max_holds

    @staticmethod
    def coming_s(runs: Iterable[Sequence[Block]], here: int, found: int, now_s: float) -> float:
        """Expected time until what is on its way is here."""
        pulls = {block.pull for run in runs for block in run[here:found]}
        return max((pull.left_s() for pull in pulls if pull is not None), default=0.0)

    def _affordable(self, engine: Party, runs: Sequence[Sequence[Block]], count: int) -> int:
        """How many leading blocks of each run the party may protect beyond what it does already."""
        if not count:
            return 0
        tier = runs[0][0].pool().tier
        left = int(tier.allocated_bytes * engine.share) - engine.ledger.bytes
        if runs[0][0].parent is None and sum(count * run[0].shape.slot_bytes for run in runs) <= left:
            return count
        cost = sum(engine.ledger.cost(run[count - 1]) for run in runs)
        while count and cost > left:
            count -= 1
            charged = engine.ledger.counts
            cost -= sum(run[count].shape.slot_bytes for run in runs if run[count] not in charged)
        return count

    def _estimate(self, run: Sequence[Block], here: int) -> tuple[float, dict[TierKind, int]]:
        if not run:
            return 0.0, {}
        kind = run[0].pool().tier.spec.kind
        size_bytes = len(run) * run[0].shape.block_bytes
        tiers = {kind: len(run)}
        for block in run[here:]:
            below = None if block.pull is None else block.pull.kind
            if below is not None:
                tiers[kind] -= 1
                tiers[below] = tiers.get(below, 0) + 1
        if not tiers[kind]:
            del tiers[kind]
        return self._config.load_overhead_s + size_bytes * self.load_s_per_byte[kind], tiers

    # ---- ends

    def release_hold(self, request: str, now_s: float) -> Released:
        """End a hold that will not be loaded."""
        hold = self.holds.get(request)
        if hold is None:
            return Released(False)
        self._uncharge(hold)
        self._unhold(request, hold)
        return Released(now_s < hold.deadline_s)

    def expire_holds(self, now_s: float) -> None:
        """Every hold whose time is over ends."""
        while self.holds:
            request, hold = next(iter(self.holds.items()))
            if hold.deadline_s > now_s:
                break
            self._uncharge(hold)
            self._unhold(request, hold)

    def release_holds_of(self, ledger: Ledger) -> None:
        """Every hold that is charged to this ledger ends."""
        for request in [name for name, hold in self.holds.items() if hold.ledger is ledger]:
            hold = self.holds[request]
            self._uncharge(hold)
            self._unhold(request, hold)

    def shorten(self, rest: Block) -> None:
        """A pending block and all that continue it will not come: no hold covers them any more."""
        for request, hold in list(self.coming.items()):
            for shard, deepest in list(hold.deepest.items()):
                if _continues(deepest, rest):
                    self._shorten(hold, shard, rest.parent)
            if not hold.deepest:
                self._forget(request)

    def _shorten(self, hold: Hold, shard: int, above: Block | None) -> None:
        deepest = hold.deepest.pop(shard)
        if above is not None and above.state in (PENDING, RESIDENT) and not above.orphan:
            hold.deepest[shard] = above
            self._residency.guard(above)
            hold.ledger.add(above)
        hold.ledger.remove(deepest)
        self._residency.unguard(deepest)

    def _uncharge(self, hold: Hold) -> None:
        for block in hold.deepest.values():
            hold.ledger.remove(block)

    def _unhold(self, request: str, hold: Hold) -> None:
        self._forget(request)
        for block in hold.deepest.values():
            self._residency.unguard(block)

    def _forget(self, request: str) -> None:
        del self.holds[request]
        self.coming.pop(request, None)


def pays(event: Lookup, blocks: int, seconds: float) -> bool:
    """Whether to wait so long for blocks is faster than to compute them; yes where nobody knows."""
    return not event.block_compute_s or seconds <= blocks * event.block_compute_s


def _continues(block: Block, ancestor: Block) -> bool:
    at: Block | None = block
    while at is not None and at is not ancestor:
        at = at.parent
    return at is ancestor
