"""What `kvtier check` says of GPUDirect Storage: library, Python binding, kernel module, and what opens.

Runs in the probe's own process: the libraries may crash, hang or write to the terminal.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from kvtier.cli.findings import DEGRADED, MISSING, OK, Finding, finding, one_line
from kvtier.tiers import sysfs

GDSCHECK_TIMEOUT_S: Final = 30.0
MAX_STATS_BYTES: Final = 64 << 10
_TOOLS: Final = (Path("/usr/local/cuda/gds/tools/gdscheck"), Path("/usr/local/cuda/gds/tools/gdscheck.py"))
_WITHOUT: Final = "reads go through host memory"
_INSTALL: Final = "pip install 'kvtier[gpu]'"
_LOAD: Final = "install nvidia-fs (package nvidia-gds) and run modprobe nvidia-fs"
_SUPPORT: Final = re.compile(r"^\s*(NVMe|NVMeOF|NVMe P2PDMA)\s*:\s*(\w+)\s*$", re.MULTILINE)
_ERRORS: Final = re.compile(r"^(Reads|Writes)\s*:.*\berr=([1-9][0-9]*)", re.MULTILINE)


def gds_findings(has_cuda: bool, *, root: Path = sysfs.SYSFS, proc: Path = Path("/proc")) -> list[Finding]:
    """One line for each thing that GPUDirect Storage is made of, then whether it works as a whole."""
    library, loaded = _library()
    module = nvidia_fs(root, proc)
    found = [library, _binding(), module]
    if not has_cuda:
        why = f"GPUDirect Storage needs the CUDA driver: {_WITHOUT}"
        todo = "on a GPU machine install the NVIDIA driver; without a GPU nothing is to be done"
        return [*found, finding("gds", MISSING, why, todo)]
    return [*found, _gdscheck(), _opened(loaded, module)]


def nvidia_fs(root: Path = sysfs.SYSFS, proc: Path = Path("/proc")) -> Finding:
    """The kernel module: loaded, of which version, and whether its counters show failed I/O."""
    driver = proc / "driver/nvidia-fs"
    if not (driver / "stats").exists():
        if (root / "module/nvidia_fs").exists():
            why = f"the module is loaded, but {driver}/stats is missing: {_WITHOUT}"
            return finding(
                "nvidia-fs", DEGRADED, why, "look at dmesg, and load it anew: modprobe -r nvidia-fs"
            )
        why = f"the kernel module is not loaded: only local NVMe with P2PDMA goes without, else {_WITHOUT}"
        return finding("nvidia-fs", MISSING, why, _LOAD)
    stats = sysfs.text(driver / "stats", MAX_STATS_BYTES)
    version = " ".join(sysfs.text(driver / "version").split()) or "of a version that it does not tell"
    errors = [f"{match[2]} {match[1].lower()} failed" for match in _ERRORS.finditer(stats)]
    if errors:
        why = f"loaded, {version}; {', '.join(errors)} since then"
        return finding("nvidia-fs", DEGRADED, why, f"look at dmesg, and at {driver}/stats")
    return finding("nvidia-fs", OK, f"loaded, {version}")


def _library() -> tuple[Finding, ctypes.CDLL | None]:
    name = "libcufile.so.0"
    try:
        return finding("libcufile", OK, f"{name} of the system"), ctypes.CDLL(name)
    except OSError as error:
        fault: Exception = error
    try:
        package = importlib.import_module("nvidia.cufile")
        path = Path(package.__path__[0], "lib", name)
        return finding("libcufile", OK, "from the package nvidia-cufile"), ctypes.CDLL(str(path))
    except (ImportError, OSError) as error:
        fault = error if isinstance(error, OSError) else fault
    why = f"no cuFile library ({one_line(fault)}): {_WITHOUT}"
    return finding("libcufile", MISSING, why, _INSTALL), None


def _binding() -> Finding:
    name = "cuda.bindings.cufile"
    try:
        importlib.import_module(name)
    except Exception as error:  # what it does without its libraries is its own affair
        return finding(name, MISSING, f"cannot be imported ({one_line(error)}): {_WITHOUT}", _INSTALL)
    return finding(name, OK, f"cuda-bindings {importlib.metadata.version('cuda-bindings')}")


def _gdscheck() -> Finding:
    tool = shutil.which("gdscheck") or next((str(each) for each in _TOOLS if each.exists()), None)
    if tool is None:
        why = "gdscheck is not installed: what cuFile supports here is not known in detail"
        return finding("gdscheck", MISSING, why, "install the package gds-tools")
    try:
        done = subprocess.run(
            [tool, "-p"],
            capture_output=True,
            timeout=GDSCHECK_TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return finding("gdscheck", DEGRADED, one_line(error), f"run it alone: {tool} -p")
    support = dict(_SUPPORT.findall(done.stdout))
    if not support:
        why = f"{tool} -p ended with status {done.returncode} and says nothing of NVMe"
        return finding("gdscheck", DEGRADED, why, f"run it alone: {tool} -p")
    why = ", ".join(f"{kind} {answer.lower()}" for kind, answer in support.items())
    if "Supported" in support.values():
        return finding("gdscheck", OK, why)
    return finding("gdscheck", DEGRADED, f"{why}: {_WITHOUT}", _LOAD)


def _opened(library: ctypes.CDLL | None, module: Finding) -> Finding:
    if library is None:
        return finding("gds", MISSING, f"there is no cuFile library: {_WITHOUT}", _INSTALL)

    class Status(ctypes.Structure):
        """CUfileError_t."""

        _fields_ = (("err", ctypes.c_int), ("cu_err", ctypes.c_int))

    library.cuFileDriverOpen.restype = Status
    status = library.cuFileDriverOpen()
    if status.err:
        why = f"cuFileDriverOpen failed with {status.err} (CUDA {status.cu_err}): {_WITHOUT}"
        return finding("gds", MISSING, why, "run gdscheck -p, and look at cufile.log")
    if module["state"] == MISSING:
        why = "cuFile opens, but without nvidia-fs it copies through host memory"
        return finding("gds", DEGRADED, why, _LOAD)
    return finding("gds", OK, "cuFile opens and nvidia-fs is loaded")
