"""What the services answer: flows, repeats of calls, streams that are left early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvtier.daemon import Daemon
from kvtier.server.wire import LOAD_CHUNK_BLOCKS
from kvtier.types import Layout, LayoutKind, LayoutOrder, pack_keys
from kvtier.v1 import admin_pb2, engine_pb2
from tests.server import harness
from tests.server.harness import LAYOUT, RawEngine, Wire, call_id, chain, until

KEYS = chain(1, 4)
MORE = chain(2, 4)


async def test_register_says_where_the_arena_is(
    make_engine: Callable[..., RawEngine], daemon: Daemon
) -> None:
    engine = make_engine()
    reply = await engine.register()
    assert daemon.node is not None
    assert reply.node_id == daemon.node.identity.node_id
    assert reply.incarnation == daemon.node.identity.incarnation
    assert reply.slot_bytes == LAYOUT.slot_bytes
    assert reply.max_keys_per_call == daemon.config.max_keys_per_call
    assert reply.arena.size_bytes == reply.arena.allocated_bytes == daemon.config.dram_bytes
    assert Path(reply.arena.path).stat().st_mode & 0o777 == 0o600


async def test_what_one_engine_stores_another_loads(
    engine: RawEngine, make_engine: Callable[..., RawEngine], wire: Wire
) -> None:
    await engine.store(KEYS)
    other = make_engine()
    await other.register()
    offer = await wire.engine.Lookup(other.lookup_request([*KEYS, MORE[0]]))
    assert (offer.blocks, offer.reason) == (4, "missing")
    assert [(tier.tier, tier.blocks) for tier in offer.tiers] == [(2, 4)]
    (message,) = await other.load(KEYS)
    assert (message.first, message.tier) == (0, 2)
    assert other.read(message.slots) == [engine.content(key) for key in KEYS]
    assert (await wire.engine.Release(other.release_request(lease_id=message.lease_id))).valid
    status = await wire.status()
    assert (status.counters.stored_blocks, status.counters.loaded_blocks) == (4, 4)
    assert status.tiers[0].leased_bytes == 0


async def test_a_store_goes_on_behind_its_parent(engine: RawEngine, wire: Wire) -> None:
    keys = chain(3, 6)
    await engine.store(keys[:2])
    await engine.store(keys[2:], parent=keys[1])
    assert (await wire.engine.Lookup(engine.lookup_request(keys))).blocks == 6
    again = await wire.engine.Reserve(engine.reserve_request(keys))
    assert set(again.states) == {engine_pb2.RESERVE_STATE_PRESENT}
    assert again.reservation_id == 0
    assert again.slots == b"\xff" * 8 * 6


async def test_a_lookup_of_nothing_and_of_what_is_not_there(engine: RawEngine, wire: Wire) -> None:
    assert (await wire.engine.Lookup(engine.lookup_request([]))).blocks == 0
    offer = await wire.engine.Lookup(engine.lookup_request(KEYS))
    assert (offer.blocks, offer.reason) == (0, "missing")


async def test_a_load_of_what_is_not_there_is_a_lease_of_nothing(engine: RawEngine, wire: Wire) -> None:
    (message,) = await engine.load(KEYS)
    assert (message.slots, message.checksums) == (b"", b"")


async def test_a_hold_is_ended_by_its_request(engine: RawEngine, wire: Wire) -> None:
    await engine.store(KEYS)
    await wire.engine.Lookup(engine.lookup_request(KEYS))
    assert (await wire.status()).tiers[0].leased_bytes > 0
    assert (await wire.engine.Release(engine.release_request(request_id="request"))).valid
    assert (await wire.status()).tiers[0].leased_bytes == 0


# ---- a repeat of a call gives the first answer and changes nothing


async def twice(wire: Wire, method: Any, request: Any) -> Any:
    first = await method(request)
    after = await wire.state()
    assert await method(request) == first
    assert await wire.state() == after
    return first


async def test_register_twice(make_engine: Callable[..., RawEngine], wire: Wire) -> None:
    await twice(wire, wire.engine.Register, make_engine().register_request())
    assert len((await wire.status()).engines) == 1


async def test_reserve_twice(engine: RawEngine, wire: Wire) -> None:
    reply = await twice(wire, wire.engine.Reserve, engine.reserve_request(KEYS))
    assert (await wire.status()).tiers[0].reserved_bytes == 4 * LAYOUT.slot_bytes
    assert reply.states == bytes([engine_pb2.RESERVE_STATE_GRANTED]) * 4


async def test_commit_twice(engine: RawEngine, wire: Wire) -> None:
    reserved = await engine.reserve(KEYS)
    request = engine.commit_request(reserved.reservation_id, KEYS)
    assert (await twice(wire, wire.engine.Commit, request)).committed == 4
    # also where the repeat's checksums are wrong: the first answer stands, nothing is looked at
    request.checksums = bytes(16 * 4)
    assert (await wire.engine.Commit(request)).committed == 4


async def test_commit_twice_at_once(engine: RawEngine, wire: Wire) -> None:
    reserved = await engine.reserve(KEYS)
    request = engine.commit_request(reserved.reservation_id, KEYS)
    replies = await asyncio.gather(*(wire.engine.Commit(request) for _ in range(8)))
    assert [reply.committed for reply in replies] == [4] * 8
    assert (await wire.status()).counters.stored_blocks == 4


async def test_abort_twice(engine: RawEngine, wire: Wire) -> None:
    reserved = await engine.reserve(KEYS)
    reply = await twice(wire, wire.engine.Abort, engine.abort_request(reserved.reservation_id))
    assert reply.freed == 4
    assert (await wire.status()).tiers[0].reserved_bytes == 0


async def test_load_twice(engine: RawEngine, wire: Wire) -> None:
    await engine.store(KEYS)
    request = engine.load_request(KEYS)
    first = [message async for message in wire.engine.Load(request)]
    after = await wire.state()
    assert [message async for message in wire.engine.Load(request)] == first
    assert await wire.state() == after


async def test_release_twice(engine: RawEngine, wire: Wire) -> None:
    await engine.store(KEYS)
    (message,) = await engine.load(KEYS)
    request = engine.release_request(lease_id=message.lease_id)
    assert (await twice(wire, wire.engine.Release, request)).valid
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # under an id of its own it is another release
        await wire.engine.Release(engine.release_request(lease_id=message.lease_id))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_report_twice(engine: RawEngine, wire: Wire) -> None:
    request = engine.report_request(KEYS)
    assert (await twice(wire, wire.engine.ReportResident, request)).blocks == 4
    await wire.engine.ReportResident(engine.report_request(MORE, KEYS))
    assert (await wire.engine.ReportResident(request)).blocks == 4, "the first answer"
    assert await holders(wire, [*KEYS, *MORE]) == [(i, engine.name) for i in range(4, 8)]


async def holders(wire: Wire, keys: list[bytes]) -> list[tuple[int, str]]:
    """Which engines have which of these in their own memory."""
    found = await wire.admin.LookupPrefix(admin_pb2.LookupPrefixRequest(keys=pack_keys(keys)))
    return [(place.index, place.holder) for place in found.places if place.tier == 1]


async def test_what_engines_have_themselves_is_shown_and_never_offered(
    engine: RawEngine, make_engine: Callable[..., RawEngine], wire: Wire
) -> None:
    other = make_engine()
    await other.register()
    await engine.store(KEYS[:1])
    await wire.engine.ReportResident(engine.report_request(KEYS[:3]))
    await wire.engine.ReportResident(other.report_request(KEYS[1:2]))
    found = await wire.admin.LookupPrefix(admin_pb2.LookupPrefixRequest(keys=pack_keys(KEYS)))
    assert found.blocks == 3, "they count"
    said = [(place.index, place.shard, place.tier, place.holder) for place in found.places]
    one, two = engine.name, other.name
    assert said == [(0, 0, 2, ""), (0, 0, 1, one), (1, 0, 1, one), (1, 0, 1, two), (2, 0, 1, one)]
    assert {place.size_bytes for place in found.places if place.holder} == {0}
    offer = await wire.engine.Lookup(other.lookup_request(KEYS))
    assert (offer.blocks, offer.reason) == (1, "missing")
    (message,) = await other.load(KEYS)
    assert len(message.slots) == 8, "nothing to load but what the node has itself"
    packed = pack_keys(KEYS[1:])
    pin = admin_pb2.PinPrefixRequest(call_id=call_id(), keys=packed, ttl_s=60)
    assert (await wire.admin.PinPrefix(pin)).pinned == 0
    evicted = await wire.admin.EvictPrefix(admin_pb2.EvictPrefixRequest(call_id=call_id(), keys=packed))
    assert (evicted.evicted, evicted.kept) == (0, 0)
    assert [each.resident_blocks for each in (await wire.status()).engines] == [3, 1]
    await wire.engine.Register(engine.register_request())
    assert len(await holders(wire, KEYS)) == 4, "it said the same again, and is the same"
    engine.close()

    async def gone() -> bool:
        return await holders(wire, KEYS) == [(1, two)]

    await until(gone, "the dead engine has nothing")
    reply = await wire.engine.ReportResident(other.report_request(KEYS[3:], clear=True))
    assert reply.blocks == 1
    assert await holders(wire, KEYS) == [(3, two)]


async def test_operators_calls_twice(engine: RawEngine, wire: Wire) -> None:
    await engine.store(KEYS)
    packed = pack_keys(KEYS)
    pin = admin_pb2.PinPrefixRequest(call_id=call_id(), keys=packed, ttl_s=60)
    pinned = await twice(wire, wire.admin.PinPrefix, pin)
    assert pinned.pinned == 4
    evict = admin_pb2.EvictPrefixRequest(call_id=call_id(), keys=packed)
    kept = await twice(wire, wire.admin.EvictPrefix, evict)
    assert (kept.evicted, kept.kept) == (0, 4)
    unpin = admin_pb2.UnpinPrefixRequest(call_id=call_id(), pin_id=pinned.pin_id)
    assert (await twice(wire, wire.admin.UnpinPrefix, unpin)).unpinned == 1
    evict = admin_pb2.EvictPrefixRequest(call_id=call_id(), keys=packed)
    assert (await twice(wire, wire.admin.EvictPrefix, evict)).evicted == 4


async def test_unpin_by_keys(engine: RawEngine, wire: Wire) -> None:
    await engine.store(KEYS)
    packed = pack_keys(KEYS)
    for _ in range(2):
        await wire.admin.PinPrefix(admin_pb2.PinPrefixRequest(call_id=call_id(), keys=packed, ttl_s=60))
    reply = await wire.admin.UnpinPrefix(admin_pb2.UnpinPrefixRequest(call_id=call_id(), keys=packed))
    assert reply.unpinned == 2


# ---- what operators see


async def test_lookup_prefix_shows_every_place(engine: RawEngine, wire: Wire, daemon: Daemon) -> None:
    await engine.store(KEYS)
    (message,) = await engine.load(KEYS)
    reply = await wire.admin.LookupPrefix(admin_pb2.LookupPrefixRequest(keys=pack_keys([*KEYS, MORE[0]])))
    assert reply.blocks == 4
    assert [place.index for place in reply.places] == [0, 1, 2, 3]
    assert {place.leases for place in reply.places} == {1}
    offsets = [int.from_bytes(message.slots[i : i + 8], "little") for i in range(0, 32, 8)]
    assert [place.offset_bytes for place in reply.places] == offsets
    assert daemon.node is not None
    assert {place.node_id for place in reply.places} == {daemon.node.identity.node_id}


async def test_status_names_what_is_not_as_it_should_be(tmp_path: Path, shm: Path) -> None:
    config = harness.config(tmp_path, shm, verify_loads="off", scrub_bytes_per_s=0)
    daemon = Daemon(config)
    await daemon.start()
    wire = Wire(daemon.socket)
    status = await wire.status()
    assert any("verify_loads" in notice for notice in status.notices)
    assert any("scrub_bytes_per_s" in notice for notice in status.notices)
    assert status.state == "serving"
    assert status.index == "none: this node shares nothing"
    await wire.close()
    await daemon.stop()


async def test_health(wire: Wire) -> None:
    stub = health_pb2_grpc.HealthStub(wire.channel)
    for service in ("", "kvtier.v1.EngineService", "kvtier.v1.AdminService"):
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="kvtier.v1.NoService"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection(wire: Wire) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(wire.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=harness.DEADLINE_S
    )
    reply = await call.read()
    names = {service.name for service in reply.list_services_response.service}
    call.cancel()
    assert {"kvtier.v1.EngineService", "kvtier.v1.AdminService", "grpc.health.v1.Health"} <= names


# ---- streams


PAGE_LAYOUT = Layout(
    kind=LayoutKind.GQA,
    num_layers=1,
    num_kv_heads=2,
    head_dim=32,
    dtype="float16",
    block_tokens=16,
    order=LayoutOrder.NHD,
    layer_block_bytes=4096,
)


@pytest.fixture
async def many(tmp_path: Path, shm: Path) -> Any:
    """A daemon with more blocks than one message of a load names, and an engine on it."""
    daemon = Daemon(harness.config(tmp_path, shm, dram_bytes=64 << 20, verify_commits="sample"))
    await daemon.start()
    wire = Wire(daemon.socket)
    engine = RawEngine(wire, daemon.config.run_dir, PAGE_LAYOUT)
    await engine.register()
    keys = chain(7, LOAD_CHUNK_BLOCKS + 100)
    for first in range(0, len(keys), 1000):
        await engine.store(keys[first : first + 1000], keys[first - 1] if first else b"")
    yield engine, keys
    engine.close()
    await wire.close()
    await daemon.stop()


async def test_a_long_load_comes_in_several_messages(many: Any) -> None:
    engine, keys = many
    messages = await engine.load(keys)
    assert [message.first for message in messages] == [0, LOAD_CHUNK_BLOCKS]
    assert len({message.lease_id for message in messages}) == 1
    slots = b"".join(message.slots for message in messages)
    assert len(slots) == 8 * len(keys)
    assert engine.read(slots) == [engine.content(key) for key in keys]
    assert sum(len(message.checksums) for message in messages) == 16 * len(keys)


async def test_a_client_that_leaves_a_load_leaves_no_lease(many: Any) -> None:
    """Its window is smaller than the first message, so that the server is still sending when it leaves."""
    engine, keys = many
    slow = Wire(engine.wire.socket, http2__lookahead_bytes=16_384, http2__bdp_probe=0)

    async def leased() -> bool:
        return (await engine.wire.status()).tiers[0].leased_bytes > 0

    async def nothing_leased() -> bool:
        return not await leased()

    request = engine.load_request(keys)
    for _ in range(3):
        call = slow.engine.Load(engine.load_request(keys))
        await until(leased, "the load has its lease")
        call.cancel()
        await until(nothing_leased, "the lease of the cancelled load is ended")
    call = slow.engine.Load(request)
    await until(leased, "the load has its lease")
    await slow.close()  # as a dying process does
    await until(nothing_leased, "the lease of the broken connection is ended")
    # A repeat of that call names the same lease, and its release says that it is void.
    (message, _) = [message async for message in engine.wire.engine.Load(request)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.wire.engine.Release(engine.release_request(lease_id=message.lease_id))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
