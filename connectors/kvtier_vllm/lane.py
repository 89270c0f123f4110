"""A thread that does copies one after the other, and can be told to drop some of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger("vllm.kvtier")

Order = TypeVar("Order")


class Job(Generic[Order]):
    """One copy.

    Attributes
    ----------
    stop
        Set to ask a running copy to end early.
    blocks
        Leading blocks that it brought to their place; 0 until it has succeeded.
    """

    __slots__ = ("blocks", "deadline_s", "done", "epoch", "fence", "order", "stop")

    def __init__(
        self, order: Order, epoch: int, fence: Callable[[], None], deadline_s: float | None = None
    ) -> None:
        self.order = order
        self.epoch = epoch
        self.fence = fence
        self.deadline_s = deadline_s
        self.stop = threading.Event()
        self.done = threading.Event()
        self.blocks = 0


class Lane(Generic[Order]):
    """Does jobs in order on one thread of its own. Thread-safe.

    Parameters
    ----------
    work
        Does one job and returns its blocks. What it raises is logged and counts as no block.
    changed
        Notified whenever a job has ended.
    """

    def __init__(self, name: str, work: Callable[[Job[Order]], int], changed: threading.Condition) -> None:
        self._work = work
        self._changed = changed
        self._queue: deque[Job[Order]] = deque()
        self._running: Job[Order] | None = None
        self._ended: list[Job[Order]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job[Order]) -> None:
        """Do `job` after those before it."""
        with self._changed:
            self._queue.append(job)
            self._changed.notify_all()

    def take_ended(self) -> list[Job[Order]]:
        """Jobs that have ended since the last call: done, failed or dropped."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def has_ended(self) -> bool:
        """Whether `take_ended` would return anything. The caller holds the condition."""
        return bool(self._ended)

    def busy(self) -> bool:
        """Whether anything is queued or running. The caller holds the condition."""
        return bool(self._queue) or self._running is not None

    def cut(self, match: Callable[[Order], bool]) -> None:
        """Drop the queued jobs that match, ask a running one to stop, and wait until it has ended."""
        running = self.drop(match)
        if running is not None:
            running.stop.set()
            running.done.wait()

    def drop(self, match: Callable[[Order], bool]) -> Job[Order] | None:
        """Drop the queued jobs that match; returns the running one if it matches too."""
        with self._changed:
            kept: deque[Job[Order]] = deque()
            for job in self._queue:
                if match(job.order):
                    job.done.set()
                    self._ended.append(job)
                else:
                    kept.append(job)
            self._queue = kept
            self._changed.notify_all()
            running = self._running
            return running if running is not None and match(running.order) else None

    def expire(self, now_s: float) -> None:
        """Ask a running job past its deadline to stop; it ends on its own time."""
        with self._changed:
            running = self._running
            if running is not None and running.deadline_s is not None and now_s >= running.deadline_s:
                running.stop.set()

    def close(self, timeout_s: float) -> bool:
        """Drop everything and end the thread; False if it did not end in time."""
        running = self.drop(lambda _: True)
        if running is not None:
            running.stop.set()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._running = self._queue.popleft()
            blocks = self._do(job)
            with self._changed:
                job.blocks = blocks
                self._running = None
                self._ended.append(job)
                job.done.set()
                self._changed.notify_all()

    def _do(self, job: Job[Order]) -> int:
        if job.deadline_s is not None and time.monotonic() >= job.deadline_s:
            return 0
        try:
            job.fence()
            return self._work(job)
        except Exception:
            logger.exception("kvtier: a copy failed; its blocks count as not copied")
            return 0
