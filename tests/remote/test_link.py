"""Links to peers: hello, hostile answers, deadlines, recovery, addresses, certificates."""

from __future__ import annotations

import asyncio
import math
import shutil
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import CapturingLogger

from kvtier.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    ProtocolMismatch,
    TransferFault,
    Unavailable,
)
from kvtier.interfaces import Remote
from kvtier.remote import link as links
from kvtier.remote.answers import MAX_METADATA_BYTES, MAX_OFFERS
from kvtier.remote.breaker import FIRST_BACKOFF_S
from kvtier.remote.link import PeerLink, Peers
from kvtier.remote.tls import parse_address
from kvtier.types import NodeRecord
from kvtier.v1 import peer_pb2 as pb
from tests.remote.peering import (
    BLOCK_BYTES,
    DEADLINE_S,
    FINGERPRINT,
    OWNER_ID,
    PULLER_ID,
    Bent,
    Owner,
    Proxy,
    certificates,
    chain,
    config,
    free_port,
    offer,
    raw_server,
    shared_memory,
    until,
)

KEYS = chain(2, 20)
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates")


@pytest.fixture
def shm() -> Iterator[Path]:
    with shared_memory() as path:
        yield path


@pytest.fixture
async def make_owner(tmp_path: Path, shm: Path) -> AsyncIterator[Callable[..., Awaitable[Owner]]]:
    made: list[Owner] = []

    async def make(incarnation: int = 7, node_id: str = OWNER_ID, **values: Any) -> Owner:
        settings = config(tmp_path / f"owner{len(made)}", shm, **values)
        made.append(await Owner(settings, incarnation, node_id).start())
        await made[-1].store(KEYS)
        return made[-1]

    yield make
    for owner in made:
        await owner.stop()


@pytest.fixture
async def owner(make_owner: Callable[..., Awaitable[Owner]]) -> Owner:
    return await make_owner()


@pytest.fixture
async def make_link(tmp_path: Path, shm: Path) -> AsyncIterator[Callable[..., PeerLink]]:
    made: list[PeerLink] = []

    def make(record: NodeRecord, tls: Any = None, **values: Any) -> PeerLink:
        made.append(PeerLink(record, (PULLER_ID, 3), config(tmp_path / "asker", shm, **values), tls))
        return made[-1]

    yield make
    for link in made:
        await link.close()


@pytest.fixture
async def make_peers(tmp_path: Path, shm: Path) -> AsyncIterator[Callable[..., Peers]]:
    made: list[Peers] = []

    def make(transfers: Any = (), **values: Any) -> Peers:
        made.append(Peers((PULLER_ID, 3), config(tmp_path / "asker", shm, **values), transfers))
        return made[-1]

    yield make
    for peers in made:
        await peers.close()


def record(address: str, **values: Any) -> NodeRecord:
    fields = {
        "node": OWNER_ID,
        "incarnation": 7,
        "instance": "i",
        "name": "owner",
        "protocol_version": 1,
        "capacity_bytes": 1,
        "resident_bytes": 0,
    }
    return NodeRecord(address=address, **(fields | values))


async def acquire(link: PeerLink, count: int = len(KEYS), timeout_s: float = DEADLINE_S) -> Any:
    return await link.acquire(KEYS[:count], 0, FINGERPRINT, BLOCK_BYTES, timeout_s)


# ---- what should happen


async def test_hello_acquire_release(owner: Owner, make_link: Callable[..., PeerLink]) -> None:
    link = make_link(owner.record())
    assert not link.is_reached
    peer = await link.hello(DEADLINE_S)
    assert (peer.node, peer.incarnation) == (OWNER_ID, 7)
    assert peer.arena_id == owner.arena.arena_id
    assert peer.arena_bytes == owner.arena.capacity_bytes
    assert peer.offers == {"stream": owner.transfers[0].metadata()}
    assert link.is_reached
    got = await acquire(link)
    assert got.slots == [owner.slot(key).offset_bytes for key in KEYS]
    assert got.arena == owner.arena.arena_id
    assert got.ttl_s == owner.config.lease_ttl_s
    assert owner.leases == 1
    assert await link.release(got.lease, 0, (), DEADLINE_S)
    assert owner.leases == 0
    assert not await link.release(got.lease + 1000, 0, (), DEADLINE_S)
    assert link.last_error == ""


