"""Time, processes and the network of a simulated fleet: one thread, one seed, no clock but its own.

The loop is asyncio's with a clock that jumps to whatever happens next, so that the real node runs on it.
What would run in a thread runs some time later instead.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvtier.errors import KvtierError, Unavailable
from kvtier.testing.simulated_node import Violation

HANG_S: Final = 10.0
"""A call whose request or answer was lost breaks after so long, if nobody gave it up before."""

MAX_LATE_S: Final = 3.0
"""Messages that are repeated or late arrive up to so much later."""
MEMORY_WAY_S: Final = 0.0002
"""One way on one machine."""

T = TypeVar("T")
P = TypeVar("P", bound="Process")
_running: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


class _Selector(selectors.SelectSelector):
    """Waits for nothing: the time until the next timer passes at once."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing can happen any more"
        if timeout > 0:
            self.loop.now_s += max(timeout, 1e-9)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in simulated time; every process is the `Process` its tasks were spawned in."""

    def __init__(self, thread_s: Callable[[], float]) -> None:
        self.now_s = 0.0
        self._thread_s = thread_s
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.set_task_factory(_make_task)

    def time(self) -> float:
        """Seconds since the begin of the history."""
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """A thread of the process: works some time later, whoever still waits for it."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
                return
            if not future.done():
                future.set_result(result)

        self.call_later(self._thread_s(), work)
        return future


class Process:
    """Tasks that end together, at once and without a word, when their process is killed."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.dead = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self._context = contextvars.copy_context()
        self._context.run(_running.set, self)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a task in this process."""
        task = self.world.loop.create_task(work, context=self._context.copy())
        if self.dead:
            task.cancel()
        return task

    def kill(self) -> None:
        """From here on it says and does nothing. Idempotent."""
        self.dead = True
        for task in list(self.tasks):
            task.cancel()


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, context: Any = None) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    process = (context or contextvars.copy_context()).get(_running)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda done: _ended(process, done))
    return task


def _ended(process: Process, task: asyncio.Task[Any]) -> None:
    process.tasks.pop(task, None)
    if not task.cancelled() and (error := task.exception()) is not None:
        process.world.judge(error)


@dataclass(slots=True)
class Weather:
    """What the network does: shares of messages lost, repeated and late, and the mean time of one way."""

    loss: float = 0.0
    repeats: float = 0.0
    late: float = 0.0
    delay_s: float = 0.002


class World:
    """Clock, chance and network of one history.

    Attributes
    ----------
    is_calm
        All trouble is over.
    failure
        The first thing that must never happen, None so far.
    cut
        Pairs of sites between which nothing passes, each with its names in order.
    slow
        Sites whose messages take so many times as long.
    detours
        Addresses whose calls reach another one for a while.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.loop = VirtualLoop(lambda: self.rng.expovariate(1000))
        self.loop.set_exception_handler(lambda _, context: self.judge(context.get("exception")))
        self.is_calm = False
        self.failure: BaseException | None = None
        self.weather = Weather()
        self.cut: dict[tuple[str, str], None] = {}
        self.slow: dict[str, float] = {}
        self.detours: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.steps = 0
        self.network = Process(self, "network")

    @property
    def now_s(self) -> float:
        """True time, which no node knows."""
        return self.loop.now_s

    def count(self, name: str, by: int = 1) -> None:
        """Remember that something happened."""
        self.counts[name] = self.counts.get(name, 0) + by

    def chance(self, share: float) -> bool:
        """True in this share of cases."""
        return self.rng.random() < share

    def judge(self, error: BaseException | None) -> None:
        """Faults are part of life; anything else that was raised anywhere ends the history."""
        if error is None or isinstance(error, KvtierError | TimeoutError | asyncio.CancelledError):
            return
        if self.failure is None:
            self.failure = error

    def violate(self, text: str) -> None:
        """What must never happen did."""
        error = Violation(f"at {self.now_s:.3f}: {text}")
        self.judge(error)
        raise error

    # ---- network

    def is_cut(self, one: str, other: str) -> bool:
        """Whether a partition lies between two sites."""
        return (min(one, other), max(one, other)) in self.cut

    async def call(
        self,
        source: str,
        target: str,
        find: Callable[[], P | None],
        work: Callable[[P], Awaitable[T]],
        *,
        may_repeat: bool = True,
    ) -> T:
        """Let the process that is there when the request arrives do `work`; its answer comes, or not.

        Whoever is cancelled here has not stopped what travels. A repeated request does its work again.

        Raises
        ------
        Unavailable
            Nobody is there, or the connection broke; also all that `work` raises from `kvtier.errors`.
        """
        answer: asyncio.Future[T] = self.loop.create_future()
        times = 2 if may_repeat and self.chance(self.weather.repeats) else 1
        for repeat in range(times):
            extra_s = self.rng.uniform(0, MAX_LATE_S) if repeat or self.chance(self.weather.late) else 0.0
            self.network.spawn(self._carry(source, target, find, work, answer, extra_s))
        return await answer

    async def _carry(
        self,
        source: str,
        target: str,
        find: Callable[[], P | None],
        work: Callable[[P], Awaitable[T]],
        answer: asyncio.Future[T],
        extra_s: float,
    ) -> None:
        await asyncio.sleep(extra_s + self._way_s(source, target))
        if await self._is_lost(source, target, answer):
            return
        server = find()
        if server is None or server.dead:
            _settle(answer, None, Unavailable(f"nobody answers at {target}"))
            return
        task = server.spawn(_do(work, server))
        await asyncio.wait([task])
        error = Unavailable(f"{target} went away") if task.cancelled() else task.exception()
        await asyncio.sleep(self._way_s(source, target))
        if not await self._is_lost(source, target, answer):
            _settle(answer, None if error else task.result(), error)

    async def _is_lost(self, source: str, target: str, answer: asyncio.Future[Any]) -> bool:
        if not self.is_cut(source, target) and not self.chance(self.weather.loss):
            return False
        self.count("message lost")
        await asyncio.sleep(HANG_S)
        _settle(answer, None, Unavailable(f"the connection from {source} to {target} broke"))
        return True

    def _way_s(self, source: str, target: str) -> float:
        if source == target:
            return self.rng.expovariate(1 / MEMORY_WAY_S)
        factor = max(self.slow.get(source, 1.0), self.slow.get(target, 1.0))
        return factor * self.rng.expovariate(1 / self.weather.delay_s)


async def _do(work: Callable[[P], Awaitable[T]], server: P) -> T:
    return await work(server)


def _settle(answer: asyncio.Future[T], value: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
        answer.exception()  # whoever waits has it; nobody may
