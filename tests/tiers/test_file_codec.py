"""Codecs in the file tier: what is written as a payload is read bit for bit, and a payload of lies never."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.codecs.lossy_fp8 import LossyFp8Codec, round_blocks
from kvtier.codecs.zstd import ZstdCodec
from kvtier.errors import ConfigError
from kvtier.testing.tier_tests import record_of
from kvtier.tiers import file_format, file_packing
from kvtier.tiers.file import FileTier
from kvtier.tiers.file_format import Form, Header
from kvtier.tiers.file_threads import KEPT_PAYLOAD_BYTES, RATED_BYTES, RATED_FROM_BYTES, Rate, Scratch
from kvtier.types import PAGE_SIZE_BYTES, Slot, whole_pages
from tests.codecs.blocks import bfloat16, fp8
from tests.tiers import file_harness
from tests.tiers.file_harness import KIB, MIB, Blocks, Medium, abandon, found_by

BLOCK = 60 * KIB  # in slots of 64 KiB, two in an extent
RAW, LZ4, ZSTD = 0, 1, 2


def floats(size_bytes: int, seed: int) -> bytes:
    """Of so few bits that every codec gains a lot."""
    words = np.frombuffer(bfloat16(-(-size_bytes // 2), seed), "<u2")
    return (words & 0xFF00).tobytes()[:size_bytes]


def opened(*paths: Path, **options: Any) -> Any:
    """A tier with one thread: what others write while the first block is sampled is not encoded."""
    return file_harness.opened(*paths, threads=1, **options)


class Kv(Blocks):
    """Blocks of floats, of which every `random_each`-th is nothing but noise."""

    def __init__(self, count: int, block_bytes: int = BLOCK, *, seed: int = 0, random_each: int = 0) -> None:
        super().__init__(count, block_bytes, seed)
        for number in range(count):
            if not random_each or number % random_each != random_each - 1:
                self.payloads[number] = floats(block_bytes, seed * 1000 + number)
        self.records = [record_of(payload) for payload in self.payloads]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def headers(path: Path, blocks: Blocks) -> list[Header]:
    """What the medium's headers say."""
    medium = Medium(path)
    found = [
        file_format.read_header(medium.superblock.medium, medium.get(medium.offset_of(slot), 192))
        for slot in blocks.slots
    ]
    assert all(header is not None for header in found)
    return [header for header in found if header is not None]


async def stored(path: Path, codec: str = "zstd", count: int = 12, **options: Any) -> Kv:
    """A medium with some blocks, closed in order."""
    async with opened(path, codec=codec) as tier:
        return await Kv(count, **options).write(tier)  # type: ignore[return-value]


# ---- what is written, what is read


@pytest.mark.parametrize(("codec", "wire_id"), [("raw", RAW), ("lz4", LZ4), ("zstd", ZSTD)])
@pytest.mark.parametrize("block_bytes", [BLOCK, BLOCK - 100, 9 * KIB, 2 * MIB + 4096])
async def test_blocks_lie_there_as_the_codec_makes_them(
    path: Path, codec: str, wire_id: int, block_bytes: int
) -> None:
    options = {"capacity_bytes": 40 * MIB, "extent_bytes": 4 * MIB, "codec": codec}
    raw_bytes = 8 * (PAGE_SIZE_BYTES + whole_pages(block_bytes))
    async with opened(path, **options) as tier:
        before_bytes = tier.written_bytes
        blocks = await Kv(8, block_bytes).write(tier)
        written_bytes = tier.written_bytes - before_bytes
        assert await blocks.wrong(tier) == []
        read_bytes = tier.read_bytes
        await blocks.wrong(tier)
        assert (tier.read_bytes - read_bytes < raw_bytes) == (codec != "raw"), "only payloads are read"
    assert {header.form.codec for header in headers(path, blocks)} == {wire_id}
    assert (written_bytes < raw_bytes) == (codec != "raw")
    for other in ("raw", "zstd"):  # what is configured is for writing alone
        async with opened(path, **(options | {"codec": other})) as tier:
            assert found_by(tier) == blocks.pairs()
            assert await blocks.wrong(tier) == []


