"""Two engines side by side, one with kvtier and one without: what the benchmarks compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvtier.demo import model
from kvtier.demo.engine import Engine
from kvtier.demo.node import NodeProcess
from kvtier.demo.processes import interruptible
from kvtier.demo.scenario import warm_up, workplace

DRAM_BYTES: Final = 1 << 30
SETTLE_S: Final = 1.3
"""vLLM's workers spin for a second after their last step, which would slow the other engine down."""


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
