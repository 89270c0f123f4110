"""Events in, actions out: everything the core is told and everything it answers.

`CacheCore.handle(event, now_s)` returns actions. Exactly one of them is the event's **reply** where the
event is a request (`Reply`); the others are **instructions** that the node carries out (`Instruction`)
and reports back as further events. A request that is refused raises from `kvtier.errors` and leaves the
core as it was.

Requests that change something carry `call_id`: a repeat under the same (engine, call_id) returns the
first reply and no instruction.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.types import BlockId, BlockRecord, Key, Layout, Location, Slot, TierKind

# ---- events: requests of engines


@dataclass(frozen=True, slots=True)
class RegisterEngine:
    """An engine process and the layout of its blocks. Repeating it with the same layout is fine.

    `maps_device`: it can read copies in the node's device memory, if there is such a tier.
    """

    call_id: bytes
    engine: str
    layout: Layout
    fingerprint: bytes
    description: str = ""
    maps_device: bool = False


@dataclass(frozen=True, slots=True)
class Lookup:
    """How many leading blocks do all of shards 0 .. shard_count-1 have? Holds them for `request`.

    The hold belongs to the request's id alone: the process that asks (the engine's scheduler) and
    those that load (its workers) are registered under different ids. `block_compute_s` is what the engine
    takes to compute one block (0: unknown): of what lies elsewhere only what loads faster is offered.
    """

    engine: str
    request: str
    keys: Sequence[Key]
    shard_count: int
    fingerprint: bytes
    block_compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Lease these blocks of one shard for reading; ends the hold of `request` for that shard."""

    call_id: bytes
    engine: str
    request: str
    keys: Sequence[Key]
    shard: int


@dataclass(frozen=True, slots=True)
class Release:
    """The reads under `lease` have ended. Exactly one of `lease` and `request` is given."""

    call_id: bytes
    engine: str
    lease: int | None = None
    request: str | None = None
    corrupt_keys: Sequence[Key] = ()
    shard: int = 0


@dataclass(frozen=True, slots=True)
class Reserve:
    """Slots for a chain of new blocks that continues `parent` (None: begins a prompt)."""

    call_id: bytes
    engine: str
    parent: Key | None
    keys: Sequence[Key]
    shard: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """These reserved slots are written; make the blocks visible."""

    call_id: bytes
    engine: str
    reservation: int
    keys: Sequence[Key]
    checksums: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Abort:
    """No copy into these slots can still run; free them. No keys: all that are not committed."""

    call_id: bytes
    engine: str
    reservation: int
    keys: Sequence[Key] = ()


@dataclass(frozen=True, slots=True)
class ReportResident:
    """What the engine's own memory has gained and lost, as its KV events say; `clear`: first it lost all.

    Answered by `Noted`. Such blocks are shown and published as HBM; nothing is ever offered because of them.
    """

    call_id: bytes
    engine: str
    added: Sequence[Key] = ()
    removed: Sequence[Key] = ()
    clear: bool = False


# ---- events: requests of peers


@dataclass(frozen=True, slots=True)
class Acquire:
    """A peer wants to read the leading run of these blocks of one shard; answered by `Leased`.

    The peer counts as a party named ``peer:<node>`` (`peer_name`), whose leases are charged and bounded like
    an engine's; `Release` with that name as `engine` ends them. `waits`: it asks again for what is `coming`,
    so what lies in a tier below is fetched for it, as far as that disturbs nobody here.
    """

    call_id: bytes
    peer: str
    keys: Sequence[Key]
    shard: int
    fingerprint: bytes
    waits: bool = False


def peer_name(node: str) -> str:
    """The name under which a peer holds leases; no engine can have it."""
    return f"peer:{node}"


# ---- events: requests of operators


@dataclass(frozen=True, slots=True)
class Pin:
    """Protect the leading blocks of `keys` that are here (every shard) for `ttl_s`."""

    call_id: bytes
    keys: Sequence[Key]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Unpin:
    """End one pin, or every pin whose deepest block is ``keys[-1]``."""

    call_id: bytes
    pin: int | None = None
    keys: Sequence[Key] = ()


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop these blocks and all that continue them, except leased and pinned ones."""

    call_id: bytes
    keys: Sequence[Key]


# ---- events: what the node observed


@dataclass(frozen=True, slots=True)
class EngineDied:
    """Proof: the kernel dropped the engine's flock, so nothing of it can still write or read."""

    engine: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """An earlier `Drop` has finished: these slots can be reused."""

    tier: TierKind
    slots: Sequence[Slot]


