"""lz4 and zstd: bit-exact on everything, a fault on everything else."""

from __future__ import annotations

import contextlib
import gc
import struct
import threading
import tracemalloc
from collections.abc import Callable

import lz4.block
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codecs import CODEC_NAMES, MIN_GAIN, codec_of, make_codec
from kvtier.codecs.frame import ANY_ELEMENTS, CHUNK_BYTES_LOG2
from kvtier.codecs.planes import FILTERS, PlaneFilter
from kvtier.errors import ConfigError, Corruption
from tests.codecs.blocks import CODECS, bfloat16, decoded, float32, fp8, frame_codec

CHUNK = 1 << CHUNK_BYTES_LOG2
HEAD_BYTES = 8


def payload_of(name: str, element_bytes: int, block: bytes) -> bytes:
    payload = frame_codec(name, element_bytes).encode([memoryview(block)])[0]
    assert payload is not None
    return payload


@pytest.mark.parametrize(("name", "element_bytes"), CODECS)
@given(
    pieces=st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(bytes, st.integers(0, 5000)),
            st.builds(bfloat16, st.integers(0, 3000), st.integers(0, 9)),
            st.builds(float32, st.integers(0, 900), st.integers(0, 9)),
            st.builds(fp8, st.integers(0, 4001), st.integers(0, 9)),
        ),
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_what_comes_back_is_what_went_in(name: str, element_bytes: int, pieces: list[bytes]) -> None:
    codec = frame_codec(name, element_bytes)
    whole = b"".join(pieces)
    for block, payload in zip(
        [*pieces, whole], codec.encode([memoryview(each) for each in [*pieces, whole]]), strict=True
    ):
        if payload is not None:
            assert len(payload) <= len(block) * (1 - MIN_GAIN)
            assert decoded(codec, payload, len(block)) == block


@pytest.mark.parametrize(
    "size_bytes", [CHUNK - 2, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 3, 3 * CHUNK + 4097, 720 << 10]
)
@pytest.mark.parametrize(("name", "element_bytes"), CODECS)
def test_sizes_around_chunks(name: str, element_bytes: int, size_bytes: int) -> None:
    block = (bytes(CHUNK // 2) + bfloat16(CHUNK))[: size_bytes // 2 + 1]
    block = (block + bytes(size_bytes))[:size_bytes]
    codec = frame_codec(name, element_bytes)
    payload = payload_of(name, element_bytes, block)
    assert decoded(codec, payload, size_bytes) == block


def test_memory_that_is_not_aligned() -> None:
    block = memoryview(b"x" + bfloat16(50_000))[1:]
    codec = frame_codec("zstd", 2)
    payload = codec.encode([block])[0]
    assert payload is not None
    room = bytearray(len(block) + 1)
    codec.decode(memoryview(b"y" + payload)[1:], memoryview(room)[1:])
    assert room[1:] == block


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_the_filter_is_what_makes_bfloat16_smaller(name: str) -> None:
    block = bfloat16(360 << 10)
    plain = frame_codec(name, 1).encode([memoryview(block)])[0]
    filtered = payload_of(name, 2, block)
    assert len(filtered) < (0.92 if name == "lz4" else 0.75) * len(block)
    assert plain is None or len(filtered) < 0.95 * len(plain)


@pytest.mark.parametrize(("name", "element_bytes"), CODECS)
def test_what_gains_nothing_stays_as_it_is(name: str, element_bytes: int) -> None:
    blocks = [np.random.default_rng(1).bytes(size) for size in (0, 1, 7, 1000, CHUNK + 5)]
    assert frame_codec(name, element_bytes).encode([memoryview(each) for each in blocks]) == [None] * 5


@pytest.mark.parametrize(("name", "element_bytes"), CODECS)
def test_any_codec_of_its_name_decodes_whatever_filter_was_used(name: str, element_bytes: int) -> None:
    block = bytes(50_000) + fp8(100_000)
    payload = payload_of(name, element_bytes, block)
    decoder = codec_of(payload[1])
    assert decoder.name == name
    assert decoded(decoder, payload, len(block)) == block  # type: ignore[arg-type]


# ---- hostile payloads


@pytest.mark.parametrize(("name", "element_bytes"), CODECS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_payload_is_a_fault_or_harmless(name: str, element_bytes: int, data: st.DataObject) -> None:
    """What checksums of bytes then have to find is a wrong content, never a wrong size or place."""
    block = bytes(9001) + bfloat16(9000)
    payload = bytearray(payload_of(name, element_bytes, block))
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "garbage"]))
    if kind == "flip":
        for at in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
            payload[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    elif kind == "grow":
        payload += data.draw(st.binary(min_size=1, max_size=20))
    else:
        payload[HEAD_BYTES:] = data.draw(st.binary(max_size=200))
    codec = frame_codec(name, element_bytes)
    if kind in ("cut", "grow"):
        with pytest.raises(Corruption):
            decoded(codec, bytes(payload), len(block))
        return
    with contextlib.suppress(Corruption):
        assert len(decoded(codec, bytes(payload), len(block))) == len(block)


@pytest.mark.parametrize("codec", ["lz4", "zstd", "raw", "lossy-fp8"])
@given(payload=st.binary(max_size=400), size_bytes=st.sampled_from([0, 1, 128, 4096, CHUNK + 2]))
@settings(max_examples=150, deadline=None)
def test_garbage_is_a_fault(codec: str, payload: bytes, size_bytes: int) -> None:
    if codec == "raw" and len(payload) == size_bytes:
        return
    with pytest.raises(Corruption):
        decoded(make_codec(codec), payload, size_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_a_block_of_another_size_is_a_fault(name: str) -> None:
    block = bfloat16(20_000)
    payload = payload_of(name, 2, block)
    for size_bytes in (len(block) - 1, len(block) + 1, len(block) * 2, 0):
        with pytest.raises(Corruption, match="block of"):
            decoded(frame_codec(name, 2), payload, size_bytes)


def test_codecs_do_not_take_each_others_payloads() -> None:
    block = bfloat16(20_000)
    with pytest.raises(Corruption):
        decoded(frame_codec("lz4", 2), payload_of("zstd", 2, block), len(block))


def forged(wire_id: int, block_bytes: int, stored: bytes, chunk_log2: int = 20) -> bytes:
    """One chunk, one plane."""
    return struct.pack("<BBBBII", 1, wire_id, 0, chunk_log2, block_bytes, len(stored)) + stored


def _lz4_bomb() -> bytes:
    return lz4.block.compress(bytes(16 << 20), store_size=False)  # type: ignore[no-any-return]


def _zstd_bomb() -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))


