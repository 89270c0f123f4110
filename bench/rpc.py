"""Which server flavour? aio on the core's loop against sync threads around a lock; ``bench rpc``.

Both serve the same `EngineService.Lookup` (translation, real core, holds, metrics) over a Unix socket,
in a process of their own; the client is the blocking one that engines have. A lookup of 256 and of 1024
keys that are all here, alone and while a second client asks for 1024 keys without pause. Rounds are
interleaved; p50 and p99 are over all calls of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import grpc

from bench.common import at_most, interleave, median, percentile
from kvtier.build import build
from kvtier.config import Config
from kvtier.core import messages as m
from kvtier.identity import open_identity
from kvtier.liveness import prepare_run_dir
from kvtier.metrics import Metrics
from kvtier.node import Node
from kvtier.server import wire
from kvtier.server.app import Server, server_options
from kvtier.types import Key, Layout, LayoutKind, LayoutOrder, TierKind, chain_keys, pack_keys
from kvtier.v1 import engine_pb2, engine_pb2_grpc

CALLS: Final = 300
SIZES: Final = (256, 1024)
SYNC_THREADS: Final = 8
ENGINE: Final = "bench"
P50_MS: Final = 0.6
P99_MS: Final = 3.0
LAYOUT: Final = Layout(
    kind=LayoutKind.GQA,
    num_layers=1,
    num_kv_heads=2,
    head_dim=32,
    dtype="float16",
    block_tokens=16,
    order=LayoutOrder.NHD,
    layer_block_bytes=4096,
)


def keys() -> list[Key]:
    """One prompt of as many blocks as the largest lookup."""
    return chain_keys(bytes(32), list(range(max(SIZES))), 1)


# ---- servers, each in a process of its own


class LockedEngineService(engine_pb2_grpc.EngineServiceServicer):
    """What the sync flavour would be: the same core behind a lock."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._seconds = node.metrics.rpc_seconds.labels("Lookup")

    def Lookup(self, request: engine_pb2.LookupRequest, context: Any) -> engine_pb2.LookupResponse:
        """As `EngineService.Lookup`."""
        begin_s = time.perf_counter()
        event = wire.lookup(request, self._node.config.max_keys_per_call)
        with self._lock:
            (reply,) = self._node.core.handle(event, time.monotonic())
        assert isinstance(reply, m.Offered)
        response = wire.offered(reply)
        self._seconds.observe(time.perf_counter() - begin_s)
        return response


