"""Threads that wait for a device, and whether it still answers.

A kernel that waits for a device cannot be interrupted: whoever asked has to wait too, and so do the buffers
that were given to it. What can be done is to notice, to ask nothing more, and to let go what has not begun.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Final

from kvtier import logs
from kvtier.errors import TierFault

WINDOW_BYTES: Final = 64 << 20
SCRATCH_BYTES: Final = 2 << 20
"""Page-aligned memory of each thread: headers, and what lies unaligned in the caller's memory."""
KEPT_PAYLOAD_BYTES: Final = 8 << 20
"""A thread keeps memory for a payload of this size; for a larger one it takes some each time."""

RATED_FROM_BYTES: Final = 64 << 10
RATED_BYTES: Final = 16 << 20
"""A rate is measured over so much, and moves that are smaller than the other do not count."""

_REFUSAL_POLL_S: Final = 0.05
_RATE_WEIGHT: Final = 0.25

_log = logs.get("file")


class Health:
    """Why a medium is quarantined, and the operations that the kernel has not returned yet. Thread-safe.

    Parameters
    ----------
    deadline_s
        An operation that takes longer than this quarantines the medium.
    """

    def __init__(self, deadline_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.deadline_s = deadline_s
        self.faults = 0
        self._clock_s = clock_s
        self._fault = ""
        self._lock = threading.Lock()
        self._begun: dict[int, float] = {}  # by thread: each waits for one operation
        self._prober = 0

    @property
    def fault(self) -> str:
        """Empty where all is well."""
        if not self._fault and self._oldest_s() > self.deadline_s:
            self.quarantine(f"the device has not answered for {self.deadline_s:g} s")
        return self._fault

    @property
    def is_stuck(self) -> bool:
        """Whether an operation is over its deadline now."""
        return self._oldest_s() > self.deadline_s

    def quarantine(self, reason: str) -> None:
        """From now on nothing is asked of the medium; the first reason stays."""
        with self._lock:
            if self._fault:
                return
            self._fault = reason
            self.faults += 1
        _log.warning("the NVMe tier is quarantined", reason=reason)

    def clear(self) -> None:
        """The medium works again."""
        with self._lock:
            self._fault = ""

    def refusal(self) -> str:
        """Why this thread may not ask the medium anything now; empty where it may."""
        return "" if threading.get_ident() == self._prober else self.fault

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Inside, this thread may ask although the medium is quarantined."""
        self._prober = threading.get_ident()
        try:
            yield
        finally:
            self._prober = 0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Inside, this thread is in the kernel."""
        begun_s = self._begun[threading.get_ident()] = self._clock_s()
        try:
            yield
        finally:
            del self._begun[threading.get_ident()]
            took_s = self._clock_s() - begun_s
            if took_s > self.deadline_s:
                self.quarantine(f"an operation of the device took {took_s:.1f} s")

    def _oldest_s(self) -> float:
        begun = list(self._begun.values())
        return self._clock_s() - min(begun) if begun else 0.0


class Positions:
    """Where each slot stands in the order of all writes, in bytes. Thread-safe.

    A write is not begun while one that was begun `WINDOW_BYTES` earlier has not ended: so what a crash may
    have cut short is among the last ones.
    """

    def __init__(self) -> None:
        self.next = 0
        self._under_way: set[int] = set()
        self._ended = threading.Condition()

    def begin(self, size_bytes: int, refusal: Callable[[], str]) -> int:
        """The position of a write of so many bytes; waits while the window is full.

        Raises
        ------
        TierFault
            Meanwhile `refusal` gave a reason.
        """
        with self._ended:
            while self._under_way and self.next + size_bytes - min(self._under_way) > WINDOW_BYTES:
                if reason := refusal():
                    raise TierFault(reason)
                self._ended.wait(_REFUSAL_POLL_S)
            position = self.next
            self.next += size_bytes
            self._under_way.add(position)
            return position

    @property
    def settled(self) -> int:
        """Every write at a lower position has ended."""
        with self._ended:
            return min(self._under_way, default=self.next)

    def end(self, position: int) -> None:
        """That write is over, or has failed."""
        with self._ended:
            self._under_way.remove(position)
            self._ended.notify_all()


class Scratch:
    """Memory of one thread, page-aligned, made when it is first used."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None
        self._payload = memoryview(b"")

    @property
    def memory(self) -> memoryview:
        """`SCRATCH_BYTES`; its content is anything."""
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(-1, SCRATCH_BYTES))
        return self._memory

    def payload(self, size_bytes: int) -> memoryview:
        """So much for one codec's payload, smaller than its block; mostly the same memory each time."""
        if size_bytes > KEPT_PAYLOAD_BYTES:
            return memoryview(mmap.mmap(-1, size_bytes))
        if len(self._payload) < size_bytes:
            self._payload = memoryview(mmap.mmap(-1, size_bytes))
        return self._payload[:size_bytes]


class Rate:
    """What a medium moves a second while anything is asked of it, by its latest large moves. Thread-safe."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self.bytes_per_s = 0.0
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._under_way = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._moved_bytes = 0

    @contextmanager
    def moving(self, size_bytes: int) -> Iterator[None]:
        """Inside, so much is moved; moves that are small or fail say nothing of a rate and are left out."""
        if size_bytes < RATED_FROM_BYTES:
            yield
            return
        with self._lock:
            if not self._under_way:
                self._since_s = self._clock_s()
            self._under_way += 1
        has_moved = False
        try:
            yield
            has_moved = True
        finally:
            with self._lock:
                self._under_way -= 1
                now_s = self._clock_s()
                if has_moved:
                    self._moved_bytes += size_bytes
                    self._busy_s += now_s - self._since_s
                self._since_s = now_s
                if self._moved_bytes >= RATED_BYTES:
                    self._learn()

    def _learn(self) -> None:
        seen = self._moved_bytes / max(self._busy_s, 1e-9)
        known = self.bytes_per_s or seen
        # Times are what adds up, so it is they that are averaged.
        self.bytes_per_s = 1 / ((1 - _RATE_WEIGHT) / known + _RATE_WEIGHT / seen)
        self._moved_bytes, self._busy_s = 0, 0.0


Job = Callable[[Scratch], None]


class Batch:
    """Jobs of one call. Ends when all are done, or when one has failed and those that ran have ended.

    Parameters
    ----------
    on_end
        Called once, in any thread.
    """

    def __init__(self, jobs: Iterable[Job], on_end: Callable[[], object]) -> None:
        self._jobs = deque(jobs)
        self._running = 0
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ended = False
        self.error: BaseException | None = None
        self.size = len(self._jobs)

    def abandon(self) -> None:
        """Let go what has not begun."""
        with self._lock:
            self._jobs.clear()
        self._settle()

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs, or ever will."""
        return self._ended

    def work(self, scratch: Scratch) -> None:
        """Do jobs until there are none; called by threads of the pool."""
        while (job := self._take()) is not None:
            error: BaseException | None = None
            try:
                job(scratch)
            except BaseException as raised:
                error = raised
            del job  # with it the caller's buffers
            with self._lock:
                self._running -= 1
                if error is not None:
                    self.error = self.error or error
                    self._jobs.clear()
        self._settle()

    def _take(self) -> Job | None:
        with self._lock:
            if not self._jobs:
                return None
            self._running += 1
            return self._jobs.popleft()

    def _settle(self) -> None:
        with self._lock:
            if self._ended or self._jobs or self._running:
                return
            self._ended = True
        self._on_end()


class Pool:
    """A bounded number of threads; they do not keep the process alive, since they may never come back."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, batch: Batch) -> None:
        """Begin it: on as many threads as it has jobs, as they become free."""
        if not batch.size:
            batch.abandon()
        for _ in range(min(batch.size, len(self._threads))):
            self._queue.put(batch)

    def stop(self, timeout_s: float) -> bool:
        """End the threads when they have done what is queued; False if some are still stuck then."""
        for _ in self._threads:
            self._queue.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        scratch = Scratch()
        while (batch := self._queue.get()) is not None:
            batch.work(scratch)
            del batch
