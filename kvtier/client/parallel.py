"""Copies in several threads, where the user wants them: by default a copy runs in the thread that asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
Part = tuple[int, int]


class Workers:
    """`threads` copies at once; thread-safe. Threads are made with the first copy in a process."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def waves(self, parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
        """What is copied between two looks at budget and stop."""
        for begin in range(0, len(parts), self._threads):
            yield parts[begin : begin + self._threads]

    def map(self, work: Callable[[int, int], Result], wave: Sequence[Part]) -> Iterable[Result]:
        """Results in order; all work has ended when this returns, also when it raises."""
        if self._threads == 1 or len(wave) == 1:
            return [work(*part) for part in wave]
        futures = [self._get_pool().submit(work, *part) for part in wave]
        for future in futures:
            future.exception()  # wait for all before the first is raised
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads; idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def after_fork(self) -> None:
        """In the child: the threads are the parent's."""
        self._lock = threading.Lock()
        self._pool = None

    def _get_pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="kvtier-copy")
            return self._pool
