"""How fast the engine computes: what is timed, and what the average makes of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from kvtier_vllm import prefill
from kvtier_vllm.prefill import HALF_LIFE_TOKENS, PrefillRate, StepTime, Stopwatch, timed_tokens

TOKEN_S = 1e-3


def step(tokens: int = 1024, token_s: float = TOKEN_S) -> StepTime:
    return StepTime(tokens, tokens * token_s)


def rate(*steps: StepTime) -> float:
    """Seconds a token after these steps, of which the first is the engine's very first."""
    average = PrefillRate()
    for each in steps:
        average.note(each)
    return average.block_compute_s(1)


def test_nothing_is_known_before_the_second_step() -> None:
    assert rate() == 0
    assert rate(step(token_s=1.0)) == 0
    assert rate(step(token_s=1.0), step()) == pytest.approx(TOKEN_S)


def test_a_block_costs_its_tokens() -> None:
    average = PrefillRate()
    for _ in range(2):
        average.note(step())
    assert average.block_compute_s(32) == pytest.approx(32 * TOKEN_S)


def test_small_steps_weigh_little() -> None:
    steady = [step()] * 10
    small = rate(*steady, step(128, 3 * TOKEN_S))
    assert TOKEN_S < small < 1.03 * TOKEN_S
    assert rate(*steady, step(HALF_LIFE_TOKENS, 3 * TOKEN_S)) == pytest.approx(2 * TOKEN_S)


def test_one_stalled_step_does_not_spoil_the_average() -> None:
    stalled = rate(*[step()] * 10, StepTime(1024, 3600.0))
    assert stalled < 1.3 * TOKEN_S
    assert rate(*[step()] * 10, StepTime(1024, 3600.0), *[step()] * 40) == pytest.approx(TOKEN_S, rel=0.05)


def test_an_engine_that_becomes_slower_or_faster_is_followed() -> None:
    for token_s in (20 * TOKEN_S, TOKEN_S / 20):
        assert rate(*[step()] * 5, *[step(token_s=token_s)] * 80) == pytest.approx(token_s, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9])
def test_impossible_times_stay_within_bounds(seconds: float) -> None:
    assert prefill.MIN_TOKEN_S <= rate(step(), StepTime(1024, seconds)) <= prefill.MAX_TOKEN_S


@pytest.mark.parametrize(
    ("scheduled", "left", "timed"),
    [
        ({"a": 512}, {"a": 4000}, 512),  # a chunk of a prompt
        ({"a": 512, "b": 1, "c": 1}, {"a": 4000, "b": 0, "c": -7}, 514),  # others decode beside it
        ({"a": 300, "b": 212}, {"a": 300, "b": 900}, 512),  # two prompts in one step
        ({"a": 100}, {"a": 100}, 0),  # too short
        ({f"r{i}": 1 for i in range(200)}, {f"r{i}": -3 for i in range(200)}, 0),  # all decode
        ({"a": 60, "b": 200}, {"a": 60}, 0),  # mostly of a request that is not cached
    ],
)
def test_what_is_worth_timing(scheduled: dict[str, int], left: dict[str, int], timed: int) -> None:
    assert timed_tokens(sum(scheduled.values()), scheduled, left) == timed


def test_the_stopwatch_times_what_it_is_told() -> None:
    watch = Stopwatch(None)
    for tokens in (0, 512, 0, 256):
        watch.start(tokens)
        time.sleep(0.002)
        watch.stop()
    watch.stop()  # a step that never began
    times = watch.take()
    assert [each.tokens for each in times] == [512, 256]
    assert all(each.seconds >= 0.002 for each in times)
    assert watch.take() == []


def test_a_step_that_failed_is_not_timed() -> None:
    watch = Stopwatch(None)
    watch.start(512)
    watch.start(0)
    watch.stop()
    assert watch.take() == []


class Event:
    """An event of a GPU's stream that passes when the test says so."""

    passed_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = -1.0

    def record(self, stream: Any) -> None:
        self.at_ms = 5.0 * next(Event.numbers)

    def query(self) -> bool:
        return self.at_ms <= Event.passed_ms

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms

    numbers = iter(range(1, 10_000))


def test_on_a_gpu_nothing_waits_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(2):
        watch.start(512)
        watch.stop()
    assert watch.take() == []
    Event.passed_ms = 10.0
    assert watch.take() == [StepTime(512, 0.005)]
    for _ in range(prefill.MAX_PENDING + 5):
        watch.start(512)
        watch.stop()
    Event.passed_ms = float("inf")
    assert len(watch.take()) == prefill.MAX_PENDING
