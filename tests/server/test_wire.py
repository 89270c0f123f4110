"""Whatever protobuf lets through, translation answers an event or an error of kvtier's own."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core import messages as m
from kvtier.errors import InvalidRequest, ProtocolMismatch
from kvtier.server import wire
from kvtier.types import Slot, TierKind
from kvtier.v1 import admin_pb2, engine_pb2

MAX_KEYS = 8
SIXTEEN = b"c" * 16

lengths = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 64, 96, 256, 288])
packed = lengths.flatmap(lambda size: st.binary(min_size=size, max_size=size))
texts = st.one_of(st.sampled_from(["", "a", "engine-1", "x" * 300, "A", "\0"]), st.text(max_size=80))
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
layouts = st.builds(
    engine_pb2.Layout, kind=texts, num_layers=u64, num_kv_heads=u64, head_dim=u64, dtype=texts,
    block_tokens=u64, order=texts, layer_block_bytes=u64, interior=texts, scale_bytes=u64, padding_bytes=u64,
)  # fmt: skip

MESSAGES: list[tuple[Any, Any, Any]] = [
    (
        wire.lookup,
        m.Lookup,
        st.builds(
            engine_pb2.LookupRequest,
            engine_id=texts, request_id=texts, keys=packed, shard_count=u32, fingerprint=packed,
        ),
    ),
    (
        wire.load,
        m.Load,
        st.builds(
            engine_pb2.LoadRequest, call_id=packed, engine_id=texts, request_id=texts, keys=packed, shard=u32
        ),
    ),
    (
        wire.release,
        m.Release,
        st.one_of(
            st.builds(
                engine_pb2.ReleaseRequest, call_id=packed, engine_id=texts, lease_id=u64, corrupt_keys=packed
            ),
            st.builds(
                engine_pb2.ReleaseRequest, call_id=packed, engine_id=texts, request_id=texts, shard=u32
            ),
        ),
    ),
    (
        wire.reserve,
        m.Reserve,
        st.builds(
            engine_pb2.ReserveRequest,
            call_id=packed, engine_id=texts, parent=packed, keys=packed, shard=u32, fingerprint=packed,
        ),
    ),
    (
        wire.commit,
        m.Commit,
        st.builds(
            engine_pb2.CommitRequest,
            call_id=packed, engine_id=texts, reservation_id=u64, keys=packed, checksums=packed,
        ),
    ),
    (
        wire.abort,
        m.Abort,
        st.builds(
            engine_pb2.AbortRequest, call_id=packed, engine_id=texts, reservation_id=u64, keys=packed
        ),
    ),
    (
        wire.pin,
        m.Pin,
        st.builds(admin_pb2.PinPrefixRequest, call_id=packed, keys=packed, ttl_s=st.floats()),
    ),
    (wire.evict, m.Evict, st.builds(admin_pb2.EvictPrefixRequest, call_id=packed, keys=packed)),
    (wire.unpin, m.Unpin, st.builds(admin_pb2.UnpinPrefixRequest, call_id=packed, keys=packed)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("decode", "kind", "messages"), MESSAGES, ids=[case[1].__name__ for case in MESSAGES]
)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_message_is_an_event_or_refused(decode: Any, kind: Any, messages: Any, data: Any) -> None:
    message = data.draw(messages)
    try:
        event = decode(message, MAX_KEYS)
    except InvalidRequest:
        return
    assert isinstance(event, kind)
    assert len(getattr(event, "keys", ())) <= MAX_KEYS
    assert all(len(key) == 32 for key in getattr(event, "keys", ()))


@settings(max_examples=300, deadline=None)
@given(
    st.builds(
        engine_pb2.RegisterRequest,
        protocol_version=st.sampled_from([0, 1, 1, 1, 2]), call_id=packed, engine_id=texts, layout=layouts,
        fingerprint=packed, description=texts,
    )
)  # fmt: skip
def test_any_registration_is_an_event_or_refused(message: engine_pb2.RegisterRequest) -> None:
    with contextlib.suppress(InvalidRequest, ProtocolMismatch):
        assert isinstance(wire.register(message), m.RegisterEngine)


def test_a_good_message_of_each_kind_gets_through() -> None:
    """So that the tests above do not pass because everything is refused."""
    keys, fingerprint = b"k" * 32, b"f" * 32
    name = {"call_id": SIXTEEN, "engine_id": "engine-1"}
    assert wire.lookup(
        engine_pb2.LookupRequest(
            engine_id="engine-1", request_id="r", keys=keys, shard_count=2, fingerprint=fingerprint
        ),
        MAX_KEYS,
    ) == m.Lookup("engine-1", "r", [keys], 2, fingerprint)
    load = engine_pb2.LoadRequest(**name, request_id="r", keys=keys, shard=1)
    assert wire.load(load, MAX_KEYS) == m.Load(SIXTEEN, "engine-1", "r", [keys], 1)
    release = engine_pb2.ReleaseRequest(**name, lease_id=0, corrupt_keys=keys)
    assert wire.release(release, MAX_KEYS) == m.Release(SIXTEEN, "engine-1", 0, None, [keys], 0)
    reserve = engine_pb2.ReserveRequest(**name, keys=keys, fingerprint=fingerprint)
    assert wire.reserve(reserve, MAX_KEYS) == m.Reserve(SIXTEEN, "engine-1", None, [keys], 0, fingerprint)
    commit = engine_pb2.CommitRequest(**name, reservation_id=7, keys=keys, checksums=SIXTEEN)
    assert wire.commit(commit, MAX_KEYS) == m.Commit(SIXTEEN, "engine-1", 7, [keys], [SIXTEEN])
    abort = engine_pb2.AbortRequest(**name, reservation_id=7)
    assert wire.abort(abort, MAX_KEYS) == m.Abort(SIXTEEN, "engine-1", 7, [])
    pin = admin_pb2.PinPrefixRequest(call_id=SIXTEEN, keys=keys, ttl_s=1)
    assert wire.pin(pin, MAX_KEYS) == m.Pin(SIXTEEN, [keys], 1.0)
    unpin = admin_pb2.UnpinPrefixRequest(call_id=SIXTEEN, pin_id=3)
    assert wire.unpin(unpin, MAX_KEYS) == m.Unpin(SIXTEEN, 3, ())


def test_slots_and_states_are_packed() -> None:
    slots = [Slot(1, 0, 4096, 4096), None, Slot(1, 0, 2**40, 4096)]
    assert wire.pack_offsets(slots) == (
        (4096).to_bytes(8, "little") + b"\xff" * 8 + (2**40).to_bytes(8, "little")
    )
    states = [m.ReserveState.GRANTED, m.ReserveState.BUSY, m.ReserveState.GRANTED]
    reply = wire.reserved(m.Reserved(3, states, slots, 60.0))
    assert (reply.reservation_id, reply.states, reply.reservation_ttl_s) == (3, b"\x01\x03\x01", 60.0)


def test_a_lease_of_nothing_is_one_message() -> None:
    (message,) = wire.leased(m.Leased(5, [], [], 30.0), TierKind.DRAM)
    assert (message.lease_id, message.first, message.slots) == (5, 0, b"")
