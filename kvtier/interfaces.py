"""What a medium, transport, index, codec and policy have to offer: read this second, after `types.py`.

The core decides which slot holds which block; a `Tier` stores bytes and decides nothing, a `Transfer`
moves bytes between nodes, an `Index` says which nodes may have what. A new medium is one file in
`tiers/`, one subclass of `kvtier.testing.tier_tests.TierTests`, one line in `build.py`; likewise
`transfer/` with `TransferTests` and `index/` with `IndexTests`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from kvtier.types import BlockId, BlockRecord, Location, NodeRecord, Slot, TierKind


@dataclass(frozen=True, slots=True)
class TierTraits:
    """What the core must know of a medium.

    Attributes
    ----------
    frees_at_once
        A dropped slot can be reused in the same step (memory). Otherwise its bytes stay charged until
        the node has reported `Dropped`.
    header_bytes
        Space that the medium needs in front of each block: a slot for blocks of a layout has
        ``layout.slot_bytes + header_bytes`` there.
    outlives
        Blocks are still there when the node starts again (`Durable`).
    """

    frees_at_once: bool
    header_bytes: int = 0
    outlives: bool = False


class Tier(ABC):
    """One medium, divided into extents of `extent_bytes`; each extent serves slots of one size.

    All methods are called from the node's event loop, never two for the same slot at once. A write of
    another slot size into an extent ends what was in it: all of it has been dropped before.

    When `read` or `write` returns or raises, cancellation included, nothing reads or writes the buffers any
    more. So they may take as long as the medium does: it is the caller who stops waiting, and who keeps
    slots and buffers until they have ended.
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
    async def read(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], into: Sequence[memoryview]
    ) -> list[int]:
        """Fill the first `block_bytes` of each buffer with the block in its slot.

        Returns
        -------
        list of int
            Positions whose slot does not hold what the record says, as far as the medium can tell, in
            order; their buffers hold anything.

        Raises
        ------
        TierFault
            The medium failed; all buffers hold anything.
        """

    @abstractmethod
    async def write(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], payloads: Sequence[memoryview]
    ) -> None:
        """Put the first `block_bytes` of each payload into its slot, with the record.

        The checksums are those of the records, computed by whoever made the bytes.

        Raises
        ------
        TierFault
            The medium failed: nothing is known of these slots, and they have to be dropped.
        """

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


@runtime_checkable
class Durable(Protocol):
    """A tier whose blocks are still there when the node starts again."""

    def recovered(self) -> Iterator[list[tuple[Slot, BlockRecord]]]:
        """What `open` found, in batches; to be taken once, before anything is written."""
        ...

    async def checkpoint(self) -> None:
        """Write down where everything lies, so that the next `open` is quick; raises `TierFault`."""
        ...


@runtime_checkable
class Failing(Protocol):
    """A tier whose medium can stop working, or answering, and come back."""

    @property
    def fault(self) -> str:
        """Why the tier is quarantined: every use of it is a `TierFault` at once. Empty: all is well."""
        ...

    async def probe(self) -> bool:
        """Try whether the medium works again; True if the tier is not quarantined any more."""
        ...


