"""Why a configuration gets no huge pages on this machine, and the command that mends it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import Config
from kvtier.tiers import numa, sysfs

_THP = "/sys/kernel/mm/transparent_hugepage"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is missing, and what to do."""

    why: str
    todo: str


def fault(config: Config, *, root: Path = sysfs.SYSFS, mountinfo: Path = sysfs.MOUNTINFO) -> Fault | None:
    """What keeps the arena, or far memory, from huge pages; None where they are to be had."""
    page_bytes = numa.huge_page_bytes(root)
    if config.extent_bytes % page_bytes:
        why = f"extent_bytes is {config.extent_bytes}, and a huge page has {page_bytes} bytes"
        return Fault(why, "set extent_bytes to a multiple of that")
    has, setting = numa.huge_page_choice(config.shm_dir, root=root, mountinfo=mountinfo)
    if not has:
        return Fault(f"the arena gets ordinary pages, {setting}", _mend_arena(config, root, mountinfo))
    has, setting = numa.anonymous_huge_choice(root)
    if config.far_memory and not has:
        return Fault(f"far memory gets ordinary pages, {setting}", f"echo madvise > {_THP}/enabled")
    return None


def _mend_arena(config: Config, root: Path, mountinfo: Path) -> str:
    general = sysfs.chosen(sysfs.text(root / "kernel/mm/transparent_hugepage/shmem_enabled"))
    if general == "deny":
        return f"echo never > {_THP}/shmem_enabled"
    mount = sysfs.mount_of(config.shm_dir, mountinfo)
    point = shlex.quote(mount.point if mount else str(config.shm_dir))
    if mount is None or mount.kind != "tmpfs":
        return f"mount -t tmpfs -o huge=advise kvtier {point}, or set shm_dir to such a mount"
    return f"mount -o remount,huge=advise {point}"
