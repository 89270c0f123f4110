"""What an agent tells its peers, so that they can read from it; hostile until it has been unpacked.

NIXL's own metadata goes to native code, which is not made for garbage. So it travels in an envelope that is
checked first: magic, NIXL's version, the agent's name, where its arena begins, and a digest of it all. That
finds damage and mistakes; a peer that means harm has to be kept out by TLS, since those who hold metadata
are one trust domain.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from kvtier.errors import TransferFault
from kvtier.transfer.checks import MAX_ADDRESS

MAX_OFFER_BYTES: Final = 64 << 10
MAX_ARENA_BYTES: Final = 1 << 50
_MAGIC: Final = b"kvtier.nixl.1\n"
_HEAD: Final = struct.Struct(f"<{len(_MAGIC)}s16s32sQQ")
_DIGEST_BYTES: Final = 16
_NAME: Final = re.compile(rb"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Offer:
    """An agent's name, the version of its NIXL, where its arena lies in its memory, and NIXL's metadata."""

    name: str
    version: str
    base_address: int
    size_bytes: int
    metadata: bytes


def pack(offer: Offer) -> bytes:
    """The bytes that a peer gets."""
    body = (
        _HEAD.pack(
            _MAGIC, offer.version.encode()[:16], offer.name.encode(), offer.base_address, offer.size_bytes
        )
        + offer.metadata
    )
    return body + xxhash.xxh3_128_digest(body)


def unpack(data: bytes, version: str) -> Offer:
    """Inverse of `pack`.

    Parameters
    ----------
    version
        Of the own NIXL: metadata of another one is not given to it.

    Raises
    ------
    TransferFault
        It is no offer, or none that can be used.
    """
    if not data:
        raise TransferFault(
            "the peer has no NIXL agent at present: it is just replacing one, or never had one"
        )
    if not _HEAD.size + _DIGEST_BYTES < len(data) <= MAX_OFFER_BYTES:
        raise TransferFault(f"the peer's NIXL metadata has {len(data)} bytes, which cannot be")
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    magic, theirs, name, base_address, size_bytes = _HEAD.unpack_from(body)
    if magic != _MAGIC or xxhash.xxh3_128_digest(body) != digest or not _NAME.fullmatch(name):
        raise TransferFault("the peer's NIXL metadata is damaged, or of another version of kvtier")
    theirs = theirs.rstrip(b"\0")
    if theirs != version.encode()[:16]:
        raise TransferFault(
            f"the peer has NIXL {theirs.decode('ascii', 'replace')}, this node {version}: "
            "install the same on both"
        )
    if not 0 < size_bytes <= MAX_ARENA_BYTES or base_address + size_bytes > MAX_ADDRESS:
        raise TransferFault("the peer's NIXL metadata names an arena that cannot be")
    return Offer(name.decode(), version, base_address, size_bytes, body[_HEAD.size :])
