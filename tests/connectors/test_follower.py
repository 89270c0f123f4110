"""The node comes to know what the engine has, whatever reports are lost and however often it begins anew."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_vllm import follower as module
from kvtier_vllm.follower import MAX_RETRY_S, REFRESH_S, REPORT_EVERY_S, Follower, Reporter
from kvtier_vllm.kv_events import Cleared, Event, Removed, Stored
from kvtier_vllm.residents import Residents

from kvtier.types import Key, chain_keys

ROOT = b"r" * 32
KEYS = chain_keys(ROOT, [7, 8, 9], 1)
STORED = Stored([1, 2, 3], None, [7, 8, 9], 1)


class Node:
    """Takes reports, or carries them out without an answer, or loses them, or has begun anew."""

    def __init__(self) -> None:
        self.life = 1
        self.known: dict[int, set[Key]] = {}
        self.fault = ""
        self.calls: list[tuple[int, int, bool]] = []

    @property
    def keys(self) -> set[Key]:
        return self.known.get(self.life, set())

    def report_resident(
        self, added: Sequence[Key], removed: Sequence[Key] = (), *, clear: bool = False
    ) -> str | None:
        self.calls.append((len(added), len(removed), clear))
        if self.fault != "lost":
            had = set() if clear else self.keys
            self.known[self.life] = (had - set(removed)) | set(added)
        return None if self.fault else f"life-{self.life}"


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.node = Node()
        self.residents = Residents(1)
        self.residents.begin(ROOT)
        self.reporter = Reporter(self.residents, self.node, lambda: self.now_s)

    def step(self, seconds: float = REPORT_EVERY_S, events: Sequence[Event] = ()) -> None:
        self.residents.apply(events)
        self.now_s += seconds
        self.reporter.step()


def test_an_engine_that_has_nothing_says_nothing() -> None:
    w = World()
    for _ in range(10):
        w.step(REFRESH_S)
    assert w.node.calls == []


def test_changes_are_told_in_batches() -> None:
    w = World()
    w.step(0, [STORED])
    assert w.node.calls == [(3, 0, True)]
    w.step(REPORT_EVERY_S / 2, [Removed([1])])
    assert len(w.node.calls) == 1
    w.step(REPORT_EVERY_S / 2, [Removed([3])])
    assert w.node.calls[1:] == [(0, 2, False)]
    assert w.node.keys == set(KEYS[1:2])
    w.step()
    assert len(w.node.calls) == 2
    w.step(events=[Cleared()])
    assert w.node.calls[2:] == [(0, 0, True)]
    assert w.reporter.counters.anew == 1 + 1


@pytest.mark.parametrize("fault", ["lost", "silent"])
def test_after_a_report_without_an_answer_everything_is_told(fault: str) -> None:
    w = World()
    w.step(events=[STORED])
    w.node.fault = fault
    w.step(events=[Removed([3])])
    calls = len(w.node.calls)
    for _ in range(100):
        w.step(0.1)
    assert len(w.node.calls) - calls < 7, "it asks ever less often"
    w.node.fault = ""
    w.step(MAX_RETRY_S)
    assert w.node.calls[-1] == (2, 0, True)
    assert w.node.keys == set(KEYS[:2])
    w.step(events=[STORED])
    assert w.node.calls[-1] == (1, 0, False)


def test_a_clear_that_was_lost_is_told_though_nothing_is_left() -> None:
    w = World()
    w.step(events=[STORED])
    w.node.fault = "lost"
    w.step(events=[Cleared()])
    assert w.node.keys == set(KEYS)
    w.node.fault = ""
    w.step(MAX_RETRY_S)
    assert w.node.keys == set()


def test_a_node_that_began_anew_is_told_everything_also_by_an_idle_engine() -> None:
    w = World()
    w.step(events=[STORED])
    w.node.life = 2
    w.step(REFRESH_S / 2)
    assert w.node.keys == set()
    w.step(REFRESH_S)
    w.step()
    assert w.node.keys == set(KEYS)
    w.node.life = 3
    w.step(events=[Removed([1])])
    w.step()
    assert w.node.keys == set(KEYS[1:])


MOVES = st.one_of(
    st.just(STORED),
    st.just(Cleared()),
    st.sampled_from([Removed([1]), Removed([2]), Removed([1, 2, 3])]),
    st.sampled_from(["lost", "silent", ""]),
    st.just(2),
)


@given(st.lists(st.tuples(MOVES, st.sampled_from([0.0, 0.06, 0.2, 20.0])), max_size=30))
def test_in_the_end_the_node_knows(moves: list[tuple[Any, float]]) -> None:
    w = World()
    for move, seconds in moves:
        if isinstance(move, str):
            w.node.fault = move
        elif isinstance(move, int):
            w.node.life += 1
        w.step(seconds, [] if isinstance(move, str | int) else [move])
    w.node.fault = ""
    for _ in range(3):
        w.step(max(MAX_RETRY_S, REFRESH_S))
    assert w.node.keys == set(w.residents.keys())


class Scripted:
    """Events as the test gives them."""

    def __init__(self) -> None:
        self.given: list[list[Event]] = []
        self.error: Exception | None = None
        self.is_closed = False

    def receive(self, timeout_s: float) -> list[Event]:
        if self.error is not None:
            raise self.error
        if self.given:
            return self.given.pop(0)
        time.sleep(min(timeout_s, 0.01))
        return []

    def close(self) -> None:
        self.is_closed = True


def until(condition: Any, what: str) -> None:
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s, f"never: {what}"
        time.sleep(0.01)


def test_the_thread_follows_era_by_era() -> None:
    node, source = Node(), Scripted()
    follower = Follower(lambda: source, node, 1, 100)
    source.given = [[STORED]]
    follower.start()
    until(lambda: not source.given, "events of no era are taken")
    assert node.calls == []
    follower.serve(ROOT)
    time.sleep(0.1)
    source.given = [[STORED]]
    until(lambda: node.keys == set(KEYS), "the node knows")
    follower.serve(None)
    until(lambda: node.keys == set(), "of what is of no use the node knows nothing")
    follower.serve(b"s" * 32)
    time.sleep(0.1)
    source.given = [[Cleared(), STORED]]
    until(lambda: node.keys == set(chain_keys(b"s" * 32, [7, 8, 9], 1)), "the next era has other keys")
    follower.close()
    follower.close()
    assert source.is_closed
    assert not any(thread.name == "kvtier-kv-events" for thread in threading.enumerate())


@pytest.mark.parametrize("at", ["open", "receive"])
def test_a_bug_ends_following_and_takes_back_what_was_said(at: str, caplog: pytest.LogCaptureFixture) -> None:
    node, source = Node(), Scripted()

    def make() -> Scripted:
        if at == "open":
            raise ValueError("a bug")
        return source

    follower = Follower(make, node, 1, 100)
    follower.serve(ROOT)
    if at == "receive":
        source.given = [[], [STORED]]
    with caplog.at_level(logging.ERROR, logger="vllm.kvtier"):
        follower.start()
        if at == "receive":
            until(lambda: node.keys == set(KEYS), "the node knows")
            source.error = ValueError("a bug")
        until(lambda: not follower._thread.is_alive(), "the thread ends")
    assert node.keys == set()
    follower.close()
    assert source.is_closed == (at == "receive")


def test_close_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.2)
    release = threading.Event()

    class Hanging(Node):
        def report_resident(self, *_: Any, **__: Any) -> str | None:
            release.wait(20)
            return None

    source = Scripted()
    follower = Follower(lambda: source, Hanging(), 1, 100)
    follower.serve(ROOT)
    source.given = [[], [STORED]]
    follower.start()
    until(lambda: not source.given, "it reports")
    begin_s = time.monotonic()
    follower.close()
    assert time.monotonic() - begin_s < 5
    release.set()
