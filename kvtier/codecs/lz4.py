"""LZ4 behind a plane filter: fast in both directions, gains least."""

from __future__ import annotations

from typing import ClassVar, Final

import lz4.block

from kvtier.codecs.frame import FrameCodec
from kvtier.codecs.planes import Bytes
from kvtier.errors import Corruption

_ACCELERATION: Final = 1


class Lz4Codec(FrameCodec):
    """See `FrameCodec`."""

    name: ClassVar[str] = "lz4"
    wire_id: ClassVar[int] = 1

    def _compress(self, plane: Bytes) -> bytes:
        stored: bytes = lz4.block.compress(plane, mode="fast", acceleration=_ACCELERATION, store_size=False)
        return stored

    def _decompress(self, stored: memoryview, size_bytes: int) -> bytes:
        try:
            plane: bytes = lz4.block.decompress(stored, uncompressed_size=size_bytes)
        except lz4.block.LZ4BlockError as error:
            raise Corruption(f"LZ4 refuses a plane ({error}): drop the block") from None
        return plane
