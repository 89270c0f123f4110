"""The form of a payload: planes of chunks, each compressed or as it is.

===================  =====================================================================
bytes                what
===================  =====================================================================
1                    version of this form, 1
1                    wire id of the codec
1                    id of the filter (`kvtier.codecs.planes`)
1                    binary logarithm of the chunk's size, 12 .. 20
4                    size of the block
4 for each plane     its stored size; equal to its size: as it is, smaller: compressed
rest                 the planes, chunk after chunk; then what of the block is no whole word
===================  =====================================================================

Numbers are little endian. A block is cut into chunks of one size, the last one smaller. Everything in the
head is compared with what the reader knows and with the length of the payload before anything is read or
allocated, and a compressed plane is given exactly the room that its plane has: a payload of lies costs its
reader one chunk.
"""

from __future__ import annotations

import struct
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.codecs import MIN_GAIN
from kvtier.codecs.planes import FILTERS, Bytes, PlaneFilter
from kvtier.errors import ConfigError, Corruption
from kvtier.interfaces import Codec

CHUNK_BYTES_LOG2: Final = 18
"""Chunk and planes fit the cache of a core (256 KiB and 256 KiB) and are long enough to compress well."""
MAX_CHUNK_BYTES_LOG2: Final = 20
_CHUNK_LOG2_RANGE: Final = range(12, MAX_CHUNK_BYTES_LOG2 + 1)
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<BBBBI")
_PROBE_BYTES: Final = 8192
_MIN_PLANE_GAIN: Final = 1 / 32
"""A plane that gains less is kept as it is: it then costs its reader a copy only."""
_FILTER_OF_ELEMENT_BYTES: Final = {1: 0, 2: 1, 4: 2}
ANY_ELEMENTS: Final = 0


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Where a chunk lies in its block, and how much of it is whole words."""

    begin: int
    words_end: int


class _Scratch(threading.local):
    """Planes of one chunk, for each thread its own."""

    planes: Bytes

    def __init__(self) -> None:
        self.planes = np.empty(1 << CHUNK_BYTES_LOG2, np.uint8)


class FrameCodec(Codec):
    """A compressor of bytes behind a plane filter.

    Parameters
    ----------
    element_bytes
        1, 2 or 4; `ANY_ELEMENTS`: found out for each block, by a look at its middle.
    """

    def __init__(self, element_bytes: int = 2, *, filter: PlaneFilter | None = None) -> None:
        if filter is not None:
            self._filters: Sequence[PlaneFilter] = (filter,)
        elif element_bytes == ANY_ELEMENTS:
            self._filters = FILTERS
        elif element_bytes in _FILTER_OF_ELEMENT_BYTES:
            self._filters = (FILTERS[_FILTER_OF_ELEMENT_BYTES[element_bytes]],)
        else:
            raise ConfigError(f"no filter for elements of {element_bytes} bytes: allowed are 1, 2 and 4")
        self._scratch = _Scratch()

    @abstractmethod
    def _compress(self, plane: Bytes) -> bytes:
        """Any bytes that `_decompress` understands."""

    @abstractmethod
    def _decompress(self, stored: memoryview, size_bytes: int) -> bytes:
        """What was compressed; never allocates more than `size_bytes` and what the library itself needs.

        Raises
        ------
        Corruption
            `stored` is damaged. A wrong size of the result is for the caller to see.
        """

    # ---- encode

    def encode(self, blocks: Sequence[memoryview]) -> list[bytes | None]:
        """See `Codec.encode`."""
        return [self._encode(block) for block in blocks]

    def _encode(self, view: memoryview) -> bytes | None:
        if not len(view):
            return None
        block = np.frombuffer(view, np.uint8)
        filter = self._fitting(block)
        most = int(len(block) * (1 - MIN_GAIN))
        table: list[int] = []
        body: list[bytes] = []
        spent = _HEAD.size
        for chunk in _chunks(len(block), 1 << CHUNK_BYTES_LOG2, filter):
            for plane in self._split(filter, block[chunk.begin : chunk.words_end]):
                stored = self._pack(plane)
                table.append(len(stored))
                body.append(stored)
                spent += 4 + len(stored)
            if spent > most:
                return None
        tail = bytes(view[len(view) - len(view) % filter.word_bytes :])
        if spent + len(tail) > most:
            return None
        head = _HEAD.pack(_VERSION, self.wire_id, filter.id, CHUNK_BYTES_LOG2, len(block))
        return b"".join((head, np.array(table, "<u4").tobytes(), *body, tail))

    def _fitting(self, block: Bytes) -> PlaneFilter:
        """The filter whose planes of a piece of the block compress best."""
        if len(self._filters) == 1:
            return self._filters[0]
        begin = len(block) // 2 // _PROBE_BYTES * _PROBE_BYTES
        piece = block[begin : begin + _PROBE_BYTES]

        def size(filter: PlaneFilter) -> int:
            words = piece[: len(piece) - len(piece) % filter.word_bytes]
            if not len(words):
                return len(piece)
            return sum(min(len(plane), len(self._compress(plane))) for plane in self._split(filter, words))

        return min(self._filters, key=size)

    def _split(self, filter: PlaneFilter, words: Bytes) -> list[Bytes]:
        if filter.planes == 1:
            return [words]
        planes = _cut(self._scratch.planes, len(words), filter.planes)
        filter.split(words, planes)
        return planes

    def _pack(self, plane: Bytes) -> bytes:
        """The plane compressed, or as it is; a look at its beginning saves the effort on what is random."""
        if len(plane) > 2 * _PROBE_BYTES:
            probe = plane[:_PROBE_BYTES]
            if len(self._compress(probe)) > _PROBE_BYTES * (1 - _MIN_PLANE_GAIN):
                return plane.tobytes()
        stored = self._compress(plane)
        return stored if len(stored) <= len(plane) * (1 - _MIN_PLANE_GAIN) else plane.tobytes()

    # ---- decode

    def decode(self, payload: memoryview, into: memoryview) -> None:
        """See `Codec.decode`."""
        assert not into.readonly
        filter, chunk_bytes = self._check_head(payload, len(into))
        block = np.frombuffer(into, np.uint8) if len(into) else np.empty(0, np.uint8)
        tail_bytes = len(into) % filter.word_bytes
        chunks = list(_chunks(len(block), chunk_bytes, filter)) if len(block) else []
        sizes = self._check_table(payload, chunks, filter, tail_bytes)
        at = _HEAD.size + 4 * len(sizes)
        numbers = iter(sizes)
        for chunk in chunks:
            target = block[chunk.begin : chunk.words_end]
            plane_bytes = len(target) // filter.planes
            planes: list[Bytes] = []
            for _ in range(filter.planes):
                stored_bytes = next(numbers)
                planes.append(self._unpack(payload[at : at + stored_bytes], plane_bytes))
                at += stored_bytes
            filter.merge(planes, target)
        if tail_bytes:
            into[len(into) - tail_bytes :] = payload[at:]

    def _check_head(self, payload: memoryview, block_bytes: int) -> tuple[PlaneFilter, int]:
        if len(payload) < _HEAD.size:
            raise Corruption(f"a payload has {len(payload)} bytes, less than its head: drop the block")
        version, wire_id, filter_id, chunk_log2, said_bytes = _HEAD.unpack_from(payload)
        if version != _VERSION or wire_id != self.wire_id:
            raise Corruption(f"a payload is of codec {wire_id}, form {version}: drop the block")
        if filter_id >= len(FILTERS) or chunk_log2 not in _CHUNK_LOG2_RANGE:
            raise Corruption(f"a payload has filter {filter_id}, chunks of 2^{chunk_log2}: drop the block")
        if said_bytes != block_bytes:
            raise Corruption(
                f"a payload is of a block of {said_bytes} bytes, not {block_bytes}: drop the block"
            )
        return FILTERS[filter_id], 1 << chunk_log2

    @staticmethod
    def _check_table(
        payload: memoryview, chunks: Sequence[_Chunk], filter: PlaneFilter, tail_bytes: int
    ) -> list[int]:
        count = len(chunks) * filter.planes
        begin = _HEAD.size + 4 * count
        if len(payload) < begin:
            raise Corruption("a payload ends within its table: drop the block")
        table = np.frombuffer(payload, "<u4", count, _HEAD.size) if count else np.empty(0, "<u4")
        words = [chunk.words_end - chunk.begin for chunk in chunks]
        allowed = np.repeat(np.array(words, np.int64) // filter.planes, filter.planes)
        if (table > allowed).any():
            raise Corruption("a payload names a plane that is larger than it can be: drop the block")
        if begin + int(table.sum(dtype=np.int64)) + tail_bytes != len(payload):
            raise Corruption("a payload is shorter or longer than its table says: drop the block")
        sizes: list[int] = table.tolist()
        return sizes

    def _unpack(self, stored: memoryview, plane_bytes: int) -> Bytes:
        if len(stored) == plane_bytes:
            return np.frombuffer(stored, np.uint8) if plane_bytes else np.empty(0, np.uint8)
        plane = self._decompress(stored, plane_bytes)
        if len(plane) != plane_bytes:
            raise Corruption(f"a plane has {len(plane)} bytes, not {plane_bytes}: drop the block")
        return np.frombuffer(plane, np.uint8)


def _chunks(block_bytes: int, chunk_bytes: int, filter: PlaneFilter) -> Iterator[_Chunk]:
    words_end = block_bytes - block_bytes % filter.word_bytes
    for begin in range(0, words_end, chunk_bytes):
        yield _Chunk(begin, min(begin + chunk_bytes, words_end))


def _cut(scratch: Bytes, size_bytes: int, planes: int) -> list[Bytes]:
    each = size_bytes // planes
    return [scratch[i * each : (i + 1) * each] for i in range(planes)]
