"""Rights to read: holds (offered), leases (being read) and pins (an operator's wish)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.core.blocks import Block
from kvtier.core.config import MAX_PIN_TTL_S, CoreConfig
from kvtier.core.engines import Engine
from kvtier.core.ledger import Ledger
from kvtier.core.messages import Leased, Load, Lookup, Offered, Pin, Pinned, Release, Released, Unpin
from kvtier.core.residency import Residency
from kvtier.core.stats import Counters
from kvtier.errors import InvalidRequest, LimitExceeded, UnknownId
from kvtier.types import Key, TierKind

_WEIGHT: Final = 0.2
_MAX_CHANGE: Final = 4.0
_MEASURED_FROM_BYTES: Final = 1 << 20


@dataclass(slots=True, eq=False)
class Lease:
    """`blocks` may be read until `deadline_s`; `valid` until one of them was found corrupt."""

    id: int
    engine: Engine
    blocks: list[Block]
    since_s: float
    deadline_s: float
    valid: bool = True


@dataclass(slots=True, eq=False)
class Hold:
    """For each shard the deepest block that was offered to a request."""

    ledger: Ledger
    deepest: dict[int, Block]
    deadline_s: float


@dataclass(slots=True, eq=False)
class PinEntry:
    """For each shard the deepest pinned block, and where blocks were lost also the one above; `key` is
    the deepest of all.
    """

    key: Key
    deepest: list[Block]
    deadline_s: float


class Leases:
    """All rights to read, by id and by request, oldest first."""

    def __init__(self, config: CoreConfig, residency: Residency, counters: Counters) -> None:
        self._config = config
        self._residency = residency
        self._counters = counters
        self.leases: OrderedDict[int, Lease] = OrderedDict()
        self.holds: OrderedDict[str, Hold] = OrderedDict()
        self.pins: dict[int, PinEntry] = {}
        self.pin_ledger = Ledger()
        self.expired: OrderedDict[int, str] = OrderedDict()
        self.load_s_per_byte = dict.fromkeys(residency.tiers, 1 / config.load_bytes_per_s)
        residency.add_ledger(self.pin_ledger)

    # ---- lookup and load

    def lookup(self, event: Lookup, engine: Engine, now_s: float) -> Offered:
        """Offer and hold the longest leading run that every shard has and that the engine may hold."""
        asked = len(event.keys)
        runs: list[list[Block]] = []
        keys = event.keys
        for shard in range(event.shard_count):
            runs.append(self._residency.run(keys, shard, event.fingerprint))
            if len(runs[-1]) < len(keys):
                keys = keys[: len(runs[-1])]
            if not keys:
                break
        found = len(keys)
        old = self.holds.get(event.request)
        if old is not None:
            self._uncharge(old)
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
            self.holds[event.request] = Hold(engine.ledger, deepest, now_s + self._config.hold_ttl_s)
        self._counters.lookups += 1
        self._counters.lookup_blocks += asked
        self._counters.hit_blocks += count
        reason = "" if count == asked else "limit" if count < found else "missing"
        estimate_s, tiers = self._estimate(runs[0] if count else [])
        return Offered(count, estimate_s, self._config.hold_ttl_s, reason, tiers)

    def load(self, event: Load, lease: int, engine: Engine, now_s: float) -> Leased:
        """Lease the leading run of one shard under the id `lease`, then end the hold for that shard."""
        if len(engine.leases) >= self._config.max_leases_per_engine:
            raise LimitExceeded(
                f"engine {engine.name!r} has {len(engine.leases)} leases: "
                "release some or raise max_leases_per_engine"
            )
        residency = self._residency
        run = residency.run(event.keys, event.shard, engine.shape.fingerprint)
        hold = self.holds.get(event.request)
        held = None if hold is None else hold.deepest.pop(event.shard, None)
        promised = 0
        if hold is not None and held is not None:
            hold.ledger.remove(held)
            if hold.ledger is engine.ledger and held in run:
                promised = run.index(held) + 1
        del run[max(promised, self._affordable(engine, [run], len(run))) :]
        if run:
            residency.guard(run[-1])
            residency.touch(run)
            engine.ledger.add(run[-1])
            entry = Lease(lease, engine, run, now_s, now_s + self._config.lease_ttl_s)
            self.leases[lease] = engine.leases[lease] = entry
        if hold is not None and held is not None:
            # Only now: between the end of the hold and the start of the lease the blocks could go.
            residency.unguard(held)
            if not hold.deepest:
                del self.holds[event.request]
        slots = [block.slot() for block in run]
        checksums = [block.checksum for block in run]
        return Leased(lease if run else 0, slots, checksums, self._config.lease_ttl_s)

    def _affordable(self, engine: Engine, runs: Sequence[Sequence[Block]], count: int) -> int:
        """How many leading blocks of each run the engine may protect beyond what it does already."""
        if not count:
            return 0
        tier = runs[0][0].pool().tier
        left = int(tier.allocated_bytes * self._config.max_leased_fraction) - engine.ledger.bytes
        if runs[0][0].parent is None and sum(count * run[0].shape.slot_bytes for run in runs) <= left:
            return count
        cost = sum(engine.ledger.cost(run[count - 1]) for run in runs)
        while count and cost > left:
            count -= 1
            charged = engine.ledger.counts
            cost -= sum(run[count].shape.slot_bytes for run in runs if run[count] not in charged)
        return count

    def _estimate(self, run: Sequence[Block]) -> tuple[float, dict[TierKind, int]]:
        if not run:
            return 0.0, {}
        kind = run[0].pool().tier.spec.kind
        size_bytes = len(run) * run[0].shape.block_bytes
        return self._config.load_overhead_s + size_bytes * self.load_s_per_byte[kind], {kind: len(run)}

    # ---- ends

    def find(self, event: Release, engine: Engine) -> Lease | None:
        """The lease that is to end; None where it ran out; `UnknownId` where it never was this engine's."""
        assert event.lease is not None
        lease = engine.leases.get(event.lease)
        if lease is None and self.expired.get(event.lease) != engine.name:
            raise UnknownId("the lease is not known to this node: treat its blocks as not loaded")
        return lease

    def release(self, event: Release, lease: Lease | None, now_s: float) -> Released:
        """End a lease; valid only if its blocks were protected until now."""
        if lease is None:
            assert event.lease is not None
            del self.expired[event.lease]
            self._counters.failed_loads += 1
            return Released(False)
        valid = lease.valid and now_s < lease.deadline_s
        self.end(lease)
        self._counters.expired_leases += now_s >= lease.deadline_s
        corrupt = set(event.corrupt_keys)
        good = sum(block.id.key not in corrupt for block in lease.blocks) if corrupt else len(lease.blocks)
        if valid:
            self._counters.loaded_blocks += good
            self._measure(lease, now_s)
        if not valid or good < len(lease.blocks):
            self._counters.failed_loads += 1
        return Released(valid)

    def release_hold(self, request: str, now_s: float) -> Released:
        """End a hold that will not be loaded."""
        hold = self.holds.get(request)
        if hold is None:
            return Released(False)
        self._uncharge(hold)
        self._unhold(request, hold)
        return Released(now_s < hold.deadline_s)

    def end(self, lease: Lease) -> None:
        """The right to read is over."""
        del self.leases[lease.id]
        del lease.engine.leases[lease.id]
        lease.engine.ledger.remove(lease.blocks[-1])
        self._residency.unguard(lease.blocks[-1])

    def expire(self, now_s: float) -> None:
        """Everything whose time is over ends."""
        while self.leases and (lease := next(iter(self.leases.values()))).deadline_s <= now_s:
            self.end(lease)
            self._counters.expired_leases += 1
            self.expired[lease.id] = lease.engine.name
            if len(self.expired) > self._config.max_expired_leases:
                self.expired.popitem(last=False)
        while self.holds:
            request, hold = next(iter(self.holds.items()))
            if hold.deadline_s > now_s:
                break
            self._uncharge(hold)
            self._unhold(request, hold)
        for pin in [pin for pin, entry in self.pins.items() if entry.deadline_s <= now_s]:
            self._unpin(pin)

    def engine_died(self, engine: Engine) -> None:
        """Nothing of it reads any more, and what it was offered nobody will load.

        (Who is offered is the engine's scheduler: where that is dead, the request is dead too.)
        """
        for lease in list(engine.leases.values()):
            self.end(lease)
        for request in [name for name, hold in self.holds.items() if hold.ledger is engine.ledger]:
            hold = self.holds[request]
            self._uncharge(hold)
            self._unhold(request, hold)
        for lease_id in [id for id, name in self.expired.items() if name == engine.name]:
            del self.expired[lease_id]

    def block_lost(self, block: Block) -> None:
        """A block turned out corrupt: no lease on it is valid any more. Pins go on above and below it."""
        for lease in self.leases.values():
            if lease.valid and block.id.shard == lease.blocks[0].id.shard and block in lease.blocks:
                lease.valid = False
        above = block.parent
        if above is not None and block in self.pin_ledger.counts:
            for entry in self.pins.values():
                if any(_continues(pinned, block) for pinned in entry.deepest):
                    entry.deepest.append(above)
                    self._residency.guard(above)
                    self.pin_ledger.add(above)

    def _uncharge(self, hold: Hold) -> None:
        for block in hold.deepest.values():
            hold.ledger.remove(block)

    def _unhold(self, request: str, hold: Hold) -> None:
        del self.holds[request]
        for block in hold.deepest.values():
            self._residency.unguard(block)

    def _measure(self, lease: Lease, now_s: float) -> None:
        block = lease.blocks[0]
        size_bytes = len(lease.blocks) * block.shape.block_bytes
        seconds = now_s - lease.since_s
        if block.extent is None or size_bytes < _MEASURED_FROM_BYTES or seconds <= 0:
            return
        kind = block.pool().tier.spec.kind
        known = self.load_s_per_byte[kind]
        # One load that stalled, or one nobody copied, must not spoil the estimate of all others.
        seen = min(max(seconds / size_bytes, known / _MAX_CHANGE), known * _MAX_CHANGE)
        self.load_s_per_byte[kind] = known + _WEIGHT * (seen - known)

    # ---- pins

    def pin(self, event: Pin, pin: int, now_s: float) -> Pinned:
        """Protect what every shard has of the leading keys, under the id `pin`."""
        if not 0 < event.ttl_s <= MAX_PIN_TTL_S:
            raise InvalidRequest(f"ttl_s is {event.ttl_s}: allowed is above 0 and up to {MAX_PIN_TTL_S:.0f}")
        if len(self.pins) >= self._config.max_pins:
            raise LimitExceeded(f"{len(self.pins)} pins exist: unpin some or raise max_pins")
        runs = [run for shard in self._residency.shards if (run := self._residency.run(event.keys, shard))]
        if not runs:
            return Pinned(0, 0)
        tier = runs[0][0].pool().tier
        limit = int(tier.allocated_bytes * self._config.max_pinned_fraction)
        total = self.pin_ledger.bytes + sum(self.pin_ledger.cost(run[-1]) for run in runs)
        if total > limit:
            raise LimitExceeded(
                f"pins would protect {total} bytes, at most {limit} are allowed: "
                "unpin some or raise max_pinned_fraction"
            )
        for run in runs:
            self._residency.guard(run[-1])
            self.pin_ledger.add(run[-1])
        deepest = max(runs, key=len)[-1].id.key
        blocks = max(map(len, runs))
        self.pins[pin] = PinEntry(deepest, [run[-1] for run in runs], now_s + event.ttl_s)
        return Pinned(pin, blocks)

    def unpin(self, event: Unpin) -> int:
        """End one pin, or all whose deepest block is the last of the keys; returns how many."""
        if event.pin is not None:
            pins = [event.pin] if event.pin in self.pins else []
        else:
            pins = [pin for pin, entry in self.pins.items() if entry.key == event.keys[-1]]
        for pin in pins:
            self._unpin(pin)
        return len(pins)

    def _unpin(self, pin: int) -> None:
        for block in self.pins.pop(pin).deepest:
            self.pin_ledger.remove(block)
            self._residency.unguard(block)


def _continues(block: Block, ancestor: Block) -> bool:
    at: Block | None = block
    while at is not None and at is not ancestor:
        at = at.parent
    return at is ancestor
