"""LOSSY: bfloat16 KV as 8-bit floats with one shared exponent for each group of 64. Off by default.

Everything else that kvtier keeps is what the engine stored, bit for bit, and checksums hold it to that. A
codec that changes values would break both, so this one does not: **rounding** and **encoding** are two steps.

1. `round_blocks` changes values, in place. An engine that wants this does so before it commits, so that the
   checksum is of the rounded bytes.
2. `LossyFp8Codec` encodes rounded blocks exactly and leaves all others alone.

So that nobody who wants exact KV meets rounded one, `lossy_kv_dtype` gives the namespace's ``kv_dtype``:
rounded and exact blocks of one prompt have different keys.

A value becomes sign, 4 bits of exponent and 3 of mantissa (e4m3, as in engines' own fp8 caches), relative to
the largest exponent of its group; values more than 2^17 times smaller than that become 0, and so do groups
that are near the least exponent there is. Rounding is to the nearest, ties to even, except that nothing is
rounded up to a larger group exponent, so that rounding twice is rounding once. Blocks with infinities or NaN
stay exact.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kvtier.errors import Corruption, InvalidRequest
from kvtier.interfaces import Codec

GROUP_ELEMENTS: Final = 64
_GROUPS_AT_ONCE: Final = 1024
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<BBHI")
_NAME: Final = "lossy-fp8"
_TOP_EXPONENT: Final = 127
"""Groups are shifted so that their largest exponent is that of 1.0; e4m3 then begins 15 below."""
_LEAST_EXPONENT: Final = 20
_MOST_EXPONENT: Final = 254

Words = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]


def lossy_kv_dtype(kv_dtype: str) -> str:
    """`Namespace.kv_dtype` of blocks that are rounded before they are stored.

    Raises
    ------
    InvalidRequest
        KV of another dtype than bfloat16 cannot be rounded, rounded one not again.
    """
    if kv_dtype != "bfloat16":
        raise InvalidRequest(f"kv_dtype is {kv_dtype!r}: the lossy codec {_NAME} rounds bfloat16 alone")
    return f"{kv_dtype}+{_NAME}/{_VERSION}"


def round_blocks(blocks: Sequence[memoryview]) -> None:
    """LOSSY: round the values of these bfloat16 blocks in place, to what `LossyFp8Codec` encodes exactly.

    Blocks that it cannot encode (see the module) are left as they are.
    """
    for block in blocks:
        words = _words(block)
        if words is None:
            continue
        encoded = _encode(words)
        if encoded is not None:
            _decode(*encoded, words)


class LossyFp8Codec(Codec):
    """Exact on blocks that were rounded by `round_blocks`; leaves every other block as it is."""

    name: ClassVar[str] = _NAME
    wire_id: ClassVar[int] = 3
    is_lossy: ClassVar[bool] = True

    def encode(self, blocks: Sequence[memoryview]) -> list[bytes | None]:
        """See `Codec.encode`."""
        return [self._encode(block) for block in blocks]

    def _encode(self, block: memoryview) -> bytes | None:
        words = _words(block)
        encoded = None if words is None else _encode(words)
        if words is None or encoded is None:
            return None
        back = np.empty_like(words)
        _decode(*encoded, back)
        if not np.array_equal(back, words):
            return None
        exponents, codes = encoded
        head = _HEAD.pack(_VERSION, self.wire_id, GROUP_ELEMENTS, len(block))
        return b"".join((head, exponents.tobytes(), codes.tobytes()))

    def decode(self, payload: memoryview, into: memoryview) -> None:
        """See `Codec.decode`."""
        assert not into.readonly
        count = len(into) // 2
        groups = count // GROUP_ELEMENTS
        if len(payload) != _HEAD.size + groups + count or len(into) % (2 * GROUP_ELEMENTS) or not groups:
            raise Corruption(f"a payload has {len(payload)} bytes for a block of {len(into)}: drop the block")
        if _HEAD.unpack_from(payload) != (_VERSION, self.wire_id, GROUP_ELEMENTS, len(into)):
            raise Corruption(f"a payload's head is not that of {_NAME} for such a block: drop the block")
        exponents = np.frombuffer(payload, np.uint8, groups, _HEAD.size)
        codes = np.frombuffer(payload, np.uint8, count, _HEAD.size + groups)
        if not _in_range(exponents):
            raise Corruption("a payload has a group's exponent that none can have: drop the block")
        _decode(exponents, codes, np.frombuffer(into, "<u2"))


def _words(block: memoryview) -> Words | None:
    """The block's elements; None where they are no whole groups."""
    if not len(block) or len(block) % (2 * GROUP_ELEMENTS):
        return None
    return np.frombuffer(block, "<u2")


