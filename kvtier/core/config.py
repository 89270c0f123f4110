"""Every bound of the core, named, and what it must know of each tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtier.errors import ConfigError
from kvtier.types import TierKind

CALL_ID_BYTES: Final = 16
MAX_PIN_TTL_S: Final = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Times and bounds; each field is a promise that is checked, with the default beside it.

    Attributes
    ----------
    lease_ttl_s, hold_ttl_s, reservation_ttl_s
        After so long without an end the right to read, the offer, the right to write runs out.
    max_leased_fraction, max_unfinished_fraction
        Shares of a tier's allocated bytes that one engine may protect by leases and holds, and occupy
        by slots that are reserved or quarantined.
    max_pinned_fraction
        Share of a tier's allocated bytes that all pins together may protect.
    max_replies, max_reply_blocks
        Replies kept for repeats of a call, per engine, and the blocks that these may name in all.
    max_verifies
        Verifications in flight; a block that is reported corrupt beyond it waits for the next report.
    max_expired_leases
        Leases remembered after they ran out, so that their release is "too late", not "unknown".
    load_overhead_s, load_bytes_per_s
        Constant part of an estimate, and the rate believed until the first loads have been measured.
    has_index
        Blocks that come and go are published, and what is missing here is looked for elsewhere.
    max_pulls, max_pulled_fraction
        Pulls at once, and the share of a tier's allocated bytes that they may be filling.
    max_given_fraction, max_peers
        Share of a tier's allocated bytes that one peer may protect by leases, and peers that may have any.
    pull_overhead_s, pull_bytes_per_s, pull_floor_s
        Constant part of a pull's estimate, the rate believed of a peer until it has been measured, and the
        least time that a pull or fetch may take before it is cut (else twice its estimate).
    demote_high_fraction
        A tier that is fuller than this has its coldest blocks copied to the tier below, ahead of eviction.
    admit_after_uses
        Blocks go down only with so many uses (storing one is the first); what they continue goes with them.
    admit_by_worth
        Blocks go down to a full tier only if its policy would keep them longer than what goes for them.
    max_demotes, demote_batch_bytes
        Demotes at once for each tier, and bytes of one (at least a block); promotes alike.
    promote_after_uses, promote_wait_s
        Blocks are copied to device memory only with so many uses (storing one is the first), when no lease is
        open, or after so long.
    max_fetches, max_fetched_fraction
        Fetches at once from each tier, and the share of the top tier's bytes that they all may be filling:
        what an engine may lease it may also fetch.
    fetch_overhead_s, fetch_bytes_per_s
        As of pulls: believed of a tier until it has been measured.
    max_lends, max_lends_per_peer, max_lent_fraction
        Fetches for peers at once, for all and for one of them, and the share of the top tier's bytes that
        they may be filling. They count among all fetches, whose rest is for this node's engines.
    max_engine_blocks
        Blocks of its own memory that one engine may have named; it forgets those named longest ago.
    """

    lease_ttl_s: float = 30.0
    hold_ttl_s: float = 30.0
    reservation_ttl_s: float = 60.0
    max_engines: int = 64
    max_keys_per_call: int = 65536
    max_leases_per_engine: int = 1024
    max_holds: int = 65536
    max_leased_fraction: float = 0.5
    max_unfinished_fraction: float = 0.25
    max_pinned_fraction: float = 0.5
    max_pins: int = 4096
    max_replies: int = 4096
    max_reply_blocks: int = 262144
    max_verifies: int = 1024
    max_expired_leases: int = 65536
    load_overhead_s: float = 0.001
    load_bytes_per_s: float = 4e9
    has_index: bool = False
    max_pulls: int = 64
    max_pulled_fraction: float = 0.25
    max_given_fraction: float = 0.25
    max_peers: int = 1024
    pull_overhead_s: float = 0.003
    pull_bytes_per_s: float = 1e9
    pull_floor_s: float = 0.1
    demote_high_fraction: float = 0.75
    admit_after_uses: int = 1
    admit_by_worth: bool = False
    max_demotes: int = 4
    demote_batch_bytes: int = 32 << 20
    promote_after_uses: int = 2
    promote_wait_s: float = 1.0
    max_fetches: int = 32
    max_fetched_fraction: float = 0.5
    fetch_overhead_s: float = 0.001
    fetch_bytes_per_s: float = 1e9
    max_lends: int = 16
    max_lends_per_peer: int = 2
    max_lent_fraction: float = 0.125
    max_engine_blocks: int = 131072

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name.endswith("_fraction"):
                if not 0 < value <= 1:
                    raise ConfigError(f"{name} is {value}: allowed is above 0 and up to 1")
            elif not isinstance(value, bool) and not value > 0:
                raise ConfigError(f"{name} is {value}: allowed is above 0")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier as the core sees it.

    Attributes
    ----------
    capacity_bytes, allocated_bytes
        The cap, and what slots may lie in now (`Grow` raises it up to the cap).
    extent_bytes
        The tier is divided into extents of this size; no slot is larger.
    frees_at_once, header_bytes, outlives
        See `kvtier.interfaces.TierTraits`.
    arena
        Number that slots carry, so that one of an earlier incarnation is recognised.
    """

    kind: TierKind
    capacity_bytes: int
    allocated_bytes: int
    extent_bytes: int
    frees_at_once: bool = True
    arena: int = 0
    header_bytes: int = 0
    outlives: bool = False

    def __post_init__(self) -> None:
        if self.extent_bytes <= 0:
            raise ConfigError(f"extent_bytes is {self.extent_bytes}: allowed is above 0")
        if not 0 <= self.allocated_bytes <= self.capacity_bytes:
            raise ConfigError(
                f"allocated_bytes is {self.allocated_bytes}: allowed is 0 .. "
                f"capacity_bytes, {self.capacity_bytes}"
            )
