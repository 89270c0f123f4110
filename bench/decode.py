"""What the connector costs while an engine decodes and there is nothing to load: 64 tokens.

Two API servers side by side, one without the connector; each round asks both the same fresh prompts of 100
tokens (three whole blocks, which the connected one saves meanwhile) for 64 tokens and takes the time of the
whole request. The target is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from bench.common import MIN_ROUNDS, VOID_BELOW, at_most, median
from kvtier.demo import prompts
from kvtier.demo.engine import Engine
from kvtier.demo.pair import Pair, pair
from kvtier.demo.processes import DemoFailed

PROMPT_TOKENS: Final = 100
ANSWER_TOKENS: Final = 64
REQUESTS: Final = 4
"""Requests of each engine in a round."""
REFERENCE_TOKEN_S: Final = 0.025
"""A decoded token on the machine of the facts, where it is quiet."""
TARGET: Final = 0.05


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; see the module."""
    count = max(args.rounds, MIN_ROUNDS)
    with pair(_say) as both:
        before = both.node.status().counters.loaded_blocks
        rounds = [_round(both, number) for number in range(count)]
        loaded = both.node.status().counters.loaded_blocks - before
    if loaded:
        raise DemoFailed(f"{loaded} blocks were loaded, though nothing was to be")
    plain_s = median([each["plain_s"] for each in rounds])
    ratio = median([each["connected_s"] / each["plain_s"] for each in rounds])
    return {
        "rounds": count,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "targets": {"64 tokens with the connector cost": at_most(ratio - 1, TARGET)},
        "medians_s": {"plain": plain_s, "connected": median([each["connected_s"] for each in rounds])},
        "raw": rounds,
        "void": _void(plain_s / ANSWER_TOKENS),
    }


def _round(both: Pair, number: int) -> dict[str, Any]:
    arms = [("plain", both.plain), ("connected", both.connected)]
    raw: dict[str, list[float]] = {"plain": [], "connected": []}
    for index in range(REQUESTS):
        seed = 3000 + number * REQUESTS + index
        prompt = prompts.tokens(both.plain.tokenize, seed=seed, count=PROMPT_TOKENS)
        for name, engine in arms if (number + index) % 2 == 0 else reversed(arms):
            both.settle()
            raw[name].append(_seconds(engine, prompt))
    result = {f"{name}_s": median(values) for name, values in raw.items()}
    _say(
        f"round {number + 1}: {PROMPT_TOKENS} prompt tokens, {ANSWER_TOKENS} decoded: "
        f"plain {result['plain_s']:.3f} s, with the connector {result['connected_s']:.3f} s"
    )
    return {**result, "requests_s": raw}


def _seconds(engine: Engine, prompt: list[int]) -> float:
    answer = engine.complete(prompt, max_tokens=ANSWER_TOKENS)
    if answer.completion_tokens != ANSWER_TOKENS or answer.cached_tokens:
        raise DemoFailed(
            f"{engine.name} decoded {answer.completion_tokens} tokens and found {answer.cached_tokens} cached"
        )
    return answer.total_s


def _void(token_s: float) -> str:
    if REFERENCE_TOKEN_S / token_s >= VOID_BELOW:
        return ""
    return (
        f"a token takes {token_s * 1000:.0f} ms, {REFERENCE_TOKEN_S * 1000:.0f} ms is known: "
        "the machine is too busy or too slow for these figures"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
