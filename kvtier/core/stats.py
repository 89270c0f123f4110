"""What status and metrics show; the fields are those of admin.proto."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvtier.types import BlockId, Slot, TierKind


@dataclass(slots=True)
class Counters:
    """Since the core was made; never decreasing."""

    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    loaded_blocks: int = 0
    failed_loads: int = 0
    stored_blocks: int = 0
    aborted_blocks: int = 0
    refused_blocks: int = 0
    evicted_blocks: int = 0
    corrupt_blocks: int = 0
    dead_engines: int = 0
    expired_leases: int = 0
    pulled_blocks: int = 0
    failed_pulls: int = 0
    given_blocks: int = 0

    def copy(self) -> Counters:
        """As they are now."""
        return replace(self)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Bytes of a tier by state. `leased_bytes` counts what several engines share once for each.

    The fields from `is_down` on are of tiers below the top: what runs now, and what was done since the core
    was made. `evicted_blocks` were dropped for others or by hand, `wrong_blocks` found to be so by a fetch or
    by a demote from there. Of device memory `demoted_blocks` were promoted to it, `fetched_blocks` are those
    that leases have named there, `evicted_blocks` also went because their block went above.
    """

    kind: TierKind
    capacity_bytes: int
    allocated_bytes: int
    resident_bytes: int
    reserved_bytes: int
    quarantined_bytes: int
    draining_bytes: int
    leased_bytes: int
    pinned_bytes: int
    blocks: int
    replica_bytes: int = 0
    is_down: bool = False
    demotes: int = 0
    fetches: int = 0
    fetch_bytes_per_s: float = 0.0
    demoted_blocks: int = 0
    failed_demotes: int = 0
    fetched_blocks: int = 0
    failed_fetches: int = 0
    wrong_blocks: int = 0
    recovered_blocks: int = 0
    evicted_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One registered engine; `registered_at_s` is on the clock that `handle` was given.

    `resident_blocks` are those that its own memory has, as it says.
    """

    engine: str
    description: str
    fingerprint: bytes
    slot_bytes: int
    leased_bytes: int
    reserved_bytes: int
    quarantined_bytes: int
    leases: int
    registered_at_s: float
    resident_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PeerStats:
    """What the core has learnt of one tier of a node by pulling from it; `running` pulls it has now."""

    node: str
    tier: TierKind
    bytes_per_s: float
    round_trip_s: float
    running: int
    pulled_blocks: int
    failed_pulls: int


@dataclass(frozen=True, slots=True)
class CoreStats:
    """One consistent picture."""

    tiers: list[TierStats]
    engines: list[EngineStats]
    counters: Counters
    holds: int
    leases: int
    pins: int
    pulls: int = 0
    peers: list[PeerStats] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where one shard of ``keys[index]`` lies; `leases` that protect it directly, whether a pin does, and
    whether it is a replica. `holder`: the engine in whose own memory it lies, which alone knows its slot.
    """

    index: int
    block: BlockId
    tier: TierKind
    slot: Slot
    leases: int
    pinned: bool
    replica: bool = False
    holder: str = ""
