"""What the client answers: values, never exceptions."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from kvtier.errors import (
    Conflict,
    Corruption,
    DeadlineExceeded,
    InvalidRequest,
    KvtierError,
    LimitExceeded,
    TierFault,
    Unavailable,
    UnknownId,
)
from kvtier.types import TierKind

UNREACHABLE: Final = "unreachable"
DEADLINE: Final = "deadline"
CORRUPT: Final = "corrupt"
MISSING: Final = "missing"
BUDGET: Final = "budget"
EXPIRED: Final = "expired"
STOPPED: Final = "stopped"
REFUSED: Final = "refused"

_REASONS: Final[tuple[tuple[type[KvtierError], str], ...]] = (
    (DeadlineExceeded, DEADLINE),
    (Unavailable, UNREACHABLE),
    (UnknownId, "unknown"),
    (LimitExceeded, "limit"),
    (Corruption, CORRUPT),
    (TierFault, "fault"),
    (Conflict, REFUSED),
    (InvalidRequest, REFUSED),
)


def reason_of(error: KvtierError) -> str:
    """One word for a fault, for metrics and results."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "fault")


@dataclass(frozen=True, slots=True)
class Offer:
    """What a lookup found: `blocks` leading keys can be loaded and are held for the request.

    Attributes
    ----------
    estimate_s
        Expected time of loading them.
    reason
        Why not more: "" (all are there), "missing", "limit", "slow" (the rest would take longer to load than
        to compute), or a fault: "unreachable", "deadline", "refused", "unknown", "fault".
    tiers
        Where they are.
    coming
        So many of them, the last ones, are on their way from another node; a load waits for them.
    """

    blocks: int
    estimate_s: float = 0.0
    reason: str = ""
    tiers: Mapping[TierKind, int] = field(default_factory=dict)
    coming: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The blocks of ``keys[:loaded]`` are in place; of the others nothing is known.

    Attributes
    ----------
    failed_reason
        "" where all were loaded, else "missing", "corrupt", "budget" (cut), "expired" (the lease ended
        before the copy did), or a fault as in `Offer.reason`.
    seconds
        How long it took.
    """

    loaded: int
    failed_reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreResult:
    """How many of the keys became visible, were there, are just being stored, or found no room.

    Attributes
    ----------
    reason
        "" where nothing went wrong (also if some were refused), "stopped", or a fault as in `Offer.reason`.
    """

    committed: int = 0
    present: int = 0
    busy: int = 0
    refused: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counters of one client in this process; `device_blocks` of `loaded_blocks` came from device memory."""

    lookups: int = 0
    lookup_blocks: int = 0
    offered_blocks: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    device_blocks: int = 0
    failed_loads: int = 0
    corrupt_blocks: int = 0
    stores: int = 0
    stored_blocks: int = 0
    present_blocks: int = 0
    refused_blocks: int = 0
    aborted_stores: int = 0
    faults: int = 0
    registrations: int = 0


class Counters:
    """Adds up; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = {spec.name: 0 for spec in fields(ClientStats)}

    def add(self, **amounts: int) -> None:
        """Add to the counters of these names."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def read(self, **extra: int) -> ClientStats:
        """A copy of all of them."""
        with self._lock:
            return ClientStats(**(self._values | extra))

    def after_fork(self) -> None:
        """Begin at 0 in a child."""
        self.__init__()  # type: ignore[misc]