@runtime_checkable
class Metered(Protocol):
    """A tier whose medium wears: bytes that it has read and written since `open`, everything included."""

    @property
    def read_bytes(self) -> int: ...  # noqa: D102

    @property
    def written_bytes(self) -> int: ...  # noqa: D102

    @property
    def written_today_bytes(self) -> int:
        """Since midnight UTC, by earlier daemons too: what endurance is given in."""
        ...


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where a block's own bytes lie on a medium, for whoever moves them past this process's memory.

    Attributes
    ----------
    path
        A file or block device, to be opened by name.
    identity
        Device and inode of what the tier itself has open there: another one is not to be touched.
    offset_bytes, size_bytes
        Whole pages, behind the slot's header of `header_bytes`, which stays the tier's affair.
    """

    path: Path
    identity: tuple[int, int]
    offset_bytes: int
    size_bytes: int
    header_bytes: int


Put = Callable[[Sequence[FileRange]], Awaitable[Sequence[int]]]
"""Moves the bytes of blocks into these ranges; returns the positions that were moved whole."""


@runtime_checkable
class OnFiles(Protocol):
    """A tier whose slots are ranges of files, which others may move bytes to and from."""

    def ranges(self, slots: Sequence[Slot], records: Sequence[BlockRecord]) -> list[FileRange | None]:
        """Where to read each block; None where its bytes do not lie there as they are, or nothing does.

        Nothing of the header is compared: whoever reads compares the checksum. Raises `TierFault`.
        """
        ...

    async def write_by(self, slots: Sequence[Slot], records: Sequence[BlockRecord], put: Put) -> list[int]:
        """As `Tier.write`, but `put` moves the blocks; returns the positions that are there now.

        The other slots hold nothing. When this ends `put` has ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class Remote:
    """The other side of a transfer: a peer's arena under one lease.

    Attributes
    ----------
    node, incarnation
        Which peer, and which life of it: state of an earlier incarnation is never used.
    address
        ``host:port`` of its peer service.
    arena, base_address
        The arena that offsets refer to, and where it begins in the peer's own memory (what NIXL registered).
    metadata
        What the peer's transfer of the same name published; empty where it needs none.
    lease
        Under which the peer keeps the slots.
    """

    node: str
    incarnation: int
    address: str
    arena: int
    base_address: int
    metadata: bytes
    lease: int


class Transfer(ABC):
    """Pulls bytes out of peers' arenas into this node's own.

    All methods are called from the node's event loop; `pull` may run several times at once. What blocks
    runs in threads of the transfer's own.
    """

    name: ClassVar[str]

    @abstractmethod
    async def open(self, memory: memoryview) -> None:
        """Make `memory`, the whole arena, readable for peers and writable for pulls.

        Raises
        ------
        Unavailable
            It cannot work on this machine; says why. Nothing is left behind.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer needs to pull from here (at most 64 KiB); empty where it needs nothing."""

    @abstractmethod
    async def pull(
        self,
        remote: Remote,
        sources: Sequence[int],
        sizes: Sequence[int],
        into: Sequence[int],
        timeout_s: float,
    ) -> None:
        """Copy ``sizes[i]`` bytes at ``sources[i]`` of the peer's arena to ``into[i]`` of the own (offsets).

        When this returns or raises, cancellation included, nothing writes to `into` any more: a transport
        that cannot cancel destroys whatever still could write before it lets go.

        Raises
        ------
        TransferFault
            Not all bytes are there: the peer died, does not answer, refused, or the time was over.
        """

    @abstractmethod
    async def serve(self, seconds: float) -> None:
        """Peers may pull from here during the next `seconds`: give the transport what it needs to answer."""

    @abstractmethod
    async def forget(self, node: str) -> None:
        """Drop all that is known of a peer (it died, or begins anew); idempotent."""

    @abstractmethod
    async def close(self) -> None:
        """Nothing is written or read by this transfer any more when this returns; idempotent."""


class Index(ABC):
    """Which nodes may hold which blocks, and which nodes there are: a hint, shared by all nodes.

    Every method may raise `IndexFault`: it cannot be reached, or did not answer within its bound. What is
    read was written by anybody: entries that are not well-formed are left out, never raised.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def garbage(self) -> int:
        """How many values have been read that no node can have written."""

    @abstractmethod
    async def open(self) -> None:
        """Connect; raises `ConfigError` where the address can never work."""

    @abstractmethod
    async def register(self, record: NodeRecord) -> int:
        """Begin a life of a node: returns its incarnation, at least ``record.incarnation`` and larger than
        any that the index knows of this node. From then on an older one is fenced.
        """

    @abstractmethod
    async def heartbeat(self, record: NodeRecord) -> bool:
        """Say that the node lives; False where the index had lost it (publish everything anew).

        Raises
        ------
        Fenced
            A younger incarnation, or another instance of this one, is registered.
        """

    @abstractmethod
    async def leave(self, record: NodeRecord) -> None:
        """The node stops: it is no longer listed. Does nothing if another incarnation is registered."""

    @abstractmethod
    async def nodes(self) -> list[NodeRecord]:
        """Every node whose last heartbeat is not too old."""

    @abstractmethod
    async def publish(self, record: NodeRecord, blocks: Sequence[BlockId], tier: TierKind) -> None:
        """`record` has these blocks in `tier`; renews those that are published already.

        A node has one tier for each block, the one published last, and HBM besides: what its engines have in
        their own memory is told, withdrawn and found apart (`in_hbm`), since nobody can load it from there.
        """

    @abstractmethod
    async def withdraw(self, record: NodeRecord, blocks: Sequence[BlockId], *, in_hbm: bool = False) -> None:
        """`record` no longer has these blocks in any tier but HBM; `in_hbm`: in HBM."""

    @abstractmethod
    async def find(self, blocks: Sequence[BlockId], *, in_hbm: bool = False) -> list[tuple[Location, ...]]:
        """Where each of these blocks may lie, in HBM alone or anywhere else: one entry for each, in order."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect; idempotent."""


