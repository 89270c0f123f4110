"""Blocks as engines make them, and worse ones."""

from __future__ import annotations

import numpy as np

from kvtier.codecs import make_codec
from kvtier.codecs.frame import FrameCodec

CODECS = [("lz4", 1), ("lz4", 2), ("lz4", 4), ("zstd", 1), ("zstd", 2), ("zstd", 4)]


def frame_codec(name: str, element_bytes: int) -> FrameCodec:
    codec = make_codec(name, element_bytes)
    assert isinstance(codec, FrameCodec)
    return codec


def bfloat16(count: int, seed: int = 0) -> bytes:
    """Normal values, one scale for each channel of 64."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(0, 1, 64))
    values = rng.standard_normal(count) * np.resize(scale, count)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def fp8(count: int, seed: int = 0) -> bytes:
    """Bytes of few exponents: sign, four bits of exponent, three of mantissa."""
    rng = np.random.default_rng(seed)
    exponent = rng.binomial(15, 0.4, count)
    return (
        (rng.integers(0, 2, count) << 7 | exponent << 3 | rng.integers(0, 8, count))
        .astype(np.uint8)
        .tobytes()
    )


def float32(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).standard_normal(count).astype("<f4").tobytes()


def decoded(codec: FrameCodec, payload: bytes, size_bytes: int) -> bytes:
    """What `decode` makes of it; asserts that nothing around the target is touched."""
    room = bytearray(b"\xa5" * (size_bytes + 128))
    codec.decode(memoryview(payload), memoryview(room)[64 : 64 + size_bytes])
    assert room[:64] == room[-64:] == b"\xa5" * 64
    return bytes(room[64 : 64 + size_bytes])
