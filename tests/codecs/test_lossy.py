"""The lossy codec: rounding once, then bit-exact; never under the keys of exact blocks."""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codecs import CODEC_NAMES, codec_of, make_codec
from kvtier.codecs.adaptive import Adaptive
from kvtier.codecs.lossy_fp8 import GROUP_ELEMENTS, LossyFp8Codec, lossy_kv_dtype, round_blocks
from kvtier.errors import ConfigError, Corruption, InvalidRequest
from kvtier.types import Namespace, chain_keys
from tests.codecs.blocks import bfloat16

GROUP_BYTES = 2 * GROUP_ELEMENTS
HEAD_BYTES = 8


def values(block: bytes | bytearray) -> npt.NDArray[np.float64]:
    return (np.frombuffer(block, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(block: bytes) -> bytes:
    copy = bytearray(block)
    round_blocks([memoryview(copy)])
    return bytes(copy)


def check(block: bytes) -> bytes | None:
    """Rounding is idempotent, and what it made is encoded exactly, where it made anything."""
    once = rounded(block)
    assert rounded(once) == once
    payload = LossyFp8Codec().encode([memoryview(once)])[0]
    if payload is not None:
        assert len(payload) < 0.6 * len(block) or len(block) < 1000
        room = bytearray(len(block))
        LossyFp8Codec().decode(memoryview(payload), memoryview(room))
        assert room == once
    return payload


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_bits(data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 3))
    block = data.draw(st.binary(min_size=groups * GROUP_BYTES, max_size=groups * GROUP_BYTES))
    check(block)


@given(
    words=st.lists(
        st.tuples(st.booleans(), st.integers(0, 254), st.integers(0, 127)),
        min_size=GROUP_ELEMENTS,
        max_size=GROUP_ELEMENTS,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_finite_values_are_encoded(words: list[tuple[bool, int, int]]) -> None:
    block = np.array([s << 15 | e << 7 | m for s, e, m in words], "<u2").tobytes()
    assert check(block) is not None


@pytest.mark.parametrize("seed", range(3))
def test_the_error_is_that_of_three_bits_of_mantissa(seed: int) -> None:
    block = bfloat16(64_000, seed)
    assert check(block) is not None
    before, after = values(block), values(rounded(block))
    top = np.abs(before.reshape(-1, GROUP_ELEMENTS)).max(axis=1).repeat(GROUP_ELEMENTS)
    error = np.abs(before - after)
    # A 16th of the value, or what subnormals of the group are apart.
    assert (error <= np.maximum(np.abs(before) / 16, top * 2.0**-17)).all()
    assert np.linalg.norm(error) < 0.04 * np.linalg.norm(before)
    assert len(set(np.frombuffer(rounded(block), "<u2").tolist())) < len(
        set(np.frombuffer(block, "<u2").tolist())
    )


def test_ties_go_to_even_and_none_to_a_larger_exponent() -> None:
    #     1.0     1.0625 (tie)  1.1875 (tie)  1.9921875
    words = [0x3F80, 0x3F88, 0x3F98, 0x3FFF]
    block = np.array(words + [0] * (GROUP_ELEMENTS - 4), "<u2").tobytes()
    assert values(rounded(block))[:4].tolist() == [1.0, 1.0, 1.25, 1.875]


@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC0])
def test_blocks_with_infinities_and_nan_stay_exact(word: int) -> None:
    block = bytearray(bfloat16(640))
    block[200:202] = word.to_bytes(2, "little")
    assert rounded(bytes(block)) == block
    assert LossyFp8Codec().encode([memoryview(block)]) == [None]


def test_blocks_that_were_not_rounded_stay_as_they_are() -> None:
    exact = bfloat16(6400)
    assert LossyFp8Codec().encode([memoryview(exact), memoryview(rounded(exact))])[0] is None
    for size_bytes in (0, 1, GROUP_BYTES - 2, GROUP_BYTES + 1):
        odd = bfloat16(200)[:size_bytes]
        assert rounded(odd) == odd
        assert LossyFp8Codec().encode([memoryview(odd)]) == [None]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_payloads(data: st.DataObject) -> None:
    block = rounded(bfloat16(256))
    payload = bytearray(LossyFp8Codec().encode([memoryview(block)])[0] or b"")
    assert payload
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    room = memoryview(bytearray(len(block)))
    expected = (
        pytest.raises(Corruption)
        if at < HEAD_BYTES or (at < HEAD_BYTES + 4 and (0 < payload[at] < 20 or payload[at] == 255))
        else contextlib.nullcontext()
    )
    with expected:
        LossyFp8Codec().decode(memoryview(payload), room)


def test_cut_payloads() -> None:
    block = rounded(bfloat16(256))
    payload = LossyFp8Codec().encode([memoryview(block)])[0]
    assert payload is not None
    for count in (0, 7, 8, len(payload) - 1):
        with pytest.raises(Corruption):
            LossyFp8Codec().decode(memoryview(payload[:count]), memoryview(bytearray(len(block))))
    with pytest.raises(Corruption):
        LossyFp8Codec().decode(memoryview(payload + b"x"), memoryview(bytearray(len(block))))


def test_lossy_and_exact_blocks_have_different_keys() -> None:
    namespaces = [
        Namespace(b"weights", dtype, bytes(32), 16)
        for dtype in ("bfloat16", lossy_kv_dtype("bfloat16"), "fp8")
    ]
    chains = [chain_keys(space.root(), range(160), 16) for space in namespaces]
    assert len({key for chain in chains for key in chain}) == 3 * 10
    for dtype in ("float16", "fp8", lossy_kv_dtype("bfloat16")):
        with pytest.raises(InvalidRequest, match="lossy"):
            lossy_kv_dtype(dtype)


def test_lossy_is_said_wherever_the_codec_is_named() -> None:
    codec = make_codec("lossy-fp8")
    assert codec.is_lossy
    assert "lossy" in codec.name
    assert "lossy" in CODEC_NAMES[codec.wire_id]
    assert "lossy" in lossy_kv_dtype("bfloat16")
    assert codec_of(codec.wire_id).is_lossy
    with pytest.raises(ConfigError, match="lossy"):
        Adaptive([codec])
