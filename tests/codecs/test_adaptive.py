"""What pays is chosen from what was measured, for each namespace anew, in bounded room."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codecs import adaptive, make_codec
from kvtier.codecs.adaptive import MARGIN, SAMPLE_BYTES, SAMPLE_EVERY_BLOCKS, Adaptive, Sample
from kvtier.interfaces import Codec
from tests.codecs.blocks import bfloat16

FINGERPRINT = b"f" * 32
SIZE_BYTES = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Timed(Codec):
    """A codec of known ratio and speeds; its payload is the beginning of a block of zeros."""

    name: ClassVar[str] = "timed"
    wire_id: ClassVar[int] = 9

    def __init__(self, clock: Clock, ratio: float, encode: float, decode: float) -> None:
        self.clock, self.ratio, self.rates = clock, ratio, (encode, decode)
        self.encoded_bytes: list[int] = []

    def encode(self, blocks: Sequence[memoryview]) -> list[bytes | None]:
        self.encoded_bytes += [len(block) for block in blocks]
        self.clock.now_s += sum(map(len, blocks)) / self.rates[0]
        if self.ratio <= 1:
            return [None] * len(blocks)
        return [bytes(block[: int(len(block) / self.ratio)]) for block in blocks]

    def decode(self, payload: memoryview, into: memoryview) -> None:
        self.clock.now_s += len(into) / self.rates[1]


def blocks(count: int = 1) -> list[memoryview]:
    return [memoryview(bytes(SIZE_BYTES))] * count


def known(codec: Timed, rounds: int = 1) -> Adaptive:
    choice = Adaptive([codec], clock=codec.clock)
    for _ in range(rounds):
        choice.encode(FINGERPRINT, blocks(), 1e9)
    return choice


def test_nothing_is_encoded_before_anything_is_known() -> None:
    codec = Timed(Clock(), 2.0, 1e9, 4e9)
    assert Adaptive([codec]).choose(FINGERPRINT, 1e6).name == "raw"
    assert known(codec).choose(b"o" * 32, 1e6).name == "raw"


@pytest.mark.parametrize(
    ("ratio", "bytes_per_s", "is_pipelined", "name"),
    [
        (2.0, 1e9, False, "timed"),  # 0.5 + 0.25 ns a byte against 1
        (2.0, 1e9, True, "raw"),  # encoding takes 1 ns, as long as the way
        (2.0, 0.8e9, True, "timed"),  # 1 ns, the slowest step, against 1.25
        (2.0, 4e9, False, "raw"),  # 0.125 + 0.25 against 0.25
        (1.05, 0.05e9, False, "raw"),  # it would gain less than the margin
        (1.0, 0.01e9, False, "raw"),
    ],
)
def test_a_codec_is_used_where_it_pays(
    ratio: float, bytes_per_s: float, is_pipelined: bool, name: str
) -> None:
    choice = known(Timed(Clock(), ratio, 1e9, 4e9))
    assert choice.choose(FINGERPRINT, bytes_per_s, is_pipelined=is_pipelined).name == name


@given(
    ratio=st.floats(1.01, 4),
    decode=st.floats(1e8, 1e10),
    bytes_per_s=st.floats(1e7, 1e10),
)
def test_what_is_chosen_gains_the_margin(ratio: float, decode: float, bytes_per_s: float) -> None:
    choice = known(Timed(Clock(), ratio, 1e9, decode))
    cost_s = choice.samples(FINGERPRINT)[9].s_per_byte(bytes_per_s, is_pipelined=False)
    gains = cost_s < (1 - MARGIN) / bytes_per_s
    assert (choice.choose(FINGERPRINT, bytes_per_s).name == "timed") == gains


def test_a_codec_that_the_reader_does_not_know_is_not_chosen() -> None:
    choice = known(Timed(Clock(), 2.0, 1e9, 4e9))
    assert choice.choose(FINGERPRINT, 1e6, among=[1, 9]).name == "timed"
    assert choice.choose(FINGERPRINT, 1e6, among=[1, 2]).name == "raw"
    assert choice.encode(FINGERPRINT, blocks(), 1e6, among=[])[0].name == "raw"


def test_one_sample_that_had_to_wait_does_not_decide() -> None:
    codec = Timed(Clock(), 2.0, 1e9, 4e9)
    choice = known(codec)
    codec.rates = (1e6, 1e6)
    choice.encode(FINGERPRINT, blocks(), 1e9)
    assert choice.choose(FINGERPRINT, 0.5e9, is_pipelined=True).name == "timed"
    for _ in range(3):
        choice.encode(FINGERPRINT, blocks(), 1e9)
    assert choice.choose(FINGERPRINT, 0.5e9, is_pipelined=True).name == "raw", "several do"


def test_what_goes_as_it_is_and_is_no_sample_need_not_be_encoded() -> None:
    choice = Adaptive([codec := Timed(Clock(), 2.0, 1e9, 4e9)], clock=codec.clock)
    assert not choice.skips(FINGERPRINT, 1e9), "nothing is known"
    for _ in range(adaptive.FIRST_SAMPLES + 1):
        assert not choice.skips(FINGERPRINT, 4e9)
        choice.encode(FINGERPRINT, blocks(), 4e9)
    assert not choice.skips(FINGERPRINT, 1e8), "the codec pays there"
    assert choice.skips(FINGERPRINT, 1e8, among=[1])
    sampled = len(codec.encoded_bytes)
    skipped = [0]
    for _ in range(3 * SAMPLE_EVERY_BLOCKS):
        if choice.skips(FINGERPRINT, 4e9):
            skipped[-1] += 1
        else:
            choice.encode(FINGERPRINT, blocks(), 4e9)
            skipped.append(0)
    assert skipped[:4] == [2, 7, 15, 31], "what is skipped is counted"
    assert skipped[7:9] == [SAMPLE_EVERY_BLOCKS - 1] * 2
    assert len(codec.encoded_bytes) == sampled + len(skipped) - 1


def test_encode_says_which_codec_made_the_payloads() -> None:
    block = bfloat16(SIZE_BYTES // 2)
    choice = Adaptive([make_codec("lz4"), make_codec("zstd")])
    codec, payloads = choice.encode(FINGERPRINT, [memoryview(block)] * 3, 1e6)  # slower than any processor
    assert codec.name == "zstd"
    for payload in payloads:
        assert payload is not None
        room = bytearray(len(block))
        codec.decode(memoryview(payload), memoryview(room))
        assert room == block
    noise = np.random.default_rng(3).bytes(SIZE_BYTES)
    codec, payloads = choice.encode(b"n" * 32, [memoryview(noise)], 1e6)
    assert (codec.name, payloads) == ("raw", [None])


def test_a_codec_that_becomes_slow_is_given_up_and_comes_back() -> None:
    codec = Timed(Clock(), 2.0, 1e9, 4e9)
    choice = known(codec)
    codec.rates = (1e9, 0.1e9)
    slow = itertools.count()
    while choice.choose(FINGERPRINT, 1e9).name == "timed":
        choice.encode(FINGERPRINT, blocks(SAMPLE_EVERY_BLOCKS), 1e9)
        assert next(slow) < 20
    codec.rates = (1e9, 4e9)
    fast = itertools.count()
    while choice.choose(FINGERPRINT, 1e9).name == "raw":
        choice.encode(FINGERPRINT, blocks(SAMPLE_EVERY_BLOCKS), 1e9)
        assert next(fast) < 40


def test_sampling_costs_little() -> None:
    codec = Timed(Clock(), 1.0, 1e9, 1e9)
    choice = Adaptive([codec], clock=codec.clock)
    for _ in range(2 * SAMPLE_EVERY_BLOCKS):
        choice.encode(FINGERPRINT, blocks(4), 1e9)
    assert sum(codec.encoded_bytes) <= SAMPLE_BYTES * (
        adaptive.FIRST_SAMPLES + 8 + SAMPLE_EVERY_BLOCKS.bit_length()
    )
    assert choice.encode(FINGERPRINT, [], 1e9)[1] == []
    assert choice.encode(FINGERPRINT, [memoryview(b"")], 1e9)[1] == [None]


def test_the_state_is_bounded() -> None:
    codec = Timed(Clock(), 2.0, 1e9, 4e9)
    choice = Adaptive([codec], clock=codec.clock)
    for number in range(adaptive.MAX_NAMESPACES + 50):
        choice.encode(number.to_bytes(32, "big"), [memoryview(bytes(4096))], 1e9)
        choice.encode(FINGERPRINT, [memoryview(bytes(4096))], 1e9)
    assert not choice.samples((0).to_bytes(32, "big"))
    assert choice.samples((adaptive.MAX_NAMESPACES + 49).to_bytes(32, "big"))
    assert choice.samples(FINGERPRINT), "what is in use stays"
    assert len(choice._namespaces) == adaptive.MAX_NAMESPACES


def test_the_first_use_in_a_thread_is_no_measure() -> None:
    """It makes what all others find: scratch memory, contexts."""
    clock = Clock()

    class Cold(Timed):
        def encode(self, blocks: Sequence[memoryview]) -> list[bytes | None]:
            if not self.encoded_bytes:
                self.clock.now_s += 1.0
            return super().encode(blocks)

    choice = known(Cold(clock, 2.0, 1e9, 4e9))
    assert choice.samples(FINGERPRINT)[9].encode_bytes_per_s == pytest.approx(1e9, rel=1e-3)


def test_cost_of_a_byte() -> None:
    sample = Sample(2.0, 1e9, 4e9)
    assert sample.s_per_byte(1e9, is_pipelined=False) == pytest.approx(0.75e-9)
    assert sample.s_per_byte(1e9, is_pipelined=True) == pytest.approx(1e-9)
    assert sample.s_per_byte(0.25e9, is_pipelined=True) == pytest.approx(2e-9)
