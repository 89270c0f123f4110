"""The file tier as every tier has to be: one directory, several, a loop device, a plain file, every codec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.testing.faulty_tier import FaultyTier
from kvtier.testing.tier_tests import MakeTier, TierTests
from tests.codecs.blocks import bfloat16
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


class TestCodecs(TierTests):
    @pytest.fixture(params=["lz4", "zstd", "auto"])
    def make_tier(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeTier:
        return lambda: make_file_tier(tmp_path / "tier", codec=request.param)

    @pytest.fixture
    def content(self) -> Callable[[int], bytes]:
        seeds = iter(range(10**6))
        return lambda count: bfloat16(-(-count // 2), next(seeds))[:count]
