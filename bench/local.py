"""Engine <-> node on one machine: what a load and a store reach of memcpy, and what the calls cost.

Everything that an engine pays is in it: RPCs to a daemon in a process of its own, paged copies, checksums,
verification as it is by default. A store ends when `store` returns, which is when another client can load
it; a load ends when its release was answered. The lookup before a load is measured apart, except for the
single block, where it is part of the figure.

The engine's pages are one storage with a slice for each layer, as vLLM has them on CPU; for SmolLM2 also L
allocations at unequal distances. Ids are consecutive or random among twice as many pages. The denominator
is one contiguous pre-touched copy of 64 MiB, same number of threads (one), in the same rounds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench.common import (
    MIN_ROUNDS,
    Memcpy,
    at_least,
    at_most,
    interleave,
    median,
    percentile,
    seconds,
    void_reason,
)
from kvtier.client import AdminClient, EngineClient, Pages
from kvtier.demo.node import NodeProcess
from kvtier.demo.processes import interruptible
from kvtier.demo.scenario import workplace
from kvtier.types import Key, Layout, LayoutKind, LayoutOrder, Namespace, chain_keys

DRAM_BYTES: Final = 5 << 30
COUNTS: Final = (1, 16, 64, 256)
JUDGED_FROM: Final = 64
CALLS_A_ROUND: Final = 40
TARGETS: Final = {
    ("load", "consecutive"): 0.65,
    ("load", "random"): 0.58,
    ("store", "consecutive"): 0.52,
    ("store", "random"): 0.40,
}
BLOCK_P50_MS: Final = 0.9
LOOKUP_KEYS: Final = 256
LOOKUP_P50_MS: Final = 0.6
LOOKUP_P99_MS: Final = 3.0
TIMEOUT_S: Final = 30.0

Memory = Sequence[npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Case:
    """A layout, and how the engine's layers lie in memory."""

    name: str
    layout: Layout
    is_one_storage: bool = True
    counts: tuple[int, ...] = COUNTS


def _layout(layers: int, heads: int, head_dim: int, block_tokens: int) -> Layout:
    size_bytes = 2 * heads * head_dim * block_tokens * 2
    return Layout(
        LayoutKind.GQA, layers, heads, head_dim, "bfloat16", block_tokens, LayoutOrder.HND, size_bytes
    )


SMOLLM2: Final = _layout(30, 3, 64, 32)  # 30 x 24 KiB
LLAMA3_8B: Final = _layout(32, 8, 128, 32)  # 32 x 128 KiB
ONE_MIB: Final = _layout(32, 2, 64, 64)  # 32 x 32 KiB
CASES: Final = (
    Case("smollm2", SMOLLM2),
    Case("smollm2, scattered layers", SMOLLM2, is_one_storage=False),
    Case("llama-3-8b", LLAMA3_8B),
)


