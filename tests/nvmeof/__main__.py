"""Prepares the virtual machine, boots it, shows what it says, and ends it: `python -m tests.nvmeof`."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import IO, Final

from tests.nvmeof import initramfs
from tests.nvmeof.guest import MARK, PASSED
from tests.nvmeof.packages import QEMU, CannotRun, Guest, fetch

DEADLINE_S: Final = 590
"""Everything, packages included, has ended by then."""
GUEST_DEADLINE_S: Final = 480.0
"""The machine is killed after this."""
MEMORY: Final = "1536M"
TAIL_LINES: Final = 60
ROOT: Final = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Exit status 0: everything held in the guest; 1: something did not; 2: it cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache/nvmeof", help="where packages are kept")
    parser.add_argument("--verbose", action="store_true", help="show the guest's whole console")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, _stop)
    signal.alarm(DEADLINE_S)
    cache = options.cache.resolve()
    try:
        guest = fetch(cache)
    except CannotRun as error:
        print(f"nvmeof-test cannot run: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="kvtier-nvmeof-") as directory:
        return boot(guest, Path(directory), verbose=options.verbose)


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def boot(guest: Guest, directory: Path, *, verbose: bool) -> int:
    """Run the guest to its end."""
    archive = directory / "initramfs"
    command = [sys.executable, "-B", "-m", "tests.nvmeof.guest", *map(str, guest.nvme)]
    archive.write_bytes(initramfs.build(guest.modules, guest.busybox, command, ROOT))
    machine = subprocess.Popen(
        _qemu(guest.kernel, archive),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=_die_with_parent,
    )
    deadline = Timer(GUEST_DEADLINE_S, machine.kill)
    deadline.start()
    assert machine.stdout is not None
    try:
        lines = _follow(machine.stdout, verbose=verbose)
        machine.wait()
    finally:
        deadline.cancel()
        machine.kill()
        machine.wait()
    if lines and lines[-1].endswith(PASSED):
        return 0
    if not verbose:
        print("\n".join(lines[-TAIL_LINES:]))
    print(f"nvmeof-test failed: the guest ended without saying {PASSED!r}", file=sys.stderr)
    return 1


def _follow(console: IO[bytes], *, verbose: bool) -> list[str]:
    """All lines of the console; those that the test itself writes are shown as they come."""
    began_s = time.monotonic()
    lines = []
    for raw in console:
        line = raw.decode(errors="replace").strip()
        marked = line.startswith(MARK)
        if marked or verbose:
            print(f"[{time.monotonic() - began_s:5.1f} s] {line.removeprefix(MARK)}", flush=True)
        lines.append(line)
    while lines and not lines[-1].startswith(MARK) and any(line.endswith(PASSED) for line in lines):
        lines.pop()  # what the kernel says when it goes down
    return lines


def _qemu(kernel: Path, archive: Path) -> list[str]:
    return [
        QEMU,
        *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", MEMORY),
        *("-display", "none", "-monitor", "none", "-serial", "stdio", "-nic", "none", "-no-reboot"),
        *("-kernel", str(kernel), "-initrd", str(archive)),
        *("-append", "console=ttyS0 loglevel=4 panic=-1 mitigations=off"),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-rng-pci"),
    ]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()


if __name__ == "__main__":
    sys.exit(main())
