"""Rights to read: leases, made by a load or for a peer, and how they end.

A lease, like a hold, may span blocks that pulls are still bringing. What has not come when its pull ends is
cut off, with all behind it; the lease stays valid for what is left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvtier.core.blocks import RESIDENT, Block
from kvtier.core.config import CoreConfig
from kvtier.core.copies import Copies
from kvtier.core.engines import Engine, Party, is_peer
from kvtier.core.holds import Holds
from kvtier.core.messages import Acquire, Leased, Load, Ready, Release, Released
from kvtier.core.residency import Residency
from kvtier.core.stats import Counters
from kvtier.errors import LimitExceeded, UnknownId
from kvtier.types import Slot

_WEIGHT: Final = 0.2
_MAX_CHANGE: Final = 4.0
_MEASURED_FROM_BYTES: Final = 1 << 20


@dataclass(slots=True, eq=False)
class Lease:
    """`blocks` may be read until `deadline_s`; `valid` until one of them was found corrupt.

    `ready` leading ones are here and their slots were told; a peer is told only of the `told` ones that were
    here at first. The lease waits while more are to come. `copies` in device memory were told, too; each is
    guarded by itself, so that none depends on what becomes of the others.
    """

    id: int
    engine: Party
    blocks: list[Block]
    since_s: float
    deadline_s: float
    ready: int
    told: int
    valid: bool = True
    waited: bool = False
    copies: list[Block] = field(default_factory=list)


class Leases(Holds):
    """All rights to read, by id and by request, oldest first.

    Attributes
    ----------
    waiting
        Leases by the block that they wait for: the first of them that is not here.
    readies
        Instructions of the present event.
    copies
        Device memory, if there is such a tier.
    """

    def __init__(self, config: CoreConfig, residency: Residency, counters: Counters) -> None:
        super().__init__(config, residency, counters)
        self.leases: OrderedDict[int, Lease] = OrderedDict()
        self.waiting: dict[Block, dict[int, Lease]] = {}
        self.readies: list[Ready] = []
        self.copies: Copies | None = None
        self.expired: OrderedDict[int, str] = OrderedDict()

    # ---- begin

    def load(self, event: Load, lease: int, engine: Engine, now_s: float) -> Leased:
        """Lease the leading run of one shard under the id `lease`, then end the hold for that shard."""
        self.check_leases(engine)
        residency = self._residency
        run = residency.run(event.keys, event.shard, engine.shape.fingerprint)
        ready = len(run)
        if ready < len(event.keys):
            residency.extend(run, event.keys, event.shard, engine.shape.fingerprint)
        hold = self.holds.get(event.request)
        held = None if hold is None else hold.deepest.pop(event.shard, None)
        promised = 0
        if hold is not None and held is not None:
            hold.ledger.remove(held)
            if hold.ledger is engine.ledger and held in run:
                promised = run.index(held) + 1
        del run[max(promised, self._affordable(engine, [run], len(run))) :]
        reply = self._lease(lease, engine, run, min(ready, len(run)), now_s)
        if hold is not None and held is not None:
            # Only now: between the end of the hold and the start of the lease the blocks could go.
            residency.unguard(held)
            if not hold.deepest:
                self._forget(event.request)
        return self._with_copies(reply) if self.copies is not None and engine.maps_device else reply

    def give(self, event: Acquire, lease: int, peer: Party, now_s: float, reach: int = 0) -> Leased:
        """Lease what is here of the leading run to a peer, as far as its share allows; and what is fetched.

        `reach`: so many leading keys it may have in the end, if it asks again.
        """
        self.check_leases(peer)
        run, ready = self.lendable(event)
        whole = len(run)
        del run[self._affordable(peer, [run], whole) :]
        reply = self._lease(lease, peer, run, min(ready, len(run)), now_s)
        more = max(0, reach - whole) if len(run) == whole else 0
        return replace(reply, coming=reply.coming + more) if more else reply

    def lendable(self, event: Acquire) -> tuple[list[Block], int]:
        """The leading run that is here or, for a peer that waits, being fetched; and how much of it is here.

        What other nodes bring is left out, or two that wait for each other would.
        """
        residency = self._residency
        run = residency.run(event.keys, event.shard, event.fingerprint)
        ready = len(run)
        if event.waits and ready < len(event.keys):
            residency.extend(run, event.keys, event.shard, event.fingerprint)
            for index in range(ready, len(run)):
                pull = run[index].pull
                if pull is not None and pull.kind is None:
                    del run[index:]
                    break
        return run, ready

    def check_leases(self, party: Party) -> None:
        """Raise where it may have no more of them."""
        if len(party.leases) >= self._config.max_leases_per_engine:
            raise LimitExceeded(
                f"{party.name!r} has {len(party.leases)} leases: release some or raise max_leases_per_engine"
            )

    def _lease(self, id: int, party: Party, run: list[Block], ready: int, now_s: float) -> Leased:
        if run:
            self._residency.guard(run[-1])
            self._residency.touch(run)
            self._residency.use(run)
            party.ledger.add(run[-1])
            lease = Lease(id, party, run, now_s, now_s + self._config.lease_ttl_s, ready, ready)
            self.leases[id] = party.leases[id] = lease
            if ready < len(run):
                lease.waited = True
                self.waiting.setdefault(run[ready], {})[id] = lease
        here = run if ready == len(run) else run[:ready]
        slots = [block.slot() for block in here]
        checksums = [block.checksum for block in here]
        return Leased(id if run else 0, slots, checksums, self._config.lease_ttl_s, len(run) - ready)

    def _with_copies(self, reply: Leased) -> Leased:
        """Name what the lease has in device memory; both copies stay until it ends."""
        lease = self.leases.get(reply.lease)
        if lease is None:
            return reply
        assert self.copies is not None
        found = self.copies.lend(lease.blocks[: lease.ready])
        lease.copies = [copy for copy in found if copy is not None]
        if not lease.copies:
            return reply
        return replace(reply, copies=[None if copy is None else copy.slot() for copy in found])

    # ---- ends

    def find(self, event: Release, engine: Party) -> Lease | None:
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
            self._counters.failed_loads += not is_peer(event.engine)
            return Released(False)
        valid = lease.valid and now_s < lease.deadline_s
        self.end(lease)
        self._counters.expired_leases += now_s >= lease.deadline_s
        told = lease.told if is_peer(lease.engine.name) else lease.ready
        read = lease.blocks if told == len(lease.blocks) else lease.blocks[:told]
        corrupt = set(event.corrupt_keys)
        good = sum(block.id.key not in corrupt for block in read) if corrupt else len(read)
        if is_peer(lease.engine.name):
            self._counters.given_blocks += good if valid else 0
            return Released(valid)
        if valid:
            self._counters.loaded_blocks += good
            self._measure(lease, now_s)
        if not valid or good < len(read):
            self._counters.failed_loads += 1
        return Released(valid)

    def end(self, lease: Lease) -> None:
        """The right to read is over."""
        del self.leases[lease.id]
        del lease.engine.leases[lease.id]
        self._stop_waiting(lease)
        if lease.blocks:
            lease.engine.ledger.remove(lease.blocks[-1])
            self._residency.unguard(lease.blocks[-1])
        for copy in lease.copies:
            assert self.copies is not None
            self.copies.unguard(copy)

    def expire(self, now_s: float) -> None:
        """Everything whose time is over ends."""
        while self.leases and (lease := next(iter(self.leases.values()))).deadline_s <= now_s:
            self.end(lease)
            self._counters.expired_leases += 1
            self.expired[lease.id] = lease.engine.name
            if len(self.expired) > self._config.max_expired_leases:
                self.expired.popitem(last=False)
        self.expire_holds(now_s)

    def engine_died(self, engine: Engine) -> None:
        """Nothing of it reads any more, and what it was offered nobody will load.

        (Who is offered is the engine's scheduler: where that is dead, the request is dead too.)
        """
        for lease in list(engine.leases.values()):
            self.end(lease)
        self.release_holds_of(engine.ledger)
        for lease_id in [id for id, name in self.expired.items() if name == engine.name]:
            del self.expired[lease_id]

    def block_lost(self, block: Block) -> None:
        """A block turned out corrupt: no lease on it is valid any more, and none goes on waiting."""
        for lease in self.leases.values():
            if not lease.valid or not lease.blocks or block.id.shard != lease.blocks[0].id.shard:
                continue
            if block in lease.blocks:
                self._void(lease)

    def copies_lost(self, copies: Sequence[Block]) -> None:
        """The same of copies: whoever was told of one may have read wrong bytes, too."""
        lost = set(copies)
        for lease in self.leases.values():
            if lease.valid and not lost.isdisjoint(lease.copies):
                self._void(lease)

    def _void(self, lease: Lease) -> None:
        lease.valid = False
        if lease.ready < len(lease.blocks):
            self._cut(lease, lease.ready)

    # ---- blocks on their way

    def arrived(self, blocks: Iterable[Block]) -> None:
        """These are here: tell the leases that wait for them."""
        for block in blocks:
            for lease in self.waiting.pop(block, {}).values():
                self._tell(lease)

    def never_arrive(self, rest: Sequence[Block]) -> None:
        """This chain of pending blocks will not come: cut off what was promised from there on."""
        gone = set(rest)
        for lease in [lease for leases in self.waiting.values() for lease in leases.values()]:
            for index in range(lease.ready, len(lease.blocks)):
                if lease.blocks[index] in gone:
                    self._cut(lease, index)
                    break
        self.shorten(rest[0])

    def _tell(self, lease: Lease) -> None:
        """Name the slots of what is here beyond what was told, and wait for the rest."""
        first, blocks = lease.ready, lease.blocks
        ready = first
        while ready < len(blocks) and blocks[ready].state == RESIDENT:
            ready += 1
        lease.ready = ready
        is_last = ready == len(blocks)
        if not is_last:
            self.waiting.setdefault(blocks[ready], {})[lease.id] = lease
        if is_peer(lease.engine.name):
            return
        here = blocks[first:ready]
        slots: list[Slot] = [block.slot() for block in here]
        self.readies.append(Ready(lease.id, first, slots, [block.checksum for block in here], is_last))

    def _cut(self, lease: Lease, count: int) -> None:
        """A waiting lease covers only its first `count` blocks from now on."""
        if count == lease.ready:
            self._stop_waiting(lease)
            if not is_peer(lease.engine.name):
                self.readies.append(Ready(lease.id, count, [], [], True))
        deepest = lease.blocks[-1]
        del lease.blocks[count:]
        if count:
            self._residency.guard(lease.blocks[-1])
            lease.engine.ledger.add(lease.blocks[-1])
        lease.engine.ledger.remove(deepest)
        self._residency.unguard(deepest)

    def _stop_waiting(self, lease: Lease) -> None:
        if lease.ready == len(lease.blocks):
            return
        block = lease.blocks[lease.ready]
        leases = self.waiting[block]
        del leases[lease.id]
        if not leases:
            del self.waiting[block]

    def _measure(self, lease: Lease, now_s: float) -> None:
        if lease.waited or lease.copies or not lease.blocks:
            return
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