async def test_what_gains_no_page_stays_as_it_is(path: Path) -> None:
    async with opened(path, codec="zstd") as tier:
        small = await Kv(8, PAGE_SIZE_BYTES).write(tier)
        noise = await Kv(8, random_each=1).write(tier, first=4)
        assert await small.wrong(tier) == await noise.wrong(tier) == []
    assert {header.form.codec for blocks in (small, noise) for header in headers(path, blocks)} == {RAW}


async def test_payloads_and_raw_blocks_lie_side_by_side(path: Path) -> None:
    async with opened(path, codec="zstd") as tier:
        blocks = await Kv(16, 12 * KIB, random_each=3).write(tier)
        assert {header.form.codec for header in headers(path, blocks)} == {RAW, ZSTD}
        for positions in (range(16), [5, 4, 3, 9], [0, 15], [7]):
            assert await blocks.wrong(tier, positions) == []
        again = await Kv(16, 12 * KIB, seed=1, random_each=2).write(tier)
        assert await again.wrong(tier) == []
        assert await blocks.wrong(tier) == list(range(16))
        await again.write(tier)


async def test_a_start_from_the_headers_alone_reads_payloads(path: Path) -> None:
    async with opened(path, codec="lz4") as tier:
        blocks = await Kv(12, random_each=4).write(tier)
        await abandon(tier)
    async with opened(path) as tier:
        assert found_by(tier) == blocks.pairs()
        assert await blocks.wrong(tier) == []


