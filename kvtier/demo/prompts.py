"""Prompts that nobody has asked before: seeded English that reads like a long report."""

from __future__ import annotations

import random
from typing import Final

_PLACES: Final = ("harbour", "library", "station", "market", "orchard", "lighthouse", "quarry", "theatre", "mill", "garden")
_PEOPLE: Final = ("the clerk", "a fisherman", "the engineer", "our guide", "a student", "the keeper", "two visitors", "the baker")
_VERBS: Final = ("counted", "repaired", "described", "painted", "carried", "measured", "photographed", "sold", "catalogued")
_THINGS: Final = ("wooden crates", "old maps", "copper pipes", "baskets of apples", "letters", "lamps", "ropes", "blue tiles", "clocks")
_WEATHER: Final = ("in light rain", "before sunrise", "under a clear sky", "during the storm", "in the fog", "after the frost")


def report(seed: int, sentences: int) -> str:
    """`sentences` sentences that differ from those of any other seed from the first one on."""
    chance = random.Random(seed)
    lines = [f"Report number {seed}, written down as it happened."]
    for number in range(1, sentences):
        lines.append(
            f"On day {number}, {chance.choice(_PEOPLE)} at the {chance.choice(_PLACES)} {chance.choice(_VERBS)} "
            f"{chance.randrange(2, 400)} {chance.choice(_THINGS)} {chance.choice(_WEATHER)}."
        )
    return " ".join(lines)


QUESTION: Final = "\n\nQuestion: What is this report about, in one sentence?\nAnswer: This report"
