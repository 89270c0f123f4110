"""A second implementation of the key schema, written from the text in `kvtier/types.py` alone.

It imports nothing of kvtier and shares no technique with it: fields are lists of bytes that are joined
by hand, integers are spelled out digit by digit.
"""

from __future__ import annotations

import hashlib
from typing import Any

SCHEMA_VERSION = 1

LAYOUT_FIELDS = (
    "kind",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "dtype",
    "block_tokens",
    "order",
    "layer_block_bytes",
    "interior",
    "scale_bytes",
    "padding_bytes",
)
NAMESPACE_FIELDS = (
    "weights",
    "kv_dtype",
    "layout",
    "block_tokens",
    "adapter_name",
    "adapter_version",
    "tenant",
    "salt",
    "generation",
)


def little_endian(value: int, size: int) -> bytes:
    digits = []
    for _ in range(size):
        digits.append(value % 256)
        value //= 256
    assert value == 0
    return bytes(digits)


def field(tag: int, value: bytes) -> bytes:
    return bytes([tag]) + little_endian(len(value), 4) + value


def encoded(value: Any) -> bytes:
    if isinstance(value, int):
        return little_endian(value, 8)
    return value.encode("utf-8") if isinstance(value, str) else value


def tagged(name: bytes, names: tuple[str, ...], values: dict[str, Any]) -> bytes:
    parts = [field(0, name), field(1, little_endian(SCHEMA_VERSION, 4))]
    parts += [field(2 + position, encoded(values[key])) for position, key in enumerate(names)]
    return hashlib.sha256(b"".join(parts)).digest()


def fingerprint(layout: dict[str, Any]) -> bytes:
    return tagged(b"kvtier.layout", LAYOUT_FIELDS, layout)


def root(namespace: dict[str, Any]) -> bytes:
    return tagged(b"kvtier.root", NAMESPACE_FIELDS, namespace)


def chain(parent: bytes, tokens: list[int], block_tokens: int, extras: list[list[bytes]]) -> list[bytes]:
    keys = []
    for block in range(len(tokens) // block_tokens):
        mine = tokens[block * block_tokens : (block + 1) * block_tokens]
        parts = [field(0x20, parent), field(0x21, b"".join(little_endian(token, 4) for token in mine))]
        parts += [field(0x22, extra) for extra in (extras[block] if extras else [])]
        parent = hashlib.sha256(b"".join(parts)).digest()
        keys.append(parent)
    return keys