@dataclass(frozen=True, slots=True)
class Verified:
    """An earlier `Verify` has finished; `intact` is false where the checksum did not match."""

    verify: int
    intact: bool


@dataclass(frozen=True, slots=True)
class Grow:
    """A tier has more bytes than at the last event (an old arena was given up)."""

    tier: TierKind
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Scrub:
    """Choose up to `blocks` resident blocks for background verification."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: leases, holds, reservations and pins may have run out."""


@dataclass(frozen=True, slots=True)
class Located:
    """Answer to `Find`: where the index knows the tail of `lookup`; answered by a new `Offered`.

    Refused where the request was released, loaded or asked anew meanwhile. Only places that count: of nodes
    that live, in their present incarnation, not this node, and not one that keeps failing.
    ``places[shard][i]`` belongs to ``lookup.keys[first + i]``.
    """

    lookup: Lookup
    first: int
    places: Sequence[Sequence[Sequence[Location]]]


@dataclass(frozen=True, slots=True)
class Arrived:
    """The next blocks of a pull or fetch lie in their slots, verified, in order.

    Of a pull: under a lease that was valid when they did. Of a fetch: with the checksums of their records.
    """

    pull: int
    checksums: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Overdue:
    """A fetch has taken its `timeout_s` and still runs: whoever waits for it is told that it does not come.

    The read may still write its slots, which nobody gets before `PullEnded`; no `Arrived` follows.
    """

    pull: int


@dataclass(frozen=True, slots=True)
class PullEnded:
    """A pull or fetch is over: nothing writes to its slots any more, what has not arrived never will.

    `fault` is empty where the source gave all it had. `wrong` are keys of a fetch whose source slots the tier
    found to hold something else: they are gone from that tier.
    """

    pull: int
    fault: str = ""
    wrong: Sequence[Key] = ()


@dataclass(frozen=True, slots=True)
class Demoted:
    """A demote or promote is over: nothing reads its source slots or writes its target slots any more.

    Parameters
    ----------
    written
        Positions that lie in their target slots, with their records, as safely as the tier keeps anything.
    corrupt
        Positions whose source had other bytes than the checksum says; never among `written`.
    fault
        Why the tier did not take them all; empty where it would have.
    """

    demote: int
    written: Sequence[int]
    corrupt: Sequence[int] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A tier that outlives the node found these blocks when it was opened.

    Comes in any number, the last one with `is_last`, which every such tier needs (an empty one too): nothing
    is demoted there before. The slots are believed to hold what the records say until they are read.
    """

    tier: TierKind
    blocks: Sequence[tuple[Slot, BlockRecord]]
    is_last: bool


@dataclass(frozen=True, slots=True)
class TierDown:
    """A tier below the top does not work, or does not answer: nothing is offered from it or demoted to it.

    What runs there ends by its own events, however late; its blocks stay known.
    """

    tier: TierKind


@dataclass(frozen=True, slots=True)
class TierUp:
    """It works again, and holds what it held."""

    tier: TierKind


Request = (
    RegisterEngine
    | Lookup
    | Load
    | Release
    | Reserve
    | Commit
    | Abort
    | ReportResident
    | Acquire
    | Located
    | Pin
    | Unpin
    | Evict
)
Observation = (
    EngineDied
    | Dropped
    | Verified
    | Grow
    | Scrub
    | Tick
    | Arrived
    | PullEnded
    | Overdue
    | Demoted
    | Recovered
    | TierDown
    | TierUp
)
Event = Request | Observation


# ---- actions: replies


@dataclass(frozen=True, slots=True)
class Registered:
    """The engine is known; its blocks take slots of this size."""

    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Offered:
    """`blocks` leading keys are held; `reason` ("", "missing", "limit", "slow") says why not more.

    Some of them may still be on their way (`coming`, the last ones). "slow": the rest would take longer to
    load than to compute. `tiers` says from where: what peers bring counts as the tier that it will lie in.
    """

    blocks: int
    estimate_s: float
    hold_ttl_s: float
    reason: str
    tiers: dict[TierKind, int]
    coming: int = 0


@dataclass(frozen=True, slots=True)
class Leased:
    """Leading keys that are in these slots; fewer than asked where some are gone.

    `coming` more are leased and on their way: `Ready` names their slots as they arrive. A peer is told
    nothing: it asks again for what is `coming`, of which some may only wait for their turn to be fetched.
    `copies` is empty, or has for each slot a second one in device memory with the same bytes, or None. Both
    stay as long as the lease.
    """

    lease: int
    slots: list[Slot]
    checksums: list[bytes]
    lease_ttl_s: float
    coming: int = 0
    copies: list[Slot | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Released:
    """Whether lease or hold was valid until now."""

    valid: bool


class ReserveState(enum.IntEnum):
    """Answer for one key of a `Reserve`; the values are those of the wire."""

    GRANTED = 1
    PRESENT = 2
    BUSY = 3
    REFUSED = 4


@dataclass(frozen=True, slots=True)
class Reserved:
    """`slots[i]` is None where ``states[i]`` is not GRANTED; `reservation` is 0 where none is."""

    reservation: int
    states: list[ReserveState]
    slots: list[Slot | None]
    reservation_ttl_s: float


@dataclass(frozen=True, slots=True)
class Committed:
    """So many blocks became visible."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """So many slots were given back."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Noted:
    """So many blocks of the engine's own memory are known now: all it named, up to a bound."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """`blocks` leading keys are protected under `pin` (0 where none is here)."""

    pin: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Unpinned:
    """So many pins ended."""

    pins: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """So many blocks were dropped, and so many stayed because they are in use; counted in each tier."""

    blocks: int
    kept: int


Reply = (
    Registered
    | Offered
    | Leased
    | Released
    | Reserved
    | Committed
    | Aborted
    | Noted
    | Pinned
    | Unpinned
    | Evicted
)


# ---- actions: instructions


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete what is in these slots, then answer `Dropped`. Not used for tiers that free at once."""

    tier: TierKind
    slots: list[Slot]


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare the slot's bytes with the checksum, then answer `Verified`. The core holds the block."""

    verify: int
    block: BlockId
    tier: TierKind
    slot: Slot
    block_bytes: int
    checksum: bytes
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """For the log and the metrics: blocks that are gone although nobody asked; `reason` says why."""

    blocks: list[BlockId]
    reason: str


