"""What every transfer checks before a byte moves: peers and callers may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtier.errors import TransferFault

MAX_ADDRESS: Final = 2**64 - 1
PIECE_BYTES: Final = 1 << 20
"""What one message of a stream stands for at most."""


def check_ranges(sources: Sequence[int], sizes: Sequence[int], into: Sequence[int], memory_bytes: int) -> int:
    """Bytes in all; the destinations lie inside the own memory, the sources may still be anywhere.

    Raises
    ------
    TransferFault
        Lengths that differ, or a range that cannot be.
    """
    if not len(sources) == len(sizes) == len(into):
        raise TransferFault(
            f"{len(sources)} sources, {len(sizes)} sizes and {len(into)} destinations were given: "
            "they belong together one by one"
        )
    for source, size, begin in zip(sources, sizes, into, strict=True):
        if size <= 0 or source < 0 or source + size > MAX_ADDRESS:
            raise TransferFault(f"{size} bytes at offset {source} cannot lie in a peer's arena")
        if begin < 0 or begin + size > memory_bytes:
            raise TransferFault(
                f"{size} bytes do not fit at offset {begin} of the own arena, which has {memory_bytes}"
            )
    return sum(sizes)
