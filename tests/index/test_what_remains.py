"""What dead nodes and forgotten namespaces leave in the server: nothing, after their time."""

from __future__ import annotations

import pytest

from kvtier.index import codec, open_index
from kvtier.index.scripts import FORGET_OWNERS_S
from kvtier.testing.index_tests import begin, blocks_of, eventually, record_of
from kvtier.types import TierKind
from tests.index.conftest import MakeConfig
from tests.index.servers import Server


async def test_nothing_but_the_incarnation(valkey: Server, make_config: MakeConfig) -> None:
    """Blocks that nobody renews, and a node that is silent, are gone from memory; its number stays longer."""
    config = make_config(index=valkey.url, index_ttl_s=1.0, dead_after_s=0.5)
    index, client = open_index(config), valkey.client()
    await index.open()
    record = await begin(index, record_of(1, 5))
    await index.publish(record, blocks_of(500), TierKind.DRAM)
    await index.publish(record, blocks_of(500, seed=1), TierKind.NVME)
    await index.publish(record, blocks_of(500), TierKind.HBM)
    await index.withdraw(record, blocks_of(100))
    await index.withdraw(record, blocks_of(200), in_hbm=True)
    keys = codec.Keys(config.index_prefix)

    def left() -> set[bytes]:
        return set(client.scan_iter(match=f"{config.index_prefix}:*", count=10_000))

    assert len(left()) == 3 + 900 + 300
    permanent = set(keys.node(record.node)) - {keys.record(record.node)}

    async def is_gone() -> bool:
        return left() == permanent

    await eventually(is_gone)
    assert client.get(keys.node(record.node)[0]) == f"5 {record.instance}".encode()
    await index.close()


@pytest.mark.parametrize("ttl_s", [1.0, 3600.0, 86_400.0])
async def test_every_key_of_a_block_has_an_end(valkey: Server, make_config: MakeConfig, ttl_s: float) -> None:
    """However often it is written, and by whom."""
    first = open_index(make_config(index=valkey.url, index_ttl_s=ttl_s))
    config = make_config(index=valkey.url, index_ttl_s=60)
    second = open_index(config)
    await first.open()
    await second.open()
    one, two = await begin(first, record_of(1)), await begin(second, record_of(2))
    blocks = blocks_of(3)
    await first.publish(one, blocks, TierKind.DRAM)
    await second.publish(two, blocks[:2], TierKind.DRAM)
    await second.publish(two, blocks[:2], TierKind.NVME)
    await first.withdraw(one, blocks[1:2])
    lives_s = [valkey.client().ttl(key) for key in codec.Keys(config.index_prefix).blocks(blocks)]
    for life_s, most_s in zip(lives_s, (max(ttl_s, 60), 60, ttl_s), strict=True):
        assert most_s - 5 <= life_s <= most_s + 1
    await first.close()
    await second.close()


async def test_silent_nodes_leave_the_list(valkey: Server, make_config: MakeConfig) -> None:
    """Those of which nobody has heard for an hour go with anybody's next heartbeat."""
    config = make_config(index=valkey.url)
    index, client = open_index(config), valkey.client()
    await index.open()
    record = await begin(index, record_of(1))
    keys = codec.Keys(config.index_prefix)
    now_s = int(client.time()[0])
    client.zadd(keys.nodes(), {"a" * 32: now_s - 3700, "b" * 32: now_s - 3500, "c" * 32: now_s + 3700})
    await index.heartbeat(record)
    assert set(client.zrange(keys.nodes(), 0, -1)) == {record.node.encode(), b"b" * 32}
    await index.close()


async def test_identities_that_nobody_uses_are_forgotten(valkey: Server, make_config: MakeConfig) -> None:
    """Not before a month, and each heartbeat begins it anew; a node's own disk knows its number longer."""
    config = make_config(index=valkey.url)
    index, client = open_index(config), valkey.client()
    await index.open()
    record = await begin(index, record_of(1))
    owner = codec.Keys(config.index_prefix).node(record.node)[0]
    for renew in (index.register, index.heartbeat):
        client.expire(owner, 100)
        await renew(record)
        assert FORGET_OWNERS_S - 5 <= client.ttl(owner) <= FORGET_OWNERS_S
    await index.leave(record)
    assert client.ttl(owner) > 0
    await index.close()
