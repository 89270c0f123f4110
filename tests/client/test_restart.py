"""The daemon dies, hangs, starts anew or was never there: misses, bounded calls, and recovery."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvtier.client import EngineClient
from kvtier.client.copies import CpuCopier
from kvtier.client.mapping import ArenaMapping
from tests.client.harness import (
    LAYOUT,
    DaemonProcess,
    Engine,
    chain,
    mapped_arenas,
    until,
)

Make = Callable[..., Engine]
Start = Callable[..., DaemonProcess]
HANG_S = 20.0
"""No call may take so long: its own deadline is far shorter, but machines are busy."""


def bounded(call: Callable[[], object]) -> object:
    """The result, or a failure where the call hangs."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "the call hangs"
    return results[0]


def is_whole(daemon: DaemonProcess) -> bool:
    tier = daemon.status().tiers[0]
    return tier.allocated_bytes == tier.capacity_bytes


def test_a_killed_daemon_is_a_miss_and_its_successor_is_found(own_daemon: Start, make_engine: Make) -> None:
    daemon = own_daemon()
    engine = make_engine(daemon.socket)
    keys = chain("a", 8)
    engine.store(keys, range(8))
    assert engine.client.lookup("k/1", keys).blocks == 8
    (old,) = mapped_arenas()

    daemon.kill()
    assert engine.client.lookup("k/2", keys).reason == "unreachable"
    assert engine.client.load("k/2", keys, engine.pages, range(8)).loaded == 0
    assert engine.client.store(None, keys, engine.pages, range(8)).reason == "unreachable"

    daemon.start()
    until(lambda: engine.client.lookup("k/3", keys).reason == "missing", "the new daemon answers")
    until(lambda: len(mapped_arenas()) == 1 and mapped_arenas() != [old], "the new arena is mapped")
    until(lambda: is_whole(daemon), "the new arena is whole")  # the engine learns of it by itself
    wanted = engine.store(keys, range(8))
    assert engine.client.load("k/4", keys, engine.pages, range(20, 28)).loaded == 8
    assert np.array_equal(engine.rows(range(20, 28)), wanted)
    assert engine.client.stats().registrations == 2
    status = daemon.status()
    assert len(status.engines) == 1
    assert status.tiers[0].old_arena_bytes == 0
    assert len(list((Path(daemon.socket).parent / "engines").iterdir())) == 1


def test_a_report_says_that_the_node_has_forgotten_the_earlier_ones(
    own_daemon: Start, make_engine: Make
) -> None:
    daemon = own_daemon()
    engine = make_engine(daemon.socket)
    keys = chain("a", 4)
    first = engine.client.report_resident(keys)
    assert first is not None
    daemon.kill()
    assert engine.client.report_resident(keys[:1]) is None
    daemon.start()
    told: list[str | None] = []
    until(lambda: told.append(engine.client.report_resident([])) or told[-1], "the new daemon is told")
    assert told[-1] not in (None, first)
    assert not any(each.resident_blocks for each in daemon.status().engines)


def test_an_idle_engine_gives_the_old_arena_up_too(own_daemon: Start, make_engine: Make) -> None:
    daemon = own_daemon(old_arena_deadline_s=3600)
    engine = make_engine(daemon.socket)
    engine.store(chain("b", 8), range(8))
    daemon.kill()
    daemon.start()
    # No call of the engine from here on.
    until(lambda: daemon.status().tiers[0].old_arena_bytes == 0, "the old arena is unmapped")
    until(lambda: is_whole(daemon), "the new arena is whole")
    until(lambda: engine.client.stats().registrations == 2, "the engine has found the new daemon")
    assert engine.store(chain("c", 60), range(60)) is not None


def test_an_orderly_restart(own_daemon: Start, make_engine: Make) -> None:
    daemon = own_daemon()
    engine = make_engine(daemon.socket)
    keys = chain("d", 8)
    engine.store(keys, range(8))
    daemon.close()
    until(lambda: mapped_arenas() == [], "an arena without a name is given up")
    assert engine.client.lookup("o/1", keys).blocks == 0
    daemon.start()
    until(lambda: engine.client.lookup("o/2", keys).reason == "missing", "the new daemon answers")


