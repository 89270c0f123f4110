"""The frame of the benchmarks: targets, exit codes, interleaving, void runs."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as main
from bench import ttft
from bench.common import (
    MEMCPY_REFERENCE_BYTES_PER_S,
    MIN_ROUNDS,
    Memcpy,
    at_least,
    at_most,
    interleave,
    percentile,
    void_reason,
)


@pytest.mark.parametrize(
    ("targets", "void", "code"),
    [
        ({"a": at_most(1.0, 1.0), "b": at_least(2.0, 1.0)}, "", 0),
        ({"a": at_most(1.1, 1.0), "b": at_least(2.0, 1.0)}, "", 1),
        ({"a": at_most(0.0, 1.0), "b": at_least(0.9, 1.0)}, "", 1),
        ({"a": at_most(1.1, 1.0)}, "memcpy is slow", 3),
    ],
)
def test_exit_codes_and_json(
    targets: dict[str, Any], void: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("bench.rpc")
    module.run = lambda args: {"targets": targets, "void": void, "rounds": args.rounds}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench.rpc", module)
    path = tmp_path / "new" / "result.json"
    assert main.main(["rpc", "--json", str(path), "--rounds", "11"]) == code
    result = json.loads(path.read_text())
    assert result["rounds"] == 11
    assert result["targets"] == targets
    assert {"value", "target", "ok"} <= set(result["targets"]["a"])
    assert {"cpus", "kernel", "python"} <= set(result["machine"])


def test_a_benchmark_that_is_not_there() -> None:
    with pytest.raises(SystemExit):
        main.main(["nothing"])


def test_rounds_are_interleaved() -> None:
    calls: list[str] = []
    results = interleave({name: lambda n=name: calls.append(n) or n for name in "abc"}, 1)  # type: ignore[misc]
    assert {name: len(values) for name, values in results.items()} == dict.fromkeys("abc", MIN_ROUNDS)
    for number in range(MIN_ROUNDS):
        assert sorted(calls[3 * number : 3 * number + 3]) == ["a", "b", "c"]
    assert calls[:6] == ["a", "b", "c", "b", "c", "a"]


def test_percentiles_are_of_what_was_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]


@pytest.mark.parametrize("threads", [1, 2])
def test_memcpy_copies_all_of_it(threads: int) -> None:
    memcpy = Memcpy(threads, size_bytes=1 << 20)
    assert memcpy() > 0
    assert bool((memcpy._target == memcpy._source).all())


def test_void() -> None:
    assert void_reason(0.49 * MEMCPY_REFERENCE_BYTES_PER_S)
    assert not void_reason(0.51 * MEMCPY_REFERENCE_BYTES_PER_S)


def test_each_denominator_of_ttft_is_judged() -> None:
    fast = {"cold": ttft.REFERENCE_COLD_S, "hot": ttft.REFERENCE_HOT_S, "hot, NVMe": 0.1}
    assert ttft._void(fast) == ""
    assert "hot, NVMe" in ttft._void(fast | {"hot, NVMe": 2.1 * ttft.REFERENCE_HOT_S})
    assert "four others" in ttft._void(fast | {"cold, four others": 2.1 * ttft.REFERENCE_COLD_S})
