"""Codecs: each implements `kvtier.interfaces.Codec`; importing this imports neither lz4 nor zstandard.

=========== ======= =========================================================================
name        wire_id
=========== ======= =========================================================================
raw         0       the block as it is
lz4         1       byte planes, each compressed by LZ4 where that pays
zstd        2       byte planes, each compressed by Zstandard where that pays
lossy-fp8   3       8-bit floats with shared exponents, of blocks rounded before their commit
=========== ======= =========================================================================
"""

from __future__ import annotations

from functools import cache
from typing import Final

from kvtier.errors import ConfigError, Corruption
from kvtier.interfaces import Codec

MIN_GAIN: Final = 0.05
"""A payload is at least by this fraction smaller than its block; otherwise the block is kept as it is."""

CODEC_NAMES: Final = ("raw", "lz4", "zstd", "lossy-fp8")
"""By wire id."""


def make_codec(name: str, element_bytes: int = 2) -> Codec:
    """The codec of this name for blocks of elements of this size.

    Parameters
    ----------
    element_bytes
        1 (8-bit floats), 2 or 4; decides how `encode` cuts blocks into planes. 0: it finds that out for each
        block. `decode` finds in each payload how that was cut, so one codec decodes the payloads of all.

    Raises
    ------
    ConfigError
        There is none of this name, or none for such elements.
    """
    if name == "raw":
        from kvtier.codecs.raw import RawCodec

        return RawCodec()
    if name == "lz4":
        from kvtier.codecs.lz4 import Lz4Codec

        return Lz4Codec(element_bytes)
    if name == "zstd":
        from kvtier.codecs.zstd import ZstdCodec

        return ZstdCodec(element_bytes)
    if name == "lossy-fp8":
        from kvtier.codecs.lossy_fp8 import LossyFp8Codec

        return LossyFp8Codec()
    raise ConfigError(f"codec is {name!r}: allowed are {', '.join(CODEC_NAMES)}")


@cache
def codec_of(wire_id: int) -> Codec:
    """The codec that decodes payloads with this wire id, which comes from a header that is not believed.

    One for all callers.

    Raises
    ------
    Corruption
        No codec has it.
    """
    if not 0 <= wire_id < len(CODEC_NAMES):
        raise Corruption(f"a block's header names the codec {wire_id}, which this version does not have")
    return make_codec(CODEC_NAMES[wire_id])
