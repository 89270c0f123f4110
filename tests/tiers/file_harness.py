"""What the tests of the file tier share: small tiers, blocks to put on them, and the bytes of the medium."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.tier_tests import record_of, slot_of
from kvtier.tiers import file_format
from kvtier.tiers.file import FileTier
from kvtier.tiers.file_format import Superblock
from kvtier.types import BlockRecord, Slot, whole_pages

KIB, MIB = 1 << 10, 1 << 20
NODE = "a1" * 16
OTHER = "b2" * 16
EXTENT = 128 * KIB
CAP = 2 * MIB
BLOCK = 12 * KIB  # in slots of 16 KiB, eight in an extent
DEADLINE_S = 30.0


def make_file_tier(*paths: Path, **options: Any) -> FileTier:
    """A small tier."""
    values = {"node_id": NODE, "capacity_bytes": CAP, "extent_bytes": EXTENT, "keep_free_bytes": 0}
    return FileTier(paths=paths, **(values | {"catalogue_bytes": 64 * KIB} | options))


@contextlib.contextmanager
def loop_device(file: Path, size_bytes: int = CAP) -> Iterator[Path]:
    """A block device of its own, or a skip that says why not."""
    with file.open("wb") as opened:
        opened.truncate(size_bytes)
    command = ["losetup", "--find", "--show", "--direct-io=on", "--sector-size", "4096", str(file)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        pytest.skip("no loop device here: losetup is not installed")
    if made.returncode:
        pytest.skip(f"no loop device here: {made.stderr.strip()}")
    device = Path(made.stdout.strip())
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", str(device)], check=True, timeout=30)


@contextlib.contextmanager
def small_tmpfs(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A file system that is soon full, or a skip that says why not."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        pytest.skip("a small tmpfs cannot be mounted here: mount is not installed")
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=False, timeout=30)


def used_bytes(*directories: Path) -> int:
    """As `du` counts, the directories themselves included."""
    return sum(
        path.stat(follow_symlinks=False).st_blocks * 512
        for directory in directories
        for path in (directory, *directory.rglob("*"))
    )


class Blocks:
    """Blocks of `block_bytes` with random content, and where they are."""

    def __init__(self, count: int, block_bytes: int = BLOCK, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.payloads = [rng.randbytes(block_bytes) for _ in range(count)]
        self.records = [record_of(payload) for payload in self.payloads]
        self.slots: list[Slot] = []

    async def write(self, tier: FileTier, first: int = 0) -> Blocks:
        """Into the slots from number `first` on."""
        block_bytes = len(self.payloads[0])
        per = tier.extent_bytes // slot_of(tier, 0, 0, whole_pages(block_bytes)).size_bytes
        self.slots = [
            slot_of(tier, number // per, number % per, whole_pages(block_bytes))
            for number in range(first, first + len(self.payloads))
        ]
        await tier.write(self.slots, self.records, [memoryview(payload) for payload in self.payloads])
        return self

    async def wrong(self, tier: FileTier, positions: Sequence[int] | None = None) -> list[int]:
        """Which of them the tier finds wrong; all others are compared byte for byte."""
        positions = range(len(self.slots)) if positions is None else positions
        buffers = [bytearray(len(self.payloads[i])) for i in positions]
        found = await tier.read(
            [self.slots[i] for i in positions],
            [self.records[i] for i in positions],
            [memoryview(buffer) for buffer in buffers],
        )
        for at, position in enumerate(positions):
            assert at in found or buffers[at] == self.payloads[position]
        return [positions[at] for at in found]

    def pairs(self) -> list[tuple[Slot, BlockRecord]]:
        return list(zip(self.slots, self.records, strict=True))


def found_by(tier: FileTier) -> list[tuple[Slot, BlockRecord]]:
    """What the tier recovered."""
    return [pair for batch in tier.recovered() for pair in batch]


@contextlib.asynccontextmanager
async def opened(*paths: Path, **options: Any) -> Any:
    """A tier, open until the end."""
    tier = make_file_tier(*paths, **options)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


async def abandon(tier: FileTier) -> None:
    """What a killed daemon leaves: no checkpoint, and the files closed."""
    tier._is_open = False
    await tier.close()


class Medium:
    """The bytes of one stripe, to be damaged while no tier has it open."""

    def __init__(self, path: Path) -> None:
        self.path = path / "kvtier.slab" if path.is_dir() else path
        superblock = file_format.read_superblock(self.get(0, 4096))
        assert superblock is not None
        self.superblock: Superblock = superblock

    def get(self, offset_bytes: int, size_bytes: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset_bytes)
            return file.read(size_bytes)

    def put(self, offset_bytes: int, content: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset_bytes)
            file.write(content)

    def flip(self, offset_bytes: int) -> None:
        self.put(offset_bytes, bytes([self.get(offset_bytes, 1)[0] ^ 0x10]))

    def offset_of(self, slot: Slot) -> int:
        extent = slot.extent // self.superblock.stripes
        within = slot.offset_bytes - slot.extent * self.superblock.extent_bytes
        return self.superblock.extent_offset(extent) + within

    @property
    def catalogues(self) -> tuple[int, int]:
        """Begin and size of both areas together."""
        return self.superblock.catalogue_offset(0), 2 * self.superblock.catalogue_bytes

    @property
    def table(self) -> tuple[int, int]:
        """Begin and size."""
        return self.superblock.table_offset, self.superblock.extents * 4096


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that happens soon."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        await asyncio.sleep(0.005)
