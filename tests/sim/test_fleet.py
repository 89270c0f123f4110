"""Histories of many nodes: those that once failed, a fixed set, and bugs that have to be found."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import structlog

from kvtier.testing.fleet import Fleet, main
from kvtier.testing.simulated_node import Violation
from tests.sim.planted_fleet import PLANTS, Plant

SEEDS: dict[str, Any] = json.loads((Path(__file__).parent / "fleet_seeds.json").read_text())
SECONDS: float = SEEDS["seconds"]
PLANT_SEEDS = 250


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Faults are what happens here all the time: to write them down would take longer than all else."""
    before = structlog.get_config()
    filtering = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=filtering, processors=[_drop])
    yield
    structlog.configure(**before)


def _drop(*_: Any) -> NoReturn:
    raise structlog.DropEvent


@pytest.mark.parametrize("seed", [entry["seed"] for entry in SEEDS["found"]])
def test_histories_that_once_failed(seed: int) -> None:
    Fleet(seed).run(SECONDS)


def test_a_fixed_set_of_histories_in_which_everything_happens() -> None:
    loaded, happened = _run(range(SEEDS["always"]["first"], SEEDS["always"]["end"]))
    often = {"granted", "offered", "offered coming", "Located", "Acquire", "pulled", "arrived", "ready"}
    often |= {"pull ended", "pull failed", "message lost", "index fault", "partition", "flipped", "probe"}
    rarely = {"EngineDied", "Release refused", "Pin", "Evict", "Dropped", "lost", "agent destroyed"}
    rarely |= {"crash", "fenced", "wrong page", "index lost", "index down"}
    assert all(happened[name] >= 20 for name in often), happened
    assert all(happened[name] >= 1 for name in rarely), happened
    assert loaded > 1000


@pytest.mark.slow
def test_many_histories() -> None:
    loaded, happened = _run(range(SEEDS["long"]["first"], SEEDS["long"]["end"]))
    assert loaded > 5000
    assert happened["fenced"] >= 5


def _run(seeds: Iterable[int]) -> tuple[int, Counter[str]]:
    happened: Counter[str] = Counter()
    loaded = 0
    for seed in seeds:
        result = Fleet(seed).run(SECONDS)
        loaded += result.loaded_blocks
        happened.update(result.counts)
    return loaded, happened


def test_a_seed_is_one_history() -> None:
    results = [Fleet(11).run(10) for _ in range(2)]
    assert results[0] == results[1]
    assert Fleet(12).run(10) != results[0]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, AssertionError, LookupError)):
        _run_without_checks(dict.fromkeys([SEEDS["plants"].get(plant.__name__, 0), *range(PLANT_SEEDS)]))


def _run_without_checks(seeds: Iterable[int]) -> None:
    for seed in seeds:
        Fleet(seed, checks_cores=False).run(SECONDS)


def test_the_command_reports_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3:5", "--seconds", "5"]) == 0
    assert capsys.readouterr().out.startswith("2 seeds, ")


def test_the_command_names_a_failing_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = next(plant for plant in PLANTS if plant.__name__ == "blocks_arrive_before_they_are_here")
    plant(monkeypatch)
    assert main(["--seeds", "0:50"]) == 1
    assert "failed: --seeds " in capsys.readouterr().err