def _zstd_that_says_its_size() -> bytes:
    return zstandard.ZstdCompressor(write_content_size=True).compress(bytes(64 << 20))


def _zstd_that_lies() -> bytes:
    """Frame head alone: 8-byte content size of 1 TiB."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40) + b"\x01\x00\x00"


def _zstd_of_a_huge_window() -> bytes:
    return b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x01\x00\x00"


@pytest.mark.parametrize(
    ("wire_id", "bomb"),
    [
        (1, _lz4_bomb),
        (2, _zstd_bomb),
        (2, _zstd_that_says_its_size),
        (2, _zstd_that_lies),
        (2, _zstd_of_a_huge_window),
    ],
)
def test_bombs_cost_a_chunk(wire_id: int, bomb: Callable[[], bytes]) -> None:
    size_bytes = 1 << 20
    payload = forged(wire_id, size_bytes, bomb())
    assert len(payload) < size_bytes
    room = memoryview(bytearray(size_bytes))
    codec = codec_of(wire_id)
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(Corruption):
            codec.decode(memoryview(payload), room)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("window_log", "is_allowed"), [(18, True), (20, True), (21, False), (27, False)])
def test_a_frame_has_no_larger_window_than_a_chunk(window_log: int, is_allowed: bool) -> None:
    """The window is allocated at the frame's word, where Python does not see it, and kept."""
    block = bfloat16(1000) * 100
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
    compressing = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = compressing.compress(block) + compressing.flush()
    assert zstandard.get_frame_parameters(frame).window_size == 1 << window_log
    payload = forged(2, len(block), frame)
    if is_allowed:
        assert decoded(frame_codec("zstd", 2), payload, len(block)) == block
        return
    with pytest.raises(Corruption, match="too much memory"):
        decoded(frame_codec("zstd", 2), payload, len(block))


def test_tables_that_promise_too_much() -> None:
    """Sizes whose sum overflows 32 bits, a chunk of four bytes, a chunk of 2^255."""
    size_bytes = 2 * CHUNK
    for log2 in (0, 2, 11, 21, 31, 63, 255):
        head = struct.pack("<BBBBI", 1, 2, 1, log2, size_bytes)
        with pytest.raises(Corruption):
            decoded(frame_codec("zstd", 2), head + bytes(1000), size_bytes)
    for sizes in ([2**32 - 1] * 4, [2**31, 2**31, 0, 0], [CHUNK] * 4, [0, 0, 0, 0]):
        head = struct.pack("<BBBBI4I", 1, 2, 1, CHUNK_BYTES_LOG2, size_bytes, *sizes)
        with pytest.raises(Corruption):
            decoded(frame_codec("zstd", 2), head, size_bytes)


