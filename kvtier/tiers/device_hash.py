"""XXH3-128 of blocks that lie in device memory, computed there: what is read past host memory is verified.

The algorithm's long form (more than 240 bytes) is eight 64-bit lanes that take in 64 bytes at a time, and are
scrambled after each 1024. Within 1024 bytes the order does not matter, so all sums of all blocks are computed
at once; only the scrambling goes step by step, for all blocks together. The last 64 bytes a block are folded
on the host. The same checksum as everywhere else: nothing is stored beside the blocks for this.

Torch has no unsigned 64-bit arithmetic, but its signed one wraps around, on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

GROUP_BYTES: Final = 32 << 20
"""Bytes that are worked on at once: some times as much device memory is taken meanwhile."""
LONG_FROM_BYTES: Final = 241
_STRIPE: Final = 64
_STRIPES: Final = 16
_CHUNK: Final = _STRIPE * _STRIPES
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8"
    "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb17"
    "0ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_MASK: Final = 2**64 - 1
_P32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_BEGIN: Final = (_P32[2], _P64[0], _P64[1], _P64[2], _P64[3], _P32[1], _P64[4], _P32[0])


def digests(memory: Any, offsets: Sequence[int], block_bytes: int) -> list[bytes]:
    """The checksums of blocks in a tensor of bytes: 16 bytes each, big-endian, as `xxhash` gives them.

    Parameters
    ----------
    memory
        A torch tensor of bytes, one-dimensional, on any device.
    offsets
        Where each block begins.
    block_bytes
        Of each; at least `LONG_FROM_BYTES`.
    """
    assert block_bytes >= LONG_FROM_BYTES, "shorter blocks are hashed in another way"
    import torch

    found: list[bytes] = []
    step = max(1, GROUP_BYTES // block_bytes)
    for first in range(0, len(offsets), step):
        rows = torch.stack([memory[at : at + block_bytes] for at in offsets[first : first + step]])
        lanes = _lanes(torch, rows).cpu().numpy().view(np.uint64)
        found += [_fold([int(lane) for lane in block], block_bytes) for block in lanes]
    return found


def _words(torch: Any, at: int, stripes: int, device: Any) -> Any:
    """The secret as `stripes` rows of eight lanes, each row eight bytes further."""
    rows = [np.frombuffer(_SECRET, np.int64, 8, at + 8 * stripe) for stripe in range(stripes)]
    return torch.from_numpy(np.stack(rows)).to(device)


def _lanes(torch: Any, rows: Any) -> Any:
    """The eight lanes of each row's bytes before the last folding: ``[n, 8]``, signed."""
    count, size_bytes = rows.shape
    device = rows.device
    secret = _words(torch, 0, _STRIPES, device)
    scramble = _words(torch, len(_SECRET) - _STRIPE, 1, device)[0]
    begin = np.array(_BEGIN, np.uint64).view(np.int64)
    lanes = torch.from_numpy(begin).to(device).repeat(count, 1)
    chunks = (size_bytes - 1) // _CHUNK
    sums = _sums(_as_words(torch, rows[:, : chunks * _CHUNK]).view(count, chunks, _STRIPES, 8), secret)
    for chunk in range(chunks):
        lanes += sums[:, chunk]
        lanes ^= (lanes >> 47) & 0x1FFFF
        lanes ^= scramble
        lanes *= _P32[0]
    stripes = (size_bytes - 1 - chunks * _CHUNK) // _STRIPE
    if stripes:
        begin_bytes = chunks * _CHUNK
        rest = _as_words(torch, rows[:, begin_bytes : begin_bytes + stripes * _STRIPE])
        lanes += _sums(rest.view(count, 1, stripes, 8), secret[:stripes])[:, 0]
    last = _as_words(torch, rows[:, size_bytes - _STRIPE :])
    lanes += _sums(last.view(count, 1, 1, 8), _words(torch, len(_SECRET) - _STRIPE - 7, 1, device))[:, 0]
    return lanes


def _as_words(torch: Any, part: Any) -> Any:
    """A copy, since a part of a row need not begin where a word may."""
    return part.clone(memory_format=torch.contiguous_format).view(-1).view(torch.int64)


def _sums(words: Any, secret: Any) -> Any:
    """What ``[n, chunks, stripes, 8]`` words add to the lanes in each chunk."""
    keyed = words ^ secret
    products = (keyed & 0xFFFFFFFF) * ((keyed >> 32) & 0xFFFFFFFF)
    return products.sum(2) + words.sum(2)[..., [1, 0, 3, 2, 5, 4, 7, 6]]


def _fold(lanes: Sequence[int], size_bytes: int) -> bytes:
    low = _merged(lanes, 11, size_bytes * _P64[0] & _MASK)
    high = _merged(lanes, len(_SECRET) - _STRIPE - 11, ~(size_bytes * _P64[1]) & _MASK)
    return high.to_bytes(8, "big") + low.to_bytes(8, "big")


def _merged(lanes: Sequence[int], secret_at: int, start: int) -> int:
    total = start
    for at in range(0, 8, 2):
        product = 1
        for lane in (at, at + 1):
            begin = secret_at + 8 * lane
            product *= lanes[lane] ^ int.from_bytes(_SECRET[begin : begin + 8], "little")
        total += (product ^ product >> 64) & _MASK
    total &= _MASK
    total ^= total >> 37
    total = total * 0x165667919E3779F9 & _MASK
    return total ^ total >> 32
