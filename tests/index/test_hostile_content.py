"""Whatever somebody wrote into the server: left out, healed by the next publication, never a crash."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from kvtier.errors import Fenced, IndexFault, InvalidRequest
from kvtier.index import codec, open_index
from kvtier.index.scripts import MAX_INCARNATION, MAX_NODES
from kvtier.interfaces import Index
from kvtier.testing.index_tests import begin, blocks_of, found, place, record_of
from kvtier.types import BlockId, NodeRecord, TierKind
from tests.index.conftest import MakeConfig
from tests.index.servers import Server


class Place:
    """An index and, beside it, a client that may write what it likes."""

    def __init__(self, index: Index, client: redis.Redis, prefix: str) -> None:
        self.index = index
        self.client = client
        self.prefix = prefix
        self.keys = codec.Keys(prefix)

    def key(self, block: BlockId) -> bytes:
        return self.keys.blocks([block])[0]

    def now_s(self) -> int:
        return int(self.client.time()[0])

    def entry(self, record: NodeRecord, tier: int = 2, expiry_s: int | None = None) -> bytes:
        head = codec.entry_head(record.node, record.incarnation, TierKind.DRAM)[:-1] + bytes((tier,))
        return head + (self.now_s() + 600 if expiry_s is None else expiry_s).to_bytes(4, "little")


@pytest.fixture
async def there(valkey: Server, make_config: MakeConfig) -> AsyncIterator[Place]:
    config = make_config(index=valkey.url)
    index = open_index(config)
    await index.open()
    yield Place(index, valkey.client(), config.index_prefix)
    await index.close()


def spoil(client: redis.Redis, key: bytes, kind: str) -> None:
    """Put something there that kvtier never would."""
    client.delete(key)
    match kind:
        case "empty":
            client.set(key, b"")
        case "short":
            client.set(key, b"x" * 19)
        case "text":
            client.set(key, "location: everywhere")
        case "zeros":
            client.set(key, bytes(160))
        case "ones":
            client.set(key, b"\xff" * 160)
        case "too many":
            client.set(key, b"\xff" * 180)
        case "huge":
            client.set(key, b"\xff" * (20 << 20))
        case "list":
            client.rpush(key, *range(100))
        case "hash":
            client.hset(key, "a", "b")
        case "set":
            client.sadd(key, "a", "b")
        case "zset":
            client.zadd(key, {"a" * 32: 1e300, "b" * 32: -1e300})
        case "stream":
            client.xadd(key, {"a": "b"})


KINDS = (
    *("empty", "short", "text", "zeros", "ones", "too many", "huge"),
    *("list", "hash", "set", "zset", "stream"),
)


@pytest.mark.parametrize("kind", KINDS)
async def test_garbage_in_place_of_locations(there: Place, kind: str) -> None:
    """It is left out beside sound ones; publishing replaces it, withdrawing removes it."""
    record = await begin(there.index, record_of(1))
    blocks = blocks_of(20)
    await there.index.publish(record, blocks, TierKind.DRAM)
    bad = (3, 19)
    for number in bad:
        spoil(there.client, there.key(blocks[number]), kind)
    expected = [set() if number in bad else {place(record)} for number in range(20)]
    assert await found(there.index, blocks) == expected
    if kind in {"short", "ones", "too many", "huge"}:  # of the others a read sees nothing that could not be
        assert there.index.garbage >= 1
    await there.index.withdraw(record, [blocks[3]])
    await there.index.publish(record, [blocks[19]], TierKind.NVME)
    assert await found(there.index, blocks[:4] + blocks[19:]) == [
        *({place(record)},) * 3,
        set(),
        {place(record, TierKind.NVME)},
    ]
    assert there.client.type(there.key(blocks[3])) in (b"none", b"string")
    assert 0 < there.client.ttl(there.key(blocks[19])) <= 3601


async def test_garbage_beside_sound_entries(there: Place) -> None:
    """Unknown tiers, nodes and incarnations, ended and absurdly long ones are left out, the rest counts."""
    first, second = await begin(there.index, record_of(1)), await begin(there.index, record_of(2, 9))
    stranger = record_of(77)
    block = blocks_of(1)[0]
    now_s = there.now_s()
    entries = [
        there.entry(first, tier=0),
        there.entry(stranger),
        there.entry(replace(second, incarnation=8)),
        there.entry(replace(second, incarnation=2**56 - 1)),
        there.entry(second, expiry_s=now_s - 1),
        there.entry(second, expiry_s=2**32 - 1),
        there.entry(second, tier=3),
        there.entry(second, tier=255),
    ]
    there.client.set(there.key(block), b"".join(entries))
    assert await found(there.index, [block]) == [{place(second, TierKind.NVME)}]
    third = await begin(there.index, record_of(3))
    await there.index.publish(third, [block], TierKind.DRAM)
    assert await found(there.index, [block]) == [{place(second, TierKind.NVME), place(third)}]
    assert there.client.strlen(there.key(block)) <= codec.MAX_VALUE_BYTES
    assert there.client.ttl(there.key(block)) <= 3601, "an absurd entry must not keep the key"


async def test_what_is_not_in_hbm_does_not_count_there(there: Place) -> None:
    """And what is written in HBM's place is never found among what can be loaded."""
    first, second = await begin(there.index, record_of(1)), await begin(there.index, record_of(2))
    block = blocks_of(1)[0]
    (key,) = there.keys.blocks([block], in_hbm=True)
    there.client.set(key, there.entry(first, tier=2) + there.entry(second, tier=1))
    assert await found(there.index, [block], in_hbm=True) == [{place(second, TierKind.HBM)}]
    assert await found(there.index, [block]) == [set()]
    spoil(there.client, key, "huge")
    assert await found(there.index, [block], in_hbm=True) == [set()]
    await there.index.publish(first, [block], TierKind.HBM)
    assert await found(there.index, [block], in_hbm=True) == [{place(first, TierKind.HBM)}]


