"""Processes that end with us: each under its own guard, signals turned into one exception.

Use from the main thread only (the kernel ties "parent died" to the thread that started a guard).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, Self

from kvtier.demo import guard
from kvtier.errors import KvtierError

_POLL_S: Final = 0.05
_TAIL_BYTES: Final = 4000


_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_live: list[Supervised] = []


class DemoFailed(KvtierError):
    """A process of the demo did not do what it should; the message holds the end of its log."""


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived; unwinds the stack so that everything is stopped."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into `Interrupted`; later ones don't disturb the end.

    Every `Supervised` process has ended when the block is left, however it is left.
    """

    def interrupt(signum: int, _frame: FrameType | None) -> None:
        for each in _INTERRUPTS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signum)

    before = {each: signal.signal(each, interrupt) for each in _INTERRUPTS}
    try:
        yield
    finally:
        stop_all()
        for each, handler in before.items():
            signal.signal(each, handler)


def stop_all() -> None:
    """Stop every process that is still under supervision, the youngest first."""
    for process in reversed(list(_live)):
        process.stop()


class Supervised:
    """One command under a guard, from construction until `stop` or `kill`; a context manager.

    Attributes
    ----------
    name
        For messages.
    log
        File that takes the command's stdout and stderr; the caller owns and removes it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self.name = name
        self.log = log
        self._grace_s = grace_s
        # A signal in here would lose the process: it waits until `stop_all` knows about it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
        try:
            self._guard = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    guard.__name__,
                    str(os.getpid()),
                    str(grace_s),
                    str(log),
                    "--",
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=None if environment is None else dict(environment),
                start_new_session=True,  # Ctrl-C reaches us alone; we stop the others in order
            )
            _live.append(self)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait_until(self, ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Poll `ready`; raises `DemoFailed` where the process ends or `timeout_s` passes before."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            status = self._guard.poll()
            if status is not None:
                raise DemoFailed(f"{self.name} ended with status {status} before it was ready\n{self.tail()}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"{self.name} was not ready within {timeout_s:.0f} s\n{self.tail()}")
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of the command; returns its status."""
        try:
            return self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"{self.name} did not end within {timeout_s:.0f} s\n{self.tail()}") from None

    def pids(self) -> list[int]:
        """The guard and everything below it; empty once all have ended."""
        if self._guard.poll() is not None:
            return []
        return [self._guard.pid, *guard.descendants(self._guard.pid)]

    def stop(self) -> int:
        """SIGTERM, and SIGKILL to what is left after the grace period; idempotent. Returns the status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """SIGKILL to the whole tree, as a crash or the OOM killer would."""
        return self._end(signal.SIGUSR1)

    def _end(self, signum: signal.Signals) -> int:
        if self._guard.poll() is None:
            self._guard.send_signal(signum)
        if self in _live:
            _live.remove(self)
        try:
            return self._guard.wait(self._grace_s + guard.KILL_DEADLINE_S + 5.0)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
            raise DemoFailed(f"{self.name} could not be stopped: see {self._guard.pid}'s children") from None

    def tail(self) -> str:
        """The end of the log."""
        try:
            return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
