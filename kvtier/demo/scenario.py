"""The demo: two nodes, an engine on each, one index; what one has computed the other one loads.

Two engines run at any time, of which one works: first one without kvtier beside that of node A, then those
of A and B. Every prompt is the same long report with one of two questions at its end.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.demo import model, prompts
from kvtier.demo.engine import BLOCK_TOKENS, Answer, Engine, require_vllm
from kvtier.demo.index import IndexProcess
from kvtier.demo.node import NodeProcess
from kvtier.demo.processes import stop_all
from kvtier.demo.result import COLD, HOT, LOCAL, REFILL, REMOTE, REPLICA, RESTART, Result, Run
from kvtier.v1 import admin_pb2 as pb

PROMPT_TOKENS: Final = 4010
ANSWER_TOKENS: Final = 24
SETTLE_S: Final = 1.3
"""vLLM's workers spin for a second after their last step, which would slow the other engine down."""
DRAM_BYTES: Final = 512 << 20
SHM_DIR: Final = Path("/dev/shm")
PATIENT: Final = {
    "lookup_timeout_s": 2.0,
    "call_timeout_s": 10.0,
    "load_floor_s": 10.0,
    "save_timeout_s": 20.0,
}
"""Deadlines of the connector. With its own ones a machine that is busy with other work sees a late answer,
which rightly counts as a miss; the demo is to show what is loaded, not how busy the machine is."""
PATIENT_NODE: Final = {"heartbeat_s": 1.0, "index_timeout_s": 1.0, "pull_floor_s": 10.0}
"""The same for the nodes; the heartbeat is short so that they find each other at once."""
WARM_UP_SEEDS: Final = {"A": (-1, -2, -3), "B": (-4, -5, -6), "": (-7, -8, -9)}
"""By node, so that each engine computes its own, and knows then how fast it computes."""

Progress = Callable[[str], None]


@contextmanager
def workplace() -> Iterator[Path]:
    """A private directory with a short name, gone afterwards, and so is `memory_of` it."""
    directory = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir="/tmp"))
    try:
        memory_of(directory).mkdir(mode=0o700)
        yield directory
    finally:
        stop_all()
        for each in (directory, memory_of(directory)):
            shutil.rmtree(each, ignore_errors=True)


def memory_of(directory: Path) -> Path:
    """Where nodes of this workplace keep their arenas: a daemon that is killed cannot remove its own."""
    return SHM_DIR / directory.name


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
    with workplace() as directory, ExitStack() as stack:
        return _Demo(progress, checkpoint, directory, stack, begin_s).run()


@dataclass(slots=True)
class _Place:
    """A node and its engine; both are replaced in the course of the demo."""

    name: str
    node: NodeProcess
    engine: Engine


