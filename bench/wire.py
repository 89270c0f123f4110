"""Streams between nodes over slow links: blocks as they are against `transfer_codec` auto.

The blocks are SmolLM2-135M's own KV in bfloat16 (`bench.codecs.real_kv`), again and again. The owner is a
daemon in a process of its own; two pullers pull the same blocks from it, in turn, over the same link: one
with the codecs off, one with auto, which has learnt by then what the link gives. Links: a proxy in user space
that lets through 100 MB/s or 1 GB/s (`bench.throttle`), and the loopback itself. Owner, puller and proxy
share the processors, which a real link does not do: a codec has less of them here than on two machines.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.codecs import real_kv
from bench.common import MIN_ROUNDS, Memcpy, at_least, median, void_reason
from bench.remote import EXTENT_BYTES, LAYOUTS, POLL_S, TIMEOUT_S, Asker
from bench.throttle import throttled
from kvtier.client import EngineClient, Pages
from kvtier.demo.index import IndexProcess
from kvtier.demo.node import NodeProcess
from kvtier.demo.processes import interruptible
from kvtier.demo.scenario import workplace
from kvtier.types import PROTOCOL_VERSION, Key, Namespace, NodeRecord, chain_keys

BLOCKS: Final = 96
LAYOUT: Final = LAYOUTS["720 KiB"]
OWNER_BYTES: Final = 320 << 20
LEARN_PULLS: Final = 4
LINKS: Final = {"100 MB/s": 1e8, "1 GB/s": 1e9, "loopback": 0.0}
"""Name -> bytes a second; 0: no proxy."""
GAIN_WANTED: Final = {"100 MB/s": 1.25, "1 GB/s": 0.95, "loopback": 0.95}
MODES: Final = ("off", "auto")


class Owner:
    """A daemon that holds `BLOCKS` real blocks."""

    def __init__(self, directory: Path, index: IndexProcess, kv: list[memoryview]) -> None:
        self.node = NodeProcess(
            directory,
            dram_bytes=OWNER_BYTES,
            extent_bytes=EXTENT_BYTES,
            transfer="stream",
            max_given_fraction=1.0,
            scrub_bytes_per_s=0,
            **index.options,
        )
        root = Namespace(b"bench", "bfloat16", LAYOUT.fingerprint(), LAYOUT.block_tokens).root()
        self.keys: list[Key] = chain_keys(
            root, np.zeros(BLOCKS * LAYOUT.block_tokens, np.int64), LAYOUT.block_tokens
        )
        shape = (LAYOUT.num_layers, LAYOUT.layer_block_bytes)
        blocks = [np.frombuffer(kv[number % len(kv)], np.uint8).reshape(shape) for number in range(BLOCKS)]
        pages = Pages.from_tensors(list(np.stack(blocks, axis=1)), LAYOUT)
        with EngineClient(str(self.node.socket), LAYOUT, call_timeout_s=TIMEOUT_S) as client:
            stored = client.store(None, self.keys, pages, range(BLOCKS))
        assert stored.committed == BLOCKS, stored
        deadline_s = time.monotonic() + TIMEOUT_S
        while not any(its.name == "stream" and its.usable for its in self.node.status().transfers):
            assert time.monotonic() < deadline_s, "streams do not work here"
            time.sleep(POLL_S)

    def record(self) -> NodeRecord:
        """As the index would name it."""
        status = self.node.status()
        return NodeRecord(
            node=status.node_id,
            incarnation=status.incarnation,
            instance="bench",
            name="owner",
            address=status.peer_address,
            protocol_version=PROTOCOL_VERSION,
            capacity_bytes=OWNER_BYTES,
            resident_bytes=0,
        )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; see the module."""
    rounds = max(args.rounds, MIN_ROUNDS)
    kv, _ = real_kv()
    memcpy = Memcpy()
    rates: list[float] = []
    links: dict[str, Any] = {}
    with interruptible(), workplace() as directory, IndexProcess(directory / "i") as index:
        owner = Owner(directory / "n", index, kv)
        try:
            record = owner.record()
            for name, bytes_per_s in LINKS.items():
                print(f"bench wire: {name}", file=sys.stderr, flush=True)
                with _link(record, bytes_per_s) as far:
                    links[name] = asyncio.run(_measure(far, owner.keys, directory, rounds))
                rates.append(median([memcpy() for _ in range(rounds)]))
        finally:
            owner.node.stop()
    return {
        "rounds": rounds,
        "blocks": BLOCKS,
        "block_bytes": LAYOUT.block_bytes,
        "links": links,
        "targets": {
            f"{name}: auto over off": at_least(links[name]["auto_over_off"], wanted)
            for name, wanted in GAIN_WANTED.items()
        },
        "memcpy_bytes_per_s": median(rates),
        "void": void_reason(min(rates)),
    }


@contextmanager
def _link(record: NodeRecord, bytes_per_s: float) -> Iterator[NodeRecord]:
    if not bytes_per_s:
        yield record
        return
    with throttled(record.address, bytes_per_s) as address:
        yield replace(record, address=address)


async def _measure(record: NodeRecord, keys: list[Key], directory: Path, rounds: int) -> dict[str, Any]:
    size_bytes = len(keys) * LAYOUT.block_bytes
    took_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    async with AsyncExitStack() as opened:
        askers = {
            mode: await opened.enter_async_context(Asker(record, directory, "stream", transfer_codec=mode))
            for mode in MODES
        }
        for _ in range(LEARN_PULLS):
            for asker in askers.values():
                await asker.pull(keys, LAYOUT)
        before = _came(askers["auto"])
        for _ in range(rounds):
            for mode, asker in askers.items():
                took_s[mode].append(await asker.pull(keys, LAYOUT))
        came = {name: value - before[name] for name, value in _came(askers["auto"]).items()}
    rate = {mode: size_bytes / median(values) for mode, values in took_s.items()}
    return {
        "off_bytes_per_s": rate["off"],
        "auto_bytes_per_s": rate["auto"],
        "auto_over_off": median([a / b for a, b in zip(took_s["off"], took_s["auto"], strict=True)]),
        "auto_block_bytes": came,
        "share_through_codecs": 1 - came["raw"] / sum(came.values()),
        "raw_seconds": took_s,
    }


def _came(asker: Asker) -> dict[str, float]:
    """Bytes of blocks by codec."""
    value = asker.metrics.registry.get_sample_value
    return {
        codec: value("kvtier_stream_block_bytes_total", {"direction": "in", "codec": codec}) or 0.0
        for codec in ("raw", "lz4", "zstd")
    }
