"""Shared memory as the kernel offers it: allocate, punch, populate, advise, lock.

Thin wrappers around calls that the standard library lacks. All of them release the GIL, none of them
keeps state; errors are `OSError` with the kernel's errno.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
from pathlib import Path
from typing import Final

import numpy as np

CHUNK_BYTES: Final = 64 << 20
"""One call into the kernel works on at most so many bytes (about 50 ms), so that a stop is soon heard."""

_MADV_DONTFORK: Final = 10
_MADV_HUGEPAGE: Final = 14
_MADV_DONTDUMP: Final = 16
_MADV_POPULATE_WRITE: Final = 23
_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2

SMAPS: Final = Path("/proc/self/smaps")
_RANGE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.fallocate.restype = ctypes.c_int


def address_of(mapping: mmap.mmap) -> int:
    """Address of the first byte of `mapping`."""
    return int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)


def allocate(fd: int, offset_bytes: int, size_bytes: int) -> None:
    """Back a range of the file with memory now: ENOSPC here instead of SIGBUS at first use."""
    os.posix_fallocate(fd, offset_bytes, size_bytes)


def punch(fd: int, offset_bytes: int, size_bytes: int) -> None:
    """Give the memory of a range back, also under live mappings: they read zeros, never SIGBUS."""
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    while _libc.fallocate(fd, mode, offset_bytes, size_bytes):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def populate(mapping: mmap.mmap, offset_bytes: int, size_bytes: int) -> None:
    """Fill this process's page tables for a range that is allocated, or anonymous, and not used by anybody
    yet.
    """
    while _libc.madvise(address_of(mapping) + offset_bytes, size_bytes, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # kernels before 5.14
            _touch(mapping, offset_bytes, size_bytes)
            return
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code))


def populate_first(mapping: mmap.mmap, offset_bytes: int, size_bytes: int) -> None:
    """Touch a range of a file before it is allocated, as far as that goes; never a SIGBUS.

    On a mount with ``huge=advise`` a fault gets the huge pages that were asked for, `allocate` does not.
    Where memory is short, or the kernel is older than 5.14, nothing has happened, and `allocate` says why.
    """
    _libc.madvise(address_of(mapping) + offset_bytes, size_bytes, _MADV_POPULATE_WRITE)


def advise(mapping: mmap.mmap, offset_bytes: int, size_bytes: int, *, huge: bool = True) -> None:
    """Keep a range out of core dumps and ask for huge pages; a kernel that does neither is fine."""
    for advice in (_MADV_DONTDUMP, _MADV_HUGEPAGE) if huge else (_MADV_DONTDUMP,):
        _libc.madvise(address_of(mapping) + offset_bytes, size_bytes, advice)


def keep_private(mapping: mmap.mmap) -> None:
    """No child process gets a copy of these page tables."""
    _libc.madvise(address_of(mapping), len(mapping), _MADV_DONTFORK)


def huge_bytes(mapping: mmap.mmap) -> int:
    """How much of a mapping lies in huge pages now; 0 where the kernel does not say."""
    address, found, is_here = address_of(mapping), 0, False
    try:
        with SMAPS.open() as lines:
            for line in lines:
                if match := _RANGE.match(line):
                    begin, end = int(match[1], 16), int(match[2], 16)
                    is_here = begin < address + len(mapping) and address < end
                elif is_here and line.startswith(("AnonHugePages:", "ShmemPmdMapped:")):
                    found += int(line.split()[1]) * 1024
    except OSError:
        return 0
    return min(found, len(mapping))  # the kernel shows neighbours that are alike as one


def try_lock(fd: int, operation: int) -> bool:
    """Take a flock if nobody holds one in the way; it belongs to the open file, not to the process."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def used_bytes(fd: int) -> int:
    """Bytes of memory behind an open file, named or not."""
    return os.fstat(fd).st_blocks * 512


def _touch(mapping: mmap.mmap, offset_bytes: int, size_bytes: int) -> None:
    pages = np.frombuffer(mapping, dtype=np.uint8, count=size_bytes, offset=offset_bytes)
    pages[:: mmap.PAGESIZE] = 0
