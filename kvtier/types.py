"""Data only: keys, layouts, slots, locations. Start reading here.

The words are those of ARCHITECTURE.md. A **block** is the KV of `block_tokens` consecutive tokens of
one **shard**; it is named by a 32-byte **key** that names the whole prefix up to and with it.

Key schema, version 1
---------------------
Every hash is SHA-256 over a sequence of *fields*; a field is ``tag (1 byte) | length (4 bytes, little
endian) | value``. Lengths in front and a tag of its own for every field mean that no two different
sequences give the same bytes. Integers are u64 little endian unless said otherwise, texts UTF-8.

``root  = H(0x00 "kvtier.root" | 0x01 schema version u32 | 0x02.. the namespace's fields in tag order)``
``key_i = H(0x20 key_{i-1} | 0x21 tokens_i as little-endian u32 | 0x22 each extra of block i, in order)``
``fingerprint = H(0x00 "kvtier.layout" | 0x01 schema version u32 | 0x02.. the layout's fields in tag order)``

Tag order is the order of the fields in `Namespace` and `Layout` below. Test
vectors: `tests/vectors/keys.json`, reproduced by a second implementation in `tests/reference_keys.py`.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final, NamedTuple, get_type_hints

import numpy as np

from kvtier.errors import InvalidRequest

KEY_SCHEMA_VERSION: Final = 1
PROTOCOL_VERSION: Final = 1
KEY_SIZE_BYTES: Final = 32
CHECKSUM_SIZE_BYTES: Final = 16
PAGE_SIZE_BYTES: Final = 4096
MAX_SHARDS: Final = 4096
MAX_REQUEST_ID_CHARS: Final = 256

_DTYPE_SIZE_BITS: Final = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "fp8": 8,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "uint8": 8,
    "int8": 8,
}

Key = bytes
"""32 bytes; names a prefix of tokens within one namespace."""


class BlockId(NamedTuple):
    """What is stored is identified by the key and the shard."""

    key: Key
    shard: int


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """What a medium keeps beside a block's bytes, and what a reader says that it expects.

    Attributes
    ----------
    parent
        Key of the block before; None for the first of a prefix. Kept for whoever finds the block after a
        restart; a reader need not know it, since the key names the whole prefix.
    fingerprint
        `Layout.fingerprint()`, 32 bytes.
    block_bytes
        The block's own bytes, without what fills up its slot.
    checksum
        XXH3-128 of these bytes, 16 bytes.
    """

    block: BlockId
    parent: Key | None
    fingerprint: bytes
    block_bytes: int
    checksum: bytes


class TierKind(enum.IntEnum):
    """The media a block can lie in, fastest first. Values are those of the wire and never reused."""

    HBM = 1
    DRAM = 2
    FAR = 4
    NVME = 3

    @property
    def rank(self) -> int:
        """Its place in the order of speed, 0 is the fastest."""
        return _RANKS[self]


_RANKS: Final = {kind: rank for rank, kind in enumerate(TierKind)}


def whole_pages(size_bytes: int) -> int:
    """So many bytes, rounded up."""
    return -(-size_bytes // PAGE_SIZE_BYTES) * PAGE_SIZE_BYTES


class LayoutKind(enum.StrEnum):
    """How attention keeps its keys and values: per head, per group of heads, or as one latent."""

    MHA = "mha"
    GQA = "gqa"
    MLA = "mla"


class LayoutOrder(enum.StrEnum):
    """Order of tokens (N), heads (H) and head dimension (D) inside a layer's block."""

    NHD = "NHD"
    HND = "HND"


