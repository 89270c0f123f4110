"""What lies on the file tier's medium: damage is never served, metadata can be lost, others are refused."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvtier.errors import AlreadyRunning, ConfigError, ResourceShortage
from kvtier.tiers import file_format, file_medium
from kvtier.tiers.file_format import HEADER_BYTES, ROW_DTYPE, Catalogue, Superblock
from tests.tiers.file_harness import (
    BLOCK,
    CAP,
    EXTENT,
    KIB,
    MIB,
    NODE,
    OTHER,
    Blocks,
    Medium,
    abandon,
    found_by,
    loop_device,
    make_file_tier,
    opened,
    small_tmpfs,
    until,
    used_bytes,
)

pytestmark = pytest.mark.asyncio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier"


async def stored(path: Path, count: int = 20, **options: Any) -> Blocks:
    """A medium with some blocks, closed in order."""
    async with opened(path, **options) as tier:
        return await Blocks(count).write(tier)


# ---- damage


@pytest.mark.parametrize(
    "where", ["key", "checksum", "fingerprint", "position", "mac", "first byte", "last byte"]
)
async def test_a_flipped_bit_is_never_served(path: Path, where: str) -> None:
    blocks = await stored(path)
    medium = Medium(path)
    fields = file_format.ROW_DTYPE.fields
    assert fields is not None
    within = {"first byte": 4096, "last byte": 4096 + BLOCK - 1}.get(where)
    for position in (0, 7, 19):
        medium.flip(
            medium.offset_of(blocks.slots[position]) + (fields[where][1] if within is None else within)
        )
    async with opened(path) as tier:
        assert await blocks.wrong(tier) == [0, 7, 19]


async def test_swapped_misplaced_and_copied_slots_are_never_served(path: Path) -> None:
    blocks = await stored(path)
    medium = Medium(path)
    offsets = [medium.offset_of(slot) for slot in blocks.slots]
    slots = [medium.get(offset, 16 * KIB) for offset in offsets]
    medium.put(offsets[0], slots[1])
    medium.put(offsets[1], slots[0])
    medium.put(offsets[5], slots[6])
    medium.put(offsets[9], slots[10][4096:] + bytes(4096))
    medium.put(offsets[12], slots[12][:4096] + slots[13][4096:])
    medium.put(*Medium(path).catalogues[:1], bytes(medium.catalogues[1]))
    async with opened(path) as tier:
        assert await blocks.wrong(tier) == [0, 1, 5, 9, 12]
        assert {slot for slot, _ in found_by(tier)} >= {blocks.slots[i] for i in (2, 3, 6, 10, 13)}


async def test_whole_valid_slots_under_another_key_are_never_served(path: Path) -> None:
    """Another tenant's block in the right place, header and all, written by kvtier itself."""
    blocks = await stored(path)
    async with opened(path) as tier:
        others = Blocks(20, seed=1)
        others.records[3] = replace(others.records[3], fingerprint=bytes(32))
        await others.write(tier)
        assert await blocks.wrong(tier) == list(range(20))
        assert await others.wrong(tier) == []


async def test_a_block_that_looks_like_a_header_is_none(path: Path) -> None:
    """Headers inside of blocks, copied from the medium itself: where slots of another size begin later."""
    blocks = await stored(path)
    medium = Medium(path)
    forged = bytearray(BLOCK)
    for page in range(0, BLOCK, 4096):
        place = file_format.Place(page + 4096, 8 * KIB, 2)
        record = blocks.records[0]
        forged[page : page + HEADER_BYTES] = file_format.pack_header(
            bytes(16), record, place, file_format.raw_form(BLOCK), 10**6
        )
        real = medium.get(medium.offset_of(blocks.slots[0]), HEADER_BYTES)
        forged[page + 512 : page + 512 + HEADER_BYTES] = real
    async with opened(path) as tier:
        await tier.drop(blocks.slots)
        evil = Blocks(1)
        evil.payloads = [bytes(forged)]
        await evil.write(tier)
        await tier.drop(evil.slots)
        small = await Blocks(1, 4096).write(tier, first=5)
        await abandon(tier)
    async with opened(path) as tier:
        assert found_by(tier) == small.pairs()