class Bench:
    """One engine with its pages, at one node."""

    def __init__(self, socket: Path, case: Case) -> None:
        self.case = case
        self.blocks = max(case.counts)
        self.memory = _pages(case, 2 * self.blocks)
        self.pages = Pages.from_tensors(self.memory, case.layout)
        self.client = EngineClient(
            str(socket),
            case.layout,
            description="bench local",
            lookup_timeout_s=TIMEOUT_S,
            call_timeout_s=TIMEOUT_S,
            load_floor_s=TIMEOUT_S,
        )
        self.admin = AdminClient(str(socket))
        self.chains = itertools.count()
        self.requests = itertools.count()
        ids = np.random.default_rng(7).permutation(2 * self.blocks)[: self.blocks]
        self.ids: dict[str, list[int]] = {
            "consecutive": list(range(self.blocks // 2, self.blocks // 2 + self.blocks)),
            "random": ids.tolist(),
        }
        assert self.client.prepare(TIMEOUT_S), "the daemon does not answer"
        self.kept = self.fresh(self.blocks)
        stored = self.client.store(None, self.kept, self.pages, self.ids["consecutive"])
        assert stored.committed == self.blocks, stored
        self.lookup_seconds: list[float] = []

    def fresh(self, count: int) -> list[Key]:
        """Keys of a prompt that nobody has stored."""
        layout = self.case.layout
        root = Namespace(b"bench", "bfloat16", layout.fingerprint(), layout.block_tokens).root()
        number = next(self.chains)
        return chain_keys(root, np.full(count * layout.block_tokens, number, np.int64), layout.block_tokens)

    def store(self, count: int, order: str) -> float:
        """Seconds; the blocks are dropped again afterwards."""
        keys, ids = self.fresh(count), self.ids[order][:count]
        results: list[Any] = []
        took_s = seconds(lambda: results.append(self.client.store(None, keys, self.pages, ids)))
        assert results[0].committed == count, results[0]
        self.admin.evict_prefix(keys)
        return took_s

    def load(self, count: int, order: str) -> float:
        """Seconds without the lookup, which is noted apart."""
        keys, ids = self.kept[:count], self.ids[order][:count]
        request = f"bench/{next(self.requests)}"
        offers: list[Any] = []
        self.lookup_seconds.append(seconds(lambda: offers.append(self.client.lookup(request, keys))))
        assert offers[0].blocks == count, offers[0]
        results: list[Any] = []
        took_s = seconds(lambda: results.append(self.client.load(request, keys, self.pages, ids)))
        assert results[0].loaded == count, results[0]
        return took_s

    def hit(self) -> list[float]:
        """Lookup and load of one block, some times."""
        keys, ids = self.kept[:1], self.ids["consecutive"][:1]

        def once() -> None:
            request = f"bench/{next(self.requests)}"
            assert self.client.lookup(request, keys).blocks == 1
            assert self.client.load(request, keys, self.pages, ids).loaded == 1

        return [seconds(once) for _ in range(CALLS_A_ROUND)]

    def lookup(self) -> list[float]:
        """Lookups of `LOOKUP_KEYS` keys that are all here."""
        keys = self.kept[:LOOKUP_KEYS]

        def once() -> None:
            assert self.client.lookup("bench/lookup", keys).blocks == LOOKUP_KEYS

        return [seconds(once) for _ in range(CALLS_A_ROUND)]

    def check(self) -> None:
        """What a load brings is what was stored, in either order of ids."""
        wanted = [layer[self.ids["consecutive"]].copy() for layer in self.memory]
        for order in ("random", "consecutive"):
            for layer in self.memory:
                layer[self.ids[order]] = 0
            self.load(self.blocks, order)
            for layer, rows in zip(self.memory, wanted, strict=True):
                assert np.array_equal(layer[self.ids[order]], rows), "loaded bytes differ from stored ones"

    def close(self) -> None:
        """Leave the node empty."""
        self.client.release_hold("bench/lookup")
        self.admin.evict_prefix(self.kept)
        self.client.close()
        self.admin.close()


def _pages(case: Case, count: int) -> Memory:
    """Touched memory with random content, ``[count, layer_block_bytes]`` for each layer."""
    layout = case.layout
    shape = (count, layout.layer_block_bytes)
    if case.is_one_storage:
        storage = np.empty((layout.num_layers, *shape), np.uint8)
        layers = [storage[i] for i in range(layout.num_layers)]
    else:
        # Each with a hole of another size behind it, so that no two distances are equal.
        layers = [
            np.empty((count + 1 + i % 7, layout.layer_block_bytes), np.uint8)[:count]
            for i in range(layout.num_layers)
        ]
    generator = np.random.default_rng(11)
    for layer in layers:
        layer[:] = np.frombuffer(generator.bytes(layout.layer_block_bytes), np.uint8)
        layer[:, :8] = np.arange(count, dtype=np.uint64)[:, None].view(np.uint8)
    return layers


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; see the module."""
    count = max(args.rounds, MIN_ROUNDS)
    results: dict[str, Any] = {"rounds": count, "dram_bytes": DRAM_BYTES, "targets": {}, "cases": {}}
    memcpy = Memcpy()
    rates: list[float] = []
    with (
        interruptible(),
        workplace() as directory,
        NodeProcess(directory / "n", dram_bytes=DRAM_BYTES) as node,
    ):
        for case in CASES:
            print(f"bench local: {case.name}", file=sys.stderr, flush=True)
            figures = _measure(Bench(node.socket, case), memcpy, count)
            results["cases"][case.name] = figures
            rates.append(figures["memcpy_bytes_per_s"])
            results["targets"] |= _judge(case, figures)
        print("bench local: calls", file=sys.stderr, flush=True)
        results |= _calls(node.socket, count)
    results["targets"] |= {
        "one 1 MiB block, lookup and load, p50 ms": at_most(results["block_ms"]["p50"], BLOCK_P50_MS),
        "lookup of 256 keys, p50 ms": at_most(results["lookup_ms"]["p50"], LOOKUP_P50_MS),
        "lookup of 256 keys, p99 ms": at_most(results["lookup_ms"]["p99"], LOOKUP_P99_MS),
    }
    return results | {"memcpy_bytes_per_s": median(rates), "void": void_reason(min(rates))}


def _measure(bench: Bench, memcpy: Memcpy, rounds: int) -> dict[str, Any]:
    arms: dict[str, Callable[[], float]] = {"memcpy": memcpy}
    for blocks, order in itertools.product(bench.case.counts, ("consecutive", "random")):
        arms[f"load {blocks} {order}"] = lambda n=blocks, o=order: bench.load(n, o)  # type: ignore[misc]
        arms[f"store {blocks} {order}"] = lambda n=blocks, o=order: bench.store(n, o)  # type: ignore[misc]
    try:
        bench.check()
        for arm in arms.values():  # caches, page tables and code paths are warm
            arm()
        bench.lookup_seconds.clear()
        raw = interleave(arms, rounds)
    finally:
        bench.close()
    base = median(raw["memcpy"])
    shares: dict[str, float] = {}
    for name in arms:
        if name != "memcpy":
            size_bytes = int(name.split()[1]) * bench.case.layout.block_bytes
            shares[name] = size_bytes / median(raw[name]) / base
    return {"memcpy_bytes_per_s": base, "share_of_memcpy": shares, "raw_seconds": raw}


def _judge(case: Case, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{case.name}: {what} {blocks} {order}, of memcpy": at_least(
            figures["share_of_memcpy"][f"{what} {blocks} {order}"], target
        )
        for blocks in case.counts
        if blocks >= JUDGED_FROM
        for (what, order), target in TARGETS.items()
    }


def _calls(socket: Path, rounds: int) -> dict[str, Any]:
    """The latency of one block and of a lookup."""
    bench = Bench(socket, Case("1 MiB", ONE_MIB, counts=(LOOKUP_KEYS,)))
    try:
        bench.hit()
        bench.lookup()
        raw = interleave({"block": bench.hit, "lookup": bench.lookup}, rounds)
    finally:
        bench.close()
    result: dict[str, Any] = {}
    for name, values in raw.items():
        flat = list(itertools.chain.from_iterable(values))
        result[f"{name}_ms"] = {
            "p50": 1e3 * percentile(flat, 50),
            "p99": 1e3 * percentile(flat, 99),
            "raw": [1e3 * value for value in flat],
        }
    return result
