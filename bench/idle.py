"""What a daemon costs that has nothing to do, and how long it takes to be ready.

Idle: the share of one core that a daemon uses over 20 seconds, with an engine registered and blocks
resident, after the background verification has seen them all. Start: from before the process is made until
`kvtier serve` says that its socket answers, less the time in which memory is allocated and touched.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common import MIN_ROUNDS, at_most, median
from kvtier.client import EngineClient, Pages
from kvtier.demo.node import NodeProcess
from kvtier.demo.processes import interruptible
from kvtier.demo.scenario import workplace
from kvtier.types import Layout, LayoutKind, LayoutOrder, Namespace, chain_keys

DRAM_BYTES: Final = 1 << 30
BLOCKS: Final = 64
SETTLE_S: Final = 5.0
IDLE_S: Final = 20.0
IDLE_TARGET: Final = 0.02
START_TARGET_S: Final = 1.5
LAYOUT: Final = Layout(
    LayoutKind.GQA, 30, 3, 64, "bfloat16", 32, LayoutOrder.HND, layer_block_bytes=2 * 3 * 64 * 32 * 2
)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; see the module."""
    count = max(args.rounds, MIN_ROUNDS)
    with interruptible(), workplace() as directory:
        starts = [_start(directory / f"node-{number}") for number in range(count)]
        share = _idle_share(directory / "idle")
    return {
        "rounds": count,
        "dram_bytes": DRAM_BYTES,
        "targets": {
            "share of a core, idle": at_most(share, IDLE_TARGET),
            "seconds to ready, less pre-touch": at_most(
                median([each["start_s"] - each["pretouch_s"] for each in starts]), START_TARGET_S
            ),
        },
        "idle_s": IDLE_S,
        "starts": starts,
    }


def _start(directory: Path) -> dict[str, float]:
    with NodeProcess(directory, dram_bytes=DRAM_BYTES) as node:
        return {"start_s": node.start_s, "pretouch_s": node.readiness["pretouch_s"]}


def _idle_share(directory: Path) -> float:
    with NodeProcess(directory, dram_bytes=DRAM_BYTES) as node:
        client = EngineClient(str(node.socket), LAYOUT, description="bench idle")
        try:
            tensors = [
                np.ones((BLOCKS, LAYOUT.layer_block_bytes), np.uint8) for _ in range(LAYOUT.num_layers)
            ]
            root = Namespace(b"bench", LAYOUT.dtype, LAYOUT.fingerprint(), LAYOUT.block_tokens).root()
            keys = chain_keys(root, list(range(BLOCKS * LAYOUT.block_tokens)), LAYOUT.block_tokens)
            client.store(None, keys, Pages.from_tensors(tensors, LAYOUT), list(range(BLOCKS)))
            node.wait_stored(BLOCKS)
            print(f"watching an idle daemon for {SETTLE_S + IDLE_S:.0f} s", file=sys.stderr)
            time.sleep(SETTLE_S)
            begin_s, used_s = time.monotonic(), _cpu_s(node.readiness["pid"])
            time.sleep(IDLE_S)
            return (_cpu_s(node.readiness["pid"]) - used_s) / (time.monotonic() - begin_s)
        finally:
            client.close()


def _cpu_s(pid: int) -> float:
    """User and system time of all threads of `pid`."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
