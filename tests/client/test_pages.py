"""Pages: every block-major layout of tensors, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.client import Pages
from kvtier.client.copies import CpuCopier, groups, joint_runs, slot_runs
from kvtier.errors import InvalidRequest
from kvtier.types import Layout, LayoutKind, LayoutOrder

LAYOUT = Layout(LayoutKind.GQA, 3, 2, 32, "bfloat16", 16, LayoutOrder.HND, 2 * 2 * 32 * 16 * 2)
BLOCKS = 12
SHAPE = (BLOCKS, 2, 16, 64)


class PlainArena:
    """Memory that stands for an arena where only copies are tested."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = np.zeros(size_bytes, np.uint8)
        self.view = self.bytes.data
        self.address = self.bytes.ctypes.data


def separate() -> list[torch.Tensor]:
    return [torch.zeros(SHAPE, dtype=torch.bfloat16) for _ in range(3)]


def one_storage() -> list[torch.Tensor]:
    return list(torch.zeros((3, *SHAPE), dtype=torch.bfloat16))


def interleaved() -> list[torch.Tensor]:
    storage = torch.zeros((BLOCKS, 3, *SHAPE[1:]), dtype=torch.bfloat16)
    return [storage[:, layer] for layer in range(3)]


def interleaved_backwards() -> list[torch.Tensor]:
    return interleaved()[::-1]


def uneven() -> list[torch.Tensor]:
    storage = torch.zeros((BLOCKS, 5, *SHAPE[1:]), dtype=torch.bfloat16)
    return [storage[:, layer] for layer in (0, 1, 4)]


def permuted_interior() -> list[torch.Tensor]:
    return [torch.zeros((BLOCKS, 16, 2, 64), dtype=torch.bfloat16).permute(0, 2, 1, 3) for _ in range(3)]


def other_strides() -> list[torch.Tensor]:
    storage = torch.zeros((BLOCKS * 2, *SHAPE[1:]), dtype=torch.bfloat16)
    return [storage[::2], *separate()[:2]]


def numpy_arrays() -> list[np.ndarray]:
    return [np.zeros((BLOCKS, LAYOUT.layer_block_bytes), np.uint8) for _ in range(3)]


def as_bytes(tensor: Any) -> np.ndarray:
    if isinstance(tensor, np.ndarray):
        return tensor
    return tensor.reshape(BLOCKS, -1).contiguous().view(torch.uint8).numpy()


def fill(tensors: list[Any]) -> None:
    generator = np.random.default_rng(3)
    for tensor in tensors:
        if isinstance(tensor, np.ndarray):
            tensor[:] = generator.integers(0, 256, tensor.shape, np.uint8)
        else:
            tensor.copy_(torch.from_numpy(generator.normal(size=SHAPE).astype(np.float32)))


@pytest.mark.parametrize(
    "make",
    [
        separate,
        one_storage,
        interleaved,
        interleaved_backwards,
        uneven,
        permuted_interior,
        other_strides,
        numpy_arrays,
    ],
)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_blocks_come_back_and_nothing_else_is_touched(
    make: Callable[[], list[Any]], data: st.DataObject
) -> None:
    tensors = make()
    fill(tensors)
    pages = Pages.from_tensors(tensors, LAYOUT)
    assert isinstance(pages.copier, CpuCopier)
    count = data.draw(st.integers(1, 6))
    ids = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=count, max_size=count, unique=True))
    slots = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count, unique=True))
    if data.draw(st.booleans()):
        slots = list(range(count))
    if data.draw(st.booleans()):
        ids = list(range(2, 2 + count))
    arena = PlainArena(10 * LAYOUT.slot_bytes)
    offsets = [slot * LAYOUT.slot_bytes for slot in slots]
    before = [as_bytes(tensor).copy() for tensor in tensors]

    pages.copier.to_slots(arena, offsets, ids)  # type: ignore[arg-type]
    for tensor, rows in zip(tensors, before, strict=True):
        assert np.array_equal(as_bytes(tensor), rows), "a store changed the pages"
    used = set(slots)
    for slot in range(10):
        block = arena.bytes[slot * LAYOUT.slot_bytes :][: LAYOUT.block_bytes]
        if slot not in used:
            assert not block.any(), "a store wrote another slot"
    if make is not permuted_interior:  # there the bytes lie in memory's order, not in the tensor's
        for slot, block_id in zip(slots, ids, strict=True):
            block = arena.bytes[slot * LAYOUT.slot_bytes :][: LAYOUT.block_bytes]
            assert block.tobytes() == b"".join(rows[block_id].tobytes() for rows in before)

    for tensor in tensors:
        tensor[:] = 0
    pages.copier.to_pages(arena, offsets, ids)  # type: ignore[arg-type]
    for tensor, rows in zip(tensors, before, strict=True):
        now = as_bytes(tensor)
        for block_id in range(BLOCKS):
            if block_id in ids:
                assert np.array_equal(now[block_id], rows[block_id])
            else:
                assert not now[block_id].any(), "a load wrote another block"


