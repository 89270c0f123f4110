"""A small core and short words for what is said to it; `check()` runs after every event."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from kvtier.core import messages as m
from kvtier.core.blocks import RESIDENT
from kvtier.core.cache import CacheCore
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.core.policies import POLICIES
from kvtier.types import BlockId, Key, Layout, LayoutKind, LayoutOrder, Location, TierKind

T = TypeVar("T")
PAGE = 4096
G, P, B, R = m.ReserveState.GRANTED, m.ReserveState.PRESENT, m.ReserveState.BUSY, m.ReserveState.REFUSED


def make_layout(pages: int = 1, layers: int = 1) -> Layout:
    return Layout(LayoutKind.MLA, layers, 1, PAGE * pages, "uint8", 1, LayoutOrder.NHD, PAGE * pages)


def chain(name: str, length: int, parent: Key = b"") -> list[Key]:
    keys = []
    for i in range(length):
        parent = hashlib.sha256(parent + f"{name}/{i}".encode()).digest()
        keys.append(parent)
    return keys


def checksum(key: Key) -> bytes:
    return key[:16]


def here(node: str, incarnation: int = 1) -> Location:
    """A capital letter: in its lower tier alone."""
    return Location(node.lower(), incarnation, TierKind.NVME if node.isupper() else TierKind.DRAM)


class World:
    policy: ClassVar[str] = "lru"
    """Of those that are made without one; tests that hold whatever the policy are run with each."""

    def __init__(
        self,
        slots: int = 16,
        *,
        extent_pages: int = 4,
        allocated: int | None = None,
        frees_at_once: bool = True,
        layout: Layout | None = None,
        seed: int = 0,
        nvme: int = 0,
        nvme_frees_at_once: bool = False,
        nvme_extent_pages: int = 8,
        outlives: bool = False,
        far: int = 0,
        hbm: int = 0,
        policy: str = "",
        **config: Any,
    ) -> None:
        """`nvme`: slots of a tier below, each with a header of one page before its block; `far`: slots of a
        tier between the two; `hbm`: slots of device memory, which engines then map.
        """
        defaults = {"max_leased_fraction": 1.0, "max_unfinished_fraction": 1.0, "max_pinned_fraction": 1.0}
        top = TierSpec(
            TierKind.DRAM,
            slots * PAGE,
            (slots if allocated is None else allocated) * PAGE,
            extent_pages * PAGE,
            frees_at_once,
            arena=7,
        )
        size = nvme * 2 * PAGE
        below = TierSpec(
            TierKind.NVME,
            size,
            size,
            nvme_extent_pages * PAGE,
            nvme_frees_at_once,
            arena=9,
            header_bytes=PAGE,
            outlives=outlives,
        )
        between = TierSpec(TierKind.FAR, far * PAGE, far * PAGE, extent_pages * PAGE, arena=8)
        device = TierSpec(TierKind.HBM, hbm * PAGE, hbm * PAGE, extent_pages * PAGE, arena=6)
        others = [*([device] if hbm else []), *([below] if nvme else []), *([between] if far else [])]
        self.has_device = bool(hbm)
        tiers = [*others, top]
        made = POLICIES[policy or self.policy]
        self.core = CacheCore(CoreConfig(**{**defaults, **config}), tiers, made, seed=seed)
        self.now_s = 0.0
        self.layouts: dict[str, Layout] = {}
        self.instructions: list[m.Instruction] = []
        self.demotes: list[m.Demote] = []
        self.published: dict[BlockId, TierKind] = {}
        self.in_hbm: set[BlockId] = set()
        self._ids = itertools.count(1)
        self.register("e", layout or make_layout())

    def call_id(self) -> bytes:
        return next(self._ids).to_bytes(16, "little")

    def do(self, event: m.Event) -> Any:
        try:
            actions = self.core.handle(event, self.now_s)
        finally:
            self.core.check()
        self.instructions = [a for a in actions if isinstance(a, m.Instruction)]
        self.demotes += self.told(m.Demote)
        replies = [a for a in actions if not isinstance(a, m.Instruction)]
        assert len(replies) <= 1
        for publish in self.told(m.Publish):
            if publish.tier is TierKind.HBM:
                assert self.in_hbm >= set(publish.removed)
                assert not self.in_hbm & set(publish.added)
                self.in_hbm = self.in_hbm - set(publish.removed) | set(publish.added)
                continue
            for block in publish.removed:
                assert self.published.pop(block) == publish.tier
            for block in publish.added:
                assert block not in self.published
                self.published[block] = publish.tier
        assert not self.core.config.has_index or self.published == self.reachable()
        return replies[0] if replies else None

    def told(self, kind: type[T]) -> list[T]:
        """Instructions of one kind that the last event gave."""
        return [a for a in self.instructions if isinstance(a, kind)]

    def resident(self) -> set[BlockId]:
        shards = self.core.residency.shards.values()
        return {block.id for blocks in shards for block in blocks.values() if block.state == RESIDENT}

    def reachable(self) -> dict[BlockId, TierKind]:
        ids = [BlockId(key, shard) for shard, keys in self.core.ids().items() for key in keys]
        return {id: tier for id in ids if (tier := self.core.tier_of(id)) is not None}

    def register(self, engine: str, layout: Layout, *, maps_device: bool = True) -> m.Registered:
        self.layouts[engine] = layout
        maps = maps_device and self.has_device
        event = m.RegisterEngine(self.call_id(), engine, layout, layout.fingerprint(), maps_device=maps)
        return self.do(event)

    def fingerprint(self, engine: str) -> bytes:
        return self.layouts[engine].fingerprint()

    def reserve(
        self, keys: Sequence[Key], parent: Key | None = None, engine: str = "e", shard: int = 0
    ) -> m.Reserved:
        return self.do(m.Reserve(self.call_id(), engine, parent, keys, shard, self.fingerprint(engine)))

    def commit(self, reservation: int, keys: Sequence[Key], engine: str = "e") -> m.Committed:
        return self.do(m.Commit(self.call_id(), engine, reservation, keys, [checksum(key) for key in keys]))

    def abort(self, reservation: int, keys: Sequence[Key] = (), engine: str = "e") -> m.Aborted:
        return self.do(m.Abort(self.call_id(), engine, reservation, keys))

    def store(
        self, keys: Sequence[Key], parent: Key | None = None, engine: str = "e", shard: int = 0
    ) -> list[m.ReserveState]:
        reserved = self.reserve(keys, parent, engine, shard)
        granted = [key for key, state in zip(keys, reserved.states, strict=True) if state is G]
        if granted:
            self.commit(reserved.reservation, granted, engine)
        return reserved.states

    def lookup(
        self,
        keys: Sequence[Key],
        request: str = "r",
        engine: str = "e",
        shard_count: int = 1,
        compute_s: float = 0.0,
    ) -> m.Offered:
        return self.do(m.Lookup(engine, request, keys, shard_count, self.fingerprint(engine), compute_s))

    def locate(
        self, keys: Sequence[Key], *nodes: Sequence[str] | str, first: int | None = None, **options: Any
    ) -> tuple[m.Offered, list[m.Pull]]:
        """Look `keys` up, then answer with places: for each missing key its nodes, one letter each."""
        self.lookup(keys, **options)
        find = self.told(m.Find)[0]
        assert first is None or find.first == first
        return self.answer(find, *nodes)

    def answer(self, find: m.Find, *nodes: Sequence[str] | str) -> tuple[m.Offered, list[m.Pull]]:
        """`nodes` of each shard, the last ones for all further shards."""
        shards = [nodes[min(i, len(nodes) - 1)] for i in range(find.lookup.shard_count)]
        places = [[[here(node) for node in each] for each in shard] for shard in shards]
        offer = self.do(m.Located(find.lookup, find.first, places))
        return offer, self.told(m.Pull)

    def arrive(self, pull: m.Pull, count: int, after: int = 0) -> list[m.Ready]:
        keys = pull.keys[after : after + count]
        self.do(m.Arrived(pull.pull, [checksum(key) for key in keys]))
        return self.told(m.Ready)

    def end(self, pull: m.Pull | m.Fetch, fault: str = "") -> list[m.Ready]:
        self.do(m.PullEnded(pull.pull, fault))
        return self.told(m.Ready)

    def demoted(
        self,
        demote: m.Demote,
        written: Sequence[int] | None = None,
        fault: str = "",
        corrupt: Sequence[int] = (),
    ) -> None:
        """A demote ends; all of it was written where nothing else is said."""
        self.demotes.remove(demote)
        every = range(len(demote.slots)) if written is None else written
        self.do(m.Demoted(demote.demote, list(every), corrupt, fault))

    def demote_all(self) -> list[Key]:
        """Let the demotes that wait, and all that follow them, succeed; returns the keys that went down."""
        keys: list[Key] = []
        while self.demotes:
            demote = self.demotes[0]
            keys += [record.block.key for record in demote.records]
            self.demoted(demote)
        return keys

    def end_nvme_drops(self) -> None:
        draining = list(self.core.lower[0].map.draining)
        if draining:
            self.do(m.Dropped(TierKind.NVME, draining))

    def below(self) -> Any:
        return self.core.stats().tiers[1]

    def in_nvme(self, keys: Sequence[Key], shard: int = 0) -> int:
        """How many leading keys a prompt could reach in the tier below."""
        return len(self.core.lower[0].run(keys, shard))

    def fetch(self, keys: Sequence[Key], **options: Any) -> tuple[m.Offered, list[m.Fetch]]:
        offer = self.lookup(keys, **options)
        return offer, self.told(m.Fetch)

    def fetched(self, fetch: m.Fetch, count: int, after: int = 0) -> list[m.Ready]:
        checksums = [record.checksum for record in fetch.records[after : after + count]]
        self.do(m.Arrived(fetch.pull, checksums))
        return self.told(m.Ready)

    def acquire(
        self, keys: Sequence[Key], peer: str = "p", shard: int = 0, engine: str = "e", *, waits: bool = False
    ) -> m.Leased:
        return self.do(m.Acquire(self.call_id(), peer, keys, shard, self.fingerprint(engine), waits))

    def lend(self, keys: Sequence[Key], peer: str = "p", shard: int = 0) -> tuple[m.Leased, list[m.Fetch]]:
        """A peer that waits asks; and what is fetched for it."""
        return self.acquire(keys, peer, shard, waits=True), self.told(m.Fetch)

    def load(self, keys: Sequence[Key], request: str = "r", engine: str = "e", shard: int = 0) -> m.Leased:
        return self.do(m.Load(self.call_id(), engine, request, keys, shard))

    def release(self, lease: int, corrupt: Sequence[Key] = (), engine: str = "e") -> m.Released:
        return self.do(m.Release(self.call_id(), engine, lease, None, corrupt))

    def report(
        self, added: Sequence[Key], removed: Sequence[Key] = (), engine: str = "e", *, clear: bool = False
    ) -> m.Noted:
        return self.do(m.ReportResident(self.call_id(), engine, added, removed, clear))

    def release_hold(self, request: str = "r", engine: str = "e") -> m.Released:
        return self.do(m.Release(self.call_id(), engine, None, request))

    def pin(self, keys: Sequence[Key], ttl_s: float = 60.0) -> m.Pinned:
        return self.do(m.Pin(self.call_id(), keys, ttl_s))

    def evict(self, keys: Sequence[Key]) -> m.Evicted:
        return self.do(m.Evict(self.call_id(), keys))

    def tick(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.do(m.Tick())

    def die(self, engine: str = "e") -> None:
        self.do(m.EngineDied(engine))

    def match(self, keys: Sequence[Key], shards: int = 1) -> int:
        return self.core.match(keys, shards)

    def tier(self) -> Any:
        return self.core.stats().tiers[0]

    def end_drops(self) -> None:
        """Every slot that waits for its bytes to be deleted."""
        draining = self.core.residency.tiers[TierKind.DRAM].draining
        if draining:
            self.do(m.Dropped(TierKind.DRAM, list(draining)))
