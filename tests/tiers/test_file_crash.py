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
