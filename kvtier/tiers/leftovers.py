"""Files of arenas in the shared-memory directory: names, owners, and what dead daemons left behind.

A node owns, in `shm_dir`:

``kvtier-<node>.owner``
    Its daemon holds LOCK_EX on it for life: whoever gets that lock has proof that the daemon is dead.
``kvtier-<node>-<incarnation>.arena``
    The arena of a daemon. Every engine that maps it holds LOCK_SH on its own open file; a mapping keeps
    that file open, so the lock tells of the mapping and not only of the descriptor.
``kvtier-<node>-<incarnation>.old``
    An arena that was retired while engines still mapped it. It keeps a name so that the next daemon
    finds it and counts it, however often daemons die in between.

Retiring races with an engine that is just about to map:

1. the engine opens ``X.arena``;
2. the daemon renames it to ``X.old`` and finds no lock on it, so it unlinks the file;
3. the engine takes LOCK_SH and would map memory that nobody counts.

So an engine looks after locking whether the path still leads to the file it has locked, and starts over
if not; and the daemon renames *before* it probes. Whichever comes first, one of them sees the other.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier import logs
from kvtier.errors import AlreadyRunning, ResourceShortage
from kvtier.tiers import shm

NODE_PREFIX_CHARS: Final = 12
OWNER_WAIT_S: Final = 10.0
"""How long `own` waits for the owner lock: another daemon that clears our leftovers holds it meanwhile."""
_OWNER_POLL_S: Final = 0.05
_NAME: Final = re.compile(r"kvtier-(?P<node>[0-9a-z]{1,12})-(?P<incarnation>[0-9]+)\.(?:arena|old)")
_OPEN_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_log = logs.get("arena")


@dataclass(frozen=True, slots=True)
class OldArena:
    """A retired arena that engines still map; whoever holds this owns `fd`."""

    path: Path
    fd: int

    @property
    def used_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return shm.used_bytes(self.fd)

    def is_free(self) -> bool:
        """Whether no engine maps it any more; then nobody will."""
        return shm.try_lock(self.fd, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove a free one: file, memory and `fd`. Takes the kernel up to a second for 4 GiB."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)

    def punch(self) -> None:
        """Give its memory back under the engines' mappings. They may touch it again: punch again then."""
        size_bytes = os.fstat(self.fd).st_size
        for offset_bytes in range(0, size_bytes, shm.CHUNK_BYTES):
            shm.punch(self.fd, offset_bytes, min(shm.CHUNK_BYTES, size_bytes - offset_bytes))


def arena_path(shm_dir: Path, node_id: str, incarnation: int) -> Path:
    """File of the arena of one daemon."""
    return shm_dir / f"kvtier-{node_id[:NODE_PREFIX_CHARS]}-{incarnation}.arena"


def owner_path(shm_dir: Path, node_id: str) -> Path:
    """File whose lock says that a daemon of this node lives."""
    return shm_dir / f"kvtier-{node_id[:NODE_PREFIX_CHARS]}.owner"


def own(shm_dir: Path, node_id: str) -> int:
    """Lock the node's owner file for life; returns its descriptor.

    Raises
    ------
    AlreadyRunning
        A live daemon of this node uses `shm_dir`.
    ResourceShortage
        The directory is missing or not writable, or the file is another user's.
    """
    path = owner_path(shm_dir, node_id)
    deadline_s = time.monotonic() + OWNER_WAIT_S
    while True:
        fd = _open_owner(path)
        # A daemon that clears the leftovers of dead ones may have removed the file since we opened it.
        if shm.try_lock(fd, fcntl.LOCK_EX):
            if leads_to(path, fd):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        elif time.monotonic() >= deadline_s:
            pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            os.close(fd)
            owner = f"pid {pid}" if pid.isdigit() else "pid unknown"
            raise AlreadyRunning(f"a live daemon ({owner}) of node {node_id} has its arena in {shm_dir}")
        os.close(fd)
        time.sleep(_OWNER_POLL_S)


def _open_owner(path: Path) -> int:
    try:
        fd = os.open(path, _OPEN_FLAGS | os.O_CREAT, 0o600)
    except OSError as error:
        raise ResourceShortage(f"shm_dir is {path.parent}: cannot open {path.name} in it: {error}") from error
    if not _is_ours(fd):
        os.close(fd)
        raise ResourceShortage(f"shm_dir is {path.parent}: {path} is no file of this user; remove it")
    return fd


def disown(shm_dir: Path, node_id: str, owner_fd: int) -> None:
    """Undo `own`. The owner file stays while retired arenas do: it is the proof that they are orphans."""
    if not any(True for _ in _arenas(shm_dir, node_id[:NODE_PREFIX_CHARS])):
        owner_path(shm_dir, node_id).unlink(missing_ok=True)
    os.close(owner_fd)


def retire(path: Path, fd: int) -> OldArena | None:
    """Take an arena out of service and remove it, unless engines map it: then return it.

    `fd` was opened as `path` and belongs to this call from now on; a file that somebody else has removed
    meanwhile is let go.
    """
    if not leads_to(path, fd):
        os.close(fd)
        return None
    old = OldArena(path.with_suffix(".old"), fd)
    if path != old.path:
        path.rename(old.path)
    if not old.is_free():
        return old
    old.remove()
    return None


def retire_own(shm_dir: Path, node_id: str) -> list[OldArena]:
    """Retire every arena of earlier daemons of this node; the caller holds the owner lock."""
    kept = []
    for path in _arenas(shm_dir, node_id[:NODE_PREFIX_CHARS]):
        fd = _open_ours(path)
        if fd is None:
            _log.warning("no file of this user: left alone", path=str(path))
        elif (old := retire(path, fd)) is not None:
            kept.append(old)
    return kept


def remove_orphans(shm_dir: Path, node_id: str) -> list[Path]:
    """Remove arenas of other nodes of this user whose daemon is provably dead; returns what went.

    An arena without an owner file is left alone: nothing proves its daemon dead.
    """
    removed: list[Path] = []
    for owner in sorted(shm_dir.glob("kvtier-*.owner")):
        node = owner.name.removeprefix("kvtier-").removesuffix(".owner")
        if node == node_id[:NODE_PREFIX_CHARS] or (fd := _open_ours(owner)) is None:
            continue
        # While we hold the lock its daemon cannot start: `own` finds the lock taken, or the file gone.
        if shm.try_lock(fd, fcntl.LOCK_EX) and leads_to(owner, fd):
            arenas = list(_arenas(shm_dir, node))
            gone = [path for path in arenas if _remove_orphan(path)]
            if len(gone) == len(arenas):
                owner.unlink(missing_ok=True)
            removed += gone
        os.close(fd)
    return removed


def _remove_orphan(path: Path) -> bool:
    fd = _open_ours(path)
    if fd is None:
        return False
    old = retire(path, fd)
    if old is not None:  # engines still map it: its node counts it when it comes back
        os.close(old.fd)
    return old is None


def _arenas(shm_dir: Path, node: str) -> Iterator[Path]:
    for path in sorted(shm_dir.glob(f"kvtier-{node}-*")):
        match = _NAME.fullmatch(path.name)
        if match is not None and match["node"] == node:
            yield path


def _open_ours(path: Path) -> int | None:
    """Open a regular file of this user, None for anything else (shm_dir is open to everybody)."""
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except OSError:
        return None
    if _is_ours(fd):
        return fd
    os.close(fd)
    return None


def _is_ours(fd: int) -> bool:
    status = os.fstat(fd)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def leads_to(path: Path, fd: int) -> bool:
    """Whether `path` is still the file that was opened as `fd`."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False
