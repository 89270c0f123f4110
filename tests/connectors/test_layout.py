from __future__ import annotations

from typing import Any

import pytest
import torch
from kvtier_vllm.layout import block_rows, layer_order, layout_of
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvtier.errors import ConfigError
from kvtier.types import Layout, LayoutKind, LayoutOrder

BLOCKS, HEADS, TOKENS, DIM = 6, 2, 32, 32
NAMES = ["model.layers.0.attn", "model.layers.1.attn"]


def _spec(**changes: Any) -> FullAttentionSpec:
    values = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.bfloat16}
    return FullAttentionSpec(**(values | changes))


def _layout(spec: Any = None, cache_dtype: str = "auto", **changes: Any) -> Layout:
    values: dict[str, Any] = {
        "engine_layout": "LBHNC",
        "backends": ["CPU_ATTN", "CPU_ATTN"],
        "cpu_isa": "amx",
        "engine_version": "0.32.0",
    }
    return layout_of(spec or _spec(), cache_dtype, NAMES, **(values | changes))


def test_what_decides_the_bytes_is_in_the_fingerprint() -> None:
    variants = [
        _layout(),
        _layout(cpu_isa="vec"),
        _layout(engine_version="0.33.0"),
        _layout(backends=["OTHER", "OTHER"]),
        _layout(engine_layout="LBNHC"),
        _layout(_spec(block_size=64)),
        _layout(_spec(dtype=torch.float16)),
        _layout(_spec(dtype=torch.uint8), "fp8"),
        _layout(_spec(dtype=torch.uint8), "fp8_e5m2"),
    ]
    assert len({layout.fingerprint() for layout in variants}) == len(variants)


def test_fp8_is_e4m3() -> None:
    spec = _spec(dtype=torch.uint8)
    assert _layout(spec, "fp8") == _layout(spec, "fp8_e4m3")


def test_without_a_cpu_kernel_the_version_does_not_count() -> None:
    one = _layout(cpu_isa=None, backends=["FLASH_ATTN"] * 2)
    two = _layout(cpu_isa=None, backends=["FLASH_ATTN"] * 2, engine_version="0.33.0")
    assert one == two
    assert one.order is LayoutOrder.HND
    assert _layout(engine_layout="LBNHC").order is LayoutOrder.NHD


def test_a_latent_is_one_plane() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    layout = _layout(spec)
    assert (layout.kind, layout.layer_block_bytes) == (LayoutKind.MLA, 16 * 576 * 2)


@pytest.mark.parametrize(
    ("spec", "cache_dtype", "message"),
    [
        (_spec(dtype=torch.int8), "int8_per_token_head", "int8_per_token_head"),
        (_spec(dtype=torch.uint8), "auto", "uint8"),
        (_spec(dtype=torch.uint8), "fp8_ds_mla", "fp8_ds_mla"),
        (_spec(head_size_v=64), "auto", "does not know this KV layout"),
        (_spec(num_head_slots=3), "auto", "does not know this KV layout"),
    ],
)
def test_what_is_not_known_is_refused(spec: Any, cache_dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _layout(spec, cache_dtype)


def test_mixed_backends_are_refused() -> None:
    with pytest.raises(ConfigError, match="mixes"):
        _layout(backends=["FLASH_ATTN", "FLEX_ATTENTION"])


def test_layers_are_ordered_by_their_numbers() -> None:
    names = [f"model.layers.{i}.attn" for i in (10, 2, 0, 1)]
    assert [name.split(".")[2] for name in layer_order(names)] == ["0", "1", "2", "10"]


def _storage(*shape: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.arange(count, dtype=torch.int32).to(torch.bfloat16).reshape(shape)


def _check_rows(tensors: list[torch.Tensor], num_blocks: int = BLOCKS) -> None:
    layout = _layout()
    rows = block_rows(dict(zip(NAMES, tensors, strict=True)), NAMES, num_blocks, layout)
    for row, tensor in zip(rows, tensors, strict=True):
        assert row.shape == (num_blocks, layout.layer_block_bytes)
        split = tensor.shape[0] // num_blocks
        for block in range(num_blocks):
            row[block] = block + 1
            part = tensor[block * split : (block + 1) * split].contiguous().view(torch.uint8)
            assert bool((part == block + 1).all())


def test_rows_share_the_memory_of_layers_in_any_block_major_layout() -> None:
    head_major = _storage(2, BLOCKS, HEADS, TOKENS, 2 * DIM)
    _check_rows([head_major[0], head_major[1]])
    token_major = _storage(2, BLOCKS, TOKENS, HEADS, 2 * DIM).transpose(2, 3)
    _check_rows([token_major[0], token_major[1]])
    blocks_outermost = _storage(BLOCKS, 2, HEADS, TOKENS, 2 * DIM)
    _check_rows([blocks_outermost[:, 0], blocks_outermost[:, 1]])
    kernel_blocks = _storage(2, BLOCKS * 2, HEADS, TOKENS // 2, 2 * DIM)
    _check_rows([kernel_blocks[0], kernel_blocks[1]])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([_storage(BLOCKS, HEADS, TOKENS, 2 * DIM)] * 2, "share memory"),
        ([_storage(HEADS, BLOCKS, TOKENS, 2 * DIM).transpose(0, 1) for _ in range(2)], "not contiguous"),
        ([_storage(BLOCKS, HEADS, TOKENS, DIM) for _ in range(2)], "its layout says"),
        ([_storage(BLOCKS + 1, HEADS, TOKENS, 2 * DIM) for _ in range(2)], "no multiple"),
    ],
)
def test_memory_that_does_not_match_the_layout_is_refused(tensors: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        block_rows(dict(zip(NAMES, tensors, strict=True)), NAMES, BLOCKS, _layout())


def test_a_missing_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers\.1"):
        block_rows({NAMES[0]: _storage(BLOCKS, HEADS, TOKENS, 2 * DIM)}, NAMES, BLOCKS, _layout())
