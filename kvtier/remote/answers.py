"""What peers answer -> data. Pure; every byte of it was written by another machine and is checked here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.errors import ProtocolMismatch, Unavailable
from kvtier.types import CHECKSUM_SIZE_BYTES, PROTOCOL_VERSION, Key, NodeRecord
from kvtier.v1 import peer_pb2 as pb

MAX_ARENA_BYTES: Final = 1 << 48
MAX_OFFERS: Final = 16
MAX_OFFER_NAME_CHARS: Final = 32
MAX_METADATA_BYTES: Final = 64 << 10
MAX_LEASE_TTL_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Peer:
    """What one life of a peer said of itself.

    Attributes
    ----------
    base_address
        Of the arena, in the peer's own memory.
    offers
        How bytes can be read from it: name of a transfer -> what that needs to know, the best first.
    """

    node: str
    incarnation: int
    arena_id: int
    arena_bytes: int
    base_address: int
    offers: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Acquired:
    """A lease on leading blocks: where each begins in the peer's arena, and what its bytes have to hash to.

    `lease` is 0 and the rest empty where the peer has none of them. `coming` more can be asked for soon; the
    lease keeps a place for them, and may have no slots yet.
    """

    lease: int
    arena: int
    slots: list[int]
    checksums: list[bytes]
    ttl_s: float
    coming: int = 0


def other_version(version: int) -> ProtocolMismatch:
    """Nothing of it can be used before one of the two is updated."""
    return ProtocolMismatch(
        f"the peer speaks protocol {version}, this node {PROTOCOL_VERSION}: "
        "install the same kvtier version on both"
    )


def nonsense(what: str) -> Unavailable:
    """The peer answered, but nothing that can be used."""
    return Unavailable(f"the peer answered nonsense ({what}): it is not used for now")


def peer(answer: pb.HelloResponse, record: NodeRecord) -> Peer:
    """Check the answer of what should be `record`.

    Raises
    ------
    ProtocolMismatch
        It speaks another version; nothing else was looked at.
    Unavailable
        It names no version, as an empty message does: what came was not what was sent. Or somebody else
        answers at this address, or it makes no sense.
    """
    _check(answer.protocol_version != 0, "no version of a protocol")
    if answer.protocol_version != PROTOCOL_VERSION:
        raise other_version(answer.protocol_version)
    if answer.node_id != record.node or answer.incarnation != record.incarnation:
        raise Unavailable("another node, or another life of this one, answers at the peer's address")
    _check(0 <= answer.arena_bytes <= MAX_ARENA_BYTES, "an arena of impossible size")
    _check(answer.base_address + answer.arena_bytes < 1 << 64, "an arena at an impossible address")
    _check(len(answer.transfers) <= MAX_OFFERS, "too many transfers")
    offers: dict[str, bytes] = {}
    for offer in answer.transfers:
        _check(0 < len(offer.name) <= MAX_OFFER_NAME_CHARS, "a transfer with an impossible name")
        _check(len(offer.metadata) <= MAX_METADATA_BYTES, "too much metadata of a transfer")
        offers.setdefault(offer.name, offer.metadata)
    return Peer(
        answer.node_id, answer.incarnation, answer.arena_id, answer.arena_bytes, answer.base_address, offers
    )


def acquired(answer: pb.AcquireResponse, peer: Peer, keys: Sequence[Key], block_bytes: int) -> Acquired:
    """Check what was leased: slots that cannot be, or too many, are a fault of the whole answer.

    Raises
    ------
    Unavailable
        It makes no sense.
    """
    _check(len(answer.slots) % 8 == 0, "slots of odd length")
    count = len(answer.slots) // 8
    coming = answer.coming
    _check(count + coming <= len(keys), "more slots than were asked for")
    _check(not count or answer.lease_id != 0, "slots without a lease")
    _check(count + coming > 0 or answer.lease_id == 0, "a lease on nothing")
    _check(len(answer.checksums) == count * CHECKSUM_SIZE_BYTES, "checksums that do not fit the slots")
    if not answer.lease_id:
        return Acquired(0, peer.arena_id, [], [], 0.0, coming)
    _check(answer.arena_id == peer.arena_id, "slots of another arena")
    ttl_s = answer.lease_ttl_s
    _check(math.isfinite(ttl_s) and 0 < ttl_s <= MAX_LEASE_TTL_S, "a lease of impossible length")
    slots: list[int] = np.frombuffer(answer.slots, "<u8").tolist()
    _check(max(slots, default=0) + block_bytes <= peer.arena_bytes, "slots outside its arena")
    _check(len(set(slots)) == count, "a slot twice")
    size = CHECKSUM_SIZE_BYTES
    checksums = [answer.checksums[at : at + size] for at in range(0, count * size, size)]
    return Acquired(answer.lease_id, answer.arena_id, slots, checksums, ttl_s, coming)


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise nonsense(what)
