"""The worker's side alone, with real threads and tensors, and a node that lives in a dictionary."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kvtier_vllm.metadata import Handshake, LoadOrder, SaveOrder, StepOrders, StepReport, hold_id
from kvtier_vllm.settings import Settings
from kvtier_vllm.worker import WorkerSide

from kvtier.types import MAX_REQUEST_ID_CHARS, Key, Layout, LayoutKind, LayoutOrder

LAYOUT = Layout(LayoutKind.GQA, 2, 2, 8, "bfloat16", 4, LayoutOrder.HND, 256)
BLOCKS = 16


@dataclass
class _Loaded:
    loaded: int
    failed_reason: str = ""


@dataclass
class _Stored:
    committed: int
    reason: str = ""


class DictNode:
    """Keeps blocks in a dictionary; copies pause between blocks while `pausing` is set."""

    def __init__(self) -> None:
        self.blocks: dict[Key, list[torch.Tensor]] = {}
        self.pausing = threading.Event()
        self.copying = threading.Event()
        self.prepared = threading.Event()
        self.most_loads = 1 << 30
        self.failed_reason = "test"
        self.budgets: list[float | None] = []
        self.closed = 0

    def _pause(self, stop: threading.Event | None) -> bool:
        self.copying.set()
        while self.pausing.is_set() and not (stop is not None and stop.is_set()):
            time.sleep(0.001)
        return stop is not None and stop.is_set()

    def prepare(self) -> bool:
        self.prepared.set()
        return True

    def load(
        self,
        request_id: str,
        keys: list[Key],
        pages: Sequence[torch.Tensor],
        block_ids: list[int],
        *,
        budget_s: float | None,
    ) -> _Loaded:
        self.budgets.append(budget_s)
        self._pause(None)
        for count, (key, block) in enumerate(zip(keys, block_ids, strict=True)):
            if count == self.most_loads or key not in self.blocks:
                return _Loaded(count, self.failed_reason)
            for layer, bytes_ in zip(pages, self.blocks[key], strict=True):
                layer[block] = bytes_
        return _Loaded(len(keys))

    def store(
        self,
        parent: Key | None,
        keys: list[Key],
        pages: Sequence[torch.Tensor],
        block_ids: list[int],
        *,
        stop: threading.Event | None,
        timeout_s: float,
    ) -> _Stored:
        copied = []
        for block in block_ids:
            if self._pause(stop):
                return _Stored(0)
            copied.append([layer[block].clone() for layer in pages])
        self.blocks.update(zip(keys, copied, strict=True))
        return _Stored(len(keys))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def node() -> DictNode:
    return DictNode()


@pytest.fixture
def memory() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (BLOCKS, 256), dtype=torch.uint8, generator=generator) for _ in range(2)]


@pytest.fixture
def worker(node: DictNode, memory: list[torch.Tensor]) -> Iterator[WorkerSide]:
    worker = WorkerSide(Settings(), "engine")
    worker.serve(memory, Handshake(LAYOUT, "bfloat16"), lambda _: node, lambda rows, _: rows)
    yield worker
    node.pausing.clear()
    worker.close()


def _key(number: int) -> Key:
    return bytes([number]) * 32


def _save(job: int, request: str, *blocks: int) -> SaveOrder:
    return SaveOrder(job, request, None, tuple(_key(b) for b in blocks), blocks)


def _load(request: str, keys: Sequence[int], blocks: Sequence[int]) -> LoadOrder:
    return LoadOrder(request, tuple(_key(k) for k in keys), tuple(blocks), 0.25)


@dataclass
class Step:
    sent: set[str]
    loaded: set[str]
    invalid: set[int]
    report: StepReport | None


def step(worker: WorkerSide, **orders: Any) -> Step:
    """One step, in vLLM's order."""
    worker.begin_step(StepOrders(**({"epoch": 0} | orders)))
    worker.end_step()
    sent, loaded = worker.take_finished()
    return Step(sent, loaded, worker.take_invalid_blocks(), worker.take_report())


def until(worker: WorkerSide, condition: Callable[[Step], Any], **orders: Any) -> Step:
    """Empty steps until one satisfies the condition."""
    deadline_s = time.monotonic() + 10
    while True:
        taken = step(worker, idle=True, **orders)
        if condition(taken):
            return taken
        assert time.monotonic() < deadline_s


def test_what_was_saved_is_loaded(worker: WorkerSide, memory: list[torch.Tensor]) -> None:
    before = [layer.clone() for layer in memory]
    step(worker, saves=[_save(7, "a", 1, 2, 3)])
    taken = until(worker, lambda one: one.report)
    assert taken.report is not None
    assert taken.report.saved == [7]
    step(worker, loads=[_load("b", [1, 2, 3], [4, 5, 6])])
    taken = until(worker, lambda one: one.loaded)
    assert (taken.loaded, taken.invalid) == ({"b"}, set())
    assert taken.report is not None
    assert taken.report.loaded == {"b": 3}
    for layer, old in zip(memory, before, strict=True):
        assert torch.equal(layer[4:7], old[1:4])


