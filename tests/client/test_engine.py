"""Lookups, loads and stores against a real daemon."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.client import AdminClient, EngineClient, LoadResult, Offer, Pages, StoreResult
from kvtier.client.copies import CpuCopier
from kvtier.client.mapping import ArenaMapping
from kvtier.client.session import Link
from kvtier.errors import InvalidRequest
from kvtier.types import Key, Layout, LayoutKind, LayoutOrder, TierKind
from tests.client.harness import LAYOUT, DaemonProcess, Engine, chain, until

Make = Callable[..., Engine]
names = (f"prompt {number}" for number in itertools.count())


def arena_path(daemon: DaemonProcess, home: str = "/dev/shm") -> Path:
    status = daemon.status()
    pattern = f"*/kvtier-{status.node_id[:12]}-{status.incarnation}.arena"
    (path,) = Path(home).glob(pattern)
    return path


def test_what_was_stored_is_loaded(daemon: DaemonProcess, make_engine: Make) -> None:
    writer, reader = make_engine(daemon.socket), make_engine(daemon.socket)
    keys = chain(next(names), 20)
    assert writer.client.lookup("w/1", keys) == Offer(0, reason="missing")
    wanted = writer.store(keys, range(3, 23))
    offer = reader.client.lookup("r/1", keys)
    assert (offer.blocks, offer.reason, offer.tiers) == (20, "", {TierKind.DRAM: 20})
    assert offer.estimate_s > 0
    ids = np.random.default_rng(1).permutation(64)[:20].tolist()
    before = reader.memory.copy()
    result = reader.client.load("r/1", keys, reader.pages, ids)
    assert (result.loaded, result.failed_reason) == (20, "")
    assert result.seconds > 0
    assert np.array_equal(reader.rows(ids), wanted)
    others = [i for i in range(64) if i not in ids]
    assert np.array_equal(reader.memory[:, others], before[:, others])
    until(lambda: not daemon.status().tiers[0].leased_bytes, "the lease is released")
    stats = reader.client.stats()
    assert (stats.lookups, stats.offered_blocks, stats.loads, stats.loaded_blocks) == (1, 20, 1, 20)
    assert (stats.failed_loads, stats.faults, stats.registrations) == (0, 0, 1)
    assert writer.client.stats().stored_blocks == 20


def test_a_prefix_is_offered_and_the_rest_is_missing(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket)
    keys = chain(next(names), 12)
    wanted = engine.store(keys[:5], range(5))
    offer = engine.client.lookup("p/1", keys)
    assert (offer.blocks, offer.reason) == (5, "missing")
    result = engine.client.load("p/1", keys, engine.pages, range(20, 32))
    assert (result.loaded, result.failed_reason) == (5, "missing")
    assert np.array_equal(engine.rows(range(20, 25)), wanted)
    assert engine.client.load("p/2", chain(next(names), 3), engine.pages, [0, 1, 2]) == LoadResult(
        0, "missing", pytest.approx(0, abs=5)
    )


def test_the_last_call_of_a_copy_is_announced_while_it_runs(
    daemon: DaemonProcess, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each copy of more than one group, and everything is as without it."""
    monkeypatch.setattr(CpuCopier, "store_group_bytes", 1)
    monkeypatch.setattr(CpuCopier, "load_group_bytes", 1)
    announced: list[str] = []
    begin = Link.begin

    def note(link: Link, method: str, limit_s: float) -> object:
        announced.append(method)
        return begin(link, method, limit_s)

    monkeypatch.setattr(Link, "begin", note)
    engine = make_engine(daemon.socket)
    for _ in range(3):
        keys = chain(next(names), 6)
        wanted = engine.store(keys, range(6))
        assert engine.client.load("a/1", keys, engine.pages, range(10, 16)).loaded == 6
        assert np.array_equal(engine.rows(range(10, 16)), wanted)
    assert announced == ["Commit", "Release"] * 3
    alone = chain(next(names), 1)
    engine.store(alone, [0])
    assert engine.client.load("a/1", alone, engine.pages, [1]).loaded == 1
    assert len(announced) == 6
    until(lambda: not daemon.status().tiers[0].leased_bytes, "the leases are released")


def test_a_store_continues_what_is_there(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket)
    keys = chain(next(names), 10)
    first = engine.store(keys[:4], range(4))
    again = engine.client.store(None, keys[:6], engine.pages, range(6))
    assert again == StoreResult(committed=2, present=4)
    assert engine.client.store(keys[5], keys[6:], engine.pages, range(6, 10)).committed == 4
    assert engine.client.lookup("c/1", keys).blocks == 10
    assert engine.client.load("c/1", keys[:4], engine.pages, range(30, 34)).loaded == 4
    assert np.array_equal(engine.rows(range(30, 34)), first)


