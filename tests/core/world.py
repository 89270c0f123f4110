"""A small core and short words for what is said to it; `check()` runs after every event."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

from kvtier.core import messages as m
from kvtier.core.cache import CacheCore
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.types import Key, Layout, LayoutKind, LayoutOrder, TierKind

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


class World:
    def __init__(
        self,
        slots: int = 16,
        *,
        extent_pages: int = 4,
        allocated: int | None = None,
        frees_at_once: bool = True,
        layout: Layout | None = None,
        seed: int = 0,
        **config: Any,
    ) -> None:
        defaults = {"max_leased_fraction": 1.0, "max_unfinished_fraction": 1.0, "max_pinned_fraction": 1.0}
        self.core = CacheCore(
            CoreConfig(**{**defaults, **config}),
            [
                TierSpec(
                    TierKind.DRAM,
                    slots * PAGE,
                    (slots if allocated is None else allocated) * PAGE,
                    extent_pages * PAGE,
                    frees_at_once,
                    arena=7,
                )
            ],
            seed=seed,
        )
        self.now_s = 0.0
        self.layouts: dict[str, Layout] = {}
        self.instructions: list[m.Instruction] = []
        self._ids = itertools.count(1)
        self.register("e", layout or make_layout())

    def call_id(self) -> bytes:
        return next(self._ids).to_bytes(16, "little")

    def do(self, event: m.Event) -> Any:
        try:
            actions = self.core.handle(event, self.now_s)
        finally:
            self.core.check()
        self.instructions = [a for a in actions if isinstance(a, m.Drop | m.Verify | m.Lost)]
        replies = [a for a in actions if not isinstance(a, m.Drop | m.Verify | m.Lost)]
        assert len(replies) <= 1
        return replies[0] if replies else None

    def register(self, engine: str, layout: Layout) -> m.Registered:
        self.layouts[engine] = layout
        return self.do(m.RegisterEngine(self.call_id(), engine, layout, layout.fingerprint()))

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
        self, keys: Sequence[Key], request: str = "r", engine: str = "e", shard_count: int = 1
    ) -> m.Offered:
        return self.do(m.Lookup(engine, request, keys, shard_count, self.fingerprint(engine)))

    def load(self, keys: Sequence[Key], request: str = "r", engine: str = "e", shard: int = 0) -> m.Leased:
        return self.do(m.Load(self.call_id(), engine, request, keys, shard))

    def release(self, lease: int, corrupt: Sequence[Key] = (), engine: str = "e") -> m.Released:
        return self.do(m.Release(self.call_id(), engine, lease, None, corrupt))

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