@pytest.mark.parametrize("size_bytes", [0, 4096, 200 * KIB, 300 * KIB + 17])
async def test_a_truncated_file_serves_only_what_is_there(path: Path, size_bytes: int) -> None:
    blocks = await stored(path)
    slab = path / "kvtier.slab"
    with slab.open("r+b") as file:
        file.truncate(size_bytes)
    async with opened(path) as tier:
        left = found_by(tier)
        there = [i for i, pair in enumerate(blocks.pairs()) if pair in left]
        wrong = await blocks.wrong(tier, there)
        assert set(wrong) <= set(there)
        if size_bytes >= 200 * KIB:
            assert there
        await tier.drop(blocks.slots)
        again = await Blocks(20, seed=2).write(tier)
        assert await again.wrong(tier) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_damage_anywhere_is_never_served(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Any bytes over any place: the medium opens, or is refused clearly, and what is served is right."""
    path = tmp_path_factory.mktemp("damage") / "tier"
    blocks = await stored(path)
    medium = Medium(path)
    end_bytes = medium.superblock.extent_offset(3)
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(
            st.integers(0, end_bytes - 1) | st.integers(0, end_bytes // 4096 - 1).map(lambda n: n * 4096)
        )
        size_bytes = data.draw(st.sampled_from([1, 8, 192, 4096, 16384]))
        source = data.draw(st.sampled_from(["zeros", "ones", "random", "elsewhere"]))
        content = {
            "zeros": bytes(size_bytes),
            "ones": b"\xff" * size_bytes,
            "random": random.Random(begin).randbytes(size_bytes),
            "elsewhere": medium.get(data.draw(st.integers(0, end_bytes // 4096 - 1)) * 4096, size_bytes),
        }[source]
        medium.put(begin, content)
    try:
        async with opened(path) as tier:
            found = found_by(tier)
            assert all(pair in blocks.pairs() for pair in found)
            await blocks.wrong(tier)
    except ConfigError as error:
        event(str(error)[-60:])


# ---- metadata that is lost


@pytest.mark.parametrize("lost", ["nothing", "catalogue", "table", "both"])
@pytest.mark.parametrize("content", [b"\0", b"\xff", b"KV"])
@pytest.mark.parametrize("stripes", [1, 3])
async def test_lost_metadata_is_rebuilt_from_the_headers(
    tmp_path: Path, lost: str, content: bytes, stripes: int
) -> None:
    paths = [tmp_path / str(number) for number in range(stripes)]
    async with opened(*paths) as tier:
        blocks = await Blocks(40).write(tier)
        small = await Blocks(5, 4096, seed=3).write(tier, first=5 * 16)
        await tier.drop(blocks.slots[3:5])
    for path in paths:
        medium = Medium(path)
        for name, (begin, size_bytes) in {"catalogue": medium.catalogues, "table": medium.table}.items():
            if lost in (name, "both"):
                medium.put(begin, (content * size_bytes)[:size_bytes])
    kept = [*blocks.pairs()[:3], *blocks.pairs()[5:], *small.pairs()]
    if content == b"\0" and lost in ("table", "both"):
        kept = []  # a table of zeros is that of a new medium
    async with opened(*paths) as tier:
        assert sorted(found_by(tier), key=lambda pair: pair[0].offset_bytes) == kept
        if kept:
            assert await blocks.wrong(tier) == [3, 4]
            assert await small.wrong(tier) == []


async def test_a_stale_catalogue_is_noticed(path: Path) -> None:
    """An older one whose extents have changed since: these are scanned, the others believed."""
    async with opened(path) as tier:
        blocks = await Blocks(40).write(tier)
    medium = Medium(path)
    begin, size_bytes = medium.catalogues
    old = medium.get(begin, size_bytes)
    async with opened(path) as tier:
        await tier.drop(blocks.slots[:2])
        await tier.checkpoint()
        fresh = await Blocks(1, seed=5).write(tier, first=1)
        await tier.checkpoint()
        await tier.checkpoint()
    medium.put(begin, old)
    async with opened(path) as tier:
        assert found_by(tier) == [*fresh.pairs(), *blocks.pairs()[2:]]


def forge_catalogues(medium: Medium, change: Callable[[Catalogue], Catalogue]) -> None:
    """As somebody can who knows the medium's number: checksums are right."""
    key = medium.superblock.medium
    begin, size_bytes = medium.catalogues
    for area in (begin, begin + size_bytes // 2):
        catalogue = file_format.read_catalogue(key, memoryview(medium.get(area, size_bytes // 2)))
        if catalogue is not None:
            medium.put(area, change(catalogue).pack(key))


@pytest.mark.parametrize("name", ["epoch", "position", "written_bytes", "day", "day_begin_bytes"])
async def test_numbers_that_overflow_are_damage(path: Path, name: str) -> None:
    blocks = await stored(path, 40)
    medium = Medium(path)
    key = medium.superblock.medium
    forge_catalogues(medium, lambda catalogue: replace(catalogue, **{name: 2**64 - 1}))
    offset_bytes = medium.offset_of(blocks.slots[3])
    header = file_format.read_header(key, medium.get(offset_bytes, HEADER_BYTES))
    assert header is not None
    forged = file_format.pack_header(key, header.record, header.place, header.form, 2**64 - 1)
    medium.put(offset_bytes, forged)
    page = medium.table[0] + 4096 * blocks.slots[39].extent
    entry = file_format.read_table_entry(key, blocks.slots[39].extent, memoryview(medium.get(page, 4096)))
    assert entry is not None
    entry = entry._replace(epoch=2**64 - 1)
    medium.put(page, file_format.pack_table_entry(key, blocks.slots[39].extent, entry))
    for _ in range(2):
        async with opened(path) as tier:
            left = found_by(tier)
            assert set(left) >= set(blocks.pairs()[4:])
            assert set(await blocks.wrong(tier)) <= {3}
            assert 0 <= tier.written_today_bytes < 2**40
            await (await Blocks(2, seed=7).write(tier, first=60)).wrong(tier)
            await tier.checkpoint()
            await abandon(tier)


@pytest.mark.parametrize("has_page", [True, False])
async def test_a_slot_size_that_none_has_is_damage(path: Path, has_page: bool) -> None:
    """Read at its word, it would look like a device that fails."""
    blocks = await stored(path, 20)
    medium = Medium(path)
    key = medium.superblock.medium
    forge_catalogues(medium, lambda catalogue: replace(catalogue, rows=catalogue.rows[:0]))
    extent = blocks.slots[8].extent
    offset_bytes = medium.offset_of(blocks.slots[8])
    header = file_format.read_header(key, medium.get(offset_bytes, HEADER_BYTES))
    assert header is not None
    place = header.place._replace(slot_bytes=16 * KIB + 100)
    medium.put(offset_bytes, file_format.pack_header(key, header.record, place, header.form, 10**9))
    entry = file_format.TableEntry(16 * KIB + 100, 1, 1)
    page = file_format.pack_table_entry(key, extent, entry) if has_page else b"damaged".ljust(4096)
    medium.put(medium.table[0] + 4096 * extent, page)
    async with opened(path) as tier:
        assert set(found_by(tier)) == {pair for pair in blocks.pairs() if pair[0].extent != extent}
        again = await Blocks(20, seed=2).write(tier)
        assert await again.wrong(tier) == []


def _moved(by: int) -> Callable[[Catalogue], Catalogue]:
    def change(catalogue: Catalogue) -> Catalogue:
        rows = catalogue.rows.copy()
        rows.view(ROW_DTYPE)["offset_bytes"][-1] += np.uint64(by % 2**64)
        return replace(catalogue, rows=rows)

    return change


def _turned(catalogue: Catalogue) -> Catalogue:
    return replace(catalogue, rows=catalogue.rows[::-1].copy())


def _short(catalogue: Catalogue) -> Catalogue:
    return replace(catalogue, rows=catalogue.rows[:-1])


@pytest.mark.parametrize(
    "change", [_moved(2**63), _moved(-(2**40)), _moved(EXTENT), _moved(100), _turned, _short]
)
async def test_a_catalogue_of_impossible_places_is_not_used(
    path: Path, change: Callable[[Catalogue], Catalogue]
) -> None:
    blocks = await stored(path, 20)
    forge_catalogues(Medium(path), change)
    async with opened(path) as tier:
        assert found_by(tier) == blocks.pairs()
        assert await blocks.wrong(tier) == []


async def test_a_catalogue_that_lies_is_found_out_when_it_is_read(path: Path) -> None:
    """The slots were changed behind its back, as after a power cut: wrong, never served."""
    blocks = await stored(path)
    medium = Medium(path)
    medium.put(medium.offset_of(blocks.slots[4]), bytes(4096))
    medium.put(medium.offset_of(blocks.slots[5]), medium.get(medium.offset_of(blocks.slots[6]), 16 * KIB))
    async with opened(path) as tier:
        assert found_by(tier) == blocks.pairs()
        assert await blocks.wrong(tier) == [4, 5]
        await tier.drop([blocks.slots[4], blocks.slots[5]])
        await abandon(tier)
    async with opened(path) as tier:
        assert found_by(tier) == [*blocks.pairs()[:4], *blocks.pairs()[6:]]


async def test_a_catalogue_that_is_too_small_covers_what_fits(path: Path) -> None:
    async with opened(path, catalogue_bytes=12 * KIB) as tier:
        blocks = await Blocks(100).write(tier)
    async with opened(path, catalogue_bytes=12 * KIB) as tier:
        assert found_by(tier) == blocks.pairs()


async def test_of_two_slots_with_one_block_the_younger_counts(path: Path) -> None:
    """Killed between writing it anew and dropping the old one; the old one does not come back later."""
    async with opened(path) as tier:
        blocks = await Blocks(3).write(tier)
        again = Blocks(3)
        await again.write(tier, first=10)
        await abandon(tier)
    async with opened(path) as tier:
        assert found_by(tier) == again.pairs()
        await tier.drop(again.slots)
        await abandon(tier)
    async with opened(path) as tier:
        assert found_by(tier) == []
        assert await blocks.wrong(tier) == [0, 1, 2]


async def test_a_torn_slot_is_discarded_at_the_start(path: Path) -> None:
    """Header first and the block not yet whole: what a killed write leaves."""
    async with opened(path) as tier:
        blocks = await Blocks(9).write(tier)
        await abandon(tier)
    medium = Medium(path)
    medium.put(medium.offset_of(blocks.slots[8]) + 4096 + 512, bytes(512))
    async with opened(path) as tier:
        assert found_by(tier) == blocks.pairs()[:8]
        assert await blocks.wrong(tier) == [8]


async def test_bytes_written_are_counted_over_restarts_and_a_day(path: Path) -> None:
    now_s = 1_000_000.0

    def options() -> dict[str, Any]:
        return {"now_s": lambda: now_s}

    async with opened(path, **options()) as tier:
        await Blocks(20).write(tier)
        first = tier.written_today_bytes
        assert 20 * 16 * KIB <= first <= tier.written_bytes
    async with opened(path, **options()) as tier:
        assert tier.written_today_bytes >= first
        before = tier.written_today_bytes
        await Blocks(10).write(tier)
        assert tier.written_today_bytes - before >= 10 * 16 * KIB
        await abandon(tier)
    async with opened(path, **options()) as tier:
        assert tier.written_today_bytes >= before + 10 * 16 * KIB, "the headers know"
        now_s += 86400
        assert tier.written_today_bytes == 0
        await Blocks(1).write(tier)
        assert 16 * KIB <= tier.written_today_bytes < before
        assert tier.read_bytes > 0


# ---- who may use it


async def test_files_are_private_and_links_are_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    path.mkdir(mode=0o755)
    async with opened(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert [(p.name, stat.S_IMODE(p.stat().st_mode)) for p in path.iterdir()] == [("kvtier.slab", 0o600)]
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="link"):
        await make_file_tier(link).open()
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "kvtier.slab").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="link"):
        await make_file_tier(evil).open()
    assert not (tmp_path / "target").exists()
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "kvtier.slab")
    with pytest.raises(ConfigError, match="no file of this user"):
        await make_file_tier(tmp_path / "fifo").open()


async def test_a_live_daemon_has_it_alone(path: Path, tmp_path: Path) -> None:
    async with opened(path):
        with pytest.raises(AlreadyRunning, match="stop it"):
            await make_file_tier(path).open()
    async with opened(path):
        pass
    with loop_device(tmp_path / "backing") as device:
        async with opened(device):
            with pytest.raises(AlreadyRunning, match="in use"):
                await make_file_tier(device).open()


async def test_another_nodes_medium_is_refused_and_left_alone(path: Path) -> None:
    blocks = await stored(path)
    with pytest.raises(ConfigError, match=rf"node {NODE}, and this is node {OTHER}.*delete"):
        await make_file_tier(path, node_id=OTHER).open()
    async with opened(path) as tier:
        assert await blocks.wrong(tier) == []


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"capacity_bytes": 2 * CAP}, "extents"),
        ({"capacity_bytes": CAP // 2}, "extents"),
        ({"extent_bytes": 2 * EXTENT}, "extent_bytes"),
        ({"catalogue_bytes": 68 * KIB}, "catalogue_bytes"),
    ],
)
async def test_another_geometry_is_refused_and_left_alone(
    path: Path, options: dict[str, int], word: str
) -> None:
    blocks = await stored(path)
    with pytest.raises(ConfigError, match=rf"made with {word} .*set nvme_bytes.*or delete"):
        await make_file_tier(path, **options).open()
    async with opened(path) as tier:
        assert await blocks.wrong(tier) == []


