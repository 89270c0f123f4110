"""What benchmarks share: the memcpy denominator, interleaved rounds, medians, targets, void runs.

A benchmark is a module `bench.<name>` with ``run(args: argparse.Namespace) -> dict``. The dict holds
``targets: {name: {value, target, ok}}`` and every raw figure; ``void: str`` says that a denominator was
too low for the figures to mean anything.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

MIN_ROUNDS: Final = 9
MEMCPY_BYTES: Final = 64 << 20
MEMCPY_REFERENCE_BYTES_PER_S: Final = 11e9
"""What the machine that facts/hot-path.md was measured on copies, one thread."""
VOID_BELOW: Final = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and what it has to reach; `at_most` where smaller is better."""

    value: float
    target: float
    at_most: bool

    def to_json(self) -> dict[str, Any]:
        """The form that the results have."""
        ok = self.value <= self.target if self.at_most else self.value >= self.target
        return {"value": self.value, "target": self.target, "ok": ok, "at_most": self.at_most}


def at_most(value: float, target: float) -> dict[str, Any]:
    """A target that is reached from below: times, shares of cost."""
    return Target(value, target, at_most=True).to_json()


def at_least(value: float, target: float) -> dict[str, Any]:
    """A target that is reached from above: rates."""
    return Target(value, target, at_most=False).to_json()


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return float(statistics.median(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, int(np.ceil(percent / 100 * len(ordered))))
    return float(ordered[rank - 1])


def interleave(arms: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Run every arm once a round, so that what disturbs the machine disturbs all of them.

    The order is turned by one each round. At least `MIN_ROUNDS` rounds.
    """
    results: dict[str, list[Any]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(max(rounds, MIN_ROUNDS)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            results[name].append(arms[name]())
    return results


def seconds(work: Callable[[], Any]) -> float:
    """How long one call takes."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


class Memcpy:
    """The denominator: one contiguous pre-touched copy of 64 MiB with so many threads."""

    def __init__(self, threads: int = 1, size_bytes: int = MEMCPY_BYTES) -> None:
        self._source = np.ones(size_bytes, np.uint8)
        self._target = np.zeros(size_bytes, np.uint8)
        self._size_bytes = size_bytes
        self._cuts = [size_bytes * i // threads for i in range(threads + 1)]
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self()

    def __call__(self) -> float:
        """Bytes a second of one copy."""
        return self._size_bytes / seconds(self._copy)

    def _copy(self) -> None:
        parts = list(zip(self._cuts, self._cuts[1:], strict=False))
        if self._pool is None:
            self._part(parts[0])
        else:
            list(self._pool.map(self._part, parts))

    def _part(self, part: tuple[int, int]) -> None:
        np.copyto(self._target[part[0] : part[1]], self._source[part[0] : part[1]])


def void_reason(memcpy_bytes_per_s: float) -> str:
    """Why the run means nothing, or an empty string."""
    least = VOID_BELOW * MEMCPY_REFERENCE_BYTES_PER_S
    if memcpy_bytes_per_s >= least:
        return ""
    return (
        f"memcpy runs at {memcpy_bytes_per_s / 1e9:.1f} GB/s, below {least / 1e9:.1f}: "
        "the machine is too busy or too slow for these figures"
    )


def machine_facts() -> dict[str, Any]:
    """What the figures were measured on."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""
            )
    except OSError:
        pass
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": model,
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1min": os.getloadavg()[0],
    }
