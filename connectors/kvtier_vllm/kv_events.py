"""vLLM's KV events as they come over the wire: decoded as hostile input, reduced to what kvtier uses.

A batch is msgpack, ``[time, events, data parallel index]``. An event is a map with its ``type``, or, from
older versions, an array ``[type, fields in order]``. Block hashes are 64-bit integers or bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

MAX_BATCH_BYTES: Final = 8 << 20
"""A larger message is none of vLLM's: a step of a million tokens makes three million bytes."""
MAX_BATCH_EVENTS: Final = 65_536
MAX_EVENT_BLOCKS: Final = 65_536
MAX_HASH_BYTES: Final = 64
MAX_BLOCK_TOKENS: Final = 1 << 20

Hash = int | bytes

_STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)
_REMOVED: Final = ("block_hashes", "medium", "group_idx", "locality")


class Malformed(Exception):
    """No vLLM has written this: nothing is known of what the engine has."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of blocks that depend on their tokens alone, behind `parent` (None: it begins a prompt)."""

    hashes: Sequence[Hash]
    parent: Hash | None
    tokens: Sequence[int]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that are gone."""

    hashes: Sequence[Hash]


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks are gone, or nothing is known of them any more."""


Event = Stored | Removed | Cleared


def decode(payload: bytes, rank: int) -> list[Event]:
    """The events of a batch that concern this engine's own memory, in order.

    Left out are those of other data parallel engines, of other media, and blocks that depend on more than
    tokens: adapters, images, salts.

    Raises
    ------
    Malformed
        It is not a batch, or has an event that is not one.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise Malformed(f"a batch has {len(payload)} bytes")
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed(f"a batch is not msgpack ({type(error).__name__})") from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise Malformed("a batch is not a list of a time and events")
    events = batch[1]
    if len(events) > MAX_BATCH_EVENTS:
        raise Malformed(f"a batch has {len(events)} events")
    if len(batch) > 2 and batch[2] not in (None, rank):
        return []
    return [found for event in events if (found := _event(event)) is not None]


def _event(event: Any) -> Event | None:
    if isinstance(event, dict):
        kind = event.get("type")
    elif isinstance(event, list) and event:
        kind = event[0]
    else:
        raise Malformed("an event is neither a map nor a list")
    make = _KINDS.get(kind) if isinstance(kind, str) else None
    if make is not None:
        names, read = make
        return read(event if isinstance(event, dict) else dict(zip(names, event[1:], strict=False)))
    if not isinstance(kind, str):
        raise Malformed("an event has no type")
    return None  # a kind that later versions have


def _stored(event: Mapping[str, Any]) -> Stored | None:
    hashes, tokens = _hashes(event.get("block_hashes")), event.get("token_ids")
    parent, block_tokens = event.get("parent_block_hash"), event.get("block_size")
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise Malformed("token_ids is not a list of numbers")
    if type(block_tokens) is not int or not 0 < block_tokens <= MAX_BLOCK_TOKENS:
        raise Malformed("block_size is not a number of tokens")
    if parent is not None and not _is_hash(parent):
        raise Malformed("parent_block_hash is not a hash")
    if not _is_own(event) or len(tokens) != len(hashes) * block_tokens:
        return None
    extra = event.get("extra_keys")
    has_extra = any(extra) if isinstance(extra, list) else extra is not None
    if has_extra or event.get("lora_id") is not None or event.get("lora_name") is not None:
        return None
    return Stored(hashes, parent, tokens, block_tokens)


def _removed(event: Mapping[str, Any]) -> Removed | None:
    hashes = _hashes(event.get("block_hashes"))
    return Removed(hashes) if _is_own(event) else None


def _cleared(event: Mapping[str, Any]) -> Cleared:
    return Cleared()


_KINDS: Final[dict[str, tuple[Sequence[str], Callable[[Mapping[str, Any]], Event | None]]]] = {
    "BlockStored": (_STORED, _stored),
    "BlockRemoved": (_REMOVED, _removed),
    "AllBlocksCleared": ((), _cleared),
}


def _is_own(event: Mapping[str, Any]) -> bool:
    """Whether it is about the engine's own KV memory, and its one group of layers."""
    return (
        event.get("medium") in (None, "GPU")
        and event.get("group_idx") in (None, 0)
        and event.get("locality") in (None, "LOCAL")
    )


def _hashes(value: Any) -> list[Hash]:
    if not isinstance(value, list) or len(value) > MAX_EVENT_BLOCKS or not all(map(_is_hash, value)):
        raise Malformed("block_hashes is not a list of hashes")
    return value


def _is_hash(value: Any) -> bool:
    if type(value) is int:
        return 0 <= value < 1 << 64
    return type(value) is bytes and 0 < len(value) <= MAX_HASH_BYTES