def test_connecting_begins_with_the_engine(worker: WorkerSide, node: DictNode) -> None:
    assert node.prepared.wait(10)


def test_a_save_begins_with_the_next_step(worker: WorkerSide, node: DictNode) -> None:
    step(worker, saves=[_save(0, "a", 1)])
    assert not node.copying.wait(0.05)
    step(worker)
    assert node.copying.wait(10)


def test_a_step_that_ends_after_its_report_saves_all_the_same(worker: WorkerSide, node: DictNode) -> None:
    worker.begin_step(StepOrders(epoch=0, saves=[_save(3, "a", 1)]))
    assert worker.take_finished() == (set(), set())
    assert worker.take_report() is None
    worker.end_step()
    taken = until(worker, lambda one: one.report)
    assert taken.report is not None
    assert taken.report.saved == [3]
    assert set(node.blocks) == {_key(1)}


def test_a_step_that_never_ends_saves_nothing_and_retains_nothing(worker: WorkerSide, node: DictNode) -> None:
    worker.begin_step(StepOrders(epoch=0, saves=[_save(3, "a", 1)]))
    taken = step(worker, finishing=frozenset({"a"}))
    assert taken.sent == {"a"}
    assert taken.report is not None
    assert taken.report.saved == [3]
    assert node.blocks == {}


def test_a_load_begins_with_its_step_and_gets_its_budget(worker: WorkerSide, node: DictNode) -> None:
    worker.begin_step(StepOrders(epoch=0, loads=[_load("a", [1], [2])]))
    assert node.copying.wait(10)
    until(worker, lambda one: one.loaded)
    assert node.budgets == [0.25]


def test_blocks_that_did_not_come_are_reported_with_their_request(worker: WorkerSide, node: DictNode) -> None:
    node.blocks = {_key(k): [torch.zeros(256, dtype=torch.uint8)] * 2 for k in range(9)}
    node.most_loads = 2
    step(worker, loads=[_load("a", [1, 2, 3, 4], [9, 8, 7, 6])])
    taken = until(worker, lambda one: one.loaded or one.invalid)
    assert (taken.loaded, taken.invalid) == ({"a"}, {7, 6})
    assert taken.report is not None
    assert taken.report.loaded == {"a": 2}
    again = step(worker)
    assert (again.loaded, again.invalid, again.report) == (set(), set(), None)


def test_a_node_that_does_not_answer_fails_the_loads_behind_as_well(
    worker: WorkerSide, node: DictNode
) -> None:
    node.pausing.set()
    node.failed_reason = "unreachable"
    step(worker, loads=[_load(name, [1], [block]) for block, name in enumerate("abcd", 1)])
    assert node.copying.wait(10)
    node.pausing.clear()
    loaded: set[str] = set()
    invalid: set[int] = set()

    def collect(one: Step) -> bool:
        loaded.update(one.loaded)
        invalid.update(one.invalid)
        return len(loaded) == 4

    until(worker, collect)
    assert invalid == {1, 2, 3, 4}
    assert len(node.budgets) == 1


def test_blocks_are_released_when_their_save_has_ended_and_once(worker: WorkerSide, node: DictNode) -> None:
    node.pausing.set()
    step(worker, saves=[_save(0, "a", 1), _save(1, "a", 2)])
    taken = step(worker, finishing=frozenset({"a"}))
    assert node.copying.wait(10)
    assert taken.sent == set()
    assert step(worker).sent == set()
    node.pausing.clear()
    until(worker, lambda one: one.sent == {"a"})
    assert set(node.blocks) == {_key(1), _key(2)}
    for _ in range(3):
        assert step(worker).sent == set()


def test_blocks_whose_save_had_ended_before_are_released_at_once(worker: WorkerSide) -> None:
    step(worker, saves=[_save(0, "a", 1)])
    until(worker, lambda one: one.report)
    assert step(worker, finishing=frozenset({"a"})).sent == {"a"}


def test_no_copy_of_a_preempted_request_runs_when_its_blocks_are_overwritten(
    worker: WorkerSide, node: DictNode, memory: list[torch.Tensor]
) -> None:
    node.pausing.set()
    step(worker, saves=[_save(0, "a", 1, 2), _save(1, "b", 3)])
    step(worker)
    assert node.copying.wait(10)
    worker.begin_step(StepOrders(epoch=0, preempted=frozenset({"a"})))
    for layer in memory:
        layer[1:3] = 0
    node.pausing.clear()
    taken = until(worker, lambda one: one.report and 1 in one.report.saved)
    assert taken.invalid == set()
    assert set(node.blocks) == {_key(3)}


