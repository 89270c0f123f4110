"""Bytes from outside -> events, replies -> messages. Pure; everything that comes in is checked here.

What is checked here is the form: lengths, counts, ranges, characters. Whether ids are known, keys are
here and numbers fit is for the core to say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvtier.core import messages as m
from kvtier.core.config import CALL_ID_BYTES
from kvtier.errors import InvalidRequest, ProtocolMismatch
from kvtier.types import (
    CHECKSUM_SIZE_BYTES,
    KEY_SIZE_BYTES,
    MAX_SHARDS,
    PROTOCOL_VERSION,
    Key,
    Layout,
    LayoutKind,
    LayoutOrder,
    Slot,
    TierKind,
    unpack_keys,
)
from kvtier.v1 import admin_pb2, engine_pb2

FINGERPRINT_SIZE_BYTES: Final = 32
MAX_REQUEST_ID_CHARS: Final = 256
MAX_DESCRIPTION_CHARS: Final = 256
MAX_NAME_CHARS: Final = 64
LOAD_CHUNK_BLOCKS: Final = 4096
NO_SLOT: Final = 2**64 - 1

_ENGINE_ID: Final = re.compile(r"[a-z0-9-]{1,64}")


# ---- pieces


def _call_id(value: bytes) -> bytes:
    if len(value) != CALL_ID_BYTES:
        raise InvalidRequest(f"call_id has {len(value)} bytes: send {CALL_ID_BYTES} random ones")
    return value


def _engine_id(value: str) -> str:
    if not _ENGINE_ID.fullmatch(value):
        raise InvalidRequest(f"engine_id is {value[:MAX_NAME_CHARS]!r}: allowed is [a-z0-9-]{{1,64}}")
    return value


def _request_id(value: str) -> str:
    if not (0 < len(value) <= MAX_REQUEST_ID_CHARS and value.isprintable()):
        raise InvalidRequest(
            f"request_id has {len(value)} characters: allowed are 1 .. {MAX_REQUEST_ID_CHARS} printable ones"
        )
    return value


def _printable(value: str, what: str, max_chars: int) -> str:
    if len(value) > max_chars or not value.isprintable():
        raise InvalidRequest(
            f"{what} has {len(value)} characters: allowed are {max_chars} printable ones at most"
        )
    return value


def _fingerprint(value: bytes) -> bytes:
    if len(value) != FINGERPRINT_SIZE_BYTES:
        raise InvalidRequest(f"fingerprint has {len(value)} bytes: a layout's has {FINGERPRINT_SIZE_BYTES}")
    return value


def _shard(value: int) -> int:
    if value >= MAX_SHARDS:
        raise InvalidRequest(f"shard is {value}: allowed is 0 .. {MAX_SHARDS - 1}")
    return value


def _checksums(packed: bytes, count: int) -> list[bytes]:
    size = CHECKSUM_SIZE_BYTES
    if len(packed) != count * size:
        raise InvalidRequest(
            f"checksums has {len(packed)} bytes for {count} keys: send {size} bytes (XXH3-128) for each"
        )
    return [packed[i : i + size] for i in range(0, len(packed), size)]


def _keys(packed: bytes, max_keys: int) -> list[Key]:
    keys = unpack_keys(packed, max_keys=max_keys)
    if not keys:
        raise InvalidRequest("keys is empty: send at least one key")
    return keys


def _each_once(keys: Sequence[Key]) -> None:
    if len(set(keys)) != len(keys):
        raise InvalidRequest("keys holds a key twice: send each once")


def _layout(message: engine_pb2.Layout) -> Layout:
    try:
        kind, order = LayoutKind(message.kind), LayoutOrder(message.order)
    except ValueError:
        raise InvalidRequest(
            f"layout.kind is {message.kind[:MAX_NAME_CHARS]!r} and "
            f"layout.order {message.order[:MAX_NAME_CHARS]!r}: "
            f"allowed are {', '.join(LayoutKind)} and {', '.join(LayoutOrder)}"
        ) from None
    return Layout(
        kind=kind,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        dtype=_printable(message.dtype, "layout.dtype", MAX_NAME_CHARS),
        block_tokens=message.block_tokens,
        order=order,
        layer_block_bytes=message.layer_block_bytes,
        interior=_printable(message.interior, "layout.interior", MAX_DESCRIPTION_CHARS),
        scale_bytes=message.scale_bytes,
        padding_bytes=message.padding_bytes,
    )


def pack_offsets(slots: Sequence[Slot | None]) -> bytes:
    """N slots as N little-endian u64 offsets, `NO_SLOT` where there is none."""
    return np.array([NO_SLOT if s is None else s.offset_bytes for s in slots], "<u8").tobytes()


# ---- requests of engines


def register(message: engine_pb2.RegisterRequest) -> m.RegisterEngine:
    """Raises `ProtocolMismatch` before it looks at anything else."""
    if message.protocol_version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"client speaks protocol {message.protocol_version}, node speaks {PROTOCOL_VERSION}: "
            "install the same kvtier version on both"
        )
    layout = _layout(message.layout)
    fingerprint = _fingerprint(message.fingerprint)
    return m.RegisterEngine(
        call_id=_call_id(message.call_id),
        engine=_engine_id(message.engine_id),
        layout=layout,
        fingerprint=fingerprint,
        description=_printable(message.description, "description", MAX_DESCRIPTION_CHARS),
        maps_device=message.maps_device_memory,
    )


def lookup(message: engine_pb2.LookupRequest, max_keys: int) -> m.Lookup:
    """No keys are allowed: nothing is found."""
    if not 1 <= message.shard_count <= MAX_SHARDS:
        raise InvalidRequest(f"shard_count is {message.shard_count}: allowed is 1 .. {MAX_SHARDS}")
    if not 0 <= message.block_compute_s < math.inf:
        raise InvalidRequest(f"block_compute_s is {message.block_compute_s}: allowed is 0 or more seconds")
    return m.Lookup(
        engine=_engine_id(message.engine_id),
        request=_request_id(message.request_id),
        keys=unpack_keys(message.keys, max_keys=max_keys),
        shard_count=message.shard_count,
        fingerprint=_fingerprint(message.fingerprint),
        block_compute_s=message.block_compute_s,
    )


def load(message: engine_pb2.LoadRequest, max_keys: int) -> m.Load:
    """At least one key."""
    return m.Load(
        call_id=_call_id(message.call_id),
        engine=_engine_id(message.engine_id),
        request=_request_id(message.request_id),
        keys=_keys(message.keys, max_keys),
        shard=_shard(message.shard),
    )


def release(message: engine_pb2.ReleaseRequest, max_keys: int) -> m.Release:
    """Exactly one of lease and request."""
    what = message.WhichOneof("what")
    if what is None:
        raise InvalidRequest("a release names neither lease_id nor request_id: send one of them")
    return m.Release(
        call_id=_call_id(message.call_id),
        engine=_engine_id(message.engine_id),
        lease=message.lease_id if what == "lease_id" else None,
        request=_request_id(message.request_id) if what == "request_id" else None,
        corrupt_keys=unpack_keys(message.corrupt_keys, max_keys=max_keys, what="corrupt_keys"),
        shard=_shard(message.shard),
    )


def reserve(message: engine_pb2.ReserveRequest, max_keys: int) -> m.Reserve:
    """A chain of at least one key; the parent is a key or empty."""
    if len(message.parent) not in (0, KEY_SIZE_BYTES):
        raise InvalidRequest(
            f"parent has {len(message.parent)} bytes: a key has {KEY_SIZE_BYTES}, "
            "at a prompt's beginning send none"
        )
    keys = _keys(message.keys, max_keys)
    _each_once(keys)
    if message.parent in keys:
        raise InvalidRequest("parent is one of keys: a block cannot precede itself")
    return m.Reserve(
        call_id=_call_id(message.call_id),
        engine=_engine_id(message.engine_id),
        parent=message.parent or None,
        keys=keys,
        shard=_shard(message.shard),
        fingerprint=_fingerprint(message.fingerprint),
    )


def commit(message: engine_pb2.CommitRequest, max_keys: int) -> m.Commit:
    """At least one key, each once, each with a checksum."""
    keys = _keys(message.keys, max_keys)
    _each_once(keys)
    return m.Commit(
        call_id=_call_id(message.call_id),
        engine=_engine_id(message.engine_id),
        reservation=message.reservation_id,
        keys=keys,
        checksums=_checksums(message.checksums, len(keys)),
    )


def abort(message: engine_pb2.AbortRequest, max_keys: int) -> m.Abort:
    """No keys: all that are not committed."""
    keys = unpack_keys(message.keys, max_keys=max_keys)
    _each_once(keys)
    return m.Abort(
        call_id=_call_id(message.call_id),
        engine=_engine_id(message.engine_id),
        reservation=message.reservation_id,
        keys=keys,
    )


def report_resident(message: engine_pb2.ReportResidentRequest, max_keys: int) -> m.ReportResident:
    """Any number of keys, none too; each once."""
    added = unpack_keys(message.added, max_keys=max_keys, what="added")
    removed = unpack_keys(message.removed, max_keys=max_keys, what="removed")
    if len({*added, *removed}) != len(added) + len(removed):
        raise InvalidRequest("added and removed hold a key twice: send each once, with what holds now")
    return m.ReportResident(
        call_id=_call_id(message.call_id),
        engine=_engine_id(message.engine_id),
        added=added,
        removed=removed,
        clear=message.clear,
    )


# ---- requests of operators


def lookup_prefix(message: admin_pb2.LookupPrefixRequest, max_keys: int) -> list[Key]:
    """The keys, each once."""
    keys = unpack_keys(message.keys, max_keys=max_keys)
    _each_once(keys)
    return keys


def evict(message: admin_pb2.EvictPrefixRequest, max_keys: int) -> m.Evict:
    """At least one key."""
    return m.Evict(call_id=_call_id(message.call_id), keys=_keys(message.keys, max_keys))


def pin(message: admin_pb2.PinPrefixRequest, max_keys: int) -> m.Pin:
    """At least one key, and a time that is a number above 0."""
    if not (math.isfinite(message.ttl_s) and message.ttl_s > 0):
        raise InvalidRequest(f"ttl_s is {message.ttl_s}: allowed is a number of seconds above 0")
    return m.Pin(call_id=_call_id(message.call_id), keys=_keys(message.keys, max_keys), ttl_s=message.ttl_s)


def unpin(message: admin_pb2.UnpinPrefixRequest, max_keys: int) -> m.Unpin:
    """Exactly one of pin and keys."""
    what = message.WhichOneof("what")
    if what is None:
        raise InvalidRequest("an unpin names neither pin_id nor keys: send one of them")
    return m.Unpin(
        call_id=_call_id(message.call_id),
        pin=message.pin_id if what == "pin_id" else None,
        keys=_keys(message.keys, max_keys) if what == "keys" else (),
    )


# ---- replies to engines


def offered(reply: m.Offered) -> engine_pb2.LookupResponse:
    """The tiers that hold nothing are left out."""
    return engine_pb2.LookupResponse(
        blocks=reply.blocks,
        estimate_s=reply.estimate_s,
        hold_ttl_s=reply.hold_ttl_s,
        reason=reply.reason,
        tiers=[engine_pb2.TierCount(tier=tier, blocks=n) for tier, n in reply.tiers.items() if n],
        coming=reply.coming,
    )


def leased(reply: m.Leased, tier: TierKind) -> Iterator[engine_pb2.LoadResponse]:
    """What is here already, `LOAD_CHUNK_BLOCKS` blocks a message; one without blocks where there are none."""
    return _load_messages(reply, 0, reply.slots, reply.checksums, reply.coming, tier, reply.copies)


def ready(reply: m.Leased, more: m.Ready, left: int, tier: TierKind) -> Iterator[engine_pb2.LoadResponse]:
    """What arrived since, under the same lease; `left` blocks may still come after these."""
    return _load_messages(reply, more.first, more.slots, more.checksums, left, tier)


def _load_messages(
    reply: m.Leased,
    first: int,
    slots: Sequence[Slot],
    checksums: Sequence[bytes],
    coming: int,
    tier: TierKind,
    copies: Sequence[Slot | None] = (),
) -> Iterator[engine_pb2.LoadResponse]:
    for begin in range(0, max(1, len(slots)), LOAD_CHUNK_BLOCKS):
        end = begin + LOAD_CHUNK_BLOCKS
        yield engine_pb2.LoadResponse(
            lease_id=reply.lease,
            first=first + begin,
            slots=pack_offsets(slots[begin:end]),
            checksums=b"".join(checksums[begin:end]),
            lease_ttl_s=reply.lease_ttl_s,
            tier=tier,
            coming=coming + max(0, len(slots) - end),
            copies=pack_offsets(copies[begin:end]),
        )


def reserved(reply: m.Reserved) -> engine_pb2.ReserveResponse:
    """States as one byte each, slots as offsets."""
    return engine_pb2.ReserveResponse(
        reservation_id=reply.reservation,
        states=bytes(reply.states),
        slots=pack_offsets(reply.slots),
        reservation_ttl_s=reply.reservation_ttl_s,
    )
