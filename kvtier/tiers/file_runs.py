"""Blocks between slots and the caller's memory: neighbours in one call, verified as they come.

A **move** is one block; a **run** is moves whose slots follow each other. A slot is a header page, the
block's whole pages, and one more page where the block does not end with one. Whole pages that lie on whole
pages of the caller's memory go there directly; the rest passes through the thread's scratch memory.

Where a codec's payload stands for the block, the slot is not full, so such a move is the last one of its run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash

from kvtier import logs
from kvtier.codecs import codec_of
from kvtier.errors import Corruption
from kvtier.tiers import file_format
from kvtier.tiers.file_format import CODEC_RAW, HEADER_BYTES, Form, Place
from kvtier.tiers.file_io import Stripe
from kvtier.tiers.file_threads import SCRATCH_BYTES, Scratch
from kvtier.types import PAGE_SIZE_BYTES, BlockRecord, whole_pages

RUN_BYTES: Final = 2 << 20
"""A call into the kernel moves at most so much."""
MAX_RUN_MOVES: Final = 256
"""Three buffers each: below the kernel's bound of 1024 for a call."""
_COPY_BYTES: Final = 256 << 10
_MAX_BUFFERS: Final = 1000

_log = logs.get("file")


@dataclass(slots=True)
class Move:
    """One block, its slot and its memory.

    Attributes
    ----------
    number
        Position in the call.
    offset_bytes
        Where the slot begins in `stripe`; `place` has where it begins in the tier.
    memory
        `record.block_bytes` long.
    form
        What stands behind the header.
    payload
        To be written, where that is not the block itself.
    header
        What to write, or what was read.
    """

    number: int
    stripe: Stripe
    offset_bytes: int
    place: Place
    record: BlockRecord
    memory: memoryview
    form: Form
    payload: bytes = b""
    header: bytearray = field(default_factory=lambda: bytearray(HEADER_BYTES))

    @property
    def is_full(self) -> bool:
        """The slot has no pages that are not used: the next slot's header follows at once."""
        return (
            self.form.codec == CODEC_RAW
            and PAGE_SIZE_BYTES + whole_pages(self.record.block_bytes) == self.place.slot_bytes
        )


def runs(moves: Iterable[Move]) -> list[list[Move]]:
    """Moves that can go together, those of different stripes by turns."""
    found: dict[Stripe, list[list[Move]]] = {}
    for move in sorted(moves, key=lambda move: (id(move.stripe), move.offset_bytes)):
        its = found.setdefault(move.stripe, [])
        if not its or not _continues(its[-1], move):
            its.append([])
        its[-1].append(move)
    longest = max(map(len, found.values()), default=0)
    return [its[i] for i in range(longest) for its in found.values() if i < len(its)]


def _continues(run: Sequence[Move], move: Move) -> bool:
    last = run[-1]
    return (
        len(run) < MAX_RUN_MOVES
        and last.is_full
        and last.offset_bytes + last.place.slot_bytes == move.offset_bytes
        and move.offset_bytes + move.place.slot_bytes - run[0].offset_bytes <= RUN_BYTES
    )


def read_run(run: Sequence[Move], medium: bytes, scratch: Scratch) -> list[int]:
    """Fill the moves' memory; returns the numbers of those whose slot holds something else.

    The checksum is computed here, while the bytes are in this core's cache.
    """
    vector = _Vector(run[0].stripe, run[0].offset_bytes, scratch, writing=False)
    payload = memoryview(b"")
    for move in run:
        vector.add(memoryview(move.header), PAGE_SIZE_BYTES)
        if move.form.codec == CODEC_RAW:
            vector.add_block(move.memory)
        else:
            assert move is run[-1], "two payloads would share their memory"
            payload = scratch.payload(whole_pages(move.form.payload_bytes))
            vector.add_block(payload)
    vector.go()
    return [move.number for move in run if not _is_right(move, medium, payload)]


