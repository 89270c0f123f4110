"""What do codecs gain on real KV, how fast are they, and from which device or link on does each pay?

The KV is SmolLM2-135M's own: its prefill of this repository's documents, in blocks of `BLOCK_TOKENS` tokens,
layer by layer, keys beside values for each head and token, as vLLM lays them out on a CPU (which permutes
further inside of a layer's block; what codecs see are the same bytes in another order). In bfloat16, and as
float8 e4m3, as engines' own 8-bit caches have it.

Everything runs on one thread. Speeds are of blocks, before or after the codec, in interleaved rounds. A codec
**pays** below the rate at which ``1 / rate = 1 / (ratio rate) + 1 / decode``, or with ``1 / encode`` besides
where somebody waits for the encoding (a transfer): the steps one after the other, the worst case.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from bench.common import Memcpy, at_least, interleave, median, seconds, void_reason
from kvtier.codecs.frame import CHUNK_BYTES_LOG2
from kvtier.codecs.lossy_fp8 import LossyFp8Codec, round_blocks
from kvtier.codecs.lz4 import Lz4Codec
from kvtier.codecs.planes import FILTERS, Bytes, BytesOf16, PlaneFilter
from kvtier.codecs.zstd import ZstdCodec
from kvtier.demo import model
from kvtier.interfaces import Codec

BLOCK_TOKENS: Final = 32
PROMPT_TOKENS: Final = 4096
PREFILL_TOKENS: Final = 512
BLOCKS: Final = 24
FILTER_BYTES: Final = 64 << 20
FILTER_BYTES_PER_S: Final = 2e9
DOCUMENTS: Final = ("ARCHITECTURE.md", "README.md", "LICENSE")
ROOT: Final = Path(__file__).parent.parent


class NibblesOf8(PlaneFilter):
    """Low, then high halves of bytes, two to a byte: not shipped, since it gains less than no filter."""

    id = 255
    word_bytes = 2
    planes = 2

    def __init__(self) -> None:
        self._words = [np.empty(1 << CHUNK_BYTES_LOG2, "<u2") for _ in range(2)]

    def split(self, chunk: Bytes, planes: Sequence[Bytes]) -> None:
        """Two neighbours at once, as one 16-bit word."""
        words = chunk.view("<u2")
        one, two = (scratch[: len(words)] for scratch in self._words)
        for plane, shift in ((planes[0], 0), (planes[1], 4)):
            np.right_shift(words, shift, out=one)
            np.bitwise_and(one, 0x0F, out=one)
            np.right_shift(words, 4 + shift, out=two)
            np.bitwise_and(two, 0xF0, out=two)
            np.bitwise_or(one, two, out=one)
            np.copyto(plane, one, casting="unsafe")

    def merge(self, planes: Sequence[Bytes], chunk: Bytes) -> None:
        """Spread each byte over one 16-bit word."""
        words = chunk.view("<u2")
        one, two = (scratch[: len(words)] for scratch in self._words)
        words[:] = 0
        for plane, shift in ((planes[0], 0), (planes[1], 4)):
            np.copyto(one, plane)
            np.left_shift(one, 4 + shift, out=two)
            np.bitwise_and(two, 0xF00 << shift, out=two)
            np.bitwise_and(one, 0x0F, out=one)
            np.left_shift(one, shift, out=one)
            np.bitwise_or(words, one, out=words)
            np.bitwise_or(words, two, out=words)


@dataclass(slots=True)
class Case:
    """A codec on blocks of one kind; `payloads` of the latest `encode`."""

    codec: Codec
    blocks: list[memoryview]
    payloads: list[bytes | None] = field(default_factory=list)
    into: list[bytearray] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """Of the blocks."""
        return sum(map(len, self.blocks))

    def encode(self) -> float:
        """Seconds."""
        return seconds(self._encode)

    def _encode(self) -> None:
        self.payloads = self.codec.encode(self.blocks)

    def decode(self) -> float:
        """Seconds; blocks that stayed as they are are copied."""
        if not self.into:
            self.into = [bytearray(len(block)) for block in self.blocks]
        return seconds(self._decode)

    def _decode(self) -> None:
        for block, payload, into in zip(self.blocks, self.payloads, self.into, strict=True):
            if payload is None:
                into[:] = block
            else:
                self.codec.decode(memoryview(payload), memoryview(into))

    def figures(self, encode_s: list[float], decode_s: list[float]) -> dict[str, Any]:
        """What came of it; asserts that it is bit-exact."""
        assert all(block == into for block, into in zip(self.blocks, self.into, strict=True))
        stored = sum(
            len(block if payload is None else payload)
            for block, payload in zip(self.blocks, self.payloads, strict=True)
        )
        ratio = self.size_bytes / stored
        encode, decode = self.size_bytes / median(encode_s), self.size_bytes / median(decode_s)
        gain = 1 - 1 / ratio
        return {
            "ratio": ratio,
            "kept_as_they_are": sum(payload is None for payload in self.payloads),
            "encode_bytes_per_s": encode,
            "decode_bytes_per_s": decode,
            "pays_below_bytes_per_s": gain * decode,
            "pays_below_bytes_per_s_if_encoding_waits": gain / (1 / decode + 1 / encode),
        }


def real_kv() -> tuple[list[memoryview], list[memoryview]]:
    """Blocks of SmolLM2's KV for a real text: as bfloat16, and the same as float8 e4m3."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    directory = model.prepare(lambda line: print(f"bench codecs: {line}", file=sys.stderr, flush=True))
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS)
    ids = AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt").input_ids[:, :PROMPT_TOKENS]
    network: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    cache: Any = DynamicCache()
    with torch.inference_mode():
        for begin in range(0, ids.shape[1], PREFILL_TOKENS):
            network.model(ids[:, begin : begin + PREFILL_TOKENS], past_key_values=cache, use_cache=True)
    layers = torch.stack([torch.cat([layer.keys[0], layer.values[0]], -1) for layer in cache.layers])
    count, heads, tokens, width = layers.shape
    blocks = layers[:, :, : tokens // BLOCK_TOKENS * BLOCK_TOKENS]
    blocks = blocks.reshape(count, heads, -1, BLOCK_TOKENS, width).permute(2, 0, 1, 3, 4).contiguous()
    assert len(blocks) >= 2 * BLOCKS, "the documents are too short"
    chosen = blocks[:: len(blocks) // BLOCKS][:BLOCKS]
    narrow = blocks[:: len(blocks) // (2 * BLOCKS)][: 2 * BLOCKS].to(torch.float8_e4m3fn)
    return _views(chosen.view(torch.uint8).numpy()), _views(narrow.view(torch.uint8).numpy())


def _views(blocks: npt.NDArray[np.uint8]) -> list[memoryview]:
    return [memoryview(block.tobytes()) for block in blocks]


def codec_cases(wide: list[memoryview], narrow: list[memoryview]) -> dict[str, Case]:
    """Every codec that is shipped, and what it was chosen over."""
    none = FILTERS[0]
    level_1 = zstandard.ZstdCompressionParameters.from_level(1, write_content_size=False)
    rounded = [bytearray(block) for block in wide]
    round_blocks([memoryview(block) for block in rounded])
    return {
        "bfloat16: lz4": Case(Lz4Codec(2), wide),
        "bfloat16: zstd": Case(ZstdCodec(2), wide),
        "bfloat16: lossy-fp8 (rounded before)": Case(LossyFp8Codec(), [memoryview(each) for each in rounded]),
        "bfloat16: lz4 without filter": Case(Lz4Codec(filter=none), wide),
        "bfloat16: zstd without filter": Case(ZstdCodec(filter=none), wide),
        "bfloat16: zstd level 1": Case(ZstdCodec(2, parameters=level_1), wide),
        "float8: lz4": Case(Lz4Codec(1), narrow),
        "float8: zstd": Case(ZstdCodec(1), narrow),
        "float8: zstd level 1": Case(ZstdCodec(1, parameters=level_1), narrow),
    }


class Filtering:
    """One way to cut 64 MiB into planes and back, in chunks."""

    def __init__(self, filter: PlaneFilter, source: Bytes) -> None:
        self._filter = filter
        self._source = source
        self._target = np.zeros_like(source)
        self._chunk_bytes = 1 << CHUNK_BYTES_LOG2
        self._planes = [np.zeros(self._chunk_bytes // filter.planes, np.uint8) for _ in range(filter.planes)]

    def split(self) -> float:
        """Bytes a second."""
        return self._rate(
            lambda at: self._filter.split(self._source[at : at + self._chunk_bytes], self._planes)
        )

    def merge(self) -> float:
        """Bytes a second."""
        return self._rate(
            lambda at: self._filter.merge(self._planes, self._target[at : at + self._chunk_bytes])
        )

    def _rate(self, work: Callable[[int], None]) -> float:
        def all_of_it() -> None:
            for at in range(0, len(self._source), self._chunk_bytes):
                work(at)

        return len(self._source) / seconds(all_of_it)


class StridedBytes(BytesOf16):
    """The obvious way: every second byte."""

    def split(self, chunk: Bytes, planes: Sequence[Bytes]) -> None:
        """Copy with a stride."""
        np.copyto(planes[0], chunk[0::2])
        np.copyto(planes[1], chunk[1::2])

    def merge(self, planes: Sequence[Bytes], chunk: Bytes) -> None:
        """Copy with a stride."""
        chunk[0::2] = planes[0]
        chunk[1::2] = planes[1]


def torch_split(source: Bytes) -> Callable[[], float]:
    """The same by a transposing copy of torch: bytes a second."""
    import torch

    chunk_bytes = 1 << CHUNK_BYTES_LOG2
    planes = torch.zeros(2, chunk_bytes // 2, dtype=torch.uint8)
    pairs = torch.from_numpy(source).view(-1, 2)

    def all_of_it() -> None:
        for at in range(0, len(pairs), chunk_bytes // 2):
            planes.copy_(pairs[at : at + chunk_bytes // 2].t())

    def arm() -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return len(source) / seconds(all_of_it)
        finally:
            torch.set_num_threads(threads)

    return arm


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; see the module."""
    wide, narrow = real_kv()
    memcpy = Memcpy()
    source = np.resize(np.frombuffer(b"".join(wide), np.uint8), FILTER_BYTES)
    filters, rates = _measure_filters(source, memcpy, args.rounds)
    codecs = _measure_codecs(codec_cases(wide, narrow), args.rounds)
    codecs |= _measure_codecs({"float8: zstd, halves": _halves(narrow)}, args.rounds)
    return {
        "targets": {
            "byte planes, split, GB/s": at_least(
                filters["byte planes, split"] / 1e9, FILTER_BYTES_PER_S / 1e9
            ),
            "byte planes, merge, GB/s": at_least(
                filters["byte planes, merge"] / 1e9, FILTER_BYTES_PER_S / 1e9
            ),
        },
        "block_bytes": {"bfloat16": len(wide[0]), "float8": len(narrow[0])},
        "chunk_bytes": 1 << CHUNK_BYTES_LOG2,
        "filters_bytes_per_s": filters,
        "codecs": codecs,
        "memcpy_bytes_per_s": median(rates),
        "void": void_reason(median(rates)),
    }


def _measure_filters(source: Bytes, memcpy: Memcpy, rounds: int) -> tuple[dict[str, float], list[float]]:
    arms: dict[str, Callable[[], float]] = {"memcpy": memcpy}
    for name, filter in (
        ("byte planes", FILTERS[1]),
        ("byte planes of 32 bits", FILTERS[2]),
        ("strided copies", StridedBytes()),
        ("halves of bytes", NibblesOf8()),
    ):
        filtering = Filtering(filter, source)
        arms[f"{name}, split"] = filtering.split
        arms[f"{name}, merge"] = filtering.merge
    arms["torch, split"] = torch_split(source)
    print("bench codecs: filters", file=sys.stderr, flush=True)
    for arm in arms.values():
        arm()
    raw = interleave(arms, rounds)
    return {name: median(values) for name, values in raw.items()}, raw["memcpy"]


def _measure_codecs(cases: dict[str, Case], rounds: int) -> dict[str, Any]:
    print(f"bench codecs: {', '.join(cases)}", file=sys.stderr, flush=True)

    def both(case: Case) -> tuple[float, float]:
        return case.encode(), case.decode()

    arms = {name: partial(both, case) for name, case in cases.items()}
    for arm in arms.values():
        arm()
    raw = interleave(arms, rounds)
    return {
        name: case.figures([encode for encode, _ in raw[name]], [decode for _, decode in raw[name]])
        for name, case in cases.items()
    }


def _halves(narrow: list[memoryview]) -> Case:
    """Blocks whose bytes are cut into halves beforehand; the cutting is measured among the filters."""
    filter, cut = NibblesOf8(), []
    for block in narrow:
        chunk = np.frombuffer(block, np.uint8)
        planes = [np.empty(len(chunk) // 2, np.uint8) for _ in range(2)]
        filter.split(chunk, planes)
        back = np.empty_like(chunk)
        filter.merge(planes, back)
        assert np.array_equal(back, chunk)
        cut += [memoryview(plane.tobytes()) for plane in planes]
    return Case(ZstdCodec(1), cut)
