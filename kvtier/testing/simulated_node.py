"""The node's side of the simulator: the real core, modelled arenas, and what must never happen.

An arena is a list of pages; each page holds a token that says whose bytes it has. Slots of different
sizes overlap in pages, exactly as they do in memory, so a slot that is used twice at once shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvtier.core import messages as m
from kvtier.core.cache import CacheCore
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.core.policies import POLICIES
from kvtier.errors import KvtierError
from kvtier.types import PAGE_SIZE_BYTES, BlockId, BlockRecord, Key, Slot, TierKind

CORRUPT: Final = "corrupt"
Token = object
PageId = tuple[int, int]
Writer = tuple[object, int]
"""The engine or daemon, and a number for each of its copies."""
DISK: Final = 1 << 20
"""Arena of the last tier, which no restart empties."""
FAR: Final = DISK + 1
"""Arena of far memory, which every restart empties."""
DEVICE: Final = DISK + 2
"""Arena of device memory, which has second copies, and which every restart empties."""


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
    """A lease that the core has given and that is valid as far as anybody outside can know.

    `copies`: those of its blocks that it was told a slot in device memory of, too.
    """

    engine: str
    blocks: list[BlockId]
    pages: set[PageId]
    deadline_s: float
    copies: set[BlockId]


@dataclass(slots=True, eq=False)
class Reading:
    """A demote or fetch that reads slots, which nobody may write before it ends."""

    blocks: dict[BlockId, set[PageId]]
    all: list[Reading]

    def end(self) -> None:
        """It reads no more."""
        self.all.remove(self)


@dataclass(slots=True)
class LiveHold:
    """An offer: a load of these keys must find at least `blocks` of them until `deadline_s`."""

    keys: list[Key]
    blocks: int
    deadline_s: float


class SimulatedNode:
    """One daemon after another on one machine; arenas of earlier ones stay mapped by engines."""

    def __init__(
        self,
        rng: random.Random,
        config: CoreConfig,
        tier: TierSpec,
        below: TierSpec | None = None,
        far: TierSpec | None = None,
        policy: str = "lru",
        device: TierSpec | None = None,
    ) -> None:
        self.rng = rng
        self.config = config
        self.tier = tier
        self.below = below
        self.far = far
        self.device = device
        self.policy = policy
        self.incarnation = 0
        self.arenas: dict[int, list[Token]] = {}
        self.headers: dict[Slot, BlockRecord] = {}
        self.torn: set[Slot] = set()
        self.readings: list[Reading] = []
        if below is not None:
            self.arenas[DISK] = ["empty"] * (below.capacity_bytes // PAGE_SIZE_BYTES)
        self.writers: dict[PageId, Writer] = {}
        self.counts: dict[str, int] = {}
        self.start()

    def start(self, now_s: float = 0.0) -> None:
        """A new daemon with an empty cache and a new arena; it may get all of its bytes only later.

        Its tier below has what it had, as far as it was written down.
        """
        self.incarnation += 1
        self.daemon = object()
        self.writers = {page: writer for page, writer in self.writers.items() if page[0] < DISK}
        self.readings.clear()
        self.is_told_down = False
        whole = self.tier.capacity_bytes // self.tier.extent_bytes
        extents = self.rng.randint(max(1, whole // 2), whole)
        tier = replace(self.tier, arena=self.incarnation, allocated_bytes=extents * self.tier.extent_bytes)
        self.arenas[self.incarnation] = ["empty"] * (self.tier.capacity_bytes // PAGE_SIZE_BYTES)
        if self.incarnation > 1 and self.rng.random() < 0.5:
            self.arenas[self.incarnation - 1][:] = ["punched"] * len(self.arenas[self.incarnation - 1])
        tiers = [its for its in (tier, self.below, self.far, self.device) if its is not None]
        if self.device is not None:
            self.arenas[DEVICE] = ["empty"] * (self.device.capacity_bytes // PAGE_SIZE_BYTES)
        if self.far is not None:
            self.arenas[FAR] = ["empty"] * (self.far.capacity_bytes // PAGE_SIZE_BYTES)
        self.core = CacheCore(self.config, tiers, POLICIES[self.policy], seed=self.incarnation)
        self.replies: dict[tuple[str, bytes], m.Action] = {}
        self.leases: dict[int, LiveLease] = {}
        self.void: set[int] = set()  # leases of which the core has to say that they are not valid
        self.holds: dict[str, LiveHold] = {}
        self.fetches: dict[int, tuple[m.Fetch, int]] = {}
        self.demotes: dict[int, m.Demote] = {}
        self.readies: dict[int, list[m.Ready]] = {}
        if self.below is not None:
            self._recover(now_s)

    def _recover(self, now_s: float) -> None:
        """What the disk holds, in any order; some of it was never written down, or is told twice."""
        found = [item for item in self.headers.items() if self.rng.random() < 0.95]
        self.rng.shuffle(found)
        found += found[: self.rng.choice((0, 0, 2))]
        while found:
            batch, found = found[:5], found[5:]
            self.handle(m.Recovered(TierKind.NVME, batch, is_last=False), now_s, check=False)
        self.handle(m.Recovered(TierKind.NVME, [], is_last=True), now_s, check=False)

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
            if isinstance(action, m.Drop | m.Verify | m.Lost | m.Fetch | m.Demote):
                instructions.append(action)
            elif isinstance(action, m.Ready):
                self._ready(action)
            else:
                reply = action
        self._ended(event, reply)
        for instruction in instructions:
            if isinstance(instruction, m.Lost):
                self._lost(instruction)
            elif isinstance(instruction, m.Fetch | m.Demote):
                self._copies(instruction)
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
        for reading in self.readings:
            if any(page in pages for pages in reading.blocks.values()):
                raise Violation(f"a copy runs into page {page}, which another copy reads")
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

    def reads(self, slots: Sequence[Slot], records: Sequence[BlockRecord]) -> Reading:
        """A demote or fetch begins to read these slots."""
        pages = [set(pages_of(slot)) for slot in slots]
        blocks = {record.block: its for record, its in zip(records, pages, strict=True)}
        reading = Reading(blocks, self.readings)
        self.readings.append(reading)
        return reading

    # ---- what must hold

    def _before(self, event: m.Event, now_s: float) -> None:
        if isinstance(event, m.Tick):
            for id in [id for id, lease in self.leases.items() if lease.deadline_s <= now_s]:
                del self.leases[id]
        elif isinstance(event, m.PullEnded):
            fetch, _ = self.fetches[event.pull]
            wrong = {BlockId(key, fetch.records[0].block.shard) for key in event.wrong}
            self._count("wrong", len(wrong))
            self._read_no_more(wrong, fetch.sources[0].arena)
        elif isinstance(event, m.Demoted):
            demote = self.demotes.pop(event.demote)
            if demote.source is not TierKind.DRAM:  # there it is verified once more before it goes
                wrong = {demote.records[i].block for i in event.corrupt}
                self._count("wrong", len(wrong))
                self._read_no_more(wrong, demote.sources[0].arena)

    def _ended(self, event: m.Event, reply: m.Action | None) -> None:
        """What the event itself ends is over before its instructions are judged: they may use its slots."""
        if isinstance(event, m.EngineDied):
            self.replies = {k: v for k, v in self.replies.items() if k[0] != event.engine}
            self.leases = {k: v for k, v in self.leases.items() if v.engine != event.engine}
        elif isinstance(event, m.Release) and isinstance(reply, m.Released):
            if (event.engine, event.call_id) in self.replies:
                return  # a repeat: what was meant is over, and there may be other leases by now
            if event.lease is not None:
                self.leases.pop(event.lease, None)
                if reply.valid and event.lease in self.void:
                    raise Violation("a lease of a copy that was found to be wrong is valid")
            if self.device is not None:
                self._suspect({BlockId(key, event.shard) for key in event.corrupt_keys})

    def _after(self, event: m.Event, reply: m.Action | None, now_s: float) -> None:
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
                if event.request is not None:
                    self.holds.pop(event.request, None)
            case m.Reserve(), m.Reserved():
                self._granted(reply)
            case m.Arrived(), _:
                fetch, arrived = self.fetches[event.pull]
                self.fetches[event.pull] = (fetch, arrived + len(event.checksums))
                self._count("fetched", len(event.checksums))
            case m.Overdue() | m.PullEnded(), _:
                self._cut(event)
            case m.Demoted(), _:
                self._count("demoted", len(event.written))
            case m.Evict(), m.Evicted():
                self._count("evicted by hand", reply.blocks)

    def _loaded(self, event: m.Load, reply: m.Leased, now_s: float) -> None:
        hold = self.holds.get(event.request)
        if hold is not None and now_s < hold.deadline_s:
            asked = [key == held for key, held in zip(event.keys, hold.keys[: hold.blocks], strict=False)]
            if all(asked) and len(reply.slots) + reply.coming < len(asked):
                raise Violation(f"{len(asked)} blocks were held, {len(reply.slots)} are here")
        if reply.lease and reply.lease not in self.leases:
            blocks = [BlockId(key, event.shard) for key in event.keys[: len(reply.slots)]]
            copies = [copy for copy in reply.copies if copy is not None]
            self._count("told copies", len(copies))
            pages = {page for slot in (*reply.slots, *copies) for page in pages_of(slot)}
            twins = {block for block, copy in zip(blocks, reply.copies, strict=False) if copy is not None}
            deadline_s = now_s + reply.lease_ttl_s
            self.leases[reply.lease] = LiveLease(event.engine, blocks, pages, deadline_s, twins)

    def _suspect(self, blocks: set[BlockId]) -> None:
        """Copies of these are given up, and whoever was told of them has to be told that it read nothing."""
        self._count("suspected", len(blocks))
        void = [id for id, lease in self.leases.items() if not blocks.isdisjoint(lease.copies)]
        for id in void:
            del self.leases[id]
        self.void.update(void)

    def _ready(self, ready: m.Ready) -> None:
        """More of a lease has come: it is protected like the rest."""
        self.readies.setdefault(ready.lease, []).append(ready)
        lease = self.leases.get(ready.lease)
        if lease is not None:
            for slot in ready.slots:
                lease.pages.update(pages_of(slot))

    def _granted(self, reply: m.Reserved) -> None:
        for slot in reply.slots:
            if slot is not None:
                self._count("granted")
                self._given(slot)

    def _given(self, slot: Slot) -> None:
        """Somebody may write the slot from now on, so nobody else may write or read it."""
        pages = set(pages_of(slot))
        if pages & self.writers.keys():
            raise Violation(f"slot {slot} was granted while a copy into it still runs")
        for lease in self.leases.values():
            if pages & lease.pages:
                raise Violation(f"slot {slot} was granted while it is leased")
        for reading in self.readings:
            if any(pages & its for its in reading.blocks.values()):
                raise Violation(f"slot {slot} was granted while it is being copied")

    def _copies(self, action: m.Fetch | m.Demote) -> None:
        if self.is_told_down and action.tier is TierKind.NVME:
            raise Violation(f"{type(action).__name__} while the tier is down")
        for slot in action.slots:
            self._given(slot)
        self._count(f"{type(action).__name__} begun")
        if isinstance(action, m.Fetch):
            self._count(f"{action.tier.name} to DRAM")
            self.fetches[action.pull] = (action, 0)
        else:
            self._count(f"{action.source.name} to {action.tier.name}")
            self.demotes[action.demote] = action

    def _cut(self, event: m.Overdue | m.PullEnded) -> None:
        """What was on its way does not come: no offer of it holds any longer."""
        fetch, arrived = self.fetches[event.pull]
        gone = {record.block.key for record in fetch.records[arrived:]}
        self.holds = {id: hold for id, hold in self.holds.items() if gone.isdisjoint(hold.keys)}
        if isinstance(event, m.PullEnded):
            del self.fetches[event.pull]
            shard = fetch.records[0].block.shard
            places = [its for its in self.core.places(event.wrong) if its.tier is fetch.tier]
            if any(its.block.shard == shard for its in places):
                raise Violation("a block that was found to be wrong is still there")

    def _read_no_more(self, blocks: set[BlockId], arena: int) -> None:
        """These were found to be wrong: their slots may go to others while somebody still reads them."""
        for reading in self.readings:
            for block in blocks & reading.blocks.keys():
                if any(page[0] == arena for page in reading.blocks[block]):
                    del reading.blocks[block]

    def _lost(self, lost: m.Lost) -> None:
        self._count("lost", len(lost.blocks))
        self._read_no_more(set(lost.blocks), self.incarnation)
        for block in lost.blocks:
            self.leases = {id: lease for id, lease in self.leases.items() if block not in lease.blocks}
            self.holds = {id: hold for id, hold in self.holds.items() if block.key not in hold.keys}

    def corrupt_something(self) -> None:
        """A bit flips in a page that holds a block."""
        number = self.incarnation
        if self.below is not None and self.rng.random() < 0.5:
            number = DISK
        if self.far is not None and self.rng.random() < 0.3:
            number = FAR
        if self.device is not None and self.rng.random() < 0.3:
            number = DEVICE
        arena = self.arenas[number]
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
            if slot.arena == DISK:
                self.forget_headers(slot)
            for page in pages_of(slot):
                self.write(page, "deleted", (self, 0))

    def forget_headers(self, slot: Slot) -> None:
        """Nothing of what lies in these pages of the disk is whole any more."""
        pages = set(pages_of(slot))
        for other in [other for other in {*self.headers, *self.torn} if pages & set(pages_of(other))]:
            self.headers.pop(other, None)
            self.torn.discard(other)

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
        for residency in self.core.residencies:
            for tier_map in residency.tiers.values():
                if len(tier_map.free_extents) != len(tier_map.extents):
                    raise Violation("an extent was not given back")
            if any(residency.shards.values()):
                raise Violation("a ghost is left at the end")