async def test_paths_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    async with opened(a, b) as tier:
        blocks = await Blocks(30).write(tier)
    async with opened(b, a) as tier:
        assert await blocks.wrong(tier) == [], "the order does not matter"
    async with opened(c):
        pass
    for paths, words in (
        ((a, c), "do not belong"),
        ((a,), "belong together|stripes"),
        ((a, b, c), "do not belong"),
    ):
        with pytest.raises(ConfigError, match=words):
            await make_file_tier(*paths).open()
    with pytest.raises(ConfigError, match="twice"):
        make_file_tier(a, a)
    d = tmp_path / "d"
    with pytest.raises(ConfigError, match=r"do not belong.*empty"):
        await make_file_tier(a, d).open()
    async with opened(a, b) as tier:
        assert await blocks.wrong(tier) == []


async def test_making_a_medium_may_be_cut_short_anywhere(tmp_path: Path) -> None:
    """The two rounds told in file_medium.py."""
    paths = [tmp_path / name for name in "ab"]
    async with opened(*paths):
        pass
    media = [Medium(path) for path in paths]
    incomplete = [replace(medium.superblock, complete=False).pack() for medium in media]
    complete = [medium.superblock.pack() for medium in media]
    for pages in (
        (incomplete[0], bytes(4096)),
        (incomplete[0], incomplete[1]),
        (complete[0], incomplete[1]),
        (bytes(4096), bytes(4096)),
    ):
        for medium, page in zip(media, pages, strict=True):
            medium.put(0, page)
        async with opened(*paths) as tier:
            blocks = await Blocks(30).write(tier)
            assert await blocks.wrong(tier) == []
            await tier.drop(blocks.slots)
        assert all(Medium(path).superblock.complete for path in paths)


