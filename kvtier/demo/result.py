"""What the demo has shown, and whether it is what it promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

REQUIRED_SHARE: Final = 0.95
"""Part of the whole blocks that every hit has to load."""
COLD, HOT, LOCAL, RESTART = "cold", "engine hot", "local hit", "restart hit"
REMOTE, REPLICA, REFILL = "remote hit", "replica hit", "refill hit"
HITS: Final = (LOCAL, RESTART, REMOTE, REPLICA, REFILL)


@dataclass(frozen=True, slots=True)
class Run:
    """One answer and what it was made of.

    Attributes
    ----------
    node
        Whose engine was asked.
    question
        Which of the questions about the one report.
    loaded_tokens
        Tokens that kvtier gave, by the daemon's own count of valid loads.
    pulled_tokens
        Tokens that came from the other node meanwhile.
    loadable_tokens
        Tokens of the whole blocks that had been computed before, anywhere.
    """

    name: str
    node: str
    question: int
    source: str
    prompt_tokens: int
    loaded_tokens: int
    pulled_tokens: int
    loadable_tokens: int
    ttft_s: float
    text: str
    text_equal: bool

    @property
    def loaded_share(self) -> float:
        """Part of the loadable tokens that was loaded."""
        return self.loaded_tokens / self.loadable_tokens


@dataclass(frozen=True, slots=True)
class Result:
    """What the demo has shown."""

    model: str
    block_tokens: int
    shared_tokens: int
    transfer: str
    reference_ttft_s: float
    reference_texts: tuple[str, ...]
    runs: tuple[Run, ...]
    seconds: float

    def run(self, name: str) -> Run:
        """The run of this name."""
        return next(run for run in self.runs if run.name == name)

    @property
    def hits(self) -> tuple[Run, ...]:
        """The runs that had to load."""
        return tuple(self.run(name) for name in HITS)

    @property
    def texts_equal(self) -> bool:
        """Whether every text is that of the engine without kvtier."""
        return all(run.text_equal for run in self.runs)

    @property
    def loaded_share(self) -> float:
        """Part of the whole blocks that was loaded, in the worst of the hits."""
        return min(run.loaded_share for run in self.hits)

    @property
    def came_from_the_other_node(self) -> bool:
        """Whether what the remote hit and the refill loaded was pulled, and not there by other ways."""
        return all(
            self.run(name).pulled_tokens >= REQUIRED_SHARE * self.run(name).loadable_tokens
            for name in (REMOTE, REFILL)
        )

    @property
    def ok(self) -> bool:
        """Whether the demo has shown what it promises."""
        return self.texts_equal and self.loaded_share >= REQUIRED_SHARE and self.came_from_the_other_node

    def to_json(self) -> dict[str, Any]:
        """The result as `kvtier demo --json` writes it; `loaded_tokens` is the worst of the hits."""
        return {
            "ok": self.ok,
            "model": self.model,
            **{f"{name.replace(' ', '_')}_ttft_s": self.run(name).ttft_s for name in (COLD, HOT, *HITS)},
            "reference_ttft_s": self.reference_ttft_s,
            "prompt_tokens": self.run(COLD).prompt_tokens,
            "shared_prefix_tokens": self.shared_tokens,
            "block_tokens": self.block_tokens,
            "loaded_tokens": min(run.loaded_tokens for run in self.hits),
            "loaded_share_of_whole_blocks": self.loaded_share,
            "transfer": self.transfer,
            "texts_equal": self.texts_equal,
            "reference_text": self.reference_texts[0],
            "reference_texts": list(self.reference_texts),
            "runs": [_run_json(run) for run in self.runs],
            "seconds": self.seconds,
        }


def _run_json(run: Run) -> dict[str, Any]:
    names = (
        *("name", "node", "question", "source", "prompt_tokens", "loaded_tokens", "pulled_tokens"),
        *("loadable_tokens", "ttft_s", "text", "text_equal"),
    )
    return {name: getattr(run, name) for name in names}
