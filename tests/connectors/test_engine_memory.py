"""A real vLLM engine that publishes KV events: the node knows what the engine's own memory has."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvtier_vllm.follower import REFRESH_S

from kvtier.client import AdminClient
from tests.connectors.daemon import ROOT, Daemon
from tests.connectors.engine import BLOCK_TOKENS, Engine

pytestmark = pytest.mark.slow

MakeEngine = Callable[..., Engine]
DEADLINE_S = 20.0


def prompt(seed: int, num_tokens: int = 300) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 500) for _ in range(num_tokens)]


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    end_s = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end_s, f"never: {what}"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def events() -> Iterator[dict[str, Any]]:
    """On a socket whose path is short enough."""
    with tempfile.TemporaryDirectory(prefix="kvtier-test-", dir="/tmp") as home:
        yield {
            "enable_kv_cache_events": True,
            "endpoint": f"ipc://{home}/events",
            "replay_endpoint": f"ipc://{home}/replay",
            "topic": "kv",
        }


@pytest.fixture(scope="module")
def engine(daemon: Daemon, make_engine: MakeEngine, events: dict[str, Any]) -> Engine:
    return make_engine({"socket": daemon.socket}, kv_events_config=events, kv_cache_memory_bytes=8 << 20)


@pytest.fixture(autouse=True)
def it_begins_empty(engine: Engine, daemon: Daemon) -> None:
    drop_own_cache(engine)
    until(lambda: not resident(daemon), "the engine has nothing")


def drop_own_cache(engine: Engine, *, connector: bool = False) -> None:
    """vLLM tells of it with its next step."""
    engine.drop_own_cache(connector=connector)
    engine.one([3, 4, 5], max_tokens=1)


def resident(daemon: Daemon) -> int:
    return sum(each.resident_blocks for each in daemon.status().engines)


def places(daemon: Daemon, keys: list[str]) -> list[tuple[int, int]]:
    """Index and tier of each place of these blocks."""
    with AdminClient(daemon.socket) as admin:
        found = admin.lookup_prefix([bytes.fromhex(key) for key in keys])
    return [(place.index, place.tier) for place in found.places]


def test_what_was_computed_is_known_and_what_is_dropped_is_not(engine: Engine, daemon: Daemon) -> None:
    tokens = prompt(1)
    before = daemon.blocks()
    answer = engine.one(tokens, max_tokens=40)
    tokens += answer.tokens
    keys = engine.ask("keys", prompt=tokens)
    assert len(keys) == 10, "one block is of tokens that were generated, which the engine can use again"
    until(lambda: resident(daemon) == engine.ask("own_cache") == 10, "all of it is known")
    daemon.wait_for_blocks(before + 9)
    here = [place for index in range(9) for place in ((index, 2), (index, 1))]
    assert places(daemon, keys) == [*here, (9, 1)]
    command = [sys.executable, "-m", "kvtier.cli.main", "lookup", *keys, "--socket", daemon.socket, "--json"]
    shown = json.loads(subprocess.run(command, capture_output=True, cwd=ROOT, check=True).stdout)
    (holder,) = {place["holder"] for place in shown["places"]} - {None}
    descriptions = {each.engine_id: each.description for each in daemon.status().engines}
    assert descriptions[holder].endswith("scheduler")
    assert shown["blocks"] == 10
    drop_own_cache(engine)
    until(lambda: places(daemon, keys) == [(index, 2) for index in range(9)], "only the node has them")
    loaded = engine.one(tokens[:300])
    assert loaded.cached == 9 * BLOCK_TOKENS
    until(lambda: places(daemon, keys) == here, "what was loaded is in the engine's memory, too")
    with AdminClient(daemon.socket) as admin:
        assert admin.evict_prefix([bytes.fromhex(keys[0])]).evicted == 9
    assert places(daemon, keys) == [(index, 1) for index in range(9)]


def test_under_pressure_it_is_what_the_engine_can_use(engine: Engine, daemon: Daemon) -> None:
    """More prompts than fit, some of which share their beginning, one after the other and at once."""
    prompts = [prompt(seed % 3, 200) + prompt(100 + seed, 700) for seed in range(12)]
    for tokens in prompts:
        engine.one(tokens)
    until(lambda: resident(daemon) == engine.ask("own_cache") > 20, "one after the other")
    every = {key for tokens in prompts for key in engine.ask("keys", prompt=tokens)}
    assert len(every) > resident(daemon), "some had to go"
    assert engine.ask("followed")["unknown"] == 0
    engine.generate(*prompts[:6])
    drop_own_cache(engine)
    until(lambda: not resident(daemon), "the engine has nothing")
    engine.generate(*prompts[6:9])
    # Of a block that it has twice, it may have dropped one.
    until(lambda: 0 < resident(daemon) <= engine.ask("own_cache"), "at once")


def test_what_depends_on_more_than_tokens_is_not_counted(engine: Engine, daemon: Daemon) -> None:
    engine.one(prompt(20), salt="a tenant's")
    engine.one(prompt(21, 2 * BLOCK_TOKENS))
    until(lambda: resident(daemon) >= 2, "the other is known")
    time.sleep(0.5)
    assert resident(daemon) == 2
    assert engine.ask("own_cache") > 2


def test_another_generation_has_other_keys(engine: Engine, daemon: Daemon) -> None:
    tokens = prompt(30)
    engine.one(tokens)
    old = engine.ask("keys", prompt=tokens)
    until(lambda: (8, 1) in places(daemon, old), "it is known")
    drop_own_cache(engine, connector=True)
    engine.one(tokens)
    new = engine.ask("keys", prompt=tokens)
    assert not set(old) & set(new)
    until(lambda: (8, 1) in places(daemon, new), "under new keys it is known")
    assert not any(tier == 1 for _, tier in places(daemon, old))


def test_a_daemon_that_begins_anew_is_told_by_an_idle_engine(engine: Engine, daemon: Daemon) -> None:
    engine.one(prompt(40))
    until(lambda: resident(daemon) == 9, "it is known")
    daemon.kill()
    daemon.start()
    until(lambda: resident(daemon) == 9, "it is known again", 2 * REFRESH_S + DEADLINE_S)
    assert engine.ask("followed")["anew"] >= 2


def test_an_engine_of_its_own_process(
    daemon: Daemon, make_engine: MakeEngine, events: dict[str, Any]
) -> None:
    """And when it is gone, it has nothing."""
    options = events | {"endpoint": events["endpoint"] + "-2", "replay_endpoint": None}
    other = make_engine({"socket": daemon.socket}, kv_events_config=options, processes=True)
    other.one(prompt(50))
    until(lambda: resident(daemon) == 9, "it is known")
    other.close()
    until(lambda: not resident(daemon), "it is gone")


def test_without_events_nothing_is_said(daemon: Daemon, make_engine: MakeEngine) -> None:
    silent = make_engine({"socket": daemon.socket})
    silent.one(prompt(60))
    assert silent.ask("followed") is None
    assert resident(daemon) == 0
    collector = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:28999"}
    sends = make_engine({"socket": daemon.socket}, kv_events_config=collector)
    sends.one(prompt(61))
    assert sends.ask("followed") is None
    assert (
        "not told what the engine's own memory has" in sends.tail() or "tcp://127.0.0.1:28999" in sends.tail()
    )
    assert resident(daemon) == 0
