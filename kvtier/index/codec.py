"""How blocks, locations and nodes look in Redis. Pure; whatever is decoded here was written by anybody.

Version 1. All keys begin with the prefix, a colon and the version, then a hash tag for Cluster:

``PREFIX:1{TAG}`` + the first 16 bytes of the block's key + its shard (u16)
    The block's locations: entries of 20 bytes, the one renewed last at the end. TAG is one of 64, chosen
    by the key's first byte; half of a key's 32 bytes name it here, since the owner checks the whole.
``PREFIX:1{TAG}`` + the first 11 bytes of the block's key + its shard (u16)
    Who has the block in HBM, likewise. That is apart: whoever wants to load blocks never reads it, and it
    takes no place of theirs. Eleven bytes do, since nobody loads by it, and keep a lone location below 100.
``PREFIX:1{nodes}:owner:NODE``
    ``INCARNATION INSTANCE``: the life that holds the identity; stays for 30 days.
``PREFIX:1{nodes}:node:NODE``
    ``INCARNATION JSON``: the record, which ends with its heartbeats.
``PREFIX:1{nodes}:nodes``
    Sorted set of node ids by the time of their last heartbeat.

An entry is ``tag (8 bytes, of SHA-256 of the node id) | incarnation (u56) | tier (u8) | expiry (u32, seconds
of the server's clock)``; integers are little endian.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvtier.errors import InvalidRequest
from kvtier.index.scripts import MAX_INCARNATION, MAX_LOCATIONS, MAX_NODES, MAX_TTL_S
from kvtier.types import MAX_SHARDS, BlockId, Location, NodeRecord, TierKind

ENTRY_BYTES: Final = 20
MAX_VALUE_BYTES: Final = MAX_LOCATIONS * ENTRY_BYTES
MAX_RECORD_BYTES: Final = 4096
MAX_TIERS: Final = 16
MAX_CACHED_VALUES: Final = 65_536
MAX_CACHED_HEADS: Final = 65_536

# Their hash slots lie in the middle of 64 equal ranges, so that however few or many nodes a Cluster has,
# each of them gets its share.
_TAG_CHARS: Final = (
    "mm6q9ie82921apax0jkvdndf3go6gcxw8gd6lc02g34con4r99911dm5fmyy2iiu7ak0ce8y4lopx9x1jf1zzjb3ik2wygfsbk9w"
    "6omsafan5bi3c5dpkh0txixahe44"
)
TAGS: Final = tuple(_TAG_CHARS[at : at + 2] for at in range(0, 128, 2))
NODES_TAG: Final = "nodes"
_KEY_BYTES: Final = 16
_HBM_KEY_BYTES: Final = 11
_ENTRY: Final = struct.Struct("<16sI")
_SHARDS: Final = tuple(struct.pack("<H", shard) for shard in range(MAX_SHARDS))
_TIERS: Final = frozenset(int(tier) for tier in TierKind)
_NODE: Final = re.compile(r"[0-9a-f]{32}")
_INSTANCE: Final = re.compile(r"[0-9A-Za-z]{1,64}")
_ADDRESS: Final = re.compile(r"(?:[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_MAX_NAME_CHARS: Final = 253
_FIELDS: Final = ("node", "instance", "name", "address", "protocol_version", "capacity_bytes")


class Keys:
    """Names of everything under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.heads: Final = tuple(f"{prefix}:1{{{tag}}}".encode() for tag in TAGS)
        self._nodes = f"{prefix}:1{{{NODES_TAG}}}:"

    def blocks(self, blocks: Iterable[BlockId], *, in_hbm: bool = False) -> list[bytes]:
        """The keys of blocks, in order; `in_hbm`: those of the lists of who has them in HBM."""
        heads, shards, size = self.heads, _SHARDS, _HBM_KEY_BYTES if in_hbm else _KEY_BYTES
        return [heads[key[0] & 63] + key[:size] + shards[shard] for key, shard in blocks]

    def one_of_each_tag(self) -> list[bytes]:
        """Keys that lie everywhere in a Cluster, of blocks that nobody has."""
        return [head + bytes(18) for head in self.heads]

    def node(self, node: str) -> list[bytes]:
        """Owner, record and list: what the scripts on nodes are given."""
        return [f"{self._nodes}owner:{node}".encode(), self.record(node), self.nodes()]

    def record(self, node: str) -> bytes:
        """The key of a node's record."""
        return f"{self._nodes}node:{node}".encode()

    def nodes(self) -> bytes:
        """The key of the list of nodes."""
        return f"{self._nodes}nodes".encode()


def node_tag(node: str) -> bytes:
    """What stands for a node in entries."""
    return hashlib.sha256(node.encode()).digest()[:8]


def entry_head(node: str, incarnation: int, tier: TierKind) -> bytes:
    """An entry without its expiry."""
    return node_tag(node) + incarnation.to_bytes(7, "little") + bytes((tier,))


def check_record(record: NodeRecord) -> NodeRecord:
    """The record itself; raises `InvalidRequest` where nobody would believe it."""
    if not _NODE.fullmatch(record.node):
        raise InvalidRequest(f"node is {record.node[:64]!r}: allowed are 32 hexadecimal digits")
    if not _INSTANCE.fullmatch(record.instance):
        raise InvalidRequest(f"instance is {record.instance[:64]!r}: allowed are 1 to 64 letters and digits")
    if not 0 <= record.incarnation < MAX_INCARNATION:
        raise InvalidRequest(f"incarnation is {record.incarnation}: allowed is below {MAX_INCARNATION}")
    if not _is_address(record.address):
        raise InvalidRequest(f"address is {record.address[:300]!r}: allowed is HOST:PORT")
    return record


