"""Where peers are served: what is refused before anything listens, ports, addresses, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import CapturingLogger

from kvtier.config import Config
from kvtier.errors import ConfigError, KvtierError, ResourceShortage
from kvtier.server import peer_app
from kvtier.server.peer_app import PeerServer, check
from kvtier.v1 import peer_pb2 as pb
from kvtier.v1 import peer_pb2_grpc
from tests.remote.peering import DEADLINE_S, Owner, certificates, config, free_port, shared_memory, until

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates")


@pytest.fixture
def shm() -> Iterator[Path]:
    with shared_memory() as path:
        yield path


@pytest.fixture
async def start(tmp_path: Path, shm: Path) -> AsyncIterator[Callable[..., Any]]:
    made: list[Owner] = []

    async def start(**values: Any) -> Owner:
        number = len(made)
        owner = Owner(config(tmp_path / f"{number}", shm, **values), node_id=f"{number:x}" * 32)
        made.append(owner)
        return await owner.start()

    yield start
    for owner in made:
        if owner.lock_fd < 0:  # it did not start: what was open has to be closed all the same
            await owner.node.stop()
        await owner.stop()


async def hello(address: str) -> pb.HelloResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = peer_pb2_grpc.PeerServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.HelloRequest(protocol_version=1, node_id="b" * 32)
        answer: pb.HelloResponse = await stub.Hello(request, timeout=DEADLINE_S)
        return answer


# ---- what is refused


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peer_host": "0.0.0.0"}, "peer_address"),
        ({"peer_host": "::"}, "peer_address"),
        ({"peer_host": "0.0.0.0", "peer_address": "node-1:7000"}, "without TLS"),
        ({"peer_host": "192.0.2.1"}, "tls_cert_file"),
        ({"peer_host": "node-1.example.org"}, "insecure"),
        ({"peer_host": ""}, "IP address"),
        ({"peer_host": "unix:/tmp/x"}, "IP address"),
        ({"peer_host": "a b"}, "IP address"),
        ({"peer_address": "nowhere"}, "HOST:PORT"),
        ({"peer_address": "unix:/tmp/x:1"}, "HOST:PORT"),
        ({"peer_address": "node:0"}, "HOST:PORT"),
    ],
    ids=range(11),
)
def test_hosts_and_addresses_that_are_refused(
    tmp_path: Path, shm: Path, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check(config(tmp_path, shm, **values))


def test_what_is_allowed(tmp_path: Path, shm: Path) -> None:
    for values in (
        {},
        {"peer_host": "::1"},
        {"peer_host": "localhost"},
        {"peer_host": "192.0.2.1", "insecure": True},
        {"peer_host": "0.0.0.0", "peer_address": "node-1:7000", "insecure": True},
    ):
        assert check(config(tmp_path, shm, **values)) is None


@needs_openssl
def test_certificates_that_cannot_be_used(tmp_path: Path, shm: Path) -> None:
    good = certificates(tmp_path / "good")
    other = certificates(tmp_path / "other")
    text = tmp_path / "text"
    text.write_text("no certificate")
    large = tmp_path / "large"
    large.write_bytes(bytes(2 << 20))

    def refused(words: str, **changes: Path | None) -> None:
        with pytest.raises(ConfigError, match=words):
            check(config(tmp_path, shm, **(good | changes)))

    assert check(config(tmp_path, shm, **good)) is not None
    refused("all three", tls_ca_file=None)
    refused("all three", tls_key_file=None)
    refused("cannot be read", tls_cert_file=tmp_path / "missing")
    refused("cannot be read", tls_cert_file=tmp_path)
    refused("more than", tls_ca_file=large)
    refused("not a certificate and its unencrypted key", tls_key_file=text)
    refused("not a certificate and its unencrypted key", tls_cert_file=text)
    refused("not a certificate and its unencrypted key", tls_key_file=other["tls_key_file"])
    refused("no certificate in PEM", tls_ca_file=text)
    encrypted = tmp_path / "encrypted"
    subprocess.run(
        [
            "openssl",
            "ec",
            "-in",
            str(good["tls_key_file"]),
            "-aes256",
            "-passout",
            "pass:x",
            "-out",
            encrypted,
        ],
        check=True,
        capture_output=True,
    )
    refused("unencrypted key", tls_key_file=encrypted)


# ---- ports and addresses


async def test_a_free_port_and_its_address(start: Callable[..., Any]) -> None:
    owner = await start()
    host, _, port = owner.server.address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert (await hello(owner.server.address)).node_id == owner.identity.node_id
    await owner.server.stop()
    await owner.server.stop()
    with pytest.raises(grpc.aio.AioRpcError):
        await hello(owner.server.address)
    with socket.socket() as again:  # the port is free again
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(port)))


async def test_what_others_are_told(start: Callable[..., Any]) -> None:
    owner = await start(peer_address="node-1.example.org:7000")
    assert owner.server.address == "node-1.example.org:7000"


async def test_no_peers_are_served(start: Callable[..., Any]) -> None:
    owner = await start(peer_port=-1, peer_host="0.0.0.0")
    assert owner.server.address == ""


async def test_insecure_is_served_and_said(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = CapturingLogger()
    monkeypatch.setattr("kvtier.server.peer_app.log", said)
    port = free_port()
    owner = await start(peer_host="0.0.0.0", peer_port=port, peer_address=f"127.0.0.1:{port}", insecure=True)
    assert (await hello(owner.server.address)).node_id == owner.identity.node_id
    assert "without TLS" in str(said.calls)


async def test_a_port_in_use(start: Callable[..., Any]) -> None:
    owner = await start()
    port = int(owner.server.address.rpartition(":")[2])
    with pytest.raises(ResourceShortage, match="another process listens there"):
        await start(peer_port=port)
    assert (await hello(owner.server.address)).node_id == owner.identity.node_id


async def test_an_address_of_another_machine(start: Callable[..., Any]) -> None:
    with pytest.raises(ResourceShortage, match=r"192\.0\.2\.1"):
        await start(peer_host="192.0.2.1", insecure=True)


async def test_a_name_that_nobody_knows(start: Callable[..., Any]) -> None:
    with pytest.raises(KvtierError, match="peer_host is no-such-host"):
        await start(peer_host="no-such-host.invalid", insecure=True)


# ---- bounds


async def test_more_connections_than_allowed(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_app, "MAX_CONNECTIONS", 8)
    owner = await start()
    host, _, port = owner.server.address.rpartition(":")
    clients: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    answered = 0
    for _ in range(20):
        reader, writer = await asyncio.open_connection(host, int(port))
        clients.append((reader, writer))
        writer.write(preface)
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                answered += await reader.read(64) != b""
    assert 1 <= answered <= 8
    for _, writer in clients:
        writer.close()

    async def answers() -> None:
        while True:
            try:
                await hello(owner.server.address)
            except grpc.aio.AioRpcError:
                continue
            return

    async with asyncio.timeout(DEADLINE_S):
        await answers()


async def test_more_calls_than_allowed(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_app, "MAX_CONCURRENT_RPCS", 4)
    gate, waiting = asyncio.Event(), 0

    async def slow(self: Any, request: Any, context: Any) -> pb.AcquireResponse:
        nonlocal waiting
        waiting += 1
        await gate.wait()
        return pb.AcquireResponse()

    monkeypatch.setattr("kvtier.server.peer_service.PeerService.Acquire", slow)
    owner = await start()
    async with grpc.aio.insecure_channel(owner.server.address) as channel:
        stub: Any = peer_pb2_grpc.PeerServiceStub(channel)  # type: ignore[no-untyped-call]
        calls = [
            asyncio.ensure_future(stub.Acquire(pb.AcquireRequest(), timeout=DEADLINE_S)) for _ in range(4)
        ]
        await until(lambda: waiting == 4, "all four are being answered")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hello(owner.server.address)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.set()
        await asyncio.gather(*calls)
    assert (await hello(owner.server.address)).node_id == owner.identity.node_id


def test_a_server_that_never_started_stops(tmp_path: Path, shm: Path) -> None:
    async def run() -> None:
        owner = Owner(config(tmp_path, shm))
        await owner.start()
        other = PeerServer(owner.node, owner.arena, [])
        await other.stop()
        await owner.stop()

    asyncio.run(run())


def test_one_address_of_a_name_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine that knows localhost by an IPv6 address that it does not have."""
    absent = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))
    here = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    settings = Config(
        data_dir=tmp_path / "data", run_dir=tmp_path / "run", peer_host="127.0.0.1", peer_port=0
    )
    monkeypatch.setattr(peer_app.socket, "getaddrinfo", lambda *_, **__: [absent, here])
    peer_app.refuse_busy_port(settings)
    monkeypatch.setattr(peer_app.socket, "getaddrinfo", lambda *_, **__: [absent])
    with pytest.raises(ResourceShortage, match=r"peer_host is 127\.0\.0\.1"):
        peer_app.refuse_busy_port(settings)
