"""Blocks in batches, several under way at once, where an engine waits for the first ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

BATCHES_IN_FLIGHT: Final = 2
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


async def settle(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until none of them runs; only a caller that is cancelled makes them stop early.

    A transfer that is stopped may have to destroy what all transfers share, while one whose sibling failed
    ends by itself, in time.
    """
    was_cancelled = (task := asyncio.current_task()) is not None and task.cancelling() > 0
    while running := [its for its in tasks if not its.done()]:
        if was_cancelled:
            for its in running:
                its.cancel()
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            was_cancelled = True
    for its in tasks:
        if not its.cancelled():
            its.exception()  # its sibling's is the one that is told
    if was_cancelled:
        raise asyncio.CancelledError
