"""How much memory this machine has: total, available, and free in a shared-memory file system.

A limit of a control group (a container, a systemd unit) counts where it is lower than what the machine
has. Pure reads of `/proc`, `/sys` and `statvfs`; thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_V1_FILES: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2_FILES: Final = ("memory.max", "memory.current", "")


def memory_total_bytes() -> int:
    """Bytes of memory that this process may ever use."""
    return min([_meminfo_bytes("MemTotal"), *(limit for limit, _ in _group_bytes())])


def memory_available_bytes() -> int:
    """Bytes of memory that can be taken now without swapping."""
    return max(0, min([_meminfo_bytes("MemAvailable"), *(limit - used for limit, used in _group_bytes())]))


def free_bytes(directory: Path) -> int:
    """Bytes that this user can still store in the file system of `directory`; raises `OSError`."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _meminfo_bytes(name: str) -> int:
    for line in (_PROC / "meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_PROC / 'meminfo'} has no line {name}")


def _group_bytes() -> Iterator[tuple[int, int]]:
    """Limit, and use without what the kernel can reclaim, of each control group that has a limit."""
    for folder, (limit_file, usage_file, stat_prefix) in _group_folders():
        try:
            limit = int((folder / limit_file).read_text())
            usage = int((folder / usage_file).read_text())
            yield limit, usage - _reclaimable_bytes(folder / "memory.stat", stat_prefix)
        except (OSError, ValueError):  # not mounted, not ours to see, or "max"
            continue


def _reclaimable_bytes(stat_file: Path, prefix: str) -> int:
    """Cached files. Shared memory is none of them: the kernel counts it as anonymous here."""
    names = {f"{prefix}inactive_file", f"{prefix}active_file"}
    fields = (line.split() for line in stat_file.read_text().splitlines())
    return sum(int(value) for name, value in fields if name in names)


def _group_folders() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """This process's memory groups and those above them, as far as they can be seen from here."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files = _CGROUPS, _V2_FILES
        elif "memory" in controllers.split(","):
            root, files = _CGROUPS / "memory", _V1_FILES
        else:
            continue
        # In a container the path may be the host's, of which only the root is mounted here.
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield root / folder, files
