"""Blocks pulled from a peer's arena: what the verified pipeline reaches of one big raw transfer.

The owner is a daemon in a process of its own. The puller is what a daemon runs (`kvtier.remote.pulls`, with
its link, leases, batches and checksums), here in the bench's own process, so that it can be given one pull
after the other into the same slots. The denominator is one transfer of the same bytes in one piece by the
same transport, without lease and verification, in the same rounds: "raw".
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from bench.common import MIN_ROUNDS, Memcpy, at_least, median, void_reason
from kvtier.client import EngineClient, Pages
from kvtier.config import Config
from kvtier.core import messages as m
from kvtier.demo.index import IndexProcess
from kvtier.demo.node import NodeProcess
from kvtier.demo.processes import interruptible
from kvtier.demo.scenario import workplace
from kvtier.hashing import Hasher
from kvtier.interfaces import Remote, Transfer
from kvtier.metrics import Metrics
from kvtier.remote.link import Peers
from kvtier.remote.pulls import Puller
from kvtier.tiers.arena import Arena
from kvtier.transfer.opening import open_transfers
from kvtier.types import (
    PROTOCOL_VERSION,
    Key,
    Layout,
    LayoutKind,
    LayoutOrder,
    Namespace,
    NodeRecord,
    Slot,
    chain_keys,
)

BLOCKS: Final = 256
EXTENT_BYTES: Final = 64 << 20
OWNER_BYTES: Final = 1280 << 20
ASKER_BYTES: Final = 320 << 20
PEERS: Final = 4
TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.02
TCP_TARGET: Final = 1.1
SHARED_MEMORY_TARGET: Final = 0.75
LAYOUTS: Final = {
    "1 MiB": Layout(LayoutKind.GQA, 32, 2, 64, "bfloat16", 64, LayoutOrder.HND, 2 * 2 * 64 * 64 * 2),
    "720 KiB": Layout(LayoutKind.GQA, 30, 3, 64, "bfloat16", 32, LayoutOrder.HND, 2 * 3 * 64 * 32 * 2),
}
ARMS: Final = {"nixl": ("nixl", ""), "nixl, tcp": ("nixl", "tcp"), "stream": ("stream", "")}
"""Name -> transfer, and the transports that UCX is held to."""


class Asker:
    """One puller with an arena and transfers of its own."""

    def __init__(self, owner: NodeRecord, directory: Path, transfer: str, **options: Any) -> None:
        self.metrics = Metrics()
        self._owner = owner
        self._node = uuid.uuid4().hex
        self._config = Config(
            data_dir=directory,
            run_dir=directory,
            index="none",
            transfer=transfer,
            dram_bytes=ASKER_BYTES,
            **options,
        )
        self._transfers: list[Transfer] = []
        self._pulls = 0

    async def open(self) -> None:
        """Ready to pull."""
        self.arena = Arena(
            node_id=self._node,
            incarnation=time.time_ns() & 0xFFFF_FFFF,
            capacity_bytes=ASKER_BYTES,
            extent_bytes=EXTENT_BYTES,
            shm_dir=self._config.shm_dir,
            old_arena_deadline_s=TIMEOUT_S,
        )
        await self.arena.open()
        self._peers = Peers((self._node, 1), self._config, self._transfers)
        self._hasher = Hasher({self.arena.kind: self.arena})
        self._transfers += await open_transfers(
            self._config,
            self.arena.memory,
            self._peers.channel_of,
            self._node,
            count=self.metrics.count_stream,
        )
        assert self._transfers, f"{self._config.transfer} does not work here"
        self._peers.update([self._owner])
        self._puller = Puller(
            self._peers, self._transfers, self.arena.view, self._hasher, self._config, self.metrics
        )

    async def pull(self, keys: list[Key], layout: Layout) -> float:
        """Seconds until all of it is here and verified, its lease given back."""
        self._pulls += 1
        arrived: list[int] = []
        ended: list[str] = []

        def report(event: m.Arrived | m.PullEnded) -> None:
            if isinstance(event, m.Arrived):
                arrived.append(len(event.checksums))
            else:
                ended.append(event.fault)

        pull = m.Pull(
            pull=self._pulls,
            node=self._owner.node,
            incarnation=self._owner.incarnation,
            shard=0,
            keys=keys,
            slots=self._slots(len(keys), layout.slot_bytes),
            block_bytes=layout.block_bytes,
            fingerprint=layout.fingerprint(),
            timeout_s=TIMEOUT_S,
        )
        begin_s = time.perf_counter()
        await self._puller.run(pull, report)
        took_s = time.perf_counter() - begin_s
        assert (sum(arrived), ended) == (len(keys), [""]), (arrived, ended)
        return took_s

    async def raw(self, size_bytes: int) -> float:
        """Seconds for so many bytes in one piece."""
        link = self._peers.get(self._owner.node)
        assert link is not None
        peer = await link.hello(TIMEOUT_S)
        (transfer,) = self._transfers
        remote = Remote(
            node=peer.node,
            incarnation=peer.incarnation,
            address=self._owner.address,
            arena=peer.arena_id,
            base_address=peer.base_address,
            metadata=peer.offers[transfer.name],
            lease=0,
        )
        begin_s = time.perf_counter()
        await transfer.pull(remote, [0], [size_bytes], [0], TIMEOUT_S)
        return time.perf_counter() - begin_s

    def _slots(self, count: int, slot_bytes: int) -> list[Slot]:
        each = EXTENT_BYTES // slot_bytes
        return [
            Slot(self.arena.arena_id, i // each, i // each * EXTENT_BYTES + i % each * slot_bytes, slot_bytes)
            for i in range(count)
        ]

    async def close(self) -> None:
        """Nothing is left."""
        await self._peers.close()
        for transfer in self._transfers:
            await transfer.close()
        self._hasher.close()
        await self.arena.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Owner:
    """A daemon that holds `BLOCKS` blocks of each layout, stored by a real client."""

    def __init__(self, directory: Path, index: IndexProcess, transfer: str) -> None:
        self.node = NodeProcess(
            directory,
            dram_bytes=OWNER_BYTES,
            extent_bytes=EXTENT_BYTES,
            transfer=transfer,
            max_given_fraction=1.0,
            scrub_bytes_per_s=0,
            **index.options,
        )
        self.keys = {name: self._store(layout) for name, layout in LAYOUTS.items()}
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._offers(transfer):
            assert time.monotonic() < deadline_s, f"{transfer} does not work here"
            time.sleep(POLL_S)

    def _offers(self, transfer: str) -> bool:
        return any(its.name == transfer and its.usable for its in self.node.status().transfers)

    def _store(self, layout: Layout) -> list[Key]:
        root = Namespace(b"bench", "bfloat16", layout.fingerprint(), layout.block_tokens).root()
        keys = chain_keys(root, np.zeros(BLOCKS * layout.block_tokens, np.int64), layout.block_tokens)
        memory = np.random.default_rng(1).integers(
            0, 256, (layout.num_layers, BLOCKS, layout.layer_block_bytes), np.uint8
        )
        with EngineClient(str(self.node.socket), layout, call_timeout_s=TIMEOUT_S) as client:
            stored = client.store(None, keys, Pages.from_tensors(list(memory), layout), range(BLOCKS))
        assert stored.committed == BLOCKS, stored
        return keys

    def record(self) -> NodeRecord:
        """As the index would name it."""
        status = self.node.status()
        return NodeRecord(
            node=status.node_id,
            incarnation=status.incarnation,
            instance="bench",
            name="owner",
            address=status.peer_address,
            protocol_version=PROTOCOL_VERSION,
            capacity_bytes=OWNER_BYTES,
            resident_bytes=0,
        )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; see the module."""
    rounds = max(args.rounds, MIN_ROUNDS)
    results: dict[str, Any] = {"rounds": rounds, "blocks": BLOCKS, "arms": {}, "targets": {}}
    memcpy = Memcpy()
    rates: list[float] = []
    with interruptible(), workplace() as directory, IndexProcess(directory / "i") as index:
        for name, (transfer, ucx) in ARMS.items():
            print(f"bench remote: {name}", file=sys.stderr, flush=True)
            with _transports(ucx):
                owner = Owner(directory / f"n{len(results['arms'])}", index, transfer)
                try:
                    arm = asyncio.run(_measure(owner, directory, transfer, rounds))
                finally:
                    owner.node.stop()
            rates.append(median([memcpy() for _ in range(rounds)]))
            results["arms"][name] = arm
    for name, target in (("nixl, tcp", TCP_TARGET), ("nixl", SHARED_MEMORY_TARGET)):
        for layout in LAYOUTS:
            share = results["arms"][name]["layouts"][layout]["share_of_raw"]
            results["targets"][f"{name}: {BLOCKS} blocks of {layout}, of raw"] = at_least(share, target)
    return results | {"memcpy_bytes_per_s": median(rates), "void": void_reason(min(rates))}


