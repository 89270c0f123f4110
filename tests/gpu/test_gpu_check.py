"""`make gpu-check` on a machine without a GPU: one line, exit code 0, nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.tiers import device

ROOT = Path(__file__).parents[2]
WHY_NOT = device.why_not("cuda:0")


@pytest.mark.skipif(not WHY_NOT, reason="there is a GPU")
@pytest.mark.parametrize("words", [["-m", "tests.gpu"], ["-m", "bench", "gpu", "--json", "{}"]])
def test_without_a_gpu_it_says_why_and_writes_nothing(words: list[str], tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = [word.format(result) for word in words]
    before = sorted((ROOT / "bench/results").rglob("*"))
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"no GPU: {WHY_NOT}\n", "")
    assert not result.exists()
    assert sorted((ROOT / "bench/results").rglob("*")) == before


@pytest.mark.slow
def test_the_measuring_itself_works_on_device_cpu(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ["-m", "bench", "gpu", "--device", "cpu", "--json", str(result), "--directory", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 3, done.stderr  # void: its figures say nothing
    text = result.read_text()
    for word in ("load, scattered", "gather", "tier write", "mapped_s", "by cuFile", "read direct"):
        assert word in text
