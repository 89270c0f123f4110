"""The scheduler's side alone: vLLM's calls in the order in which vLLM makes them, answers on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from kvtier_vllm import lookups as module
from kvtier_vllm.metadata import Handshake, StepOrders, StepReport, WeightsState
from kvtier_vllm.prefill import MIN_STEP_TOKENS, StepTime
from kvtier_vllm.scheduler import SchedulerSide
from kvtier_vllm.settings import Settings

from kvtier.types import Key, Layout, LayoutKind, LayoutOrder

TOKENS = 4
LAYOUT = Layout(LayoutKind.GQA, 2, 2, 8, "bfloat16", TOKENS, LayoutOrder.HND, 2 * 2 * 8 * 2 * TOKENS)


@dataclass
class _Offer:
    blocks: int
    estimate_s: float = 0.01
    reason: str = ""


@dataclass
class ScriptedNode:
    """Answers lookups when and as the test says."""

    blocks: int = 0
    reason: str = ""
    answering: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, list[Key]]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    block_compute_s: list[float] = field(default_factory=list)
    error: Exception | None = None

    def lookup(self, request_id: str, keys: list[Key], *, block_compute_s: float) -> _Offer:
        assert self.answering.wait(10)
        if keys:
            self.asked.append((request_id, keys))
            self.block_compute_s.append(block_compute_s)
        if self.error is not None:
            raise self.error
        return _Offer(min(self.blocks, len(keys)), reason=self.reason)

    def release_hold(self, request_id: str) -> None:
        self.released.append(request_id)

    def close(self) -> None:
        pass


class Manager:
    """vLLM's cache manager, as far as the connector looks at it."""

    def __init__(self) -> None:
        self.usage = 0.5
        self.resets = 0

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return self.usage == 0


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def request(name: str, num_tokens: int = 4 * TOKENS + 1, **values: Any) -> Any:
    plain = {
        "request_id": name,
        "prompt_token_ids": list(range(num_tokens)),
        "num_prompt_tokens": num_tokens,
        "num_tokens": num_tokens,
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
        "prefill_stats": None,
    }
    return SimpleNamespace(**(plain | values))


