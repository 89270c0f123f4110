"""Two real vLLM engines on two nodes, and what goes wrong when one is to load what the other has computed.

In each fault: the text is that of the engine that computed it, no request fails, none waits longer than for
computing and the deadlines of its node, and without a hand blocks are shared again afterwards.
"""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.client.harness import until
from tests.connectors.conftest import home, make_engine, model  # noqa: F401
from tests.connectors.engine import BLOCK_TOKENS, PATIENT, Answer, Engine
from tests.nodes.harness import Node, Valkey
from tests.nodes.test_faults import during

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 900
"""So many that loading pays even with this small model, which computes a block in less than a millisecond."""
SAVED_S = 5.0
WAITS_S = 2 * PATIENT["load_floor_s"] + PATIENT["lookup_timeout_s"]
seeds = itertools.count(9000)


@dataclass
class World:
    """`far` computes on the node `owner`, `near` answers on the node `asker`."""

    valkey: Valkey
    owner: Node
    asker: Node
    far: Engine
    near: Engine

    def computed_far(self) -> tuple[list[int], Answer]:
        """A prompt that only the far engine has seen, and its answer; the index knows its blocks."""
        found: list[tuple[list[int], Answer]] = []

        def is_stored() -> bool:
            """A save is lost while the engine has not found a new daemon: then another prompt is tried."""
            numbers = random.Random(next(seeds))
            tokens = [numbers.randrange(3, 500) for _ in range(TOKENS)]
            stored = self.owner.status().counters.stored_blocks
            found.append((tokens, self.far.one(tokens)))
            deadline_s = time.monotonic() + SAVED_S
            while self.owner.status().counters.stored_blocks < stored + TOKENS // BLOCK_TOKENS:
                if time.monotonic() > deadline_s:
                    return False
                time.sleep(0.02)
            return True

        until(is_stored, "it is stored")
        until(lambda: self.owner.status().unpublished == 0, "it is published")
        return found[-1]

    def is_shared(self) -> bool:
        """Whether the near engine loads what the far one has just computed; its text is right anyway."""
        tokens, wanted = self.computed_far()
        answer = self.near.one(tokens)
        assert answer.agrees(wanted)
        return answer.cached > 0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, make_engine: Callable[..., Engine]) -> Iterator[World]:  # noqa: F811
    shm = Path(tempfile.mkdtemp(prefix="kvtier-nodes-", dir="/dev/shm"))
    directory = tmp_path_factory.mktemp("nodes")
    valkey = Valkey(directory)
    valkey.start()
    nodes = [Node(directory / name, shm, valkey.url, transfer="stream") for name in ("owner", "asker")]
    try:
        owner, asker = nodes
        far, near = (make_engine({"socket": node.daemon.socket, "verify_loads": "all"}) for node in nodes)
        until(lambda: owner.peers() and asker.peers(), "the two nodes see each other")
        world = World(valkey, owner, asker, far, near)
        for engine in (far, near):  # code paths and the prefill rate are warm
            for seed in (1, 2):
                engine.one([seed + 3] * TOKENS)
        until(world.is_shared, "blocks are shared")
        yield world
    finally:
        for node in nodes:
            node.close()
        valkey.kill()
        shutil.rmtree(shm)


Act = Callable[[World], object]


def proxy(mode: str) -> Act:
    return lambda world: setattr(world.owner.proxy, "mode", mode)


def nothing(world: World) -> None:
    """It passes by itself."""


FAULTS: dict[str, tuple[Act, Act]] = {
    "killed": (lambda world: world.owner.daemon.kill(), lambda world: world.owner.daemon.start()),
    "stopped": (
        lambda world: world.owner.daemon.signal(signal.SIGSTOP),
        lambda world: world.owner.daemon.signal(signal.SIGCONT),
    ),
    "blackholed": (proxy("swallow"), nothing),
    "refused": (proxy("refuse"), nothing),
    "garbage": (proxy("garbage"), nothing),
    "index killed": (lambda world: world.valkey.kill(), lambda world: world.valkey.start()),
    "index flushed": (lambda world: world.valkey.say("FLUSHALL"), nothing),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_no_request_and_no_truth(world: World, fault: str) -> None:
    begin, end = FAULTS[fault]
    begin_s = time.monotonic()
    world.near.one([random.Random(next(seeds)).randrange(3, 500) for _ in range(TOKENS)])
    computing_s = time.monotonic() - begin_s
    tokens, wanted = world.computed_far()
    try:
        begin_s = time.monotonic()
        answer = during(lambda: begin(world), lambda: world.near.one(tokens), 0.0)
        took_s = time.monotonic() - begin_s
        assert answer.agrees(wanted), "another text"
        assert took_s < 3 * computing_s + WAITS_S, f"the request waited {took_s:.1f} s"
        more = world.near.one(tokens[:-1])  # while it lasts
        assert len(more.tokens) == len(wanted.tokens)
    finally:
        end(world)
        world.owner.proxy.mode = "pass"
    until(world.is_shared, "blocks are shared again")
