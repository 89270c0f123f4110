"""The breaker alone, on a clock that the test moves."""

from __future__ import annotations

import pytest

from kvtier.errors import ProtocolMismatch, Unavailable
from kvtier.remote.breaker import FAULTS_TO_OPEN, FIRST_BACKOFF_S, MAX_BACKOFF_S, PROBE_S, Breaker

ERROR = Unavailable("no answer")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def open_it(breaker: Breaker) -> None:
    for _ in range(FAULTS_TO_OPEN):
        breaker.failed(ERROR)


def test_it_opens_after_so_many_faults_in_a_row(breaker: Breaker, clock: Clock) -> None:
    for _ in range(FAULTS_TO_OPEN - 1):
        assert not breaker.failed(ERROR)
        assert breaker.admit()
    assert breaker.failed(ERROR)
    assert breaker.is_open(clock.now_s)
    assert not breaker.admit()
    assert breaker.last_error == "no answer"


def test_a_success_in_between_counts(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3 * FAULTS_TO_OPEN):
        breaker.failed(ERROR)
        breaker.succeeded()
        assert breaker.last_error == ""
    assert not breaker.is_open(clock.now_s)


def test_after_a_while_one_probe_is_let_through(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now_s += FIRST_BACKOFF_S
    assert not breaker.is_open(clock.now_s)
    assert [breaker.admit() for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert breaker.admit()
    assert breaker.admit()


def test_a_probe_that_says_nothing_is_followed_by_another(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now_s += FIRST_BACKOFF_S
    assert breaker.admit()
    clock.now_s += PROBE_S
    assert [breaker.admit() for _ in range(2)] == [True, False]


def test_each_failed_probe_doubles_the_wait_up_to_a_bound(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    waits_s = []
    for _ in range(10):
        begin_s = clock.now_s
        while breaker.is_open(clock.now_s):
            clock.now_s += FIRST_BACKOFF_S / 2
        waits_s.append(clock.now_s - begin_s)
        assert breaker.admit()
        assert not breaker.failed(ERROR), "it was open before"
    assert waits_s[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert waits_s[-1] == MAX_BACKOFF_S


def test_faults_of_what_began_before_it_opened_lengthen_nothing(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    for _ in range(20):
        breaker.failed(ERROR)
    clock.now_s += FIRST_BACKOFF_S
    assert not breaker.is_open(clock.now_s)


def test_what_does_not_pass_by_itself_opens_it_for_long(breaker: Breaker, clock: Clock) -> None:
    breaker.trip(ProtocolMismatch("another version"))
    clock.now_s += MAX_BACKOFF_S * 0.99
    assert breaker.is_open(clock.now_s)
    assert breaker.last_error == "another version"
    clock.now_s += MAX_BACKOFF_S * 0.02
    assert breaker.admit()
    breaker.succeeded()
    assert not breaker.is_open(clock.now_s)


def test_an_error_without_words_has_a_name(breaker: Breaker) -> None:
    breaker.failed(TimeoutError())
    assert breaker.last_error == "TimeoutError"
