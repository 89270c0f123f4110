"""Rights to write: reserve, commit, abort, and the quarantine of writers nobody has heard of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.core.blocks import GHOST, PENDING, RESIDENT, Block
from kvtier.core.config import CoreConfig
from kvtier.core.engines import Engine
from kvtier.core.extents import Place, Pool, TierMap
from kvtier.core.messages import Reserve, Reserved, ReserveState
from kvtier.core.residency import Residency
from kvtier.core.stats import Counters
from kvtier.errors import Conflict, InvalidRequest, UnknownId
from kvtier.types import CHECKSUM_SIZE_BYTES, BlockId, Key, Slot


@dataclass(slots=True, eq=False)
class Reservation:
    """What one `Reserve` granted and nobody has committed or aborted yet.

    Until the deadline the slots are in `pending`, with their blocks. After it the keys are free for
    others, and the slots are in `quarantined` until their writer is known to have ended.
    """

    id: int
    engine: Engine
    deadline_s: float
    pending: dict[Key, Block] = field(default_factory=dict)
    quarantined: dict[Key, Place] = field(default_factory=dict)


class Reservations:
    """All rights to write, oldest first."""

    def __init__(self, config: CoreConfig, residency: Residency, counters: Counters) -> None:
        self._config = config
        self._residency = residency
        self._counters = counters
        self.live: OrderedDict[int, Reservation] = OrderedDict()
        self.expired: dict[int, Reservation] = {}

    # ---- reserve

    def reserve(self, event: Reserve, reservation: int, engine: Engine, now_s: float) -> Reserved:
        """Slots for the keys that are missing, as far as there is room, under the id `reservation`."""
        residency = self._residency
        known = list(map(residency.shards.get(event.shard, {}).get, event.keys))
        parent = self._validate(event, known, engine)
        tier = next(iter(residency.tiers.values()))
        pool = tier.pool(engine.shape.slot_bytes)
        missing = sum(block is None or block.state == GHOST for block in known)
        guarded = self._guard_chain(parent, known)
        granted = min(missing, self._allowance(engine, tier))
        if granted:
            residency.make_room(tier, pool, granted)
            granted = min(granted, pool.free)
        entry = Reservation(reservation, engine, now_s + self._config.reservation_ttl_s)
        states, slots = self._grant(event, entry, parent, known, pool, granted)
        for block in guarded:
            residency.unguard(block)
        if entry.pending:
            self.live[reservation] = engine.reservations[reservation] = entry
            engine.reserved_bytes += len(entry.pending) * engine.shape.slot_bytes
        self._counters.refused_blocks += states.count(ReserveState.REFUSED)
        return Reserved(reservation if entry.pending else 0, states, slots, self._config.reservation_ttl_s)

    def _validate(self, event: Reserve, known: Sequence[Block | None], engine: Engine) -> Block | None:
        if len(set(event.keys)) != len(event.keys) or event.parent in event.keys:
            raise InvalidRequest("a key occurs twice: keys are a chain, each the parent of the next")
        parent: Block | None = None
        if event.parent is not None:
            parent = self._residency.get(event.parent, event.shard)
            if parent is None or parent.state == GHOST or parent.orphan:
                raise UnknownId(
                    "parent is not here: reserve from the start of the prompt or from a block that is"
                )
            if parent.shape.fingerprint != engine.shape.fingerprint:
                raise Conflict("parent was stored with another layout: the namespace must hold the layout")
        above = event.parent
        for key, block in zip(event.keys, known, strict=True):
            kin = block  # a lost block's place is kept for the layout of those that continue it
            if block is not None and block.state == GHOST:
                kin = block.first_child
            elif block is not None and above != (None if block.parent is None else block.parent.id.key):
                raise Conflict("a key is here behind another parent: each is the parent of the next")
            if kin is not None and kin.shape.fingerprint != engine.shape.fingerprint:
                raise Conflict("a key is here with another layout: the namespace must hold the layout")
            above = key
        return parent

    def _guard_chain(self, parent: Block | None, known: Sequence[Block | None]) -> list[Block]:
        """Keep the eviction that makes room from eating the chain itself; to be undone by the caller."""
        ends: list[Block] = []
        run: Block | None = parent
        for block in known:
            if block is None or block.state == GHOST:
                if run is not None:
                    ends.append(run)
                run = None
            else:
                run = block
        if run is not None:
            ends.append(run)
        for block in ends:
            self._residency.guard(block)
        return ends

    def _allowance(self, engine: Engine, tier: TierMap) -> int:
        limit = int(tier.allocated_bytes * self._config.max_unfinished_fraction)
        left = limit - engine.reserved_bytes - engine.quarantined_bytes
        return max(0, left // engine.shape.slot_bytes)

    def _grant(
        self,
        event: Reserve,
        entry: Reservation,
        parent: Block | None,
        known: Sequence[Block | None],
        pool: Pool,
        granted: int,
    ) -> tuple[list[ReserveState], list[Slot | None]]:
        places = pool.allocate(granted)
        states: list[ReserveState] = []
        slots: list[Slot | None] = []
        present: list[Block] = []
        above = parent
        for key, block in zip(event.keys, known, strict=True):
            slot = None
            if block is not None and block.state == RESIDENT:
                states.append(ReserveState.PRESENT)
                present.append(block)
            elif block is not None and block.state == PENDING:
                states.append(ReserveState.BUSY)
            elif len(entry.pending) == granted:
                break
            else:
                place = places[len(entry.pending)]
                block = self._residency.admit(BlockId(key, event.shard), above, entry.engine.shape, place)
                entry.pending[key] = block
                if above is not None:
                    above.continued += 1
                slot = pool.slot(*place)
                states.append(ReserveState.GRANTED)
            slots.append(slot)
            above = block
        self._residency.touch(present)
        self._residency.use(present)
        for block in present:
            if block.replica:  # this node's engines make it themselves: it is worth as much as any other
                self._residency.own(block)
        rest = len(event.keys) - len(states)
        return states + [ReserveState.REFUSED] * rest, slots + [None] * rest

    # ---- commit and abort

    def owned(self, reservation: int, engine: Engine) -> Reservation:
        """The reservation, live or expired; raises where it is nobody's or somebody else's."""
        entry = self.live.get(reservation) or self.expired.get(reservation)
        if entry is None:
            raise UnknownId("the reservation is not known to this node: reserve again")
        if entry.engine is not engine:
            raise Conflict("the reservation belongs to another engine")
        return entry

    def pending(
        self, reservation: int, engine: Engine, keys: Sequence[Key]
    ) -> tuple[Reservation, list[Block]]:
        """The uncommitted blocks that `keys` name, each once; raises and changes nothing otherwise."""
        entry = self.owned(reservation, engine)
        if reservation in self.expired:
            raise UnknownId("the reservation has expired: abort it, then reserve again")
        if len(set(keys)) != len(keys):
            raise InvalidRequest("a key occurs twice in one commit")
        blocks = [entry.pending.get(key) for key in keys]
        found = [block for block in blocks if block is not None]
        if len(found) != len(keys):
            raise UnknownId("a key is not reserved here, or is committed already: nothing was committed")
        return entry, found

    def commit(
        self, reservation: int, engine: Engine, keys: Sequence[Key], checksums: Sequence[bytes]
    ) -> int:
        """Make these blocks visible, all or none."""
        if len(checksums) != len(keys):
            raise InvalidRequest(f"{len(checksums)} checksums were sent for {len(keys)} keys")
        if any(len(checksum) != CHECKSUM_SIZE_BYTES for checksum in checksums):
            raise InvalidRequest(f"a checksum has not {CHECKSUM_SIZE_BYTES} bytes")
        entry, blocks = self.pending(reservation, engine, keys)
        for block, checksum in zip(blocks, checksums, strict=True):
            self._residency.commit(block, checksum)
        self._residency.touch(blocks)
        for key, block in zip(keys, blocks, strict=True):
            del entry.pending[key]
            self._residency.unguard(block)
        engine.reserved_bytes -= len(blocks) * engine.shape.slot_bytes
        self._forget_if_done(entry)
        self._counters.stored_blocks += len(blocks)
        return len(blocks)

    def abort(self, reservation: int, engine: Engine, keys: Sequence[Key]) -> int:
        """The engine says that no copy into these slots can still run: free them."""
        entry = self.owned(reservation, engine)
        granted = entry.quarantined if entry.quarantined else entry.pending
        if not all(key in granted for key in keys):
            raise UnknownId("a key is not reserved here, or is committed already: nothing was aborted")
        chosen = set(keys) if keys else set(granted)
        aborted = self._free(entry, [key for key in reversed(granted) if key in chosen])
        self._forget_if_done(entry)
        return aborted

    def _free(self, entry: Reservation, keys: Sequence[Key]) -> int:
        slot_bytes = entry.engine.shape.slot_bytes
        for key in keys:
            if entry.quarantined:
                self._residency.unquarantine(entry.quarantined.pop(key))
                entry.engine.quarantined_bytes -= slot_bytes
            else:
                self._residency.free(self._give_up(entry.pending.pop(key)))
                entry.engine.reserved_bytes -= slot_bytes
        self._counters.aborted_blocks += len(keys)
        return len(keys)

    def _give_up(self, block: Block) -> Place:
        self._residency.unguard(block)
        return self._residency.lose(block)

    def _forget_if_done(self, entry: Reservation) -> None:
        if not entry.pending and not entry.quarantined:
            self.live.pop(entry.id, None)
            self.expired.pop(entry.id, None)
            del entry.engine.reservations[entry.id]

    # ---- time and death

    def expire(self, now_s: float) -> None:
        """Reservations whose time is over.

        1. An engine stalls in the middle of a copy and its reservation runs out.
        2. The slot goes to another block, which is written, committed and read.
        3. The stalled copy goes on, into a slot that holds somebody else's bytes.

        So step 2 must not happen: the keys are free for others from now on, the slots are not.
        """
        while self.live and (entry := next(iter(self.live.values()))).deadline_s <= now_s:
            del self.live[entry.id]
            self.expired[entry.id] = entry
            for key in reversed(list(entry.pending)):
                place = self._give_up(entry.pending.pop(key))
                self._residency.quarantine(place)
                entry.quarantined[key] = place
                entry.engine.reserved_bytes -= entry.engine.shape.slot_bytes
                entry.engine.quarantined_bytes += entry.engine.shape.slot_bytes

    def engine_died(self, engine: Engine) -> None:
        """Proof that nothing of it writes any more."""
        for entry in list(engine.reservations.values()):
            self._free(entry, list(reversed(entry.quarantined or entry.pending)))
            self._forget_if_done(entry)
