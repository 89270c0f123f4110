"""How many blocks are asked for at once, where an engine waits for the first ones."""

from __future__ import annotations

from typing import Final

FIRST_BATCH_BLOCKS: Final = 4
BATCH_GROWTH: Final = 2
"""Each batch has so many times the blocks of the one before, until it has `batch_bytes`."""


def batches(count: int, block_bytes: int, batch_bytes: int) -> list[slice]:
    """`count` blocks in consecutive batches: a few, then more and more up to `batch_bytes`; never none."""
    most = max(1, batch_bytes // block_bytes)
    size = min(FIRST_BATCH_BLOCKS, most)
    result = []
    begin = 0
    while begin < count:
        end = min(begin + size, count)
        result.append(slice(begin, end))
        begin, size = end, min(size * BATCH_GROWTH, most)
    return result
