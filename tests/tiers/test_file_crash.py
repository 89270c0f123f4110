"""Kill -9 at random points of writing: whatever is found afterwards is whole, and all space is still there.

``KVTIER_CRASH_KILLS`` is how many on both media together, ``KVTIER_CRASH_SEED`` chooses the points.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.tier_tests import record_of
from kvtier.types import Slot
from tests.tiers.file_killer import Log

KILLS = int(os.environ.get("KVTIER_CRASH_KILLS", "200"))
SEED = int(os.environ.get("KVTIER_CRASH_SEED", "1"))
PATIENCE_S = 240
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where the file system writes through at once, and where a killed write is cut in the middle."""
    if request.param == "disk":
        yield tmp_path
        return
    place = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/dev/shm"))
    yield place
    shutil.rmtree(place)


@pytest.mark.slow
def test_after_every_death_blocks_are_whole_and_space_is_free(directory: Path) -> None:
    kills = -(-KILLS // 2)
    command = [sys.executable, "-m", "tests.tiers.file_killer", str(directory), str(SEED), str(kills)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["kills"] == kills
    assert told["checked"] > kills // 2
    assert told["blocks"] > told["checked"]
    assert told["checked"] < told["encoded"] < told["blocks"] - told["checked"]
    assert told["writing"] > kills // 4


def test_wherever_death_cuts_the_log_all_later_steps_are_known(tmp_path: Path) -> None:
    """1. A life dies while it logs. 2. The next one drops a block. 3. A third one must not miss it."""
    pairs = [(Slot(0, 0, 0, 1), record_of(bytes([number]))) for number in range(3)]
    first, second, dropped = (record.block.key.hex() for _, record in pairs)
    log = Log(tmp_path)
    log.add("w", pairs[:2])
    whole = log.path.read_bytes()
    for size in range(len(whole) + 1):
        log.path.write_bytes(whole[:size])
        Log(tmp_path).add("d", pairs[2:])
        steps = log.keys()
        assert steps["d"] == {dropped}
        assert steps["w"] <= {first, second}
        assert (second in steps["w"]) == (size >= len(whole) - 1)
