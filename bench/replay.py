"""How many tokens does each policy save? A trace and made workloads, through the real core.

``python -m bench replay [TRACE ...]``, or ``make bench NAME=replay ARGS=TRACE``. A trace has one JSON object
a line: ``timestamp`` (ms), ``input_length`` (tokens), ``hash_ids`` (each names a prefix of 512-token blocks),
as those of Mooncake's FAST'25 release. Without one only the made workload runs.

Every core decision is the daemon's; I/O takes no time, and a request ends before the next one begins.
Capacities are shares of the working set, all distinct blocks. Below DRAM, NVMe has `NVME_TIMES` as much. A
second figure for the trace, in blocks, can be compared with what others publish.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.common import at_least, at_most
from kvtier.core.policies import POLICIES
from kvtier.testing.replay import ReplayedNode, Request, conversations, documents, mixed

SHARES: Final = (0.01, 0.02, 0.05, 0.10, 0.25)
NVME_TIMES: Final = 4
ADMISSION_SHARE: Final = 0.02
CONVERSATIONS: Final = 20
TURNS: Final = 12
POINTS_LIMIT: Final = 2.0
APART: Final = 10_000_000
"""The ids of one made workload from those of the next."""


def load_trace(path: Path) -> list[Request]:
    """The requests of a trace file."""
    requests = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            requests.append(Request(entry["timestamp"] / 1000, entry["input_length"], entry["hash_ids"]))
    return requests


def made_workload() -> list[Request]:
    """Conversations in waves, of which few go on for long, and documents that nobody asks for again."""
    waves = [
        conversations(count, turns, seed=number, begin=number * APART)
        for number, (count, turns) in enumerate(((30, 12), (60, 6), (120, 2), (30, 12)))
    ]
    scans = [documents(40, 60, seed=number, begin=(10 + number) * APART) for number in range(4)]
    parts = [mixed(wave, scan, seed=1) for wave, scan in zip(waves, scans, strict=True)]
    return list(chain.from_iterable(parts))


def working_set(requests: Sequence[Request]) -> int:
    """Distinct blocks."""
    return len({id for request in requests for id in request.blocks})


def replay(
    requests: Sequence[Request], policy: str, dram: int, nvme: int = 0, **options: Any
) -> dict[str, Any]:
    """The figures of one arm."""
    gc.collect()
    begin_s = time.process_time()
    tally = ReplayedNode(policy, dram, nvme, **options).run(requests)
    return {
        "policy": policy,
        "dram_blocks": dram,
        "nvme_blocks": nvme,
        "options": options,
        "hit_rate": tally.hit_rate,
        "block_hit_rate": tally.block_hit_rate,
        "refused_blocks": tally.refused_blocks,
        "demoted_blocks": tally.demoted_blocks,
        "fetched_blocks": tally.fetched_blocks,
        "us_per_block": 1e6 * (time.process_time() - begin_s) / tally.blocks,
    }


def arms_of(name: str, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """All policies at all capacities; then admission to NVMe, at one."""
    total = working_set(requests)
    endless = 2 * total + 1024
    arms = [{"share": None, **replay(requests, "lru", endless)}]
    for share in SHARES:
        dram = int(share * total)
        for nvme in (0, NVME_TIMES * dram):
            for policy in POLICIES:
                arms.append({"share": share, **replay(requests, policy, dram, nvme)})
                print(f"{name} {share:.0%} {policy} nvme={nvme}: {arms[-1]['hit_rate']:.4f}", file=sys.stderr)
    dram = int(ADMISSION_SHARE * total)
    admissions: tuple[dict[str, Any], ...] = ({"admit_after_uses": 2}, {"admit_by_worth": True})
    for options in admissions:
        arms += [
            {"share": ADMISSION_SHARE, **replay(requests, policy, dram, NVME_TIMES * dram, **options)}
            for policy in POLICIES
        ]
    return arms


def with_a_tenth() -> dict[str, dict[str, float]]:
    """Hit rates of so many conversations, DRAM a tenth of their working set and NVMe below, by policy."""
    requests = list(conversations(CONVERSATIONS, TURNS))
    total = working_set(requests)
    endless = replay(requests, "lru", 2 * total + 1024)["hit_rate"]
    return {
        policy: {"endless": endless, "tenth": replay(requests, policy, total // 10, 2 * total)["hit_rate"]}
        for policy in POLICIES
    }


def show(name: str, arms: Sequence[dict[str, Any]]) -> None:
    """One line for each capacity and kind."""
    table = Table(title=f"{name}: hit rate in tokens, % (blocks demoted, thousands)")
    for column in ("DRAM", "NVMe", "admission", *POLICIES):
        table.add_column(column, justify="right")
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for arm in arms:
        where = "endless" if arm["share"] is None else f"{arm['share']:.0%}"
        admission = ", ".join(f"{key} {value}" for key, value in arm["options"].items())
        row = rows.setdefault((where, f"{NVME_TIMES} x" if arm["nvme_blocks"] else "", admission), {})
        demoted = f" ({arm['demoted_blocks'] / 1000:.0f})" if arm["nvme_blocks"] else ""
        row[arm["policy"]] = f"{100 * arm['hit_rate']:.2f}{demoted}"
    for key, row in rows.items():
        table.add_row(*key, *(row.get(policy, "") for policy in POLICIES))
    Console(stderr=True).print(table)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Replay all workloads; the targets are those of the conversations, and that a policy is worth having."""
    workloads = {"made": made_workload()}
    for path in map(Path, args.extra):
        workloads[path.stem] = load_trace(path)
    results: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for name, requests in workloads.items():
        arms = arms_of(name, requests)
        results[name] = {"requests": len(requests), "working_set_blocks": working_set(requests), "arms": arms}
        show(name, arms)
        for policy in POLICIES:
            if policy != "lru":
                targets[f"{name}_{policy}_over_lru_at_2_percent"] = at_least(
                    _rate(arms, policy, 0.02) / _rate(arms, "lru", 0.02), 1.0
                )
    tenth = with_a_tenth()
    for policy, rates in tenth.items():
        points = 100 * (rates["endless"] - rates["tenth"])
        targets[f"{CONVERSATIONS}_conversations_with_a_tenth_{policy}_points"] = at_most(points, POINTS_LIMIT)
    return {"targets": targets, "workloads": results, "with_a_tenth": tenth}


def _rate(arms: Sequence[dict[str, Any]], policy: str, share: float) -> float:
    return next(
        float(arm["hit_rate"])
        for arm in arms
        if (arm["policy"], arm["share"], arm["nvme_blocks"]) == (policy, share, 0)
    )