@dataclass(frozen=True, slots=True)
class Find:
    """Ask the index where ``lookup.keys[first:]`` lie (every shard), then answer `Located`."""

    lookup: Lookup
    first: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Read these blocks from a peer into these slots, in order; answer `Arrived` and at last `PullEnded`.

    Nobody but this pull writes to the slots; they are given back by `PullEnded` alone, never by a timer.
    """

    pull: int
    node: str
    incarnation: int
    shard: int
    keys: list[Key]
    slots: list[Slot]
    block_bytes: int
    fingerprint: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read these blocks of a tier below into these slots of the top tier, in order: a pull from ourselves.

    Answered like `Pull`: `Arrived` as leading ones are here and verified, at last `PullEnded`; and `Overdue`
    if `timeout_s` has passed before that. Until `PullEnded` nobody but this fetch writes to `slots`, and the
    core keeps what is in `sources`. `yields`: it is for a peer, and lets those for engines go first.
    """

    pull: int
    tier: TierKind
    sources: list[Slot]
    records: list[BlockRecord]
    slots: list[Slot]
    timeout_s: float
    yields: bool = False


@dataclass(frozen=True, slots=True)
class Demote:
    """Copy these blocks from slots of one tier to slots of the one below; answer `Demoted`, however late.

    Until then the core keeps what is in `sources`, and nobody else gets `slots`. A block comes before those
    that continue it. The bytes are compared with their checksums before they go.
    It may wait for anything else: the core begins few at a time.
    """

    demote: int
    source: TierKind
    sources: list[Slot]
    tier: TierKind
    slots: list[Slot]
    records: list[BlockRecord]


@dataclass(frozen=True, slots=True)
class Promote(Demote):
    """The same into device memory, of what is read most: copies that end with what they were copied from."""


@dataclass(frozen=True, slots=True)
class Ready:
    """More blocks of a lease: those from `first` on (counted in the lease) lie in these slots.

    `is_last`: nothing more will follow, because all are here or the rest will not come.
    """

    lease: int
    first: int
    slots: list[Slot]
    checksums: list[bytes]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Publish:
    """For the index: blocks that became visible in `tier`, and blocks that are gone from it.

    A block is published in the fastest tier that has it; where it moves, the removal is told first. HBM is
    apart: what engines have in their own memory, beside the tier that the node itself has the block in.
    """

    tier: TierKind
    added: list[BlockId]
    removed: list[BlockId]


Instruction = Drop | Verify | Lost | Find | Pull | Fetch | Demote | Ready | Publish
Action = Reply | Instruction