async def test_hello_is_said_once_and_again_after_a_fault(
    make_link: Callable[..., PeerLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def hello(_: bytes) -> bytes:
        nonlocal calls
        calls += 1
        return hello_answer()

    async with raw_server({"Hello": hello}) as address:
        link = make_link(record(address))
        await asyncio.gather(*(link.hello(DEADLINE_S) for _ in range(10)))
        assert calls == 1
        link.doubt()
        await link.hello(DEADLINE_S)
        assert calls == 2
        with pytest.raises(Unavailable):
            await acquire(link)  # which this server does not know
        await link.hello(DEADLINE_S)
        assert calls == 3


# ---- answers that are wrong


def hello_answer(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "protocol_version": 1,
        "node_id": OWNER_ID,
        "incarnation": 7,
        "arena_id": 7,
        "arena_bytes": 1 << 20,
        "base_address": 1 << 40,
        "transfers": [pb.TransferOffer(name="stream")],
    }
    return pb.HelloResponse(**(fields | changes)).SerializeToString()


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff" * 100,
        b"",
        hello_answer(node_id=PULLER_ID),
        hello_answer(node_id=""),
        hello_answer(incarnation=6),
        hello_answer(incarnation=8),
        hello_answer(arena_bytes=1 << 60),
        hello_answer(base_address=(1 << 64) - 1),
        hello_answer(transfers=[pb.TransferOffer(name=f"t{i}") for i in range(MAX_OFFERS + 1)]),
        hello_answer(transfers=[pb.TransferOffer(name="")]),
        hello_answer(transfers=[pb.TransferOffer(name="x" * 1000)]),
        hello_answer(transfers=[pb.TransferOffer(name="n", metadata=bytes(MAX_METADATA_BYTES + 1))]),
    ],
    ids=range(12),
)
async def test_hellos_that_make_no_sense(answer: bytes, make_link: Callable[..., PeerLink]) -> None:
    async with raw_server({"Hello": lambda _: answer}) as address:
        link = make_link(record(address))
        with pytest.raises((Unavailable, ProtocolMismatch)):
            await link.hello(DEADLINE_S)
        assert not link.breaker.admit()
        assert not link.is_reached
        assert link.last_error


def acquire_answer(count: int, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "lease_id": 5,
        "arena_id": 7,
        "slots": struct.pack(f"<{count}Q", *(i * BLOCK_BYTES for i in range(count))),
        "checksums": bytes(16 * count),
        "lease_ttl_s": 30.0,
    }
    return pb.AcquireResponse(**(fields | changes)).SerializeToString()


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff" * 100,
        acquire_answer(4),
        acquire_answer(3, slots=bytes(23)),
        acquire_answer(3, checksums=bytes(47)),
        acquire_answer(3, checksums=b""),
        acquire_answer(3, lease_id=0),
        acquire_answer(0),
        acquire_answer(3, arena_id=8),
        acquire_answer(2, slots=struct.pack("<2Q", 0, 1 << 20)),
        acquire_answer(2, slots=struct.pack("<2Q", 0, (1 << 20) - BLOCK_BYTES + 1)),
        acquire_answer(2, slots=struct.pack("<2Q", 0, (1 << 64) - 1)),
        acquire_answer(2, slots=struct.pack("<2Q", 0, 0)),
        acquire_answer(3, lease_ttl_s=0.0),
        acquire_answer(3, lease_ttl_s=-1.0),
        acquire_answer(3, lease_ttl_s=math.nan),
        acquire_answer(3, lease_ttl_s=math.inf),
        acquire_answer(3, lease_ttl_s=1e9),
        acquire_answer(3, coming=1),
        acquire_answer(0, lease_id=0, coming=4),
        acquire_answer(2, coming=(1 << 32) - 1),
        acquire_answer(0, coming=1, arena_id=8),
        acquire_answer(0, coming=1, lease_ttl_s=math.nan),
        acquire_answer(1, lease_id=0, coming=1),
    ],
    ids=range(23),
)
async def test_leases_that_make_no_sense(answer: bytes, make_link: Callable[..., PeerLink]) -> None:
    async with raw_server({"Hello": lambda _: hello_answer(), "Acquire": lambda _: answer}) as address:
        link = make_link(record(address))
        with pytest.raises(Unavailable, match="nonsense"):
            await acquire(link, 3)
        assert "nonsense" in link.last_error


