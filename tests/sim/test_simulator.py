"""Histories of one node: those that once failed, a fixed set, and bugs that have to be found."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.policies import POLICIES
from kvtier.testing.simulated_node import Violation
from kvtier.testing.simulator import Simulation, main
from tests.sim import planted_device, planted_policies, planted_tiers
from tests.sim.planted import PLANTS, Plant

SEEDS: dict[str, Any] = json.loads((Path(__file__).parent / "seeds.json").read_text())
STEPS: int = SEEDS["steps"]
PLANT_SEEDS = 250


@pytest.mark.parametrize("entry", SEEDS["found"], ids=lambda entry: str(entry["seed"]))
def test_histories_that_once_failed(entry: dict[str, Any]) -> None:
    Simulation(entry["seed"], below=entry["below"], policy="lru").run(STEPS)


def test_a_fixed_set_of_histories_in_which_everything_happens() -> None:
    happened: dict[str, int] = {}
    loaded = 0
    for seed in range(SEEDS["always"]["first"], SEEDS["always"]["end"]):
        simulation = Simulation(seed)
        result = simulation.run(STEPS)
        loaded += result.loaded_blocks
        for name, count in result.counts.items():
            happened[name] = happened.get(name, 0) + count
    wanted = {
        "granted",
        "offered blocks",
        "Commit refused",
        "Release refused",
        "Abort",
        "EngineDied",
        "lost",
        "Dropped",
    }
    wanted |= {"Grow", "Pin", "evicted by hand", "Verified", "flipped"}
    wanted |= {"Demote begun", "demoted", "Fetch begun", "fetched", "Recovered", "TierDown", "TierUp"}
    assert all(happened.get(name, 0) >= 20 for name in wanted), happened
    wanted |= {"DRAM to FAR", "FAR to NVME", "DRAM to NVME", "FAR to DRAM", "NVME to DRAM"}
    assert all(happened.get(name, 0) >= 5 for name in wanted | {"Overdue", "wrong"}), happened
    assert loaded > 1000


@pytest.mark.parametrize("below", [True, False])
def test_far_memory_alone_and_above_a_disk(below: bool) -> None:
    happened: dict[str, int] = {}
    for seed in range(1000, 1015):
        result = Simulation(seed, below=below, far=True).run(STEPS)
        for name, count in result.counts.items():
            happened[name] = happened.get(name, 0) + count
    moves = {"DRAM to FAR", "FAR to DRAM"} | ({"FAR to NVME", "NVME to DRAM"} if below else set())
    assert all(happened.get(name, 0) >= 10 for name in moves), happened
    assert happened.get("wrong", 0) >= below, happened
    assert "DRAM to NVME" not in happened, "each tier's blocks go to the next one alone"


def test_device_memory_with_and_without_tiers_below() -> None:
    happened: dict[str, int] = {}
    for seed in range(2000, 2030):
        result = Simulation(seed, device=True).run(STEPS)
        for name, count in result.counts.items():
            happened[name] = happened.get(name, 0) + count
    wanted = {"DRAM to HBM", "told copies", "suspected", "lost"}
    assert all(happened.get(name, 0) >= 10 for name in wanted), happened


@pytest.mark.parametrize("plant", planted_device.PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_of_device_memory_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, AssertionError, LookupError)):
        _run_without_checks(PLANT_SEEDS, device=True)


def test_a_seed_is_one_history() -> None:
    results = [Simulation(11).run(500) for _ in range(2)]
    assert results[0] == results[1]
    assert Simulation(12).run(500) != results[0]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, AssertionError, LookupError)):
        _run_without_checks(PLANT_SEEDS, below=False)


@pytest.mark.parametrize("plant", planted_tiers.PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_of_tiers_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, AssertionError, LookupError)):
        _run_without_checks(PLANT_SEEDS, below=True)


def _run_without_checks(seeds: int, *, below: bool | None = None, device: bool = False) -> None:
    for seed in range(seeds):
        Simulation(seed, check_every=10**9, below=below, device=device).run(STEPS)


@pytest.mark.parametrize(
    ("policy", "plant"),
    [(policy, plant) for policy, plants in planted_policies.PLANTS.items() for plant in plants],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_planted_bugs_of_policies_are_found(
    policy: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, AssertionError, LookupError)):
        _run_policy(range(20), policy)


def _run_policy(seeds: Iterable[int], policy: str) -> int:
    """Returns how many blocks were loaded."""
    return sum(
        Simulation(seed, below=seed % 2 == 0, policy=policy).run(STEPS).loaded_blocks for seed in seeds
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_few_histories_of_each_policy(policy: str) -> None:
    assert _run_policy(range(100, 104), policy) > 50


def test_the_command_reports_what_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3:5", "--steps", "300"]) == 0
    assert capsys.readouterr().out.startswith("2 seeds, ")


def test_the_command_names_a_failing_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = next(plant for plant in PLANTS if plant.__name__ == "quarantine_ends_on_a_timer")
    plant(monkeypatch)
    assert main(["--seeds", "0:50"]) == 1
    assert "failed: --seeds " in capsys.readouterr().err
