"""A real owner (node, arena, peer service on TCP) and a real puller, in one process or two; and what bends
the way between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grpc
import xxhash

from kvtier.build import core_config, tier_spec
from kvtier.config import Config
from kvtier.core import messages as m
from kvtier.core.cache import CacheCore
from kvtier.core.policies import LruPolicy
from kvtier.errors import TransferFault
from kvtier.hashing import Hasher
from kvtier.identity import Identity
from kvtier.interfaces import Remote, Transfer
from kvtier.liveness import EngineLocks, prepare_run_dir
from kvtier.metrics import Metrics
from kvtier.node import Node
from kvtier.remote.link import Peers
from kvtier.remote.pulls import Puller
from kvtier.server.peer_app import PeerServer
from kvtier.tiers.arena import Arena
from kvtier.transfer.coding import WIRE_CODECS
from kvtier.transfer.nixl import NixlTransfer
from kvtier.transfer.stream import StreamTransfer
from kvtier.types import (
    Key,
    Layout,
    LayoutKind,
    LayoutOrder,
    NodeRecord,
    Slot,
    TierKind,
    chain_keys,
)

LAYOUT = Layout(LayoutKind.GQA, 4, 2, 32, "float16", 16, LayoutOrder.NHD, 4096)
"""16 KiB a block."""
FINGERPRINT = LAYOUT.fingerprint()
BLOCK_BYTES = LAYOUT.block_bytes
DEADLINE_S = 30.0
PULLER_ID = "b" * 32
OWNER_ID = "a" * 32


async def until(condition: Callable[[], object], what: str) -> None:
    """Poll until `condition` holds."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"never: {what}"
        await asyncio.sleep(0.005)


def chain(seed: int, count: int) -> list[Key]:
    """Keys of a prompt that begins with `seed`."""
    return chain_keys(bytes([seed % 256]) * 32, [seed] * count, 1)


