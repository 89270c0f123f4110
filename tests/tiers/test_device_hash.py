"""Checksums that are computed on the device are those of everywhere else."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvtier.tiers.device_hash import _SECRET, LONG_FROM_BYTES, digests

torch = pytest.importorskip("torch", reason="torch is not installed")
SIZES = [
    *range(LONG_FROM_BYTES, LONG_FROM_BYTES + 70),
    1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 4096, 24 << 10, 720 << 10, (1 << 20) + 8,
]  # fmt: skip


def test_the_secret_is_whole() -> None:
    assert len(_SECRET) == 192


@pytest.mark.parametrize("kind", ["random", "zeros", "ones"])
def test_every_size(kind: str) -> None:
    rng = np.random.default_rng(5)
    memory = rng.integers(0, 256, 3 << 20, np.uint8)
    if kind != "random":
        memory[:] = 0 if kind == "zeros" else 255
    for size in SIZES:
        offsets = [0, 4096, 8 * 4096 + 8, 3]
        expected = [xxhash.xxh3_128_digest(memory[at : at + size]) for at in offsets]
        assert digests(torch.from_numpy(memory), offsets, size) == expected, size


def test_many_blocks_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.device_hash.GROUP_BYTES", 10_000)
    memory = np.random.default_rng(6).integers(0, 256, 1 << 20, np.uint8)
    offsets = list(range(0, 1 << 19, 4096))
    expected = [xxhash.xxh3_128_digest(memory[at : at + 4000]) for at in offsets]
    assert digests(torch.from_numpy(memory), offsets, 4000) == expected
    assert digests(torch.from_numpy(memory), [], 4000) == []


def test_one_bit_is_seen_wherever_it_is() -> None:
    memory = np.random.default_rng(7).integers(0, 256, 5000, np.uint8)
    (right,) = digests(torch.from_numpy(memory), [0], 5000)
    for at in (0, 1023, 1024, 4095, 4930, 4936, 4999):
        memory[at] ^= 1
        assert digests(torch.from_numpy(memory), [0], 5000) != [right]
        memory[at] ^= 1
