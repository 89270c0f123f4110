"""The owner's side of peer.proto, asked by a raw client: forms, leases, bytes, ends."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.codecs import codec_of
from kvtier.remote.channels import READ_CHUNK_BYTES
from kvtier.server import peer_service, peer_wire
from kvtier.server.peer_app import SERVICE
from kvtier.transfer.coding import raw_message
from kvtier.types import pack_keys
from kvtier.v1 import peer_pb2 as pb
from kvtier.v1 import peer_pb2_grpc
from tests.remote.peering import (
    BLOCK_BYTES,
    DEADLINE_S,
    FINGERPRINT,
    LAYOUT,
    OWNER_ID,
    PULLER_ID,
    Bent,
    Owner,
    chain,
    config,
    content,
    offer,
    shared_memory,
    until,
)
from tests.server.raw_bytes import all_are_refused

KEYS = chain(3, 12)
OTHER_ID = "c" * 32


class Wire:
    """A raw stub on a connection of its own."""

    def __init__(self, address: str) -> None:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            ("grpc.http2.bdp_probe", 0),  # 64 KiB in flight, so that a reader that takes nothing stops it
        ]
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.stub: Any = peer_pb2_grpc.PeerServiceStub(self.channel)  # type: ignore[no-untyped-call]

    async def acquire(self, **changes: Any) -> pb.AcquireResponse:
        return await self.stub.Acquire(acquire_request(**changes), timeout=DEADLINE_S)

    async def release(self, **changes: Any) -> pb.ReleaseLeaseResponse:
        fields: dict[str, Any] = {"call_id": os.urandom(16), "node_id": PULLER_ID}
        return await self.stub.ReleaseLease(pb.ReleaseLeaseRequest(**(fields | changes)), timeout=DEADLINE_S)

    async def read(self, **fields: Any) -> bytes:
        request = pb.ReadRequest(**({"node_id": PULLER_ID} | fields))
        return b"".join([answer.data async for answer in self.stub.Read(request, timeout=DEADLINE_S)])


def acquire_request(**changes: Any) -> pb.AcquireRequest:
    fields: dict[str, Any] = {
        "call_id": os.urandom(16),
        "node_id": PULLER_ID,
        "owner_id": OWNER_ID,
        "incarnation": 7,
        "keys": pack_keys(KEYS),
        "fingerprint": FINGERPRINT,
        "block_bytes": BLOCK_BYTES,
    }
    return pb.AcquireRequest(**(fields | changes))


def packed(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def offsets(lease: pb.AcquireResponse) -> tuple[int, ...]:
    return struct.unpack(f"<{len(lease.slots) // 8}Q", lease.slots)


async def refused(call: Awaitable[Any], error: str, words: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    named = dict(caught.value.trailing_metadata() or ())
    assert named.get("kvtier-error") == error, caught.value
    assert words in (caught.value.details() or "")


@pytest.fixture
def shm() -> Iterator[Path]:
    with shared_memory() as path:
        yield path


@pytest.fixture
async def make_owner(tmp_path: Path, shm: Path) -> AsyncIterator[Callable[..., Awaitable[Owner]]]:
    made: list[Owner] = []

    async def make(transfers: Any = (), **values: Any) -> Owner:
        made.append(await Owner(config(tmp_path / "owner", shm, **values), transfers=transfers).start())
        await made[-1].store(KEYS)
        return made[-1]

    yield make
    for owner in made:
        await owner.stop()


@pytest.fixture
async def owner(make_owner: Callable[..., Awaitable[Owner]]) -> Owner:
    return await make_owner(transfer_codec="auto")


@pytest.fixture
async def wire(owner: Owner) -> AsyncIterator[Wire]:
    wire = Wire(owner.server.address)
    yield wire
    await wire.channel.close()


# ---- hello


async def test_hello(owner: Owner, wire: Wire) -> None:
    request = pb.HelloRequest(protocol_version=1, node_id=PULLER_ID, incarnation=3, wants_metadata=True)
    answer = await wire.stub.Hello(request)
    assert (answer.node_id, answer.incarnation, answer.protocol_version) == (OWNER_ID, 7, 1)
    assert answer.arena_bytes == owner.arena.capacity_bytes
    assert answer.base_address > 0
    assert [its.name for its in answer.transfers] == ["stream"]
    request.wants_metadata = False
    assert not (await wire.stub.Hello(request)).transfers


async def test_hellos_that_are_refused(wire: Wire) -> None:
    empty = pb.HelloRequest(node_id="not looked at")
    await refused(wire.stub.Hello(empty), "InvalidRequest", "protocol_version is 0")
    for version in (2, 2**32 - 1):
        request = pb.HelloRequest(protocol_version=version, node_id="not looked at")
        await refused(wire.stub.Hello(request), "ProtocolMismatch", "same kvtier version")
    for node in ("", "x", "A" * 32, "a" * 33, "é" * 32):
        request = pb.HelloRequest(protocol_version=1, node_id=node)
        await refused(wire.stub.Hello(request), "InvalidRequest", "node_id")


# ---- leases


async def test_acquire_read_release(owner: Owner, wire: Wire) -> None:
    lease = await wire.acquire()
    assert len(offsets(lease)) == len(KEYS)
    assert lease.arena_id == owner.arena.arena_id
    assert owner.leases == 1
    sizes = packed(*[BLOCK_BYTES] * len(KEYS))
    got = await wire.read(lease_id=lease.lease_id, slots=lease.slots, sizes=sizes)
    assert got == b"".join(map(content, KEYS))
    backwards = packed(*reversed(offsets(lease)))
    got = await wire.read(lease_id=lease.lease_id, slots=backwards, sizes=packed(*range(1, len(KEYS) + 1)))
    assert got == b"".join(content(key)[: i + 1] for i, key in enumerate(reversed(KEYS)))
    assert (await wire.release(lease_id=lease.lease_id)).valid
    assert owner.leases == 0
    await refused(
        wire.read(lease_id=lease.lease_id, slots=lease.slots, sizes=sizes), "UnknownId", "lease is over"
    )
    await refused(wire.release(lease_id=lease.lease_id), "UnknownId", "not known")


async def test_nothing_here_is_no_lease(owner: Owner, wire: Wire) -> None:
    for changes in (
        {"keys": pack_keys(chain(99, 3))},
        {"shard": 5},
        {"fingerprint": bytes(32)},
    ):
        lease = await wire.acquire(**changes)
        assert (lease.lease_id, lease.slots, lease.checksums) == (0, b"", b"")
    assert owner.leases == 0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"owner_id": OTHER_ID}, "UnknownId", "another node"),
        ({"owner_id": ""}, "UnknownId", "another node"),
        ({"incarnation": 6}, "UnknownId", "another life"),
        ({"incarnation": 8}, "UnknownId", "another life"),
        ({"incarnation": 0}, "UnknownId", "another life"),
        ({"node_id": "nobody"}, "InvalidRequest", "node_id"),
        ({"call_id": b"short"}, "InvalidRequest", "call_id"),
        ({"call_id": b""}, "InvalidRequest", "call_id"),
        ({"keys": b""}, "InvalidRequest", "at least one key"),
        ({"keys": bytes(31)}, "InvalidRequest", "multiple of 32"),
        ({"keys": bytes(64)}, "InvalidRequest", "twice"),
        ({"keys": bytes(range(256)) * 8 * 9}, "InvalidRequest", "at most 64 a call"),
        ({"shard": 4096}, "InvalidRequest", "shard"),
        ({"shard": 2**32 - 1}, "InvalidRequest", "shard"),
        ({"fingerprint": b"x"}, "InvalidRequest", "fingerprint"),
        ({"block_bytes": 0}, "InvalidRequest", "block_bytes"),
        ({"block_bytes": 2**64 - 1}, "InvalidRequest", "block_bytes"),
        ({"block_bytes": BLOCK_BYTES * 2}, "Conflict", "another size"),
        ({"block_bytes": 1}, "Conflict", "another size"),
    ],
    ids=range(19),
)
async def test_acquires_that_are_refused(
    make_owner: Callable[..., Awaitable[Owner]], changes: dict[str, Any], error: str, words: str
) -> None:
    owner = await make_owner(max_keys_per_call=64)
    wire = Wire(owner.server.address)
    try:
        await refused(wire.acquire(**changes), error, words)
        assert owner.leases == 0
        assert len(offsets(await wire.acquire())) == len(KEYS)
    finally:
        await wire.channel.close()


async def test_acquire_twice_is_one_lease(owner: Owner, wire: Wire) -> None:
    request = acquire_request()
    first = await wire.stub.Acquire(request)
    assert await wire.stub.Acquire(request) == first
    assert owner.leases == 1
    assert (await wire.release(lease_id=first.lease_id)).valid
    assert owner.leases == 0
    # The answer is still remembered, its lease is over: nothing can be read by it.
    again = await wire.stub.Acquire(request)
    assert again == first
    assert owner.leases == 0
    await refused(
        wire.read(lease_id=again.lease_id, slots=again.slots[:8], sizes=packed(1)), "UnknownId", "over"
    )


async def test_release_twice_gives_one_answer(owner: Owner, wire: Wire) -> None:
    lease = await wire.acquire()
    number = os.urandom(16)
    for _ in range(3):
        assert (await wire.release(lease_id=lease.lease_id, call_id=number)).valid


async def test_leases_of_others_are_left_alone(owner: Owner, wire: Wire) -> None:
    lease = await wire.acquire()
    await wire.acquire(node_id=OTHER_ID)
    await refused(wire.release(lease_id=lease.lease_id, node_id=OTHER_ID), "UnknownId", "not known")
    sizes = packed(1)
    await refused(
        wire.read(node_id=OTHER_ID, lease_id=lease.lease_id, slots=lease.slots[:8], sizes=sizes),
        "UnknownId",
        "over",
    )
    got = await wire.read(lease_id=lease.lease_id, slots=lease.slots[:8], sizes=sizes)
    assert got == content(KEYS[0])[:1]
    assert (await wire.release(lease_id=lease.lease_id)).valid


@pytest.mark.parametrize(
    "changes",
    [{"node_id": ""}, {"call_id": b"1"}, {"corrupt_keys": b"1"}, {"shard": 9999}],
    ids=range(4),
)
async def test_releases_that_are_refused(owner: Owner, wire: Wire, changes: dict[str, Any]) -> None:
    lease = await wire.acquire()
    await refused(wire.release(**({"lease_id": lease.lease_id} | changes)), "InvalidRequest", "")
    assert owner.leases == 1


async def test_blocks_that_a_peer_found_corrupt_are_verified(owner: Owner, wire: Wire) -> None:
    lease = await wire.acquire()
    owner.arena.view(owner.slot(KEYS[3]))[5] ^= 1
    reported = pack_keys([KEYS[2], KEYS[3]])
    await wire.release(lease_id=lease.lease_id, corrupt_keys=reported)
    await until(lambda: not owner.node.places(KEYS[3:4]), "the wrong block is gone")
    assert owner.node.places(KEYS[2:3])


async def test_a_lease_ends_by_time(make_owner: Callable[..., Awaitable[Owner]]) -> None:
    owner = await make_owner(lease_ttl_s=0.2)
    wire = Wire(owner.server.address)
    try:
        lease = await wire.acquire()
        assert lease.lease_ttl_s == 0.2
        await until(lambda: owner.leases == 0, "the lease ran out")
        await refused(
            wire.read(lease_id=lease.lease_id, slots=lease.slots[:8], sizes=packed(1)), "UnknownId", "over"
        )
        await wire.acquire(keys=pack_keys(chain(99, 1)))  # so that the peer itself is not forgotten
        assert not (await wire.release(lease_id=lease.lease_id)).valid
    finally:
        await wire.channel.close()


async def test_one_peer_gets_its_share_and_no_more(make_owner: Callable[..., Awaitable[Owner]]) -> None:
    owner = await make_owner(max_given_fraction=4.5 * LAYOUT.slot_bytes / (4 << 20))
    wire = Wire(owner.server.address)
    try:
        assert len(offsets(await wire.acquire())) == 4
        assert len(offsets(await wire.acquire(node_id=OTHER_ID))) == 4
    finally:
        await wire.channel.close()


# ---- bytes


@pytest.mark.parametrize(
    ("slots", "sizes", "words"),
    [
        (b"", b"", "0 slots"),
        (bytes(7), bytes(7), "8 of each"),
        (bytes(8), bytes(16), "8 of each"),
        (bytes(16), bytes(8), "8 of each"),
        (packed(0), packed(0), "at least"),
        (packed(0), packed(BLOCK_BYTES + 1), "smaller"),
        (packed(0), packed(2**64 - 1), "smaller"),
        (packed(1), packed(1), "not under this lease"),
        (packed(2**64 - 1), packed(1), "not under this lease"),
        (packed(LAYOUT.slot_bytes * (len(KEYS) + 1)), packed(1), "not under this lease"),
        (packed(*[0] * (len(KEYS) + 1)), packed(*[1] * (len(KEYS) + 1)), "send each once"),
    ],
    ids=range(11),
)
async def test_reads_that_are_refused(
    owner: Owner, wire: Wire, slots: bytes, sizes: bytes, words: str
) -> None:
    lease = await wire.acquire()
    words = words.replace("at least", "1 byte at least")
    await refused(wire.read(lease_id=lease.lease_id, slots=slots, sizes=sizes), "InvalidRequest", words)
    got = await wire.read(lease_id=lease.lease_id, slots=lease.slots[:8], sizes=packed(BLOCK_BYTES))
    assert got == content(KEYS[0])


CODED_KEYS = chain(5, 128)
"""2 MiB that codecs gain on: keys again and again."""
SLOW = 1e6


async def coded(wire: Wire, keys: list[bytes], **fields: Any) -> list[pb.ReadResponse]:
    lease = await wire.acquire(keys=pack_keys(keys))
    sizes = packed(*[BLOCK_BYTES] * len(keys))
    fields = {"node_id": PULLER_ID, "lease_id": lease.lease_id, "slots": lease.slots, "sizes": sizes} | fields
    call = wire.stub.Read(pb.ReadRequest(**fields), timeout=DEADLINE_S)
    try:
        return [message async for message in call]
    finally:
        await wire.release(lease_id=lease.lease_id)


def plain(messages: list[pb.ReadResponse]) -> bytes:
    whole = b""
    for message in messages:
        into = bytearray(message.size_bytes)
        if message.codec:
            codec_of(message.codec).decode(memoryview(message.data), memoryview(into))
        whole += bytes(into) or message.data
    return whole


async def test_payloads_for_whoever_reads_them_and_bytes_for_all_others(owner: Owner, wire: Wire) -> None:
    await owner.store(CODED_KEYS)
    wanted = b"".join(map(content, CODED_KEYS))
    for codecs in ([], [0], [3], [99, 2**32 - 1]):
        messages = await coded(wire, CODED_KEYS, codecs=codecs, bytes_per_s=SLOW)
        assert {message.codec for message in messages} == {0}
        assert plain(messages) == wanted
    for codecs in ([1], [2], [1, 2, 99]):
        messages = await coded(wire, CODED_KEYS, codecs=codecs, bytes_per_s=SLOW)
        assert {message.codec for message in messages} <= {0, *codecs}
        assert messages[-1].codec
        assert plain(messages) == wanted
    assert plain(await coded(wire, CODED_KEYS, codecs=[2], bytes_per_s=0.0)) == wanted
    messages = await coded(wire, CODED_KEYS, codecs=[1, 2], bytes_per_s=1e15)
    assert {message.codec for message in messages} == {0}, "such a way is faster than any codec"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"codecs": range(1, 18)}, "17 codecs"),
        ({"codecs": [2], "bytes_per_s": -1.0}, "bytes_per_s"),
        ({"codecs": [2], "bytes_per_s": float("nan")}, "bytes_per_s"),
        ({"codecs": [2], "bytes_per_s": float("inf")}, "bytes_per_s"),
    ],
    ids=range(4),
)
async def test_wishes_for_codecs_that_are_refused(
    owner: Owner, wire: Wire, fields: dict[str, Any], words: str
) -> None:
    await refused(coded(wire, KEYS, **fields), "InvalidRequest", words)


@pytest.mark.parametrize("rate", [1e-300, 1e300, 5e-324])
async def test_rates_that_no_way_has(owner: Owner, wire: Wire, rate: float) -> None:
    await owner.store(CODED_KEYS)
    messages = await coded(wire, CODED_KEYS, codecs=[2], bytes_per_s=rate)
    assert plain(messages) == b"".join(map(content, CODED_KEYS))


async def test_a_lease_that_ends_in_the_middle_ends_the_stream(
    owner: Owner, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_wire, "READ_CHUNK_BYTES", BLOCK_BYTES)
    lease = await wire.acquire()
    request = pb.ReadRequest(
        node_id=PULLER_ID,
        lease_id=lease.lease_id,
        slots=lease.slots,
        sizes=packed(*[BLOCK_BYTES] * len(KEYS)),
    )
    reached, goes_on = asyncio.Event(), asyncio.Event()
    write = peer_service._write
    written = 0

    async def slow_write(context: Any, message: bytes) -> bool:
        nonlocal written
        written += 1
        if written == 3:
            reached.set()
            await goes_on.wait()
        return await write(context, message)

    monkeypatch.setattr(peer_service, "_write", slow_write)
    call = wire.stub.Read(request, timeout=DEADLINE_S)

    async def everything() -> bytes:
        return b"".join([answer.data async for answer in call])

    task = asyncio.create_task(everything())
    await reached.wait()
    assert (await wire.release(lease_id=lease.lease_id)).valid
    goes_on.set()
    await refused(task, "UnknownId", "lease is over")
    assert written == 3


async def test_a_reader_that_takes_nothing_is_left_when_its_lease_is_over(
    make_owner: Callable[..., Awaitable[Owner]],
) -> None:
    owner = await make_owner(lease_ttl_s=0.3)
    await owner.store(many := chain(8, 200))
    wire = Wire(owner.server.address)
    try:
        lease = await wire.acquire(keys=pack_keys(many))
        count = len(offsets(lease))
        assert count * BLOCK_BYTES > 3 * READ_CHUNK_BYTES
        sizes = packed(*[BLOCK_BYTES] * count)
        request = pb.ReadRequest(node_id=PULLER_ID, lease_id=lease.lease_id, slots=lease.slots, sizes=sizes)
        call = wire.stub.Read(request, timeout=DEADLINE_S)
        await call.read()  # one message, and then nothing: the window fills up
        errors = owner.metrics.registry.get_sample_value
        labels = {"method": "Read", "error": "UnknownId"}
        await until(lambda: errors("kvtier_rpc_errors_total", labels) == 1, "the stream is ended")
        call.cancel()
    finally:
        await wire.channel.close()


async def test_a_reader_that_leaves(owner: Owner, wire: Wire) -> None:
    lease = await wire.acquire()
    for _ in range(5):
        request = pb.ReadRequest(
            node_id=PULLER_ID,
            lease_id=lease.lease_id,
            slots=lease.slots,
            sizes=packed(*[BLOCK_BYTES] * len(KEYS)),
        )
        call = wire.stub.Read(request, timeout=DEADLINE_S)
        await call.read()
        call.cancel()
    assert (await wire.release(lease_id=lease.lease_id)).valid


def test_chunks_and_frames_carry_every_byte_once() -> None:
    data = os.urandom(3 * READ_CHUNK_BYTES + 12_345)
    cuts = [0, 1, 5, READ_CHUNK_BYTES, READ_CHUNK_BYTES + 7, 2 * READ_CHUNK_BYTES, len(data)]
    views = [memoryview(data)[a:b] for a, b in pairwise(cuts)]
    pieces = list(peer_wire.chunks(views))
    messages = [pb.ReadResponse.FromString(raw_message(piece)) for piece in pieces]
    assert b"".join(message.data for message in messages) == data
    assert [len(message.data) for message in messages] == [READ_CHUNK_BYTES] * 3 + [12_345]
    assert pb.ReadResponse.FromString(raw_message([memoryview(b"x")])).data == b"x"


# ---- transfers


async def test_transfers_are_told_while_leases_are_out(
    make_owner: Callable[..., Awaitable[Owner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_service, "SERVE_EVERY_S", 0.01)
    transfer: Bent = offer("stream")
    owner = await make_owner([transfer])
    wire = Wire(owner.server.address)
    try:
        assert transfer.served == []
        await wire.acquire(keys=pack_keys(chain(99, 2)))
        assert transfer.served == [], "no lease, nothing to serve"
        lease = await wire.acquire()
        assert transfer.served, "before the peer hears of its lease"
        await until(lambda: len(transfer.served) > 5, "again and again")
        assert set(transfer.served) == {peer_service.SERVE_S}
        await wire.release(lease_id=lease.lease_id)
        service = owner.server._service
        await until(lambda: service._serving is None, "no longer than the lease")
        count = len(transfer.served)
        lease = await wire.acquire()
        assert len(transfer.served) > count, "and anew with the next lease"
    finally:
        await wire.channel.close()


async def test_a_bug_in_a_transfer_costs_no_lease(make_owner: Callable[..., Awaitable[Owner]]) -> None:
    class Broken(Bent):
        async def serve(self, seconds: float) -> None:
            raise ZeroDivisionError("a bug")

    owner = await make_owner([Broken(offer("stream"))])
    wire = Wire(owner.server.address)
    try:
        assert (await wire.acquire()).lease_id
    finally:
        await wire.channel.close()


# ---- bytes that are no calls


async def test_bytes_that_are_no_message(owner: Owner, wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    """Every method, and no peer can fill the log with tracebacks."""
    assert await all_are_refused(wire.channel, SERVICE) == 4
    assert not caplog.records, caplog.text
    assert (await wire.acquire()).lease_id


async def test_messages_over_the_limit(owner: Owner, wire: Wire) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.acquire(keys=bytes(owner.config.max_message_bytes))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await wire.acquire()).lease_id


async def test_random_bytes_on_the_port(owner: Owner, wire: Wire) -> None:
    host, _, port = owner.server.address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for head in (b"", preface, preface + bytes(9), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"):
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as client:
            client.sendall(head + os.urandom(10_000))
    assert (await wire.acquire()).lease_id
