"""vLLM's own publisher, and publishers that nobody should meet: numbers, gaps, what is asked for again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from kvtier_vllm import event_source as module
from kvtier_vllm.event_source import Endpoints, EventSource, endpoints_of, reachable
from kvtier_vllm.kv_events import Cleared, Event, Removed
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, KVEventBatch, ZmqEventPublisher

_names = itertools.count()


def batch(number: int) -> KVEventBatch:
    return KVEventBatch(ts=0.0, events=[BlockRemoved(block_hashes=[number], medium="GPU")])


def removed(*numbers: int) -> list[Event]:
    return [Removed([number]) for number in numbers]


def received(source: EventSource, count: int, seconds: float = 10.0) -> list[Event]:
    """So many events; waits for no more."""
    events: list[Event] = []
    end_s = time.monotonic() + seconds
    while len(events) < count and time.monotonic() < end_s:
        events += source.receive(0.05)
    return events


class Raw:
    """A publisher that sends anything."""

    def __init__(self) -> None:
        self.address = f"inproc://raw-{next(_names)}"
        self.socket = zmq.Context.instance().socket(zmq.PUB)
        self.socket.bind(self.address)

    def send(self, number: int, payload: bytes | None = None, topic: bytes = b"kv") -> None:
        payload = msgspec.msgpack.encode(batch(number)) if payload is None else payload
        self.socket.send_multipart([topic, number.to_bytes(8, "big"), payload])

    def source(self) -> EventSource:
        source = EventSource(Endpoints(self.address, "kv", "", 0))
        end_s = time.monotonic() + 10
        while not source.receive(0.02):  # until the subscription has arrived
            assert time.monotonic() < end_s
            self.send(0)
        while source.receive(0.05):
            pass
        source.gaps, source._last = 0, 0
        return source


@pytest.fixture
def raw() -> Iterator[Raw]:
    made = Raw()
    yield made
    made.socket.close(0)


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Callable[..., ZmqEventPublisher]]:
    made: list[ZmqEventPublisher] = []

    def make(rank: int = 0, **options: Any) -> ZmqEventPublisher:
        made.append(ZmqEventPublisher(rank, topic="kv", **options))
        return made[-1]

    yield make
    for publisher in made:
        publisher.shutdown()


def test_what_vllm_publishes(publish: Callable[..., ZmqEventPublisher], tmp_path: Path) -> None:
    for events in (f"ipc://{tmp_path}/events", "inproc://events", "tcp://*:28557"):
        source = EventSource(Endpoints(reachable(events), "kv", "", 0))
        publisher = publish(endpoint=events)
        end_s = time.monotonic() + 10
        while not source.receive(0.05):
            assert time.monotonic() < end_s, events
            publisher.publish(batch(0))
        received(source, 1, 0.3)
        for number in range(5):
            publisher.publish(batch(number))
        assert received(source, 5) == removed(0, 1, 2, 3, 4)
        source.close()


@pytest.fixture
def kept(publish: Callable[..., ZmqEventPublisher]) -> tuple[ZmqEventPublisher, Endpoints]:
    """A publisher that keeps its last five batches, and where it is."""
    name = f"inproc://kept-{next(_names)}"
    publisher = publish(endpoint=name, replay_endpoint=f"{name}-replay", buffer_steps=5)
    return publisher, Endpoints(name, "kv", f"{name}-replay", 0)


def test_what_was_missed_is_had_again(kept: tuple[ZmqEventPublisher, Endpoints]) -> None:
    publisher, endpoints = kept
    for number in range(3):
        publisher.publish(batch(number))
    time.sleep(0.3)
    source = EventSource(endpoints)
    time.sleep(0.3)
    publisher.publish(batch(3))
    assert received(source, 4) == removed(0, 1, 2, 3)
    assert (source.replayed >= 3, source.gaps) == (True, 0)
    source._last = 1  # as if two had been lost
    source._replayed_to = -1
    publisher.publish(batch(4))
    assert received(source, 3) == removed(2, 3, 4)
    publisher.publish(batch(5))
    assert received(source, 1) == removed(5)
    source.close()


def test_what_comes_twice_counts_once(kept: tuple[ZmqEventPublisher, Endpoints]) -> None:
    """Replayed, and waiting in the subscription too."""
    publisher, endpoints = kept
    for number in range(2):
        publisher.publish(batch(number))
    time.sleep(0.3)
    source = EventSource(endpoints)
    time.sleep(0.3)
    for number in range(2, 5):
        publisher.publish(batch(number))
    time.sleep(0.5)
    assert received(source, 6, 0.5) == removed(0, 1, 2, 3, 4)
    publisher.publish(batch(5))
    assert received(source, 1) == removed(5)
    assert (source.replayed, source.gaps) == (5, 0)
    source.close()


def test_of_what_is_not_kept_any_more_nothing_is_known(kept: tuple[ZmqEventPublisher, Endpoints]) -> None:
    publisher, endpoints = kept
    for number in range(8):
        publisher.publish(batch(number))
    time.sleep(0.3)
    source = EventSource(endpoints)
    time.sleep(0.3)
    publisher.publish(batch(8))
    events = received(source, 6)
    assert events[0] == Cleared()
    assert events[1:] in (removed(4, 5, 6, 7, 8), removed(3, 4, 5, 6, 7, 8))
    assert source.gaps == 1
    source.close()


def test_a_gap_without_replay(raw: Raw) -> None:
    source = raw.source()
    raw.send(1)
    raw.send(4)
    raw.send(5)
    assert received(source, 4) == [*removed(1), Cleared(), *removed(4, 5)]
    raw.send(2)
    raw.send(3)
    assert received(source, 3) == [Cleared(), *removed(2, 3)], "numbers that go back are another publisher's"
    assert source.gaps == 2
    source.close()


def test_a_replay_that_never_answers_costs_its_time_once(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLAY_TIMEOUT_S", 0.3)
    source = raw.source()
    source._endpoints = Endpoints(raw.address, "kv", "inproc://nobody", 0)
    raw.send(5)
    begin_s = time.monotonic()
    assert received(source, 2) == [Cleared(), *removed(5)]
    assert time.monotonic() - begin_s > 0.25
    raw.send(9)
    begin_s = time.monotonic()
    assert received(source, 2) == [Cleared(), *removed(9)]
    assert time.monotonic() - begin_s < 0.25
    source.close()


def test_a_replay_full_of_lies_is_bounded(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers, garbage, no end: what makes sense counts, and the rest is a gap."""
    import threading

    monkeypatch.setattr(module, "MAX_REPLAYED_MESSAGES", 50)
    address = f"inproc://liar-{next(_names)}"
    liar = zmq.Context.instance().socket(zmq.ROUTER)
    liar.bind(address)
    asked: list[bytes] = []

    def lie() -> None:
        name, _, first = liar.recv_multipart()
        asked.append(first)
        good = msgspec.msgpack.encode(batch(1))
        for number, payload in ((1, good), (1, good), (0, good), (7, good), (2, b"\xc1"), *[(3, b"")] * 100):
            liar.send_multipart([name, b"", b"kv", number.to_bytes(8, "big"), payload])

    thread = threading.Thread(target=lie)
    thread.start()
    source = raw.source()
    source._endpoints = Endpoints(raw.address, "kv", address, 0)
    raw.send(4)
    events = received(source, 2)
    thread.join(10)
    liar.close(0)
    assert asked == [(1).to_bytes(8, "big")]
    assert events[-2:] == [Cleared(), *removed(4)] or events[0] == Cleared()
    raw.send(source._last + 1)
    assert received(source, 1) == removed(source._last)
    source.close()