class _Demo:
    def __init__(
        self, progress: Progress, checkpoint: Path, directory: Path, stack: ExitStack, begin_s: float
    ) -> None:
        self._progress = progress
        self._checkpoint = checkpoint
        self._directory = directory
        self._stack = stack
        self._begin_s = begin_s
        self._engines = 0
        self._prompts: list[list[int]] = []
        self._references: list[Answer] = []
        self._runs: list[Run] = []
        self._transfer = ""

    def run(self) -> Result:
        self._progress("starting an index and the nodes A and B")
        self._index = self._stack.enter_context(IndexProcess(self._directory / "index"))
        node_a, node_b = (self._start_node(name) for name in "AB")
        for node in (node_a, node_b):
            node.wait_peers(2)
        self._progress("starting two vLLM servers, one without kvtier and one on A (about a minute)")
        plain = self._start_engine("vLLM without kvtier", None)
        a = _Place("A", node_a, self._start_engine("vLLM on node A", node_a))
        for engine in (plain, a.engine):
            engine.wait_ready()
        self._ask_without_kvtier(plain)
        self._first_node(a)
        self._progress("killing vLLM on A; starting it anew, and a first one on B (about a minute)")
        a.engine.kill()
        a.engine = self._start_engine("vLLM on node A, started anew", node_a)
        b = _Place("B", node_b, self._start_engine("vLLM on node B", node_b))
        for place in (a, b):
            place.engine.wait_ready()
        self._restarted_engine(a)
        self._second_node(b)
        self._restarted_node(a, b)
        return self._result()

    # ---- the scenes

    def _ask_without_kvtier(self, plain: Engine) -> None:
        self._prompts = [
            prompts.tokens(plain.tokenize, seed=1, count=PROMPT_TOKENS, question=question)
            for question in range(prompts.QUESTIONS)
        ]
        warm_up(plain, WARM_UP_SEEDS[""])
        for question, prompt in enumerate(self._prompts):
            self._progress(f"asking without kvtier: question {question + 1}")
            plain.reset_prefix_cache()
            self._references.append(plain.complete(prompt, max_tokens=ANSWER_TOKENS))
        plain.stop()

    def _first_node(self, a: _Place) -> None:
        warm_up(a.engine, WARM_UP_SEEDS["A"])
        before = a.node.status().counters.stored_blocks
        self._ask(COLD, a, 0, loadable=len(self._prompts[0]))
        self._ask(HOT, a, 0, loadable=len(self._prompts[0]))
        self._progress("waiting until kvtier has all blocks, then emptying the engine's own cache")
        a.node.wait_stored(before + len(self._prompts[0]) // BLOCK_TOKENS)
        a.engine.reset_prefix_cache()
        self._ask(LOCAL, a, 0, loadable=len(self._prompts[0]))

    def _restarted_engine(self, a: _Place) -> None:
        warm_up(a.engine, WARM_UP_SEEDS["A"])
        self._ask(RESTART, a, 0, loadable=len(self._prompts[0]))
        a.engine.reset_prefix_cache()
        a.node.wait_published()

    def _second_node(self, b: _Place) -> None:
        time.sleep(SETTLE_S)
        warm_up(b.engine, WARM_UP_SEEDS["B"])
        warm_up(b.engine, WARM_UP_SEEDS["A"][1:2])  # what A has: the first pull pays for the connection
        before = b.node.status().counters
        self._ask(REMOTE, b, 1, loadable=self._shared())
        self._transfer = _transfer(b.node.admin.list_nodes())
        b.node.wait_stored(before.stored_blocks + (len(self._prompts[1]) - self._shared()) // BLOCK_TOKENS)
        b.engine.reset_prefix_cache()
        self._ask(REPLICA, b, 1, loadable=len(self._prompts[1]))
        b.node.wait_published()

    def _restarted_node(self, a: _Place, b: _Place) -> None:
        """All of A's memory is gone with it; its engine lives on and has nothing of its own."""
        self._progress("killing node A and starting it again, with nothing in its memory")
        a.node.kill()
        a.node = self._start_node("A")
        warm_up(a.engine, WARM_UP_SEEDS["A"][1:2])  # vLLM's scheduler learns of the new daemon by asking it
        a.node.wait_engine()
        for node in (a.node, b.node):
            node.wait_peers(2)
        time.sleep(SETTLE_S)
        self._ask(REFILL, a, 1, loadable=len(self._prompts[1]))

    # ---- what they are made of

    def _start_node(self, name: str) -> NodeProcess:
        options = {**PATIENT_NODE, **self._index.options, "dram_bytes": DRAM_BYTES, "node_name": name}
        options["shm_dir"] = memory_of(self._directory)
        return self._stack.enter_context(NodeProcess(self._directory / name, **options))

    def _start_engine(self, name: str, node: NodeProcess | None) -> Engine:
        self._engines += 1
        where = self._directory / f"engine{self._engines}"
        socket = None if node is None else node.socket
        engine = Engine(name, self._checkpoint, where, kvtier_socket=socket, connector=PATIENT)
        return self._stack.enter_context(engine)

    def _shared(self) -> int:
        return prompts.shared_tokens(*self._prompts)

    def _ask(self, name: str, place: _Place, question: int, *, loadable: int) -> None:
        """`loadable`: leading tokens of the prompt that have been computed before."""
        self._progress(f"asking: {name}")
        before = place.node.status().counters
        answer = place.engine.complete(self._prompts[question], max_tokens=ANSWER_TOKENS)
        after = place.node.status().counters
        loaded, pulled = (
            (getattr(after, counter) - getattr(before, counter)) * BLOCK_TOKENS
            for counter in ("loaded_blocks", "pulled_blocks")
        )
        self._runs.append(
            Run(
                name=name,
                node=place.name,
                question=question + 1,
                source=_source(answer, loaded, pulled),
                prompt_tokens=answer.prompt_tokens,
                loaded_tokens=loaded,
                pulled_tokens=pulled,
                loadable_tokens=loadable // BLOCK_TOKENS * BLOCK_TOKENS,
                ttft_s=answer.ttft_s,
                text=answer.text,
                text_equal=answer.text == self._references[question].text,
            )
        )

    def _result(self) -> Result:
        return Result(
            model=model.MODEL_NAME,
            block_tokens=BLOCK_TOKENS,
            shared_tokens=self._shared(),
            transfer=self._transfer,
            reference_ttft_s=self._references[0].ttft_s,
            reference_texts=tuple(each.text for each in self._references),
            runs=tuple(self._runs),
            seconds=time.monotonic() - self._begin_s,
        )


def _source(answer: Answer, loaded_tokens: int, pulled_tokens: int) -> str:
    if loaded_tokens:
        return "kvtier, the other node" if pulled_tokens else "kvtier, this node"
    return "the engine's own cache" if answer.cached_tokens else "computed"


def _transfer(nodes: pb.ListNodesResponse) -> str:
    """How this node reads from the other one."""
    return ", ".join(sorted({node.transfer for node in nodes.nodes if node.transfer and not node.is_self}))


def warm_up(engine: Engine, seeds: Sequence[int] = (-1, -2, -3)) -> None:
    """Requests of other prompts, a long and short ones, so that no measured request pays for first use."""
    counts = {0: PROMPT_TOKENS, 1: 2 * BLOCK_TOKENS, 2: BLOCK_TOKENS // 2}
    for seed in seeds:
        count = counts[(-seed - 1) % 3]
        engine.complete(prompts.tokens(engine.tokenize, seed=seed, count=count), max_tokens=4)
