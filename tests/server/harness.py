"""A real daemon in this process on directories of its own, and an engine that speaks raw gRPC."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import mmap
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import xxhash

from kvtier.config import Config
from kvtier.types import Key, Layout, LayoutKind, LayoutOrder, chain_keys, pack_keys
from kvtier.v1 import admin_pb2, admin_pb2_grpc, engine_pb2, engine_pb2_grpc

LAYOUT = Layout(
    kind=LayoutKind.GQA,
    num_layers=4,
    num_kv_heads=2,
    head_dim=32,
    dtype="float16",
    block_tokens=16,
    order=LayoutOrder.NHD,
    layer_block_bytes=4096,
)
OTHER_LAYOUT = Layout(
    kind=LayoutKind.MHA,
    num_layers=2,
    num_kv_heads=2,
    head_dim=32,
    dtype="float16",
    block_tokens=16,
    order=LayoutOrder.HND,
    layer_block_bytes=4096,
)
DEADLINE_S = 20.0
_names = itertools.count()


def config(home: Path, shm: Path, **values: Any) -> Config:
    """Small, quick, without metrics unless asked for."""
    defaults: dict[str, Any] = {
        "data_dir": home / "data",
        "run_dir": home / "run",
        "shm_dir": shm,
        "dram_bytes": 4 << 20,
        "extent_bytes": 1 << 20,
        "metrics_port": -1,
        "index": "none",
        "tick_s": 0.05,
        "engine_poll_s": 0.05,
        "verify_commits": "all",
    }
    return Config(**(defaults | values))


def chain(seed: int, count: int) -> list[Key]:
    """Keys of a prompt that begins with `seed`."""
    return chain_keys(bytes([seed % 256]) * 32, [seed] * count, 1)


def call_id() -> bytes:
    return os.urandom(16)


def layout_message(layout: Layout, **changes: Any) -> engine_pb2.Layout:
    fields: dict[str, Any] = {
        "kind": layout.kind.value,
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "dtype": layout.dtype,
        "block_tokens": layout.block_tokens,
        "order": layout.order.value,
        "layer_block_bytes": layout.layer_block_bytes,
        "interior": layout.interior,
        "scale_bytes": layout.scale_bytes,
        "padding_bytes": layout.padding_bytes,
    }
    return engine_pb2.Layout(**(fields | changes))


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Poll until `condition` holds."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        await asyncio.sleep(0.01)


class Wire:
    """Both stubs on one channel."""

    def __init__(self, socket: Path, **extra: int) -> None:
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
            *((f"grpc.{name.replace('__', '.')}", value) for name, value in extra.items()),
        ]
        self.socket = socket
        self.channel = grpc.aio.insecure_channel(f"unix:{socket}", options=options)
        self.engine: Any = engine_pb2_grpc.EngineServiceStub(self.channel)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.channel)

    async def status(self) -> admin_pb2.GetStatusResponse:
        return await self.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=DEADLINE_S)

    async def state(self) -> admin_pb2.GetStatusResponse:
        """The status without what time alone changes."""
        status = await self.status()
        status.ClearField("uptime_s")
        for engine in status.engines:
            engine.ClearField("registered_s")
        return status

    async def close(self) -> None:
        await self.channel.close()


class RawEngine:
    """An engine process as the node sees one: a lock file and messages."""

    def __init__(self, wire: Wire, run_dir: Path, layout: Layout = LAYOUT, name: str = "") -> None:
        self.wire = wire
        self.layout = layout
        self.name = name or f"engine-{os.getpid()}-{next(_names)}"
        self.lock_path = run_dir / "engines" / f"{self.name}.lock"
        self.lock_fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX)
        self.memory: mmap.mmap | None = None

    def register_request(self, **changes: Any) -> engine_pb2.RegisterRequest:
        fields: dict[str, Any] = {
            "protocol_version": 1,
            "call_id": call_id(),
            "engine_id": self.name,
            "layout": layout_message(self.layout),
            "fingerprint": self.layout.fingerprint(),
            "description": "test",
        }
        return engine_pb2.RegisterRequest(**(fields | changes))

    async def register(self) -> engine_pb2.RegisterResponse:
        reply = await self.wire.engine.Register(self.register_request(), timeout=DEADLINE_S)
        fd = os.open(reply.arena.path, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_SH)
        self.memory = mmap.mmap(fd, reply.arena.size_bytes)
        os.close(fd)
        return reply

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1

    # ---- messages

    def reserve_request(
        self, keys: Sequence[Key], /, parent: Key = b"", **changes: Any
    ) -> engine_pb2.ReserveRequest:
        fields: dict[str, Any] = {
            "call_id": call_id(),
            "engine_id": self.name,
            "parent": parent,
            "keys": pack_keys(keys),
            "fingerprint": self.layout.fingerprint(),
        }
        return engine_pb2.ReserveRequest(**(fields | changes))

    def commit_request(
        self, reservation: int, keys: Sequence[Key], /, **changes: Any
    ) -> engine_pb2.CommitRequest:
        fields: dict[str, Any] = {
            "call_id": call_id(),
            "engine_id": self.name,
            "reservation_id": reservation,
            "keys": pack_keys(keys),
            "checksums": b"".join(xxhash.xxh3_128_digest(self.content(key)) for key in keys),
        }
        return engine_pb2.CommitRequest(**(fields | changes))

    def load_request(
        self, keys: Sequence[Key], /, request: str = "request", **changes: Any
    ) -> engine_pb2.LoadRequest:
        fields: dict[str, Any] = {
            "call_id": call_id(),
            "engine_id": self.name,
            "request_id": request,
            "keys": pack_keys(keys),
        }
        return engine_pb2.LoadRequest(**(fields | changes))

    def lookup_request(
        self, keys: Sequence[Key], /, request: str = "request", **changes: Any
    ) -> engine_pb2.LookupRequest:
        fields: dict[str, Any] = {
            "engine_id": self.name,
            "request_id": request,
            "keys": pack_keys(keys),
            "shard_count": 1,
            "fingerprint": self.layout.fingerprint(),
        }
        return engine_pb2.LookupRequest(**(fields | changes))

    def release_request(self, **changes: Any) -> engine_pb2.ReleaseRequest:
        return engine_pb2.ReleaseRequest(**({"call_id": call_id(), "engine_id": self.name} | changes))

    def abort_request(self, reservation: int, **changes: Any) -> engine_pb2.AbortRequest:
        fields = {"call_id": call_id(), "engine_id": self.name, "reservation_id": reservation}
        return engine_pb2.AbortRequest(**(fields | changes))

    def report_request(
        self, added: Sequence[Key], removed: Sequence[Key] = (), /, **changes: Any
    ) -> engine_pb2.ReportResidentRequest:
        fields: dict[str, Any] = {
            "call_id": call_id(),
            "engine_id": self.name,
            "added": pack_keys(added),
            "removed": pack_keys(removed),
        }
        return engine_pb2.ReportResidentRequest(**(fields | changes))

    # ---- bytes

    def content(self, key: Key) -> bytes:
        """What the block of `key` holds: different for every key."""
        repeats = -(-self.layout.block_bytes // len(key))
        return (key * repeats)[: self.layout.block_bytes]

    def write(self, slots: bytes, keys: Sequence[Key]) -> None:
        assert self.memory is not None
        for offset, key in zip(np.frombuffer(slots, "<u8").tolist(), keys, strict=True):
            if offset != 2**64 - 1:
                self.memory[offset : offset + self.layout.block_bytes] = self.content(key)

    def read(self, slots: bytes) -> list[bytes]:
        assert self.memory is not None
        size = self.layout.block_bytes
        return [self.memory[o : o + size] for o in np.frombuffer(slots, "<u8").tolist()]

    # ---- flows

    async def reserve(self, keys: Sequence[Key], parent: Key = b"") -> engine_pb2.ReserveResponse:
        """Reserve and write, without a commit."""
        reply = await self.wire.engine.Reserve(self.reserve_request(keys, parent), timeout=DEADLINE_S)
        self.write(reply.slots, keys)
        return reply

    async def store(self, keys: Sequence[Key], parent: Key = b"") -> None:
        reply = await self.reserve(keys, parent)
        assert set(reply.states) == {engine_pb2.RESERVE_STATE_GRANTED}
        request = self.commit_request(reply.reservation_id, keys)
        done = await self.wire.engine.Commit(request, timeout=DEADLINE_S)
        assert done.committed == len(keys)

    async def load(self, keys: Sequence[Key], request: str = "request") -> list[engine_pb2.LoadResponse]:
        call = self.wire.engine.Load(self.load_request(keys, request), timeout=DEADLINE_S)
        return [message async for message in call]