def test_one_storage_is_copied_in_one_band() -> None:
    for make in (one_storage, interleaved, interleaved_backwards):
        copier = Pages.from_tensors(make(), LAYOUT).copier
        assert isinstance(copier, CpuCopier)
        assert len(copier._bands) == 1


def test_the_tensors_stay_alive() -> None:
    tensors = numpy_arrays()
    pages = Pages.from_tensors(tensors, LAYOUT)
    tensors[0][3] = 7
    del tensors
    arena = PlainArena(LAYOUT.slot_bytes)
    pages.copier.to_slots(arena, [0], [3])  # type: ignore[arg-type]
    assert (arena.bytes[: LAYOUT.layer_block_bytes] == 7).all()


def holes() -> list[torch.Tensor]:
    return [torch.zeros((BLOCKS, 2, 16, 128), dtype=torch.bfloat16)[..., :64] for _ in range(3)]


def not_block_major() -> list[torch.Tensor]:
    return [torch.zeros((2, BLOCKS, 16, 64), dtype=torch.bfloat16) for _ in range(3)]


def repeated() -> list[torch.Tensor]:
    return [torch.zeros((1, *SHAPE[1:]), dtype=torch.bfloat16).expand(SHAPE) for _ in range(3)]


def read_only() -> list[np.ndarray]:
    arrays = numpy_arrays()
    arrays[1].flags.writeable = False
    return arrays


def reversed_interior() -> list[np.ndarray]:
    return [array[:, ::-1] for array in numpy_arrays()]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: separate()[:2], "2 tensors were given for 3 layers"),
        (
            lambda: [*separate()[:2], torch.zeros((BLOCKS + 1, *SHAPE[1:]), dtype=torch.bfloat16)],
            "numbers of",
        ),
        (lambda: [torch.zeros(SHAPE, dtype=torch.float32) for _ in range(3)], "bytes a block"),
        (not_block_major, "bytes a block"),
        (holes, "holes or repeats"),
        (reversed_interior, "holes or repeats"),
        (repeated, "bytes apart"),
        (read_only, "read-only"),
        (lambda: [torch.zeros(4096, dtype=torch.uint8) for _ in range(3)], "num_blocks"),
        (lambda: [torch.zeros((0, *SHAPE[1:]), dtype=torch.bfloat16) for _ in range(3)], "num_blocks"),
        (lambda: [torch.zeros(SHAPE, dtype=torch.bfloat16, device="meta") for _ in range(3)], "lie on meta"),
    ],
)
def test_what_is_not_the_layout_is_refused(make: Callable[[], list[Any]], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Pages.from_tensors(make(), LAYOUT)


def test_ids_are_checked() -> None:
    pages = Pages.from_tensors(separate(), LAYOUT)
    pages.check([0, BLOCKS - 1])
    pages.check([])
    for ids in ([BLOCKS], [-1], [0, 99]):
        with pytest.raises(InvalidRequest, match="block ids"):
            pages.check(ids)


def test_runs_and_groups() -> None:
    assert list(slot_runs([0, 10, 20, 40, 50, 0], 10)) == [(0, 3), (3, 5), (5, 6)]
    assert list(slot_runs([], 10)) == []
    assert list(joint_runs([0, 10, 20, 30], [5, 6, 8, 9], 10)) == [(0, 2), (2, 4)]
    assert list(groups(5, 10, 25)) == [(0, 2), (2, 4), (4, 5)]
    assert list(groups(2, 100, 25)) == [(0, 1), (1, 2)]
    assert list(groups(0, 100, 25)) == []