async def _measure(owner: Owner, directory: Path, transfer: str, rounds: int) -> dict[str, Any]:
    record = owner.record()
    arm: dict[str, Any] = {"layouts": {}}
    has_raw = transfer != "stream"  # a stream sends slots under a lease only
    async with Asker(record, directory, transfer) as asker:
        for name, layout in LAYOUTS.items():
            keys, size_bytes = owner.keys[name], BLOCKS * layout.block_bytes
            arms: dict[str, Callable[[], Any]] = {
                "pull": lambda k=keys, its=layout: asker.pull(k, its),  # type: ignore[misc]
                "one": lambda k=keys, its=layout: asker.pull(k[:1], its),  # type: ignore[misc]
            }
            if has_raw:
                arms["raw"] = lambda size=size_bytes: asker.raw(size)  # type: ignore[misc]
            for measure in arms.values():  # connections and code paths are warm
                await measure()
            raw: dict[str, list[float]] = {arm: [] for arm in arms}
            for _ in range(rounds):
                for what, measure in arms.items():
                    raw[what].append(await measure())
            figures: dict[str, Any] = {
                "pull_bytes_per_s": size_bytes / median(raw["pull"]),
                "one_block_p50_ms": 1e3 * median(raw["one"]),
                "raw_seconds": raw,
            }
            if has_raw:
                figures["raw_bytes_per_s"] = size_bytes / median(raw["raw"])
                figures["share_of_raw"] = median(raw["raw"]) / median(raw["pull"])
            arm["layouts"][name] = figures
    arm[f"{PEERS} peers, bytes_per_s"] = await _many(owner, record, directory, transfer, rounds)
    return arm


async def _many(owner: Owner, record: NodeRecord, directory: Path, transfer: str, rounds: int) -> float:
    """What `PEERS` peers get in all when they pull the same blocks from one owner at once."""
    name, layout = next(iter(LAYOUTS.items()))
    askers = [Asker(record, directory, transfer) for _ in range(PEERS)]
    opened: list[Asker] = []
    try:
        for asker in askers:
            await asker.open()
            opened.append(asker)
        took_s: list[float] = []
        for _ in range(rounds + 1):
            begin_s = time.perf_counter()
            await asyncio.gather(*(asker.pull(owner.keys[name], layout) for asker in askers))
            took_s.append(time.perf_counter() - begin_s)
    finally:
        for asker in opened:
            with suppress(Exception):
                await asker.close()
    return PEERS * BLOCKS * layout.block_bytes / median(took_s[1:])


@contextmanager
def _transports(names: str) -> Iterator[None]:
    """What UCX may use in the owner and here; empty: whatever it chooses."""
    before = os.environ.pop("UCX_TLS", None)
    if names:
        os.environ["UCX_TLS"] = names
    try:
        yield
    finally:
        os.environ.pop("UCX_TLS", None)
        if before is not None:
            os.environ["UCX_TLS"] = before
