"""Prints `keys.json`: ``python -m tests.vectors.make_keys > tests/vectors/keys.json``.

The vectors are published: a change of any of them is a new `KEY_SCHEMA_VERSION`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kvtier.types import KEY_SCHEMA_VERSION, Layout, LayoutKind, LayoutOrder, Namespace, chain_keys

SMOLLM2 = Layout(LayoutKind.GQA, 30, 3, 64, "bfloat16", 32, LayoutOrder.HND, 24576)
LLAMA3 = Layout(LayoutKind.GQA, 32, 8, 128, "bfloat16", 32, LayoutOrder.NHD, 131072)
DEEPSEEK = Layout(
    LayoutKind.MLA, 61, 1, 576, "fp8_e4m3", 16, LayoutOrder.NHD, 9216 + 64 + 128, "plain", 64, 128
)
PERMUTED = Layout(LayoutKind.MHA, 1, 1, 1, "float32", 1, LayoutOrder.HND, 8, "cpu-amx/vllm 0.32.0")


def _namespaces() -> list[Namespace]:
    base = Namespace(bytes(range(32)), "bfloat16", SMOLLM2.fingerprint(), 32)
    return [
        base,
        dataclasses.replace(base, layout=LLAMA3.fingerprint()),
        dataclasses.replace(base, adapter_name="sql", adapter_version=b"\x01\x02"),
        dataclasses.replace(base, tenant="Ωmega ltd", salt=b"\x00salt\xff"),
        dataclasses.replace(base, generation=bytes(16)),
    ]


def _plain(value: Any) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _fields(instance: Any) -> dict[str, Any]:
    return {spec.name: _plain(getattr(instance, spec.name)) for spec in dataclasses.fields(instance)}


def _chain(namespace: Namespace, tokens: list[int], block_tokens: int, extras: list[list[bytes]]) -> Any:
    keys = chain_keys(namespace.root(), tokens, block_tokens, extras or None)
    return {
        "parent": namespace.root().hex(),
        "tokens": tokens,
        "block_tokens": block_tokens,
        "extras": [[extra.hex() for extra in block] for block in extras],
        "keys": [key.hex() for key in keys],
    }


def main() -> None:
    base, *others = _namespaces()
    vectors = {
        "schema_version": KEY_SCHEMA_VERSION,
        "layouts": [
            {**_fields(layout), "fingerprint": layout.fingerprint().hex()}
            for layout in (SMOLLM2, LLAMA3, DEEPSEEK, PERMUTED)
        ],
        "namespaces": [{**_fields(space), "root": space.root().hex()} for space in (base, *others)],
        "chains": [
            _chain(base, list(range(100)), 32, []),
            _chain(base, [0, 1, 2**31, 2**32 - 1], 1, []),
            _chain(others[2], [7] * 8, 4, [[], [b"image", b"\x00\x01"]]),
            _chain(others[3], [5, 6, 7], 4, []),
            _chain(others[1], [1, 2], 2, [[b""]]),
        ],
    }
    print(json.dumps(vectors, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