def write_run(run: Sequence[Move], scratch: Scratch) -> None:
    """Write the moves' headers, and their memory or payload."""
    vector = _Vector(run[0].stripe, run[0].offset_bytes, scratch, writing=True)
    for move in run:
        vector.add(memoryview(move.header), PAGE_SIZE_BYTES)
        if move.form.codec == CODEC_RAW:
            vector.add_block(move.memory)
        else:
            assert move is run[-1], "two payloads would share their memory"
            pages = scratch.payload(whole_pages(len(move.payload)))
            pages[: len(move.payload)] = move.payload
            pages[len(move.payload) :] = bytes(len(pages) - len(move.payload))
            move.payload = b""  # the call may have many more: what is copied is not kept until its end
            vector.add_block(pages)
    vector.go()


def _is_right(move: Move, medium: bytes, payload: memoryview) -> bool:
    header = file_format.read_header(medium, move.header)
    if not file_format.says(header, move.record, move.place, move.form):
        return False
    if move.form.codec != CODEC_RAW:
        try:
            codec_of(move.form.codec).decode(payload[: move.form.payload_bytes], move.memory)
        except Corruption:
            return False
        except Exception as error:  # a library that fails, or is not there; perhaps while the node starts
            _log.warning("a codec failed: a block is a miss", codec=move.form.codec, error=repr(error))
            return False
    return xxhash.xxh3_128_digest(move.memory) == move.record.checksum


class _Vector:
    """The next call into the kernel in the making; goes whenever it is full."""

    def __init__(self, stripe: Stripe, offset_bytes: int, scratch: Scratch, *, writing: bool) -> None:
        self._stripe = stripe
        self._offset_bytes = offset_bytes
        self._scratch = scratch.memory
        self._used_bytes = 0
        self._size_bytes = 0
        self._writing = writing
        self._buffers: list[memoryview] = []
        self._copies: list[tuple[memoryview, memoryview]] = []

    def add_block(self, memory: memoryview) -> None:
        """A block and what fills up its last page."""
        whole_bytes = memory.nbytes // PAGE_SIZE_BYTES * PAGE_SIZE_BYTES
        if self._stripe.direct and _address(memory) % PAGE_SIZE_BYTES:
            for begin in range(0, whole_bytes, _COPY_BYTES):
                piece = memory[begin : min(begin + _COPY_BYTES, whole_bytes)]
                self.add(piece, piece.nbytes)
        else:
            for begin in range(0, whole_bytes, RUN_BYTES):
                self._append(memory[begin : min(begin + RUN_BYTES, whole_bytes)])
        if whole_bytes < memory.nbytes:
            self.add(memory[whole_bytes:], PAGE_SIZE_BYTES)

    def add(self, memory: memoryview, size_bytes: int) -> None:
        """`size_bytes` by way of the scratch memory, of which `memory` has or gets the first."""
        if self._used_bytes + size_bytes > SCRATCH_BYTES:
            self.go()
        pages = self._scratch[self._used_bytes : self._used_bytes + size_bytes]
        used_bytes = self._used_bytes + size_bytes
        self._append(pages)
        self._used_bytes = used_bytes
        if self._writing:
            pages[: memory.nbytes] = memory
            pages[memory.nbytes :] = bytes(size_bytes - memory.nbytes)
        else:
            self._copies.append((memory, pages))

    def _append(self, buffer: memoryview) -> None:
        full = self._size_bytes + buffer.nbytes > RUN_BYTES + PAGE_SIZE_BYTES * MAX_RUN_MOVES
        if self._buffers and (full or len(self._buffers) == _MAX_BUFFERS):
            self.go()
        self._buffers.append(buffer)
        self._size_bytes += buffer.nbytes

    def go(self) -> None:
        """Move what was added."""
        if not self._buffers:
            return
        if self._writing:
            self._stripe.write(self._offset_bytes, self._buffers)
        else:
            self._stripe.read(self._offset_bytes, self._buffers)
            for memory, pages in self._copies:
                memory[:] = pages[: memory.nbytes]
        self._offset_bytes += self._size_bytes
        self._used_bytes = self._size_bytes = 0
        self._buffers = []
        self._copies = []


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
