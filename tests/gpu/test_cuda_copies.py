"""Copies between slots and pages on a CUDA device; skipped, with the reason, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.client import Pages
from kvtier.client.copies import checksum
from kvtier.client.mapping import ArenaMapping
from kvtier.types import Layout, LayoutKind, LayoutOrder

LAYOUT = Layout(LayoutKind.GQA, 3, 2, 32, "bfloat16", 16, LayoutOrder.HND, 2 * 2 * 32 * 16 * 2)
BLOCKS = 12
SHAPE = (BLOCKS, 2, 16, 64)
ARENA_BYTES = 64 * LAYOUT.slot_bytes


def missing() -> str:
    """Why nothing can be tested here, or an empty string."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing()), reason=missing() or "there is one")]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[ArenaMapping]:
    path = tmp_path / "test.arena"
    path.write_bytes(bytes(ARENA_BYTES))
    arena = ArenaMapping(str(path), ARENA_BYTES, ARENA_BYTES)
    yield arena
    arena.retire()


def separate() -> list[torch.Tensor]:
    return [torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda") for _ in range(3)]


def interleaved() -> list[torch.Tensor]:
    storage = torch.zeros((BLOCKS, 3, *SHAPE[1:]), dtype=torch.bfloat16, device="cuda")
    return [storage[:, layer] for layer in range(3)]


@pytest.mark.parametrize("make", [separate, interleaved])
def test_blocks_come_back(make: object, arena: ArenaMapping) -> None:
    tensors = make()  # type: ignore[operator]
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    pages = Pages.from_tensors(tensors, LAYOUT)
    ids = [3, 4, 9, 1]
    offsets = [slot * LAYOUT.slot_bytes for slot in (0, 1, 7, 5)]
    with arena.use():
        pages.copier.to_slots(arena, offsets, ids)
        for offset, block in zip(offsets, ids, strict=True):
            wanted = b"".join(
                rows[block].contiguous().view(torch.uint8).cpu().numpy().tobytes() for rows in before
            )
            assert bytes(arena.view[offset : offset + LAYOUT.block_bytes]) == wanted
            assert len(checksum(arena, offset, LAYOUT.block_bytes)) == 16
        for tensor in tensors:
            tensor.zero_()
        pages.copier.to_pages(arena, offsets, ids)
    for tensor, rows in zip(tensors, before, strict=True):
        for block in range(BLOCKS):
            expected = rows[block] if block in ids else torch.zeros_like(rows[block])
            assert torch.equal(tensor[block], expected)


def test_the_arena_is_pinned_once_and_let_go_before_it_is_unmapped(arena: ArenaMapping) -> None:
    pages = Pages.from_tensors(separate(), LAYOUT)
    with arena.use():
        for _ in range(3):
            pages.copier.to_slots(arena, [0], [0])
        assert torch.from_numpy(np.asarray(arena.bytes)).is_pinned()
    arena.retire()