def test_a_save_that_waits_for_its_turn_is_dropped_by_a_preemption(
    worker: WorkerSide, node: DictNode
) -> None:
    step(worker, saves=[_save(0, "a", 1)])
    taken = step(worker, preempted=frozenset({"a"}))
    assert taken.report is not None
    assert taken.report.saved == [0]
    assert step(worker, finishing=frozenset({"a"})).sent == {"a"}
    assert node.blocks == {}


def test_a_save_past_its_deadline_is_stopped_and_its_blocks_released(
    node: DictNode, memory: list[torch.Tensor]
) -> None:
    worker = WorkerSide(Settings(save_timeout_s=0.05), "engine")
    worker.serve(memory, Handshake(LAYOUT, "bfloat16"), lambda _: node, lambda rows, _: rows)
    node.pausing.set()
    step(worker, saves=[_save(0, "a", 1)])
    step(worker, finishing=frozenset({"a"}))
    until(worker, lambda one: one.sent == {"a"})
    assert node.blocks == {}
    worker.close()


def test_changed_weights_fail_loads_and_drop_saves(worker: WorkerSide, node: DictNode) -> None:
    node.blocks = {_key(1): [torch.zeros(256, dtype=torch.uint8)] * 2}
    worker.watch.changed("test")
    taken = step(worker, loads=[_load("a", [1], [5])], saves=[_save(0, "b", 2)])
    assert taken.report is not None
    assert taken.report.weights == worker.watch.state
    if not taken.loaded:
        taken = until(worker, lambda one: one.loaded)
    assert (taken.loaded, taken.invalid) == ({"a"}, {5})
    step(worker)
    assert set(node.blocks) == {_key(1)}
    assert node.budgets == []


def test_a_load_that_runs_while_weights_change_is_not_in_place(worker: WorkerSide, node: DictNode) -> None:
    node.blocks = {_key(1): [torch.zeros(256, dtype=torch.uint8)] * 2}
    node.pausing.set()
    step(worker, loads=[_load("a", [1], [5])])
    assert node.copying.wait(10)
    threading.Timer(0.05, node.pausing.clear).start()
    worker.watch.changed("test")
    taken = until(worker, lambda one: one.loaded)
    assert taken.invalid == {5}


def test_orders_under_another_revision_than_the_workers_are_void(worker: WorkerSide, node: DictNode) -> None:
    node.blocks = {_key(1): [torch.zeros(256, dtype=torch.uint8)] * 2}
    worker.watch.changed("test")
    worker.watch.revise("new")
    state = worker.watch.state
    step(worker, epoch=state.epoch - 1, loads=[_load("a", [1], [5])], saves=[_save(0, "b", 2)])
    assert until(worker, lambda one: one.loaded, epoch=state.epoch - 1).invalid == {5}
    step(worker, epoch=state.epoch, loads=[_load("c", [1], [6])])
    taken = until(worker, lambda one: one.loaded, epoch=state.epoch)
    assert (taken.loaded, taken.invalid) == ({"c"}, set())
    assert taken.report is not None
    assert taken.report.weights is None


def test_closing_stops_copies_and_can_be_repeated(node: DictNode, memory: list[torch.Tensor]) -> None:
    worker = WorkerSide(Settings(), "engine")
    worker.close()
    worker = WorkerSide(Settings(), "engine")
    worker.serve(memory, Handshake(LAYOUT, "bfloat16"), lambda _: node, lambda rows, _: rows)
    node.pausing.set()
    step(worker, saves=[_save(0, "a", 1)])
    step(worker)
    assert node.copying.wait(10)
    worker.close()
    worker.close()
    assert node.closed >= 1
    assert node.blocks == {}


def test_timed_steps_are_reported_once(worker: WorkerSide) -> None:
    for tokens in (512, 0):
        worker.begin_step(StepOrders(0, timed_tokens=tokens))
        worker.end_step()
    report = worker.take_report()
    assert report is not None
    assert [step.tokens for step in report.computed] == [512]
    assert report.computed[0].seconds > 0
    assert worker.take_report() is None


def test_any_request_id_makes_a_name_that_the_node_takes() -> None:
    assert hold_id("engine", "cmpl-1") == "engine/cmpl-1"
    odd = [hold_id("engine", id) for id in ("x" * 400, "x" * 401, "two\nlines", "\ud800", "y" * 249)]
    assert all(len(name) <= MAX_REQUEST_ID_CHARS and name.isprintable() for name in odd)
    assert len(set(odd)) == len(odd)
