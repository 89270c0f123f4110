"""Pages on a CUDA device. Imported only where an engine has some.

The arena is pinned once, so that copies run at the speed of the bus. Blocks pass a small buffer on the
device: runs of slots cross the bus in one piece each, and one kernel a layer distributes them to pages.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from kvtier.client.copies import SlotMemory, slot_runs
from kvtier.client.device import DeviceMapping
from kvtier.client.mapping import ArenaMapping
from kvtier.errors import TierFault
from kvtier.types import Layout

GROUP_BYTES: Final = 32 << 20
"""Bytes of the buffer on the device: large against a copy's latency, small against the KV memory."""

logger = logging.getLogger("kvtier.client")


class CudaCopier:
    """See `kvtier.client.copies.Copier`. One copy at a time: they share the bus and the buffer."""

    device = "cuda"
    load_group_bytes = GROUP_BYTES
    store_group_bytes = GROUP_BYTES

    def __init__(self, layout: Layout, tensors: Sequence[Any]) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._layers = [_as_rows(tensor, layout.layer_block_bytes) for tensor in tensors]
        self._device = self._layers[0].device
        self._stream = torch.cuda.Stream(self._device)
        count = max(1, GROUP_BYTES // layout.block_bytes)
        shape = (count, layout.num_layers, layout.layer_block_bytes)
        self._buffer = torch.empty(shape, dtype=torch.uint8, device=self._device)

    def to_pages(self, memory: SlotMemory, offsets: Sequence[int], ids: Sequence[int]) -> None:
        """See `Copier`. Slots in device memory take the same way, from device to device."""
        with self._working():
            if isinstance(memory, ArenaMapping):
                pin(memory)
            for begin, slots in self._slots(memory, offsets):
                self._buffer[begin : begin + len(slots)].copy_(slots, non_blocking=True)
            rows = torch.tensor(ids, device=self._device)
            for layer, pages in enumerate(self._layers):
                pages.index_copy_(0, rows, self._buffer[: len(ids), layer])

    def to_slots(self, arena: ArenaMapping, offsets: Sequence[int], ids: Sequence[int]) -> None:
        """See `Copier`."""
        with self._working():
            pin(arena)
            rows = torch.tensor(ids, device=self._device)
            for layer, memory in enumerate(self._layers):
                self._buffer[: len(ids), layer] = memory.index_select(0, rows)
            for begin, slots in self._slots(arena, offsets):
                slots.copy_(self._buffer[begin : begin + len(slots)], non_blocking=True)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """One copy on the stream; an error of the device is a fault of kvtier's, not of the engine's."""
        try:
            with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                try:
                    yield
                finally:
                    self._stream.synchronize()  # nothing runs any more, whatever happened
        except RuntimeError as error:
            raise TierFault(f"a copy on {self._device} failed ({error}): nothing was cached") from error

    def _slots(self, source: SlotMemory, offsets: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """Each run of slots with its position, as ``[n, layers, layer_block_bytes]`` of where they lie."""
        layout = self._layout
        memory = source.tensor() if isinstance(source, DeviceMapping) else torch.from_numpy(source.bytes)
        shape = (layout.num_layers, layout.layer_block_bytes)
        return [
            (
                begin,
                memory.as_strided(
                    (end - begin, *shape), (layout.slot_bytes, shape[1], 1), storage_offset=offsets[begin]
                ),
            )
            for begin, end in slot_runs(offsets, layout.slot_bytes)
        ]


_pinned: weakref.WeakKeyDictionary[ArenaMapping, int] = weakref.WeakKeyDictionary()
"""How many bytes of each arena are pinned, or were tried in vain."""
_pinning = threading.Lock()


def pin(arena: ArenaMapping) -> None:
    """Register the arena's memory with CUDA until it is unmapped, and what it has grown by since then.

    Without it copies are slower. A part that cannot be pinned is not tried again.
    """
    with _pinning:
        begin, end = _pinned.get(arena, 0), arena.allocated_bytes
        if begin >= end:
            return
        _pinned[arena] = end
        runtime = torch.cuda.cudart()
        address = arena.address + begin
        status = runtime.cudaHostRegister(address, end - begin, 0)
        if int(status) != 0:
            logger.warning(
                "kvtier: %d bytes of the arena could not be pinned (CUDA error %d): raise memlock",
                end - begin,
                int(status),
            )
            return
        arena.before_unmap(lambda: runtime.cudaHostUnregister(address))


def _as_rows(tensor: Any, block_bytes: int) -> torch.Tensor:
    """A layer as ``[num_blocks, block_bytes]`` bytes of the same memory."""
    if tensor.storage_offset() * tensor.element_size() + block_bytes > tensor.untyped_storage().nbytes():
        raise TierFault("a layer's tensor ends beyond its storage: nothing can be copied")
    rows = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return rows.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * tensor.element_size(),
        (tensor.shape[0], block_bytes),
        (tensor.stride(0) * tensor.element_size(), 1),
    )
