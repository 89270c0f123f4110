from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli import check, hbm
from kvtier.cli.findings import DEGRADED, MISSING, OK
from kvtier.errors import Unavailable
from kvtier.tiers import cufile, device


def test_a_device_that_works_is_tried_to_the_end() -> None:
    found = hbm.hbm_finding("cpu")  # the same steps: taken, written, read, exported, given back
    assert (found["state"], found["todo"]) == (OK, "")
    assert "exported" in found["why"]


def test_without_a_gpu_the_reason_is_one_line_with_what_to_do() -> None:
    why = device.why_not("cuda:0")
    if not why:
        pytest.skip("there is a usable cuda:0")
    found = hbm.hbm_finding()
    assert found["state"] == MISSING
    assert why[:60] in found["why"]
    assert "\n" not in found["why"]
    assert "NVIDIA driver" in found["todo"]


def test_memory_that_cannot_be_had_is_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hbm, "PROBE_BYTES", 1 << 50)  # more than any machine has
    found = hbm.hbm_finding("cpu")
    assert found["state"] == DEGRADED
    assert "memory" in found["why"]
    assert found["todo"]
    with pytest.raises(Unavailable):
        device.allocate("cpu", 1 << 50)


def test_cufile_that_does_not_open_is_missing() -> None:
    if not cufile.why_not():
        pytest.skip("cuFile opens here")
    found = hbm.gds_mode_finding()
    assert found["state"] == MISSING
    assert "host memory" in found["why"]


def test_the_probe_has_a_line_for_each() -> None:
    names = [each["name"] for each in check._probe("gpu")]
    assert names[0] == "cuda"
    assert names[-1] == "hbm"
    assert "gds" in names


def test_the_configured_device_is_the_one_that_is_tried() -> None:
    (found,) = (each for each in check._probe("gpu", arguments=["cpu"]) if each["name"] == "hbm")
    assert (found["state"], found["why"][:4]) == (OK, "cpu:")


def test_more_than_the_device_has_left_is_not_called_ok() -> None:
    found = hbm.hbm_finding("cpu", 1 << 49)
    assert (found["state"], "hbm_bytes is 562949953421312" in found["why"]) == (DEGRADED, True)


def test_what_serve_would_refuse_for_lack_of_device_memory_is_needed(tmp_path: Path) -> None:
    options = ["--run-dir", f"{tmp_path}/run", "--data-dir", f"{tmp_path}/data", "--dram-bytes", "64MiB"]
    skipped = [word for name in ("nixl", "index", "vllm") for word in ("--skip", name)]
    for hbm_bytes, needed in (("0", False), ("128TiB", True)):
        more = ["--hbm-device", "cpu", "--hbm-bytes", hbm_bytes, *skipped, "--json"]
        ended = subprocess.run(
            [sys.executable, "-m", "kvtier.cli.main", "check", *options, *more],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        (found,) = (each for each in json.loads(ended.stdout)["checks"] if each["name"] == "hbm")
        assert (found["needed"], found["state"]) == (needed, DEGRADED if needed else OK)