async def test_an_incarnation_that_cannot_be_keeps_nobody_from_publishing(there: Place) -> None:
    """A younger life of a node is not overwritten; one of a number that no index issues is garbage."""
    record = await begin(there.index, record_of(1))
    block = blocks_of(1)[0]
    for number in (MAX_INCARNATION, 2**53 + 1, 2**56 - 1):
        forged = there.entry(replace(record, incarnation=number), expiry_s=there.now_s() + 80_000)
        there.client.set(there.key(block), forged)
        await there.index.publish(record, [block], TierKind.DRAM)
        assert await found(there.index, [block]) == [{place(record)}]
        assert there.client.strlen(there.key(block)) == codec.ENTRY_BYTES
    there.client.set(there.key(block), there.entry(replace(record, incarnation=MAX_INCARNATION - 1)))
    await there.index.publish(record, [block], TierKind.DRAM)
    assert await found(there.index, [block]) == [set()]


async def test_one_node_named_again_and_again(there: Place) -> None:
    record = await begin(there.index, record_of(1))
    block = blocks_of(1)[0]
    there.client.set(there.key(block), there.entry(record) * 8)
    assert await found(there.index, [block]) == [{place(record)}]


def absurd_records(node: str) -> list[bytes]:
    """Values of node records, each wrong in one way."""
    sound = {
        "node": node,
        "instance": "abc",
        "name": "n",
        "address": "127.0.0.1:1",
        "protocol_version": 1,
        "capacity_bytes": 1,
        "resident_bytes": 1,
        "load": 0.5,
    }
    wrong: list[dict[str, Any]] = [
        {"node": "f" * 32},
        {"node": [node]},
        {"instance": ""},
        {"instance": "a b"},
        {"instance": 7},
        {"name": "x" * 300},
        {"name": "two\nlines"},
        {"name": "\x1b[2J"},
        {"name": None},
        {"address": "no port"},
        {"address": "host:0"},
        {"address": "host:99999"},
        {"address": "a b:1"},
        {"address": {"host": "h"}},
        {"protocol_version": -1},
        {"protocol_version": "1"},
        {"protocol_version": True},
        {"capacity_bytes": 1e30},
        {"capacity_bytes": 10**30},
        {"resident_bytes": None},
        {"load": 7},
        {"load": -0.1},
        {"load": "0"},
        {"load": True},
    ]
    raws = [b"5 " + json.dumps(sound | one).encode() for one in wrong]
    raws += [b"5 " + json.dumps({k: v for k, v in sound.items() if k != left}).encode() for left in sound]
    good = json.dumps(sound).encode()
    raws += [good, b"-5 " + good, b"5" + good, b"x " + good, b"%d " % 2**64 + good, b"5.5 " + good]
    raws += [b"", b"5 ", b"5 null", b"5 []", b"5 {", b"5 " + b"[" * 4000, b"5 " + b"\xff\xfe", b"5 NaN"]
    raws += [b"5 " + good[:-1].replace(b"0.5", b"NaN") + b"}", b"5 " + good + b" " * 5000]
    return raws


async def test_absurd_node_records(there: Place) -> None:
    """None is listed, none hides a sound one, and the node itself takes its place with a heartbeat."""
    sound = await begin(there.index, record_of(1))
    bad = record_of(2)
    for raw in absurd_records(bad.node):
        there.client.zadd(there.keys.nodes(), {bad.node: there.now_s()})
        there.client.set(there.keys.record(bad.node), raw)
        assert await there.index.nodes() == [sound], raw
    for kind in KINDS:
        spoil(there.client, there.keys.record(bad.node), kind)
        assert await there.index.nodes() == [sound], kind
        await there.index.heartbeat(bad)
        assert await there.index.nodes() == [sound, bad], kind


