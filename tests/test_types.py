"""Keys and layouts: published vectors, a second implementation, and nothing that can collide."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.types import (
    KEY_SCHEMA_VERSION,
    Layout,
    LayoutKind,
    LayoutOrder,
    Namespace,
    chain_keys,
    pack_keys,
    runs,
    unpack_keys,
)
from tests import reference_keys as reference

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors" / "keys.json").read_text("utf-8"))
ROOT = bytes(range(32))


def _value(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


def _values(vector: dict[str, Any], result: str) -> dict[str, Any]:
    return {name: _value(value) for name, value in vector.items() if name != result}


def _layout(values: dict[str, Any]) -> Layout:
    kind, order = LayoutKind(values["kind"]), LayoutOrder(values["order"])
    return Layout(**{**values, "kind": kind, "order": order})


# ---- vectors


def test_the_schema_is_the_published_one() -> None:
    assert VECTORS["schema_version"] == KEY_SCHEMA_VERSION == reference.SCHEMA_VERSION
    assert tuple(spec.name for spec in dataclasses.fields(Layout)) == reference.LAYOUT_FIELDS
    assert tuple(spec.name for spec in dataclasses.fields(Namespace)) == reference.NAMESPACE_FIELDS


@pytest.mark.parametrize("vector", VECTORS["layouts"])
def test_fingerprints(vector: dict[str, Any]) -> None:
    values = _values(vector, "fingerprint")
    assert reference.fingerprint(values).hex() == vector["fingerprint"]
    assert _layout(values).fingerprint().hex() == vector["fingerprint"]


@pytest.mark.parametrize("vector", VECTORS["namespaces"])
def test_roots(vector: dict[str, Any]) -> None:
    values = _values(vector, "root")
    assert reference.root(values).hex() == vector["root"]
    assert Namespace(**values).root().hex() == vector["root"]


@pytest.mark.parametrize("vector", VECTORS["chains"])
def test_chains(vector: dict[str, Any]) -> None:
    parent, tokens, block_tokens = bytes.fromhex(vector["parent"]), vector["tokens"], vector["block_tokens"]
    extras = [[bytes.fromhex(extra) for extra in block] for block in vector["extras"]]
    ours = chain_keys(parent, tokens, block_tokens, extras or None)
    theirs = reference.chain(parent, tokens, block_tokens, extras)
    assert [key.hex() for key in ours] == [key.hex() for key in theirs] == vector["keys"]


# ---- the second implementation, on anything

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@given(tokens=tokens_lists, block_tokens=st.integers(1, 33), data=st.data())
def test_both_implementations_agree_on_chains(
    tokens: list[int], block_tokens: int, data: st.DataObject
) -> None:
    count = len(tokens) // block_tokens
    blocks = st.lists(st.lists(st.binary(max_size=9), max_size=3), min_size=count, max_size=count)
    extras = data.draw(blocks)
    keys = chain_keys(ROOT, tokens, block_tokens, extras)
    assert keys == reference.chain(ROOT, tokens, block_tokens, extras)
    assert keys == chain_keys(ROOT, np.array(tokens, dtype=np.int64), block_tokens, extras)
    if count:
        first = chain_keys(ROOT, tokens[:block_tokens], block_tokens, extras[:1])
        rest = chain_keys(first[-1], tokens[block_tokens:], block_tokens, extras[1:])
        assert first + rest == keys, "a chain can be continued from any of its keys"


texts = st.text(max_size=12)
namespaces = st.builds(
    Namespace,
    weights=st.binary(max_size=40),
    kv_dtype=texts,
    layout=st.binary(min_size=32, max_size=32),
    block_tokens=st.integers(1, 2**20),
    adapter_name=texts,
    adapter_version=st.binary(max_size=12),
    tenant=texts,
    salt=st.binary(max_size=12),
    generation=st.sampled_from((b"", bytes(16), bytes(range(16)))),
)


@given(space=namespaces)
def test_both_implementations_agree_on_roots(space: Namespace) -> None:
    values = {spec.name: getattr(space, spec.name) for spec in dataclasses.fields(space)}
    assert space.root() == reference.root(values)


# ---- nothing collides


@given(space=namespaces, other=namespaces, name=st.sampled_from(reference.NAMESPACE_FIELDS))
def test_namespaces_that_differ_in_one_field_share_no_key(
    space: Namespace, other: Namespace, name: str
) -> None:
    changed = dataclasses.replace(space, **{name: getattr(other, name)})
    mine = {space.root(), *chain_keys(space.root(), list(range(12)), 4)}
    theirs = {changed.root(), *chain_keys(changed.root(), list(range(12)), 4)}
    if changed == space:
        assert mine == theirs
    else:
        assert not mine & theirs


@given(text=st.text(min_size=1, max_size=24), data=st.data())
def test_bytes_that_move_from_one_field_to_its_neighbour_change_the_root(
    text: str, data: st.DataObject
) -> None:
    base = {"weights": b"w", "kv_dtype": "bfloat16", "layout": bytes(32), "block_tokens": 32}
    cut, other = (data.draw(st.integers(0, len(text))) for _ in range(2))

    def roots(at: int) -> list[bytes]:
        left, right = text[:at], text[at:]
        raw_left, raw_right = left.encode(), right.encode()
        return [
            Namespace(**base, adapter_name=left, adapter_version=raw_right).root(),
            Namespace(**base, adapter_version=raw_left, tenant=right).root(),
            Namespace(**base, tenant=left, salt=raw_right).root(),
            Namespace(**base, salt=raw_left, generation=raw_right).root(),
            Namespace(**base, adapter_name=left, salt=raw_right).root(),
        ]

    ours, others = roots(cut), roots(other)
    if cut != other:
        assert all(a != b for a, b in zip(ours, others, strict=True))


def test_every_layout_field_changes_the_fingerprint() -> None:
    base = Layout(LayoutKind.GQA, 2, 2, 8, "bfloat16", 4, LayoutOrder.NHD, 256 + 16 + 32, "plain", 16, 32)
    changed = [
        {"kind": LayoutKind.MHA},
        {"num_layers": 3},
        {"num_kv_heads": 4, "layer_block_bytes": 512 + 48},
        {"head_dim": 16, "layer_block_bytes": 512 + 48},
        {"dtype": "float16"},
        {"block_tokens": 8, "layer_block_bytes": 512 + 48},
        {"order": LayoutOrder.HND},
        {"interior": "amx"},
        {"scale_bytes": 32, "padding_bytes": 16},
        {"padding_bytes": 0, "layer_block_bytes": 256 + 16},
    ]
    prints = {base.fingerprint(), *(dataclasses.replace(base, **c).fingerprint() for c in changed)}
    assert len(prints) == 1 + len(changed)


@given(data=st.data())
def test_tokens_and_extras_do_not_run_into_each_other(data: st.DataObject) -> None:
    extras = st.lists(st.binary(max_size=6), max_size=3)
    one, two = data.draw(extras), data.draw(extras)
    keys = [chain_keys(ROOT, [1, 2], 2, [some])[0] for some in (one, two)]
    assert (keys[0] == keys[1]) == (one == two)
    assert chain_keys(ROOT, [1, 2, 3, 4], 4)[-1] != chain_keys(ROOT, [1, 2, 3, 4], 2)[-1]


def test_a_key_depends_on_every_token_before_it() -> None:
    tokens = list(range(64))
    keys = chain_keys(ROOT, tokens, 16)
    for position in range(64):
        other = chain_keys(ROOT, [*tokens[:position], 99, *tokens[position + 1 :]], 16)
        same = [a == b for a, b in zip(keys, other, strict=True)]
        assert same == [block < position // 16 for block in range(4)]


# ---- bad input


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 0},
        {"head_dim": -1},
        {"scale_bytes": -1},
        {"padding_bytes": 2**40},
        {"dtype": "float17"},
        {"layer_block_bytes": 255},
        {"scale_bytes": 1},
        {"block_tokens": 2**40},
        {"kind": "gqa"},
        {"order": "NHD"},
        {"num_layers": 2.0},
        {"num_kv_heads": True},
        {"interior": b"plain"},
        {"dtype": ["bfloat16"]},
    ],
)
def test_layouts_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    base = Layout(LayoutKind.GQA, 2, 2, 8, "bfloat16", 4, LayoutOrder.NHD, 256)
    with pytest.raises(InvalidRequest, match="layout"):
        dataclasses.replace(base, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "w"},
        {"layout": "l" * 32},
        {"kv_dtype": b"bfloat16"},
        {"block_tokens": 16.0},
        {"block_tokens": 0},
        {"block_tokens": True},
        {"salt": "salt"},
        {"tenant": None},
        {"generation": bytearray(16)},
    ],
)
def test_namespaces_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    base = Namespace(b"w", "bfloat16", bytes(32), 16)
    with pytest.raises(InvalidRequest, match=next(iter(change))):
        dataclasses.replace(base, **change)


def test_sizes_of_blocks_and_slots() -> None:
    layout = Layout(LayoutKind.MLA, 3, 1, 100, "uint8", 16, LayoutOrder.NHD, 1600)
    assert layout.block_bytes == 4800
    assert layout.slot_bytes == 8192


def test_bad_chains_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="parent"):
        chain_keys(b"short", [1], 1)
    with pytest.raises(InvalidRequest, match="block_tokens"):
        chain_keys(ROOT, [1], 0)
    with pytest.raises(InvalidRequest, match="parent"):
        chain_keys("p" * 32, [1], 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="block_tokens"):
        chain_keys(ROOT, [1], 1.0)  # type: ignore[arg-type]
    for token in (-1, 2**32, 2**64, 1.5, True, None, "1", [1], [1, 2]):
        with pytest.raises(InvalidRequest, match="token"):
            chain_keys(ROOT, [token], 1)  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="token"):
        chain_keys(ROOT, [[1], [2, 3]], 1)  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="extras"):
        chain_keys(ROOT, [1, 2], 1, [[]])
    assert chain_keys(ROOT, [1, 2, 3], 4) == []
    assert chain_keys(ROOT, [], 4) == []


def test_packing() -> None:
    keys = chain_keys(ROOT, list(range(8)), 2)
    assert unpack_keys(pack_keys(keys), max_keys=4) == keys
    assert unpack_keys(b"", max_keys=4) == []
    with pytest.raises(InvalidRequest, match="multiple"):
        unpack_keys(b"x" * 33, max_keys=4)
    with pytest.raises(InvalidRequest, match="at most 3"):
        unpack_keys(pack_keys(keys), max_keys=3)


@given(st.lists(st.integers(0, 20)))
def test_runs_cover_all_positions_in_order(values: list[int]) -> None:
    found = list(runs(values))
    assert [first + i for _, first, length in found for i in range(length)] == values
    assert [position for position, _, _ in found] == [sum(r[2] for r in found[:i]) for i in range(len(found))]
    for (_, first, length), (_, following, _) in itertools.pairwise(found):
        assert following != first + length, "runs are maximal"