async def test_a_device_with_somebody_elses_data_is_refused(tmp_path: Path) -> None:
    for number, (offset_bytes, content) in enumerate(
        [(0, b"\x7fELF"), (1080, b"\x53\xef"), (64 * KIB + 64, b"_BHR")]
    ):
        file = tmp_path / f"device{number}"
        file.write_bytes(bytes(CAP))
        with file.open("r+b") as opened_file:
            opened_file.seek(offset_bytes)
            opened_file.write(content)
        before = file.read_bytes()
        with pytest.raises(ConfigError, match=r"not written by kvtier.*dd if=/dev/zero"):
            await make_file_tier(file).open()
        assert file.read_bytes() == before


async def test_a_damaged_superblock_is_refused(path: Path) -> None:
    await stored(path)
    medium = Medium(path)
    medium.flip(40)
    with pytest.raises(ConfigError, match=r"first page is damaged; delete .*kvtier.slab"):
        await make_file_tier(path).open()
    medium.put(0, b"something else")
    with pytest.raises(ConfigError, match=r"not written by kvtier.*delete"):
        await make_file_tier(path).open()


@pytest.mark.parametrize(("version", "age"), [(0, "an older"), (2, "a newer"), (2**32 - 1, "a newer")])
async def test_a_version_without_a_reader_is_refused_and_left_alone(
    path: Path, version: int, age: str
) -> None:
    blocks = await stored(path)
    medium = Medium(path)
    medium.put(0, replace(medium.superblock, version=version).pack())
    with pytest.raises(
        ConfigError, match=f"format {version}, which {age} kvtier wrote; this one reads 1; .* or delete"
    ):
        await make_file_tier(path).open()
    medium.put(0, medium.superblock.pack())
    async with opened(path) as tier:
        assert await blocks.wrong(tier) == []


