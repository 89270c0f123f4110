"""What a medium and a policy have to offer: read this second, after `types.py`.

The core decides which slot holds which block; a `Tier` stores bytes and decides nothing. A new medium
is one file in `tiers/`, one subclass of `kvtier.testing.tier_tests.TierTests`, one line in `build.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from kvtier.types import BlockId, Slot, TierKind


@dataclass(frozen=True, slots=True)
class TierTraits:
    """What the core must know of a medium.

    Attributes
    ----------
    frees_at_once
        A dropped slot can be reused in the same step (memory). Otherwise its bytes stay charged until
        the node has reported `Dropped`.
    """

    frees_at_once: bool


class Tier(ABC):
    """One medium, divided into extents of `extent_bytes`; each extent serves slots of one size.

    All methods are called from the node's event loop, never two for the same slot at once.
    """

    kind: ClassVar[TierKind]
    traits: ClassVar[TierTraits]

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """The hard cap: a multiple of `extent_bytes`."""

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes that slots may lie in now, from offset 0; grows up to `capacity_bytes`."""

    @property
    @abstractmethod
    def extent_bytes(self) -> int:
        """Size of an extent; no slot is larger."""

    @abstractmethod
    async def open(self) -> None:
        """Make the medium ready; raises `ResourceShortage` or `AlreadyRunning` and leaves nothing behind."""

    @abstractmethod
    async def read(self, slots: Sequence[Slot], into: Sequence[memoryview]) -> None:
        """Fill each buffer from the start of its slot; raises `TierFault`."""

    @abstractmethod
    async def write(self, slots: Sequence[Slot], payloads: Sequence[memoryview]) -> None:
        """Write each payload at the start of its slot; raises `TierFault`."""

    @abstractmethod
    async def drop(self, slots: Sequence[Slot]) -> None:
        """Delete what is there; returns when the slots may be written again."""

    @abstractmethod
    async def close(self) -> None:
        """Release the medium; idempotent."""


@runtime_checkable
class Mapped(Protocol):
    """A tier whose slots are memory of this process."""

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes themselves, writable; valid until `close`."""
        ...


@runtime_checkable
class Growing(Protocol):
    """A tier that opens below its cap and gains bytes later."""

    def grow(self) -> int:
        """Take what has become free, never beyond the cap; returns the new `allocated_bytes`."""
        ...


class Policy(Protocol):
    """Which block goes first. One instance per tier and slot size, told by the core in the core's step.

    Only *candidates* may be named: resident leaves (no resident or pending child in the tier) that no
    lease, hold, pin or reservation protects. The core adds a block when it becomes one and withdraws it
    when it ceases to be one. A candidate is never accessed: whatever reads or continues a block protects
    it first, so an access shows when the block is added again.
    """

    def add(self, block: BlockId, accessed: int) -> None:
        """`block` is a candidate from now on; its latest access was the core's number `accessed`."""
        ...

    def withdraw(self, block: BlockId) -> None:
        """`block` is no candidate any more, but stays resident."""
        ...

    def forget(self, block: BlockId) -> None:
        """`block`, candidate or not, is no longer resident."""
        ...

    def victim(self) -> BlockId | None:
        """The candidate to go first, still a candidate after the call; None where there is none."""
        ...
