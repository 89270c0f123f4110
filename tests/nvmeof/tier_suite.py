"""In the guest: all of `TierTests`, on a namespace and in a directory on one; pytest is told this file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvtier.testing.tier_tests import MakeTier, TierTests
from kvtier.tiers.file import FileTier
from tests.nvmeof.target import DISK

MOUNTED: Final = Path("/run/kvtier-nvmeof")
NODE: Final = "a1" * 16
BLANK_BYTES: Final = 2 << 20


def make_tier(path: Path) -> FileTier:
    """A small tier."""
    return FileTier(
        node_id=NODE, paths=[path], capacity_bytes=4 << 20, extent_bytes=128 << 10, keep_free_bytes=0
    )


def blank(device: Path) -> None:
    """Zeros over what marks a device as used."""
    with device.open("r+b", buffering=0) as opened:
        opened.write(bytes(BLANK_BYTES))
        os.fsync(opened.fileno())


class TestNamespace(TierTests):
    """A namespace as it is, without a file system."""

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        """Each test begins with an empty one."""
        blank(DISK)
        return lambda: make_tier(DISK)


class TestDirectory(TierTests):
    """A directory in ext4 on another namespace."""

    @pytest.fixture
    def make_tier(self) -> Iterator[MakeTier]:
        """Each test has its own."""
        directory = MOUNTED / "tier"
        yield lambda: make_tier(directory)
        shutil.rmtree(directory, ignore_errors=True)
