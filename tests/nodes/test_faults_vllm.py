"""Two real vLLM engines on two nodes, and what goes wrong when one is to load what the other has computed.

In each fault: the text is that of the engine that computed it, no request fails, none waits longer than for
computing and the deadlines of its node, a metric and a line of a log say what happened, and without a hand
blocks are shared again afterwards.
"""

from __future__ import annotations

import itertools
import random
import re
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
from tests.nodes.harness import OTHER_PROTOCOL, WRONG_CLOCK, Node, Valkey, prompt
from tests.nodes.test_faults import during

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LEASE_TTL_S = 0.5
"""Of the owner's leases: shorter than a slow pull."""
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
    failed_pulls: float = 0
    published: float = 0

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
    owner = Node(
        directory / "owner", shm, valkey.url, transfer="stream", lease_ttl_s=LEASE_TTL_S, tick_s=0.05
    )
    asker = Node(directory / "asker", shm, valkey.url, transfer="stream")
    nodes = owner, asker
    try:
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
Told = Callable[[World], bool]


@dataclass(frozen=True)
class Fault:
    """How it begins and ends; the metric that says so while it lasts, or after it; and a line of whose log.

    `shares`: it may not keep blocks from being shared.
    """

    begin: Act
    end: Act
    metric: Told
    line: str
    whose: str = "asker"
    shares: bool = False


def proxy(mode: str) -> Act:
    return lambda world: setattr(world.owner.proxy, "mode", mode)


def nothing(world: World) -> None:
    """It passes by itself."""


def restart(world: World, program: str | None = None) -> None:
    world.owner.daemon.kill()
    world.owner.daemon.start(program)


def overwrite(world: World) -> None:
    """The owner's lease runs out while the bytes still travel, and others take its slots."""
    world.owner.proxy.mode = "slow"
    time.sleep(LEASE_TTL_S + 0.2)
    for _ in range(6):
        world.owner.engine.store(prompt(40), range(40))


def peers(count: int, **labels: str) -> Told:
    return lambda world: world.asker.metric("kvtier_peers", **labels) == count


def pulls_failed(world: World) -> bool:
    return world.asker.failed_pulls() > world.failed_pulls


def gives_up(world: World) -> bool:
    return peers(1, state="failing")(world) or pulls_failed(world)


def began_anew(world: World) -> bool:
    return world.owner.metric("kvtier_node_info", incarnation=str(world.owner.status().incarnation)) == 1


WRONG = WRONG_CLOCK.format(offset_s=3600)
GIVES_UP = "a pull failed|left alone until it answers"
FAULTS: dict[str, Fault] = {
    "killed": Fault(
        lambda world: world.owner.daemon.kill(),
        lambda world: world.owner.daemon.start(),
        peers(0),
        "a node is gone",
    ),
    "stopped": Fault(
        lambda world: world.owner.daemon.signal(signal.SIGSTOP),
        lambda world: world.owner.daemon.signal(signal.SIGCONT),
        peers(0),
        "a node is gone",
    ),
    "blackholed": Fault(proxy("swallow"), nothing, gives_up, GIVES_UP),
    "refused": Fault(proxy("refuse"), nothing, gives_up, GIVES_UP),
    "garbage": Fault(proxy("garbage"), nothing, gives_up, GIVES_UP),
    "stale metadata": Fault(restart, nothing, began_anew, "a node is there"),
    "other protocol": Fault(
        lambda world: restart(world, OTHER_PROTOCOL), restart, peers(1, state="failing"), "protocol"
    ),
    "evicted": Fault(overwrite, nothing, pulls_failed, "a pull failed|a lease had ended"),
    "wrong clock": Fault(
        lambda world: restart(world, WRONG),
        restart,
        lambda world: world.owner.metric("kvtier_clock_ahead_seconds") > 3000,
        "clock is not that of the index",
        whose="owner",
        shares=True,
    ),
    "index killed": Fault(
        lambda world: world.valkey.kill(),
        lambda world: world.valkey.start(),
        lambda world: world.asker.metric("kvtier_index_up") == 0,
        "the index cannot be reached",
    ),
    "index flushed": Fault(
        lambda world: world.valkey.say("FLUSHALL"),
        nothing,
        lambda world: world.owner.metric("kvtier_index_changes_total", change="publish") > world.published,
        "publishing all that it has|publishing everything",
        whose="owner",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_no_request_and_no_truth(world: World, fault: str) -> None:
    its = FAULTS[fault]
    begin_s = time.monotonic()
    world.near.one([random.Random(next(seeds)).randrange(3, 500) for _ in range(TOKENS)])
    computing_s = time.monotonic() - begin_s
    tokens, wanted = world.computed_far()
    world.failed_pulls = world.asker.failed_pulls()
    world.published = world.owner.metric("kvtier_index_changes_total", change="publish")
    whose: Node = getattr(world, its.whose)
    read = len(whose.log())

    def ask() -> Answer:
        begin_s = time.monotonic()
        answer = world.near.one(tokens)
        took_s = time.monotonic() - begin_s
        assert took_s < 3 * computing_s + WAITS_S, f"the request waited {took_s:.1f} s"
        return answer

    try:
        answer = during(lambda: its.begin(world), ask, 0.0)
        assert answer.agrees(wanted), "another text"
        more = world.near.one(tokens[:-1])  # while it lasts
        assert len(more.tokens) == len(wanted.tokens)
        until(lambda: its.metric(world), "a metric says so")
        until(lambda: re.search(its.line, whose.log()[read:]) is not None, "the log says so")
        if its.shares:
            until(world.is_shared, "blocks are shared all the same")
    finally:
        its.end(world)
        world.owner.proxy.mode = "pass"
    until(world.is_shared, "blocks are shared again")
