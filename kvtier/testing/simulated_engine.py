"""The engines' side of the simulator: what a process does to its node, in all the ways it goes wrong.

Tasks are generators: they yield `Sleep` or `Call` and get the answer back. A call's answer is a reply,
a fault of `kvtier.errors`, or None where no answer came in time.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier.core import messages as m
from kvtier.errors import UnknownId
from kvtier.testing.simulated_node import CORRUPT, SimulatedNode, Violation, Writer, content, pages_of
from kvtier.types import BlockId, Key, Layout, LayoutKind, LayoutOrder, Slot

_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Sleep:
    """Go on after so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """Send a request and wait for the answer, repeating it where none comes."""

    request: m.Request


Task = Generator[Sleep | Call, Any, None]


def make_layout(pages: int) -> Layout:
    """Blocks that take `pages` pages."""
    return Layout(LayoutKind.MLA, 1, 1, 4096 * pages, "uint8", 1, LayoutOrder.NHD, 4096 * pages)


def make_chain(layout: Layout, branches: Sequence[int]) -> list[Key]:
    """The keys of the prompt that takes these turns."""
    key = layout.fingerprint()
    keys: list[Key] = []
    for branch in branches:
        key = hashlib.sha256(key + bytes([branch])).digest()
        keys.append(key)
    return keys