async def test_what_makes_sense_is_taken(make_link: Callable[..., PeerLink]) -> None:
    answers = [
        acquire_answer(3),
        pb.AcquireResponse(arena_id=7, lease_ttl_s=30.0).SerializeToString(),
        acquire_answer(0, coming=3),
        acquire_answer(0, lease_id=0, coming=2),
        acquire_answer(2, coming=1),
    ]
    async with raw_server(
        {"Hello": lambda _: hello_answer(), "Acquire": lambda _: answers.pop(0)}
    ) as address:
        link = make_link(record(address))
        assert (await acquire(link, 3)).slots == [0, BLOCK_BYTES, 2 * BLOCK_BYTES]
        assert (await acquire(link, 3)).slots == []


async def test_what_a_peer_says_of_a_fault_is_cut_and_printable(make_link: Callable[..., PeerLink]) -> None:
    async def hello(request: bytes, context: Any) -> bytes:
        await context.abort(
            grpc.StatusCode.UNKNOWN, "\x1b[31m evil\n" * 1000, (("kvtier-error", "SystemExit"),)
        )
        return b""

    server = grpc.aio.server()
    handlers = {"Hello": grpc.unary_unary_rpc_method_handler(hello, None, None)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("kvtier.v1.PeerService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        link = make_link(record(f"127.0.0.1:{port}"))
        with pytest.raises(Unavailable) as caught:
            await link.hello(DEADLINE_S)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 300
    finally:
        await server.stop(None)


# ---- another version


async def test_another_protocol_version_is_logged_once_by_both_and_counts_as_failing(
    owner: Owner,
    make_peers: Callable[..., Peers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = CapturingLogger()
    monkeypatch.setattr(links, "log", said)
    monkeypatch.setattr("kvtier.server.peer_service.log", said)
    monkeypatch.setattr(links, "PROTOCOL_VERSION", 2)
    peers = make_peers()
    peers.update([owner.record(protocol_version=2)])
    link = peers.get(OWNER_ID)
    assert link is not None
    for _ in range(3):
        with pytest.raises(ProtocolMismatch, match="protocol 1"):
            await link.hello(DEADLINE_S)
    assert not link.breaker.admit()
    told = [call.args[0] for call in said.calls]
    assert sum("a peer is not used" in text for text in told) == 1
    assert sum("a peer cannot use this node" in text for text in told) == 1


async def test_a_record_of_another_version_counts_as_failing_at_once(
    owner: Owner, make_peers: Callable[..., Peers]
) -> None:
    peers = make_peers()
    peers.update([owner.record(protocol_version=9)])
    link = peers.get(OWNER_ID)
    assert link is not None
    assert not link.breaker.admit()
    assert "protocol 9" in link.last_error


async def test_an_answer_of_another_version(make_link: Callable[..., PeerLink]) -> None:
    async with raw_server({"Hello": lambda _: hello_answer(protocol_version=3)}) as address:
        link = make_link(record(address))
        with pytest.raises(ProtocolMismatch, match="protocol 3"):
            await link.hello(DEADLINE_S)
        assert not link.breaker.admit()


# ---- time


async def test_every_call_has_a_deadline(
    make_owner: Callable[..., Any], make_link: Callable[..., Any]
) -> None:
    owner = await make_owner()
    proxy = Proxy(owner.server.address)
    try:
        link = make_link(owner.record(address=await proxy.start()))
        got = await acquire(link)
        proxy.swallow()
        for call in (
            lambda: acquire(link, timeout_s=0.05),
            lambda: link.release(got.lease, 0, (), 0.05),
            lambda: link.hello(0.05),
            lambda: link.hello(-1.0),
        ):
            with pytest.raises(DeadlineExceeded):
                await call()
        proxy.heal()

        async def heals() -> None:
            while True:
                try:
                    await link.hello(0.5)
                except Unavailable:
                    continue
                return

        async with asyncio.timeout(DEADLINE_S):
            await heals()
    finally:
        await proxy.stop()


async def test_a_connection_that_was_spoilt_is_not_used_again(
    owner: Owner, make_link: Callable[..., PeerLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC alone keeps one that was made and then became a hole until its keepalive is missed."""
    monkeypatch.setattr(links, "GREETING_TIMEOUT_S", 0.3)
    proxy = Proxy(owner.server.address)
    try:
        link = make_link(owner.record(address=await proxy.start()))
        await link.hello(DEADLINE_S)
        proxy.swallow()
        with pytest.raises(DeadlineExceeded):
            await acquire(link, timeout_s=0.05)
        proxy.forsake()
        proxy.hole_after_bytes = proxy.passed_bytes + 250  # after it has been made, in the greeting
        await until(lambda: proxy.connections == 2 and not proxy.passes, "the next one becomes a hole too")
        proxy.hole_after_bytes = 1 << 60
        proxy.forsake()

        def admits() -> bool:
            assert link.breaker.retry_in_s < 9 * FIRST_BACKOFF_S, "it hangs on the old one"
            return link.breaker.admit()

        await until(admits, "it is greeted on a third one")
        await link.hello(DEADLINE_S)
    finally:
        await proxy.stop()


async def test_an_empty_answer_is_nonsense_and_no_other_version(make_link: Callable[..., PeerLink]) -> None:
    """It passes by itself, so the peer is greeted again soon."""
    answers = iter([b""])
    async with raw_server({"Hello": lambda _: next(answers, hello_answer())}) as address:
        link = make_link(record(address))
        with pytest.raises(Unavailable, match="nonsense"):
            await link.hello(DEADLINE_S)
        assert link.breaker.retry_in_s <= 2 * FIRST_BACKOFF_S
        await until(link.breaker.admit, "it is greeted again")


async def test_a_lease_that_nobody_heard_of_is_given_back(
    owner: Owner, make_link: Callable[..., PeerLink]
) -> None:
    """The request comes through, its answer does not: the repeat learns of the lease, and ends it."""
    proxy = Proxy(owner.server.address)
    try:
        link = make_link(owner.record(address=await proxy.start()))
        await link.hello(DEADLINE_S)
        proxy.delay_back_s = 0.3
        with pytest.raises(DeadlineExceeded):
            await acquire(link, timeout_s=0.1)
        await until(lambda: owner.leases == 1, "the request came through")
        proxy.delay_back_s = 0.0
        await until(lambda: owner.leases == 0, "the lease is given back")
    finally:
        await proxy.stop()


async def test_a_cancelled_acquire_leaves_no_lease(owner: Owner, make_link: Callable[..., PeerLink]) -> None:
    link = make_link(owner.record())
    await link.hello(DEADLINE_S)
    for tenths_ms in range(0, 40, 2):
        task = asyncio.create_task(acquire(link))
        await asyncio.sleep(tenths_ms / 10_000)
        task.cancel()
        (got,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(got, BaseException):
            link.end(got.lease, 0)
    await until(lambda: owner.leases == 0, "all leases are given back")
    assert link.last_error == "", "a caller's haste is no fault of the peer"


async def test_a_peer_that_comes_back_is_found_again(
    make_owner: Callable[..., Awaitable[Owner]], make_link: Callable[..., PeerLink]
) -> None:
    port = free_port()
    link = make_link(record(f"127.0.0.1:{port}"))
    with pytest.raises(Unavailable):
        await link.hello(DEADLINE_S)
    assert not link.breaker.admit()
    await make_owner(peer_port=port)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await link.hello(DEADLINE_S)
                break
            except Unavailable:
                await asyncio.sleep(0.02)


async def test_a_closed_link_refuses(owner: Owner, make_link: Callable[..., PeerLink]) -> None:
    link = make_link(owner.record())
    waiting = make_link(record(f"127.0.0.1:{free_port()}"))
    got = await acquire(link)
    link.end(got.lease, 0)
    await link.close()
    await link.close()
    assert owner.leases == 0, "close waits for what is given back"
    for its in (link, waiting):
        await its.close()
        with pytest.raises(Unavailable):
            await its.hello(DEADLINE_S)


async def test_a_link_that_is_closed_during_a_call(
    make_owner: Any, make_link: Callable[..., PeerLink]
) -> None:
    owner = await make_owner()
    proxy = Proxy(owner.server.address)
    try:
        link = make_link(owner.record(address=await proxy.start()))
        await link.hello(DEADLINE_S)
        link.doubt()
        proxy.swallow()
        task = asyncio.create_task(link.hello(DEADLINE_S))
        await asyncio.sleep(0.05)
        await link.close()
        with pytest.raises(Unavailable):
            await task
    finally:
        await proxy.stop()


# ---- refusals of the owner


async def test_refusals_keep_their_class(owner: Owner, make_link: Callable[..., PeerLink]) -> None:
    link = make_link(owner.record())
    with pytest.raises(Conflict, match="block_bytes"):
        await link.acquire(KEYS, 0, FINGERPRINT, BLOCK_BYTES * 3, DEADLINE_S)
    with pytest.raises(InvalidRequest, match="fingerprint"):
        await link.acquire(KEYS, 0, b"short", BLOCK_BYTES, DEADLINE_S)
    assert owner.leases == 0


# ---- addresses


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:x",
        "host:1x",
        "host:²",
        "unix:/run/secret:1",
        "unix:1:1",
        "dns://evil/host:1",
        "a b:1",
        "[::1:1",
        "::1:1",
        "[nohost]:1",
        "-x:1",
        "h" * 300 + ":1",
        "host:1\n",
        "xds:///x:1",
    ],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(InvalidRequest, match="address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "target", "is_loopback"),
    [
        ("127.0.0.1:80", "ipv4:127.0.0.1:80", True),
        ("127.8.8.8:80", "ipv4:127.8.8.8:80", True),
        ("10.0.0.1:80", "ipv4:10.0.0.1:80", False),
        ("[::1]:80", "ipv6:[::1]:80", True),
        ("[fe80::1]:80", "ipv6:[fe80::1]:80", False),
        ("localhost:80", "dns:///localhost:80", True),
        ("node-1.example.org:65535", "dns:///node-1.example.org:65535", False),
        ("localhost.evil.org:1", "dns:///localhost.evil.org:1", False),
    ],
)
def test_addresses(text: str, target: str, is_loopback: bool) -> None:
    address = parse_address(text)
    assert address.target == target
    assert address.is_loopback == is_loopback
    assert str(address) == text


async def test_no_plain_call_leaves_the_machine_unless_allowed(make_link: Callable[..., PeerLink]) -> None:
    link = make_link(record("192.0.2.1:5"))
    with pytest.raises(Unavailable, match="tls_cert_file"):
        await link.hello(DEADLINE_S)
    allowed = make_link(record("192.0.2.1:5"), insecure=True)
    with pytest.raises(Unavailable) as caught:
        await allowed.hello(0.05)
    assert "tls_cert_file" not in str(caught.value)
    broken = make_link(record("unix:/tmp/x:1"))
    with pytest.raises(InvalidRequest, match="no address"):
        await broken.hello(DEADLINE_S)


# ---- certificates


@needs_openssl
async def test_mutual_tls(
    tmp_path: Path, make_owner: Callable[..., Awaitable[Owner]], make_peers: Callable[..., Peers]
) -> None:
    ours = certificates(tmp_path / "ours")
    others = certificates(tmp_path / "others")
    owner = await make_owner(**ours)

    async def hello(**fields: Any) -> None:
        peers = make_peers(**fields)
        peers.update([owner.record()])
        link = peers.get(OWNER_ID)
        assert link is not None
        await link.hello(DEADLINE_S)

    await hello(**certificates(tmp_path / "more", "second", tmp_path / "ours"))
    with pytest.raises(Unavailable):
        await hello()  # in the clear
    with pytest.raises(Unavailable):
        await hello(**others)
    with pytest.raises(Unavailable):  # the right CA, but a certificate of another one
        await hello(**(others | {"tls_ca_file": ours["tls_ca_file"]}))
    credentials = grpc.ssl_channel_credentials(ours["tls_ca_file"].read_bytes())  # no certificate at all
    async with grpc.aio.secure_channel(owner.server.address, credentials) as channel:
        call = channel.unary_unary("/kvtier.v1.PeerService/Hello")
        with pytest.raises(grpc.aio.AioRpcError):
            await call(b"", timeout=DEADLINE_S)


@needs_openssl
async def test_a_server_in_the_clear_or_of_another_ca_is_not_trusted(
    tmp_path: Path, make_owner: Callable[..., Awaitable[Owner]], make_peers: Callable[..., Peers]
) -> None:
    ours = certificates(tmp_path / "ours")
    plain = await make_owner()
    foreign = await make_owner(node_id="c" * 32, **certificates(tmp_path / "others"))
    peers = make_peers(**ours)
    peers.update([plain.record(), foreign.record()])
    for node in (OWNER_ID, "c" * 32):
        link = peers.get(node)
        assert link is not None
        with pytest.raises(Unavailable):
            await link.hello(DEADLINE_S)


# ---- all peers


async def test_links_follow_the_nodes_that_live(owner: Owner, make_peers: Callable[..., Peers]) -> None:
    transfer: Bent = offer("stream")
    peers = make_peers([transfer])
    me = record("127.0.0.1:1", node=PULLER_ID)
    mute = record("", node="d" * 32)
    peers.update([owner.record(), me, mute])
    assert peers.get(PULLER_ID) is None
    assert peers.get("d" * 32) is None
    link = peers.get(OWNER_ID)
    assert link is not None
    await link.hello(DEADLINE_S)
    peers.update([owner.record(resident_bytes=5)])
    assert peers.get(OWNER_ID) is link
    assert link.record.resident_bytes == 5
    peers.update([])
    assert peers.get(OWNER_ID) is None
    await until(lambda: transfer.forgotten == [OWNER_ID], "it is forgotten")
    with pytest.raises(Unavailable):
        await link.hello(DEADLINE_S)
    peers.update([owner.record()])
    again = peers.get(OWNER_ID)
    assert again is not None
    assert again is not link
    await again.hello(DEADLINE_S)


async def test_a_new_life_is_called_only_after_the_old_one_is_forgotten(
    owner: Owner, make_peers: Callable[..., Peers]
) -> None:
    class Slow(Bent):
        async def forget(self, node: str) -> None:
            await gate.wait()
            await super().forget(node)

    gate = asyncio.Event()
    transfer = Slow(offer("stream"))
    peers = make_peers([transfer])
    peers.update([owner.record(incarnation=6)])
    peers.update([owner.record()])
    link = peers.get(OWNER_ID)
    assert link is not None
    with pytest.raises(DeadlineExceeded):
        await link.hello(0.1)
    gate.set()
    await link.hello(DEADLINE_S)
    assert transfer.forgotten == [OWNER_ID]


async def test_a_transfer_that_cannot_forget_stops_nobody(
    owner: Owner, make_peers: Callable[..., Peers]
) -> None:
    class Stubborn(Bent):
        async def forget(self, node: str) -> None:
            raise ZeroDivisionError("a bug")

    peers = make_peers([Stubborn(offer("stream"))])
    peers.update([owner.record(incarnation=6)])
    peers.update([owner.record()])
    link = peers.get(OWNER_ID)
    assert link is not None
    await link.hello(DEADLINE_S)


async def test_channels_are_of_one_life(owner: Owner, make_peers: Callable[..., Peers]) -> None:
    peers = make_peers()
    peers.update([owner.record(), record("192.0.2.1:5", node="e" * 32)])

    def remote(node: str, incarnation: int) -> Remote:
        return Remote(node, incarnation, "", 0, 0, b"", 1)

    link = peers.get(OWNER_ID)
    assert link is not None
    assert peers.channel_of(remote(OWNER_ID, 7)) is link.channel()
    for node, incarnation in ((OWNER_ID, 6), ("f" * 32, 7), ("e" * 32, 7)):
        with pytest.raises(TransferFault):
            peers.channel_of(remote(node, incarnation))


async def test_closing_all_twice(owner: Owner, make_peers: Callable[..., Peers]) -> None:
    peers = make_peers([transfer := offer("stream")])
    peers.update([owner.record()])
    await peers.close()
    await peers.close()
    assert transfer.forgotten == [OWNER_ID]
    peers.update([owner.record()])
    assert peers.get(OWNER_ID) is None
