"""The engine's paged KV memory, as kvtier copies it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvtier.client.copies import Band, Copier, CpuCopier
from kvtier.client.mapping import memory_at
from kvtier.errors import InvalidRequest
from kvtier.types import Layout


@dataclass(frozen=True, slots=True)
class PageTensor:
    """One layer's tensor, taken apart: where it begins and how its blocks follow each other."""

    address: int
    num_blocks: int
    block_stride_bytes: int


class Pages:
    """L tensors of ``[num_blocks, ...]``, on the CPU or on one CUDA device. Thread-safe.

    Keeps the tensors alive, and copies nothing by itself. Blocks that a copy names must not be read or
    written by others until it has returned.

    Attributes
    ----------
    layout
        What the blocks are made of.
    num_blocks
        Block ids are ``0 .. num_blocks-1``.
    copier
        Moves blocks between these pages and slots.
    """

    __slots__ = ("_owners", "copier", "layout", "num_blocks")

    def __init__(self, layout: Layout, num_blocks: int, copier: Copier, owners: Sequence[Any]) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.copier = copier
        self._owners = tuple(owners)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Any], layout: Layout) -> Self:
        """View the engine's KV memory.

        Parameters
        ----------
        tensors
            For each layer, in order, a torch tensor or numpy array: blocks along dimension 0 with any
            stride, each block's bytes in one piece (in any order of its inner dimensions). Layers may be
            interleaved in one storage.
        layout
            Its `layer_block_bytes` has to be what a block of one tensor has.

        Raises
        ------
        InvalidRequest
            The tensors are not what `layout` says, or a block's bytes are not in one piece.
        """
        if len(tensors) != layout.num_layers:
            raise InvalidRequest(f"{len(tensors)} tensors were given for {layout.num_layers} layers")
        parts = [_take_apart(tensor, layout, f"layer {i}") for i, tensor in enumerate(tensors)]
        counts = {part.num_blocks for part in parts}
        if len(counts) != 1:
            raise InvalidRequest(f"the layers have different numbers of blocks: {sorted(counts)}")
        devices = {_device(tensor) for tensor in tensors}
        if len(devices) != 1:
            raise InvalidRequest(f"the layers lie on different devices: {sorted(devices)}")
        device = devices.pop()
        if device.startswith("cuda"):
            from kvtier.client.cuda import CudaCopier

            return cls(layout, parts[0].num_blocks, CudaCopier(layout, tensors), tensors)
        if device != "cpu":
            raise InvalidRequest(f"the tensors lie on {device}: kvtier copies to and from cpu and cuda")
        return cls(layout, parts[0].num_blocks, CpuCopier(layout, make_bands(parts, layout)), tensors)

    def check(self, ids: Sequence[int]) -> None:
        """Raise `InvalidRequest` unless all of `ids` are blocks of these pages."""
        if ids and (min(ids) < 0 or max(ids) >= self.num_blocks):
            raise InvalidRequest(
                f"block ids {min(ids)} .. {max(ids)}: allowed are 0 .. {self.num_blocks - 1}"
            )


def make_bands(parts: Sequence[PageTensor], layout: Layout) -> list[Band]:
    """As few bands as neighbouring layers at equal distances allow: one storage makes one band."""
    bands: list[Band] = []
    first = 0
    while first < len(parts):
        last = first + 1
        spacing = parts[last].address - parts[first].address if last < len(parts) else 0
        while (
            last < len(parts)
            and parts[last].address - parts[last - 1].address == spacing
            and parts[last].block_stride_bytes == parts[first].block_stride_bytes
        ):
            last += 1
        shape = (last - first, parts[first].num_blocks, layout.layer_block_bytes)
        strides = (spacing, parts[first].block_stride_bytes, 1)
        bands.append(Band(first, memory_at(parts[first].address, shape, strides)))
        first = last
    return bands


def _device(tensor: Any) -> str:
    return str(tensor.device) if hasattr(tensor, "data_ptr") else "cpu"


def _take_apart(tensor: Any, layout: Layout, name: str) -> PageTensor:
    """Address and strides of a torch tensor or a numpy array, checked."""
    if hasattr(tensor, "data_ptr"):
        item_bytes = int(tensor.element_size())
        address = int(tensor.data_ptr())
        strides = [stride * item_bytes for stride in tensor.stride()]
    else:
        if not tensor.flags.writeable:
            raise InvalidRequest(f"{name} is read-only: loads have to write it")
        item_bytes = int(tensor.itemsize)
        address = int(tensor.__array_interface__["data"][0])
        strides = list(tensor.strides)
    shape = [int(size) for size in tensor.shape]
    if len(shape) < 2 or 0 in shape:
        raise InvalidRequest(f"{name} has shape {shape}: wanted is [num_blocks, ...]")
    block_bytes = math.prod(shape[1:]) * item_bytes
    if block_bytes != layout.layer_block_bytes:
        raise InvalidRequest(
            f"{name} has {block_bytes} bytes a block, the layout {layout.layer_block_bytes}: "
            "describe the tensors that the engine really has"
        )
    if not _in_one_piece(shape[1:], strides[1:], item_bytes):
        raise InvalidRequest(
            f"{name} has blocks with holes or repeats (strides {strides} bytes): not supported"
        )
    if shape[0] > 1 and strides[0] < block_bytes:
        raise InvalidRequest(f"{name} has blocks {strides[0]} bytes apart that are {block_bytes} long")
    return PageTensor(address, shape[0], strides[0])


def _in_one_piece(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> bool:
    """Whether the elements fill one run of bytes from the first on, in whatever order."""
    expected = item_bytes
    for stride, size in sorted(
        (stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