class SimulatedEngine:
    """One process: registers, stores and loads until it dies."""

    def __init__(
        self, name: str, layout: Layout, shards: int, node: SimulatedNode, rng: random.Random
    ) -> None:
        self.name = name
        self.layout = layout
        self.shards = shards
        self.fingerprint = layout.fingerprint()
        self.node = node
        self.rng = rng
        self.mute = False
        self.dead = False
        self.loaded = 0

    def call_id(self) -> bytes:
        """16 bytes that nobody else draws."""
        return self.rng.randbytes(16)

    def prompt(self) -> list[Key]:
        """One of many prompts that share beginnings."""
        length = self.rng.choice((1, 2, 4, 8, 12))
        return make_chain(self.layout, [min(2, int(self.rng.expovariate(1.2))) for _ in range(length)])

    def register(self) -> Task:
        """Make the node know this engine, again after a restart."""
        event = m.RegisterEngine(
            self.call_id(),
            self.name,
            self.layout,
            self.fingerprint,
            "simulated",
            maps_device=self.node.device is not None,
        )
        yield Call(event)

    def work(self) -> Task:
        """One store or one load."""
        return self.load() if self.rng.random() < 0.6 else self.store()

    def _pause(self, *, may_stall: bool) -> Sleep:
        if may_stall and self.rng.random() < 0.02:
            return Sleep(self.rng.uniform(0, 3 * self.node.config.reservation_ttl_s))
        return Sleep(self.rng.expovariate(50))

    # ---- store

    def store(self) -> Task:
        """Reserve, copy, commit; or fail in one of the ways that copies fail."""
        keys, shard = self.prompt(), self.rng.randrange(self.shards)
        first = self.rng.choice((0, 0, 0, len(keys) // 2))
        parent = keys[first - 1] if first else None
        keys = keys[first:]
        reply = yield Call(m.Reserve(self.call_id(), self.name, parent, keys, shard, self.fingerprint))
        if not isinstance(reply, m.Reserved):
            yield from self._after_fault(reply)
            return
        granted = [(key, slot) for key, slot in zip(keys, reply.slots, strict=True) if slot is not None]
        if not granted:
            return
        fate = self.rng.choices(("commit", "abort", "lost", "dead letter"), (12, 2, 1, 1))[0]
        writer = (self, self.rng.getrandbits(32))
        for _, slot in granted:
            self.node.copy_begins(slot, writer)
        for key, slot in granted:
            yield from self._copy(BlockId(key, shard), slot, writer, lost=fate == "lost")
        for _, slot in granted:
            self.node.copy_ends(slot, writer)
        if fate in ("lost", "dead letter"):
            return
        names = [key for key, _ in granted]
        left = (yield from self._commit(reply.reservation, names)) if fate == "commit" else names
        if left:
            some = left if self.rng.random() < 0.3 else []
            yield Call(m.Abort(self.call_id(), self.name, reply.reservation, some))

    def _copy(self, block: BlockId, slot: Slot, writer: Writer, *, lost: bool) -> Task:
        for number, page in enumerate(pages_of(slot)):
            yield self._pause(may_stall=True)
            if lost:
                yield Sleep(self.rng.uniform(0, 2 * self.node.config.reservation_ttl_s))
            if slot.arena == self.node.incarnation or page[0] in self.node.arenas:
                self.node.write(page, content(block, number), writer)

    def _commit(self, reservation: int, keys: list[Key]) -> Generator[Sleep | Call, Any, list[Key]]:
        batches = [keys] if self.rng.random() < 0.6 else [[key] for key in keys]
        if self.rng.random() < 0.3:
            self.rng.shuffle(batches)
        left = list(keys)
        for batch in batches:
            if self.rng.random() < 0.05:
                continue
            checksums = [key[:16] for key in batch]
            reply = yield Call(m.Commit(self.call_id(), self.name, reservation, batch, checksums))
            if isinstance(reply, m.Committed):
                left = [key for key in left if key not in batch]
            yield self._pause(may_stall=False)
        return left

    # ---- load

    def load(self) -> Task:
        """Lookup, load, copy, release; what is reported valid must be what was committed."""
        keys = self.prompt()
        request = f"{self.name}/{self.rng.getrandbits(64):x}"
        shards = self.rng.randint(1, self.shards)
        for _ in range(self.rng.choice((1, 1, 1, 2))):
            compute_s = 0.0
            if self.node.below is not None:
                compute_s = self.rng.choice((0.0, 0.0, 0.1, 1e-6))
            reply = yield Call(m.Lookup(self.name, request, keys, shards, self.fingerprint, compute_s))
            if not isinstance(reply, m.Offered) or not reply.blocks:
                yield from self._after_fault(reply)
                return
            yield Sleep(self.rng.expovariate(2 / self.node.config.hold_ttl_s))
        if self.rng.random() < 0.1:
            yield Call(m.Release(self.call_id(), self.name, request=request))
            return
        for shard in range(shards):
            yield from self._load_shard(request, keys[: reply.blocks], shard)

    def _load_shard(self, request: str, keys: list[Key], shard: int) -> Task:
        reply = yield Call(m.Load(self.call_id(), self.name, request, keys, shard))
        if not isinstance(reply, m.Leased) or not reply.lease:
            yield from self._after_fault(reply)
            return
        if self.rng.random() < 0.03:
            return
        wrong: dict[Key, list[object]] = {}
        slots = reply.slots
        if reply.copies:
            both = zip(reply.slots, reply.copies, strict=True)
            slots = [slot if copy is None or self.rng.random() < 0.2 else copy for slot, copy in both]
        yield from self._read(keys, slots, reply.checksums, shard, wrong)
        told = len(reply.slots)
        if reply.coming:
            told = yield from self._read_what_comes(reply, keys, shard, wrong)
        if self.rng.random() < 0.15:
            yield Sleep(self.rng.uniform(0, 3 * self.node.config.lease_ttl_s))
        release = m.Release(self.call_id(), self.name, reply.lease, None, list(wrong), shard)
        ended = yield Call(release)
        if isinstance(ended, m.Released) and ended.valid:
            self.loaded += told - len(wrong)
            for key, tokens in wrong.items():
                if CORRUPT not in tokens:
                    raise Violation(f"a valid load of {key.hex()[:8]} returned {tokens}")

    def _read(
        self,
        keys: Sequence[Key],
        slots: Sequence[Slot],
        checksums: Sequence[bytes],
        shard: int,
        wrong: dict[Key, list[object]],
    ) -> Task:
        for key, slot, checksum in zip(keys, slots, checksums, strict=False):
            yield self._pause(may_stall=True)
            tokens = [self.node.read(page) for page in pages_of(slot)]
            expected = [content(BlockId(key, shard), number) for number in range(len(tokens))]
            if tokens != expected or checksum != key[:16]:
                wrong[key] = tokens

    def _read_what_comes(
        self, leased: m.Leased, keys: Sequence[Key], shard: int, wrong: dict[Key, list[object]]
    ) -> Generator[Sleep | Call, Any, int]:
        """Read blocks as their slots are told, until all are, or the lease's time is over."""
        told, waited_s, seen = len(leased.slots), 0.0, 0
        while waited_s < leased.lease_ttl_s:
            readies = self.node.readies.get(leased.lease, [])
            for ready in readies[seen:]:
                yield from self._read(keys[ready.first :], ready.slots, ready.checksums, shard, wrong)
                told = ready.first + len(ready.slots)
                if ready.is_last:
                    return told
            seen = len(readies)
            yield Sleep(_POLL_S)
            waited_s += _POLL_S
        return told

    def _after_fault(self, reply: object) -> Task:
        if isinstance(reply, UnknownId) and "register" in str(reply):
            yield from self.register()
