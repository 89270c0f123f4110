"""A real Valkey, indexes on it, and one that can be cut off."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvtier.config import Config
from kvtier.errors import IndexFault
from kvtier.interfaces import Index
from kvtier.types import BlockId, Location, NodeRecord, TierKind

DEADLINE_S = 30.0


async def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition` holds."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"never: {what}"
        await asyncio.sleep(0.01)


def config(tmp_path: Path, port: int, **values: Any) -> Config:
    """Of one node on the Valkey at `port`, quick to notice everything."""
    defaults: dict[str, Any] = {
        "data_dir": tmp_path / "data",
        "run_dir": tmp_path / "run",
        "shm_dir": tmp_path,
        "extent_bytes": 1 << 20,
        "dram_bytes": 4 << 20,
        "metrics_port": -1,
        "index": f"redis://127.0.0.1:{port}",
        "index_prefix": f"test-{os.urandom(6).hex()}",
        "index_timeout_s": 5.0,
        "heartbeat_s": 0.2,
        "dead_after_s": 2.0,
    }
    return Config(**(defaults | values))


def record(node: int = 1, incarnation: int = 1, instance: str = "a", **values: Any) -> NodeRecord:
    """What a node says of itself."""
    defaults: dict[str, Any] = {
        "node": f"{node:032x}",
        "name": f"node-{node}",
        "address": f"127.0.0.1:{1000 + node}",
        "protocol_version": 1,
        "capacity_bytes": 1 << 30,
        "resident_bytes": 0,
    }
    return NodeRecord(incarnation=incarnation, instance=instance, **(defaults | values))


def blocks(count: int, first: int = 0, shard: int = 0) -> list[BlockId]:
    """So many ids, all different."""
    return [BlockId((first + i).to_bytes(8, "little") * 4, shard) for i in range(count)]


class Cuttable(Index):
    """A real index and a wire that can be cut, or that hangs."""

    name: ClassVar[str] = "cuttable"

    def __init__(self, inner: Index) -> None:
        self.inner = inner
        self.is_cut = False
        self.passes = asyncio.Event()
        self.passes.set()
        self.calls: list[str] = []
        self.sizes: list[int] = []

    @property
    def garbage(self) -> int:
        """See `Index`."""
        return self.inner.garbage

    async def _travel(self, call: str, size: int = 0) -> None:
        self.calls.append(call)
        self.sizes.append(size)
        await self.passes.wait()
        if self.is_cut:
            raise IndexFault("the wire is cut: mend it")

    async def open(self) -> None:
        await self._travel("open")
        await self.inner.open()

    async def register(self, record: NodeRecord) -> int:
        await self._travel("register")
        return await self.inner.register(record)

    async def heartbeat(self, record: NodeRecord) -> bool:
        await self._travel("heartbeat")
        return await self.inner.heartbeat(record)

    async def leave(self, record: NodeRecord) -> None:
        await self._travel("leave")
        await self.inner.leave(record)

    async def nodes(self) -> list[NodeRecord]:
        await self._travel("nodes")
        return await self.inner.nodes()

    async def publish(self, record: NodeRecord, blocks: Sequence[BlockId], tier: TierKind) -> None:
        await self._travel("publish", len(blocks))
        await self.inner.publish(record, blocks, tier)

    async def withdraw(self, record: NodeRecord, blocks: Sequence[BlockId], *, in_hbm: bool = False) -> None:
        await self._travel("withdraw", len(blocks))
        await self.inner.withdraw(record, blocks, in_hbm=in_hbm)

    async def find(self, blocks: Sequence[BlockId], *, in_hbm: bool = False) -> list[tuple[Location, ...]]:
        await self._travel("find", len(blocks))
        return await self.inner.find(blocks, in_hbm=in_hbm)

    async def close(self) -> None:
        await self.inner.close()
