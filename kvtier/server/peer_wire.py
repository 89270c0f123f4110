"""Bytes from peers -> events, replies -> messages. Pure; everything that comes in is checked here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.core import messages as m
from kvtier.core.config import CALL_ID_BYTES
from kvtier.errors import InvalidRequest, ProtocolMismatch, UnknownId
from kvtier.remote.channels import READ_CHUNK_BYTES
from kvtier.types import MAX_SHARDS, PROTOCOL_VERSION, Key, Slot, unpack_keys, whole_pages
from kvtier.v1 import peer_pb2 as pb

FINGERPRINT_SIZE_BYTES: Final = 32
_NODE_ID: Final = re.compile(r"[0-9a-f]{32}")
MAX_CODECS: Final = 16
"""That a peer may say it reads."""


@dataclass(frozen=True, slots=True)
class Read:
    """Which bytes a peer wants: `sizes[i]` from the start of the slot at ``offsets[i]``.

    `codecs` are wire ids that it decodes; `bytes_per_s` is what it gets without, 0 where it does not know.
    """

    node: str
    lease: int
    offsets: list[int]
    sizes: list[int]
    codecs: tuple[int, ...] = ()
    bytes_per_s: float = 0.0


# ---- requests


def hello(message: pb.HelloRequest) -> str:
    """Who asks; raises `ProtocolMismatch` before it looks at anything else.

    No version at all is what an empty message says, for one that was mutilated on its way: that passes, and
    must not be taken for what does not.
    """
    if not message.protocol_version:
        raise InvalidRequest("protocol_version is 0: allowed is the version that the peer speaks")
    if message.protocol_version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"this node speaks protocol {PROTOCOL_VERSION}, the peer {message.protocol_version}: "
            "install the same kvtier version on both"
        )
    return node_id(message.node_id)


def acquire(message: pb.AcquireRequest, me: tuple[str, int], max_keys: int, max_bytes: int) -> m.Acquire:
    """A chain of at least one key, each once; blocks that fit an extent of `max_bytes`; this very life.

    `me` is this node's id and incarnation.
    """
    node = node_id(message.node_id)
    if message.owner_id != me[0]:
        raise UnknownId("another node was asked, whose address this was once: ask the index anew")
    if message.incarnation != me[1]:
        raise UnknownId("another life of this node was asked: say hello again, and forget what it had")
    if not 0 < message.block_bytes <= max_bytes:
        raise InvalidRequest(f"block_bytes is {message.block_bytes}: allowed is 1 .. {max_bytes}")
    if len(message.fingerprint) != FINGERPRINT_SIZE_BYTES:
        raise InvalidRequest(
            f"fingerprint has {len(message.fingerprint)} bytes: a layout's has {FINGERPRINT_SIZE_BYTES}"
        )
    keys = unpack_keys(message.keys, max_keys=max_keys)
    if not keys:
        raise InvalidRequest("keys is empty: send at least one key")
    if len(set(keys)) != len(keys):
        raise InvalidRequest("keys holds a key twice: send each once")
    return m.Acquire(
        call_id=_call_id(message.call_id),
        peer=node,
        keys=keys,
        shard=_shard(message.shard),
        fingerprint=message.fingerprint,
        waits=message.waits,
    )


def release(message: pb.ReleaseLeaseRequest, max_keys: int) -> m.Release:
    """In the name of the peer."""
    corrupt: list[Key] = unpack_keys(message.corrupt_keys, max_keys=max_keys, what="corrupt_keys")
    return m.Release(
        call_id=_call_id(message.call_id),
        engine=m.peer_name(node_id(message.node_id)),
        lease=message.lease_id,
        corrupt_keys=corrupt,
        shard=_shard(message.shard),
    )


def read(message: pb.ReadRequest, max_slots: int) -> Read:
    """As many sizes as slots, at least one, each above 0; codecs that nobody here knows are no fault."""
    if len(message.slots) % 8 or len(message.sizes) != len(message.slots):
        raise InvalidRequest(
            f"slots has {len(message.slots)} and sizes {len(message.sizes)} bytes: send 8 of each for a block"
        )
    if not 0 < len(message.slots) <= 8 * max_slots:
        raise InvalidRequest(
            f"{len(message.slots) // 8} slots were sent: allowed are 1 .. {max_slots} a call"
        )
    offsets: list[int] = np.frombuffer(message.slots, "<u8").tolist()
    sizes: list[int] = np.frombuffer(message.sizes, "<u8").tolist()
    if 0 in sizes:
        raise InvalidRequest("sizes holds a 0: ask for 1 byte at least")
    if len(message.codecs) > MAX_CODECS:
        raise InvalidRequest(f"{len(message.codecs)} codecs were named: allowed are {MAX_CODECS}")
    rate = message.bytes_per_s
    if not (math.isfinite(rate) and rate >= 0):
        raise InvalidRequest(f"bytes_per_s is {rate}: allowed is 0 or more")
    return Read(node_id(message.node_id), message.lease_id, offsets, sizes, tuple(message.codecs), rate)


def node_id(value: str) -> str:
    """32 hexadecimal digits."""
    if not _NODE_ID.fullmatch(value):
        raise InvalidRequest(f"node_id has {len(value)} characters: allowed are 32 of 0-9 and a-f")
    return value


def _call_id(value: bytes) -> bytes:
    if len(value) != CALL_ID_BYTES:
        raise InvalidRequest(f"call_id has {len(value)} bytes: send {CALL_ID_BYTES} random ones")
    return value


def _shard(value: int) -> int:
    if value >= MAX_SHARDS:
        raise InvalidRequest(f"shard is {value}: allowed is 0 .. {MAX_SHARDS - 1}")
    return value


# ---- replies


def leased(reply: m.Leased, arena: int) -> pb.AcquireResponse:
    """Slots as offsets into the arena."""
    return pb.AcquireResponse(
        lease_id=reply.lease,
        arena_id=arena,
        slots=np.array([slot.offset_bytes for slot in reply.slots], "<u8").tobytes(),
        checksums=b"".join(reply.checksums),
        lease_ttl_s=reply.lease_ttl_s,
        coming=reply.coming,
    )


def fits(slot: Slot, block_bytes: int) -> bool:
    """Whether a slot holds a block of so many bytes: rounded up to whole pages, neither more nor less."""
    return slot.size_bytes == whole_pages(block_bytes)


def chunks(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The bytes of `views`, one after the other, in pieces of `READ_CHUNK_BYTES` (the last one: less)."""
    piece: list[memoryview] = []
    room = READ_CHUNK_BYTES
    for view in views:
        begin = 0
        while begin < len(view):
            part = view[begin : begin + room]
            piece.append(part)
            begin += len(part)
            room -= len(part)
            if not room:
                yield piece
                piece, room = [], READ_CHUNK_BYTES
    if piece:
        yield piece