# ---- filters, names, threads


@pytest.mark.parametrize("filter", FILTERS, ids=lambda each: type(each).__name__)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_filters_put_each_byte_of_a_word_into_its_plane(filter: PlaneFilter, data: st.DataObject) -> None:
    words = data.draw(st.integers(0, 200))
    assert filter.word_bytes == filter.planes
    planes_count = filter.planes
    chunk = np.frombuffer(
        data.draw(st.binary(min_size=words * planes_count, max_size=words * planes_count)), np.uint8
    )
    planes = [np.zeros(words, np.uint8) for _ in range(planes_count)]
    filter.split(chunk, planes)
    for number, plane in enumerate(planes):
        assert plane.tobytes() == chunk[number::planes_count].tobytes()
    back = np.zeros_like(chunk)
    filter.merge(planes, back)
    assert back.tobytes() == chunk.tobytes()


def test_names_and_wire_ids() -> None:
    for wire_id, name in enumerate(CODEC_NAMES):
        codec = codec_of(wire_id)
        assert (codec.name, codec.wire_id) == (name, wire_id)
        assert codec.is_lossy == ("lossy" in name)
    for wire_id in (-1, len(CODEC_NAMES), 255):
        with pytest.raises(Corruption):
            codec_of(wire_id)
    with pytest.raises(ConfigError, match="allowed are raw, lz4, zstd"):
        make_codec("gzip")
    with pytest.raises(ConfigError, match="elements of 3 bytes"):
        make_codec("lz4", 3)


def test_payloads_on_disk_stay_readable() -> None:
    """A payload of each codec as an earlier version wrote it: a change of the form needs a new version."""
    block = bytes(range(64)) * 4 + bytes(257)
    assert len(block) == 513
    for wire_id, hexadecimal in PAYLOADS.items():
        assert decoded(codec_of(wire_id), bytes.fromhex(hexadecimal), 513) == block  # type: ignore[arg-type]


PAYLOADS = {
    1: "01010112010200002f00000030000000ff1100020406080a0c0e10121416181a1c1e20222426282a2c2e30323436383a"
    "3c3e20004e0f010067500000000000ff1101030507090b0d0f11131517191b1d1f21232527292b2d2f31333537393b3d"
    "3f20004d1f0001006750000000000000",
    2: "0102011201020000340000003500000028b52ffd00005d0100040200020406080a0c0e10121416181a1c1e2022242628"
    "2a2c2e30323436383a3c3e02001ca4003e26f50428b52ffd0000650100140201030507090b0d0f11131517191b1d1f21"
    "232527292b2d2f31333537393b3d3f0002001c970af498d41300",
}


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_one_codec_in_many_threads(name: str) -> None:
    codec = frame_codec(name, 2)
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for round in range(6):
                block = bfloat16(150_000 + seed * 1000, seed * 10 + round)
                payload = codec.encode([memoryview(block)])[0]
                assert payload is not None
                assert decoded(codec, payload, len(block)) == block
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.mark.parametrize("name", ["lz4", "zstd"])
@given(
    pieces=st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(bytes, st.integers(0, 5000)),
            st.builds(bfloat16, st.integers(0, 9000), st.integers(0, 9)),
            st.builds(float32, st.integers(0, 900), st.integers(0, 9)),
            st.builds(fp8, st.integers(0, 4001), st.integers(0, 9)),
        ),
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_elements_that_are_not_told_are_found_out(name: str, pieces: list[bytes]) -> None:
    codec = frame_codec(name, ANY_ELEMENTS)
    for block in (*pieces, b"".join(pieces)):
        payload = codec.encode([memoryview(block)])[0]
        assert payload is None or decoded(codec, payload, len(block)) == block


@pytest.mark.parametrize(
    ("block", "element_bytes"), [(fp8(CHUNK), 1), (bfloat16(CHUNK), 2), (float32(CHUNK), 4)]
)
def test_elements_that_are_not_told_compress_as_if_they_were(block: bytes, element_bytes: int) -> None:
    told = payload_of("zstd", element_bytes, block)
    assert len(payload_of("zstd", ANY_ELEMENTS, block)) == len(told)
