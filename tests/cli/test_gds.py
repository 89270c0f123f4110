from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvtier.cli import gds
from kvtier.cli.findings import DEGRADED, MISSING, OK

STATS = """GDS Version: 1.11.1.6
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.22.3)
Active Shadow-Buffer (MiB): 0
Reads				: err={} io_state_err=0
Sparse Reads				: n=0 io=0 holes=0 pages=0
Writes				: err=0 io_state_err=0 pg-cache=0
"""
GDSCHECK = """#!/bin/sh
cat <<'END'
 ============
 DRIVER CONFIGURATION:
 ============
 NVMe P2PDMA        : Unsupported
 NVMe               : {}
 NVMeOF             : Unsupported
 SCSI               : Unsupported
END
"""


def module(tmp_path: Path) -> dict[str, object]:
    return gds.nvidia_fs(tmp_path / "sys", tmp_path / "proc")


def test_the_kernel_module(tmp_path: Path) -> None:
    assert module(tmp_path)["state"] == MISSING
    (tmp_path / "sys/module/nvidia_fs").mkdir(parents=True)
    assert module(tmp_path)["state"] == DEGRADED
    driver = tmp_path / "proc/driver/nvidia-fs"
    driver.mkdir(parents=True)
    (driver / "version").write_text("version: 2.22.3\n")
    (driver / "stats").write_text(STATS.format(0))
    found = module(tmp_path)
    assert found["state"] == OK
    assert "2.22.3" in str(found["why"])
    (driver / "stats").write_text(STATS.format(7))
    found = module(tmp_path)
    assert found["state"] == DEGRADED
    assert "7 reads failed" in str(found["why"])
    (driver / "stats").write_bytes(b"\0\xff" * 99)
    assert module(tmp_path)["state"] == OK


@pytest.mark.parametrize(("answer", "state"), [("Supported", OK), ("Unsupported", DEGRADED)])
def test_gdscheck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, state: str) -> None:
    tool = tmp_path / "gdscheck"
    tool.write_text(GDSCHECK.format(answer))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = gds._gdscheck()
    assert found["state"] == state
    assert f"NVMe {answer.lower()}" in found["why"]
    tool.write_text("#!/bin/sh\nexit 3\n")
    found = gds._gdscheck()
    assert found["state"] == DEGRADED
    assert "status 3" in found["why"]


def test_without_cuda_every_part_has_a_line(tmp_path: Path) -> None:
    found = {each["name"]: each for each in gds.gds_findings(False, root=tmp_path, proc=tmp_path)}
    assert list(found) == ["libcufile", "cuda.bindings.cufile", "nvidia-fs", "gds"]
    assert found["gds"]["state"] == MISSING
    assert all(each["todo"] or each["state"] == OK for each in found.values())


def test_without_the_library_nothing_is_opened() -> None:
    found = gds._opened(None, {"state": OK})
    assert found["state"] == MISSING
    assert "kvtier[gpu]" in found["todo"]
