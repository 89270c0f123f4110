"""A real vLLM engine and a real daemon: what is loaded computes what would have been computed."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.connectors.daemon import Daemon
from tests.connectors.engine import BLOCK_TOKENS, Answer, Engine

pytestmark = pytest.mark.slow


def prompt(seed: int, num_tokens: int = 300, prefix: list[int] | None = None) -> list[int]:
    numbers = random.Random(seed)
    head = prefix or []
    return head + [numbers.randrange(3, 500) for _ in range(num_tokens - len(head))]


@pytest.fixture(scope="module")
def engine(daemon: Daemon, make_engine: Callable[..., Engine]) -> Engine:
    return make_engine({"socket": daemon.socket, "verify_loads": "all"})


@pytest.fixture(autouse=True)
def nothing_is_left_over(engine: Engine, daemon: Daemon) -> Iterator[None]:
    yield
    engine.ask("drain")
    counters = engine.counters()
    left = {name: counters[name] for name in ("usage", "requests", "tracked", "saving")}
    assert left == {"usage": 0, "requests": 0, "tracked": 0, "saving": 0}


def saved(engine: Engine, daemon: Daemon, tokens: list[int], **options: str) -> Answer:
    """Computed once, saved, and forgotten by the engine itself."""
    before = daemon.blocks()
    answer = engine.one(tokens, **options)
    daemon.wait_for_blocks(before + len(tokens) // BLOCK_TOKENS)
    engine.drop_own_cache()
    return answer


def test_the_policy_is_recompute_without_a_word_from_the_user(engine: Engine) -> None:
    assert engine.counters()["recompute"] is True


def test_cold_hot_and_loaded_are_equal(engine: Engine, daemon: Daemon) -> None:
    tokens = prompt(1)
    cold = engine.one(tokens, max_tokens=24)
    hot = engine.one(tokens, max_tokens=24)
    engine.drop_own_cache()
    loaded = engine.one(tokens, max_tokens=24)
    assert cold.text == hot.text == loaded.text
    whole = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    assert (cold.cached, hot.cached, loaded.cached) == (0, whole, whole)
    # Another first token, and all KV behind it is another one: the comparison sees KV.
    other = engine.one([tokens[0] + 1, *tokens[1:]], max_tokens=24)
    assert other.text != cold.text


def test_the_engine_learns_how_fast_it_computes(engine: Engine, daemon: Daemon) -> None:
    for seed in (900, 901):  # the very first step does not count
        tokens = prompt(seed)
        saved(engine, daemon, tokens)
    computed_s = engine.counters()["block_compute_s"]
    assert 1e-6 < computed_s < 10
    before = engine.counters()["loaded_blocks"]
    engine.one(tokens)  # what is loaded is not computed, and says nothing
    assert engine.counters()["loaded_blocks"] > before
    assert engine.counters()["block_compute_s"] == computed_s


def test_a_prompt_of_whole_blocks_leaves_its_last_block_to_compute(engine: Engine, daemon: Daemon) -> None:
    tokens = prompt(2, 4 * BLOCK_TOKENS)
    cold = saved(engine, daemon, tokens)
    loaded = engine.one(tokens)
    assert (loaded.text, loaded.cached) == (cold.text, 3 * BLOCK_TOKENS)


def test_an_engine_started_anew_loads_what_the_last_one_saved(
    engine: Engine, daemon: Daemon, make_engine: Callable[..., Engine]
) -> None:
    tokens = prompt(3)
    cold = saved(engine, daemon, tokens)
    anew = make_engine({"socket": daemon.socket})
    loaded = anew.one(tokens)
    assert (loaded.text, loaded.cached) == (cold.text, 288)
    anew.close()


def test_decoded_tokens_are_never_saved(engine: Engine, daemon: Daemon) -> None:
    before = daemon.blocks()
    engine.one(prompt(4, BLOCK_TOKENS + 8), max_tokens=4 * BLOCK_TOKENS)
    daemon.wait_for_blocks(before + 1)
    # A further request is saved after everything that came before it.
    engine.one(prompt(5, BLOCK_TOKENS + 8))
    daemon.wait_for_blocks(before + 2)


def test_a_known_prefix_is_loaded_and_the_rest_is_saved(engine: Engine, daemon: Daemon) -> None:
    first = prompt(6)
    saved(engine, daemon, first)
    longer = prompt(7, 600, prefix=first[:256])
    before = daemon.blocks()
    cold = engine.one(longer)
    assert cold.cached == 256
    daemon.wait_for_blocks(before + 600 // BLOCK_TOKENS - 8)
    engine.drop_own_cache()
    again = engine.one(longer)
    assert (again.text, again.cached) == (cold.text, 576)


def test_salts_do_not_meet(engine: Engine, daemon: Daemon) -> None:
    tokens = prompt(8)
    saved(engine, daemon, tokens, salt="a")
    assert engine.one(tokens, salt="b").cached == 0
    engine.drop_own_cache()
    assert engine.one(tokens).cached == 0
    engine.drop_own_cache()
    assert engine.one(tokens, salt="a").cached == 288


def test_many_requests_at_once_with_shared_prefixes(engine: Engine, daemon: Daemon) -> None:
    stem = prompt(9, 256)
    prompts = [prompt(10 + index, 300 + 7 * index, prefix=stem) for index in range(12)]
    alone = [engine.one(tokens, salt="never saved before") for tokens in prompts]
    engine.drop_own_cache()
    together = engine.generate(*prompts)
    engine.drop_own_cache()
    before = engine.counters()["loaded_blocks"]
    loaded = engine.generate(*prompts)
    for answers in (together, loaded):
        assert all(one.agrees(other) for one, other in zip(answers, alone, strict=True))
    # Those whose lookup is late on a busy engine are computed.
    assert engine.counters()["loaded_blocks"] >= before + 8


def test_requests_aborted_during_their_load_leave_nothing_behind(engine: Engine, daemon: Daemon) -> None:
    tokens = prompt(30, 900)
    cold = saved(engine, daemon, tokens)
    for _ in range(5):
        names = [f"abort-{index}" for index in range(4)]
        for name in names:
            engine.ask("add", name=name, prompt=tokens, max_tokens=4)
        engine.ask("abort", names=names[:2])
        engine.ask("step")
        engine.ask("abort", names=names[2:])
        engine.ask("drain")
    engine.drop_own_cache()
    assert engine.one(tokens).text == cold.text


def test_requests_aborted_during_their_save_leave_nothing_behind(engine: Engine, daemon: Daemon) -> None:
    for index in range(5):
        engine.ask("add", name="abort", prompt=prompt(40 + index, 500), max_tokens=4)
        engine.ask("step", count=1 + index % 3)
        engine.ask("abort", names=["abort"])
        engine.ask("drain")
    tokens = prompt(40, 500)
    first = engine.one(tokens)
    engine.drop_own_cache()
    assert engine.one(tokens).text == first.text


def test_a_reset_forgets_and_begins_anew(engine: Engine, daemon: Daemon) -> None:
    tokens = prompt(51)
    cold = saved(engine, daemon, tokens)
    engine.drop_own_cache(connector=True)
    again = engine.one(tokens)
    assert (again.text, again.cached) == (cold.text, 0)
    engine.drop_own_cache()
    assert engine.one(tokens).cached == 288


def test_weights_that_change_in_place_stop_caching_until_they_have_a_name(
    engine: Engine, daemon: Daemon
) -> None:
    tokens = prompt(52)
    cold = saved(engine, daemon, tokens)
    engine.ask("rpc", method="reload_weights", args=[])
    before = daemon.blocks()
    for _ in range(3):
        answer = engine.one(tokens)
        assert (answer.text, answer.cached) == (cold.text, 0)
        engine.drop_own_cache(connector=True)
    assert daemon.blocks() == before
    engine.ask("rpc", method="kvtier_set_revision", args=["step-1"])
    # The next request tells the scheduler; the one after it is cached again, under new keys.
    engine.one(prompt(53))
    engine.drop_own_cache()
    assert engine.one(tokens).cached == 0
    daemon.wait_for_blocks(before + 9)
    engine.drop_own_cache()
    assert engine.one(tokens).cached == 288


def test_a_silent_daemon_costs_no_request(engine: Engine, daemon: Daemon) -> None:
    tokens = prompt(54)
    cold = saved(engine, daemon, tokens)
    daemon.signal(signal.SIGSTOP)
    try:
        silent = engine.generate(tokens, prompt(55), prompt(56))
    finally:
        daemon.signal(signal.SIGCONT)
    assert silent[0].agrees(cold)
    _until_loaded(engine, tokens, 288)


def test_a_daemon_killed_between_offer_and_load_costs_no_request(engine: Engine, daemon: Daemon) -> None:
    tokens = prompt(57, 900)
    cold = saved(engine, daemon, tokens)
    for _ in range(2):
        engine.ask("add", name="victim", prompt=tokens, max_tokens=4)
    daemon.kill()
    engine.ask("drain")
    assert engine.one(tokens).text == cold.text
    engine.drop_own_cache()
    assert engine.one(tokens).text == cold.text
    daemon.start()
    _until_loaded(engine, tokens, 896)


# Last: what is damaged here stays damaged.
def test_damaged_blocks_are_computed(engine: Engine, daemon: Daemon) -> None:
    tokens = prompt(50, 500)
    cold = saved(engine, daemon, tokens)
    failed = engine.counters()["failed_loads"]
    assert daemon.corrupt() > 0
    damaged = engine.one(tokens)
    assert damaged.text == cold.text
    assert engine.counters()["failed_loads"] == failed + 1
    engine.drop_own_cache()
    repaired = engine.one(tokens)
    assert repaired.text == cold.text


def _until_loaded(engine: Engine, tokens: list[int], cached: int) -> None:
    """The node is back: within a few requests it serves again."""
    for _ in range(100):
        engine.drop_own_cache()
        answer = engine.one(tokens)
        if answer.cached == cached:
            return
    raise AssertionError(f"{answer.cached} of {cached} tokens are loaded\n{engine.tail()}")
