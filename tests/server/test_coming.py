"""Load streams blocks that arrive later; who leaves or stalls keeps no lease and no memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvtier.core import messages as m
from kvtier.daemon import Daemon
from kvtier.node import Node
from kvtier.server import engine_service
from kvtier.v1 import engine_pb2 as pb
from tests.server.harness import DEADLINE_S, RawEngine, Wire, call_id, chain, until

KEYS = chain(3, 6)


class Late:
    """Makes the node say of each load that all but `here` of its blocks are still coming."""

    def __init__(self, node: Node, here: int) -> None:
        self.node = node
        self.here = here
        self.leases: dict[int, m.Leased] = {}
        self._handle = node.core.handle
        node.core.handle = self.handle  # type: ignore[method-assign]

    def handle(self, event: m.Event, now_s: float) -> list[m.Action]:
        actions = self._handle(event, now_s)
        if isinstance(event, m.Load):
            whole = actions[0]
            assert isinstance(whole, m.Leased)
            self.leases[whole.lease] = whole
            coming = len(whole.slots) - self.here
            part = whole.slots[: self.here], whole.checksums[: self.here]
            return [m.Leased(whole.lease, *part, whole.lease_ttl_s, coming), *actions[1:]]
        return actions

    def bring(self, lease: int, first: int, end: int, *, is_last: bool) -> None:
        whole = self.leases[lease]
        self.node.arrivals.add(
            m.Ready(lease, first, whole.slots[first:end], whole.checksums[first:end], is_last)
        )


@pytest.fixture
async def late(daemon: Daemon, engine: RawEngine) -> Late:
    await engine.store(KEYS)
    assert daemon.node is not None
    return Late(daemon.node, 2)


async def begin(engine: RawEngine, request: pb.LoadRequest | None = None) -> tuple[Any, pb.LoadResponse]:
    call = engine.wire.engine.Load(request or engine.load_request(KEYS), timeout=DEADLINE_S)
    return call, await call.read()


async def test_blocks_are_told_as_they_arrive(late: Late, engine: RawEngine) -> None:
    call, first = await begin(engine)
    assert (len(first.slots) // 8, first.first, first.coming) == (2, 0, 4)
    late.bring(first.lease_id, 2, 3, is_last=False)
    second = await call.read()
    assert (len(second.slots) // 8, second.first, second.coming) == (1, 2, 3)
    late.bring(first.lease_id, 3, 6, is_last=True)
    third = await call.read()
    assert (len(third.slots) // 8, third.first, third.coming) == (3, 3, 0)
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert {first.lease_id, second.lease_id, third.lease_id} == {first.lease_id}
    assert engine.read(first.slots + second.slots + third.slots) == [engine.content(key) for key in KEYS]
    request = engine.release_request(lease_id=first.lease_id)
    assert (await engine.wire.engine.Release(request)).valid
    assert len(late.node.arrivals) == 0


async def test_what_does_not_come_ends_the_stream(late: Late, engine: RawEngine) -> None:
    call, first = await begin(engine)
    late.bring(first.lease_id, 2, 2, is_last=True)
    last = await call.read()
    assert (last.slots, last.coming) == (b"", 0)
    assert await call.read() is grpc.aio.EOF
    assert (await engine.wire.engine.Release(engine.release_request(lease_id=first.lease_id))).valid


async def test_a_repeat_is_told_everything_again(late: Late, engine: RawEngine) -> None:
    request = engine.load_request(KEYS, call_id=call_id())
    call, first = await begin(engine, request)
    late.bring(first.lease_id, 2, 4, is_last=False)
    await call.read()
    again, first_again = await begin(engine, request)
    assert first_again == first
    late.bring(first.lease_id, 4, 6, is_last=True)
    told = [await again.read(), await again.read()]
    assert await again.read() is grpc.aio.EOF
    assert [message.first for message in told] == [2, 4]
    assert [message.coming for message in told] == [2, 0]
    call.cancel()


async def test_a_release_ends_the_stream(late: Late, engine: RawEngine) -> None:
    call, first = await begin(engine)
    request = engine.release_request(lease_id=first.lease_id)
    assert (await engine.wire.engine.Release(request)).valid
    assert await call.read() is grpc.aio.EOF
    assert len(late.node.arrivals) == 0


async def test_a_client_that_leaves_ends_its_lease(
    late: Late, engine: RawEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_service, "LEAVE_GRACE_S", 0.05)
    call, first = await begin(engine)
    assert late.node.stats().leases == 1
    call.cancel()

    async def is_over() -> bool:
        return late.node.stats().leases == 0 and len(late.node.arrivals) == 0

    await until(is_over, "the lease of a client that left ends")
    assert first.lease_id not in late.node.core.leases.leases


async def test_a_client_that_is_cut_releases_in_time(late: Late, engine: RawEngine) -> None:
    """Its deadline ends the stream; the release that follows at once still finds the lease valid."""
    call = engine.wire.engine.Load(engine.load_request(KEYS), timeout=0.3)
    first = await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    request = engine.release_request(lease_id=first.lease_id)
    assert (await engine.wire.engine.Release(request, timeout=DEADLINE_S)).valid


async def test_a_lease_that_runs_out_ends_the_stream(
    daemon: Daemon, wire: Wire, make_engine: Callable[..., RawEngine]
) -> None:
    engine = make_engine()
    await engine.register()
    await engine.store(KEYS)
    assert daemon.node is not None
    late = Late(daemon.node, 2)
    call, first = await begin(engine)
    late.node.arrivals.expire(late.node._clock() + late.leases[first.lease_id].lease_ttl_s)
    assert await call.read() is grpc.aio.EOF


async def test_arrivals_of_nobody(late: Late, engine: RawEngine) -> None:
    """Of a lease that is unknown or over nothing is kept, and a stream of it ends at once."""
    late.node.arrivals.add(m.Ready(99, 0, [], [], False))
    assert [ready async for ready in late.node.arrivals.stream(99)] == []
    assert len(late.node.arrivals) == 0
    async with asyncio.timeout(DEADLINE_S):
        late.node.arrivals.expect(98, 1e12)
        late.node.arrivals.add(m.Ready(98, 0, [], [], True))
        late.node.arrivals.add(m.Ready(98, 0, [], [], False))  # after the last
        assert len([ready async for ready in late.node.arrivals.stream(98)]) == 1
    late.node.arrivals.end(98)
