"""QEMU, a kernel with its modules, busybox and nvme-cli: Debian's packages, kept in a cache directory."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

QEMU: Final = "qemu-system-x86_64"
APT_TIMEOUT_S: Final = 300
_NVME_LIBRARIES: Final = ("libnvme1", "libnvme1t64", "libjson-c5")


class CannotRun(Exception):
    """Something is missing on this machine; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Guest:
    """What a virtual machine boots (kernel image, its modules, a static busybox), and where nvme-cli is."""

    kernel: Path
    modules: Path
    busybox: Path
    nvme: tuple[Path, ...]


def fetch(cache: Path) -> Guest:
    """Everything that the guest needs, downloaded unless it is there."""
    if shutil.which("apt-get") is None:
        raise CannotRun("this needs Debian or Ubuntu: kernel and busybox come from apt-get download")
    if os.geteuid() == 0 and not (cache / "nvme-cli").is_dir():
        _apt(["apt-get", "update", "-qq"], Path("/"))
    if shutil.which(QEMU) is None:
        _install_qemu()
    busybox = _unpacked(cache, "busybox-static") / "bin/busybox"
    kernel_root = _unpacked(cache, _kernel_package())
    kernels = sorted(kernel_root.glob("boot/vmlinuz-*"))
    modules = sorted(kernel_root.glob("lib/modules/*"))
    if not kernels or not modules or not busybox.is_file():
        raise CannotRun(f"the packages under {cache} hold no kernel or no busybox: delete it and run again")
    return Guest(kernels[0], modules[0], busybox, _nvme(cache))


def _nvme(cache: Path) -> tuple[Path, ...]:
    """Roots: of nvme-cli, then of libraries that a machine without NVMe lacks."""
    listed = _apt(["apt-cache", "depends", "--important", "nvme-cli"], Path("/"))
    libraries = [name for name in _NVME_LIBRARIES if f"Depends: {name}\n" in listed]
    return tuple(_unpacked(cache, name) for name in ("nvme-cli", *libraries))


def _install_qemu() -> None:
    if os.geteuid() != 0:
        raise CannotRun("QEMU is missing: apt-get install --no-install-recommends qemu-system-x86")
    _apt(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "qemu-system-x86"], Path("/"))


def _kernel_package() -> str:
    """The package with today's image, which `linux-image-amd64` only points to."""
    listed = _apt(["apt-cache", "depends", "--important", "linux-image-amd64"], Path("/"))
    found = [line.split()[-1] for line in listed.splitlines() if "Depends: linux-image-" in line]
    if not found:
        raise CannotRun("apt knows no kernel image: run apt-get update")
    return found[0]


def _unpacked(cache: Path, package: str) -> Path:
    """Directory with the content of a package; complete, or not there at all."""
    target = cache / package
    if target.is_dir():
        return target
    fresh = cache / f"{package}.fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    _apt(["apt-get", "download", "-qq", package], fresh)
    (archive,) = fresh.glob("*.deb")
    _apt(["dpkg", "-x", str(archive), str(fresh)], fresh)
    archive.unlink()
    fresh.rename(target)
    return target


def _apt(command: list[str], directory: Path) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=APT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise CannotRun(f"`{' '.join(command)}` did not end within {APT_TIMEOUT_S} s") from None
    if done.returncode:
        raise CannotRun(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}")
    return done.stdout
