"""Whole histories of requests through the core: what the tier below makes up for, under each policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.replay import load_trace
from kvtier.core.cache import CacheCore
from kvtier.core.policies import POLICIES
from kvtier.testing.replay import ReplayedNode, Request, conversations, documents, mixed

each = pytest.mark.parametrize("policy", POLICIES)


@each
@pytest.mark.parametrize("seed", range(3))
def test_conversations_with_a_tenth_of_the_memory_hit_as_with_all_of_it(policy: str, seed: int) -> None:
    requests = list(conversations(20, 12, seed=seed))
    total = len({id for request in requests for id in request.blocks})
    endless = ReplayedNode("lru", 2 * total).run(requests).hit_rate
    alone = ReplayedNode(policy, total // 10).run(requests).hit_rate
    tenth = ReplayedNode(policy, total // 10, 2 * total).run(requests).hit_rate
    assert tenth > endless - 0.02
    assert alone < endless - 0.1, "the tier below is what does it"


@each
def test_every_invariant_holds_in_a_history(policy: str) -> None:
    requests = list(mixed(conversations(6, 5, seed=1), documents(6, 30, begin=1 << 20), seed=1))
    ReplayedNode(policy, 64, 160, on_event=CacheCore.check, admit_by_worth=True).run(requests)


def test_scans_cost_conversations_less_than_under_lru() -> None:
    requests = list(mixed(conversations(30, 8, seed=2), documents(60, 50, begin=1 << 20), seed=2))
    rates = {policy: ReplayedNode(policy, 400).run(requests).hit_rate for policy in POLICIES}
    assert rates["s3fifo"] > rates["lru"]
    assert rates["worth"] > rates["lru"]


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = load_trace(path)
    assert requests == [Request(0.0, 700, [0, 1]), Request(1.5, 1100, [0, 1, 2])]
    tally = ReplayedNode("lru", 64).run(requests)
    assert (tally.hit_tokens, tally.tokens) == (1024, 1800)
    assert (tally.hit_blocks, tally.blocks) == (2, 5)