def test_a_parent_that_is_not_there(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket)
    keys = chain(next(names), 4)
    assert engine.client.store(keys[1], keys[2:], engine.pages, [0, 1]) == StoreResult(reason="unknown")
    assert engine.store(keys, range(4)) is not None, "the session goes on"
    assert engine.client.stats().registrations == 1


def test_a_store_is_cut_into_rounds(
    daemon: DaemonProcess, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.client.engine.STORE_ROUND_BYTES", 3 * LAYOUT.block_bytes)
    engine = make_engine(daemon.socket)
    keys = chain(next(names), 10)
    wanted = engine.store(keys, range(10))
    assert engine.client.load("x/1", keys, engine.pages, range(20, 30)).loaded == 10
    assert np.array_equal(engine.rows(range(20, 30)), wanted)


def test_a_store_without_room_is_refused_not_failed(own_daemon: Any, make_engine: Make) -> None:
    daemon = own_daemon(dram_bytes="2MiB", max_pinned_fraction=1.0)
    engine = make_engine(daemon.socket)
    keys = chain("full", 60)
    result = engine.client.store(None, keys, engine.pages, range(60))
    assert result.reason == ""
    assert 0 < result.committed < 60
    assert result.committed + result.refused == 60
    assert engine.client.lookup("f/1", keys).blocks == result.committed
    tier = daemon.status().tiers[0]
    assert tier.reserved_bytes == tier.quarantined_bytes == 0


def test_threads_of_one_copy(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket, copy_threads=3, verify_loads="all")
    engine.pages.copier.store_group_bytes = engine.pages.copier.load_group_bytes = 2 * LAYOUT.block_bytes
    keys = chain(next(names), 21)
    wanted = engine.store(keys, range(21))
    assert engine.client.load("t/1", keys, engine.pages, range(40, 61)).loaded == 21
    assert np.array_equal(engine.rows(range(40, 61)), wanted)


# ---- stop, budget, corruption


class Slow(CpuCopier):
    """Does something before each group."""

    def __init__(self, copier: Any, before: Callable[[int], None]) -> None:
        super().__init__(copier._layout, copier._bands)
        self.load_group_bytes = self.store_group_bytes = 2 * LAYOUT.block_bytes
        self.groups = 0
        self._before = before

    def to_slots(self, arena: ArenaMapping, offsets: Any, ids: Any) -> None:
        self._before(self.groups)
        self.groups += 1
        super().to_slots(arena, offsets, ids)

    def to_pages(self, arena: ArenaMapping, offsets: Any, ids: Any) -> None:
        self._before(self.groups)
        self.groups += 1
        super().to_pages(arena, offsets, ids)


def slowed(engine: Engine, before: Callable[[int], None]) -> Slow:
    engine.pages.copier = Slow(engine.pages.copier, before)
    return engine.pages.copier  # type: ignore[return-value]


def test_a_stopped_store_gives_everything_back(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket)
    stop = threading.Event()
    copier = slowed(engine, lambda group: stop.set() if group == 1 else None)
    keys = chain(next(names), 12)
    result = engine.client.store(None, keys, engine.pages, range(12), stop=stop)
    assert result == StoreResult(reason="stopped")
    assert copier.groups == 2, "it went on after it was stopped"
    assert engine.client.lookup("s/1", keys).blocks == 0
    tier = daemon.status().tiers[0]
    assert tier.reserved_bytes == tier.quarantined_bytes == 0
    assert engine.client.stats().aborted_stores == 1
    stop.clear()
    assert engine.store(keys, range(12)) is not None


def test_a_stop_with_the_last_group_still_counts(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket)
    stop = threading.Event()
    slowed(engine, lambda group: stop.set() if group == 5 else None)
    keys = chain(next(names), 12)
    assert engine.client.store(None, keys, engine.pages, range(12), stop=stop).reason == "stopped"
    assert engine.client.lookup("s/2", keys).blocks == 0


def test_a_load_over_its_budget_is_cut(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket)
    keys = chain(next(names), 12)
    wanted = engine.store(keys, range(12))
    over = threading.Event()
    slowed(engine, lambda group: over.wait(1.5) and None if group == 2 else None)
    result = engine.client.load("b/1", keys, engine.pages, range(20, 32), budget_s=1.0)
    assert result.failed_reason == "budget"
    assert result.loaded in (0, 6)
    assert np.array_equal(engine.rows(range(20, 20 + result.loaded)), wanted[:, : result.loaded])
    until(lambda: not daemon.status().tiers[0].leased_bytes, "the lease is released")


def test_no_time_at_all(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket)
    keys = chain(next(names), 3)
    engine.store(keys, range(3))
    assert engine.client.load("z/1", keys, engine.pages, range(3), budget_s=0.0).loaded == 0
    assert engine.client.store(None, keys, engine.pages, range(3), timeout_s=0.0).reason == "deadline"
    for _ in range(5):  # the caller's own haste says nothing about the node
        assert engine.client.load("z/1", keys, engine.pages, range(3), budget_s=1e-6).loaded == 0
    assert engine.client.lookup("z/2", keys).blocks == 3


@pytest.mark.parametrize(("bad", "loaded"), [(0, 0), (7, 7)])
def test_corrupt_bytes_are_not_loaded(own_daemon: Any, make_engine: Make, bad: int, loaded: int) -> None:
    daemon = own_daemon(verify_loads="all", scrub_bytes_per_s=0)
    engine = make_engine(daemon.socket)
    keys = chain("rotten", 10)
    wanted = engine.store(keys, range(10))
    from kvtier.client import AdminClient

    with AdminClient(daemon.socket) as admin:
        places = {place.index: place for place in admin.lookup_prefix(keys).places}
    with arena_path(daemon).open("r+b") as arena:
        arena.seek(places[bad].offset_bytes + LAYOUT.block_bytes - 1)
        byte = arena.read(1)[0]
        arena.seek(-1, os.SEEK_CUR)
        arena.write(bytes([byte ^ 1]))
    result = engine.client.load("k/1", keys, engine.pages, range(20, 30))
    assert result.failed_reason == "corrupt"
    assert result.loaded == loaded
    assert np.array_equal(engine.rows(range(20, 20 + loaded)), wanted[:, :loaded])
    assert engine.client.stats().corrupt_blocks == 1
    until(lambda: engine.client.lookup("k/2", keys).blocks == bad, "the node drops the corrupt block")


def test_only_what_is_verified_is_found_corrupt(own_daemon: Any, make_engine: Make) -> None:
    daemon = own_daemon(scrub_bytes_per_s=0)
    engine = make_engine(daemon.socket, verify_loads="off")
    keys = chain("unseen", 4)
    engine.store(keys, range(4))
    with arena_path(daemon).open("r+b") as arena:
        arena.write(bytes(LAYOUT.block_bytes))
    assert engine.client.load("u/1", keys, engine.pages, range(20, 24)).loaded == 4


# ---- the caller's mistakes, and the end


def places(daemon: DaemonProcess, keys: list[Key]) -> list[tuple[int, str]]:
    """Which engine has which of these in its own memory."""
    with AdminClient(daemon.socket) as admin:
        return [(place.index, place.holder) for place in admin.lookup_prefix(keys).places if place.holder]


def test_what_the_engine_has_is_told(
    own_daemon: Any, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = own_daemon(max_keys_per_call=8)
    client = make_engine(daemon.socket).client
    keys = chain("told", 20)
    (name,) = {client.report_resident(keys), client.report_resident([], keys[15:])}
    assert name is not None
    assert places(daemon, keys[:8]) == [(index, name) for index in range(8)]
    assert places(daemon, keys[12:]) == [(index, name) for index in range(3)]
    assert client.report_resident(keys[:2], clear=True) == name
    assert places(daemon, keys[:8]) == [(0, name), (1, name)]
    assert client.report_resident([]) == name
    assert client.report_resident([], clear=True) == name
    assert places(daemon, keys[:8]) == []
    client.report_resident(keys)
    client.close()
    until(lambda: places(daemon, keys[:8]) == [], "an engine that is gone has nothing")
    assert client.report_resident(keys) is None


def test_arguments_that_cannot_be_right(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket)
    keys = chain(next(names), 2)
    client, pages = engine.client, engine.pages
    for call in (
        lambda: client.lookup("a", [b"short"]),
        lambda: client.report_resident([b"short"]),
        lambda: client.report_resident(keys, "x" * 32),  # type: ignore[arg-type]
        lambda: client.load("a", [b"x" * 33], pages, [0]),
        lambda: client.load("a", keys, pages, [0]),
        lambda: client.load("a", keys, pages, [0, 64]),
        lambda: client.store(None, keys, pages, [-1, 0]),
        lambda: client.store(None, [b""], pages, [0]),
        lambda: client.store(None, keys, pages, [0.0, 1.0]),  # type: ignore[list-item]
        lambda: client.load("a", keys, pages, np.arange(2)),  # type: ignore[arg-type]
        lambda: client.lookup("", keys),
        lambda: client.lookup("x" * 257, keys),
        lambda: client.lookup("line\nbreak", keys),
        lambda: client.lookup("\ud800", keys),
        lambda: client.lookup(7, keys),  # type: ignore[arg-type]
        lambda: client.load("\ud800", keys, pages, [0, 1]),
        lambda: client.lookup("a", ["k" * 32]),  # type: ignore[list-item]
        lambda: client.lookup("a", keys, 0),
        lambda: client.lookup("a", keys, 1 << 40),
        lambda: client.lookup("a", keys, True),
        lambda: client.lookup("a", None),  # type: ignore[arg-type]
        lambda: client.lookup("a", keys, block_compute_s="1"),  # type: ignore[arg-type]
        lambda: client.lookup("a", keys, block_compute_s=float("nan")),
        lambda: client.load("a", keys, pages, [0, 1], budget_s=-1.0),
        lambda: client.load("a", keys, pages, [0, 1], budget_s=float("nan")),
        lambda: client.load("a", keys, pages, [0, 1], budget_s=True),
        lambda: client.load("a", keys, pages, [0, 1], budget_s="1"),  # type: ignore[arg-type]
        lambda: client.load("a", keys, pages, [True, False]),
        lambda: client.load("a", keys, pages, [5, 5]),
        lambda: client.load("a", keys, engine.memory, [0, 1]),  # type: ignore[arg-type]
        lambda: client.store(None, keys, pages, [0, 1], timeout_s=-1.0),
        lambda: client.store(None, keys, pages, [0, 1], timeout_s=float("nan")),
        lambda: client.store(None, keys, pages, [0, 1], stop=True),  # type: ignore[arg-type]
        lambda: client.store("k" * 32, keys, pages, [0, 1]),  # type: ignore[arg-type]
        lambda: client.store(7, keys, pages, [0, 1]),  # type: ignore[arg-type]
        lambda: client.store(b"short", keys, pages, [0, 1]),
        lambda: client.prepare(float("nan")),
        lambda: client.prepare(-1.0),
        lambda: client.release_hold(""),
        lambda: client.release_hold("\ud800"),
        lambda: client.release_hold(7),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest):
            call()
    other = Layout(LayoutKind.MHA, 4, 2, 32, "bfloat16", 32, LayoutOrder.HND, LAYOUT.layer_block_bytes)
    with pytest.raises(InvalidRequest, match="another layout"):
        client.store(None, keys, Pages.from_tensors(list(engine.memory), other), [0, 1])
    for options in (
        {"lookup_timeout_s": 0.0},
        {"call_timeout_s": float("nan")},
        {"load_floor_s": float("inf")},
        {"verify_loads": "some"},
        {"copy_threads": 0},
        {"shard": -1},
        {"shard": True},
        {"copy_threads": 1.5},
        {"copy_threads": "2"},
        {"lookup_timeout_s": True},
        {"lookup_timeout_s": "1"},
        {"description": "\ud800"},
        {"description": 7},
    ):
        with pytest.raises(InvalidRequest, match=next(iter(options))):
            EngineClient(daemon.socket, LAYOUT, **options)  # type: ignore[arg-type]
    assert client.stats().faults == 0


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", b"/tmp/s", 7, None])
def test_paths_that_no_socket_can_have(path: Any) -> None:
    from kvtier.client import AdminClient

    for make in (lambda: EngineClient(path, LAYOUT), lambda: AdminClient(path)):
        with pytest.raises(InvalidRequest, match="socket_path"):
            make()


@pytest.mark.parametrize("budget_s", [float("inf"), 1e12, 10**400])
def test_a_path_is_a_path_and_a_long_time_is_one(
    daemon: DaemonProcess, make_engine: Make, budget_s: float
) -> None:
    engine = make_engine(Path(daemon.socket), call_timeout_s=1e12)
    keys = chain(next(names), 3)
    assert engine.client.prepare(budget_s)
    assert engine.client.store(None, keys, engine.pages, [0, 1, 2], timeout_s=budget_s).committed == 3
    assert engine.client.load("long", keys, engine.pages, [3, 4, 5], budget_s=budget_s).loaded == 3


def test_what_an_operator_cannot_mean(daemon: DaemonProcess) -> None:
    from kvtier.client import AdminClient

    for timeout_s in (-1.0, float("nan"), True, "1"):
        with pytest.raises(InvalidRequest, match="timeout_s"):
            AdminClient(daemon.socket, timeout_s=timeout_s)  # type: ignore[arg-type]
    with AdminClient(Path(daemon.socket), timeout_s=float("inf")) as admin:
        assert admin.status().node_id
        for call in (
            lambda: admin.lookup_prefix(["k" * 32]),  # type: ignore[list-item]
            lambda: admin.evict_prefix(None),  # type: ignore[arg-type]
            lambda: admin.get_node("\ud800"),
            lambda: admin.pin_prefix([], -1.0),
            lambda: admin.pin_prefix([], True),
            lambda: admin.pin_prefix([], "1"),  # type: ignore[arg-type]
            lambda: admin.unpin_prefix(pin_id=-1),
            lambda: admin.unpin_prefix(pin_id=2**64),
        ):
            with pytest.raises(InvalidRequest):
                call()


def test_what_only_the_node_can_refuse_is_a_miss(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket)
    keys = chain(next(names), 2)
    assert engine.client.store(None, [keys[0], keys[0]], engine.pages, [0, 1]).reason == "refused"
    assert engine.client.load("q/1", [], engine.pages, []) == LoadResult(0)
    assert engine.client.store(None, [], engine.pages, []) == StoreResult()


def test_nothing_is_opened_before_the_first_call(daemon: DaemonProcess, make_engine: Make) -> None:
    engines = Path(daemon.socket).parent / "engines"
    before = set(engines.iterdir())
    threads = threading.active_count()
    engine = make_engine(daemon.socket)
    assert set(engines.iterdir()) == before
    assert threading.active_count() == threads
    assert engine.client.prepare()
    assert len(set(engines.iterdir()) - before) == 1


def test_after_close_everything_is_a_miss(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket)
    keys = chain(next(names), 2)
    engine.store(keys, [0, 1])
    engines = Path(daemon.socket).parent / "engines"
    mine = set(engines.glob(f"e{os.getpid()}-*"))
    engine.client.close()
    engine.client.close()
    assert len(mine) == 1 + len(set(engines.glob(f"e{os.getpid()}-*")))
    assert engine.client.lookup("e/1", keys).reason == "unreachable"
    assert engine.client.load("e/1", keys, engine.pages, [0, 1]).loaded == 0
    assert engine.client.store(None, keys, engine.pages, [0, 1]).reason == "unreachable"
    engine.client.release_hold("e/1")
    assert not engine.client.prepare(1.0)


def test_a_client_that_nobody_closes_goes_with_its_last_reference(daemon: DaemonProcess) -> None:
    engines = Path(daemon.socket).parent / "engines"
    before = set(engines.iterdir())
    engine = Engine(daemon.socket)
    assert engine.client.prepare()
    assert len(set(engines.iterdir()) - before) == 1
    del engine
    until(lambda: set(engines.iterdir()) <= before, "its lock is dropped")


def test_holds_end_when_they_are_released(daemon: DaemonProcess, make_engine: Make) -> None:
    engine = make_engine(daemon.socket)
    keys = chain(next(names), 4)
    engine.store(keys, range(4))
    assert engine.client.lookup("h/1", keys).blocks == 4
    from kvtier.client import AdminClient

    with AdminClient(daemon.socket) as admin:
        assert admin.evict_prefix(keys).kept == 4
        engine.client.release_hold("h/1")
        engine.client.release_hold("h/1")
        assert admin.evict_prefix(keys).evicted == 4


def test_pins_through_the_admin_client(daemon: DaemonProcess, make_engine: Make) -> None:
    from kvtier.client import AdminClient

    engine = make_engine(daemon.socket)
    keys = chain(next(names), 3)
    engine.store(keys, range(3))
    with AdminClient(daemon.socket) as admin:
        pinned = admin.pin_prefix(keys, 60.0)
        assert pinned.pinned == 3
        assert admin.evict_prefix(keys).kept == 3
        assert admin.unpin_prefix(pin_id=pinned.pin_id).unpinned == 1
        assert admin.pin_prefix(keys, 60.0).pinned == 3
        assert admin.unpin_prefix(keys).unpinned == 1
        assert admin.evict_prefix(keys).evicted == 3
        with pytest.raises(InvalidRequest):
            admin.lookup_prefix([b"short"])