def _field(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


@cache
def _types_of(kind: type) -> dict[str, type]:
    return get_type_hints(kind)


def _check_types(what: str, data: Any) -> None:
    """Raise `InvalidRequest` where a field is of another type: text and bytes, or 1 and 1.0, may look alike
    in a key but are not the same.
    """
    kinds = _types_of(data.__class__)
    for spec in fields(data):
        value, kind = getattr(data, spec.name), kinds[spec.name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidRequest(
                f"{what}.{spec.name} is {value!r}, of type {type(value).__name__}: allowed is {kind.__name__}"
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """How the bytes of one block of one shard are made.

    A block is `num_layers` runs of `layer_block_bytes`, layer after layer. Two engines may exchange
    blocks only if every field agrees, which `fingerprint` condenses.

    Attributes
    ----------
    num_kv_heads
        Heads that this shard holds (1 for MLA).
    head_dim
        Elements per head and token, of K alone; for MLA the whole latent.
    interior
        Name of the permutation inside a layer's block where a kernel writes its own order
        (``"plain"`` where there is none). Carries the engine's version only where it is unknown.
    scale_bytes, padding_bytes
        Bytes of a layer's block beyond the elements themselves.
    """

    kind: LayoutKind
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    order: LayoutOrder
    layer_block_bytes: int
    interior: str = "plain"
    scale_bytes: int = 0
    padding_bytes: int = 0

    def __post_init__(self) -> None:
        _check_types("layout", self)
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens", "layer_block_bytes"):
            value = getattr(self, name)
            if not 0 < value < 2**40:
                raise InvalidRequest(f"layout.{name} is {value}: allowed is 1 .. 2^40-1")
        for name in ("scale_bytes", "padding_bytes"):
            value = getattr(self, name)
            if not 0 <= value < 2**40:
                raise InvalidRequest(f"layout.{name} is {value}: allowed is 0 .. 2^40-1")
        if self.dtype not in _DTYPE_SIZE_BITS:
            raise InvalidRequest(f"layout.dtype is {self.dtype!r}: allowed are {', '.join(_DTYPE_SIZE_BITS)}")
        if self.layer_block_bytes != self._computed_layer_block_bytes():
            raise InvalidRequest(
                f"layout.layer_block_bytes is {self.layer_block_bytes}, but its other fields make "
                f"{self._computed_layer_block_bytes()}: register the bytes that the engine really has"
            )

    def _computed_layer_block_bytes(self) -> int:
        planes = 1 if self.kind is LayoutKind.MLA else 2
        elements = planes * self.num_kv_heads * self.head_dim * self.block_tokens
        return elements * _DTYPE_SIZE_BITS[self.dtype] // 8 + self.scale_bytes + self.padding_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: what travels and what the checksum covers."""
        return self.num_layers * self.layer_block_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds one block: `block_bytes` rounded up to whole pages."""
        return whole_pages(self.block_bytes)

    def fingerprint(self) -> bytes:
        """32 bytes that differ whenever any field differs."""
        digest = hashlib.sha256(_field(0x00, b"kvtier.layout"))
        digest.update(_field(0x01, struct.pack("<I", KEY_SCHEMA_VERSION)))
        for tag, spec in enumerate(fields(self), start=2):
            value = getattr(self, spec.name)
            digest.update(_field(tag, _u64(value) if isinstance(value, int) else value.encode()))
        return digest.digest()


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must match for KV to be reusable.

    Attributes
    ----------
    weights
        Identity of the weights (see `kvtier_vllm.identity`), never only a name.
    layout
        `Layout.fingerprint()`.
    adapter_name, adapter_version
        LoRA adapter and a version of its content; both empty for the base model.
    tenant, salt
        Tenants do not meet: both are part of every key.
    generation
        Empty until a cache reset, then 16 random bytes drawn by the engine that reset.
    """

    weights: bytes
    kv_dtype: str
    layout: bytes
    block_tokens: int
    adapter_name: str = ""
    adapter_version: bytes = b""
    tenant: str = ""
    salt: bytes = b""
    generation: bytes = b""

    def __post_init__(self) -> None:
        _check_types("namespace", self)
        if not 0 < self.block_tokens < 2**40:
            raise InvalidRequest(f"namespace.block_tokens is {self.block_tokens}: allowed is 1 .. 2^40-1")

    def root(self) -> Key:
        """The key that stands before the first block; it names no block itself."""
        digest = hashlib.sha256(_field(0x00, b"kvtier.root"))
        digest.update(_field(0x01, struct.pack("<I", KEY_SCHEMA_VERSION)))
        for tag, spec in enumerate(fields(self), start=2):
            value = getattr(self, spec.name)
            if isinstance(value, int):
                value = _u64(value)
            elif isinstance(value, str):
                value = value.encode()
            digest.update(_field(tag, value))
        return digest.digest()


def chain_keys(
    parent: Key,
    tokens: Sequence[int] | np.ndarray,
    block_tokens: int,
    extras: Sequence[Sequence[bytes]] | None = None,
) -> list[Key]:
    """Keys of the whole blocks of `tokens`, chained from `parent`.

    Parameters
    ----------
    parent
        `Namespace.root()`, or the key of the block before ``tokens[0]``.
    tokens
        Token ids, each in 0 .. 2^32-1. A last, incomplete block gets no key.
    extras
        For each whole block what else its KV depends on (multimodal hashes and offsets), in order.

    Returns
    -------
    list of Key
        ``len(tokens) // block_tokens`` keys. 8,192 tokens in blocks of 32 cost under 2 ms.
    """
    if not isinstance(parent, bytes) or len(parent) != KEY_SIZE_BYTES:
        raise InvalidRequest(f"parent key is {parent!r}: a key has {KEY_SIZE_BYTES} bytes")
    if not isinstance(block_tokens, int) or block_tokens <= 0:
        raise InvalidRequest(f"block_tokens is {block_tokens!r}: allowed is an integer, 1 or more")
    count = len(tokens) // block_tokens
    wide = _token_ids(tokens[: count * block_tokens])
    if extras is not None and len(extras) != count:
        raise InvalidRequest(f"extras for {len(extras)} blocks were given for {count} whole blocks")
    packed = wide.astype("<u4").tobytes()
    stride = 4 * block_tokens
    parent_head = struct.pack("<BI", 0x20, KEY_SIZE_BYTES)
    tokens_head = struct.pack("<BI", 0x21, stride)
    sha256 = hashlib.sha256
    keys: list[Key] = []
    for index in range(count):
        body = parent_head + parent + tokens_head + packed[index * stride : (index + 1) * stride]
        if extras is not None:
            body += b"".join(_field(0x22, extra) for extra in extras[index])
        parent = sha256(body).digest()
        keys.append(parent)
    return keys


def _token_ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """One dimension of integers, none of which a key would cut; raises `InvalidRequest`."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"tokens are no list of integers ({error})") from None
    if len(ids) and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise InvalidRequest(
            f"tokens are of type {ids.dtype}, shape {ids.shape}: allowed are integers, in a row"
        )
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < 2**32):
        raise InvalidRequest("a token id is outside 0 .. 2^32-1")
    return ids


def pack_keys(keys: Iterable[Key]) -> bytes:
    """N keys as the N x 32 bytes that messages carry."""
    return b"".join(keys)


def unpack_keys(packed: bytes, *, max_keys: int, what: str = "keys") -> list[Key]:
    """Inverse of `pack_keys` for bytes from outside; raises `InvalidRequest` on a bad length."""
    if len(packed) % KEY_SIZE_BYTES:
        raise InvalidRequest(f"{what} has {len(packed)} bytes: not a multiple of {KEY_SIZE_BYTES}")
    if len(packed) > max_keys * KEY_SIZE_BYTES:
        raise InvalidRequest(f"{what} holds {len(packed) // KEY_SIZE_BYTES} keys: at most {max_keys} a call")
    keys: list[Key] = np.frombuffer(packed, f"V{KEY_SIZE_BYTES}").tolist()  # five times as fast as slices
    return keys


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of a tier that holds one block: `size_bytes` at `offset_bytes` of arena `arena`."""

    arena: int
    extent: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Location:
    """Where a block lies, as the index says: a hint, of which the owner knows the truth.

    Arena and slot are the owner's business: it names them when it grants a lease. A location with
    another incarnation than its node has now does not count.
    """

    node: str
    incarnation: int
    tier: TierKind


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What a node says of itself in the index, renewed with each heartbeat.

    Attributes
    ----------
    node
        32 hexadecimal digits.
    incarnation
        Grows with each start of the node; issued by the index where it can be reached.
    instance
        Drawn at random by each daemon process: tells two daemons of one identity apart.
    name
        For operators.
    address
        ``host:port`` of its peer service; empty where it has none.
    protocol_version
        Of peer.proto.
    capacity_bytes, resident_bytes
        Of all tiers together.
    load
        0 (idle) .. 1 (as many pulls as it serves at once).
    down
        Tiers that do not work now: locations in them do not count.
    """

    node: str
    incarnation: int
    instance: str
    name: str
    address: str
    protocol_version: int
    capacity_bytes: int
    resident_bytes: int
    load: float = 0.0
    down: tuple[TierKind, ...] = ()


def runs(indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Maximal runs ``(position, first, length)`` of consecutive values, in order of position."""
    start = 0
    for position in range(1, len(indices) + 1):
        if position == len(indices) or indices[position] != indices[position - 1] + 1:
            yield start, indices[start], position - start
            start = position


SAMPLE_EVERY_BLOCKS: Final = 32
"""A sample is one block, drawn at random, of each so many."""


def sampled(count: int, randrange: Callable[[int, int], int]) -> list[int]:
    """Which of `count` blocks are verified where a sample of them is."""
    return [
        randrange(begin, min(count, begin + SAMPLE_EVERY_BLOCKS))
        for begin in range(0, count, SAMPLE_EVERY_BLOCKS)
    ]