async def test_nothing_of_an_older_block_is_written_behind_a_payload(path: Path) -> None:
    async with opened(path, codec="zstd") as tier:
        secret = Kv(1, 56 * KIB)
        secret.payloads[0] = bytes(8 * KIB) + b"secret! " * (48 * KIB // 8)
        secret.records = [record_of(payload) for payload in secret.payloads]
        await secret.write(tier)
        await tier.drop(secret.slots)
        blocks = await Kv(2).write(tier, first=2)
    medium = Medium(path)
    for slot, header in zip(blocks.slots, headers(path, blocks), strict=True):
        begin = medium.offset_of(slot) + PAGE_SIZE_BYTES + header.form.payload_bytes
        assert not any(medium.get(begin, -begin % PAGE_SIZE_BYTES))


# ---- lies


def forge(path: Path, slot: Slot, form: Form, payload: bytes | None = None, **record: Any) -> None:
    """A header that only somebody can write who knows the medium, and what stands behind it."""
    medium = Medium(path)
    key = medium.superblock.medium
    header = file_format.read_header(key, medium.get(medium.offset_of(slot), 192))
    assert header is not None
    fields = (replace(header.record, **record), header.place, form, header.position)
    medium.put(medium.offset_of(slot), file_format.pack_header(key, *fields))
    if payload is not None:
        medium.put(medium.offset_of(slot) + PAGE_SIZE_BYTES, payload)


@pytest.mark.parametrize("where", [0, 1, 5, 40, 5000, -1])
async def test_a_flipped_bit_in_a_payload_is_never_served(path: Path, where: int) -> None:
    blocks = await stored(path)
    medium = Medium(path)
    for position in (0, 11):
        payload_bytes = headers(path, blocks)[position].form.payload_bytes
        begin = medium.offset_of(blocks.slots[position]) + PAGE_SIZE_BYTES
        medium.flip(begin + where % payload_bytes)
    async with opened(path, codec="zstd") as tier:
        assert await blocks.wrong(tier) == [0, 11]


FORMS = [
    Form(LZ4, 30_000),
    Form(ZSTD, 1),
    Form(ZSTD, 0),
    Form(ZSTD, BLOCK),
    Form(ZSTD, 2**63),
    Form(RAW, BLOCK),
    Form(RAW, 5),
    Form(3, 40_000),
    Form(4, 40_000),
    Form(65_535, 40_000),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_catalogue", [True, False])
async def test_a_forged_form_is_never_served(path: Path, form: Form, has_catalogue: bool) -> None:
    blocks = await stored(path)
    forge(path, blocks.slots[3], form)
    if not has_catalogue:
        begin, size_bytes = Medium(path).catalogues
        Medium(path).put(begin, bytes(size_bytes))
    async with opened(path, codec="zstd") as tier:
        assert await blocks.wrong(tier) == [3]
        await tier.drop([blocks.slots[3]])
        assert await blocks.wrong(tier) == [3]


async def test_a_forged_catalogue_leads_nowhere(path: Path) -> None:
    """The catalogue's rows are not compared with anything before they are read by."""
    blocks = await stored(path)
    async with opened(path, codec="zstd") as tier:
        for number, form in enumerate(FORMS):
            extent = tier._extents[blocks.slots[number].extent]
            index = tier._index(blocks.slots[number])
            header = file_format.unpack_row(extent.row(index))
            row = file_format.pack_header(bytes(16), header.record, header.place, form, header.position)
            extent.set_row(index, row)
        assert await blocks.wrong(tier) == list(range(len(FORMS)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_any_payload_is_a_miss_or_the_block(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("payload") / "tier"
    codec = data.draw(st.sampled_from([LZ4, ZSTD]))
    blocks = await stored(path, ("lz4", "zstd")[codec - 1], count=2)
    medium = Medium(path)
    before = headers(path, blocks)[0].form
    begin = medium.offset_of(blocks.slots[0]) + PAGE_SIZE_BYTES
    payload = bytearray(medium.get(begin, before.payload_bytes))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 40) | st.integers(0, len(payload) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 4) | st.just(bytes(4)))
        payload[at : at + len(piece)] = piece
    size_bytes = data.draw(st.just(len(payload)) | st.integers(1, 56 * KIB))
    forge(path, blocks.slots[0], Form(codec, size_bytes), bytes(payload))
    async with opened(path) as tier:
        await blocks.wrong(tier)  # compares what is served
        assert await blocks.wrong(tier, [1]) == []


async def test_a_block_that_crashes_no_recovery(path: Path) -> None:
    """After a crash payloads are decoded before anything is known of them."""
    async with opened(path, codec="zstd") as tier:
        blocks = await Kv(12).write(tier)
        await abandon(tier)
    for number, form in enumerate(FORMS):
        forge(path, blocks.slots[number], form)
    async with opened(path) as tier:
        assert found_by(tier) == blocks.pairs()[len(FORMS) :]
        assert await blocks.wrong(tier, [10, 11]) == []


async def test_rounded_values_never_stand_for_exact_ones(path: Path) -> None:
    """A payload of the lossy codec, whole and in its place, of a block that was not rounded."""
    async with opened(path) as tier:
        blocks = Kv(2)
        blocks.payloads = [bfloat16(BLOCK // 2, seed) for seed in range(2)]
        blocks.records = [record_of(payload) for payload in blocks.payloads]
        await blocks.write(tier)
        await abandon(tier)
    rounded = bytearray(blocks.payloads[0])
    round_blocks([memoryview(rounded)])
    payload = LossyFp8Codec().encode([memoryview(rounded)])[0]
    assert payload is not None
    assert rounded != blocks.payloads[0]
    forge(path, blocks.slots[0], Form(LossyFp8Codec.wire_id, len(payload)), payload)
    async with opened(path) as tier:
        assert found_by(tier) == blocks.pairs()[1:]
        assert await blocks.wrong(tier) == [0]


# ---- codecs that fail


def out_of_memory(*_: object) -> bytes:
    raise MemoryError


async def test_a_codec_that_fails_costs_its_gain_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_s = 0.0
    async with opened(path, codec="zstd", clock_s=lambda: time.monotonic() + ahead_s) as tier:
        before = await Kv(4).write(tier)
        with monkeypatch.context() as patch:
            patch.setattr(ZstdCodec, "_compress", out_of_memory)
            blocks = await Kv(4, seed=1).write(tier, first=4)
        paused = await Kv(4, seed=2).write(tier, first=8)
        ahead_s = file_packing.PAUSE_S + 1
        after = await Kv(4, seed=3).write(tier, first=12)
        written = (before, blocks, paused, after)
        assert [await its.wrong(tier) for its in written] == [[], [], [], []]
    assert [forms(path, its) for its in written] == [{ZSTD}, {RAW}, {RAW}, {ZSTD}]


async def test_a_codec_that_fails_is_a_miss(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While blocks are read, and while a start looks for torn ones."""
    async with opened(path, codec="zstd") as tier:
        blocks = await Kv(8, random_each=2).write(tier)
        assert forms(path, blocks) == {RAW, ZSTD}
        with monkeypatch.context() as patch:
            patch.setattr(ZstdCodec, "_decompress", out_of_memory)
            assert await blocks.wrong(tier) == [0, 2, 4, 6]
        assert not tier.fault
        assert await blocks.wrong(tier) == []
        await abandon(tier)
    monkeypatch.setattr(ZstdCodec, "_decompress", out_of_memory)
    async with opened(path, codec="zstd") as tier:
        assert found_by(tier) == blocks.pairs()[1::2]
        assert await blocks.wrong(tier, [1, 3, 5, 7]) == []


def test_a_thread_keeps_no_large_memory() -> None:
    scratch = Scratch()
    small = scratch.payload(KEPT_PAYLOAD_BYTES)
    large = scratch.payload(KEPT_PAYLOAD_BYTES + PAGE_SIZE_BYTES)
    assert (len(small), len(large)) == (KEPT_PAYLOAD_BYTES, KEPT_PAYLOAD_BYTES + PAGE_SIZE_BYTES)
    again = scratch.payload(PAGE_SIZE_BYTES)
    again[:4] = b"same"
    assert small[:4] == b"same"
    assert large[:4] == bytes(4)


# ---- which codec


def forms(path: Path, blocks: Blocks) -> set[int]:
    return {header.form.codec for header in headers(path, blocks)}


def believe(tier: FileTier, *, reading: float, writing: float) -> None:
    tier._medium.rates.reading.bytes_per_s = reading
    tier._medium.rates.writing.bytes_per_s = writing


async def test_auto_encodes_for_a_slow_medium_alone(path: Path) -> None:
    async with opened(path, codec="auto", capacity_bytes=8 * MIB) as tier:
        believe(tier, reading=1e6, writing=1e15)
        slow = await Kv(8).write(tier)
        believe(tier, reading=1e15, writing=1e6)
        fast = await Kv(8, seed=1).write(tier, first=8)
        believe(tier, reading=0.0, writing=1e6)
        unread = await Kv(8, seed=2).write(tier, first=16)
        believe(tier, reading=0.0, writing=0.0)
        unknown = await Kv(8, seed=3).write(tier, first=24)
        assert [await its.wrong(tier) for its in (slow, fast, unread, unknown)] == [[]] * 4
    assert [forms(path, its) for its in (slow, fast, unread, unknown)] == [{ZSTD}, {RAW}, {ZSTD}, {RAW}]


async def test_layouts_are_judged_one_by_one(path: Path) -> None:
    """Of one nothing can be gained, of the other much; also of 8-bit floats, which no plane filter helps."""
    async with opened(path, codec="zstd", capacity_bytes=8 * MIB) as tier:
        noise = Kv(8, random_each=1)
        noise.records = [record_of(payload, fingerprint=b"n" * 32) for payload in noise.payloads]
        narrow = Kv(8)
        narrow.payloads = [fp8(BLOCK, number) for number in range(8)]
        narrow.records = [record_of(payload, fingerprint=b"8" * 32) for payload in narrow.payloads]
        wide = Kv(8)
        for number, blocks in enumerate((noise, narrow, wide)):
            await blocks.write(tier, first=8 * number)
            assert await blocks.wrong(tier) == []
    assert [forms(path, its) for its in (noise, narrow, wide)] == [{RAW}, {ZSTD}, {ZSTD}]


async def test_what_the_disk_moves_is_measured(path: Path) -> None:
    options = {"capacity_bytes": 64 * MIB, "extent_bytes": 4 * MIB, "codec": "auto"}
    async with opened(path, **options) as tier:
        rates = tier._medium.rates
        assert rates.reading.bytes_per_s == rates.writing.bytes_per_s == 0.0
        blocks = await Kv(40, MIB - 4096, random_each=1).write(tier)
        assert rates.writing.bytes_per_s > 0
        assert await blocks.wrong(tier) == []
        assert rates.reading.bytes_per_s > 0


def test_a_name_that_is_none() -> None:
    options = {"node_id": "a1" * 16, "paths": [Path("/x")], "capacity_bytes": 8 * MIB, "extent_bytes": MIB}
    for name in ("gzip", "lossy-fp8", ""):
        with pytest.raises(ConfigError, match=f"nvme_codec is '{name}': allowed are raw, lz4, zstd, auto"):
            FileTier(**options, codec=name)  # type: ignore[arg-type]
    assert file_packing.CHOICES == ("raw", "lz4", "zstd", "auto")


# ---- rates


class Clock:
    def __init__(self, *times_s: float) -> None:
        self._times_s: Iterator[float] = iter(times_s)

    def __call__(self) -> float:
        return next(self._times_s)


def test_rates_count_time_once_where_moves_overlap() -> None:
    half = RATED_BYTES // 2
    rate = Rate(Clock(0.0, 1.0, 2.0))
    first, second = rate.moving(half), rate.moving(half)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert rate.bytes_per_s == 0.0
    second.__exit__(None, None, None)
    assert rate.bytes_per_s == pytest.approx(RATED_BYTES / 2.0)


def test_rates_leave_idle_time_and_small_moves_out() -> None:
    rate = Rate(Clock(0.0, 1.0, 100.0, 101.0))
    for _ in range(2):
        with rate.moving(RATED_BYTES // 2):
            pass
        with rate.moving(RATED_FROM_BYTES - 1):
            pass
    assert rate.bytes_per_s == pytest.approx(RATED_BYTES / 2.0)


def test_rates_leave_moves_out_that_fail() -> None:
    rate = Rate(Clock(0.0, 9.0, 100.0, 101.0))
    with pytest.raises(OSError, match="no"), rate.moving(RATED_BYTES):
        raise OSError("no")
    assert rate.bytes_per_s == 0.0
    with rate.moving(RATED_BYTES):
        pass
    assert rate.bytes_per_s == pytest.approx(RATED_BYTES)


def test_rates_follow_slowly() -> None:
    ticks = [number * (0.1 if number < 2 else 1.0) for number in range(200)]
    rate = Rate(Clock(*ticks))
    with rate.moving(RATED_BYTES):
        pass
    before = rate.bytes_per_s
    with rate.moving(RATED_BYTES):
        pass
    assert RATED_BYTES / 1.0 < rate.bytes_per_s < before
    for _ in range(40):
        with rate.moving(RATED_BYTES):
            pass
    assert rate.bytes_per_s == pytest.approx(RATED_BYTES, rel=0.01)


# ---- starts


async def test_a_start_after_an_end_in_order_reads_no_block_again(path: Path) -> None:
    """Also where the catalogue has no room for anything: all writes had ended, and it says so."""
    rng = random.Random(3)
    options = {"catalogue_bytes": 4096, "extent_bytes": MIB, "capacity_bytes": 12 * MIB}
    async with opened(path, **options) as tier:
        blocks = await Blocks(24, 252 * KIB, seed=rng.randrange(9)).write(tier)
    async with opened(path, **options) as tier:
        assert found_by(tier) == blocks.pairs()
        assert tier.read_bytes < 24 * 252 * KIB // 4
        await abandon(tier)
    async with opened(path, **options) as tier:
        assert await blocks.wrong(tier) == []
