"""What a machine lacks for an arena, told in the words of the configuration."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from kvtier import machine
from kvtier.errors import ResourceShortage

_GIB: Final = 1 << 30


def check(capacity_bytes: int, wanted_bytes: int, shm_dir: Path) -> None:
    """Say what is missing before anything is taken.

    Parameters
    ----------
    capacity_bytes
        What is configured.
    wanted_bytes
        What is to be allocated now, less than `capacity_bytes` where older arenas take a part.

    Raises
    ------
    ResourceShortage
        Names `dram_bytes`, its value and what there is.
    OSError
        `shm_dir` cannot be looked at.
    """
    name = f"dram_bytes is {capacity_bytes} ({capacity_bytes / _GIB:.2f} GiB)"
    lower = "lower dram_bytes or set it to 'auto'"
    total = machine.memory_total_bytes()
    if capacity_bytes > total:
        raise ResourceShortage(f"{name}, but there are only {total} bytes of memory: {lower}")
    available = machine.memory_available_bytes()
    if wanted_bytes > available:
        raise ResourceShortage(f"{name}, but only {available} bytes of memory are available: {lower}")
    free = machine.free_bytes(shm_dir)
    if wanted_bytes > free:
        raise ResourceShortage(
            f"{name}, but only {free} bytes are free in {shm_dir}: enlarge it (docker run --shm-size, mount "
            "-o remount,size=), or lower dram_bytes, and extent_bytes where dram_bytes is one extent already"
        )


def explain(error: OSError, capacity_bytes: int, shm_dir: Path) -> str:
    """The kernel's refusal as something to act on."""
    causes = {
        errno.ENOSPC: f"{shm_dir} is full: lower dram_bytes or enlarge it",
        errno.EFBIG: "the limit on file sizes is lower: raise it (ulimit -f) or lower dram_bytes",
        errno.ENOMEM: "memory or address space does not suffice: raise ulimit -v or lower dram_bytes",
        errno.EFAULT: "the machine ran out of memory: lower dram_bytes",
    }
    cause = causes.get(error.errno or 0, f"the arena cannot be made in shm_dir {shm_dir}")
    return f"dram_bytes is {capacity_bytes}, but {cause} ({error})"
