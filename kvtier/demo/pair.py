"""Two engines side by side: what the benchmarks compare.

Either one with kvtier and one without, or both with kvtier, each on a node of its own; or one alone, whose
node has NVMe below its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.demo import model
from kvtier.demo.engine import Engine
from kvtier.demo.index import IndexProcess
from kvtier.demo.node import NodeProcess
from kvtier.demo.processes import interruptible
from kvtier.demo.scenario import SETTLE_S, WARM_UP_SEEDS, warm_up, workplace

DRAM_BYTES: Final = 1 << 30
NVME_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class Pair:
    """Both engines are warm, and only one of them should be busy at a time."""

    node: NodeProcess
    plain: Engine
    connected: Engine

    def settle(self) -> None:
        """Wait until neither engine spins any more: call it before an engine takes its turn."""
        time.sleep(SETTLE_S)


@contextmanager
def pair(progress: Callable[[str], None]) -> Iterator[Pair]:
    """Start a daemon and both engines; all of it is gone afterwards. Main thread only."""
    with interruptible():
        checkpoint = model.prepare(progress)
        with workplace() as directory, NodeProcess(directory / "node", dram_bytes=DRAM_BYTES) as node:
            progress("starting two vLLM servers, one with kvtier (about two minutes)")
            with (
                Engine("vLLM without kvtier", checkpoint, directory / "plain") as plain,
                Engine(
                    "vLLM with kvtier", checkpoint, directory / "connected", kvtier_socket=node.socket
                ) as connected,
            ):
                for engine in (plain, connected):
                    engine.wait_ready()
                progress("warming them up")
                for engine in (plain, connected):
                    warm_up(engine)
                yield Pair(node, plain, connected)


@dataclass(frozen=True, slots=True)
class FarPair:
    """Two nodes that share an index, a warm engine on each; only one should be busy at a time."""

    near_node: NodeProcess
    far_node: NodeProcess
    near: Engine
    far: Engine

    def settle(self) -> None:
        """Wait until neither engine spins any more: call it before an engine takes its turn."""
        time.sleep(SETTLE_S)


@contextmanager
def far_pair(progress: Callable[[str], None]) -> Iterator[FarPair]:
    """Start an index, two nodes and an engine on each; all of it is gone afterwards. Main thread only."""
    with interruptible():
        checkpoint = model.prepare(progress)
        with workplace() as directory, IndexProcess(directory / "index") as index, ExitStack() as stack:
            near_node, far_node = (
                stack.enter_context(
                    NodeProcess(directory / name, node_name=name, dram_bytes=DRAM_BYTES, **index.options)
                )
                for name in ("near", "far")
            )
            progress("starting two vLLM servers, one on each of two nodes (about two minutes)")
            near, far = (
                stack.enter_context(
                    Engine(f"vLLM, {name}", checkpoint, directory / f"e-{name}", kvtier_socket=node.socket)
                )
                for name, node in (("near", near_node), ("far", far_node))
            )
            for engine in (near, far):
                engine.wait_ready()
            for node in (near_node, far_node):
                node.wait_peers(2)
            progress("warming them up")
            both = FarPair(near_node, far_node, near, far)
            warm_up(far, WARM_UP_SEEDS["A"])
            far_node.wait_published()
            both.settle()
            warm_up(near, WARM_UP_SEEDS["B"])
            warm_up(near, WARM_UP_SEEDS["A"][1:2])  # what the other one has: the first pull connects
            yield both


class Below:
    """A node with NVMe below its memory, and a warm engine on it.

    Attributes
    ----------
    node
        Another object after each `forget`.
    """

    def __init__(self, directory: Path, checkpoint: Path) -> None:
        self._directory = directory
        self.node = self._start()
        self.engine = Engine(
            "vLLM above NVMe", checkpoint, directory / "engine", kvtier_socket=self.node.socket
        )

    def _start(self) -> NodeProcess:
        return NodeProcess(
            self._directory / "node",
            dram_bytes=DRAM_BYTES,
            index="none",
            nvme_paths=self._directory / "nvme",
            nvme_bytes=NVME_BYTES,
            demote_high_fraction=0.01,  # all that is stored goes down at once
        )

    def settle(self) -> None:
        """Wait until the engine does not spin any more."""
        time.sleep(SETTLE_S)

    def wait_demoted(self, blocks: int) -> None:
        """Wait until so many blocks are on NVMe; raises `DemoFailed`."""
        self.node.wait_blocks("nvme", blocks)

    def forget(self) -> None:
        """Kill the node and start it again: what it had lies on NVMe alone."""
        self.node.kill()
        self.node = self._start()
        warm_up(
            self.engine, WARM_UP_SEEDS["A"][1:2]
        )  # vLLM's scheduler learns of the new daemon by asking it
        self.node.wait_engine()
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Both are gone; idempotent."""
        self.engine.stop()
        self.node.stop()


@contextmanager
def below(progress: Callable[[str], None]) -> Iterator[Below]:
    """Start a daemon with NVMe and an engine; all of it is gone afterwards. Main thread only."""
    with interruptible():
        checkpoint = model.prepare(progress)
        with workplace() as directory:
            progress("starting a vLLM server on a node with NVMe (about a minute)")
            it = Below(directory, checkpoint)
            try:
                it.engine.wait_ready()
                warm_up(it.engine)
                yield it
            finally:
                it.close()
