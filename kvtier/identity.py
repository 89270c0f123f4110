"""Who this node is: an id made once, an incarnation that grows at each start, a lock for life.

The index issues the incarnation where it can be reached; the one that is kept here never falls behind it,
so that a start without the index goes on from there.

All of it lies in the data directory. ``daemon.lock`` carries a flock that the kernel drops when the
daemon dies, however it dies; ``node.json`` holds id and incarnation and is on disk before either is used.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvtier.errors import AlreadyRunning, ConfigError, ResourceShortage

LOCK_NAME: Final = "daemon.lock"
NODE_NAME: Final = "node.json"
_MAX_INCARNATION: Final = 2**63 - 1
_MAX_NODE_BYTES: Final = 4096
_NODE_ID: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Identity:
    """What `open_identity` found; owns the lock until `release`.

    Attributes
    ----------
    node_id
        32 hexadecimal digits, the same for the life of the data directory.
    incarnation
        Larger than at any earlier start, and never below the seconds of the wall clock, so that a lost
        data directory does not make it go backwards.
    """

    node_id: str
    incarnation: int
    lock_fd: int

    def adopt(self, data_dir: Path, incarnation: int) -> Identity:
        """The same node under the incarnation that the index has issued for this start.

        Raises
        ------
        ConfigError, ResourceShortage
            It cannot be written down.
        """
        assert incarnation >= self.incarnation
        try:
            _write(data_dir, self.node_id, incarnation)
        except OSError as error:
            raise _unusable(data_dir, error) from error
        return replace(self, incarnation=incarnation)

    def release(self) -> None:
        """Let another daemon have the data directory; call once, last of all."""
        os.close(self.lock_fd)


def open_identity(data_dir: Path) -> Identity:
    """Lock the data directory and begin a new incarnation.

    Raises
    ------
    AlreadyRunning
        A live daemon owns `data_dir`; names its pid.
    ConfigError
        The directory cannot be made or written, or ``node.json`` is not what kvtier wrote.
    ResourceShortage
        The disk is full.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = _lock(data_dir)
    except OSError as error:
        raise _unusable(data_dir, error) from error
    try:
        node_id, last = _read(data_dir / NODE_NAME)
        incarnation = max(last + 1, int(time.time()))
        _write(data_dir, node_id, incarnation)
    except OSError as error:
        os.close(lock_fd)
        raise _unusable(data_dir, error) from error
    except BaseException:
        os.close(lock_fd)
        raise
    return Identity(node_id, incarnation, lock_fd)


def refuse_owned(data_dir: Path) -> None:
    """See, without making anything, that `open_identity` would find no live owner and no damage.

    Raises
    ------
    AlreadyRunning, ConfigError, ResourceShortage
        As `open_identity` raises them.
    """
    try:
        lock_fd = os.open(data_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(data_dir, error) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _read(data_dir / NODE_NAME)
    except BlockingIOError:
        raise _owned(data_dir, lock_fd) from None
    except OSError as error:
        raise _unusable(data_dir, error) from error
    finally:
        os.close(lock_fd)


def node_id_of(data_dir: Path) -> str:
    """Whose directory it is; empty where nobody's yet, or where that cannot be read."""
    try:
        return _read(data_dir / NODE_NAME)[0] if (data_dir / NODE_NAME).exists() else ""
    except (OSError, ConfigError):
        return ""


def _owned(data_dir: Path, lock_fd: int) -> AlreadyRunning:
    pid = os.pread(lock_fd, 20, 0).decode("ascii", "replace").strip()
    owner = f"pid {pid}" if pid.isdigit() else "pid unknown"
    return AlreadyRunning(
        f"data_dir is {data_dir}: a live daemon ({owner}) owns it; stop it, or choose another data_dir"
    )


def _lock(data_dir: Path) -> int:
    fd = os.open(data_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        error = _owned(data_dir, fd)
        os.close(fd)
        raise error from None
    except OSError:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _read(path: Path) -> tuple[str, int]:
    """Node id and last incarnation; a new id and 0 where there is no file yet."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_NODE_BYTES + 1)
    except FileNotFoundError:
        return uuid.uuid4().hex, 0
    try:
        content = json.loads(raw)
        node_id, incarnation = content["node_id"], content["incarnation"]
        valid = (
            isinstance(node_id, str)
            and _NODE_ID.fullmatch(node_id) is not None
            and type(incarnation) is int
            and 0 <= incarnation < _MAX_INCARNATION
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise ConfigError(
            f"data_dir: {path} is damaged; restore it from a backup, or delete it: then this node begins "
            "with a new identity"
        )
    return node_id, incarnation


def _write(data_dir: Path, node_id: str, incarnation: int) -> None:
    """On disk, whole, before it is used: a crash leaves the old file or the new one."""
    temporary = data_dir / f"{NODE_NAME}.new"
    with temporary.open("w") as file:
        json.dump({"node_id": node_id, "incarnation": incarnation}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(data_dir / NODE_NAME)
    directory_fd = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)


def _unusable(data_dir: Path, error: OSError) -> ConfigError | ResourceShortage:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceShortage(f"data_dir is {data_dir}: its disk is full; free some space ({error})")
    return ConfigError(
        f"data_dir is {data_dir}: allowed is a directory that this user can make and write ({error})"
    )
