"""A server that is away, silent, new, or somebody else: calls end in time, all comes back by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, IndexFault
from kvtier.index import open_index, servers
from kvtier.index import redis as redis_module
from kvtier.interfaces import Index
from kvtier.testing.index_tests import begin, blocks_of, eventually, found, place, record_of
from kvtier.types import NodeRecord, TierKind
from tests.index import servers as real
from tests.index.conftest import MakeConfig
from tests.index.fake import Talk, answering, blackhole, fake_server, silence
from tests.index.servers import MASTER, PASSWORD, USER, Server

SLACK_S = 3.0
"""On top of a bound, on a busy machine."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that a test may kill."""
    with real.running(Server(tmp_path / "server")) as (server,):
        yield server


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_module, "CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(servers, "TOPOLOGY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(servers, "SENTINEL_TIMEOUT_S", 0.1)


async def is_fault(call: Awaitable[object], bound_s: float) -> str:
    begin_s = time.monotonic()
    with pytest.raises(IndexFault) as caught:
        await call
    assert time.monotonic() - begin_s < bound_s + SLACK_S
    return str(caught.value)


async def works(index: Index, record: NodeRecord) -> bool:
    """Whether a node that lost the index could go on."""
    try:
        await index.heartbeat(record)
        await index.publish(record, blocks_of(3), TierKind.DRAM)
        return await found(index, blocks_of(3)) == [{place(record)}] * 3
    except IndexFault:
        return False


def all_calls(index: Index, record: NodeRecord) -> list[Callable[[], Awaitable[object]]]:
    blocks = blocks_of(300)
    return [
        lambda: index.find(blocks),
        lambda: index.nodes(),
        lambda: index.register(record),
        lambda: index.heartbeat(record),
        lambda: index.publish(record, blocks, TierKind.DRAM),
        lambda: index.withdraw(record, blocks),
        lambda: index.leave(record),
    ]


# ---- one server


async def test_nobody_there(make_config: MakeConfig) -> None:
    index = open_index(make_config(index=f"redis://127.0.0.1:{real.free_port()}"))
    assert "cannot be used (open)" in await is_fault(index.open(), redis_module.CALL_TIMEOUT_S)
    await is_fault(index.find(blocks_of(1)), 0)
    await index.close()


async def test_killed_and_back_empty(server: Server, make_config: MakeConfig) -> None:
    """Every call is a fault at once; afterwards the node is told that it was lost."""
    index = open_index(make_config(index=server.url))
    await index.open()
    record = await begin(index, record_of(1, 5))
    server.kill()
    for call in all_calls(index, record):
        await is_fault(call(), 0)
    server.start()
    assert not await index.heartbeat(record)
    assert await works(index, record)
    assert await index.register(record_of(1, 1)) == 6
    await index.close()


async def test_flushed(server: Server, make_config: MakeConfig) -> None:
    index = open_index(make_config(index=server.url))
    await index.open()
    record = await begin(index, record_of(1, 5))
    server.client().flushall()
    assert await index.nodes() == []
    assert not await index.heartbeat(record)
    assert await works(index, record)
    await index.close()


async def test_stopped_and_continued(server: Server, make_config: MakeConfig, hasty: None) -> None:
    """A server that is stopped costs each call its bound, never more; it needs nobody to come back."""
    index = open_index(make_config(index=server.url, index_timeout_s=0.02))
    await index.open()
    record = await begin(index, record_of(1))
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        for call in all_calls(index, record):
            assert "did not answer within" in await is_fault(call(), 0.3)
        many = [is_fault(index.find(blocks_of(10)), 0.02) for _ in range(100)]
        await asyncio.gather(*many)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    await eventually(lambda: works(index, record))
    await index.close()


