"""The node's side of the simulator: the real core, modelled arenas, and what must never happen.

An arena is a list of pages; each page holds a token that says whose bytes it has. Slots of different
sizes overlap in pages, exactly as they do in memory, so a slot that is used twice at once shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Final

from kvtier.core import messages as m
from kvtier.core.cache import CacheCore
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.errors import KvtierError
from kvtier.types import PAGE_SIZE_BYTES, BlockId, Key, Slot, TierKind

CORRUPT: Final = "corrupt"
Token = object
PageId = tuple[int, int]
Writer = tuple[object, int]
"""The engine, and a number for each of its copies."""


class Violation(AssertionError):
    """The core broke a promise."""


def pages_of(slot: Slot) -> list[PageId]:
    """Arena and number of each page of a slot."""
    first = slot.offset_bytes // PAGE_SIZE_BYTES
    return [(slot.arena, first + i) for i in range(slot.size_bytes // PAGE_SIZE_BYTES)]


def content(block: BlockId, page: int) -> Token:
    """What page `page` of a block holds if everything is right."""
    return (block.key, block.shard, page)


@dataclass(slots=True)
class LiveLease:
    """A lease that the core has given and that is valid as far as anybody outside can know."""

    engine: str
    blocks: list[BlockId]
    pages: set[PageId]
    deadline_s: float


@dataclass(slots=True)
class LiveHold:
    """An offer: a load of these keys must find at least `blocks` of them until `deadline_s`."""

    keys: list[Key]
    blocks: int
    deadline_s: float


class SimulatedNode:
    """One daemon after another on one machine; arenas of earlier ones stay mapped by engines."""

    def __init__(self, rng: random.Random, config: CoreConfig, tier: TierSpec) -> None:
        self.rng = rng
        self.config = config
        self.tier = tier
        self.incarnation = 0
        self.arenas: dict[int, list[Token]] = {}
        self.writers: dict[PageId, Writer] = {}
        self.counts: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        """A new daemon with an empty cache and a new arena; it may get all of its bytes only later."""
        self.incarnation += 1
        whole = self.tier.capacity_bytes // self.tier.extent_bytes
        extents = self.rng.randint(max(1, whole // 2), whole)
        tier = replace(self.tier, arena=self.incarnation, allocated_bytes=extents * self.tier.extent_bytes)
        self.arenas[self.incarnation] = ["empty"] * (self.tier.capacity_bytes // PAGE_SIZE_BYTES)
        if self.incarnation > 1 and self.rng.random() < 0.5:
            self.arenas[self.incarnation - 1][:] = ["punched"] * len(self.arenas[self.incarnation - 1])
        self.core = CacheCore(self.config, [tier], seed=self.incarnation)
        self.replies: dict[tuple[str, bytes], m.Action] = {}
        self.leases: dict[int, LiveLease] = {}
        self.holds: dict[str, LiveHold] = {}

    def handle(self, event: m.Event, now_s: float, *, check: bool = True) -> tuple[Any, list[m.Instruction]]:
        """Let the core handle one event and judge the answer: (reply or fault or None, instructions)."""
        self._count(type(event).__name__)
        self._before(event, now_s)
        try:
            actions = self.core.handle(event, now_s)
        except KvtierError as fault:
            self._count(f"{type(event).__name__} refused")
            if check:
                self.core.check()
            return fault, []
        instructions: list[m.Instruction] = []
        reply: m.Action | None = None
        for action in actions:
            if isinstance(action, m.Drop | m.Verify | m.Lost):
                instructions.append(action)
            else:
                reply = action
        for instruction in instructions:
            if isinstance(instruction, m.Lost):
                self._lost(instruction)
        self._after(event, reply, now_s)
        if check:
            self.core.check()
        return reply, instructions

    def read(self, page: PageId) -> Token:
        """A page of any arena that was ever mapped."""
        return self.arenas[page[0]][page[1]]

    def write(self, page: PageId, token: Token, writer: Writer) -> None:
        """One page of a copy into a slot; two copies into one page at once are a violation."""
        if self.writers.get(page, writer) != writer:
            raise Violation(f"two copies run into page {page}")
        for lease in self.leases.values():
            if page in lease.pages and self.arenas[page[0]][page[1]] != CORRUPT:
                raise Violation(f"a copy runs into page {page}, which is leased")
        self.arenas[page[0]][page[1]] = token

    def copy_begins(self, slot: Slot, writer: Writer) -> None:
        """From now on `writer` may write the slot at any time."""
        for page in pages_of(slot):
            if page in self.writers:
                raise Violation(f"slot at page {page} was given out while a copy into it still runs")
            self.writers[page] = writer

    def copy_ends(self, slot: Slot, writer: Writer) -> None:
        """The copy has completed or its process is proven dead."""
        for page in pages_of(slot):
            if self.writers.get(page) == writer:
                del self.writers[page]

    # ---- what must hold

    def _before(self, event: m.Event, now_s: float) -> None:
        if isinstance(event, m.Tick):
            for id in [id for id, lease in self.leases.items() if lease.deadline_s <= now_s]:
                del self.leases[id]

    def _after(self, event: m.Event, reply: m.Action | None, now_s: float) -> None:
        if isinstance(event, m.EngineDied):
            self.replies = {k: v for k, v in self.replies.items() if k[0] != event.engine}
            self.leases = {k: v for k, v in self.leases.items() if v.engine != event.engine}
        call_id = getattr(event, "call_id", None)
        if call_id is not None and reply is not None:
            name = (getattr(event, "engine", ""), call_id)
            first = self.replies.get(name)
            if first is not None and first != reply:
                raise Violation(f"a repeat of {type(event).__name__} was answered differently")
            if first is not None:
                return
            self.replies[name] = reply
        match event, reply:
            case m.Lookup(), m.Offered():
                self._count("offered blocks", reply.blocks)
                self.holds[event.request] = LiveHold(
                    list(event.keys), reply.blocks, now_s + reply.hold_ttl_s if reply.blocks else now_s
                )
            case m.Load(), m.Leased():
                self._loaded(event, reply, now_s)
            case m.Release(), m.Released():
                if event.lease is not None:
                    self.leases.pop(event.lease, None)
                if event.request is not None:
                    self.holds.pop(event.request, None)
            case m.Reserve(), m.Reserved():
                self._granted(reply)
            case m.Evict(), m.Evicted():
                self._count("evicted by hand", reply.blocks)

    def _loaded(self, event: m.Load, reply: m.Leased, now_s: float) -> None:
        hold = self.holds.get(event.request)
        if hold is not None and now_s < hold.deadline_s:
            asked = [key == held for key, held in zip(event.keys, hold.keys[: hold.blocks], strict=False)]
            if all(asked) and len(reply.slots) < len(asked):
                raise Violation(f"{len(asked)} blocks were held, {len(reply.slots)} are here")
        if reply.lease and reply.lease not in self.leases:
            blocks = [BlockId(key, event.shard) for key in event.keys[: len(reply.slots)]]
            pages = {page for slot in reply.slots for page in pages_of(slot)}
            self.leases[reply.lease] = LiveLease(event.engine, blocks, pages, now_s + reply.lease_ttl_s)

    def _granted(self, reply: m.Reserved) -> None:
        for slot in reply.slots:
            if slot is None:
                continue
            self._count("granted")
            pages = set(pages_of(slot))
            if pages & self.writers.keys():
                raise Violation(f"slot {slot} was granted while a copy into it still runs")
            for lease in self.leases.values():
                if pages & lease.pages:
                    raise Violation(f"slot {slot} was granted while it is leased")

    def _lost(self, lost: m.Lost) -> None:
        self._count("lost", len(lost.blocks))
        for block in lost.blocks:
            self.leases = {id: lease for id, lease in self.leases.items() if block not in lease.blocks}
            self.holds = {id: hold for id, hold in self.holds.items() if block.key not in hold.keys}

    def corrupt_something(self) -> None:
        """A bit flips in a page that holds a block."""
        arena = self.arenas[self.incarnation]
        full = [i for i, token in enumerate(arena) if isinstance(token, tuple)]
        if full:
            self._count("flipped")
            arena[self.rng.choice(full)] = CORRUPT

    def verify(self, instruction: m.Verify) -> bool:
        """Compare a slot with its checksum: intact, or corrupted by a flip; anything else is a violation."""
        tokens = [self.read(page) for page in pages_of(instruction.slot)]
        if CORRUPT in tokens:
            return False
        if tokens != [content(instruction.block, i) for i in range(len(tokens))]:
            raise Violation(f"a resident block's slot holds {tokens[0]!r}")
        return True

    def delete(self, drop: m.Drop) -> None:
        """What a tier does that cannot free at once."""
        for slot in drop.slots:
            for page in pages_of(slot):
                self.write(page, "deleted", (self, 0))

    def bury(self, writer_of: object) -> None:
        """Proof of death: none of this engine's copies goes on."""
        self.writers = {page: writer for page, writer in self.writers.items() if writer[0] is not writer_of}

    def _count(self, name: str, by: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + by

    def assert_empty(self, now_s: float) -> None:
        """After everybody has gone and every time is over: nothing is left behind."""
        stats = self.core.stats()
        for tier in stats.tiers:
            for state in ("resident", "reserved", "quarantined", "draining", "leased", "pinned"):
                if getattr(tier, f"{state}_bytes"):
                    raise Violation(f"{getattr(tier, f'{state}_bytes')} {state} bytes are left at the end")
        if stats.engines or stats.holds or stats.leases or stats.pins:
            raise Violation("engines, holds, leases or pins are left at the end")
        tiers = self.core.residency.tiers[TierKind.DRAM]
        if len(tiers.free_extents) != len(tiers.extents):
            raise Violation("an extent was not given back")
        if any(self.core.residency.shards.values()):
            raise Violation("a ghost is left at the end")
