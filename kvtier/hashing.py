"""Checksums of slots, computed beside the event loop: XXH3-128, GIL released, bounded threads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import xxhash

from kvtier.interfaces import Mapped, Tier
from kvtier.types import BlockRecord, Slot, TierKind

INLINE_BYTES: Final = 1 << 20
"""Up to so many bytes are hashed at once on the loop (some 0.1 ms): a thread would cost more."""
HASH_THREADS: Final = 2
READ_GROUP_BLOCKS: Final = 16
"""Blocks of a tier that is not mapped are read and hashed in groups of so many."""


def checksum(block: memoryview) -> bytes:
    """16 bytes, XXH3-128 as a big-endian digest."""
    return xxhash.xxh3_128_digest(block)


class Hasher:
    """Compares slots with checksums. Used from the event loop only."""

    def __init__(self, tiers: Mapping[TierKind, Tier]) -> None:
        self._tiers = tiers
        self._pool = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="kvtier-hash")

    def is_inline(self, kind: TierKind, blocks: int, block_bytes: int) -> bool:
        """Whether `mismatches_now` may be called for so much."""
        return isinstance(self._tiers[kind], Mapped) and blocks * block_bytes <= INLINE_BYTES

    def mismatches_now(
        self, kind: TierKind, slots: Sequence[Slot], block_bytes: int, checksums: Sequence[bytes]
    ) -> int:
        """How many of these slots hold other bytes than their checksum says; blocks the loop."""
        tier = self._tiers[kind]
        assert isinstance(tier, Mapped)
        return _count(_views(tier, slots, block_bytes), checksums)

    async def mismatches(
        self, kind: TierKind, slots: Sequence[Slot], block_bytes: int, checksums: Sequence[bytes]
    ) -> int:
        """The same beside the loop."""
        tier = self._tiers[kind]
        assert isinstance(tier, Mapped)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _count, _views(tier, slots, block_bytes), checksums)

    async def wrong(self, kind: TierKind, slots: Sequence[Slot], records: Sequence[BlockRecord]) -> list[int]:
        """Positions whose slot, in memory or not, does not hold what the record says; raises `TierFault`."""
        tier = self._tiers[kind]
        found: list[int] = []
        for first in range(0, len(slots), READ_GROUP_BLOCKS):
            group = slots[first : first + READ_GROUP_BLOCKS]
            expected = records[first : first + READ_GROUP_BLOCKS]
            told: list[int] = []
            if isinstance(tier, Mapped):
                buffers = [
                    tier.view(slot)[: record.block_bytes]
                    for slot, record in zip(group, expected, strict=True)
                ]
            else:
                buffers = [memoryview(bytearray(record.block_bytes)) for record in expected]
                told = await tier.read(group, expected, buffers)
            differing = await self.differing(buffers, [record.checksum for record in expected])
            found += [first + position for position in sorted({*told, *differing})]
        return found

    async def differing(self, blocks: Sequence[memoryview], checksums: Sequence[bytes]) -> list[int]:
        """Positions of the blocks that have other bytes than their checksum says; releases the views."""
        if sum(map(len, blocks)) <= INLINE_BYTES:
            return _differing(blocks, checksums, 0)
        loop = asyncio.get_running_loop()
        step = -(-len(blocks) // HASH_THREADS) or 1
        parts = [
            loop.run_in_executor(
                self._pool, _differing, blocks[first : first + step], checksums[first : first + step], first
            )
            for first in range(0, len(blocks), step)
        ]
        return [position for part in await asyncio.gather(*parts) for position in part]

    def close(self) -> None:
        """Wait for what runs, so that no thread reads a tier that is closed next."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _views(tier: Mapped, slots: Sequence[Slot], block_bytes: int) -> list[memoryview]:
    return [tier.view(slot)[:block_bytes] for slot in slots]


def _differing(views: Sequence[memoryview], checksums: Sequence[bytes], first: int) -> list[int]:
    wrong = []
    for position, (view, expected) in enumerate(zip(views, checksums, strict=True), start=first):
        if checksum(view) != expected:
            wrong.append(position)
        view.release()
    return wrong


def _count(views: Sequence[memoryview], checksums: Sequence[bytes]) -> int:
    wrong = 0
    for view, expected in zip(views, checksums, strict=True):
        wrong += checksum(view) != expected
        view.release()
    return wrong
