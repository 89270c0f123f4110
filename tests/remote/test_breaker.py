"""The breaker alone, on a clock that the test moves."""

from __future__ import annotations

import pytest

from kvtier.errors import ProtocolMismatch, Unavailable
from kvtier.remote.breaker import FIRST_BACKOFF_S, MAX_BACKOFF_S, PROBE_S, Breaker

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


def half_open(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(ERROR)
    clock.now_s += breaker.retry_in_s
    breaker.answered()


def test_one_fault_opens_it(breaker: Breaker, clock: Clock) -> None:
    assert breaker.admit()
    assert breaker.failed(ERROR)
    assert breaker.has_failed
    assert breaker.is_open(clock.now_s)
    assert not breaker.admit()
    assert breaker.last_error == "no answer"


def test_a_success_closes_it(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        assert breaker.failed(ERROR)
        breaker.succeeded()
        assert breaker.last_error == ""
        assert breaker.admit()
        assert breaker.retry_in_s == 0


def test_no_request_finds_out_whether_a_peer_is_back(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(ERROR)
    clock.now_s += 1000 * MAX_BACKOFF_S
    assert not breaker.admit()
    breaker.answered()
    assert breaker.admit()


def test_an_answer_alone_does_not_shorten_the_wait(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(ERROR)
    breaker.answered()
    assert not breaker.admit()
    clock.now_s += FIRST_BACKOFF_S
    assert breaker.admit()


def test_then_one_probe_is_let_through(breaker: Breaker, clock: Clock) -> None:
    half_open(breaker, clock)
    assert [breaker.admit() for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert breaker.admit()
    assert breaker.admit()


def test_a_probe_that_says_nothing_is_followed_by_another(breaker: Breaker, clock: Clock) -> None:
    half_open(breaker, clock)
    assert breaker.admit()
    clock.now_s += PROBE_S
    assert [breaker.admit() for _ in range(2)] == [True, False]


def test_each_failed_probe_doubles_the_wait_up_to_a_bound(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(ERROR)
    waits_s = []
    for _ in range(10):
        waits_s.append(breaker.retry_in_s)
        clock.now_s += breaker.retry_in_s
        breaker.answered()
        assert breaker.admit()
        assert not breaker.failed(ERROR), "it was open before"
        assert not breaker.admit()
    assert waits_s[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert waits_s[-1] == MAX_BACKOFF_S


def test_each_silent_greeting_doubles_the_wait_too(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(ERROR)
    waits_s = []
    for _ in range(10):
        waits_s.append(breaker.retry_in_s)
        clock.now_s += breaker.retry_in_s
        breaker.silent(ERROR)
    assert waits_s[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert waits_s[-1] == MAX_BACKOFF_S


def test_faults_of_what_began_before_it_opened_lengthen_nothing(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(ERROR)
    for _ in range(20):
        assert not breaker.failed(ERROR)
    assert breaker.retry_in_s == FIRST_BACKOFF_S


def test_what_does_not_pass_by_itself_opens_it_for_long(breaker: Breaker, clock: Clock) -> None:
    breaker.trip(ProtocolMismatch("another version"))
    assert breaker.retry_in_s == MAX_BACKOFF_S
    assert breaker.last_error == "another version"
    clock.now_s += MAX_BACKOFF_S
    breaker.answered()
    assert breaker.admit()
    breaker.succeeded()
    assert not breaker.is_open(clock.now_s)


def test_an_error_without_words_has_a_name(breaker: Breaker) -> None:
    breaker.failed(TimeoutError())
    assert breaker.last_error == "TimeoutError"
