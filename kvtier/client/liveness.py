"""Proof of life: the lock file that an engine process holds.

gRPC over a Unix socket shows the node neither process nor user. What tells it that an engine is dead, and
so that none of its copies still runs, is the kernel dropping the flock on
``{run_dir}/engines/{engine_id}.lock``. Whoever closes the file early claims to be dead: do it only when
no copy can still run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

from kvtier.errors import Unavailable

ENGINES_DIR: Final = "engines"
MAX_ATTEMPTS: Final = 8


class EngineLock:
    """A fresh engine id and its locked file; not thread-safe.

    Parameters
    ----------
    run_dir
        The directory that the daemon's socket lies in.

    Raises
    ------
    Unavailable
        The directory is not there: no daemon runs, or another user's.
    """

    def __init__(self, run_dir: Path) -> None:
        for _ in range(MAX_ATTEMPTS):
            self.engine_id = f"e{os.getpid()}-{secrets.token_hex(8)}"
            self._path = run_dir / ENGINES_DIR / f"{self.engine_id}.lock"
            try:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise Unavailable(
                    f"{self._path.parent} cannot be written ({error.strerror}): start the daemon as this user"
                ) from error
            if self._try_lock():
                return
            os.close(self._fd)
        raise Unavailable(f"no lock file in {self._path.parent} could be locked: is something removing them?")

    def _try_lock(self) -> bool:
        """Lock the file, unless the node took it for a dead engine's between its making and its locking."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except OSError:
            return False

    def close(self) -> None:
        """Tell the node that this engine has ended; idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self.forget()

    def forget(self) -> None:
        """Close the inherited file in a forked child: the lock stays with the parent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