def _in_range(exponents: Bytes) -> bool:
    """0 stands for a group of zeros."""
    used = exponents[exponents != 0]
    return not len(used) or bool(used.min() >= _LEAST_EXPONENT and used.max() <= _MOST_EXPONENT)


def _encode(words: Words) -> tuple[Bytes, Bytes] | None:
    """Exponents of the groups and a code for each element; None where a group is out of range."""
    groups = words.reshape(-1, GROUP_ELEMENTS)
    exponents = np.empty(len(groups), np.uint8)
    codes = np.empty(groups.shape, np.uint8)
    table = _code_table()
    for begin in range(0, len(groups), _GROUPS_AT_ONCE):
        part = groups[begin : begin + _GROUPS_AT_ONCE]
        magnitude = part & 0x7FFF
        top = (magnitude.max(axis=1) >> 7).astype(np.int32)
        top[top < _LEAST_EXPONENT] = 0  # too small for anything but zeros
        if int(top.max()) > _MOST_EXPONENT:
            return None
        exponents[begin : begin + len(part)] = top
        shift = (_TOP_EXPONENT - top) << 7
        shifted = magnitude.astype(np.int32) + shift[:, None]
        shifted[(magnitude < 1 << 7) | (top == 0)[:, None]] = 0
        np.maximum(shifted, 0, out=shifted)
        code = table[shifted]
        codes[begin : begin + len(part)] = code | ((part >> 8) & 0x80).astype(np.uint8)
    return exponents, codes.reshape(-1)


def _decode(exponents: Bytes, codes: Bytes, into: Words) -> None:
    table = _word_table()
    rows, target = codes.reshape(-1, GROUP_ELEMENTS), into.reshape(-1, GROUP_ELEMENTS)
    for begin in range(0, len(rows), _GROUPS_AT_ONCE):
        top = exponents[begin : begin + _GROUPS_AT_ONCE].astype(np.int32)
        words = table[rows[begin : begin + _GROUPS_AT_ONCE]]
        shift = (top - _TOP_EXPONENT) << 7
        is_zero = ((words & 0x7FFF) == 0) | (top == 0)[:, None]
        target[begin : begin + _GROUPS_AT_ONCE] = np.where(is_zero, words & 0x8000, words + shift[:, None])


@cache
def _code_table() -> Bytes:
    """Code without sign of every magnitude up to that of the group's largest exponent."""
    words = np.arange((_TOP_EXPONENT + 1) << 7, dtype=np.uint32)
    values = (words << 16).view(np.float32).astype(np.float64)
    steps = _code_values()
    # The nearest of all codes; of two equally near ones the even one, which has an even mantissa.
    middles = (steps[1:] + steps[:-1]) / 2
    codes = np.searchsorted(middles, values, side="left")
    ties = (codes < len(middles)) & (values == middles[np.minimum(codes, len(middles) - 1)])
    codes = np.where(ties & (codes % 2 == 1), codes + 1, codes)
    return codes.astype(np.uint8)


def _code_values() -> npt.NDArray[np.float64]:
    """What codes 0 .. 127 mean where the largest exponent is that of 1.0: below 2, subnormals included."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 15)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-14, normal)


@cache
def _word_table() -> npt.NDArray[np.int32]:
    """The bfloat16 word of each code, sign included, as wide as the sums with it."""
    magnitude = (_code_values().astype(np.float32).view(np.uint32) >> 16).astype(np.int32)
    return np.concatenate([magnitude, magnitude | 0x8000])