async def _fill(node: Node) -> None:
    """Register one engine and commit the prompt; the bytes do not matter here."""
    lock = os.open(
        node.config.run_dir / "engines" / f"{ENGINE}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    fcntl.flock(lock, fcntl.LOCK_EX)  # held until this process ends
    register = m.RegisterEngine(os.urandom(16), ENGINE, LAYOUT, LAYOUT.fingerprint())
    await node.execute(register)
    reserve = m.Reserve(os.urandom(16), ENGINE, None, keys(), 0, LAYOUT.fingerprint())
    reserved = await node.execute(reserve)
    assert isinstance(reserved, m.Reserved)
    sums = [bytes(16)] * len(keys())
    await node.execute(m.Commit(os.urandom(16), ENGINE, reserved.reservation, keys(), sums))


async def _serve(flavour: str, home: Path, parent: Connection) -> None:
    config = Config(
        data_dir=home / "data",
        run_dir=home / "run",
        shm_dir=home / "shm",
        dram_bytes=64 << 20,
        extent_bytes=4 << 20,
        verify_commits="off",
        scrub_bytes_per_s=0,
        max_leased_fraction=1.0,
    )
    identity = open_identity(config.data_dir)
    prepare_run_dir(config.run_dir)
    node = await build(config, identity, Metrics())
    await node.start()
    await _fill(node)
    if flavour == "aio":
        arena: Any = node.tiers[TierKind.DRAM]
        server = Server(node, arena, config.socket)
        await server.start()
        parent.send("ready")
        await asyncio.to_thread(parent.recv)
        await server.stop()
    else:
        pool = ThreadPoolExecutor(SYNC_THREADS)
        sync = grpc.server(pool, options=server_options(config))
        engine_pb2_grpc.add_EngineServiceServicer_to_server(LockedEngineService(node), sync)  # type: ignore[no-untyped-call]
        sync.add_insecure_port(f"unix:{config.socket}")
        sync.start()
        parent.send("ready")
        await asyncio.to_thread(parent.recv)
        sync.stop(0).wait()
    await node.stop()
    identity.release()


def _process(flavour: str, home: Path, parent: Connection) -> None:
    asyncio.run(_serve(flavour, home, parent))


@contextmanager
def serving(flavour: str) -> Iterator[Path]:
    """A server process; yields its socket."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir="/dev/shm") as name:
        home = Path(name)
        (home / "shm").mkdir()
        mine, theirs = context.Pipe()
        process = context.Process(target=_process, args=(flavour, home, theirs), daemon=True)
        process.start()
        try:
            if not mine.poll(30):
                raise RuntimeError(f"the {flavour} server did not start")
            mine.recv()
            yield home / "run" / "kvtier.sock"
            mine.send("stop")
            process.join(10)
        finally:
            process.kill()
            process.join()


# ---- the client


class Client:
    """Blocking lookups on a connection of its own."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(
            f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._stub: Any = engine_pb2_grpc.EngineServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._packed = {size: pack_keys(keys()[:size]) for size in SIZES}
        self._fingerprint = LAYOUT.fingerprint()

    def lookup(self, size: int, request: str) -> None:
        """One lookup that finds everything."""
        message = engine_pb2.LookupRequest(
            engine_id=ENGINE,
            request_id=request,
            keys=self._packed[size],
            shard_count=1,
            fingerprint=self._fingerprint,
        )
        reply = self._stub.Lookup(message, timeout=5)
        assert reply.blocks == size, f"{reply.blocks} of {size} blocks were found: {reply.reason}"

    def times_ms(self, size: int) -> list[float]:
        """Of `CALLS` lookups, each for a request of its own."""
        times = []
        for number in range(CALLS):
            begin_s = time.perf_counter()
            self.lookup(size, f"r{number}")
            times.append((time.perf_counter() - begin_s) * 1e3)
        return times

    def close(self) -> None:
        """Hang up."""
        self._channel.close()


@contextmanager
def busy(client: Client) -> Iterator[None]:
    """A second client that asks without pause."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            client.lookup(max(SIZES), "busy")

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; see the module."""
    with ExitStack() as stack:
        arms: dict[str, Callable[[], list[float]]] = {}
        for flavour in ("aio", "sync"):
            socket = stack.enter_context(serving(flavour))
            client, other = Client(socket), Client(socket)
            stack.callback(client.close)
            stack.callback(other.close)
            for size in SIZES:
                client.times_ms(size)  # warm
                arms[f"{flavour}_{size}"] = lambda c=client, s=size: c.times_ms(s)  # type: ignore[misc]
            arms[f"{flavour}_256_busy"] = lambda c=client, o=other: _under_load(c, o)  # type: ignore[misc]
        rounds = interleave(arms, args.rounds)
    figures = {name: _summary(times) for name, times in rounds.items()}
    return {
        "calls_a_round": CALLS,
        "figures": figures,
        "chosen": "aio",
        "targets": {
            "lookup_256_p50_ms": at_most(figures["aio_256"]["p50_ms"], P50_MS),
            "lookup_256_p99_ms": at_most(figures["aio_256"]["p99_ms"], P99_MS),
            # aio keeps the core free of locks: it stays chosen while it costs no more than this
            "aio_over_sync_256_p50": at_most(
                figures["aio_256"]["p50_ms"] / figures["sync_256"]["p50_ms"], 1.25
            ),
        },
    }


def _under_load(client: Client, other: Client) -> list[float]:
    with busy(other):
        return client.times_ms(256)


def _summary(rounds: list[list[float]]) -> dict[str, Any]:
    times = [time_ms for each in rounds for time_ms in each]
    return {
        "p50_ms": percentile(times, 50),
        "p99_ms": percentile(times, 99),
        "round_p50_ms": [percentile(each, 50) for each in rounds],
        "median_of_round_p99_ms": median([percentile(each, 99) for each in rounds]),
    }
