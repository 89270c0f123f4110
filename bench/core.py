"""Does the core's cost per block stay flat as the node fills? 10 thousand, 100 thousand, 1 million blocks.

Only `CacheCore.handle` is timed, in CPU time of the thread, since it neither waits nor copies. Every core
is full, so that each store evicts as much as it adds. Prompts have `PROMPT_BLOCKS` blocks; one round is
one of each operation on one core, and the cores take turns, so each finds the processor's caches full of
the others' data: what is flat, is flat in the worst case. The absolute figures come from the smallest core
by itself. Hashing keys, which the engine does, is measured beside it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from bench.common import Memcpy, at_most, median, void_reason
from kvtier.core import messages as m
from kvtier.core.cache import CacheCore
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.types import Key, Layout, LayoutKind, LayoutOrder, TierKind, chain_keys

SIZES: Final = (10_000, 100_000, 1_000_000)
PROMPT_BLOCKS: Final = 256
MIN_ROUNDS: Final = 60
LAYOUT: Final = Layout(LayoutKind.MLA, 1, 1, 4096, "uint8", 1, LayoutOrder.NHD, 4096)
FINGERPRINT: Final = LAYOUT.fingerprint()
FLAT_LIMIT: Final = 2.0
LOOKUP_LIMIT_US: Final = 100.0
STORE_LIMIT_US: Final = 1500.0
HASH_LIMIT_MS: Final = 2.0


class FullCore:
    """A core whose tier is full of prompts, and the time of each operation on it."""

    def __init__(self, blocks: int) -> None:
        extent_bytes = 256 * LAYOUT.slot_bytes
        size_bytes = -(-blocks // 256) * extent_bytes
        config = CoreConfig(max_leased_fraction=1.0, max_unfinished_fraction=1.0)
        self.core = CacheCore(config, [TierSpec(TierKind.DRAM, size_bytes, size_bytes, extent_bytes)])
        self.rng = random.Random(blocks)
        self.now_s = 0.0
        self.prompts: list[list[Key]] = []
        self.times_us: dict[str, list[float]] = {}
        self._ids = itertools.count()
        self.core.handle(m.RegisterEngine(self.call_id(), "bench", LAYOUT, FINGERPRINT), 0.0)
        self.most = size_bytes // LAYOUT.slot_bytes // PROMPT_BLOCKS
        for _ in range(self.most):
            self.store()
        self.times_us.clear()

    def call_id(self) -> bytes:
        """16 bytes, never the same."""
        return next(self._ids).to_bytes(16, "little")

    def timed(self, name: str, event: m.Event) -> Any:
        """Handle one event and note its time under `name`."""
        begin_ns = time.thread_time_ns()
        actions = self.core.handle(event, self.now_s)
        self.times_us.setdefault(name, []).append((time.thread_time_ns() - begin_ns) / 1e3)
        return actions[0]

    def store(self) -> None:
        """A new prompt; the least recently used blocks go for it."""
        keys = chain_keys(self.rng.randbytes(32), range(PROMPT_BLOCKS), 1)
        reserved = self.timed("reserve", m.Reserve(self.call_id(), "bench", None, keys, 0, FINGERPRINT))
        assert reserved.slots[-1] is not None, "the core refused"
        checksums = [key[:16] for key in keys]
        self.timed("commit", m.Commit(self.call_id(), "bench", reserved.reservation, keys, checksums))
        self.prompts.append(keys)
        del self.prompts[: -self.most]

    def round(self) -> None:
        """One of each; what is looked up comes from the half that was stored last, as new bytes objects."""
        self.now_s += 0.01
        prompt = self.rng.choice(self.prompts[len(self.prompts) // 2 :])
        keys = [bytes(bytearray(key)) for key in prompt]
        offer = self.timed("lookup", m.Lookup("bench", "request", keys, 1, FINGERPRINT))
        assert offer.blocks == PROMPT_BLOCKS
        leased = self.timed("load", m.Load(self.call_id(), "bench", "request", keys, 0))
        released = self.timed("release", m.Release(self.call_id(), "bench", leased.lease))
        assert released.valid
        self.store()
        oldest = self.prompts.pop(self.rng.randrange(len(self.prompts) // 4))
        self.timed("evict", m.Evict(self.call_id(), oldest))
        self.store_into_free()

    def store_into_free(self) -> None:
        """The same as `store` with room for it, under names of its own."""
        full = {name: self.times_us.pop(name) for name in ("reserve", "commit")}
        self.store()
        self.times_us.setdefault("reserve_free", []).extend(self.times_us.pop("reserve"))
        self.times_us.pop("commit")
        self.times_us |= full

    def figures(self) -> dict[str, float]:
        """Median microseconds of each operation on a whole prompt, and of a load and a store in all."""
        medians = {name: median(times) for name, times in self.times_us.items()}
        medians["load_in_all"] = median(_sums(self.times_us, "load", "release"))
        medians["store_in_all"] = median(_sums(self.times_us, "reserve", "commit"))
        return medians


def _sums(times: dict[str, list[float]], *names: str) -> list[float]:
    return [sum(parts) for parts in zip(*(times[name] for name in names), strict=True)]


def _hash_ms() -> float:
    tokens = np.arange(8192)
    times = []
    for _ in range(MIN_ROUNDS):
        begin_ns = time.thread_time_ns()
        chain_keys(bytes(32), tokens, 32)
        times.append((time.thread_time_ns() - begin_ns) / 1e6)
    return median(times)


def _in_turns(cores: dict[int, FullCore], rounds: int, step: Callable[[FullCore], None]) -> None:
    order = list(cores.values())
    for number in range(rounds):
        for core in order[number % len(order) :] + order[: number % len(order)]:
            step(core)


def _alone(rounds: int) -> dict[str, float]:
    core = FullCore(SIZES[0])
    for _ in range(rounds):
        core.round()
    return core.figures()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the smallest core, then fill all three and measure them in turns."""
    rounds = max(args.rounds, MIN_ROUNDS)
    memcpy = Memcpy()
    memcpy_bytes_per_s = median([memcpy() for _ in range(9)])
    alone = _alone(rounds)
    cores = {size: FullCore(size) for size in SIZES}
    gc.collect()
    _in_turns(cores, rounds, FullCore.round)
    figures = {size: core.figures() for size, core in cores.items()}
    small, large = figures[SIZES[0]], figures[SIZES[-1]]
    targets = {
        f"{name}_1m_to_10k": at_most(large[name] / small[name], FLAT_LIMIT)
        for name in ("store_in_all", "reserve_free", "lookup", "load_in_all", "evict")
    }
    targets["lookup_256_us"] = at_most(alone["lookup"], LOOKUP_LIMIT_US)
    targets["store_256_us"] = at_most(alone["store_in_all"], STORE_LIMIT_US)
    targets["hash_8192_tokens_ms"] = at_most(_hash_ms(), HASH_LIMIT_MS)
    return {
        "targets": targets,
        "us_per_block": {str(size): _per_block(medians) for size, medians in figures.items()},
        "us_per_block_10k_alone": _per_block(alone),
        "prompt_blocks": PROMPT_BLOCKS,
        "memcpy_bytes_per_s": memcpy_bytes_per_s,
        "void": void_reason(memcpy_bytes_per_s),
        "raw_us_per_prompt": {str(size): core.times_us for size, core in cores.items()},
    }


def _per_block(medians: dict[str, float]) -> dict[str, float]:
    return {name: value / PROMPT_BLOCKS for name, value in medians.items()}
