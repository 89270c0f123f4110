"""Zstandard behind a plane filter, tuned to be an entropy coder.

KV has uneven exponents and hardly any repetition, so matches are only looked for where seven bytes agree,
in the smallest table: that encodes faster than level 1, decodes faster and gains more.
"""

from __future__ import annotations

import threading
from typing import ClassVar, Final

import zstandard

from kvtier.codecs.frame import CHUNK_BYTES_LOG2, MAX_CHUNK_BYTES_LOG2, FrameCodec
from kvtier.codecs.planes import Bytes, PlaneFilter
from kvtier.errors import Corruption

ENTROPY_FIRST: Final = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=CHUNK_BYTES_LOG2,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=False,
    write_checksum=False,
    write_dict_id=False,
)
"""The block's own checksum is verified anyway, so frames carry none."""


class _Contexts(threading.local):
    """Compressor and decompressor, for each thread its own: they are not thread-safe."""

    def __init__(self, parameters: zstandard.ZstdCompressionParameters) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        # A frame names its window, which is allocated at its word: by default up to 128 MiB, kept for good.
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << MAX_CHUNK_BYTES_LOG2)


class ZstdCodec(FrameCodec):
    """See `FrameCodec`; `parameters` must not let frames carry their size."""

    name: ClassVar[str] = "zstd"
    wire_id: ClassVar[int] = 2

    def __init__(
        self,
        element_bytes: int = 2,
        *,
        filter: PlaneFilter | None = None,
        parameters: zstandard.ZstdCompressionParameters = ENTROPY_FIRST,
    ) -> None:
        super().__init__(element_bytes, filter=filter)
        self._contexts = _Contexts(parameters)

    def _compress(self, plane: Bytes) -> bytes:
        return self._contexts.compressor.compress(plane.data)

    def _decompress(self, stored: memoryview, size_bytes: int) -> bytes:
        try:
            # A size in the frame would be allocated at the frame's word, so there must be none.
            if zstandard.frame_content_size(stored) != -1:
                raise Corruption("a Zstandard frame says its size, which ours do not: drop the block")
            return self._contexts.decompressor.decompress(
                stored, max_output_size=size_bytes, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise Corruption(f"Zstandard refuses a plane ({error}): drop the block") from None
