"""How much memory this machine has: total, available, and free in a shared-memory file system.

A container's own limit counts where it is lower than what the machine has. Pure reads of `/proc`,
`/sys` and `statvfs`; thread-safe.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP_LIMITS: Final = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def memory_total_bytes() -> int:
    """Bytes of memory that this process may ever use: the machine's, or its control group's limit."""
    total = _meminfo_bytes("MemTotal")
    group = _cgroup_bytes()
    return total if group is None else min(total, group[0])


def memory_available_bytes() -> int:
    """Bytes of memory that can be taken now without swapping."""
    available = _meminfo_bytes("MemAvailable")
    group = _cgroup_bytes()
    return available if group is None else max(0, min(available, group[0] - group[1]))


def free_bytes(directory: Path) -> int:
    """Bytes that this user can still store in the file system of `directory`; raises `OSError`."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _meminfo_bytes(name: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_MEMINFO} has no line {name}")


def _cgroup_bytes() -> tuple[int, int] | None:
    """Limit and use of the control group whose files are mounted, None where there is no limit."""
    for limit_file, usage_file in _CGROUP_LIMITS:
        try:
            limit = int(limit_file.read_text())
            usage = int(usage_file.read_text())
        except (OSError, ValueError):  # not mounted, or "max"
            continue
        return limit, usage
    return None