def test_messages_that_are_none(raw: Raw) -> None:
    source = raw.source()
    raw.socket.send_multipart([b"kv"])
    raw.socket.send_multipart([b"kv", b"short", b""])
    raw.send(1, b"\xc1")
    raw.send(2)
    events = received(source, 4)
    assert events == [Cleared(), Cleared(), Cleared(), *removed(2)]
    assert (source.damaged, source.gaps) == (3, 0)
    raw.send(3, topic=b"kv-of-another")
    raw.send(3)
    assert received(source, 1) == removed(3)
    source.close()


def test_a_message_beyond_the_bound_is_never_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BATCH_BYTES", 4096)
    address = f"ipc://{tmp_path}/large"
    socket = zmq.Context.instance().socket(zmq.PUB)
    socket.bind(address)
    source = EventSource(Endpoints(address, "", "", 0))
    small = msgspec.msgpack.encode(batch(1))
    end_s = time.monotonic() + 10
    while not source.receive(0.05):
        assert time.monotonic() < end_s
        socket.send_multipart([b"", bytes(8), small])
    socket.send_multipart([b"", (1).to_bytes(8, "big"), bytes(5000)])
    received(source, 100, 0.3)
    assert source.damaged == 0
    while not source.receive(0.05):  # it connects again
        assert time.monotonic() < end_s
        socket.send_multipart([b"", (9).to_bytes(8, "big"), small])
    assert source.gaps >= 1
    source.close()
    socket.close(0)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::]:5557", "tcp://[::1]:5557"),
        ("tcp://[::1]:5557", "tcp://[::1]:5557"),
        ("ipc:///tmp/x", "ipc:///tmp/x"),
        ("inproc://x", "inproc://x"),
        ("tcp://*:0", ""),
        ("tcp://*:x", ""),
        ("tcp://*", ""),
        ("tcp://127.0.0.1:5557", ""),
        ("tcp://collector:5557", ""),
        ("pgm://x", ""),
    ],
)
def test_where_a_publisher_listens(endpoint: str, expected: str) -> None:
    assert reachable(endpoint) == expected


def config(rank: int = 0, **values: Any) -> Any:
    events = KVEventsConfig(**({"enable_kv_cache_events": True} | values)) if values else None
    return SimpleNamespace(kv_events_config=events, parallel_config=SimpleNamespace(data_parallel_index=rank))


def test_what_an_engine_is_configured_for() -> None:
    assert endpoints_of(config()) is None
    assert endpoints_of(config(enable_kv_cache_events=False)) is None
    assert endpoints_of(config(publisher="null")) is None
    assert endpoints_of(config(topic="t")) == Endpoints("tcp://127.0.0.1:5557", "t", "", 0)
    assert endpoints_of(
        config(2, endpoint="tcp://*:6000", replay_endpoint="tcp://127.0.0.1:7000", topic="t")
    ) == Endpoints("tcp://127.0.0.1:6002", "t", "tcp://127.0.0.1:7002", 2)
    said = endpoints_of(config(endpoint="tcp://collector:5557"))
    assert isinstance(said, str)
    assert "tcp://collector:5557" in said
