"""``make gpu-check``: tests and measures one GPU, in less than `LIMIT_S`; without one, says why in one line.

Where there is a GPU: the tests of this folder, then `bench gpu`, whose result goes to
``bench/results/gpu/<device>.json``. Exit code 0: all passed, or there is no GPU (then nothing is written).
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from kvtier.tiers import device

LIMIT_S: Final = 470.0
DEVICE: Final = "cuda:0"
RESULTS: Final = Path(__file__).parents[2] / "bench/results/gpu"


def main() -> int:
    """Run all of it; returns the exit code."""
    if why := device.why_not(DEVICE):
        print(f"no GPU: {why}")
        return 0
    import torch

    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(DEVICE).lower()).strip("-")
    result = RESULTS / f"{name}.json"
    deadline_s = time.monotonic() + LIMIT_S
    codes = [
        _run(deadline_s, "-m", "pytest", "-m", "gpu", "tests/gpu", "-rs"),
        _run(deadline_s, "-m", "bench", "gpu", "--json", str(result), "--device", DEVICE),
    ]
    print(f"results: {result}" if result.exists() else "no results were written")
    return max(codes)


def _run(deadline_s: float, *words: str) -> int:
    try:
        left_s = max(1.0, deadline_s - time.monotonic())
        return subprocess.run([sys.executable, *words], check=False, timeout=left_s).returncode
    except subprocess.TimeoutExpired:
        print(f"{' '.join(words)}: did not end in time, {LIMIT_S:.0f} s for all", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
