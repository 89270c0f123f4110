"""The NVMe tier: what an engine loads from it and stores into it, of the disk's best; and how it restarts.

Everything that a block goes through is in it: a daemon in a process of its own, RPCs, the disk, headers and
checksums verified, the arena, the copy into the engine's pages. Memory holds less than what is loaded in
turn, and every load asserts that all of its blocks came from the medium. A **load** is one prompt of `BLOCKS`
blocks, from the lookup until the release was answered. A **store** is `STORED` blocks in many prompts, one
after the other, until the medium has the last block: prompts are copied into the arena while earlier ones go
down. The denominator (`bench.disk`) is fio's best pass with O_DIRECT in blocks of the same size, over as many
bytes of the same file system, in the same rounds: of all queue depths the one that is fastest in the median.
Disks of virtual machines vary a lot within seconds, so a share is the median of the rounds' own shares.
Beside it stands what the tier reaches by itself, and what plain loops of Python reach.

``python -m bench nvme DIRECTORY`` measures the disk of that directory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from bench.common import MIN_ROUNDS, at_least, at_most, interleave, median, seconds
from bench.disk import Disk, random_blocks
from kvtier.client import EngineClient, Pages
from kvtier.demo.node import NodeProcess
from kvtier.demo.processes import interruptible
from kvtier.demo.scenario import memory_of, workplace
from kvtier.tiers.file import FileTier
from kvtier.types import (
    PAGE_SIZE_BYTES,
    BlockId,
    BlockRecord,
    Key,
    Layout,
    LayoutKind,
    LayoutOrder,
    Namespace,
    Slot,
    TierKind,
    chain_keys,
)

MIB: Final = 1 << 20
BLOCKS: Final = 256
STORED: Final = 768
STORED_PROMPT: Final = 32
KEPT: Final = 6
"""Prompts that are loaded in turn: more than memory holds."""
LAYOUTS: Final = {
    "1 MiB": Layout(LayoutKind.GQA, 32, 2, 64, "bfloat16", 64, LayoutOrder.HND, 32 << 10),
    "720 KiB": Layout(LayoutKind.GQA, 30, 3, 64, "bfloat16", 32, LayoutOrder.HND, 24 << 10),
}
EXTENT_BYTES: Final = 64 * MIB
DRAM_PROMPTS: Final = 4.6
"""A quarter of memory may be filled by fetches at once: one prompt."""
NVME_BYTES: Final = 4096 * MIB
READ_SHARE: Final = 0.85
WRITE_SHARE: Final = 0.80
TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.005
COMPUTE_S: Final = 1.0
"""What a block is said to cost otherwise: so much that all of it is fetched."""
SMALL: Final = Layout(LayoutKind.MLA, 1, 1, 4096, "uint8", 1, LayoutOrder.NHD, PAGE_SIZE_BYTES)
RESTART_BLOCKS: Final = 100_000
RESTART_PROMPT: Final = 1000
RESTART_S: Final = 5.0
NODE: Final = "be" * 16


class Engine:
    """An engine with pages for two prompts, at a daemon with an NVMe tier."""

    def __init__(self, directory: Path, medium: Path, layout: Layout, **options: object) -> None:
        self.layout = layout
        values: dict[str, object] = {
            "index": "none",
            "shm_dir": memory_of(directory.parent),
            "dram_bytes": int(DRAM_PROMPTS * BLOCKS * layout.block_bytes) // EXTENT_BYTES * EXTENT_BYTES,
            "extent_bytes": EXTENT_BYTES,
            "nvme_paths": medium,
            "nvme_bytes": NVME_BYTES,
            "demote_high_fraction": 1e-6,
            "demote_bytes_per_s": 0,
            "scrub_bytes_per_s": 0,
            "pull_floor_s": TIMEOUT_S,
        }
        self.node = NodeProcess(directory, **(values | options))
        self.client = EngineClient(
            str(self.node.socket),
            layout,
            description="bench nvme",
            lookup_timeout_s=TIMEOUT_S,
            call_timeout_s=TIMEOUT_S,
            load_floor_s=TIMEOUT_S,
            verify_loads="sample",
        )
        self._numbers = itertools.count()
        assert self.client.prepare(TIMEOUT_S), "the daemon does not answer"

    def pages(self, count: int) -> list[np.ndarray]:
        """Touched memory with other content in every block."""
        shape = (self.layout.num_layers, count, self.layout.layer_block_bytes)
        return list(np.random.default_rng(1).integers(0, 256, shape, np.uint8))

    def fresh(self, count: int) -> list[Key]:
        """Keys of a prompt that nobody has stored."""
        layout = self.layout
        root = Namespace(b"bench", layout.dtype, layout.fingerprint(), layout.block_tokens).root()
        tokens = np.full(count * layout.block_tokens, next(self._numbers), np.int64)
        return chain_keys(root, tokens, layout.block_tokens)

    def store(self, keys: Sequence[Key], pages: Pages) -> None:
        """Into the arena; asserts that it takes all."""
        stored = self.client.store(None, keys, pages, range(len(keys)), timeout_s=TIMEOUT_S)
        assert stored.committed == len(keys), stored

    def tier(self) -> Any:
        """The NVMe tier's status."""
        return next(its for its in self.node.status().tiers if its.tier == TierKind.NVME)

    def wait(self, blocks: int) -> None:
        """Until the medium has exactly so many, and nothing is being dropped."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while (tier := self.tier()).blocks != blocks or tier.draining_bytes or tier.reserved_bytes:
            assert time.monotonic() < deadline_s, f"{tier.blocks} of {blocks} blocks are on the medium"
            time.sleep(POLL_S)

    def close(self) -> None:
        """All ends."""
        self.client.close()
        self.node.stop()


class Arms:
    """Loads and stores of one layout."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._memory = engine.pages(BLOCKS)
        self._pages = Pages.from_tensors(self._memory, engine.layout)
        self._into_memory = engine.pages(BLOCKS)
        self._into = Pages.from_tensors(self._into_memory, engine.layout)
        self._requests = itertools.count()
        self._size_bytes = BLOCKS * engine.layout.block_bytes
        self._kept = [engine.fresh(BLOCKS) for _ in range(KEPT)]
        for number, keys in enumerate(self._kept, start=1):
            engine.store(keys, self._pages)
            engine.wait(number * BLOCKS)
        self._turn = itertools.cycle(self._kept)
        for _ in range(KEPT):
            self.load()
        self.check()

    def load(self) -> float:
        """Bytes a second."""
        request, keys = f"bench/{next(self._requests)}", next(self._turn)
        results: list[int] = []

        def work() -> None:
            offer = self._engine.client.lookup(request, keys, block_compute_s=COMPUTE_S)
            assert (offer.blocks, offer.coming) == (BLOCKS, BLOCKS), offer
            result = self._engine.client.load(request, keys, self._into, range(BLOCKS))
            results.append(result.loaded)

        took_s = seconds(work)
        assert results == [BLOCKS], results
        return self._size_bytes / took_s

    def store(self) -> float:
        """Bytes a second; the blocks are dropped again afterwards, which is not counted."""
        prompts = [self._engine.fresh(STORED_PROMPT) for _ in range(STORED // STORED_PROMPT)]

        def work() -> None:
            for keys in prompts:
                self._engine.store(keys, self._pages)
            self._engine.wait(KEPT * BLOCKS + STORED)

        took_s = seconds(work)
        for keys in prompts:
            self._engine.node.admin.evict_prefix(keys)
        self._engine.wait(KEPT * BLOCKS)
        return STORED * self._engine.layout.block_bytes / took_s

    def check(self) -> None:
        """What a load brings is what was stored."""
        for layer in self._into_memory:
            layer[:] = 0
        self.load()
        for layer, stored in zip(self._into_memory, self._memory, strict=True):
            assert np.array_equal(layer, stored), "loaded bytes differ from stored ones"


class TierAlone:
    """The same bytes through the tier, without daemon and engine."""

    def __init__(self, directory: Path, block_bytes: int) -> None:
        self._loop = asyncio.new_event_loop()
        size_bytes = BLOCKS * block_bytes
        self._size_bytes = size_bytes
        self.tier = FileTier(
            node_id=NODE, paths=[directory], capacity_bytes=2 * size_bytes, extent_bytes=EXTENT_BYTES
        )
        self._loop.run_until_complete(self.tier.open())
        self._payloads, self._into = (random_blocks(BLOCKS, block_bytes) for _ in range(2))
        self._records = [
            BlockRecord(
                BlockId(i.to_bytes(32, "big"), 0),
                None,
                bytes(32),
                block_bytes,
                xxhash.xxh3_128_digest(payload),
            )
            for i, payload in enumerate(self._payloads)
        ]
        slot_bytes = block_bytes + PAGE_SIZE_BYTES
        each = EXTENT_BYTES // slot_bytes
        self._slots = [
            Slot(0, n // each, n // each * EXTENT_BYTES + n % each * slot_bytes, slot_bytes)
            for n in range(BLOCKS)
        ]
        self.write()

    def write(self) -> float:
        """Bytes a second."""
        work = self.tier.write(self._slots, self._records, self._payloads)
        return self._size_bytes / seconds(lambda: self._loop.run_until_complete(work))

    def read(self) -> float:
        """Bytes a second, verified."""
        wrong: list[int] = []
        work = self.tier.read(self._slots, self._records, self._into)
        took_s = seconds(lambda: wrong.extend(self._loop.run_until_complete(work)))
        assert wrong == [], f"{len(wrong)} blocks are wrong"
        return self._size_bytes / took_s

    def close(self) -> None:
        """In order."""
        self._loop.run_until_complete(self.tier.close())
        self._loop.close()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; see the module."""
    rounds = max(args.rounds, MIN_ROUNDS)
    result: dict[str, Any] = {"rounds": rounds, "cases": {}, "targets": {}, "void": ""}
    with interruptible(), workplace() as nodes, _on_disk(args.extra) as directory:
        for name, layout in LAYOUTS.items():
            print(f"bench nvme: blocks of {name}", file=sys.stderr, flush=True)
            case = _measure(nodes, directory, layout, rounds)
            result["cases"][name] = case
            result["targets"] |= {
                f"load of {name} blocks, of {case['best']['read']}": at_least(case["load_share"], READ_SHARE),
                f"store of {name} blocks, of {case['best']['write']}": at_least(
                    case["store_share"], WRITE_SHARE
                ),
            }
            if not case["direct"]:
                result["void"] = "no O_DIRECT in this directory: name one on a disk"
        print(f"bench nvme: restart with {RESTART_BLOCKS} blocks", file=sys.stderr, flush=True)
        result["restart_s"] = _restart(nodes, directory)
    for way, took_s in result["restart_s"].items():
        name = f"restart with {RESTART_BLOCKS} small blocks, {way}, s"
        result["targets"][name] = at_most(took_s, RESTART_S)
    return result


@contextmanager
def _on_disk(extra: Sequence[str]) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=extra[0] if extra else None))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def _measure(nodes: Path, directory: Path, layout: Layout, rounds: int) -> dict[str, Any]:
    disk = Disk(directory, layout.block_bytes, BLOCKS)
    alone = TierAlone(directory / "alone", layout.block_bytes)
    engine = Engine(nodes / f"n{layout.block_bytes}", directory / "node", layout)
    try:
        arms = Arms(engine)
        measured: dict[str, Callable[[], float]] = {
            **{f"read by {name}": arm for name, arm in disk.reads.items()},
            "load": arms.load,
            "tier read": alone.read,
            **{f"write by {name}": arm for name, arm in disk.writes.items()},
            "store": arms.store,
            "tier write": alone.write,
        }
        for arm in measured.values():
            arm()
        raw = interleave(measured, rounds)
        direct = not any("O_DIRECT" in notice for notice in alone.tier.notices)
    finally:
        engine.close()
        alone.close()
        disk.close()
        for name in ("alone", "node"):
            shutil.rmtree(directory / name, ignore_errors=True)
    best = {way: _best(raw, way) for way in ("read", "write")}
    return {
        "best": best,
        "direct": direct,
        "median_bytes_per_s": {name: median(values) for name, values in raw.items()},
        "load_share": _share(raw["load"], raw[best["read"]]),
        "store_share": _share(raw["store"], raw[best["write"]]),
        "tier_read_share": _share(raw["tier read"], raw[best["read"]]),
        "tier_write_share": _share(raw["tier write"], raw[best["write"]]),
        "bytes_per_s": raw,
    }


def _best(raw: dict[str, list[float]], way: str) -> str:
    """Fio's, or a loop's where there is no fio."""
    names = [name for name in raw if name.startswith(f"{way} by ")]
    fio = [name for name in names if "fio" in name]
    return max(fio or names, key=lambda name: median(raw[name]))


def _share(rates: Sequence[float], of: Sequence[float]) -> float:
    return median([rate / whole for rate, whole in zip(rates, of, strict=True)])


def _restart(nodes: Path, directory: Path) -> dict[str, float]:
    """Seconds from the daemon's start until it serves and all blocks are known, and those of them for an end
    in order and for a death.
    """
    home, medium = nodes / "restart", directory / "restart"
    options: dict[str, object] = {
        "dram_bytes": 2 * RESTART_BLOCKS * SMALL.block_bytes,
        "nvme_bytes": 3 * RESTART_BLOCKS * SMALL.block_bytes,
    }
    engine = Engine(home, medium, SMALL, **options)
    pages = Pages.from_tensors(engine.pages(RESTART_PROMPT), SMALL)
    for number in range(1, RESTART_BLOCKS // RESTART_PROMPT + 1):
        engine.store(engine.fresh(RESTART_PROMPT), pages)
        engine.wait(number * RESTART_PROMPT)
    times: dict[str, float] = {}
    for way in ("after an end in order", "after a death"):
        if way == "after a death":
            engine.node.process.kill()
        engine.close()
        begin_s = time.perf_counter()
        engine = Engine(home, medium, SMALL, **options)
        engine.wait(RESTART_BLOCKS)
        times[way] = time.perf_counter() - begin_s
    engine.close()
    return times
