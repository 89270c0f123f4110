"""Loads of blocks that are still on their way from another node: message after message, within the budget."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.errors import InvalidRequest
from kvtier.types import TierKind
from kvtier.v1 import engine_pb2 as pb
from kvtier.v1 import engine_pb2_grpc
from tests.client.harness import DEADLINE_S, LAYOUT, Engine, chain, until

MIB = 1 << 20
SLOT = LAYOUT.slot_bytes
KEYS = chain("coming", 4)
LEASE = 7


def message(first: int, count: int, coming: int) -> pb.LoadResponse:
    """Blocks ``first ..`` lie in the slots of the same numbers."""
    slots = struct.pack(f"<{count}Q", *(SLOT * i for i in range(first, first + count)))
    return pb.LoadResponse(
        lease_id=LEASE, first=first, slots=slots, checksums=bytes(16 * count), lease_ttl_s=30, coming=coming
    )


class Node(engine_pb2_grpc.EngineServiceServicer):
    """Sends `first` at once and what `later` yields; releases are counted."""

    def __init__(self, arena: Path) -> None:
        self.arena = pb.Arena(arena_id=1, path=str(arena), size_bytes=MIB, allocated_bytes=MIB)
        self.offer = pb.LookupResponse(blocks=4, estimate_s=0.01, coming=2)
        self.later: Callable[[], Iterator[pb.LoadResponse]] = lambda: iter(())
        self.lookups: list[pb.LookupRequest] = []
        self.released: list[int] = []

    def Register(self, request: Any, context: Any) -> Any:
        return pb.RegisterResponse(
            node_id="node",
            incarnation=1,
            arena=self.arena,
            lease_ttl_s=30,
            reservation_ttl_s=60,
            max_keys_per_call=1000,
            slot_bytes=SLOT,
            verify_loads="off",
        )

    def Lookup(self, request: Any, context: Any) -> Any:
        self.lookups.append(request)
        return self.offer

    def Load(self, request: Any, context: Any) -> Iterator[Any]:
        yield message(0, 2, coming=2)
        yield from self.later()

    def Release(self, request: Any, context: Any) -> Any:
        self.released.append(request.lease_id)
        return pb.ReleaseResponse(valid=True)


@pytest.fixture
def node(tmp_path: Path, shm: Path) -> Iterator[Node]:
    (tmp_path / "engines").mkdir()
    arena = shm / "coming.arena"
    arena.write_bytes(np.random.default_rng(1).integers(0, 256, MIB, np.uint8).tobytes())
    node = Node(arena)
    server = grpc.server(ThreadPoolExecutor(8))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(node, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{tmp_path}/kvtier.sock")
    server.start()
    yield node
    server.stop(0).wait()


@pytest.fixture
def engine(tmp_path: Path, node: Node) -> Iterator[Engine]:
    engine = Engine(f"{tmp_path}/kvtier.sock")
    yield engine
    engine.close()


def slots_of(node: Node, count: int) -> np.ndarray:
    """What the first blocks have to look like in the engine's pages: ``[layers, count, bytes]``."""
    raw = np.frombuffer(Path(node.arena.path).read_bytes(), np.uint8)
    blocks = [raw[SLOT * i : SLOT * i + LAYOUT.block_bytes] for i in range(count)]
    return np.stack([block.reshape(LAYOUT.num_layers, -1) for block in blocks], axis=1)


def test_an_offer_says_what_is_coming(node: Node, engine: Engine) -> None:
    node.offer.tiers.add(tier=TierKind.DRAM, blocks=4)
    offer = engine.client.lookup("a", KEYS, block_compute_s=0.25)
    assert (offer.blocks, offer.coming) == (4, 2)
    assert node.lookups[0].block_compute_s == 0.25
    engine.client.lookup("a", KEYS)
    assert node.lookups[1].block_compute_s == 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be(engine: Engine, seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="block_compute_s"):
        engine.client.lookup("a", KEYS, block_compute_s=seconds)


def test_an_offer_of_more_than_it_has_is_a_miss(node: Node, engine: Engine) -> None:
    node.offer.coming = 5
    assert engine.client.lookup("a", KEYS).reason == "fault"


def test_what_comes_later_is_loaded_as_it_comes(node: Node, engine: Engine) -> None:
    first_is_there = threading.Event()

    def later() -> Iterator[pb.LoadResponse]:
        assert first_is_there.wait(DEADLINE_S)
        yield message(2, 1, coming=1)
        yield message(3, 1, coming=0)

    node.later = later
    want = slots_of(node, 4)

    def watch() -> None:
        until(
            lambda: np.array_equal(engine.memory[:, :2], want[:, :2]), "the first blocks are copied at once"
        )
        first_is_there.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = engine.client.load("a", KEYS, engine.pages, range(4), budget_s=DEADLINE_S)
    watcher.join()
    assert (result.loaded, result.failed_reason) == (4, "")
    assert np.array_equal(engine.memory[:, :4], want)
    assert node.released == [LEASE]


def test_a_pull_that_fails_leaves_what_had_come(node: Node, engine: Engine) -> None:
    def later() -> Iterator[pb.LoadResponse]:
        yield message(2, 1, coming=1)
        yield message(3, 0, coming=0)

    node.later = later
    result = engine.client.load("a", KEYS, engine.pages, range(4))
    assert (result.loaded, result.failed_reason) == (3, "missing")
    assert np.array_equal(engine.memory[:, :3], slots_of(node, 3))


def test_the_budget_cuts_the_wait_and_keeps_what_had_come(node: Node, engine: Engine) -> None:
    is_over = threading.Event()

    def later() -> Iterator[pb.LoadResponse]:
        is_over.wait(DEADLINE_S)
        yield message(2, 0, coming=0)

    node.later = later
    for _ in range(3):  # more often than the breaker allows answers to be late: it is not this node's fault
        result = engine.client.load("a", KEYS, engine.pages, range(4), budget_s=1.0)
        assert (result.loaded, result.failed_reason) == (2, "budget")
        assert np.array_equal(engine.memory[:, :2], slots_of(node, 2))
    assert node.released == [LEASE] * 3
    assert engine.client.lookup("b", KEYS).blocks == 4
    assert engine.client.stats().faults == 0
    is_over.set()


@pytest.mark.parametrize("bad", [message(3, 1, 0), message(1, 1, 0), message(2, 3, 0)])
def test_blocks_out_of_order_end_the_load(node: Node, engine: Engine, bad: pb.LoadResponse) -> None:
    node.later = lambda: iter([bad])
    result = engine.client.load("a", KEYS, engine.pages, range(4))
    assert result.loaded == 2
    assert result.failed_reason == "fault"