@pytest.mark.parametrize("kind", ["redis", "redis+cluster", "redis+sentinel"])
async def test_accepts_and_never_answers(kind: str, make_config: MakeConfig, hasty: None) -> None:
    tail = f"/{MASTER}" if kind == "redis+sentinel" else ""
    async with fake_server(silence) as port:
        index = open_index(make_config(index=f"{kind}://127.0.0.1:{port}{tail}"))
        await is_fault(index.open(), 0.3)
        await index.close()


@pytest.mark.parametrize("kind", ["redis", "rediss", "redis+cluster", "redis+sentinel"])
async def test_blackhole(kind: str, make_config: MakeConfig, hasty: None) -> None:
    tail = f"/{MASTER}" if kind == "redis+sentinel" else ""
    async with blackhole() as port:
        index = open_index(make_config(index=f"{kind}://127.0.0.1:{port}{tail}"))
        await is_fault(index.open(), 0.3)
        await index.close()


ANSWERS: dict[str, Talk] = {
    "http": answering(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "noise": answering(bytes(range(256)) * 100),
    "endless": answering(b"+" + b"x" * (1 << 16), forever=True),
    "endless answers": answering(b":1\r\n" * (1 << 14), forever=True),
    "huge string": answering(b"$536870912\r\nxx"),
    "huge array": answering(b"*1048576\r\n"),
    "negative array": answering(b"*-5\r\n"),
    "deep": answering(b"*1\r\n" * 1000),
    "nil": answering(b"*-1\r\n"),
    "number": answering(b":5\r\n"),
    "wrong pair": answering(b"*2\r\n*0\r\n*1\r\n$-1\r\n"),
    "map": answering(b"%1\r\n+a\r\n+b\r\n"),
    "push": answering(b">2\r\n+message\r\n+b\r\n"),
    "error": answering(b"-ERR " + b"no\x1b[2J" * 1000 + b"\r\n"),
    "moved": answering(b"-MOVED 1 10.0.0.1:1\r\n"),
    "moved nowhere": answering(b"-MOVED x\r\n"),
    "loading": answering(b"-LOADING Redis is loading the dataset in memory\r\n"),
    "slots of nobody": answering(b"*1\r\n*3\r\n:0\r\n:16383\r\n*0\r\n"),
    "slots beyond all": answering(b"*1\r\n*3\r\n:0\r\n:99999999\r\n*3\r\n$1\r\nh\r\n:1\r\n$2\r\nid\r\n"),
    "slots of text": answering(b"*1\r\n*3\r\n+a\r\n+b\r\n*3\r\n$1\r\nh\r\n+x\r\n$2\r\nid\r\n"),
}


@pytest.mark.parametrize("kind", ["redis", "redis+cluster", "redis+sentinel"])
@pytest.mark.parametrize("what", ANSWERS)
async def test_somebody_else_answers(what: str, kind: str, make_config: MakeConfig, hasty: None) -> None:
    """A fault in time, or what can never work; its text is short and printable."""
    tail = f"/{MASTER}" if kind == "redis+sentinel" else ""
    async with fake_server(ANSWERS[what]) as port:
        index = open_index(make_config(index=f"{kind}://127.0.0.1:{port}{tail}"))
        begin_s = time.monotonic()
        with pytest.raises((IndexFault, ConfigError)) as caught:
            await index.open()
        assert time.monotonic() - begin_s < 0.3 + SLACK_S
        assert len(str(caught.value)) < 700
        assert str(caught.value).isprintable()
        await index.close()


async def test_answers_turn_wild_after_open(server: Server, make_config: MakeConfig, hasty: None) -> None:
    """Between an index that works and its server somebody begins to answer nonsense."""
    answers = [None]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            while data := await reader.read(1 << 20):
                upstream.write(data)
                reply = await upstream_reader.read(1 << 20)
                writer.write(reply if answers[0] is None else answers[0])
                await writer.drain()
        finally:
            upstream.close()

    async with fake_server(talk) as port:
        index = open_index(make_config(index=f"redis://127.0.0.1:{port}", index_timeout_s=0.2))
        await index.open()
        record = await begin(index, record_of(1))
        for answer in (
            b"*0\r\n",
            b"*300\r\n" + b"*0\r\n" * 300,
            b":1\r\n",
            b"*2\r\n:-7\r\n:3\r\n",
            b"junk\r\n",
        ):
            answers[0] = answer
            for call in all_calls(index, record):
                # What looks right by chance is believed; nothing but a fault is ever raised.
                with suppress(IndexFault):
                    await call()
            answers[0] = None
            await eventually(lambda: works(index, record))
        await index.close()


async def test_a_server_without_memory(server: Server, make_config: MakeConfig) -> None:
    """It refuses to write: a fault that says so; reading goes on."""
    index = open_index(make_config(index=server.url))
    await index.open()
    record = await begin(index, record_of(1))
    blocks = blocks_of(200)
    await index.publish(record, blocks, TierKind.DRAM)
    server.client().config_set("maxmemory", "1")
    assert "maxmemory" in await is_fault(index.publish(record, blocks, TierKind.NVME), 2)
    assert await found(index, blocks[:1]) == [{place(record)}]
    server.client().config_set("maxmemory", "0")
    assert await works(index, record)
    await index.close()


async def test_a_server_that_became_a_replica(server: Server, make_config: MakeConfig) -> None:
    index = open_index(make_config(index=server.url))
    await index.open()
    record = await begin(index, record_of(1))
    server.client().replicaof("127.0.0.1", real.free_port())
    assert "replica" in await is_fault(index.publish(record, blocks_of(1), TierKind.DRAM), 2)
    server.client().replicaof("NO", "ONE")
    assert await works(index, record)
    await index.close()


async def test_connections_have_a_bound(server: Server, make_config: MakeConfig) -> None:
    """Hundreds of calls at once share a few connections."""
    index = open_index(make_config(index=server.url))
    await index.open()
    await asyncio.gather(*(index.find(blocks_of(50, seed)) for seed in range(300)))
    assert len(server.client().client_list()) <= servers.MAX_CONNECTIONS + 1
    await index.close()
    await eventually(lambda: _is_alone(server))


async def _is_alone(server: Server) -> bool:
    return len(server.client().client_list()) == 1


# ---- what can never work


async def refusal(index: Index) -> str:
    with pytest.raises(ConfigError) as caught:
        await index.open()
    await index.close()
    return str(caught.value)


async def test_wrong_password(server: Server, make_config: MakeConfig) -> None:
    server.client().execute_command("ACL", "SETUSER", "somebody", "on", ">right", "+@all", "~*")
    url = server.url
    text = await refusal(open_index(make_config(index=url, index_user="somebody", index_password="mistaken")))
    assert "index_password_file" in text
    assert "mistaken" not in text
    server.client().config_set("requirepass", "secret")
    assert "index_password_file" in await refusal(open_index(make_config(index=url)))


async def test_a_user_who_may_not(server: Server, make_config: MakeConfig) -> None:
    server.client().execute_command("ACL", "SETUSER", "reader", "on", ">right", "+@read", "~other*")
    config = make_config(index=server.url, index_user="reader", index_password="right")
    assert "allow the user" in await refusal(open_index(config))


async def test_no_cluster(server: Server, make_config: MakeConfig) -> None:
    text = await refusal(open_index(make_config(index=f"redis+cluster://127.0.0.1:{server.port}")))
    assert "write redis://" in text


@pytest.mark.slow
async def test_a_cluster_taken_for_one_server(cluster: list[Server], make_config: MakeConfig) -> None:
    for server in cluster:
        assert "write redis+cluster://" in await refusal(open_index(make_config(index=server.url)))


@pytest.mark.slow
async def test_a_certificate_of_somebody_else(
    secured: tuple[Server, Path], make_config: MakeConfig, tmp_path: Path
) -> None:
    server, ca_file = secured
    other_ca = real.make_certificates(tmp_path)
    fields = {"index_user": USER, "index_password": PASSWORD}
    url = f"rediss://127.0.0.1:{server.port}"
    for ca in (None, other_ca):
        assert "index_ca_file" in await refusal(
            open_index(make_config(index=url, index_ca_file=ca, **fields))
        )
    by_name = make_config(index=f"rediss://localhost:{server.port}", index_ca_file=ca_file, **fields)
    assert "a name that it bears" in await refusal(open_index(by_name))
    plain = open_index(make_config(index=server.url, **fields))
    await is_fault(plain.open(), 2)


# ---- Cluster


@pytest.mark.slow
async def test_cluster_slots_move(cluster: list[Server], make_config: MakeConfig) -> None:
    """Slots get another owner: the very next calls are carried out there."""
    index = open_index(make_config(index=f"redis+cluster://127.0.0.1:{cluster[0].port}"))
    await index.open()
    record = await begin(index, record_of(1))
    blocks = blocks_of(300)
    ids = [server.client().execute_command("CLUSTER MYID") for server in cluster]
    for server in cluster:
        server.client().flushall()
    moved = range(0, 5461, 256)
    for taker in (1, 0):
        for slot in moved:
            for server in (cluster[taker], cluster[1 - taker], cluster[2]):
                server.client().execute_command("CLUSTER SETSLOT", slot, "NODE", ids[taker])
        await index.publish(record, blocks, TierKind.DRAM)
        await index.heartbeat(record)
        assert await found(index, blocks) == [{place(record)}] * 300
        for server in cluster:
            server.client().flushall()
    await index.close()


@pytest.mark.slow
async def test_cluster_fails_over(tmp_path: Path, make_config: MakeConfig, hasty: None) -> None:
    """A master dies, its replica takes over; the index finds it by itself, and the old one later."""
    with real.cluster(tmp_path, replicas=1) as nodes:
        seeds = ",".join(f"127.0.0.1:{node.port}" for node in nodes[:2])
        index = open_index(make_config(index=f"redis+cluster://{seeds}"))
        await index.open()
        record = await begin(index, record_of(1))
        blocks = blocks_of(100)
        await index.publish(record, blocks, TierKind.DRAM)
        nodes[0].kill()
        await is_fault(index.find(blocks), 2)
        await eventually(lambda: works(index, record), 30)
        nodes[0].start()
        await eventually(lambda: works(index, record))
        assert nodes[1].process is not None
        os.kill(nodes[1].process.pid, signal.SIGSTOP)
        await is_fault(index.find(blocks), 2)
        os.kill(nodes[1].process.pid, signal.SIGCONT)
        await eventually(lambda: works(index, record), 30)
        await index.close()


# ---- sentinels


@pytest.mark.slow
async def test_sentinels_fail_over(tmp_path: Path, make_config: MakeConfig, hasty: None) -> None:
    """The master dies, later its successor is stopped; one sentinel is dead all along."""
    with real.watched(tmp_path) as (data, sentinels):
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        index = open_index(make_config(index=f"redis+sentinel://{hosts}/{MASTER}"))
        await index.open()
        record = await begin(index, record_of(1, 5))
        sentinels[0].kill()
        data[0].kill()
        await is_fault(index.find(blocks_of(10)), 2)
        await eventually(lambda: works(index, record), 30)
        assert data[1].client().info("replication")["role"] == "master"
        assert await index.register(replace(record_of(1), incarnation=1)) == 6
        await index.close()


async def test_unknown_master(make_config: MakeConfig, hasty: None) -> None:
    async with fake_server(answering(b"*0\r\n")) as port:
        index = open_index(make_config(index=f"redis+sentinel://127.0.0.1:{port}/nobody"))
        assert "No master found for 'nobody'" in await is_fault(index.open(), 0.3)
        await index.close()
