"""One stripe of the file tier: a slab file in a directory, or a block device; opened, locked, read, written.

A path may be a directory, which is made if it is missing and then holds ``kvtier.slab`` alone; a block
device; or an existing regular file, which is used like a device of its size. Names below ``/dev`` may be
links, since that is where stable names of devices are; no other link is followed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, TypeVar

from kvtier.errors import AlreadyRunning, ConfigError, TierFault
from kvtier.tiers import shm
from kvtier.tiers.file_threads import Health, Rate
from kvtier.types import PAGE_SIZE_BYTES

SLAB_NAME: Final = "kvtier.slab"
CHECK_EVERY_S: Final = 1.0
"""So often a path is looked at: whether it still leads to what was opened."""
BLANK_BYTES: Final = 1 << 20
"""A device counts as empty if it begins with so many zeros: file systems and volumes leave marks there."""
_ZEROS: Final = memoryview(mmap.mmap(-1, BLANK_BYTES))
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Calls:
    """The kernel's calls that move bytes: the seam at which tests make a device fail, or stop.

    A kernel without device mapper has no device that fails on demand; everything above these three calls is
    the same with one.
    """

    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    fdatasync: Callable[[int], None] = os.fdatasync


class Rates(NamedTuple):
    """Of all stripes of a tier together."""

    reading: Rate
    writing: Rate


class Stripe:
    """An open file or device. All methods may block; those that move bytes are thread-safe.

    Attributes
    ----------
    direct
        O_DIRECT works: memory, offsets and sizes have to be whole pages.
    fixed_bytes
        Size of a device; None for a slab file, which grows.
    """

    def __init__(self, path: Path, health: Health, calls: Calls, rates: Rates) -> None:
        self.path = path
        self.name = path
        self.direct = False
        self.fixed_bytes: int | None = None
        self.read_bytes = 0
        self.written_bytes = 0
        self._health = health
        self._calls = calls
        self._rates = rates
        self._fd = -1
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._asked = 0
        self._flushed = 0
        self._checked_s = 0.0

    # ---- life

    def open(self, *, create: bool = True) -> None:
        """Open and lock; `create` a directory or slab file that is not there.

        Raises
        ------
        ConfigError
            The path is none of the three kinds, is a link, or cannot be used by this user.
        AlreadyRunning
            A live daemon has it.
        """
        try:
            with self._health.asking():
                self.name, is_directory = _kind(self.path)
                if is_directory:
                    self._open_slab(create)
                else:
                    self._open_device()
                self._lock_file()
                self._choose_direct()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"{self.path}: allowed is a directory, a block device or a file that this user can write, "
                f"and no link ({error})"
            ) from error
        except BaseException:
            self.close()
            raise

    def _open_slab(self, create: bool) -> None:
        if create:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(directory_fd).st_uid != os.geteuid():
                raise ConfigError(f"{self.path}: it belongs to another user; name a directory of this user")
            os.fchmod(directory_fd, 0o700)
            flags = _FLAGS | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
            self._fd = os.open(SLAB_NAME, flags, 0o600, dir_fd=directory_fd)
            os.fsync(directory_fd)
        finally:
            os.close(directory_fd)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(f"{self.path}: {SLAB_NAME} in it is no file of this user: remove it")
        os.fchmod(self._fd, 0o600)
        self.fixed_bytes = None

    def _open_device(self) -> None:
        is_device = stat.S_ISBLK(os.stat(self.name, follow_symlinks=False).st_mode)
        try:
            # For devices O_EXCL means: not mounted, no volume's member, no other daemon's.
            self._fd = os.open(self.name, _FLAGS | os.O_NOFOLLOW | (os.O_EXCL if is_device else 0))
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise AlreadyRunning(f"{self.path} is in use: mounted, or another daemon's") from error
            raise
        self.fixed_bytes = os.lseek(self._fd, 0, os.SEEK_END) // PAGE_SIZE_BYTES * PAGE_SIZE_BYTES

    def _lock_file(self) -> None:
        if not shm.try_lock(self._fd, fcntl.LOCK_EX):
            raise AlreadyRunning(f"{self.path}: a live daemon uses it; stop it, or choose another path")

    def _choose_direct(self) -> None:
        """O_DIRECT where a page can be read with it: some file systems accept the flag and nothing else."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            with mmap.mmap(-1, PAGE_SIZE_BYTES) as page:
                os.preadv(self._fd, [page], 0)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            self.direct = False

    def close(self) -> None:
        """Close and unlock; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def check_path(self) -> None:
        """Quarantine the medium if the path leads elsewhere by now; looks once in `CHECK_EVERY_S`."""
        if time.monotonic() - self._checked_s >= CHECK_EVERY_S:
            self._call("looking for it", self._check_path)

    def _check_path(self) -> None:
        if not os.path.samestat(os.stat(self.file, follow_symlinks=False), os.fstat(self._fd)):
            raise OSError(errno.ESTALE, "it was replaced or unmounted")
        self._checked_s = time.monotonic()

    def forget_check(self) -> None:
        """Let the next `check_path` look in any case."""
        self._checked_s = 0.0

    # ---- bytes

    def read(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers; what lies beyond the end of the file reads as zeros.

        Raises
        ------
        TierFault
            The device failed, and is quarantined.
        """
        self._move(self._calls.preadv, "reading", offset_bytes, buffers)

    def write(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers; raises `TierFault`."""
        self._move(self._calls.pwritev, "writing", offset_bytes, buffers)

    def note_written(self, size_bytes: int) -> None:
        """Count what somebody else has written here: it wears the device as well."""
        with self._lock:
            self.written_bytes += size_bytes

    def load(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Whole pages in memory of their own."""
        memory = memoryview(mmap.mmap(-1, size_bytes))
        for begin in range(0, size_bytes, BLANK_BYTES):
            self.read(offset_bytes + begin, [memory[begin : begin + BLANK_BYTES]])
        return memory

    def store(self, offset_bytes: int, content: bytes) -> None:
        """Write whole pages that lie anywhere in memory."""
        memory = memoryview(mmap.mmap(-1, len(content)))
        memory[:] = content
        for begin in range(0, len(content), BLANK_BYTES):
            self.write(offset_bytes + begin, [memory[begin : begin + BLANK_BYTES]])

    def flush(self) -> None:
        """Return when what was written before is on stable storage; many callers share one flush."""
        with self._lock:
            self._asked += 1
            mine = self._asked
        with self._flushing:
            if self._flushed < mine:
                with self._lock:
                    covers = self._asked
                self._call("flushing", lambda: self._calls.fdatasync(self._fd))
                self._flushed = covers

    def _move(
        self,
        function: Callable[[int, Sequence[memoryview], int], int],
        what: str,
        offset_bytes: int,
        buffers: Sequence[memoryview],
    ) -> None:
        left = list(buffers)
        total = sum(buffer.nbytes for buffer in left)
        with (self._rates.writing if what == "writing" else self._rates.reading).moving(total):
            self._move_all(function, what, offset_bytes, left)
        with self._lock:
            if what == "writing":
                self.written_bytes += total
            else:
                self.read_bytes += total

    def _move_all(
        self,
        function: Callable[[int, Sequence[memoryview], int], int],
        what: str,
        offset_bytes: int,
        left: list[memoryview],
    ) -> None:
        done = 0
        while left:
            at, chunk = offset_bytes + done, left
            moved = self._call(what, lambda at=at, chunk=chunk: function(self._fd, chunk, at))  # type: ignore[misc]
            if not moved:
                if what == "writing":
                    self._fail(what, OSError(errno.EIO, "it took no bytes"))
                for buffer in left:
                    buffer[:] = bytes(buffer.nbytes)
                break
            done += moved
            left = _rest(left, moved)

    def _call(self, what: str, function: Callable[[], _T]) -> _T:
        if fault := self._health.refusal():
            raise TierFault(fault)
        try:
            with self._health.asking():
                return function()
        except OSError as error:
            self._fail(what, error)

    def _fail(self, what: str, error: OSError) -> NoReturn:
        reason = f"{self.path}: {what} failed: {error.strerror or error}"
        self._health.quarantine(reason)
        raise TierFault(reason) from error

    @property
    def file(self) -> Path:
        """The file or device itself, as others may open it."""
        return self.name if self.fixed_bytes is not None else self.name / SLAB_NAME

    def identity(self) -> tuple[int, int]:
        """Device and inode of what is open here."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    # ---- space of a slab file

    @property
    def size_bytes(self) -> int:
        """Of the file or device."""
        if self.fixed_bytes is not None:
            return self.fixed_bytes
        return os.fstat(self._fd).st_size

    def free_bytes(self) -> int:
        """What the file system has left for this user."""
        with self._health.asking():
            status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def file_system(self) -> int:
        """Number that tells file systems apart."""
        return os.fstat(self._fd).st_dev

    def allocate(self, begin_bytes: int, end_bytes: int) -> bool:
        """Back a range of a slab file with space; False and as large as before where there is not enough."""
        before_bytes = self.size_bytes
        try:
            with self._health.asking():
                os.posix_fallocate(self._fd, begin_bytes, end_bytes - begin_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                os.ftruncate(self._fd, before_bytes)
                return False
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            return self._fill(begin_bytes, end_bytes)
        return True

    def _fill(self, begin_bytes: int, end_bytes: int) -> bool:
        """For file systems that cannot set space apart: write zeros behind the present end."""
        before_bytes = self.size_bytes
        begin_bytes = max(begin_bytes, before_bytes)
        try:
            for offset_bytes in range(begin_bytes, end_bytes, BLANK_BYTES):
                chunk = _ZEROS[: min(BLANK_BYTES, end_bytes - offset_bytes)]
                with self._health.asking():
                    taken = os.pwrite(self._fd, chunk, offset_bytes)
                if taken != chunk.nbytes:
                    raise OSError(errno.ENOSPC, "short write")
        except OSError as error:
            os.ftruncate(self._fd, before_bytes)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return False
            raise
        return True

    def truncate(self, size_bytes: int) -> None:
        """Give back what lies behind `size_bytes`."""
        os.ftruncate(self._fd, size_bytes)

    def is_blank(self) -> bool:
        """Whether nobody's data can be seen: a new file, or a device that begins with zeros."""
        size_bytes = min(BLANK_BYTES, self.size_bytes // PAGE_SIZE_BYTES * PAGE_SIZE_BYTES)
        return not size_bytes or self.load(0, size_bytes) == _ZEROS[:size_bytes]


def _kind(path: Path) -> tuple[Path, bool]:
    """The path to open, and whether it is a directory (a missing one is to be made)."""
    if path.is_relative_to("/dev") and (real := path.resolve()).is_block_device():
        return real, False
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return path, True
    if stat.S_ISDIR(mode):
        return path, True
    if stat.S_ISBLK(mode) or stat.S_ISREG(mode):
        return path, False
    raise OSError(errno.EINVAL, "a symbolic link" if stat.S_ISLNK(mode) else "of another kind")


def _rest(buffers: list[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of buffers of which the first bytes have been moved."""
    for number, buffer in enumerate(buffers):
        if done_bytes < buffer.nbytes:
            return [buffer[done_bytes:], *buffers[number + 1 :]]
        done_bytes -= buffer.nbytes
    return []
