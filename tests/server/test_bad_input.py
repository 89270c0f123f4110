"""Whatever is wrong with a message, the answer says so and nothing has changed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor

from kvtier.daemon import Daemon
from kvtier.server.app import CONNECTIONS_PER_ENGINE, OTHER_CONNECTIONS, SERVICES
from kvtier.types import pack_keys
from kvtier.v1 import admin_pb2, engine_pb2
from tests.server.harness import (
    DEADLINE_S,
    LAYOUT,
    OTHER_LAYOUT,
    RawEngine,
    Wire,
    call_id,
    chain,
    layout_message,
    until,
)
from tests.server.raw_bytes import all_are_refused

KEYS = chain(1, 4)
NEW = chain(2, 4)
CODES = {
    "InvalidRequest": grpc.StatusCode.INVALID_ARGUMENT,
    "UnknownId": grpc.StatusCode.NOT_FOUND,
    "Conflict": grpc.StatusCode.FAILED_PRECONDITION,
    "ProtocolMismatch": grpc.StatusCode.FAILED_PRECONDITION,
    "LimitExceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "Corruption": grpc.StatusCode.DATA_LOSS,
}


async def consume(call: Any) -> None:
    if hasattr(call, "__aiter__"):
        async for _ in call:
            pass
    else:
        await call


async def refused(wire: Wire, make: Callable[[], Any], error: str, *parts: str) -> str:
    """The call fails with `error`, its message has all `parts`, and the status is what it was."""
    before = await wire.state()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await consume(make())
    assert dict(caught.value.trailing_metadata() or ())["kvtier-error"] == error
    assert caught.value.code() == CODES[error]
    details = caught.value.details() or ""
    for part in parts:
        assert part in details
    assert await wire.state() == before
    return details


@pytest.fixture
async def stored(engine: RawEngine) -> RawEngine:
    """An engine with `KEYS` stored."""
    await engine.store(KEYS)
    return engine


PACKED = [
    ("a byte short", b"x" * 31, "31 bytes"),
    ("a byte long", b"x" * 33, "33 bytes"),
    ("too many", b"x" * 32 * 65_537, "65537 keys: at most 65536"),
]


@pytest.mark.parametrize(("packed", "part"), [case[1:] for case in PACKED], ids=[case[0] for case in PACKED])
async def test_keys_of_the_wrong_length(stored: RawEngine, wire: Wire, packed: bytes, part: str) -> None:
    engine, admin = wire.engine, wire.admin
    calls: list[Callable[[], Any]] = [
        lambda: engine.Lookup(stored.lookup_request([], keys=packed)),
        lambda: engine.Load(stored.load_request([], keys=packed)),
        lambda: engine.Reserve(stored.reserve_request([], keys=packed)),
        lambda: engine.Commit(stored.commit_request(1, [], keys=packed)),
        lambda: engine.Abort(stored.abort_request(1, keys=packed)),
        lambda: engine.Release(stored.release_request(lease_id=1, corrupt_keys=packed)),
        lambda: engine.ReportResident(stored.report_request([], added=packed)),
        lambda: engine.ReportResident(stored.report_request([], removed=packed)),
        lambda: admin.LookupPrefix(admin_pb2.LookupPrefixRequest(keys=packed)),
        lambda: admin.EvictPrefix(admin_pb2.EvictPrefixRequest(call_id=call_id(), keys=packed)),
        lambda: admin.PinPrefix(admin_pb2.PinPrefixRequest(call_id=call_id(), keys=packed, ttl_s=1)),
        lambda: admin.UnpinPrefix(admin_pb2.UnpinPrefixRequest(call_id=call_id(), keys=packed)),
    ]
    for call in calls:
        await refused(wire, call, "InvalidRequest", part)


NO_KEYS = ["Load", "Reserve", "Commit"]


@pytest.mark.parametrize("method", NO_KEYS)
async def test_no_keys_where_some_are_needed(stored: RawEngine, wire: Wire, method: str) -> None:
    requests = {
        "Load": stored.load_request([]),
        "Reserve": stored.reserve_request([]),
        "Commit": stored.commit_request(1, []),
    }
    await refused(wire, lambda: getattr(wire.engine, method)(requests[method]), "InvalidRequest", "empty")


async def test_ids_that_are_not_allowed(stored: RawEngine, wire: Wire) -> None:
    engine = wire.engine
    for name in ("", "Upper", "a/b", "../../etc/passwd", "x" * 65, "ümlaut", "a\n"):
        await refused(
            wire,
            lambda n=name: engine.Register(stored.register_request(engine_id=n)),
            "InvalidRequest",
            "engine_id",
        )
        await refused(
            wire,
            lambda n=name: engine.Lookup(stored.lookup_request(KEYS, engine_id=n)),
            "InvalidRequest",
            "engine_id",
        )
        await refused(
            wire,
            lambda n=name: engine.ReportResident(stored.report_request(KEYS, engine_id=n)),
            "InvalidRequest",
            "engine_id",
        )
    for name in ("", "x" * 257, "a\x00b", "a\nb"):
        await refused(
            wire, lambda n=name: engine.Lookup(stored.lookup_request(KEYS, n)), "InvalidRequest", "request_id"
        )
        await refused(
            wire, lambda n=name: engine.Load(stored.load_request(KEYS, n)), "InvalidRequest", "request_id"
        )
    for wrong in (b"", b"x" * 15, b"x" * 17):
        await refused(
            wire,
            lambda w=wrong: engine.Reserve(stored.reserve_request(NEW, call_id=w)),
            "InvalidRequest",
            "call_id",
        )
        await refused(
            wire,
            lambda w=wrong: engine.ReportResident(stored.report_request(NEW, call_id=w)),
            "InvalidRequest",
            "call_id",
        )


async def test_reports_that_contradict_themselves(stored: RawEngine, wire: Wire) -> None:
    await wire.engine.ReportResident(stored.report_request(KEYS))
    for added, removed in (([NEW[0], NEW[0]], []), ([], [KEYS[0], KEYS[0]]), ([KEYS[0]], [KEYS[0]])):
        request = stored.report_request(added, removed, clear=True)
        await refused(wire, lambda r=request: wire.engine.ReportResident(r), "InvalidRequest", "twice")
    assert (await wire.status()).engines[0].resident_blocks == len(KEYS)


async def test_numbers_out_of_range(stored: RawEngine, wire: Wire) -> None:
    engine, admin = wire.engine, wire.admin
    for count in (0, 4097, 2**32 - 1):
        await refused(
            wire,
            lambda c=count: engine.Lookup(stored.lookup_request(KEYS, shard_count=c)),
            "InvalidRequest",
            "shard_count",
        )
    for shard in (4096, 2**32 - 1):
        for call in (
            lambda s=shard: engine.Load(stored.load_request(KEYS, shard=s)),
            lambda s=shard: engine.Reserve(stored.reserve_request(NEW, shard=s)),
            lambda s=shard: engine.Release(stored.release_request(lease_id=1, shard=s)),
        ):
            await refused(wire, call, "InvalidRequest", "shard")
    for ttl_s in (float("nan"), float("inf"), float("-inf"), 0.0, -1.0):
        request = admin_pb2.PinPrefixRequest(call_id=call_id(), keys=pack_keys(KEYS), ttl_s=ttl_s)
        await refused(wire, lambda r=request: admin.PinPrefix(r), "InvalidRequest", "ttl_s")


async def test_keys_that_are_no_chain(stored: RawEngine, wire: Wire) -> None:
    twice = [NEW[0], NEW[1], NEW[0]]
    await refused(wire, lambda: wire.engine.Reserve(stored.reserve_request(twice)), "InvalidRequest", "twice")
    await refused(
        wire, lambda: wire.engine.Reserve(stored.reserve_request(NEW, NEW[2])), "InvalidRequest", "parent"
    )


async def test_a_parent_that_is_not_here(stored: RawEngine, wire: Wire) -> None:
    absent = chain(9, 1)[0]
    await refused(
        wire, lambda: wire.engine.Reserve(stored.reserve_request(NEW, absent)), "UnknownId", "parent"
    )
    await refused(
        wire,
        lambda: wire.engine.Reserve(stored.reserve_request(NEW, parent=b"x" * 31)),
        "InvalidRequest",
        "parent has 31 bytes",
    )


async def test_a_layout_whose_bytes_do_not_match(make_engine: Callable[..., RawEngine], wire: Wire) -> None:
    engine = make_engine()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"layer_block_bytes": 4097}, "its other fields make 4096"),
        ({"num_kv_heads": 3}, "its other fields make 6144"),
        ({"num_layers": 0}, "num_layers"),
        ({"dtype": "float17"}, "dtype"),
        ({"kind": "mixed"}, "kind"),
        ({"order": "DHN"}, "order"),
        ({"interior": "x" * 257}, "interior"),
        ({"head_dim": 2**63}, "head_dim"),
    ]
    for change, part in changes:
        layout = layout_message(LAYOUT, **change)
        request = engine.register_request(layout=layout)
        await refused(wire, lambda r=request: wire.engine.Register(r), "InvalidRequest", part)


async def test_a_block_that_no_extent_can_hold(make_engine: Callable[..., RawEngine], wire: Wire) -> None:
    engine = make_engine()
    large = LAYOUT.__class__(
        kind=LAYOUT.kind,
        num_layers=512,
        num_kv_heads=2,
        head_dim=32,
        dtype="float16",
        block_tokens=16,
        order=LAYOUT.order,
        layer_block_bytes=4096,
    )
    request = engine.register_request(layout=layout_message(large), fingerprint=large.fingerprint())
    await refused(wire, lambda: wire.engine.Register(request), "InvalidRequest", "extent")


async def test_another_layout_under_a_registered_fingerprint(
    stored: RawEngine, make_engine: Callable[..., RawEngine], wire: Wire
) -> None:
    other = make_engine()
    request = other.register_request(layout=layout_message(OTHER_LAYOUT), fingerprint=LAYOUT.fingerprint())
    await refused(wire, lambda: wire.engine.Register(request), "InvalidRequest", "fingerprint")
    # and the same engine under another, honest layout
    request = stored.register_request(
        layout=layout_message(OTHER_LAYOUT), fingerprint=OTHER_LAYOUT.fingerprint()
    )
    await refused(wire, lambda: wire.engine.Register(request), "Conflict", "another layout")
    # and calls that name another layout than the registered one
    fingerprint = OTHER_LAYOUT.fingerprint()
    for call in (
        lambda: wire.engine.Lookup(stored.lookup_request(KEYS, fingerprint=fingerprint)),
        lambda: wire.engine.Reserve(stored.reserve_request(NEW, fingerprint=fingerprint)),
    ):
        await refused(wire, call, "Conflict", "layout")
    for call in (
        lambda: wire.engine.Lookup(stored.lookup_request(KEYS, fingerprint=b"x" * 31)),
        lambda: wire.engine.Reserve(stored.reserve_request(NEW, fingerprint=b"")),
    ):
        await refused(wire, call, "InvalidRequest", "fingerprint")


async def test_another_protocol_version(make_engine: Callable[..., RawEngine], wire: Wire) -> None:
    engine = make_engine()
    for version in (0, 2, 2**32 - 1):
        details = await refused(
            wire,
            lambda v=version: wire.engine.Register(engine.register_request(protocol_version=v)),
            "ProtocolMismatch",
        )
        assert details == (
            f"client speaks protocol {version}, node speaks 1: install the same kvtier version on both"
        )


async def test_an_engine_whose_lock_nobody_holds(
    make_engine: Callable[..., RawEngine], wire: Wire, daemon: Daemon
) -> None:
    engine = make_engine()
    await refused(
        wire,
        lambda: wire.engine.Register(engine.register_request(engine_id="nobody")),
        "Conflict",
        "engine lock is not held",
    )
    engine.close()
    await refused(
        wire,
        lambda: wire.engine.Register(engine.register_request()),
        "Conflict",
        "engine lock is not held",
    )


async def test_an_engine_that_never_registered(make_engine: Callable[..., RawEngine], wire: Wire) -> None:
    stranger = make_engine()
    calls: list[Callable[[], Any]] = [
        lambda: wire.engine.Lookup(stranger.lookup_request(KEYS)),
        lambda: wire.engine.Load(stranger.load_request(KEYS)),
        lambda: wire.engine.Reserve(stranger.reserve_request(KEYS)),
        lambda: wire.engine.Commit(stranger.commit_request(1, KEYS)),
        lambda: wire.engine.Abort(stranger.abort_request(1)),
        lambda: wire.engine.Release(stranger.release_request(lease_id=1)),
        lambda: wire.engine.ReportResident(stranger.report_request(KEYS)),
    ]
    for call in calls:
        await refused(wire, call, "UnknownId", "register")


async def test_commits_of_slots_not_reserved(stored: RawEngine, wire: Wire) -> None:
    reserved = await stored.reserve(NEW)
    number = reserved.reservation_id
    commit = wire.engine.Commit
    await refused(wire, lambda: commit(stored.commit_request(number + 7, NEW)), "UnknownId", "reserv")
    await refused(wire, lambda: commit(stored.commit_request(number, KEYS)), "UnknownId", "not reserved")
    await refused(wire, lambda: commit(stored.commit_request(number, [*NEW, KEYS[0]])), "UnknownId")
    await refused(wire, lambda: commit(stored.commit_request(number, [NEW[0], NEW[0]])), "InvalidRequest")
    request = stored.commit_request(number, NEW)
    request.checksums = request.checksums[:-1]
    await refused(wire, lambda: commit(request), "InvalidRequest", "checksums")
    # untouched by all this
    assert (await commit(stored.commit_request(number, NEW))).committed == len(NEW)


async def test_commits_under_another_engines_id(
    stored: RawEngine, make_engine: Callable[..., RawEngine], wire: Wire
) -> None:
    other = make_engine()
    await other.register()
    number = (await stored.reserve(NEW)).reservation_id
    await refused(
        wire, lambda: wire.engine.Commit(other.commit_request(number, NEW)), "Conflict", "another engine"
    )
    await refused(wire, lambda: wire.engine.Abort(other.abort_request(number)), "Conflict", "another engine")
    assert (await wire.engine.Commit(stored.commit_request(number, NEW))).committed == len(NEW)


async def test_commits_with_a_wrong_checksum(stored: RawEngine, wire: Wire) -> None:
    number = (await stored.reserve(NEW)).reservation_id
    request = stored.commit_request(number, NEW)
    request.checksums = request.checksums[:16] + bytes(16) + request.checksums[32:]
    details = await refused(wire, lambda: wire.engine.Commit(request), "Corruption", "1 of 4")
    assert not any(key.hex() in details for key in NEW)
    found = await wire.engine.Lookup(stored.lookup_request(NEW))
    assert found.blocks == 0
    # the reservation is as it was: the right checksums commit it, also under the refused call's id
    again = stored.commit_request(number, NEW, call_id=request.call_id)
    assert (await wire.engine.Commit(again)).committed == len(NEW)


async def test_releases_of_unknown_leases(
    stored: RawEngine, make_engine: Callable[..., RawEngine], wire: Wire
) -> None:
    await refused(
        wire, lambda: wire.engine.Release(stored.release_request(lease_id=12345)), "UnknownId", "lease"
    )
    await refused(wire, lambda: wire.engine.Release(stored.release_request()), "InvalidRequest", "lease_id")
    other = make_engine()
    await other.register()
    lease = (await stored.load(KEYS))[0].lease_id
    before = await wire.state()
    with pytest.raises(grpc.aio.AioRpcError):
        await wire.engine.Release(other.release_request(lease_id=lease))
    assert await wire.state() == before
    assert (await wire.engine.Release(stored.release_request(lease_id=lease))).valid


async def test_aborts_of_unknown_reservations(stored: RawEngine, wire: Wire) -> None:
    await refused(wire, lambda: wire.engine.Abort(stored.abort_request(99)), "UnknownId", "reserv")
    number = (await stored.reserve(NEW)).reservation_id
    await refused(
        wire,
        lambda: wire.engine.Abort(stored.abort_request(number, keys=pack_keys(KEYS))),
        "UnknownId",
        "not reserved",
    )


async def test_unpins_that_name_nothing(stored: RawEngine, wire: Wire) -> None:
    request = admin_pb2.UnpinPrefixRequest(call_id=call_id())
    await refused(wire, lambda: wire.admin.UnpinPrefix(request), "InvalidRequest", "pin_id")


async def test_a_call_id_of_another_kind_of_call(stored: RawEngine, wire: Wire) -> None:
    number = call_id()
    reserved = await wire.engine.Reserve(stored.reserve_request(NEW, call_id=number))
    await refused(
        wire,
        lambda: wire.engine.Abort(stored.abort_request(reserved.reservation_id, call_id=number)),
        "Conflict",
        "call_id",
    )


async def test_messages_over_the_limit(stored: RawEngine, wire: Wire, daemon: Daemon) -> None:
    before = await wire.state()
    request = stored.lookup_request([], keys=b"x" * (daemon.config.max_message_bytes + 32))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.engine.Lookup(request)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(daemon.config.max_message_bytes) in (caught.value.details() or "")
    assert await wire.state() == before


async def test_an_answer_that_would_be_over_the_limit(
    engine: RawEngine, wire: Wire, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.store(KEYS)
    monkeypatch.setattr("kvtier.server.admin_service._FRAME_BYTES", daemon.config.max_message_bytes - 100)
    request = admin_pb2.LookupPrefixRequest(keys=pack_keys(KEYS))
    await refused(wire, lambda: wire.admin.LookupPrefix(request), "LimitExceeded", "fewer keys")


async def test_random_bytes_on_the_socket(stored: RawEngine, wire: Wire, daemon: Daemon) -> None:
    before = await wire.state()
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for head in (b"", preface, preface + bytes(9), b"GET / HTTP/1.1\r\n\r\n"):
        for size in (0, 1, 100, 100_000):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(DEADLINE_S)
                client.connect(os.fspath(daemon.socket))
                with contextlib.suppress(OSError):  # it may have hung up on us already
                    client.sendall(head + os.urandom(size))
    with socket.socket(socket.AF_UNIX) as idle:  # and one that says nothing
        idle.connect(os.fspath(daemon.socket))
        assert await wire.state() == before
        assert (await wire.engine.Lookup(stored.lookup_request(KEYS))).blocks == len(KEYS)


async def test_too_many_engines(make_engine: Callable[..., RawEngine], wire: Wire, daemon: Daemon) -> None:
    for _ in range(daemon.config.max_engines):
        engine = make_engine()
        await wire.engine.Register(engine.register_request())
    last = make_engine()
    await refused(wire, lambda: wire.engine.Register(last.register_request()), "LimitExceeded", "max_engines")


async def test_more_calls_at_once_than_allowed(
    stored: RawEngine, wire: Wire, monkeypatch: pytest.MonkeyPatch, daemon: Daemon
) -> None:
    """Health watches stay open; one call more than `MAX_CONCURRENT_RPCS` is refused, not queued."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from kvtier.server.app import MAX_CONCURRENT_RPCS, MAX_STREAMS_PER_CONNECTION

    wires = [Wire(daemon.socket) for _ in range(-(-MAX_CONCURRENT_RPCS // MAX_STREAMS_PER_CONNECTION) + 1)]
    watches: list[Any] = []
    try:
        for number in range(MAX_CONCURRENT_RPCS):
            other = wires[number // MAX_STREAMS_PER_CONNECTION]
            watch = health_pb2_grpc.HealthStub(other.channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            watches.append(watch)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wires[-1].engine.Lookup(stored.lookup_request(KEYS), timeout=DEADLINE_S)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        for watch in watches:
            watch.cancel()
        for other in wires:
            await other.close()

    async def answers() -> bool:
        try:
            return (await wire.engine.Lookup(stored.lookup_request(KEYS))).blocks == len(KEYS)
        except grpc.aio.AioRpcError:
            return False

    await until(answers, "the node answers again")


async def test_more_connections_than_allowed(stored: RawEngine, wire: Wire, daemon: Daemon) -> None:
    """A client that leaks connections cannot take the daemon's last descriptor, nor those of others."""
    limit = CONNECTIONS_PER_ENGINE * daemon.config.max_engines + OTHER_CONNECTIONS
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

    def connect() -> tuple[int, list[socket.socket]]:
        answered, clients = 0, []
        for _ in range(limit + 20):
            client = socket.socket(socket.AF_UNIX)
            clients.append(client)
            client.settimeout(DEADLINE_S)
            client.connect(os.fspath(daemon.socket))
            with contextlib.suppress(OSError):
                client.sendall(hello)
                answered += client.recv(64) != b""
        return answered, clients

    answered, clients = await asyncio.to_thread(connect)
    assert answered < limit
    assert (await wire.engine.Lookup(stored.lookup_request(KEYS))).blocks == len(KEYS)
    for client in clients:
        client.close()

    async def answers() -> bool:
        other = Wire(daemon.socket)
        try:
            return (await other.status()).state == "serving"
        except grpc.aio.AioRpcError:
            return False
        finally:
            await other.close()

    await until(answers, "new connections are taken again")


@pytest.mark.parametrize("service", SERVICES, ids=[service.name for service in SERVICES])
async def test_bytes_that_are_no_message(
    stored: RawEngine, wire: Wire, service: ServiceDescriptor, caplog: pytest.LogCaptureFixture
) -> None:
    """Every method of every service on the socket, and nobody can fill the log with tracebacks."""
    before = await wire.state()
    assert await all_are_refused(wire.channel, service)
    assert await wire.state() == before
    assert not caplog.records, caplog.text


def test_the_wire_enum_is_the_cores() -> None:
    from kvtier.core.messages import ReserveState

    for state in ReserveState:
        assert engine_pb2.ReserveState.Value(f"RESERVE_STATE_{state.name}") == state
