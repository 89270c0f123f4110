"""Which engine processes live: the node's side of their lock files.

Each engine process makes ``{run_dir}/engines/{engine_id}.lock`` and holds LOCK_EX on it for life. The
kernel drops that lock when the process dies, however it dies and never before: whoever can lock the file
has proof. (gRPC over a Unix socket shows neither pid nor user.)

An engine's file is made before it is locked, and a sweep may take it for a dead one's in between:

1. the engine creates the file;
2. the node locks it, so nobody else holds it, and removes it;
3. the engine locks a file that has no name any more.

So an engine looks after locking whether the path still leads to its file and starts over if not, and a
node registers only an engine whose lock is `held`.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, InvalidRequest

ENGINES_DIR: Final = "engines"
_SUFFIX: Final = ".lock"
_ENGINE_ID: Final = re.compile(r"[a-z0-9-]{1,64}")
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def prepare_run_dir(run_dir: Path) -> None:
    """Make the run directory and its folder for engines, mode 0700, or check what is there.

    Raises
    ------
    ConfigError
        It cannot be made, is no directory (or a link to one), belongs to another user, or others may
        write to it: then somebody else could put a socket or lock files there.
    """
    for directory in (run_dir, run_dir / ENGINES_DIR):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_be_made(run_dir, error) from error
    check_run_dir(run_dir)


def check_run_dir(run_dir: Path) -> None:
    """Look at what is there, and make nothing; raises what `prepare_run_dir` would raise of it."""
    for directory in (run_dir, run_dir / ENGINES_DIR):
        try:
            status = directory.lstat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise _cannot_be_made(run_dir, error) from error
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"run_dir is {run_dir}: {directory} is no directory; remove it")
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"run_dir is {run_dir}: {directory} belongs to user {status.st_uid}, not to {os.geteuid()}; "
                "choose another run_dir"
            )
        if status.st_mode & 0o022:
            raise ConfigError(
                f"run_dir is {run_dir}: others may write to {directory} (mode "
                f"{stat.S_IMODE(status.st_mode):04o}); run chmod 700 on it, or choose another run_dir"
            )


def check_socket_place(socket: Path, run_dir: Path) -> None:
    """Raise `ConfigError` where engines, which are told the socket alone, would not find `run_dir`."""
    if socket.parent != run_dir:
        raise ConfigError(
            f"socket is {socket}: for a daemon allowed is a name in run_dir, {run_dir}, since engines keep "
            "their lock files beside it; set run_dir to the directory you want"
        )


def _cannot_be_made(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run_dir is {run_dir}: allowed is a directory that this user can make ({error})")


class EngineLocks:
    """The lock files of the engines of one run directory; never waits. Not thread-safe.

    Keeps each file open whose lock was seen held, until the engine is dead or swept: a file whose name
    somebody deleted proves nothing, its lock does. Only the daemon that owns the socket beside it may
    use the directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / ENGINES_DIR
        self._fds: dict[str, int] = {}

    def held(self, engine: str) -> bool:
        """Whether a live process holds the lock of `engine`; raises `InvalidRequest` on a bad id."""
        path = self._path(engine)
        if self._keep_if_locked(engine, self._fds.pop(engine, None)):
            return True
        # An engine whose file somebody deleted makes a new one of the same name: then that is its life.
        return self._keep_if_locked(engine, _open(path))

    def _keep_if_locked(self, engine: str, fd: int | None) -> bool:
        if fd is None:
            return False
        if _is_free(fd):
            os.close(fd)
            return False
        self._fds[engine] = fd
        return True

    def remove(self, engine: str) -> None:
        """Delete the lock file of a dead engine; that of a live one stays."""
        _remove_if_dead(self._path(engine))

    def sweep(self, known: Set[str]) -> list[str]:
        """Delete the lock files of dead engines that are not `known`; returns whose they were."""
        for engine in self._fds.keys() - known:
            os.close(self._fds.pop(engine))
        return [engine for engine, path in self._files() if engine not in known and _remove_if_dead(path)]

    def close(self) -> None:
        """Close what is kept open; idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _path(self, engine: str) -> Path:
        if _ENGINE_ID.fullmatch(engine) is None:
            raise InvalidRequest(f"engine_id is {engine[:80]!r}: allowed are 1 to 64 of a-z, 0-9 and '-'")
        return self._directory / f"{engine}{_SUFFIX}"

    def _files(self) -> Iterator[tuple[str, Path]]:
        with os.scandir(self._directory) as entries:
            for entry in entries:
                engine = entry.name.removesuffix(_SUFFIX)
                if engine != entry.name and _ENGINE_ID.fullmatch(engine):
                    yield engine, Path(entry.path)


def _open(path: Path) -> int | None:
    """Open a regular file; None for what is gone or is anything else."""
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _remove_if_dead(path: Path) -> bool:
    fd = _open(path)
    if fd is None:
        return False
    try:
        # The lock is ours until `close`, so the file that goes is the one that was free.
        if not _is_free(fd) or not os.path.samestat(path.lstat(), os.fstat(fd)):
            return False
        path.unlink()
    except OSError:  # somebody else removed it, or it cannot be removed
        return False
    finally:
        os.close(fd)
    return True


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
