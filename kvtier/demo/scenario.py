"""The demo: one prompt cold, from the engine's own cache, from kvtier, and from kvtier in a new engine."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.demo import model, prompts
from kvtier.demo.engine import BLOCK_TOKENS, Answer, Engine, require_vllm
from kvtier.demo.node import NodeProcess
from kvtier.demo.processes import stop_all
from kvtier.v1 import admin_pb2 as pb

PROMPT_TOKENS: Final = 4010
ANSWER_TOKENS: Final = 24
REQUIRED_SHARE: Final = 0.95
"""Part of the prompt's whole blocks that both hits have to load."""
DRAM_BYTES: Final = 512 << 20
PATIENT: Final = {
    "lookup_timeout_s": 2.0,
    "call_timeout_s": 10.0,
    "load_floor_s": 10.0,
    "save_timeout_s": 20.0,
}
"""Deadlines of the connector. With its own ones a machine that is busy with other work sees a late answer,
which rightly counts as a miss; the demo is to show what is loaded, not how busy the machine is."""
COLD, HOT, LOCAL, RESTART = "cold", "engine hot", "local hit", "restart hit"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One answer and what it was made of.

    Attributes
    ----------
    loaded_tokens
        Tokens that kvtier gave, by the daemon's own count of valid loads.
    """

    name: str
    source: str
    prompt_tokens: int
    loaded_tokens: int
    ttft_s: float
    text: str
    text_equal: bool


@dataclass(frozen=True, slots=True)
class Result:
    """What the demo has shown."""

    model: str
    reference_ttft_s: float
    reference_text: str
    runs: tuple[Run, ...]
    seconds: float

    @property
    def texts_equal(self) -> bool:
        """Whether every text is that of the engine without kvtier."""
        return all(run.text_equal for run in self.runs)

    @property
    def loaded_share(self) -> float:
        """Part of the prompt's whole blocks that was loaded, in the worse of the two hits."""
        hits = [run for run in self.runs if run.name in (LOCAL, RESTART)]
        return min(run.loaded_tokens / (run.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS) for run in hits)

    @property
    def ok(self) -> bool:
        """Whether the demo has shown what it promises."""
        return self.texts_equal and self.loaded_share >= REQUIRED_SHARE

    def to_json(self) -> dict[str, Any]:
        """The result as `kvtier demo --json` writes it; `loaded_tokens` is the worse of the two hits."""
        ttft_s = {run.name: run.ttft_s for run in self.runs}
        hits = [run.loaded_tokens for run in self.runs if run.name in (LOCAL, RESTART)]
        return {
            "ok": self.ok,
            "model": self.model,
            "cold_ttft_s": ttft_s[COLD],
            "engine_hot_ttft_s": ttft_s[HOT],
            "local_hit_ttft_s": ttft_s[LOCAL],
            "restart_hit_ttft_s": ttft_s[RESTART],
            "reference_ttft_s": self.reference_ttft_s,
            "prompt_tokens": self.runs[0].prompt_tokens,
            "block_tokens": BLOCK_TOKENS,
            "loaded_tokens": min(hits),
            "loaded_share_of_whole_blocks": self.loaded_share,
            "texts_equal": self.texts_equal,
            "reference_text": self.reference_text,
            "runs": [
                {
                    "name": run.name,
                    "source": run.source,
                    "prompt_tokens": run.prompt_tokens,
                    "loaded_tokens": run.loaded_tokens,
                    "ttft_s": run.ttft_s,
                    "text": run.text,
                    "text_equal": run.text_equal,
                }
                for run in self.runs
            ],
            "seconds": self.seconds,
        }


