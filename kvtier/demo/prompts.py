"""Prompts that nobody has asked before: seeded reports of any length.

A notice stands before every section, and the prompt ends in the middle of one more. So the model's answer
(the rest of the notice) is what it is sure of, and does not hang on the last bit of a sum: engines add in
another order when part of a prompt is cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

_SENTENCES_A_SECTION: Final = 12
_NOTICE: Final = (
    "NOTICE: This report was written by hand in a small stone house near the northern coast. Nobody was paid "
    "for it. Whoever finds a mistake in these pages may send a letter to the"
)
_NOTICE_END: Final = (
    " harbour office, where an old clock has stopped at noon and a grey cat sleeps on the warm window sill "
    "all day long."
)
_PLACES: Final = (
    "harbour",
    "library",
    "station",
    "market",
    "orchard",
    "lighthouse",
    "quarry",
    "theatre",
    "mill",
)
_PEOPLE: Final = (
    "the clerk",
    "a fisherman",
    "the engineer",
    "our guide",
    "a student",
    "the keeper",
    "the baker",
)
_VERBS: Final = ("counted", "repaired", "described", "painted", "carried", "measured", "sold", "catalogued")
_THINGS: Final = (
    "wooden crates",
    "old maps",
    "copper pipes",
    "baskets of apples",
    "letters",
    "ropes",
    "clocks",
)
_WEATHER: Final = ("in light rain", "before sunrise", "under a clear sky", "during the storm", "in the fog")


def report(seed: int, sentences: int) -> str:
    """A report that differs from that of any other seed from its first line on."""
    chance = random.Random(seed)
    lines = [f"Report number {seed}."]
    for number in range(sentences):
        if number % _SENTENCES_A_SECTION == 0:
            lines.append(f"\n\n{_NOTICE}{_NOTICE_END}\n\n")
        lines.append(
            f" Day {number + 1}: {chance.choice(_PEOPLE)} at the {chance.choice(_PLACES)} "
            f"{chance.choice(_VERBS)} {chance.randrange(2, 400)} {chance.choice(_THINGS)} "
            f"{chance.choice(_WEATHER)}."
        )
    return "".join(lines)


def ending() -> str:
    """What a prompt ends with; the model continues it."""
    return f"\n\n{_NOTICE}"


def tokens(tokenize: Callable[[str], list[int]], *, seed: int, count: int) -> list[int]:
    """A prompt of exactly `count` tokens: a report, cut, and the ending (where both fit)."""
    end = tokenize(ending())
    if count < 2 * len(end):
        end = []
    sentences = count // 16 + 2
    body = tokenize(report(seed, sentences))
    assert len(body) + len(end) >= count, f"{sentences} sentences have only {len(body)} tokens"
    return body[: count - len(end)] + end
