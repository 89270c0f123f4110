"""vLLM's own events are read in each of their forms; whatever else comes is refused whole or left out."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_vllm import kv_events as module
from kvtier_vllm.kv_events import Cleared, Malformed, Removed, Stored, decode

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "session_id": "s",
}
REMOVED: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": 0}
CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}
EVENTS = [Stored([11, 12], 10, [1, 2, 3, 4], 2), Removed([11]), Cleared()]


def packed(*events: Any, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def positional(event: dict[str, Any], count: int | None = None) -> list[Any]:
    names = {"BlockStored": module._STORED, "BlockRemoved": module._REMOVED, "AllBlocksCleared": ()}
    fields = [event.get(name) for name in names[event["type"]]]
    return [event["type"], *fields[:count]]


def test_what_vllm_writes() -> None:
    from vllm.distributed import kv_events as vllm

    batch = vllm.KVEventBatch(
        ts=1.0,
        events=[
            vllm.BlockStored(
                block_hashes=[b"a" * 32, 7],
                parent_block_hash=None,
                token_ids=[5, 6],
                block_size=1,
                lora_id=None,
                medium=vllm.MEDIUM_GPU,
                lora_name=None,
                extra_keys=[None, None],
                group_idx=0,
            ),
            vllm.BlockRemoved(block_hashes=[7], medium=vllm.MEDIUM_GPU, group_idx=0),
            vllm.AllBlocksCleared(),
        ],
    )
    expected = [Stored([b"a" * 32, 7], None, [5, 6], 1), Removed([7]), Cleared()]
    assert decode(msgspec.msgpack.encode(batch), 0) == expected
    batch.data_parallel_rank = 3
    assert decode(msgspec.msgpack.encode(batch), 3) == expected
    assert decode(msgspec.msgpack.encode(batch), 0) == [], "another engine's"


def test_maps_and_arrays() -> None:
    events = [STORED, REMOVED, CLEARED]
    assert decode(packed(*events), 0) == EVENTS
    assert decode(packed(*map(positional, events)), 0) == EVENTS
    # The oldest ones end with lora_id, and have no rank.
    old = [positional(STORED, 5), positional(REMOVED, 1), positional(CLEARED)]
    assert decode(msgspec.msgpack.encode([0.0, old]), 0) == EVENTS


@pytest.mark.parametrize(
    "change",
    [
        {"medium": "CPU"},
        {"group_idx": 1},
        {"locality": "REMOTE"},
        {"lora_id": 1},
        {"lora_name": "adapter"},
        {"extra_keys": [["salt"], None]},
        {"extra_keys": [None, [["image", 3]]]},
        {"extra_keys": "what is this"},
        {"token_ids": [1, 2, 3]},
        {"type": "BlockMelted"},
    ],
)
def test_what_depends_on_more_than_tokens_is_left_out(change: dict[str, Any]) -> None:
    assert decode(packed(STORED | change, REMOVED), 0) == EVENTS[1:2]


@pytest.mark.parametrize("change", [{"medium": "CPU"}, {"group_idx": 1}, {"locality": "REMOTE"}])
def test_what_leaves_other_memory_is_left_out(change: dict[str, Any]) -> None:
    assert decode(packed(REMOVED | change, CLEARED), 0) == EVENTS[2:]


@pytest.mark.parametrize(
    "event",
    [
        7,
        [],
        {},
        [7],
        {"type": 7},
        {"type": ["BlockStored"]},
        ["BlockStored"],
        STORED | {"block_hashes": None},
        STORED | {"block_hashes": [True, 2]},
        STORED | {"block_hashes": [-1, 2]},
        STORED | {"block_hashes": [2**64 - 1, "text"]},
        STORED | {"block_hashes": [b"", 2]},
        STORED | {"block_hashes": [b"x" * 65, 2]},
        STORED | {"parent_block_hash": [1]},
        STORED | {"parent_block_hash": False},
        STORED | {"token_ids": [1, 2, 3, 4.0]},
        STORED | {"token_ids": [1, 2, 3, True]},
        STORED | {"token_ids": {"1": 2}},
        STORED | {"block_size": 0},
        STORED | {"block_size": 2**40},
        STORED | {"block_size": "2"},
        REMOVED | {"block_hashes": 11},
        ["BlockRemoved", {"11": 1}],
    ],
)
def test_an_event_that_is_none_makes_all_of_the_batch_worthless(event: Any) -> None:
    with pytest.raises(Malformed):
        decode(packed(REMOVED, event), 0)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xff",
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, {"a": 1}]),
        packed(STORED)[:-1],
        packed(STORED) + b"\0",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91\x81\x90\x01\x00",
    ],
)
def test_bytes_that_are_no_batch(payload: bytes) -> None:
    with pytest.raises(Malformed):
        decode(payload, 0)


def test_sizes_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = packed(STORED)
    monkeypatch.setattr(module, "MAX_BATCH_BYTES", len(payload) - 1)
    with pytest.raises(Malformed, match="bytes"):
        decode(payload, 0)
    monkeypatch.undo()
    monkeypatch.setattr(module, "MAX_BATCH_EVENTS", 1)
    with pytest.raises(Malformed, match="2 events"):
        decode(packed(CLEARED, CLEARED), 0)
    monkeypatch.setattr(module, "MAX_EVENT_BLOCKS", 1)
    with pytest.raises(Malformed, match="hashes"):
        decode(payload, 0)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_batch_or_refused(payload: bytes) -> None:
    _decoded(payload)


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_batch_with_wrong_bytes_is_a_batch_or_refused(seed: int, count: int) -> None:
    rng = random.Random(seed)
    payload = bytearray(packed(STORED, positional(STORED), REMOVED, CLEARED))
    for _ in range(count):
        payload[rng.randrange(len(payload))] = rng.randrange(256)
    _decoded(bytes(payload))


def _decoded(payload: bytes) -> None:
    try:
        events = decode(payload, 0)
    except Malformed:
        return
    for event in events:
        assert isinstance(event, Stored | Removed | Cleared)
        if isinstance(event, Stored):
            assert len(event.tokens) == len(event.hashes) * event.block_tokens
