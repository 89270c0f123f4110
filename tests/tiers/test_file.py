"""The file tier as every tier has to be: one directory, several, a loop device, a plain file."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.faulty_tier import FaultyTier
from kvtier.testing.tier_tests import MakeTier, TierTests
from kvtier.tiers.file import FileTier

KIB, MIB = 1 << 10, 1 << 20
NODE = "a1" * 16
OTHER = "b2" * 16
EXTENT = 128 * KIB


def make_file_tier(*paths: Path, **options: Any) -> FileTier:
    """A small tier."""
    values = {"node_id": NODE, "capacity_bytes": 2 * MIB, "extent_bytes": EXTENT, "keep_free_bytes": 0}
    return FileTier(paths=paths, **(values | options))


@contextlib.contextmanager
def loop_device(file: Path, size_bytes: int = 2 * MIB) -> Iterator[Path]:
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


class TestOneDirectory(TierTests):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda: make_file_tier(tmp_path / "tier")


class TestSeveralDirectories(TierTests):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda: make_file_tier(*(tmp_path / name for name in "abc"))


class TestLoopDevice(TierTests):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Iterator[MakeTier]:
        with loop_device(tmp_path / "backing") as device:
            yield lambda: make_file_tier(device)


class TestPlainFileLikeADevice(TierTests):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        file = tmp_path / "whole"
        file.write_bytes(bytes(2 * MIB))
        return lambda: make_file_tier(file, tmp_path / "and a directory", capacity_bytes=4 * MIB)


class TestFaultyTier(TierTests):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda: FaultyTier(make_file_tier(tmp_path / "tier"))
