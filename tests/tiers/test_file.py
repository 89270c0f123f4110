"""The file tier as every tier has to be: one directory, several, a loop device, a plain file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.faulty_tier import FaultyTier
from kvtier.testing.tier_tests import MakeTier, TierTests
from tests.tiers.file_harness import CAP, loop_device, make_file_tier


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
        file.write_bytes(bytes(CAP))
        return lambda: make_file_tier(file, tmp_path / "and a directory", capacity_bytes=2 * CAP)


class TestFaultyTier(TierTests):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda: FaultyTier(make_file_tier(tmp_path / "tier"))