def encode_record(record: NodeRecord) -> bytes:
    """The JSON of a record; its incarnation is put in front by the script."""
    content = {name: getattr(record, name) for name in (*_FIELDS, "resident_bytes", "load")}
    name = "".join(char if char.isprintable() else "?" for char in record.name)
    content |= {"name": name[:_MAX_NAME_CHARS], "load": min(1.0, max(0.0, record.load))}
    if record.down:
        content["down"] = [int(tier) for tier in record.down]
    return json.dumps(content, separators=(",", ":")).encode()


def decode_ids(raw: Sequence[object]) -> list[str]:
    """Node ids among what the list of nodes holds, each once."""
    names = (one for one in raw[:MAX_NODES] if type(one) is bytes and len(one) == 32)
    texts = (name.decode("ascii", "replace") for name in names)
    return [text for text in dict.fromkeys(texts) if _NODE.fullmatch(text)]


def decode_record(node: str, raw: object) -> NodeRecord | None:
    """What is stored as the record of `node`; None where it is not one."""
    if not _NODE.fullmatch(node) or type(raw) is not bytes or not 0 < len(raw) <= MAX_RECORD_BYTES:
        return None
    number, _, text = raw.partition(b" ")
    if not number.isdigit() or len(number) > 16 or not 0 <= int(number) < MAX_INCARNATION:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not _is_sound(node, content):
        return None
    return NodeRecord(
        incarnation=int(number),
        **{name: content[name] for name in (*_FIELDS, "resident_bytes")},
        load=float(content["load"]),
        down=tuple(TierKind(tier) for tier in content.get("down", ()) if tier in _TIERS),
    )


def _is_sound(node: str, content: dict[str, Any]) -> bool:
    get = content.get
    name, address, instance, load = get("name"), get("address"), get("instance"), get("load")
    return (
        get("node") == node
        and isinstance(instance, str)
        and _INSTANCE.fullmatch(instance) is not None
        and isinstance(name, str)
        and len(name) <= _MAX_NAME_CHARS
        and name.isprintable()
        and isinstance(address, str)
        and _is_address(address)
        and all(_is_count(get(one)) for one in ("protocol_version", "capacity_bytes", "resident_bytes"))
        and isinstance(load, int | float)
        and not isinstance(load, bool)
        and 0 <= load <= 1
        and _are_tiers(get("down", []))
    )


def _are_tiers(value: object) -> bool:
    """A short list of numbers; those of tiers that are not known here say nothing."""
    return isinstance(value, list) and len(value) <= MAX_TIERS and all(_is_count(one) for one in value)


def _is_address(text: str) -> bool:
    return not text or (_ADDRESS.fullmatch(text) is not None and 0 < int(text.rpartition(":")[2]) < 65_536)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


class Resolver:
    """Turns values into locations by the nodes that are known. Used from one thread.

    Entries repeat: all blocks that a node published in one second have the same. So each is looked at
    once, and each whole value too, until the nodes change or a second is over.

    Attributes
    ----------
    has_news
        An entry was seen whose node, or incarnation of it, was in no list: set False by who has looked.
    garbage
        Values seen so far that no node can have written.
    """

    def __init__(self, garbage: int = 0) -> None:
        self.has_news = False
        self.garbage = garbage
        self._nodes: dict[bytes, tuple[str, int]] = {}
        self._heads: dict[bytes, Location | None] = {}
        self._values: dict[bytes | None, tuple[Location, ...]] = {None: ()}
        self._now_s = 0

    def update(self, records: Sequence[NodeRecord]) -> None:
        """Only these nodes, in these incarnations, count from now on."""
        nodes = {node_tag(record.node): (record.node, record.incarnation) for record in records}
        if nodes != self._nodes:
            self._nodes = nodes
            self._heads.clear()
            self._forget()

    def _forget(self) -> None:
        self._values.clear()
        self._values[None] = ()

    def resolve(self, values: Sequence[bytes | None], now_s: int) -> list[tuple[Location, ...]]:
        """Locations of each value that count at `now_s` of the server's clock."""
        if now_s != self._now_s or len(self._values) > MAX_CACHED_VALUES:
            self._now_s = now_s
            self._forget()
        known = self._values.get
        return [places if (places := known(value)) is not None else self._parse(value) for value in values]

    def _parse(self, value: bytes | None) -> tuple[Location, ...]:
        if type(value) is not bytes or len(value) % ENTRY_BYTES or len(value) > MAX_VALUE_BYTES:
            self.garbage += 1
            return ()  # not kept: a huge one would stay in memory
        places: dict[str, Location] = {}
        is_odd = False
        for head, expiry in _ENTRY.iter_unpack(value):
            if expiry > self._now_s + MAX_TTL_S:
                is_odd = True
            elif self._now_s < expiry:
                place = self._place(head)
                if place is not None:
                    places[place.node] = place
        self.garbage += is_odd
        found = tuple(places.values())
        self._values[value] = found
        return found

    def _place(self, head: bytes) -> Location | None:
        if head in self._heads:
            return self._heads[head]
        if len(self._heads) > MAX_CACHED_HEADS:
            self._heads.clear()
        place = None
        node, incarnation = self._nodes.get(head[:8], ("", -1))
        if int.from_bytes(head[8:15], "little") != incarnation:
            self.has_news = True
        elif head[15] in _TIERS:
            place = Location(node, incarnation, TierKind(head[15]))
        self._heads[head] = place
        return place