def content(key: Key) -> bytes:
    """What the block of `key` holds."""
    return (key * (BLOCK_BYTES // len(key) + 1))[:BLOCK_BYTES]


def config(home: Path, shm: Path, **values: Any) -> Config:
    """Small and quick."""
    defaults: dict[str, Any] = {
        "data_dir": home / "data",
        "run_dir": home / "run",
        "shm_dir": shm,
        "dram_bytes": 4 << 20,
        "extent_bytes": 1 << 20,
        "metrics_port": -1,
        "tick_s": 0.05,
        "engine_poll_s": 0.05,
        "index": "none",
        "max_given_fraction": 1.0,
        "max_leased_fraction": 1.0,
        "max_unfinished_fraction": 1.0,
        "pull_batch_bytes": 1 << 20,
    }
    return Config(**(defaults | values))


def arena_of(config: Config, identity: Identity) -> Arena:
    return Arena(
        node_id=identity.node_id,
        incarnation=identity.incarnation,
        capacity_bytes=config.dram_bytes,
        extent_bytes=config.extent_bytes,
        shm_dir=config.shm_dir,
    )


class Owner:
    """A node that has blocks, and serves peers."""

    def __init__(
        self,
        config: Config,
        incarnation: int = 7,
        node_id: str = OWNER_ID,
        transfers: Sequence[Transfer] = (),
    ) -> None:
        self.config = config
        self.identity = Identity(node_id, incarnation, lock_fd=-1)
        self.arena = arena_of(config, self.identity)
        self.transfers: list[Transfer] = list(transfers) or [StreamTransfer(_nobody, PULLER_ID)]
        self.engine = f"engine-{os.getpid()}-{incarnation}"
        self.lock_fd = -1

    async def start(self) -> Owner:
        prepare_run_dir(self.config.run_dir)
        await self.arena.open()
        # An owner alone: it has no index, and publishes nothing.
        core = CacheCore(
            core_config(self.config),
            [tier_spec(self.arena)],
            LruPolicy,
            seed=self.identity.incarnation,
        )
        self.metrics = Metrics()
        self.node = Node(
            core=core,
            tiers=[self.arena],
            identity=self.identity,
            locks=EngineLocks(self.config.run_dir),
            config=self.config,
            metrics=self.metrics,
        )
        await self.node.start()
        for transfer in self.transfers:
            await transfer.open(self.arena.memory)
        self.server = PeerServer(self.node, self.arena, self.transfers)
        await self.server.start()
        path = self.config.run_dir / "engines" / f"{self.engine}.lock"
        self.lock_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX)
        await self.node.execute(m.RegisterEngine(os.urandom(16), self.engine, LAYOUT, FINGERPRINT))
        return self

    async def stop(self) -> None:
        """Idempotent."""
        if self.lock_fd < 0:
            return
        await self.server.stop()
        for transfer in self.transfers:
            await transfer.close()
        await self.node.stop()
        os.close(self.lock_fd)
        self.lock_fd = -1

    def record(self, **values: Any) -> NodeRecord:
        """What the index would say of it."""
        defaults: dict[str, Any] = {
            "node": self.identity.node_id,
            "incarnation": self.identity.incarnation,
            "instance": "i",
            "name": "owner",
            "address": self.server.address,
            "protocol_version": 1,
            "capacity_bytes": self.config.dram_bytes,
            "resident_bytes": 0,
        }
        return NodeRecord(**(defaults | values))

    async def store(self, keys: Sequence[Key]) -> None:
        """As an engine does."""
        request = m.Reserve(os.urandom(16), self.engine, None, keys, 0, FINGERPRINT)
        reply = await self.node.execute(request)
        assert isinstance(reply, m.Reserved)
        assert all(reply.slots)
        for key, slot in zip(keys, reply.slots, strict=True):
            assert slot is not None
            self.arena.view(slot)[:BLOCK_BYTES] = content(key)
        sums = [xxhash.xxh3_128_digest(content(key)) for key in keys]
        await self.node.execute(m.Commit(os.urandom(16), self.engine, reply.reservation, keys, sums))

    async def evict(self, keys: Sequence[Key]) -> m.Evicted:
        reply = await self.node.execute(m.Evict(os.urandom(16), keys))
        assert isinstance(reply, m.Evicted)
        return reply

    def slot(self, key: Key) -> Slot:
        return self.node.places([key])[0].slot

    @property
    def leases(self) -> int:
        return self.node.stats().leases


def _nobody(remote: Remote) -> grpc.aio.Channel:
    raise TransferFault("the owner pulls from nobody")


class Asker:
    """The other side: an arena of its own, and the real puller."""

    def __init__(
        self,
        config: Config,
        bend: Callable[[Transfer], Sequence[Transfer]] = lambda transfer: [transfer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.arena = arena_of(config, Identity(PULLER_ID, 3, lock_fd=-1))
        self.transfers: list[Transfer] = []
        self.peers = Peers((PULLER_ID, 3), config, self.transfers, clock)
        self.metrics = Metrics()
        self.stream = StreamTransfer(
            self.peers.channel_of,
            PULLER_ID,
            codecs=WIRE_CODECS if config.transfer_codec == "auto" else (),
            count=self.metrics.count_stream,
        )
        self.transfers += bend(self.stream)
        self.hasher = Hasher({TierKind.DRAM: self.arena})
        self.puller = Puller(
            self.peers, self.transfers, self.arena.view, self.hasher, config, self.metrics, clock
        )
        self.reports: list[m.Arrived | m.PullEnded] = []
        self._pulls = 0

    async def start(self) -> Asker:
        await self.arena.open()
        for transfer in self.transfers:
            await transfer.open(self.arena.memory)
        return self

    async def stop(self) -> None:
        await self.peers.close()
        for transfer in self.transfers:
            await transfer.close()
        self.hasher.close()
        await self.arena.close()

    def pull_of(self, record: NodeRecord, keys: Sequence[Key], **values: Any) -> m.Pull:
        """Into the first slots of the arena."""
        self._pulls += 1
        defaults: dict[str, Any] = {
            "pull": self._pulls,
            "node": record.node,
            "incarnation": record.incarnation,
            "shard": 0,
            "keys": list(keys),
            "slots": [self.slot(position) for position in range(len(keys))],
            "block_bytes": BLOCK_BYTES,
            "fingerprint": FINGERPRINT,
            "timeout_s": DEADLINE_S,
        }
        return m.Pull(**(defaults | values))

    def slot(self, position: int) -> Slot:
        offset = position * LAYOUT.slot_bytes
        return Slot(self.arena.arena_id, offset // self.arena.extent_bytes, offset, LAYOUT.slot_bytes)

    def bytes_at(self, position: int) -> bytes:
        return bytes(self.arena.view(self.slot(position))[:BLOCK_BYTES])

    async def pull(self, record: NodeRecord, keys: Sequence[Key], **values: Any) -> tuple[int, str]:
        """Run one; how many blocks arrived, and the fault. Every one that arrived is right when it does."""
        pull = self.pull_of(record, keys, **values)
        arrived, ends = 0, []

        def report(event: m.Arrived | m.PullEnded) -> None:
            nonlocal arrived
            assert event.pull == pull.pull
            assert not ends, "nothing comes after the end"
            if isinstance(event, m.PullEnded):
                ends.append(event.fault)
                return
            for key, checksum in zip(keys[arrived:], event.checksums, strict=False):
                assert self.bytes_at(arrived) == content(key), "a wrong block was reported"
                assert checksum == xxhash.xxh3_128_digest(content(key))
                arrived += 1

        await self.puller.run(pull, report)
        assert len(ends) == 1
        return arrived, ends[0]

    def counted(self, outcome: str, reason: str = "") -> float:
        labels = {"outcome": outcome, "reason": reason}
        return self.metrics.registry.get_sample_value("kvtier_pulls_total", labels) or 0.0


def real_transfers() -> list[Transfer]:
    """What an owner lets itself be read with where NIXL works."""
    return [NixlTransfer("127.0.0.1"), StreamTransfer(_nobody, OWNER_ID)]


def offer(name: str) -> Bent:
    """What an owner offers under `name`: it only lets itself be read from."""
    return Bent(StreamTransfer(_nobody, PULLER_ID), name)


class Bent(Transfer):
    """A real transfer that misbehaves as it is told."""

    name: ClassVar[str] = "bent"

    def __init__(self, inner: Transfer, name: str = "stream") -> None:
        self.inner = inner
        self.name = name  # type: ignore[misc]
        self.faults: list[Exception | None] = []  # of the next pulls, in order
        self.spoil: Callable[[int, Sequence[int]], None] | None = None
        self.pulls = 0
        self.running = 0
        self.most_running = 0
        self.sizes: list[int] = []
        self.gate: asyncio.Event | None = None
        self.gate_after = 0
        self.served: list[float] = []
        self.forgotten: list[str] = []
        self.said = b""
        self.needs: bytes | None = None
        self.memory: memoryview | None = None

    async def open(self, memory: memoryview) -> None:
        self.memory = memory
        await self.inner.open(memory)

    def metadata(self) -> bytes:
        return self.said

    async def pull(
        self,
        remote: Remote,
        sources: Sequence[int],
        sizes: Sequence[int],
        into: Sequence[int],
        timeout_s: float,
    ) -> None:
        number, self.pulls = self.pulls, self.pulls + 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.sizes.append(len(sources))
        try:
            if self.needs is not None and remote.metadata != self.needs:
                raise TransferFault("the metadata is stale")
            if self.gate is not None and number >= self.gate_after:
                await asyncio.wait_for(self.gate.wait(), timeout_s)
            fault = self.faults.pop(0) if self.faults else None
            if fault is not None:
                raise fault
            await self.inner.pull(remote, sources, sizes, into, timeout_s)
            if self.spoil is not None:
                self.spoil(number, into)
        except TimeoutError as error:
            raise TransferFault("the time was over") from error
        finally:
            self.running -= 1

    async def serve(self, seconds: float) -> None:
        self.served.append(seconds)
        await self.inner.serve(seconds)

    async def forget(self, node: str) -> None:
        self.forgotten.append(node)
        await self.inner.forget(node)

    async def close(self) -> None:
        await self.inner.close()


class Proxy:
    """A TCP port in front of another, which can swallow everything, or let through so much a second."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._passes = asyncio.Event()
        self._passes.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.passed_bytes = 0
        self.hole_after_bytes = 1 << 60
        self.delay_back_s = 0.0  # of what the target answers
        self.back_bytes_per_s = 0.0  # of all connections together; 0: as fast as it goes
        self.back_bytes = 0
        self._free_at_s = 0.0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        return self.address

    @property
    def passes(self) -> bool:
        """Whether bytes come through on new connections."""
        return self._passes.is_set()

    def swallow(self) -> None:
        """From now on not a byte comes through, in either direction, and nobody hears why."""
        self._passes.clear()

    def heal(self) -> None:
        self.hole_after_bytes = 1 << 60
        self._passes.set()

    def forsake(self) -> None:
        """Connections that exist stay a hole for ever, new ones pass."""
        self._passes.clear()
        self._passes = asyncio.Event()
        self._passes.set()

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        far_writer = None
        self.connections += 1
        passes = self._passes
        try:
            await passes.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            await asyncio.gather(
                self._pump(reader, far_writer, passes), self._pump(far_reader, writer, passes, is_back=True)
            )
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for its in (writer, far_writer):
                if its is not None:
                    its.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passes: asyncio.Event,
        is_back: bool = False,
    ) -> None:
        while data := await reader.read(16 << 10):
            self.passed_bytes += len(data)
            if self.passed_bytes > self.hole_after_bytes:
                self.swallow()
            await passes.wait()
            if is_back and self.delay_back_s:
                await asyncio.sleep(self.delay_back_s)
            if is_back:
                self.back_bytes += len(data)
                await self._wait_for_the_line(len(data))
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _wait_for_the_line(self, size_bytes: int) -> None:
        if self.back_bytes_per_s:
            now_s = time.monotonic()
            # Where a sleep was too long the line makes up for it.
            self._free_at_s = max(now_s - 0.02, self._free_at_s) + size_bytes / self.back_bytes_per_s
            await asyncio.sleep(self._free_at_s - now_s)


class OwnerProcess:
    """An `Owner` in a process of its own, which has the blocks ``chain(seed, count)``."""

    def __init__(
        self, home: Path, shm: Path, seed: int, count: int, has_nixl: bool = False, **values: Any
    ) -> None:
        arguments = json.dumps(
            {
                "home": str(home),
                "shm": str(shm),
                "seed": seed,
                "count": count,
                "has_nixl": has_nixl,
                "values": values,
            }
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.remote.peering", arguments],
            stdin=subprocess.PIPE,  # it ends with its parent
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the owner did not start"
        self.record = NodeRecord(**json.loads(line))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


async def _owner_process(arguments: dict[str, Any]) -> None:
    from dataclasses import asdict

    settings = config(Path(arguments["home"]), Path(arguments["shm"]), **arguments["values"])
    owner = await Owner(settings, transfers=real_transfers() if arguments["has_nixl"] else ()).start()
    try:
        await owner.store(chain(arguments["seed"], arguments["count"]))
        print(json.dumps(asdict(owner.record())), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    finally:
        await owner.stop()


@contextlib.contextmanager
def shared_memory() -> Iterator[Path]:
    """A directory of shared memory that goes with the test, whatever was killed in it."""
    path = Path(tempfile.mkdtemp(prefix=f"kvtier-test-{os.getpid()}-", dir="/dev/shm"))
    try:
        yield path
    finally:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


@contextlib.asynccontextmanager
async def raw_server(answers: dict[str, Callable[[bytes], bytes]]) -> AsyncIterator[str]:
    """A gRPC server that answers bytes, whatever they are; its address."""

    def handler(answer: Callable[[bytes], bytes]) -> Any:
        async def call(request: bytes, context: Any) -> bytes:
            return answer(request)

        return grpc.unary_unary_rpc_method_handler(call, None, None)

    server = grpc.aio.server()
    handlers = {method: handler(answer) for method, answer in answers.items()}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("kvtier.v1.PeerService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def certificates(directory: Path, name: str = "peer", ca: Path | None = None) -> dict[str, Path]:
    """A CA (or the one in `ca`) and a certificate for 127.0.0.1, as fields of `Config`."""
    directory.mkdir(parents=True, exist_ok=True)
    authority = ca or directory
    if ca is None:
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-keyout", directory / "ca.key", "-out", directory / "ca.pem",
            "-subj", "/CN=test ca",
        )  # fmt: skip
    _openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", directory / f"{name}.key", "-out", directory / f"{name}.csr", "-subj", f"/CN={name}",
    )  # fmt: skip
    extensions = directory / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    _openssl(
        "x509", "-req", "-days", "2", "-in", directory / f"{name}.csr", "-CA", authority / "ca.pem",
        "-CAkey", authority / "ca.key", "-CAcreateserial", "-out", directory / f"{name}.pem",
        "-extfile", extensions,
    )  # fmt: skip
    return {
        "tls_cert_file": directory / f"{name}.pem",
        "tls_key_file": directory / f"{name}.key",
        "tls_ca_file": authority / "ca.pem",
    }


def _openssl(*arguments: Any) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


if __name__ == "__main__":
    asyncio.run(_owner_process(json.loads(sys.argv[1])))
