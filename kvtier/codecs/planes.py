"""Filters that lay bytes which resemble each other side by side.

Of a 16-bit float the first byte holds the sign and most of the exponent, the second one nearly random bits of
the mantissa. Compressors that look for repeated bytes find nothing while the two alternate. Cut into planes,
all first bytes and then all second ones, the former compress well and the latter are kept as they are.

Each filter works on one chunk, small enough that planes and chunk stay in the processor's cache. All are
whole-array numpy operations on machine words, which run in vector instructions and release the GIL; they
are faster than strided copies, and need no further library.

Bytes that are floats themselves (fp8) have no filter: cut into halves they compress worse (there too).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class PlaneFilter(ABC):
    """How a chunk is cut into planes of equal size.

    Attributes
    ----------
    id
        In every payload; never reused.
    word_bytes
        A chunk that is cut has a multiple of this size.
    planes
        How many.
    """

    id: ClassVar[int]
    word_bytes: ClassVar[int]
    planes: ClassVar[int]

    @abstractmethod
    def split(self, chunk: Bytes, planes: Sequence[Bytes]) -> None:
        """Write each plane of `chunk` into ``planes[i]``, of ``len(chunk) // self.planes`` bytes."""

    @abstractmethod
    def merge(self, planes: Sequence[Bytes], chunk: Bytes) -> None:
        """Undo `split`."""


class NoFilter(PlaneFilter):
    """One plane: the chunk."""

    id = 0
    word_bytes = 1
    planes = 1

    def split(self, chunk: Bytes, planes: Sequence[Bytes]) -> None:
        """Copy."""
        planes[0][:] = chunk

    def merge(self, planes: Sequence[Bytes], chunk: Bytes) -> None:
        """Copy."""
        chunk[:] = planes[0]


class BytesOf16(PlaneFilter):
    """Low bytes, then high bytes of 16-bit words."""

    id = 1
    word_bytes = 2
    planes = 2

    def split(self, chunk: Bytes, planes: Sequence[Bytes]) -> None:
        """A narrowing cast gives the low bytes, and after a shift the high ones."""
        words = chunk.view("<u2")
        np.copyto(planes[0], words, casting="unsafe")
        np.copyto(planes[1], words >> 8, casting="unsafe")

    def merge(self, planes: Sequence[Bytes], chunk: Bytes) -> None:
        """Widen, shift, add."""
        words = chunk.view("<u2")
        np.copyto(words, planes[1])
        words <<= 8
        words |= planes[0]


class BytesOf32(PlaneFilter):
    """The four bytes of 32-bit words, lowest first."""

    id = 2
    word_bytes = 4
    planes = 4

    def split(self, chunk: Bytes, planes: Sequence[Bytes]) -> None:
        """As for 16 bits, four times."""
        words = chunk.view("<u4")
        for number, plane in enumerate(planes):
            np.copyto(plane, words >> (8 * number), casting="unsafe")

    def merge(self, planes: Sequence[Bytes], chunk: Bytes) -> None:
        """From the highest byte down."""
        words = chunk.view("<u4")
        np.copyto(words, planes[3])
        for plane in (planes[2], planes[1], planes[0]):
            words <<= 8
            words |= plane


FILTERS: Final[tuple[PlaneFilter, ...]] = (NoFilter(), BytesOf16(), BytesOf32())
"""By id."""
