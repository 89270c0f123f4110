"""Time to first token of 4,000 tokens: kvtier's hits against the engine's own, and what a miss costs.

Two API servers run side by side, one without the connector; only one is busy at a time. Each round takes a
fresh prompt: `cold` and `hot` (the engine's own cache) on the plain engine; `miss` and, after the engine's
cache was emptied, `hit` on the one with the connector. The second arm repeats cold and miss while four
other requests decode on the same engine. The third arm has two nodes with an engine on each: `far` computes
a fresh prompt, then the near engine, which has never seen it, answers (`remote`), and once more from its own
cache (`hot`). The fourth has one node with NVMe: what was computed (`first`) and copied down is loaded after
the node was killed and started again, with nothing in its memory (`nvme`), and then comes from the engine's
own cache (`hot`).

Targets are medians of the rounds' own ratios, so that what slows the machine for a while slows both sides;
all raw figures and the medians of each arm are in the JSON.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from bench.common import MIN_ROUNDS, VOID_BELOW, at_least, at_most, median
from kvtier.demo import prompts
from kvtier.demo.engine import BLOCK_TOKENS, Answer, Engine
from kvtier.demo.node import NodeProcess
from kvtier.demo.pair import Below, FarPair, Pair, below, far_pair, pair
from kvtier.demo.processes import DemoFailed
from kvtier.v1 import admin_pb2 as pb

PROMPT_TOKENS: Final = 4000
ANSWER_TOKENS: Final = 4
OTHERS: Final = 4
OTHERS_TOKENS: Final = 6000
OTHERS_READY_S: Final = 60.0
REFERENCE_COLD_S: Final = 3.5 * PROMPT_TOKENS / 4096
REFERENCE_HOT_S: Final = 0.06
"""Of facts/vllm.md. A machine that takes more than twice as long is too busy for these figures."""
HIT_TARGET: Final = 1.4
REMOTE_TARGET: Final = 1.8
NVME_TARGET: Final = 2.5
HITS: Final = ("hit", "remote", "nvme")
MISS_TARGET: Final = 0.03
REQUIRED_SHARE: Final = 0.95

Round = dict[str, dict[str, Any]]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; see the module."""
    rounds = max(args.rounds, MIN_ROUNDS)
    with pair(_say) as both:
        idle = [_idle_round(both, number) for number in range(rounds)]
        busy = [_busy_round(both, number) for number in range(rounds)]
    with far_pair(_say) as apart:
        remote = [_remote_round(apart, number) for number in range(rounds)]
        transfer = [node.transfer for node in apart.near_node.admin.list_nodes().nodes if not node.is_self]
    with below(_say) as low:
        nvme = [_nvme_round(low, number) for number in range(rounds)]
    return {
        "rounds": rounds,
        "prompt_tokens": PROMPT_TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "targets": {
            "hits that loaded 95 % of the prompt": at_least(_loaded_share(idle, "hit"), 1.0),
            "local hit / engine's own hot": at_most(_ratio(idle, "hit", "hot"), HIT_TARGET),
            "remote hits that loaded 95 % of the prompt": at_least(_loaded_share(remote, "remote"), 1.0),
            "remote hit / engine's own hot": at_most(_ratio(remote, "remote", "hot"), REMOTE_TARGET),
            "nvme hits that loaded 95 % of the prompt": at_least(_loaded_share(nvme, "nvme"), 1.0),
            "nvme hit / engine's own hot": at_most(_ratio(nvme, "nvme", "hot"), NVME_TARGET),
            "miss costs, idle engine": at_most(_ratio(idle, "miss", "cold") - 1, MISS_TARGET),
            "miss costs, four others decoding": at_most(_ratio(busy, "miss", "cold") - 1, MISS_TARGET),
        },
        "medians_s": {
            **{f"idle {name}": _median(idle, name) for name in ("cold", "hot", "miss", "hit")},
            **{f"busy {name}": _median(busy, name) for name in ("cold", "miss")},
            **{f"two nodes {name}": _median(remote, name) for name in ("far", "remote", "hot")},
            **{f"nvme {name}": _median(nvme, name) for name in ("first", "nvme", "hot")},
        },
        "ratios_of_medians": {
            "hit / hot": _median(idle, "hit") / _median(idle, "hot"),
            "remote / hot": _median(remote, "remote") / _median(remote, "hot"),
            "nvme / hot": _median(nvme, "nvme") / _median(nvme, "hot"),
            "miss / cold": _median(idle, "miss") / _median(idle, "cold"),
            "busy miss / cold": _median(busy, "miss") / _median(busy, "cold"),
        },
        "idle": idle,
        "busy": busy,
        "remote": remote,
        "nvme": nvme,
        "transfer": transfer,
        "void": _void(
            {
                "cold": _median(idle, "cold"),
                "hot": _median(idle, "hot"),
                "cold, four others": _median(busy, "cold"),
                "hot, two nodes": _median(remote, "hot"),
                "hot, NVMe": _median(nvme, "hot"),
            }
        ),
    }


