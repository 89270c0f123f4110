"""What the node does where other nodes come in: a real core and arena, others that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from kvtier.build import core_config, tier_spec
from kvtier.core import messages as m
from kvtier.core.cache import CacheCore
from kvtier.errors import Fenced, UnknownId
from kvtier.identity import Identity
from kvtier.liveness import EngineLocks
from kvtier.metrics import Metrics
from kvtier.node import Node
from kvtier.tiers.arena import Arena
from kvtier.types import BlockId, Key, Location, TierKind
from tests.server.conftest import shm  # noqa: F401
from tests.server.harness import DEADLINE_S, LAYOUT, chain, config
from tests.test_node import ENGINE, Harness, call_id, checksums, content, records, running

PEER = "2" * 32
KEYS = chain(1, 6)


class Others:
    """Stands where `Remote` stands: has all of `has`, and pulls as far as `brings` says."""

    def __init__(self) -> None:
        self.has: list[Key] = []
        self.asked: list[m.Find] = []
        self.pulls: list[m.Pull] = []
        self.published: list[m.Publish] = []
        self.denied: list[BlockId] = []
        self.order: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.brings = asyncio.Event()
        self.brings.set()
        self.fenced: asyncio.Future[Fenced] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.bug: Exception | None = None
        self.fault = ""
        self.arena: Arena | None = None

    async def run(self, peer_address: str = "") -> None:
        await self.ended.wait()
        if self.bug is not None:
            raise self.bug

    async def stop(self) -> None:
        self.order.append("remote stopped")

    async def find(self, find: m.Find) -> m.Located | None:
        self.asked.append(find)
        await self.answers.wait()
        place = (Location(PEER, 1, TierKind.DRAM),)
        places = [[place if key in self.has else () for key in find.lookup.keys[find.first :]]]
        return m.Located(find.lookup, find.first, places) if any(places[0]) else None

    async def pull(self, action: m.Pull, report: Callable[[Any], object]) -> None:
        self.pulls.append(action)
        try:
            await self.brings.wait()
            if not self.fault:
                assert self.arena is not None
                payloads = [memoryview(content(key)) for key in action.keys]
                await self.arena.write(action.slots, records(action.keys), payloads)
                report(m.Arrived(action.pull, checksums(action.keys)))
        finally:
            self.order.append("pull ended")
            report(m.PullEnded(action.pull, self.fault))

    def publish(self, action: m.Publish) -> None:
        self.published.append(action)

    def deny(self, blocks: Sequence[BlockId]) -> None:
        self.denied += blocks


class Sharing(Harness):
    """A node with `Others`."""

    others: Others

    async def lookup(self, keys: Sequence[Key] = KEYS, request: str = "r") -> m.Offered:
        reply = await self.node.execute(m.Lookup(ENGINE, request, keys, 1, LAYOUT.fingerprint()))
        assert isinstance(reply, m.Offered)
        return reply

    async def load(self, keys: Sequence[Key] = KEYS, request: str = "r") -> m.Leased:
        reply = await self.node.execute(m.Load(call_id(), ENGINE, request, keys, 0))
        assert isinstance(reply, m.Leased)
        return reply


@pytest.fixture
def run(tmp_path: Path, shm: Path) -> Callable[[], Any]:  # noqa: F811
    settings = config(tmp_path, shm, dram_bytes=8 << 20)

    @asynccontextmanager
    async def start() -> AsyncIterator[Sharing]:
        others = Others()

        async def make(identity: Identity) -> Node:
            arena = others.arena = Arena(
                node_id=identity.node_id,
                incarnation=identity.incarnation,
                capacity_bytes=settings.dram_bytes,
                extent_bytes=settings.extent_bytes,
                shm_dir=settings.shm_dir,
                old_arena_deadline_s=30.0,
            )
            await arena.open()
            close = arena.close

            async def note() -> None:
                others.order.append("arena closed")
                await close()

            arena.close = note  # type: ignore[method-assign]
            core = CacheCore(core_config(settings, has_index=True), [tier_spec(arena)])
            return Node(
                core=core,
                tiers=[arena],
                identity=identity,
                locks=EngineLocks(settings.run_dir),
                config=settings,
                metrics=Metrics(),
                remote=cast(Any, others),
            )

        async with running(make, settings) as harness:
            sharing = Sharing(harness.node)
            sharing.others = others
            yield sharing

    return start


async def test_what_others_have_is_offered_and_comes(run: Callable[[], Any]) -> None:
    async with run() as sharing:
        await sharing.store(KEYS[:2])
        sharing.others.has = KEYS[:5]
        sharing.others.brings.clear()
        offer = await sharing.lookup()
        assert (offer.blocks, offer.coming) == (5, 3)
        leased = await sharing.load(KEYS[:5])
        assert (len(leased.slots), leased.coming) == (2, 3)
        sharing.others.brings.set()
        async with asyncio.timeout(DEADLINE_S):
            readies = [ready async for ready in sharing.node.arrivals.stream(leased.lease)]
        assert readies[-1].is_last
        slots = [*leased.slots, *(slot for ready in readies for slot in ready.slots)]
        views = [bytes(sharing.others.arena.view(slot)[: LAYOUT.block_bytes]) for slot in slots]
        assert views == [content(key) for key in KEYS[:5]]
        released = await sharing.node.execute(m.Release(call_id(), ENGINE, leased.lease))
        assert released == m.Released(True)
        assert len(sharing.node.arrivals) == 0
        added = [block.key for its in sharing.others.published for block in its.added]
        assert sorted(added) == sorted(KEYS[:5])


async def test_what_is_all_here_is_asked_of_nobody(run: Callable[[], Any]) -> None:
    async with run() as sharing:
        await sharing.store(KEYS)
        assert (await sharing.lookup()).blocks == len(KEYS)
        assert sharing.others.asked == []


async def test_nobody_has_it(run: Callable[[], Any]) -> None:
    async with run() as sharing:
        await sharing.store(KEYS[:2])
        offer = await sharing.lookup()
        assert (offer.blocks, offer.coming, offer.reason) == (2, 0, "missing")
        assert len(sharing.others.asked) == 1


async def test_a_pull_that_fails_ends_what_was_coming(run: Callable[[], Any]) -> None:
    async with run() as sharing:
        await sharing.store(KEYS[:2])
        sharing.others.has = KEYS
        sharing.others.fault = "unreachable"
        sharing.others.brings.clear()
        await sharing.lookup()
        leased = await sharing.load()
        sharing.others.brings.set()
        async with asyncio.timeout(DEADLINE_S):
            readies = [ready async for ready in sharing.node.arrivals.stream(leased.lease)]
        assert [(ready.slots, ready.is_last) for ready in readies] == [([], True)]
        assert await sharing.node.execute(m.Release(call_id(), ENGINE, leased.lease)) == m.Released(True)


@pytest.mark.parametrize("end", ["the engine dies", "the hold is released"])
async def test_the_asker_goes_while_the_index_is_asked(run: Callable[[], Any], end: str) -> None:
    """1. A lookup waits for the index. 2. Its engine, or its hold, goes. 3. The answer: nothing is pulled."""
    async with run() as sharing:
        await sharing.store(KEYS[:2])
        sharing.others.has = KEYS
        sharing.others.answers.clear()
        waiting = asyncio.create_task(sharing.lookup())
        await sharing.until(lambda: bool(sharing.others.asked), "the index is asked")
        if end == "the engine dies":
            sharing.node._handle(m.EngineDied(ENGINE))
        else:
            await sharing.node.execute(m.Release(call_id(), ENGINE, None, "r"))
        sharing.others.answers.set()
        offer = await waiting
        assert (offer.blocks, offer.coming) == (2, 0), "the first answer stands"
        assert sharing.others.pulls == []
        assert not sharing.node.failed.done()


async def test_a_peer_that_asks_for_what_is_gone(run: Callable[[], Any]) -> None:
    async with run() as sharing:
        await sharing.store(KEYS[:3])
        acquire = m.Acquire(call_id(), PEER, KEYS, 0, LAYOUT.fingerprint())
        leased = await sharing.node.execute(acquire)
        assert len(leased.slots) == 3
        assert sharing.others.denied == [BlockId(key, 0) for key in KEYS[3:]]
        release = m.Release(call_id(), m.peer_name(PEER), leased.lease)
        assert await sharing.node.execute(release) == m.Released(True)


async def test_a_stop_ends_pulls_before_the_memory_goes(run: Callable[[], Any]) -> None:
    async with run() as sharing:
        sharing.others.has = KEYS
        sharing.others.brings.clear()
        assert (await sharing.lookup()).coming == len(KEYS)
        await sharing.until(lambda: bool(sharing.others.pulls), "the pull runs")
        await sharing.node.stop()
        assert sharing.others.order == ["pull ended", "remote stopped", "arena closed"]


async def test_a_fenced_node_says_so(run: Callable[[], Any]) -> None:
    async with run() as sharing:
        sharing.node.join("127.0.0.1:1")
        sharing.others.fenced.set_result(Fenced("another one: stop this one"))
        sharing.others.ended.set()
        async with asyncio.timeout(DEADLINE_S):
            assert isinstance(await sharing.node.failed, Fenced)


async def test_a_bug_of_what_shares_ends_the_node(run: Callable[[], Any]) -> None:
    async with run() as sharing:
        sharing.node.join()
        sharing.others.bug = ZeroDivisionError("a bug")
        sharing.others.ended.set()
        async with asyncio.timeout(DEADLINE_S):
            assert isinstance(await sharing.node.failed, ZeroDivisionError)


async def test_leases_that_end_are_not_waited_for(run: Callable[[], Any]) -> None:
    async with run() as sharing:
        sharing.others.has = KEYS
        sharing.others.brings.clear()
        await sharing.lookup()
        leased = await sharing.load()
        assert leased.coming == len(KEYS)
        stream = asyncio.create_task(anext(sharing.node.arrivals.stream(leased.lease), None))
        await asyncio.sleep(0)
        await sharing.node.execute(m.Release(call_id(), ENGINE, leased.lease))
        async with asyncio.timeout(DEADLINE_S):
            assert await stream is None
        with pytest.raises(UnknownId):
            await sharing.node.execute(m.Release(call_id(), ENGINE, leased.lease))
        sharing.others.brings.set()
        await sharing.until(lambda: sharing.core.match(KEYS, 1) == len(KEYS), "the pull ends all the same")