@contextmanager
def workplace() -> Iterator[Path]:
    """A private directory with a short name, gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir="/tmp"))
    try:
        yield directory
    finally:
        stop_all()
        shutil.rmtree(directory, ignore_errors=True)


def run(progress: Progress) -> Result:
    """Run the demo, inside of `processes.interruptible`; all it started is gone when it returns or raises.

    Raises
    ------
    DemoFailed
        A process did not do what it should.
    ResourceShortage
        vLLM is not installed, or the machine has not enough memory.
    """
    begin_s = time.monotonic()
    require_vllm()
    checkpoint = model.prepare(progress)
    with workplace() as directory:
        return _Demo(progress, checkpoint, directory, begin_s).run()


class _Demo:
    def __init__(self, progress: Progress, checkpoint: Path, directory: Path, begin_s: float) -> None:
        self._progress = progress
        self._checkpoint = checkpoint
        self._directory = directory
        self._begin_s = begin_s
        self._runs: list[Run] = []
        self._reference = ""

    def run(self) -> Result:
        self._progress("starting vLLM without kvtier, for the text to compare with (about a minute)")
        with self._engine("vLLM without kvtier", "reference", None) as engine:
            prompt = prompts.tokens(engine.tokenize, seed=1, count=PROMPT_TOKENS)
            warm_up(engine)
            reference = engine.complete(prompt, max_tokens=ANSWER_TOKENS)
        self._reference = reference.text
        with ExitStack() as stack:
            self._progress("starting kvtier serve")
            node = stack.enter_context(NodeProcess(self._directory / "node", dram_bytes=DRAM_BYTES))
            self._progress("starting vLLM with kvtier")
            with self._engine("vLLM with kvtier", "first", node.socket) as engine:
                self._first_engine(engine, node, prompt)
                self._progress("killing vLLM")
                engine.kill()
            self._progress("starting vLLM anew")
            with self._engine("vLLM with kvtier, started anew", "second", node.socket) as engine:
                warm_up(engine)
                self._ask(RESTART, engine, node, prompt)
        return Result(
            model=model.MODEL_NAME,
            reference_ttft_s=reference.ttft_s,
            reference_text=reference.text,
            runs=tuple(self._runs),
            seconds=time.monotonic() - self._begin_s,
        )

    def _first_engine(self, engine: Engine, node: NodeProcess, prompt: Sequence[int]) -> None:
        warm_up(engine)
        before = node.status().counters.stored_blocks
        self._ask(COLD, engine, node, prompt)
        self._ask(HOT, engine, node, prompt)
        self._progress("waiting until kvtier has all blocks, then emptying the engine's own cache")
        node.wait_stored(before + len(prompt) // BLOCK_TOKENS)
        engine.reset_prefix_cache()
        self._ask(LOCAL, engine, node, prompt)

    @contextmanager
    def _engine(self, name: str, directory: str, socket: Path | None) -> Iterator[Engine]:
        where = self._directory / directory
        with Engine(name, self._checkpoint, where, kvtier_socket=socket, connector=PATIENT) as engine:
            engine.wait_ready()
            yield engine

    def _ask(self, name: str, engine: Engine, node: NodeProcess, prompt: Sequence[int]) -> None:
        self._progress(f"asking: {name}")
        before = node.status()
        answer = engine.complete(prompt, max_tokens=ANSWER_TOKENS)
        after = node.status()
        loaded = (after.counters.loaded_blocks - before.counters.loaded_blocks) * BLOCK_TOKENS
        self._runs.append(
            Run(
                name=name,
                source=_source(answer, loaded, after),
                prompt_tokens=answer.prompt_tokens,
                loaded_tokens=loaded,
                ttft_s=answer.ttft_s,
                text=answer.text,
                text_equal=answer.text == self._reference,
            )
        )


def _source(answer: Answer, loaded_tokens: int, status: pb.GetStatusResponse) -> str:
    if loaded_tokens:
        return f"kvtier, {' and '.join(tier.name for tier in status.tiers if tier.blocks)} of this node"
    return "the engine's own cache" if answer.cached_tokens else "computed"


def warm_up(engine: Engine) -> None:
    """Requests of other prompts, a long and a short one, so that no measured request pays for first use."""
    for seed, count in ((-1, PROMPT_TOKENS), (-2, 2 * BLOCK_TOKENS), (-3, BLOCK_TOKENS // 2)):
        engine.complete(prompts.tokens(engine.tokenize, seed=seed, count=count), max_tokens=4)
