"""The file behind a piece of memory, so that another process can map the same bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from kvtier.errors import Unavailable


@dataclass(frozen=True, slots=True)
class SharedFile:
    """An open file (whoever holds this closes `fd`), and the part of it that is mapped."""

    fd: int
    offset_bytes: int
    size_bytes: int


def file_of(memory: memoryview) -> SharedFile:
    """The file that `memory` maps, opened anew: locks on the caller's own descriptor are not shared.

    Raises
    ------
    Unavailable
        It is no shared mapping of one file.
    """
    address = int(np.frombuffer(memory, np.uint8).ctypes.data)
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            place, mode, offset, device, inode, *_ = line.split()
            begin, end = (int(part, 16) for part in place.split("-"))
            if begin <= address < end:
                break
        else:
            raise Unavailable("the arena is not mapped in this process")
    if not mode.startswith("rw") or mode[3] != "s" or inode == "0":
        raise Unavailable("the arena is private memory: only shared memory can be handed to NIXL's process")
    major, minor = (int(part, 16) for part in device.split(":"))
    fd = _open(os.makedev(major, minor), int(inode))
    shared = SharedFile(fd, int(offset, 16) + address - begin, memory.nbytes)
    if os.fstat(fd).st_size < shared.offset_bytes + shared.size_bytes:
        os.close(fd)
        raise Unavailable("the arena is larger than its file")
    return shared


def _open(device: int, inode: int) -> int:
    """A new descriptor of a file that this process has open: Python's mmap keeps one, so there is one."""
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            found = os.stat(path)
            if (found.st_dev, found.st_ino) == (device, inode):
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # closed meanwhile, or not to be opened
            continue
    raise Unavailable("the arena's file is not open in this process: it cannot be handed to NIXL's process")
