"""Prompts that nobody has asked before: seeded reports of any length.

Notices stand before every section, and the prompt ends in the middle of one more: which one is the question.
So the model's answer (the rest of the notice) is what it is sure of, and does not hang on the last bit of a
sum: engines add in another order when part of a prompt is cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

_SENTENCES_A_SECTION: Final = 12
_NOTICES: Final = (
    (
        "NOTICE: This report was written by hand in a small stone house near the northern coast. Nobody was "
        "paid for it. Whoever finds a mistake in these pages may send a letter to the",
        " harbour office, where an old clock has stopped at noon and a grey cat sleeps on the warm window "
        "sill all day long.",
    ),
    (
        "WARNING: The old wooden bridge behind the mill must not be crossed by carts in winter. Anyone who "
        "needs to reach the other bank of the river has to take the",
        " ferry at the southern landing, which leaves whenever the bronze bell is rung and costs two copper "
        "coins each way.",
    ),
)
QUESTIONS: Final = len(_NOTICES)
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
            lines += [f"\n\n{question}{answer}" for question, answer in _NOTICES]
            lines.append("\n\n")
        lines.append(
            f" Day {number + 1}: {chance.choice(_PEOPLE)} at the {chance.choice(_PLACES)} "
            f"{chance.choice(_VERBS)} {chance.randrange(2, 400)} {chance.choice(_THINGS)} "
            f"{chance.choice(_WEATHER)}."
        )
    return "".join(lines)


def ending(question: int = 0) -> str:
    """What a prompt ends with; the model continues it."""
    return f"\n\n{_NOTICES[question][0]}"


def tokens(tokenize: Callable[[str], list[int]], *, seed: int, count: int, question: int = 0) -> list[int]:
    """A prompt of exactly `count` tokens: a report, cut, and the question's ending (where both fit).

    Two questions about the same report share all but about the last 50 tokens.
    """
    end = tokenize(ending(question))
    if count < 2 * len(end):
        end = []
    sentences = count // 16 + 2
    body = tokenize(report(seed, sentences))
    assert len(body) + len(end) >= count, f"{sentences} sentences have only {len(body)} tokens"
    return body[: count - len(end)] + end


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two prompts have in common."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
