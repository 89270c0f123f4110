from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kvtier_vllm.lane import Job, Lane


def _fence() -> None:
    return None


class Copies:
    """Work that lasts until the test lets go or the job is asked to stop."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.started: list[str] = []
        self.ended: list[str] = []

    def __call__(self, job: Job[str]) -> int:
        self.started.append(job.order)
        while not self.go.is_set() and not job.stop.is_set():
            time.sleep(0.001)
        self.ended.append(job.order)
        if job.order == "broken":
            raise RuntimeError("broken")
        return 0 if job.stop.is_set() else 1


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def changed() -> threading.Condition:
    return threading.Condition()


@pytest.fixture
def lane(copies: Copies, changed: threading.Condition) -> Iterator[Lane[str]]:
    lane: Lane[str] = Lane("test", copies, changed)
    yield lane
    assert lane.close(10)


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def _submit(lane: Lane[str], *orders: str, deadline_s: float | None = None) -> list[Job[str]]:
    jobs = [Job(order, 0, _fence, deadline_s) for order in orders]
    for job in jobs:
        lane.submit(job)
    return jobs


def test_jobs_are_done_in_order_and_reported_once(lane: Lane[str], copies: Copies) -> None:
    copies.go.set()
    jobs = _submit(lane, "a", "b", "c")
    for job in jobs:
        assert job.done.wait(10)
    ended = lane.take_ended()
    assert [(job.order, job.blocks) for job in ended] == [("a", 1), ("b", 1), ("c", 1)]
    assert lane.take_ended() == []


def test_a_cut_drops_what_waits_and_joins_what_runs(lane: Lane[str], copies: Copies) -> None:
    _submit(lane, "a", "b", "c", "d")
    _until(lambda: copies.started == ["a"])
    lane.cut(lambda order: order in ("a", "c"))
    assert copies.ended[0] == "a"
    copies.go.set()
    _until(lambda: copies.ended == ["a", "b", "d"])
    _until(lambda: not lane.busy())
    blocks = {job.order: job.blocks for job in lane.take_ended()}
    assert blocks == {"a": 0, "b": 1, "c": 0, "d": 1}


def test_a_cut_does_not_wait_for_a_copy_it_does_not_name(lane: Lane[str], copies: Copies) -> None:
    _submit(lane, "a", "b")
    _until(lambda: copies.started == ["a"])
    lane.cut(lambda order: order == "b")
    assert copies.ended == []
    copies.go.set()


def test_a_copy_that_raises_counts_as_nothing_and_the_lane_goes_on(lane: Lane[str], copies: Copies) -> None:
    copies.go.set()
    jobs = _submit(lane, "broken", "a")
    for job in jobs:
        assert job.done.wait(10)
    assert [job.blocks for job in lane.take_ended()] == [0, 1]


def test_a_job_past_its_deadline_is_stopped_or_never_started(lane: Lane[str], copies: Copies) -> None:
    now_s = time.monotonic()
    running, late = _submit(lane, "a", "b", deadline_s=now_s + 0.2)
    _until(lambda: copies.started == ["a"])
    lane.expire(now_s)
    assert not running.stop.is_set()
    _until(lambda: time.monotonic() > now_s + 0.2)
    lane.expire(time.monotonic())
    assert late.done.wait(10)
    assert copies.started == ["a"]
    assert [job.blocks for job in lane.take_ended()] == [0, 0]


def test_closing_drops_everything_and_ends_the_thread(copies: Copies, changed: threading.Condition) -> None:
    lane: Lane[str] = Lane("test", copies, changed)
    running, waiting = _submit(lane, "a", "b")
    _until(lambda: copies.started == ["a"])
    assert lane.close(10)
    assert running.done.is_set()
    assert waiting.done.is_set()
    assert copies.started == ["a"]
    assert lane.close(10)


def test_the_fence_comes_first(lane: Lane[str], copies: Copies) -> None:
    copies.go.set()
    seen: list[list[str]] = []
    job = Job("a", 0, lambda: seen.append(list(copies.started)))
    lane.submit(job)
    assert job.done.wait(10)
    assert seen == [[]]