@pytest.mark.parametrize("kind", KINDS)
async def test_garbage_in_place_of_the_list_of_nodes(there: Place, kind: str) -> None:
    """Nobody is listed until the next heartbeat, which heals it."""
    record = await begin(there.index, record_of(1))
    blocks = blocks_of(2)
    await there.index.publish(record, blocks, TierKind.DRAM)
    spoil(there.client, there.keys.nodes(), kind)
    assert await there.index.nodes() == []
    assert await found(there.index, blocks) == [set(), set()]
    assert await there.index.heartbeat(record)
    assert await there.index.nodes() == [record]
    await there.index.leave(record)
    assert await there.index.nodes() == []


@pytest.mark.parametrize("kind", KINDS)
async def test_garbage_in_place_of_the_owner(there: Place, kind: str) -> None:
    """The node takes its identity back; it counts as lost once."""
    record = await begin(there.index, record_of(1, 30))
    owner = there.keys.node(record.node)[0]
    spoil(there.client, owner, kind)
    assert not await there.index.heartbeat(record)
    assert await there.index.heartbeat(record)
    with pytest.raises(Fenced):
        await there.index.heartbeat(record_of(1, 29))
    spoil(there.client, owner, kind)
    assert await there.index.register(record_of(1, 40)) == 40


@pytest.mark.parametrize("number", [MAX_INCARNATION - 1, MAX_INCARNATION, 2**53 - 1, 2**63, 10**60])
async def test_nobody_uses_up_the_incarnations(there: Place, number: int) -> None:
    record = record_of(1, 30)
    there.client.set(there.keys.node(record.node)[0], f"{number} evil")
    assert await there.index.register(record) == 30
    assert await there.index.heartbeat(record)


async def test_more_nodes_than_anybody_has(there: Place) -> None:
    """A list of strangers, malformed or not, has a bound and does not hide who lives."""
    strangers = {f"{number:032x}": there.now_s() - 10 for number in range(2000, 2000 + 3 * MAX_NODES)}
    there.client.zadd(there.keys.nodes(), strangers)
    there.client.zadd(there.keys.nodes(), {"x" * (1 << 20): 1, "short": 2, "Z" * 32: 3, b"\xff" * 32: 4})
    there.client.zadd(there.keys.nodes(), {f"{number:032x}": 1e18 for number in range(9000, 9010)})
    record = await begin(there.index, record_of(1))
    assert await there.index.nodes() == [record]
    there.client.zadd(there.keys.nodes(), {f"{number:032x}": float("inf") for number in range(5000)})
    assert await there.index.heartbeat(record)
    assert await there.index.nodes() == [record]


async def test_values_too_large_to_read_in_time(
    there: Place, make_config: MakeConfig, valkey: Server
) -> None:
    """`find` is a fault within its bound; the next one, of other blocks, works."""
    config = make_config(index=valkey.url, index_timeout_s=0.05)
    index = open_index(config)
    await index.open()
    huge, sound = blocks_of(60, 1), blocks_of(60, 2)
    for key in there.keys.blocks(huge):
        there.client.set(key, b"\xff" * (16 << 20))
    begin_s = time.monotonic()
    with pytest.raises(IndexFault, match=r"within 0\.05 s"):
        await index.find(huge)
    assert time.monotonic() - begin_s < 5
    there.client.delete(*there.keys.blocks(huge))
    for _ in range(200):
        try:
            assert await index.find(sound) == [()] * 60
            break
        except IndexFault:
            await asyncio.sleep(0.05)
    else:
        raise AssertionError("the index does not come back")
    await index.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"node": "../../etc"},
        {"node": "A" * 32},
        {"instance": "a b"},
        {"instance": ""},
        {"incarnation": -1},
        {"incarnation": MAX_INCARNATION},
        {"address": "nowhere"},
        {"address": "host:70000"},
    ],
)
async def test_what_nobody_would_believe_is_not_written(there: Place, fields: dict[str, Any]) -> None:
    record = replace(record_of(1), **fields)
    with pytest.raises(InvalidRequest):
        await there.index.register(record)
    with pytest.raises(InvalidRequest):
        await there.index.heartbeat(record)
    with pytest.raises(InvalidRequest):
        await there.index.publish(record, blocks_of(1), TierKind.DRAM)
    assert await there.index.nodes() == []


async def test_a_name_is_made_printable(there: Place) -> None:
    record = await begin(there.index, record_of(1, name="rack 7\n\x1b[31m" + "ü" * 400, load=1.5))
    (listed,) = await there.index.nodes()
    assert listed.name == ("rack 7??[31m" + "ü" * 400)[:253]
    assert listed == replace(record, name=listed.name, load=1.0)
