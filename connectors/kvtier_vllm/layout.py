"""What an engine's blocks look like, from its config and from the tensors that it really has."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvtier.errors import ConfigError
from kvtier.types import Layout, LayoutKind, LayoutOrder

_DTYPES: Final = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_CACHE_DTYPES: Final = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
"""vLLM's names of KV cache dtypes whose layout is known: no scales inside the block."""


def kv_dtype(cache_dtype: str, spec: Any) -> str:
    """The element type of the KV; raises `ConfigError` for one whose layout is not known."""
    name = _DTYPES.get(spec.dtype) if cache_dtype == "auto" else _CACHE_DTYPES.get(cache_dtype)
    if name is None:
        raise ConfigError(
            f"kvtier does not know how a KV cache of type {cache_dtype!r} ({spec.dtype}) lies in memory: "
            f"use auto, {', '.join(_CACHE_DTYPES)}"
        )
    return name


def layout_of(
    spec: Any,
    cache_dtype: str,
    layer_names: Sequence[str],
    *,
    engine_layout: str | None,
    backends: Sequence[str],
    cpu_isa: str | None,
    engine_version: str,
) -> Layout:
    """The layout of one block of a group of layers.

    Parameters
    ----------
    spec
        vLLM's `FullAttentionSpec` or `MLAAttentionSpec` of the group.
    engine_layout
        vLLM's name of the physical order, as in ``"LBHNC"``.
    backends
        Names of the attention backends of the layers.
    cpu_isa
        Instruction set that the CPU kernel packs for, None on other devices. What it packs is known to
        that kernel alone, so the engine's version is part of the interior there.
    """
    if len(set(backends)) > 1:
        raise ConfigError(
            f"kvtier serves layers of one attention backend, this engine mixes {sorted(set(backends))}"
        )
    dtype = kv_dtype(cache_dtype, spec)
    mla = isinstance(spec, MLAAttentionSpec)
    interior = "/".join(["vllm", *sorted(set(backends)), str(engine_layout)])
    if cpu_isa is not None:
        interior += f"/{cpu_isa}/{dtype}/{spec.block_size}/{engine_version}"
    elements = spec.num_kv_heads * spec.block_size * (spec.head_size if mla else 2 * spec.head_size)
    plain_bytes = elements * (1 if dtype.startswith("fp8") else spec.dtype.itemsize)
    if plain_bytes != spec.unpadded_page_size_bytes:
        raise ConfigError(
            f"kvtier does not know this KV layout: a block of a layer has {spec.unpadded_page_size_bytes} "
            f"bytes, its {elements} elements of {dtype} make {plain_bytes}"
        )
    return Layout(
        kind=_kind(spec, mla),
        num_layers=len(layer_names),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=dtype,
        block_tokens=spec.block_size,
        order=_order(engine_layout),
        layer_block_bytes=spec.page_size_bytes,
        interior=interior,
        padding_bytes=spec.page_size_bytes - spec.unpadded_page_size_bytes,
    )


def _kind(spec: Any, mla: bool) -> LayoutKind:
    assert isinstance(spec, FullAttentionSpec)
    return LayoutKind.MLA if mla else LayoutKind.GQA


def _order(engine_layout: str | None) -> LayoutOrder:
    if engine_layout is None:
        return LayoutOrder.HND
    return LayoutOrder.HND if engine_layout.index("H") < engine_layout.index("N") else LayoutOrder.NHD


def layer_order(layer_names: Sequence[str]) -> list[str]:
    """Layer names by the numbers in them: the same in every engine that runs the model."""
    return sorted(layer_names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)] or [-1])


def block_rows(
    kv_caches: Mapping[str, torch.Tensor], layer_names: Sequence[str], num_blocks: int, layout: Layout
) -> list[torch.Tensor]:
    """Each layer's KV as bytes, ``[num_blocks, layer_block_bytes]``, sharing its memory.

    Raises `ConfigError` where a layer is missing, two layers share memory, or a block is not one
    contiguous run of exactly the layout's bytes.
    """
    rows: list[torch.Tensor] = []
    owners: dict[int, str] = {}
    for name in layer_names:
        tensor = kv_caches.get(name)
        if tensor is None:
            raise ConfigError(f"kvtier: the engine registered no KV cache for layer {name}")
        row = _rows(name, tensor, num_blocks, layout.layer_block_bytes)
        other = owners.setdefault(row.data_ptr(), name)
        if other != name:
            raise ConfigError(f"kvtier does not serve layers that share memory: {other} and {name}")
        rows.append(row)
    return rows


def _rows(name: str, tensor: torch.Tensor, num_blocks: int, layer_block_bytes: int) -> torch.Tensor:
    if tensor.shape[0] % num_blocks:
        raise ConfigError(
            f"kvtier: layer {name} has {tensor.shape[0]} kernel blocks, no multiple of the {num_blocks} "
            "blocks of the engine"
        )
    # One block of the engine may be several of the kernel, one after the other.
    split = tensor.shape[0] // num_blocks
    item = tensor.element_size()
    inner = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True))
    expected = 1
    for stride, size in inner:
        if size > 1 and stride != expected:
            raise ConfigError(f"kvtier: a block of layer {name} is not contiguous in memory")
        expected *= size
    block_bytes = split * expected * item
    padded = layer_block_bytes > block_bytes and split == 1 and tensor.stride(0) * item >= layer_block_bytes
    dense = split == 1 or tensor.stride(0) == expected
    if not dense or (block_bytes != layer_block_bytes and not padded):
        raise ConfigError(
            f"kvtier: a block of layer {name} has {block_bytes} bytes in memory, its layout says "
            f"{layer_block_bytes}"
        )
    assert math.prod(tensor.shape[1:]) == expected
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * item,
        (num_blocks, layer_block_bytes),
        (split * tensor.stride(0) * item, 1),
    )
