"""The arena in this process's memory.

The file is mapped whole, but only ``[0, allocated_bytes)`` is backed by memory: nothing beyond is ever
touched. The file stays open with a shared flock, which tells the node that its memory is still in use
here after the node itself is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtier.errors import TierFault, Unavailable
from kvtier.types import PAGE_SIZE_BYTES

POPULATE_CHUNK_BYTES: Final = 32 << 20
"""Page tables are filled in steps of so many bytes (about 2 ms): other mappings wait no longer."""

_MADV_DONTFORK: Final = 10
_MADV_DONTDUMP: Final = 16
_MADV_POPULATE_WRITE: Final = 23
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Bytes = npt.NDArray[np.uint8]


class _Memory:
    """Lets numpy see memory at an address; whoever makes one keeps the memory alive."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }


def memory_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    """Bytes at `address` as an array; strides may have any sign. Not checked, not kept alive."""
    return np.asarray(_Memory(address, shape, strides))


class ArenaMapping:
    """One mapped arena. Thread-safe.

    Unmapping while a copy runs would kill the process, so copies run inside `use`, and `retire` takes
    effect when the last of them has ended.

    Parameters
    ----------
    path, size_bytes, allocated_bytes
        As the node said when this engine registered.

    Raises
    ------
    Unavailable
        The file is gone, too short, or not this user's: register again.
    """

    def __init__(self, path: str, size_bytes: int, allocated_bytes: int) -> None:
        if not 0 <= allocated_bytes <= size_bytes or not 0 < size_bytes < 1 << 50:
            raise Unavailable(
                f"the node names an arena of {allocated_bytes} of {size_bytes} bytes: restart it"
            )
        self.size_bytes = size_bytes
        self._path = path
        self._allocated_bytes = allocated_bytes
        self._populated_bytes = 0
        self._changed = threading.Condition()
        self._users = 0
        self._retired = False
        self._on_end: list[Callable[[], None]] = []
        self._before_unmap: list[Callable[[], object]] = []
        self._fd = _open(path, size_bytes)
        self._address = _map(self._fd, size_bytes)
        self.bytes = memory_at(self._address, (size_bytes,), (1,))
        self.view = self.bytes.data

    @property
    def address(self) -> int:
        """Where the arena begins in this process."""
        return self._address

    @property
    def allocated_bytes(self) -> int:
        """Bytes that slots may lie in."""
        return self._allocated_bytes

    def grow(self, allocated_bytes: int) -> None:
        """The node has allocated more since."""
        with self._changed:
            if self._allocated_bytes <= allocated_bytes <= self.size_bytes:
                self._allocated_bytes = allocated_bytes

    def check(self, offsets: Sequence[int], slot_bytes: int) -> bool:
        """Whether all slots lie within the allocated bytes and none overlaps another."""
        return lie_within(offsets, slot_bytes, self._allocated_bytes)

    def is_orphaned(self) -> bool:
        """Whether its name is gone or leads elsewhere: its daemon has ended, or another has taken over."""
        with self._changed:
            if self._fd < 0:
                return False
            try:
                return not os.path.samestat(os.stat(self._path), os.fstat(self._fd))
            except OSError:
                return True

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Keep the arena mapped; raises `Unavailable` where it was given up."""
        with self._changed:
            if self._retired:
                raise Unavailable("the node was restarted: its old arena was given up")
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                ended = self._end_if_unused()
            for on_end in ended:
                on_end()

    @property
    def is_populated(self) -> bool:
        """Whether no copy has to wait for a page table any more."""
        return self._populated_bytes >= self._allocated_bytes

    def populate(self) -> bool:
        """Fill one chunk of this process's page tables; False where nothing is left. Holds no GIL.

        Called by one thread only.
        """
        begin = self._populated_bytes
        size = min(POPULATE_CHUNK_BYTES, self._allocated_bytes - begin)
        if size <= 0:
            return False
        with contextlib.suppress(Unavailable), self.use():
            # Kernels before 5.14 cannot: then the first copy into a page pays for it.
            if not _libc.madvise(self._address + begin, size, _MADV_POPULATE_WRITE) or (
                ctypes.get_errno() == errno.EINVAL
            ):
                self._populated_bytes = begin + size
                return True
        return False

    def retire(self, on_end: Callable[[], None] | None = None) -> None:
        """Unmap and close as soon as no copy runs, then call `on_end`; idempotent."""
        with self._changed:
            if on_end is not None:
                self._on_end.append(on_end)
            self._retired = True
            ended = self._end_if_unused()
        for call in ended:
            call()

    def before_unmap(self, call: Callable[[], object]) -> None:
        """Undo what needs the mapping; from inside `use`."""
        with self._changed:
            self._before_unmap.append(call)

    def forget(self) -> None:
        """In a forked child, which has inherited the file but not the mapping."""
        self._retired = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _end_if_unused(self) -> list[Callable[[], None]]:
        if not self._retired or self._users:
            return []
        if self._fd >= 0:
            while self._before_unmap:
                self._before_unmap.pop()()
            _libc.munmap(self._address, self.size_bytes)
            os.close(self._fd)
            self._fd = -1
        ended, self._on_end = self._on_end, []
        return ended


def lie_within(offsets: Sequence[int], slot_bytes: int, size_bytes: int) -> bool:
    """Whether all these slots begin at whole pages, lie in so many bytes, and none overlaps another."""
    ordered = np.sort(np.asarray(offsets, np.uint64))
    if not len(ordered):
        return True
    # The last one first: beyond 2^63 sums would wrap around.
    if int(ordered[-1]) + slot_bytes > size_bytes or (ordered % PAGE_SIZE_BYTES).any():
        return False
    return not (np.diff(ordered) < slot_bytes).any()


def slots_at(arena: ArenaMapping, offsets: Sequence[int], slot_bytes: int) -> None:
    """Raise `TierFault` unless these are slots that may be touched: a node is not trusted with memory."""
    if not arena.check(offsets, slot_bytes):
        raise TierFault(
            f"the node names slots of {slot_bytes} bytes outside the {arena.allocated_bytes} bytes of its "
            "arena, or overlapping ones: nothing was touched; restart the daemon"
        )


def _open(path: str, size_bytes: int) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise Unavailable(f"the arena {path} cannot be opened ({error}): register again") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size < size_bytes:
        os.close(fd)
        raise Unavailable(f"the arena {path} is not this user's, or shorter than the node says: restart it")
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise Unavailable(f"the arena {path} is being given up: register again") from error
    return fd


def _map(fd: int, size_bytes: int) -> int:
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        os.close(fd)
        raise Unavailable(
            f"the arena cannot be mapped ({os.strerror(code)}): raise the limit of address space"
        )
    # A child would keep the memory alive without a lock that says so.
    for advice in (_MADV_DONTFORK, _MADV_DONTDUMP):
        _libc.madvise(address, size_bytes, advice)
    return int(address)
