from __future__ import annotations

import binascii
import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index import codec
from kvtier.index.codec import Keys, Resolver, decode_record, encode_record, entry_head
from kvtier.index.redis import hash_slot
from kvtier.testing.index_tests import record_of
from kvtier.types import BlockId, Location, TierKind

NOW_S = 1_800_000_000


def test_a_key_is_what_it_always_was() -> None:
    """Nodes of different versions read each other's: a change needs a new version in the key."""
    block = BlockId(bytes(range(1, 33)), 0x0102)
    assert Keys("kvtier").blocks([block]) == [b"kvtier:1{6q}" + bytes(range(1, 17)) + b"\x02\x01"]
    in_hbm = Keys("kvtier").blocks([block], in_hbm=True)
    assert in_hbm == [b"kvtier:1{6q}" + bytes(range(1, 12)) + b"\x02\x01"], "no name of both lists"
    node = "0" * 32
    assert Keys("p").node(node) == [
        b"p:1{nodes}:owner:" + node.encode(),
        b"p:1{nodes}:node:" + node.encode(),
        b"p:1{nodes}:nodes",
    ]
    head = entry_head(node, 0x0A0B0C, TierKind.NVME)
    assert head.hex() == "84e0c0eafaa95a34" + "0c0b0a00000000" + "03"


def test_tags_are_spread_evenly() -> None:
    """Every quarter, every third and every 64th of the slots has its share of the keys."""
    assert len(set(codec.TAGS)) == 64
    slots = [hash_slot(tag) for tag in codec.TAGS]
    assert slots[0] == binascii.crc_hqx(b"mm", 0) % 16_384
    for nodes in (3, 4, 7, 16, 64):
        shares = Counter(slot * nodes // 16_384 for slot in slots)
        assert len(shares) == nodes
        assert max(shares.values()) - min(shares.values()) <= 1


def test_records_survive() -> None:
    record = record_of(1, 77, name='quotes " and \\ and ü', load=0.125)
    assert decode_record(record.node, b"77 " + encode_record(record)) == record


def test_tiers_that_do_not_work_survive() -> None:
    record = replace(record_of(1, 77), down=(TierKind.NVME,))
    assert decode_record(record.node, b"77 " + encode_record(record)) == record
    assert b"down" not in encode_record(record_of(1, 77)), "an older version reads it as before"


@pytest.mark.parametrize("down", ["3", {"3": 1}, [3.5], [True], [-1], ["3"], [[3]], [3] * 17, None])
def test_tiers_that_are_none_make_no_record(down: object) -> None:
    record = record_of(1, 77)
    content = json.loads(encode_record(record)) | {"down": down}
    assert decode_record(record.node, b"77 " + json.dumps(content).encode()) is None


def test_tiers_of_a_younger_version_are_left_out() -> None:
    record = record_of(1, 77)
    content = json.loads(encode_record(record)) | {"down": [3, 9]}
    decoded = decode_record(record.node, b"77 " + json.dumps(content).encode())
    assert decoded == replace(record, down=(TierKind.NVME,))


@given(st.binary(max_size=300))
def test_any_bytes_as_a_record(raw: bytes) -> None:
    assert decode_record("0" * 32, raw) is None
    assert decode_record("0" * 32, b"5 " + raw) is None


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.binary() | st.text(), st.lists))
def test_any_answer_as_a_record(raw: object) -> None:
    assert decode_record("0" * 32, raw) is None
    if isinstance(raw, list):
        assert codec.decode_ids(raw) == []


@given(st.lists(st.none() | st.binary(max_size=200), max_size=5))
def test_any_bytes_as_locations(values: list[bytes | None]) -> None:
    resolver = Resolver()
    resolver.update([record_of(1)])
    assert resolver.resolve(values, NOW_S) == [()] * len(values)


def entry(record, tier: int = 2, expiry_s: int = NOW_S + 10) -> bytes:
    head = entry_head(record.node, record.incarnation, TierKind.DRAM)[:15] + bytes((tier,))
    return head + expiry_s.to_bytes(4, "little")


def test_resolving() -> None:
    first, second = record_of(1, 5), record_of(2, 2**47)
    resolver = Resolver()
    resolver.update([first, second])
    dram, nvme = Location(first.node, 5, TierKind.DRAM), Location(second.node, 2**47, TierKind.NVME)
    both = entry(first) + entry(second, 3)
    assert resolver.resolve([both, None, entry(first)], NOW_S) == [(dram, nvme), (), (dram,)]
    assert not resolver.has_news
    assert resolver.resolve([both], NOW_S + 10) == [()], "an end is an end, whatever was resolved before"
    resolver.update([second])
    assert resolver.resolve([both], NOW_S) == [(nvme,)]
    assert resolver.has_news
    resolver.update([replace(first, incarnation=6), second])
    assert resolver.resolve([both], NOW_S) == [(nvme,)], "another incarnation does not count"


@pytest.mark.parametrize("tier", [0, 5, 128, 255])
def test_unknown_tiers(tier: int) -> None:
    resolver = Resolver()
    resolver.update([record_of(1)])
    assert resolver.resolve([entry(record_of(1), tier)], NOW_S) == [()]


def test_what_is_remembered_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_CACHED_VALUES", 10)
    monkeypatch.setattr(codec, "MAX_CACHED_HEADS", 10)
    resolver = Resolver()
    record = record_of(1)
    resolver.update([record])
    for number in range(100):
        resolver.resolve([entry(record_of(number + 2)), entry(record, expiry_s=NOW_S + 1 + number)], NOW_S)
        assert len(resolver._values) <= 13
        assert len(resolver._heads) <= 11
    assert resolver.resolve([entry(record)], NOW_S) == [(Location(record.node, 1, TierKind.DRAM),)]
