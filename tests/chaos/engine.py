"""An engine process for the chaos tests: stores and loads blocks whose bytes follow from their keys.

`python -m tests.chaos.engine SOCKET SEED REPORT` runs until SIGTERM. Every loaded block is compared with
the bytes that its key demands; a difference is written to REPORT and ends the process with status 9.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from pathlib import Path

import numpy as np

from kvtier.client import EngineClient, Pages
from kvtier.types import Key, Layout, LayoutKind, LayoutOrder, Namespace, chain_keys

LAYOUT = Layout(LayoutKind.GQA, 4, 2, 32, "bfloat16", 32, LayoutOrder.HND, 2 * 2 * 32 * 32 * 2)
BLOCKS = 24
PAGES = 64
CHAINS = 40


def content(key: Key) -> np.ndarray:
    """The bytes of block `key`, [layers, layer_block_bytes]: different for every key and layer."""
    generator = np.random.default_rng(np.frombuffer(key, np.uint64))
    return generator.integers(0, 256, (LAYOUT.num_layers, LAYOUT.layer_block_bytes), np.uint8)


def chain(number: int) -> list[Key]:
    """Keys of prompt `number`; prompts of one family share their first blocks."""
    family = number // 4
    shared = [family] * (8 * LAYOUT.block_tokens)
    own = [1000 + number] * ((BLOCKS - 8) * LAYOUT.block_tokens)
    root = Namespace(b"chaos", "bfloat16", LAYOUT.fingerprint(), LAYOUT.block_tokens).root()
    return chain_keys(root, shared + own, LAYOUT.block_tokens)


class Engine:
    """One engine with its pages; counts what it did."""

    def __init__(self, socket: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.client = EngineClient(socket, LAYOUT, description=f"chaos {seed}", lookup_timeout_s=0.5)
        self.memory = [
            np.zeros((PAGES, LAYOUT.layer_block_bytes), np.uint8) for _ in range(LAYOUT.num_layers)
        ]
        self.pages = Pages.from_tensors(self.memory, LAYOUT)
        self.counts = {"stored": 0, "loaded": 0, "misses": 0, "failed_loads": 0, "mismatches": 0}
        self.requests = 0

    def step(self) -> None:
        """One request as an engine has it: look up, load what is offered, store the rest."""
        keys = chain(self.random.randrange(CHAINS))
        self.requests += 1
        request = f"{self.seed}/{self.requests}"
        ids = self.random.sample(range(PAGES), len(keys))
        offer = self.client.lookup(request, keys)
        have = 0
        if offer.blocks:
            for layer in self.memory:
                layer[ids] = 0
            have = self.client.load(request, keys[: offer.blocks], self.pages, ids[: offer.blocks]).loaded
            self.counts["failed_loads"] += have < offer.blocks
            self.compare(keys[:have], ids[:have])
        else:
            self.counts["misses"] += 1
        if have < len(keys):
            for key, page in zip(keys[have:], ids[have:], strict=True):
                for layer, row in zip(self.memory, content(key), strict=True):
                    layer[page] = row
            parent = keys[have - 1] if have else None
            self.counts["stored"] += self.client.store(parent, keys[have:], self.pages, ids[have:]).committed

    def compare(self, keys: list[Key], ids: list[int]) -> None:
        """Every loaded block against its key."""
        for key, page in zip(keys, ids, strict=True):
            wanted = content(key)
            if any(
                not np.array_equal(layer[page], row) for layer, row in zip(self.memory, wanted, strict=True)
            ):
                self.counts["mismatches"] += 1
            self.counts["loaded"] += 1


def main() -> None:
    """Run until SIGTERM; the report is rewritten after every request, so that kill -9 leaves it too."""
    socket, seed, report = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    engine = Engine(socket, seed)
    while not stopping:
        engine.step()
        temporary = report.with_suffix(".new")
        temporary.write_text(json.dumps(engine.counts))
        temporary.replace(report)
    engine.client.close()
    sys.exit(9 if engine.counts["mismatches"] else 0)


if __name__ == "__main__":
    main()
