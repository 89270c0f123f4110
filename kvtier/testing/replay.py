"""Requests against the real core, whose instructions are carried out at once: hit rates without any bytes.

A request looks its prompt up, loads what is offered, and stores the rest, before the next one comes. Nothing
fails, and no medium takes any time: what is left is which blocks are here.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier.core import messages as m
from kvtier.core.cache import CacheCore
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.core.policies import POLICIES
from kvtier.types import PAGE_SIZE_BYTES, Key, Layout, LayoutKind, LayoutOrder, TierKind

LAYOUT: Final = Layout(LayoutKind.MLA, 1, 1, PAGE_SIZE_BYTES, "uint8", 1, LayoutOrder.NHD, PAGE_SIZE_BYTES)
FINGERPRINT: Final = LAYOUT.fingerprint()
EXTENT_SLOTS: Final = 32


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt: at `time_s`, so many tokens, in blocks of which each id names all before it, too."""

    time_s: float
    tokens: int
    blocks: Sequence[int]


@dataclass(slots=True)
class Tally:
    """What came of all requests so far."""

    tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    refused_blocks: int = 0
    demoted_blocks: int = 0
    fetched_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        """Of the tokens."""
        return self.hit_tokens / max(1, self.tokens)

    @property
    def block_hit_rate(self) -> float:
        """Of the blocks."""
        return self.hit_blocks / max(1, self.blocks)


class ReplayedNode:
    """A core with so many slots of memory, and so many of NVMe (0: no such tier); whole extents."""

    def __init__(
        self,
        policy: str,
        dram_blocks: int,
        nvme_blocks: int = 0,
        *,
        block_tokens: int = 512,
        on_event: Callable[[CacheCore], None] | None = None,
        **options: Any,
    ) -> None:
        top = _tier(TierKind.DRAM, dram_blocks, 0)
        tiers = [top, _tier(TierKind.NVME, nvme_blocks, PAGE_SIZE_BYTES)] if nvme_blocks else [top]
        self.core = CacheCore(CoreConfig(**options), tiers, POLICIES[policy])
        self.tally = Tally()
        self._block_tokens = block_tokens
        self._on_event = on_event
        self._now_s = 0.0
        self._ids = itertools.count()
        self._do(m.RegisterEngine(self._call_id(), "e", LAYOUT, FINGERPRINT))

    def _call_id(self) -> bytes:
        return next(self._ids).to_bytes(16, "little")

    def _do(self, event: m.Event) -> m.Action | None:
        """Handle an event and all that follows from it; returns the reply."""
        reply: m.Action | None = None
        events = deque([event])
        while events:
            for action in self.core.handle(events.popleft(), self._now_s):
                if isinstance(action, m.Demote):
                    events.append(m.Demoted(action.demote, range(len(action.slots))))
                elif isinstance(action, m.Drop):
                    events.append(m.Dropped(action.tier, action.slots))
                elif isinstance(action, m.Fetch):
                    events.append(m.Arrived(action.pull, [record.checksum for record in action.records]))
                    events.append(m.PullEnded(action.pull))
                elif not isinstance(action, m.Instruction):
                    reply = action
            if self._on_event is not None:
                self._on_event(self.core)
        return reply

    def request(self, request: Request) -> int:
        """Returns how many leading blocks were loaded."""
        self._now_s = max(self._now_s, request.time_s)
        keys = [id.to_bytes(32, "little") for id in request.blocks]
        hits = self._load(keys)
        self._store(keys, hits)
        tally = self.tally
        tally.tokens += request.tokens
        tally.hit_tokens += min(request.tokens, hits * self._block_tokens)
        tally.blocks += len(keys)
        tally.hit_blocks += hits
        return hits

    def _load(self, keys: Sequence[Key]) -> int:
        offer = self._do(m.Lookup("e", "r", keys, 1, FINGERPRINT))
        assert isinstance(offer, m.Offered)
        if not offer.blocks:
            return 0
        leased = self._do(m.Load(self._call_id(), "e", "r", keys[: offer.blocks], 0))
        assert isinstance(leased, m.Leased)
        assert not leased.coming
        self._do(m.Release(self._call_id(), "e", leased.lease))
        return len(leased.slots)

    def _store(self, keys: Sequence[Key], begin: int) -> None:
        rest = keys[begin:]
        if not rest:
            return
        parent = keys[begin - 1] if begin else None
        reply = self._do(m.Reserve(self._call_id(), "e", parent, rest, 0, FINGERPRINT))
        assert isinstance(reply, m.Reserved)
        granted = [key for key, slot in zip(rest, reply.slots, strict=True) if slot is not None]
        self.tally.refused_blocks += reply.states.count(m.ReserveState.REFUSED)
        if granted:
            sums = [key[:16] for key in granted]
            self._do(m.Commit(self._call_id(), "e", reply.reservation, granted, sums))

    def run(self, requests: Iterable[Request]) -> Tally:
        """All of them, in order."""
        for request in requests:
            self.request(request)
        if self.core.lower:
            counts = self.core.lower[0].counts
            self.tally.demoted_blocks = counts.demoted_blocks
            self.tally.fetched_blocks = counts.fetched_blocks
        return self.tally


def _tier(kind: TierKind, blocks: int, header_bytes: int) -> TierSpec:
    extent_bytes = EXTENT_SLOTS * (PAGE_SIZE_BYTES + header_bytes)
    size_bytes = max(1, -(-blocks // EXTENT_SLOTS)) * extent_bytes
    return TierSpec(kind, size_bytes, size_bytes, extent_bytes, header_bytes=header_bytes)


# ---- made requests, one history for each seed


def conversations(
    count: int, turns: int, *, seed: int = 0, block_tokens: int = 512, begin: int = 0
) -> Iterator[Request]:
    """So many conversations at a time, each of so many turns that add 1 to 12 blocks, in any order.

    A quarter of them share a first prompt of 4 blocks.
    """
    rng = random.Random(seed)
    ids = itertools.count(begin)
    shared = [next(ids) for _ in range(4)]
    prompts: dict[int, list[int]] = {
        number: list(shared) if number % 4 == 0 else [] for number in range(count)
    }
    order = [number for number in prompts for _ in range(turns)]
    rng.shuffle(order)
    for time, number in enumerate(order):
        prompts[number] += [next(ids) for _ in range(rng.randint(1, 12))]
        yield Request(float(time), len(prompts[number]) * block_tokens, list(prompts[number]))


def documents(
    count: int, blocks: int, *, seed: int = 0, block_tokens: int = 512, begin: int = 0
) -> Iterator[Request]:
    """A scan: so many prompts of so many blocks, none of which comes twice."""
    ids = itertools.count(begin)
    for time in range(count):
        yield Request(float(time), blocks * block_tokens, [next(ids) for _ in range(blocks)])


def mixed(*histories: Iterable[Request], seed: int = 0) -> Iterator[Request]:
    """All of them at the same time, each in its own order."""
    rng = random.Random(seed)
    waiting = [list(history)[::-1] for history in histories]
    time = 0
    while any(waiting):
        (history,) = rng.choices(waiting, [len(each) for each in waiting])
        request = history.pop()
        yield Request(float(time), request.tokens, request.blocks)
        time += 1