async def test_a_later_version_reads_version_1(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the module tells: readers are added, superblock and slots become new ones as they are written."""
    blocks = await stored(path)
    first = file_format.SUPERBLOCK_READERS[1]

    def second(page: bytes) -> Superblock | None:
        return first(page)

    for module in (file_format, file_medium):
        monkeypatch.setattr(module, "FORMAT_VERSION", 2)
        monkeypatch.setattr(module, "SUPERBLOCK_READERS", {1: first, 2: second})
    async with opened(path) as tier:
        assert found_by(tier) == blocks.pairs()
        assert await blocks.wrong(tier) == []
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="format 2, which a newer kvtier wrote"):
        await make_file_tier(path).open()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity_bytes": 64 * KIB}, "nvme_bytes is 65536: too little"),
        ({"extent_bytes": 4096}, "extent_bytes is 4096"),
        ({"extent_bytes": 10_000}, "extent_bytes is 10000"),
        ({"node_id": "me"}, "node_id"),
        ({"deadline_s": 0.0}, "deadline_s"),
    ],
)
async def test_configurations_that_cannot_be(path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await make_file_tier(path, **options).open()
    assert not path.exists() or used_bytes(path) < 64 * KIB


async def test_a_device_that_is_too_small_is_refused(tmp_path: Path) -> None:
    for size_bytes in (0, 1000, 64 * KIB):
        file = tmp_path / f"of {size_bytes}"
        file.write_bytes(bytes(size_bytes))
        with pytest.raises(ConfigError, match=r"larger|too little"):
            await make_file_tier(file).open()


# ---- the cap


@pytest.mark.parametrize("stripes", [1, 2])
async def test_five_times_the_cap_is_written_and_never_exceeded(tmp_path: Path, stripes: int) -> None:
    paths = [tmp_path / str(number) for number in range(stripes)]
    cap = 16 * MIB
    rng = random.Random(1)
    written = 0
    for _ in range(3):
        async with opened(*paths, capacity_bytes=cap, extent_bytes=MIB) as tier:
            assert cap * 0.8 < tier.capacity_bytes == tier.allocated_bytes < cap
            await tier.drop([slot for slot, _ in found_by(tier)])
            while written < 5 * cap / 3 * (_ + 1):
                block_bytes = rng.choice([4096, 40 * KIB, MIB - 4096])
                blocks = Blocks(min(64, 12 * MIB // (block_bytes + 4096)), block_bytes, seed=written)
                await blocks.write(tier)
                written += len(blocks.slots) * blocks.slots[0].size_bytes
                assert used_bytes(*paths) <= cap
                assert await blocks.wrong(tier) == []
                await tier.drop(blocks.slots)
                await tier.checkpoint()
                assert used_bytes(*paths) <= cap
        assert used_bytes(*paths) <= cap
    assert written >= 5 * cap


async def test_a_file_that_somebody_made_larger_is_cut_back(path: Path) -> None:
    blocks = await stored(path)
    with (path / "kvtier.slab").open("ab") as file:
        file.write(bytes(CAP))
    async with opened(path) as tier:
        assert used_bytes(path) <= CAP
        assert await blocks.wrong(tier) == []


async def test_a_full_file_system_gives_what_it_has_and_grows_later(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", 3 * MIB) as directory:
        ballast = directory / "ballast"
        ballast.write_bytes(bytes(MIB))
        options = {"capacity_bytes": 8 * MIB, "keep_free_bytes": 512 * KIB}
        tier = make_file_tier(directory / "tier", **options)
        await tier.open()
        before_bytes = tier.allocated_bytes
        assert 8 * EXTENT <= before_bytes <= 2 * MIB
        assert any("no more space" in notice for notice in tier.notices)
        blocks = await Blocks(before_bytes // (16 * KIB)).write(tier)
        assert await blocks.wrong(tier) == []
        assert tier.grow() == before_bytes
        ballast.unlink()
        await until(lambda: tier.grow() >= before_bytes + MIB // 2, "the tier grows")
        assert os.statvfs(directory).f_bavail * 4096 >= 512 * KIB
        await tier.close()
        async with opened(directory / "tier", **options) as tier:
            assert found_by(tier) == blocks.pairs()


async def test_a_file_system_that_is_full_at_once_is_a_clear_error(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", MIB) as directory:
        (directory / "ballast").write_bytes(bytes(MIB - 8 * KIB))
        with pytest.raises(
            ResourceShortage, match=r"file system is full: free some space, or lower nvme_bytes"
        ):
            await make_file_tier(directory / "tier").open()