class Engine:
    """Calls the connector as vLLM's scheduler does."""

    def __init__(self, side: SchedulerSide) -> None:
        self.side = side
        self.tables: dict[str, list[int]] = {}
        self.next_block = 1

    def admit(self, asked: Any, external: int) -> list[int]:
        """vLLM found blocks for the request."""
        need = -(-asked.num_tokens // TOKENS)
        self.tables[asked.request_id] = list(range(self.next_block, self.next_block + need))
        self.next_block += need
        self.side.after_alloc(asked, self.tables[asked.request_id], external)
        return self.tables[asked.request_id]

    def step(self, scheduled: dict[str, int] | None = None, preempted: set[str] | None = None) -> StepOrders:
        scheduled = scheduled or {}
        state = SimpleNamespace(
            get_block_ids=lambda name: (self.tables[name],) if name in scheduled else None
        )
        return self.side.step_orders(
            SimpleNamespace(
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                preempted_req_ids=preempted,
                kv_connector_block_state=state,
            )
        )


@pytest.fixture
def node() -> ScriptedNode:
    node = ScriptedNode()
    node.answering.set()
    return node


@pytest.fixture
def make_side(node: ScriptedNode) -> Iterator[Callable[..., SchedulerSide]]:
    made: list[SchedulerSide] = []

    def make(**values: Any) -> SchedulerSide:
        settings = values.pop("settings", Settings(lookup_timeout_s=10.0))
        side = SchedulerSide(settings, b"w" * 32, "engine", 100, lambda _: node, **values)
        made.append(side)
        side.bind(Manager())
        side.shake_hands(Handshake(LAYOUT, "bfloat16"))
        return side

    yield make
    node.answering.set()
    for side in made:
        side.close()


@pytest.fixture
def side(make_side: Callable[..., SchedulerSide]) -> SchedulerSide:
    return make_side()


@pytest.fixture
def engine(side: SchedulerSide) -> Engine:
    return Engine(side)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def load(engine: Engine, asked: Any) -> StepOrders:
    """The request from arrival to the step that orders its load."""
    engine.side.on_new_request(asked)
    count, is_async = engine.side.matched_tokens(asked, 0)
    assert count
    assert is_async
    engine.admit(asked, count)
    return engine.step()


def test_an_offer_leaves_a_token_to_compute(side: SchedulerSide, node: ScriptedNode) -> None:
    node.blocks = 99
    for num_tokens, blocks in ((4 * TOKENS, 3), (4 * TOKENS + 1, 4), (TOKENS, 0), (TOKENS + 1, 1)):
        asked = request(f"r{num_tokens}", num_tokens)
        side.on_new_request(asked)
        assert side.matched_tokens(asked, 0) == (blocks * TOKENS, blocks > 0)


def test_only_what_is_beyond_the_engines_own_cache_is_offered(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 3
    asked = request("a")
    engine.side.on_new_request(asked)
    assert engine.side.matched_tokens(asked, TOKENS) == (2 * TOKENS, True)
    table = engine.admit(asked, 2 * TOKENS)
    (order,) = engine.step().loads
    assert order.block_ids == tuple(table[1:3])
    assert list(order.keys) == node.asked[0][1][1:3]
    for computed in (3 * TOKENS, 4 * TOKENS):
        asked = request(f"b{computed}")
        engine.side.on_new_request(asked)
        assert engine.side.matched_tokens(asked, computed) == (0, False)


def test_a_prompt_shorter_than_a_block_asks_nobody(side: SchedulerSide, node: ScriptedNode) -> None:
    asked = request("a", TOKENS - 1)
    side.on_new_request(asked)
    assert side.matched_tokens(asked, 0) == (0, False)
    assert side.counters.lookups == 0


def test_a_busy_engine_is_told_none_once_and_then_a_miss(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 4
    other = request("other")
    engine.side.on_new_request(other)
    engine.side.matched_tokens(other, 0)
    engine.admit(other, 0)
    engine.step({"other": 5})
    node.answering.clear()
    asked = request("a")
    engine.side.on_new_request(asked)
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    node.answering.set()
    until(lambda: "engine/a" in node.released)
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    assert engine.side.counters.late_lookups == 1


def test_a_busy_engine_takes_an_answer_that_came_within_the_step(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 4
    engine.admit(request("other"), 0)
    engine.step({"other": 5})
    node.answering.clear()
    asked = request("a")
    engine.side.on_new_request(asked)
    assert engine.side.matched_tokens(asked, 0) == (None, False)
    node.answering.set()
    until(lambda: len(node.asked) == 1)
    until(lambda: engine.side._requests["a"].lookup.answer())  # type: ignore[union-attr]
    assert engine.side.matched_tokens(asked, 0) == (4 * TOKENS, True)


def test_an_idle_engine_waits_for_the_answer(side: SchedulerSide, node: ScriptedNode) -> None:
    node.blocks = 4
    node.answering.clear()
    asked = request("a")
    side.on_new_request(asked)
    threading.Timer(0.05, node.answering.set).start()
    assert side.matched_tokens(asked, 0) == (4 * TOKENS, True)
    assert side.counters.asked_again == 0


def test_the_wait_of_an_idle_engine_ends_with_the_lookups_deadline(
    make_side: Callable[..., SchedulerSide], node: ScriptedNode
) -> None:
    side = make_side(settings=Settings(lookup_timeout_s=0.01))
    node.blocks = 4
    node.answering.clear()
    asked = request("a")
    side.on_new_request(asked)
    assert side.matched_tokens(asked, 0) == (0, False)
    assert side.counters.late_lookups == 1


def test_an_engine_whose_node_is_silent_does_not_wait_again(side: SchedulerSide, node: ScriptedNode) -> None:
    node.reason = "deadline"
    first = request("a")
    side.on_new_request(first)
    assert side.matched_tokens(first, 0) == (0, False)
    node.answering.clear()
    second = request("b")
    side.on_new_request(second)
    assert side.matched_tokens(second, 0) == (None, False)
    assert side.matched_tokens(second, 0) == (0, False)
    node.reason = ""
    node.answering.set()
    until(lambda: len(node.asked) == 2)
    node.blocks = 4
    third = request("c")
    side.on_new_request(third)
    assert side.matched_tokens(third, 0) == (4 * TOKENS, True)


def test_more_waiting_lookups_than_allowed_are_misses(
    make_side: Callable[..., SchedulerSide], node: ScriptedNode
) -> None:
    side = make_side(settings=Settings(lookup_timeout_s=10.0, max_lookups=2))
    node.blocks = 4
    node.answering.clear()
    asked = [request(name) for name in "abc"]
    for one in asked:
        side.on_new_request(one)
    assert side.matched_tokens(asked[2], 0) == (0, False)
    assert side.counters.crowded_lookups == 1
    node.answering.set()
    assert side.matched_tokens(asked[0], 0) == (4 * TOKENS, True)


def test_a_lookup_that_raises_is_a_miss(side: SchedulerSide, node: ScriptedNode) -> None:
    node.error = RuntimeError("broken")
    asked = request("a")
    side.on_new_request(asked)
    assert side.matched_tokens(asked, 0) == (0, False)


def test_an_offer_that_is_not_taken_is_given_back(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 4
    taken, refused, aborted = request("taken"), request("refused"), request("aborted")
    for asked in (taken, refused, aborted):
        engine.side.on_new_request(asked)
        assert engine.side.matched_tokens(asked, 0) == (4 * TOKENS, True)
    engine.admit(taken, 4 * TOKENS)
    engine.admit(refused, 0)
    assert engine.side.finished(aborted) is False
    until(lambda: len(node.released) == 2)
    assert set(node.released) == {"engine/refused", "engine/aborted"}


def test_an_offer_survives_until_vllm_has_room(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 4
    asked = request("a")
    engine.side.on_new_request(asked)
    assert engine.side.matched_tokens(asked, 0) == (4 * TOKENS, True)
    engine.step()
    assert engine.side.matched_tokens(asked, TOKENS) == (3 * TOKENS, True)
    engine.admit(asked, 3 * TOKENS)
    (order,) = engine.step().loads
    assert len(order.keys) == 3
    assert engine.step().loads == []


def test_an_old_offer_is_asked_for_again(make_side: Callable[..., SchedulerSide], node: ScriptedNode) -> None:
    clock = Clock()
    side = make_side(clock=clock)
    node.blocks = 4
    asked = request("a")
    side.on_new_request(asked)
    assert side.matched_tokens(asked, 0) == (4 * TOKENS, True)
    clock.now_s += module.RENEW_AFTER_S + 1
    node.blocks = 2
    assert side.matched_tokens(asked, 0) == (4 * TOKENS, True)
    until(lambda: len(node.asked) == 2)
    until(lambda: side.matched_tokens(asked, 0) == (2 * TOKENS, True))
    assert side.counters.lookups == 2


def test_a_stale_offer_is_not_used(make_side: Callable[..., SchedulerSide], node: ScriptedNode) -> None:
    clock = Clock()
    side = make_side(clock=clock)
    node.blocks = 4
    asked = request("a")
    side.on_new_request(asked)
    assert side.matched_tokens(asked, 0) == (4 * TOKENS, True)
    clock.now_s += module.STALE_AFTER_S + 1
    node.blocks = 1
    assert side.matched_tokens(asked, 0) == (TOKENS, True)


def test_the_budget_of_a_load_is_twice_its_estimate_with_a_floor(
    make_side: Callable[..., SchedulerSide], node: ScriptedNode
) -> None:
    for floor_s, budget_s in ((0.1, 0.1), (0.001, 0.02)):
        side = make_side(settings=Settings(lookup_timeout_s=10.0, load_floor_s=floor_s))
        node.blocks = 4
        (order,) = load(Engine(side), request("a")).loads
        assert order.budget_s == budget_s


def test_a_request_whose_load_failed_is_not_offered_again(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 4
    asked = request("a")
    load(engine, asked)
    engine.side.report(StepReport(loaded={"a": 0}), ())
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.admit(asked, 0)
    engine.step({"a": 17})
    engine.step(preempted={"a"})
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    assert engine.side.counters.failed_loads == 1


def test_a_preempted_request_is_offered_again_after_a_good_load(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 4
    asked = request("a")
    load(engine, asked)
    engine.side.report(StepReport(loaded={"a": 4}), ())
    engine.admit(asked, 0)
    engine.step({"a": 1})
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.step(preempted={"a"})
    asked.num_tokens += 1
    assert engine.side.matched_tokens(asked, 0) == (4 * TOKENS, True)


def test_cached_tokens_are_corrected_after_a_partial_load(engine: Engine, node: ScriptedNode) -> None:
    from vllm.v1.metrics.stats import PrefillStats

    node.blocks = 4
    asked = request("a", prefill_stats=PrefillStats())
    load(engine, asked)
    asked.prefill_stats.set(17, 0, 16)
    engine.side.report(StepReport(loaded={"a": 3}), ())
    assert asked.prefill_stats.num_cached_tokens == 12
    assert asked.prefill_stats.num_computed_tokens == 5


def test_whole_prompt_blocks_are_saved_as_steps_complete_them(engine: Engine, node: ScriptedNode) -> None:
    asked = request("a")
    engine.side.on_new_request(asked)
    engine.side.matched_tokens(asked, 0)
    table = engine.admit(asked, 0)
    keys = engine.side._requests["a"].prompt.keys
    assert keys is not None
    (first,) = engine.step({"a": 6}).saves
    assert (first.parent, first.keys, first.block_ids) == (None, (keys[0],), (table[0],))
    asked.num_computed_tokens = 6
    assert engine.step({"a": 1}).saves == []
    asked.num_computed_tokens = 7
    (second,) = engine.step({"a": 10}).saves
    assert (second.parent, second.keys, second.block_ids) == (keys[0], tuple(keys[1:4]), tuple(table[1:4]))
    # Decoding: no further block is a prompt's, however many are complete.
    for computed in range(17, 60):
        asked.num_computed_tokens, asked.num_tokens = computed, computed + 1
        assert engine.step({"a": 1}).saves == []


def test_what_the_node_has_is_not_saved_again(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 2
    asked = request("a")
    load(engine, asked)
    engine.side.report(StepReport(loaded={"a": 2}), ())
    engine.admit(asked, 0)
    asked.num_computed_tokens = 2 * TOKENS
    (save,) = engine.step({"a": 9}).saves
    assert len(save.keys) == 2
    assert save.parent == node.asked[0][1][1]


def test_blocks_whose_load_failed_are_saved_once_computed(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 4
    asked = request("a")
    load(engine, asked)
    engine.side.report(StepReport(loaded={"a": 1}), ())
    engine.admit(asked, 0)
    asked.num_computed_tokens = TOKENS
    (save,) = engine.step({"a": 13}).saves
    assert len(save.keys) == 3
    assert save.parent == node.asked[0][1][0]


def _compute(engine: Engine, asked: Any) -> StepOrders:
    engine.side.on_new_request(asked)
    until(lambda: engine.side._requests[asked.request_id].lookup.answer())  # type: ignore[union-attr]
    engine.side.matched_tokens(asked, 0)
    engine.admit(asked, 0)
    return engine.step({asked.request_id: asked.num_prompt_tokens})


def test_blocks_are_retained_while_they_are_saved(engine: Engine) -> None:
    asked = request("a")
    (save,) = _compute(engine, asked).saves
    assert engine.side.finished(asked) is True
    assert engine.side.has_pending_block_frees()
    assert engine.step().finishing == {"a"}
    assert engine.step().finishing == frozenset()
    engine.side.report(StepReport(saved=[save.job]), ("a",))
    assert not engine.side.has_pending_block_frees()


def test_blocks_are_not_retained_once_they_are_saved(engine: Engine) -> None:
    asked = request("a")
    (save,) = _compute(engine, asked).saves
    engine.side.report(StepReport(saved=[save.job]), ())
    assert engine.side.finished(asked) is False
    assert engine.step().finishing == frozenset()


def test_a_request_aborted_during_its_load_is_not_retained_twice(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 4
    asked = request("a")
    load(engine, asked)
    assert engine.side.finished(asked) is False
    engine.side.report(StepReport(loaded={"a": 4}), ())
    assert engine.step().finishing == frozenset()


def test_a_preempted_request_owes_nothing_for_its_cut_saves(engine: Engine) -> None:
    asked = request("a")
    (save,) = _compute(engine, asked).saves
    orders = engine.step(preempted={"a"})
    assert orders.preempted == {"a"}
    assert engine.side.finished(asked) is False
    engine.side.report(StepReport(saved=[save.job]), ())
    assert engine.side.save_book.blocks == 0


def test_a_request_preempted_and_resumed_in_one_step_saves_its_new_blocks(engine: Engine) -> None:
    asked = request("a")
    _compute(engine, asked)
    table = engine.admit(asked, 0)
    orders = engine.step({"a": 17}, preempted={"a"})
    assert orders.preempted == {"a"}
    assert orders.saves[0].block_ids == tuple(table[:4])


def test_saves_that_find_no_room_wait_for_a_later_step(
    make_side: Callable[..., SchedulerSide], node: ScriptedNode
) -> None:
    side = make_side(settings=Settings(lookup_timeout_s=10.0, save_fraction=0.06))
    engine = Engine(side)
    (first,) = _compute(engine, request("a")).saves
    second = request("b")
    (part,) = _compute(engine, second).saves
    assert (len(first.keys), len(part.keys)) == (4, 2)
    second.num_computed_tokens = 17
    assert engine.step({"b": 1}).saves == []
    side.report(StepReport(saved=[first.job]), ())
    (rest,) = engine.step({"b": 1}).saves
    assert (rest.keys[0], rest.parent) == (node.asked[1][1][2], part.keys[-1])
    assert side.counters.crowded_saves == 2


def test_tenant_salt_and_generation_part_the_keys(
    make_side: Callable[..., SchedulerSide], node: ScriptedNode
) -> None:
    sides = [make_side(settings=Settings(tenant=tenant)) for tenant in ("", "a")]
    for number, (one, salt) in enumerate(((sides[0], None), (sides[0], "s"), (sides[1], None))):
        one.on_new_request(request(f"r{number}", cache_salt=salt))
        until(lambda expected=number + 1: len(node.asked) == expected)  # type: ignore[misc]
    sides[0]._kv_cache_manager.usage = 0
    sides[0].reset_cache()
    sides[0].on_new_request(request("again"))
    until(lambda: len(node.asked) == 4)
    assert len({keys[0] for _, keys in node.asked}) == 4


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"lora_request": object()}, "a LoRA adapter"),
        ({"mm_features": [object()]}, "multimodal input"),
        ({"prompt_embeds": object()}, "prompt embeddings"),
        ({"prompt_token_ids": None}, "prompt embeddings"),
        ({"resumable": True}, "a prompt that grows while it runs"),
    ],
)
def test_requests_beyond_tokens_and_salt_pass_by(
    engine: Engine, caplog: pytest.LogCaptureFixture, values: dict[str, Any], reason: str
) -> None:
    import logging

    logging.getLogger("vllm").propagate = True
    for name in "abc":
        asked = request(name, **values)
        engine.side.on_new_request(asked)
        assert engine.side.matched_tokens(asked, 0) == (0, False)
        engine.admit(asked, 0)
        assert engine.step({name: 17}).saves == []
        assert engine.side.finished(asked) is False
    assert engine.side.counters.bypassed == {reason: 3}
    assert engine.side.counters.lookups == 0
    assert sum(reason in record.getMessage() for record in caplog.records) == 1
    caplog.set_level(logging.INFO, "vllm.kvtier")
    engine.side.close()
    assert caplog.records[-1].getMessage() == f"kvtier: 3 requests with {reason} were not cached"


def test_a_request_that_may_not_read_the_cache_is_saved_all_the_same(
    engine: Engine, node: ScriptedNode
) -> None:
    node.blocks = 4
    asked = request("a", skip_reading_prefix_cache=True)
    engine.side.on_new_request(asked)
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.admit(asked, 0)
    until(lambda: engine.side._requests["a"].prompt.keys is not None)
    (save,) = engine.step({"a": 17}).saves
    assert len(save.keys) == 4
    assert node.asked == []


def test_producers_do_not_load_and_consumers_do_not_save(
    make_side: Callable[..., SchedulerSide], node: ScriptedNode
) -> None:
    node.blocks = 2
    producer, consumer = Engine(make_side(loads=False)), Engine(make_side(saves=False))
    asked = request("a")
    producer.side.on_new_request(asked)
    assert producer.side.matched_tokens(asked, 0) == (0, False)
    assert load(consumer, request("b")).loads
    consumer.side.report(StepReport(loaded={"b": 2}), ())
    assert consumer.step({"b": 9}).saves == []


def test_a_reset_ends_offers_and_saves_of_the_requests_before_it(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 4
    waiting, running = request("waiting"), request("running")
    engine.side.on_new_request(waiting)
    assert engine.side.matched_tokens(waiting, 0) == (4 * TOKENS, True)
    node.blocks = 0
    engine.side.on_new_request(running)
    engine.side.matched_tokens(running, 0)
    engine.admit(running, 0)
    assert engine.side.reset_cache() is True
    assert engine.side.matched_tokens(waiting, 0) == (0, False)
    assert engine.step({"running": 17}).saves == []


def test_after_a_reset_nothing_is_cached_until_the_engines_own_cache_is_empty(
    engine: Engine, node: ScriptedNode
) -> None:
    manager = engine.side._kv_cache_manager
    engine.side.reset_cache()
    engine.side.on_new_request(request("a"))
    assert engine.side.counters.lookups == 0
    assert manager.resets == 0
    manager.usage = 0
    engine.side.on_new_request(request("b"))
    assert manager.resets == 1
    assert engine.side.counters.lookups == 1


def test_changed_weights_end_everything_until_they_have_a_name(engine: Engine, node: ScriptedNode) -> None:
    node.blocks = 4
    engine.side._kv_cache_manager.usage = 0
    before = request("before")
    engine.side.on_new_request(before)
    assert engine.side.matched_tokens(before, 0) == (4 * TOKENS, True)
    engine.side.report(StepReport(weights=WeightsState(1, True, "", "test")), ())
    assert engine.side.matched_tokens(before, 0) == (0, False)
    for _ in range(2):
        engine.side.on_new_request(request("during"))
        engine.side.reset_cache()
    assert engine.side.counters.lookups == 1
    engine.side.report(StepReport(weights=WeightsState(2, False, "step-1")), ())
    assert engine.step().epoch == 2
    after = request("after")
    engine.side.on_new_request(after)
    assert engine.side.matched_tokens(after, 0) == (4 * TOKENS, True)
    assert node.asked[0][1][0] != node.asked[1][1][0]


def test_two_names_of_weights_share_no_key(engine: Engine, node: ScriptedNode) -> None:
    engine.side._kv_cache_manager.usage = 0
    for epoch, name in enumerate(("one", "two", "one"), start=1):
        engine.side.report(StepReport(weights=WeightsState(epoch, False, name)), ())
        engine.side.on_new_request(request(f"r{epoch}"))
        until(lambda expected=epoch: len(node.asked) == expected)  # type: ignore[misc]
    first, second, third = (keys[0] for _, keys in node.asked)
    assert first != second
    assert first == third


def test_lookups_say_what_a_block_costs_to_compute(engine: Engine, node: ScriptedNode) -> None:
    for number in range(2):
        engine.side.report(StepReport(computed=[StepTime(1000, 2.0)]), ())
        asked = request(f"r{number}")
        engine.side.on_new_request(asked)
        engine.side.matched_tokens(asked, 0)
    assert node.block_compute_s == [0.0, pytest.approx(0.002 * TOKENS)]


def test_the_worker_times_steps_that_compute_prompts(engine: Engine) -> None:
    long, short = request("long", 4 * MIN_STEP_TOKENS), request("short")
    for asked in (long, short):
        engine.side.on_new_request(asked)
        engine.side.matched_tokens(asked, 0)
        engine.admit(asked, 0)
    short.num_computed_tokens = short.num_prompt_tokens
    both = {"long": MIN_STEP_TOKENS, "short": 1}
    assert engine.step(both).timed_tokens == MIN_STEP_TOKENS + 1
    assert engine.step({"short": 1}).timed_tokens == 0
    assert engine.step({"foreign": MIN_STEP_TOKENS} | both).timed_tokens == 0
    long.num_computed_tokens = long.num_prompt_tokens
    assert engine.step(both).timed_tokens == 0
