"""In-place changes of weights, by every way that vLLM's worker classes offer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvtier_vllm import weights
from kvtier_vllm.weights import WeightsWatch


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)
        return {name for name, _ in tensors}


class Worker:
    """As much of a vLLM worker as the hooks look at."""

    def __init__(self) -> None:
        self.model = Model()
        self.slept: list[int] = []

    def get_model(self) -> Model:
        return self.model

    def reload_weights(self, value: float) -> None:
        for parameter in self.model.parameters():
            parameter.data.fill_(value)

    def update_weights(self, info: dict[str, Any]) -> str:
        return f"updated {info}"

    def sleep(self, level: int = 1) -> None:
        self.slept.append(level)


@pytest.fixture
def worker() -> Worker:
    class Fresh(Worker):
        pass

    weights._announce_changes(Fresh)
    return Fresh()


@pytest.fixture
def told() -> list[None]:
    return []


@pytest.fixture
def watch(worker: Worker, told: list[None]) -> Iterator[WeightsWatch]:
    watch = WeightsWatch(lambda: told.append(None))
    watch.attach(worker)
    yield watch
    weights._watches.discard(watch)


def test_weights_that_are_left_alone_stay_valid(watch: WeightsWatch, worker: Worker) -> None:
    worker.model.layer(torch.ones(1, 4)).sum().backward()
    assert not watch.check().changed
    assert watch.state.epoch == 0


def test_load_weights_of_the_model_is_noticed_and_still_loads(watch: WeightsWatch, worker: Worker) -> None:
    loaded = worker.model.load_weights([("layer.bias", torch.full((4,), 2.0))])
    assert loaded == {"layer.bias"}
    assert worker.model.layer.bias[0].item() == 2.0
    assert watch.state.changed


def test_methods_of_the_worker_are_noticed_and_still_work(
    watch: WeightsWatch, worker: Worker, told: list[None]
) -> None:
    worker.reload_weights(3.0)
    assert worker.model.layer.bias[0].item() == 3.0
    assert watch.state.changed
    assert worker.update_weights({"a": 1}) == "updated {'a': 1}"
    assert watch.state.epoch == 2
    assert len(told) == 2


def test_writes_to_parameters_are_noticed(watch: WeightsWatch, worker: Worker) -> None:
    with torch.no_grad():
        worker.model.layer.bias.add_(1)
    assert watch.check().changed


def test_parameters_that_were_replaced_are_noticed(watch: WeightsWatch, worker: Worker) -> None:
    worker.model.layer.weight = torch.nn.Parameter(torch.zeros(4, 4))
    assert watch.check().changed


def test_sleep_stops_copies_and_only_level_two_changes_weights(
    watch: WeightsWatch, worker: Worker, told: list[None]
) -> None:
    worker.sleep()
    assert (worker.slept, len(told), watch.state.changed) == ([1], 1, False)
    worker.sleep(level=2)
    assert worker.slept == [1, 2]
    assert watch.state.changed


def test_a_revision_ends_the_pause(watch: WeightsWatch, worker: Worker) -> None:
    worker.reload_weights(1.0)
    with torch.no_grad():
        worker.model.layer.bias.add_(1)
    watch.revise("step-1")
    state = watch.check()
    assert (state.changed, state.revision, state.epoch) == (False, "step-1", 2)


@pytest.mark.parametrize("name", ["", "x" * 257, 7, None])
def test_a_revision_needs_a_name(watch: WeightsWatch, name: Any) -> None:
    with pytest.raises(ValueError, match="kvtier_set_revision"):
        watch.revise(name)
    assert watch.state.epoch == 0


def test_hooks_are_installed_once() -> None:
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    weights.install_hooks()
    before = (WorkerWrapperBase.execute_model, WorkerWrapperBase.initialize_from_config)
    weights.install_hooks()
    assert (WorkerWrapperBase.execute_model, WorkerWrapperBase.initialize_from_config) == before
    assert callable(WorkerBase.kvtier_set_revision)


def test_collective_rpc_sets_the_revision(watch: WeightsWatch, worker: Worker) -> None:
    assert weights._set_revision(worker, "step-2") >= 1
    assert watch.state.revision == "step-2"
