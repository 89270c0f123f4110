"""The block as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvtier.errors import Corruption
from kvtier.interfaces import Codec


class RawCodec(Codec):
    """What every block falls back to."""

    name: ClassVar[str] = "raw"
    wire_id: ClassVar[int] = 0

    def encode(self, blocks: Sequence[memoryview]) -> list[bytes | None]:
        """Never smaller."""
        return [None] * len(blocks)

    def decode(self, payload: memoryview, into: memoryview) -> None:
        """Copy."""
        if len(payload) != len(into):
            raise Corruption(f"a payload has {len(payload)} bytes for a block of {len(into)}: drop the block")
        into[:] = payload