class Gate(CpuCopier):
    """Waits in the middle of a copy."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.layout, engine.pages.copier._bands)  # type: ignore[attr-defined]
        self.load_group_bytes = self.store_group_bytes = LAYOUT.block_bytes
        self.reached, self.open = threading.Event(), threading.Event()
        engine.pages.copier = self

    def _wait(self) -> None:
        self.reached.set()
        assert self.open.wait(60)

    def to_slots(self, arena: ArenaMapping, offsets: list[int], ids: list[int]) -> None:  # type: ignore[override]
        self._wait()
        super().to_slots(arena, offsets, ids)

    def to_pages(self, arena: ArenaMapping, offsets: list[int], ids: list[int]) -> None:  # type: ignore[override]
        self._wait()
        super().to_pages(arena, offsets, ids)


def test_a_copy_that_spans_a_restart_counts_for_nothing(own_daemon: Start, make_engine: Make) -> None:
    """1. A store or load is in its copy. 2. The daemon restarts, and gives out the same ids again.

    3. The copy ends: neither its commit nor its release may mean anything to the new daemon.
    """
    daemon = own_daemon(old_arena_deadline_s=0.5)  # then its memory is taken away under the copies
    writer, other = make_engine(daemon.socket, load_floor_s=60.0), make_engine(daemon.socket)
    loaded, stored = chain("e", 4), chain("f", 4)
    writer.store(loaded, range(4))
    gate = Gate(writer)
    results: dict[str, object] = {}
    threads = [
        threading.Thread(
            target=lambda: results.update(load=writer.client.load("g/1", loaded, writer.pages, range(4)))
        ),
        threading.Thread(
            target=lambda: results.update(store=writer.client.store(None, stored, writer.pages, range(4, 8)))
        ),
    ]
    for thread in threads:
        gate.reached.clear()
        thread.start()
        assert gate.reached.wait(60)
    daemon.kill()
    daemon.start()
    until(lambda: other.client.lookup("g/2", stored).reason == "missing", "the new daemon answers")
    until(lambda: is_whole(daemon), "the old arena's memory was taken away")
    wanted = other.store(stored, range(10, 14))  # takes the ids that the writer still carries
    lease_holder = other.client.load("g/3", stored, other.pages, range(20, 24))
    assert lease_holder.loaded == 4
    assert len(mapped_arenas()) >= 2, "the old arena stays mapped while its copies run"
    gate.open.set()
    for thread in threads:
        thread.join(60)
    assert results["load"].loaded == 0  # type: ignore[attr-defined]
    assert results["store"].committed == 0  # type: ignore[attr-defined]
    until(lambda: len({line.split()[-1] for line in mapped_arenas()}) == 1, "the old arena is unmapped")
    assert other.client.load("g/4", stored, other.pages, range(30, 34)).loaded == 4
    assert np.array_equal(other.rows(range(30, 34)), wanted)


def test_a_stopped_daemon_bounds_every_call(own_daemon: Start, make_engine: Make) -> None:
    daemon = own_daemon()
    options = {"lookup_timeout_s": 0.05, "call_timeout_s": 0.2, "load_floor_s": 0.2}
    engine = make_engine(daemon.socket)
    hasty = make_engine(daemon.socket, **options)
    keys = chain("g", 8)
    engine.store(keys, range(8))
    assert hasty.client.prepare()
    daemon.signal(signal.SIGSTOP)
    try:
        begin_s = time.monotonic()
        for number in range(50):
            assert bounded(lambda: hasty.client.lookup("s/1", keys)).blocks == 0  # type: ignore[attr-defined]
            if number % 10 == 0:
                assert bounded(lambda: hasty.client.load("s/1", keys, hasty.pages, range(8))).loaded == 0  # type: ignore[attr-defined]
                assert (
                    bounded(lambda: hasty.client.store(None, chain("h", 2), hasty.pages, [0, 1])).committed
                    == 0
                )  # type: ignore[attr-defined]
        bounded(lambda: hasty.client.release_hold("s/1"))
        # Without a breaker the lookups alone would take 2.5 s, were the machine idle.
        assert time.monotonic() - begin_s < HANG_S
        assert hasty.client.stats().faults > 0
    finally:
        daemon.signal(signal.SIGCONT)
    until(lambda: hasty.client.lookup("s/2", keys).blocks == 8, "the daemon is found again")
    until(
        lambda: not (daemon.status().tiers[0].reserved_bytes + daemon.status().tiers[0].quarantined_bytes),
        "what was reserved for answers that came too late is given back",
    )
    assert engine.client.load("s/3", keys, engine.pages, range(20, 28)).loaded == 8


def test_the_breaker_opens_after_two_late_answers(own_daemon: Start, make_engine: Make) -> None:
    daemon = own_daemon()
    engine = make_engine(daemon.socket, lookup_timeout_s=0.1)
    keys = chain("i", 1)
    until(lambda: engine.client.lookup("t/0", keys).reason == "missing", "registered")
    daemon.signal(signal.SIGSTOP)
    try:
        until(lambda: engine.client._link._fault is not None or not engine.client.lookup("t/1", keys), "open")
        calls: list[str] = []
        call = engine.client._link.wire.call
        engine.client._link.wire.call = (  # type: ignore[method-assign]
            lambda method, *rest, **options: calls.append(method) or call(method, *rest, **options)  # type: ignore[func-returns-value]
        )
        for _ in range(20):
            assert engine.client.lookup("t/2", keys).reason == "deadline"
        assert "Lookup" not in calls, "an open breaker makes no calls"
    finally:
        daemon.signal(signal.SIGCONT)
    until(lambda: engine.client.lookup("t/3", keys).reason == "missing", "closed again")


def test_reservations_whose_answer_was_lost_are_given_back(own_daemon: Start, make_engine: Make) -> None:
    daemon = own_daemon(reservation_ttl_s=3600)
    engine = make_engine(daemon.socket, call_timeout_s=0.2)
    assert engine.client.prepare()
    daemon.signal(signal.SIGSTOP)
    try:
        assert engine.client.store(None, chain("j", 8), engine.pages, range(8)).reason == "deadline"
    finally:
        daemon.signal(signal.SIGCONT)
    until(lambda: engine.client.lookup("l/1", chain("j", 1)).reason == "missing", "the daemon answers")
    until(lambda: not daemon.status().tiers[0].reserved_bytes, "the reservation is given back")
    assert engine.client.stats().registrations == 1, "not by the end of the session"


def test_no_daemon_then_one(tmp_path: Path, own_daemon: Start, make_engine: Make) -> None:
    engine = make_engine(str(tmp_path / "run" / "kvtier.sock"))
    keys = chain("k", 4)
    assert engine.client.lookup("n/1", keys).reason == "unreachable"
    assert engine.client.load("n/1", keys, engine.pages, range(4)).failed_reason == "unreachable"
    assert engine.client.store(None, keys, engine.pages, range(4)).reason == "unreachable"
    engine.client.release_hold("n/1")
    own_daemon()
    until(lambda: engine.client.lookup("n/2", keys).reason == "missing", "the daemon is found")


def test_a_socket_that_nobody_serves(tmp_path: Path) -> None:
    """Somebody listens and never answers; then random bytes come back."""
    (tmp_path / "engines").mkdir()
    path = str(tmp_path / "kvtier.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(16)
        with EngineClient(path, LAYOUT) as client:
            assert bounded(lambda: client.lookup("m/1", chain("l", 2))).blocks == 0  # type: ignore[attr-defined]
        server.settimeout(0.2)
        stop = threading.Event()

        def babble() -> None:
            while not stop.is_set():
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    continue
                with peer, contextlib.suppress(OSError):  # who hears that hangs up
                    peer.sendall(os.urandom(4096))

        thread = threading.Thread(target=babble)
        thread.start()
        try:
            with EngineClient(path, LAYOUT, lookup_timeout_s=1.0) as client:
                for _ in range(5):
                    assert bounded(lambda: client.lookup("m/2", chain("l", 2))).blocks == 0  # type: ignore[attr-defined]
        finally:
            stop.set()
            thread.join()


def test_an_engine_whose_lock_file_was_deleted_registers_anew(own_daemon: Start, make_engine: Make) -> None:
    daemon = own_daemon()
    engine = make_engine(daemon.socket)
    keys = chain("m", 4)
    engine.store(keys, range(4))
    for file in (Path(daemon.socket).parent / "engines").iterdir():
        file.unlink()
    daemon.kill()
    daemon.start()
    until(lambda: engine.client.lookup("v/1", keys).reason == "missing", "registered again")
    until(lambda: is_whole(daemon), "the new arena is whole")
    assert engine.store(keys, range(4)) is not None