@runtime_checkable
class Dated(Protocol):
    """An index whose server tells the time."""

    def now_s(self) -> float | None:
        """The server's wall clock, to about a second; None where it has not been heard yet."""


class Codec(ABC):
    """How a block's bytes are made smaller, for a medium or a link that is slower than doing so.

    Thread-safe; all that it keeps is bounded. What `decode` gives is what `encode` was given, bit for bit.

    Attributes
    ----------
    wire_id
        0 .. 255, in headers on disk and on the wire; never reused. 0 is "as it is".
    is_lossy
        Works on blocks alone that have been rounded before they were committed (`kvtier.codecs.lossy_fp8`),
        under keys that exact blocks never have.
    """

    name: ClassVar[str]
    wire_id: ClassVar[int]
    is_lossy: ClassVar[bool] = False

    @abstractmethod
    def encode(self, blocks: Sequence[memoryview]) -> list[bytes | None]:
        """For each block its payload; None where that would not be smaller by `kvtier.codecs.MIN_GAIN`:
        such a block is kept as it is, as `wire_id` 0.
        """

    @abstractmethod
    def decode(self, payload: memoryview, into: memoryview) -> None:
        """Fill `into`, which has exactly the size of the block, from what `encode` returned.

        One block a call, since a damaged one concerns no other. `payload` is not believed: no size in it
        leads to a read beyond it, a write beyond `into` or an allocation larger than a chunk.

        Raises
        ------
        Corruption
            It is not a payload of this codec for a block of this size; `into` holds anything.
        """


class Policy(Protocol):
    """Which block goes first. One instance per tier and slot size, told by the core in the core's step.

    Only *candidates* may be named: resident leaves (no resident or pending child in the tier) that no
    lease, hold, pin or reservation protects. The core adds a block when it becomes one and withdraws it
    when it ceases to be one. A candidate is never accessed: whatever reads or continues a block protects
    it first, so an access shows when the block is added again.

    A call costs O(log n) amortised at most, however much is resident. A new policy is one file in
    `core/policies/`, and one line in its `registry`.
    """

    def came(self, block: BlockId) -> None:
        """`block` is resident from now on; it may become a candidate."""
        ...

    def add(self, block: BlockId, accessed: int, uses: int, depth: int, after: BlockId | None = None) -> None:
        """`block` is a candidate from now on.

        Parameters
        ----------
        accessed
            The core's number of its latest access.
        uses
            How often a prompt has come by it since it came: it was read, stored again though it was here, or
            continued anew; never falls.
        depth
            How many blocks of its prompt come before it; the same each time.
        after
            The last block that continued it, which has just gone: `forget` follows. None: it is a candidate
            for another reason.
        """
        ...

    def withdraw(self, block: BlockId) -> None:
        """`block` is no candidate any more, but stays resident."""
        ...

    def forget(self, block: BlockId) -> None:
        """`block`, candidate or not, is no longer resident."""
        ...

    def victim(self) -> BlockId | None:
        """The candidate to go first, still a candidate after the call; None where there is none.

        Asked again before anything else is told, it answers the same.
        """
        ...

    def turn(self, block: BlockId, accessed: int, uses: int, depth: int) -> float:
        """When this resident block should go, as far as is known now: smaller is earlier.

        The parameters are those of `add`. Demotes follow it, and admission to a tier that is full compares by
        it; turns of the policies of two tiers can be compared, since accesses are numbered alike.
        """
        ...

    def check(self, candidates: Mapping[BlockId, int], residents: Set[BlockId]) -> None:
        """Assert that exactly these blocks are candidates, each with the number of its latest access, and
        that all else that is remembered is bounded by what is resident.
        """
        ...