def _idle_round(both: Pair, number: int) -> Round:
    prompt = prompts.tokens(both.plain.tokenize, seed=1000 + number, count=PROMPT_TOKENS)
    result: Round = {}

    def plain() -> None:
        both.plain.reset_prefix_cache()
        result["cold"] = _ask(both.node, both.plain, prompt)
        result["hot"] = _ask(both.node, both.plain, prompt)

    def connected() -> None:
        both.connected.reset_prefix_cache()
        stored = both.node.status().counters.stored_blocks
        result["miss"] = _ask(both.node, both.connected, prompt)
        both.node.wait_stored(stored + PROMPT_TOKENS // BLOCK_TOKENS)
        both.connected.reset_prefix_cache()
        result["hit"] = _ask(both.node, both.connected, prompt)

    for arm in (plain, connected) if number % 2 == 0 else (connected, plain):
        both.settle()
        arm()
    _judge(result, f"round {number + 1}, idle")
    return result


def _busy_round(both: Pair, number: int) -> Round:
    prompt = prompts.tokens(both.plain.tokenize, seed=2000 + number, count=PROMPT_TOKENS)
    arms = [("cold", both.plain), ("miss", both.connected)]
    result: Round = {}
    for name, engine in arms if number % 2 == 0 else reversed(arms):
        both.settle()
        with _others(engine):
            stored = both.node.status().counters.stored_blocks
            result[name] = _ask(both.node, engine, prompt)
            if name == "miss":
                both.node.wait_stored(stored + PROMPT_TOKENS // BLOCK_TOKENS)
    _judge(result, f"round {number + 1}, four others")
    return result


def _remote_round(both: FarPair, number: int) -> Round:
    prompt = prompts.tokens(both.far.tokenize, seed=3000 + number, count=PROMPT_TOKENS)
    result: Round = {}
    both.settle()
    stored = both.far_node.status().counters.stored_blocks
    result["far"] = _ask(both.far_node, both.far, prompt)
    both.far_node.wait_stored(stored + PROMPT_TOKENS // BLOCK_TOKENS)
    both.far_node.wait_published()
    both.settle()
    result["remote"] = _ask(both.near_node, both.near, prompt)
    result["hot"] = _ask(both.near_node, both.near, prompt)
    _judge(result, f"round {number + 1}, two nodes")
    return result


def _nvme_round(low: Below, number: int) -> Round:
    prompt = prompts.tokens(low.engine.tokenize, seed=4000 + number, count=PROMPT_TOKENS)
    blocks = PROMPT_TOKENS // BLOCK_TOKENS
    result: Round = {}
    low.settle()
    before = low.node.status()
    result["first"] = _ask(low.node, low.engine, prompt)
    low.node.wait_stored(before.counters.stored_blocks + blocks)
    low.wait_demoted(_blocks_below(before) + blocks)
    low.forget()
    low.settle()
    status = low.node.status()
    if status.tiers[0].blocks > (1 - REQUIRED_SHARE) * blocks:
        raise DemoFailed(f"round {number + 1}: memory has {status.tiers[0].blocks} blocks: no such arm")
    result["nvme"] = _ask(low.node, low.engine, prompt)
    result["hot"] = _ask(low.node, low.engine, prompt)
    _judge(result, f"round {number + 1}, NVMe")
    return result


def _blocks_below(status: pb.GetStatusResponse) -> int:
    return sum(tier.blocks for tier in status.tiers if tier.name == "nvme")


def _ask(node: NodeProcess, engine: Engine, prompt: list[int]) -> dict[str, Any]:
    before = node.status().counters
    answer: Answer = engine.complete(prompt, max_tokens=ANSWER_TOKENS)
    after = node.status().counters
    return {
        "ttft_s": answer.ttft_s,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "loaded_tokens": (after.loaded_blocks - before.loaded_blocks) * BLOCK_TOKENS,
        "pulled_tokens": (after.pulled_blocks - before.pulled_blocks) * BLOCK_TOKENS,
    }


def _judge(result: Round, what: str) -> None:
    """Say what was measured; an arm that was not what its name says ends the run (hits are judged later)."""
    for name, figures in result.items():
        loaded, cached = figures["loaded_tokens"], figures["cached_tokens"]
        if name in HITS:
            continue
        if loaded or (cached < REQUIRED_SHARE * PROMPT_TOKENS if name == "hot" else cached > 0):
            raise DemoFailed(f"{what}: {name} loaded {loaded} tokens and found {cached}: no such arm")
    texts = (
        f"{name} {figures['ttft_s']:.3f} s ("
        + (f"{figures['loaded_tokens']} loaded" if name in HITS else f"{figures['prompt_tokens']} prompt")
        + " tokens)"
        for name, figures in result.items()
    )
    _say(f"{what}: {', '.join(texts)}")


@contextmanager
def _others(engine: Engine) -> Iterator[None]:
    """Four other requests decode on `engine` while the block runs."""
    stopping = threading.Event()
    started = threading.Semaphore(0)
    failures: list[BaseException] = []

    def decode(number: int) -> None:
        try:
            prompt = prompts.tokens(engine.tokenize, seed=number, count=64)
            while not stopping.is_set():
                with engine.stream(prompt, max_tokens=OTHERS_TOKENS) as chunks:
                    for index, _ in enumerate(chunks):
                        if index == 2:
                            started.release()
                        if stopping.is_set():
                            break
        except BaseException as error:
            failures.append(error)
            started.release()

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(OTHERS)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            if not started.acquire(timeout=OTHERS_READY_S):
                raise DemoFailed("the other requests did not begin to decode")
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def _loaded_share(rounds: list[Round], name: str) -> float:
    """Part of the rounds in which this hit was one; a remote one has to come from the other node."""
    came = "pulled_tokens" if name == "remote" else "loaded_tokens"
    need = REQUIRED_SHARE * PROMPT_TOKENS
    hits = [each for each in rounds if min(each[name][came], each[name]["loaded_tokens"]) >= need]
    return len(hits) / len(rounds)


def _ratio(rounds: list[Round], name: str, base: str) -> float:
    return median([each[name]["ttft_s"] / each[base]["ttft_s"] for each in rounds])


def _median(rounds: list[Round], name: str) -> float:
    return median([each[name]["ttft_s"] for each in rounds])


def _void(denominators_s: Mapping[str, float]) -> str:
    """Every one that is too slow to divide by."""
    slow = []
    for name, value in denominators_s.items():
        reference = REFERENCE_COLD_S if name.startswith("cold") else REFERENCE_HOT_S
        if reference / value < VOID_BELOW:
            slow.append(f"{name}: TTFT is {value:.3f} s, {reference:.3f} s is known")
    return f"{'; '.join(slow)}: the machine is too busy or too slow for these figures" if slow else ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
