"""One client, many threads: every loaded block has the bytes that its key demands."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvtier.client import EngineClient, Pages
from kvtier.types import Key
from tests.client.harness import LAYOUT, PATIENT, DaemonProcess, chain, until

THREADS = 8
STEPS = 60
BLOCKS = 10
CHAINS = 12


def content(key: Key) -> np.ndarray:
    """The bytes of a block, [layers, layer_block_bytes]."""
    generator = np.random.default_rng(np.frombuffer(key, np.uint64))
    return generator.integers(0, 256, (LAYOUT.num_layers, LAYOUT.layer_block_bytes), np.uint8)


@pytest.mark.parametrize("copy_threads", [1, 2])
def test_same_and_different_keys_at_once(daemon: DaemonProcess, copy_threads: int) -> None:
    client = EngineClient(daemon.socket, LAYOUT, copy_threads=copy_threads, **PATIENT)  # type: ignore[arg-type]
    memory = np.zeros((LAYOUT.num_layers, THREADS * BLOCKS, LAYOUT.layer_block_bytes), np.uint8)
    pages = Pages.from_tensors(list(memory), LAYOUT)  # all threads' pages in one storage
    chains = [chain(f"{copy_threads} {number}", BLOCKS) for number in range(CHAINS)]
    wanted = {key: content(key) for keys in chains for key in keys}
    loaded = [0] * THREADS
    failures: list[str] = []

    def work(number: int) -> None:
        dice = random.Random(number)
        ids = list(range(number * BLOCKS, (number + 1) * BLOCKS))
        for step in range(STEPS):
            keys = dice.choice(chains)
            dice.shuffle(ids)
            request = f"{number}/{step}"
            have = 0
            if offer := client.lookup(request, keys).blocks:
                memory[:, ids] = 0
                have = client.load(request, keys[:offer], pages, ids[:offer]).loaded
                for key, page in zip(keys[:have], ids[:have], strict=True):
                    if not np.array_equal(memory[:, page], wanted[key]):
                        failures.append(f"thread {number}, step {step}: wrong bytes")
                loaded[number] += have
            if have < BLOCKS:
                for key, page in zip(keys[have:], ids[have:], strict=True):
                    memory[:, page] = wanted[key]
                parent = keys[have - 1] if have else None
                client.store(parent, keys[have:], pages, ids[have:])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    assert failures == []
    assert min(loaded) > 0
    assert client.stats().corrupt_blocks == 0

    def is_empty() -> bool:
        tier = daemon.status().tiers[0]
        return not (tier.reserved_bytes + tier.quarantined_bytes + tier.leased_bytes)

    until(is_empty, "nothing stays leased or reserved")
