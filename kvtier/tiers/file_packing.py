"""Which blocks the file tier writes as a codec's payload: those that are read faster so.

``auto`` compares what the medium moves with what the codecs gain on the blocks of each layout, sampled as
they come (`kvtier.codecs.adaptive`): on an NVMe drive blocks go as they are, on a network disk they may not.
A codec that is named is used wherever blocks become a tenth smaller, on a fast medium for its wear's sake.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvtier import logs
from kvtier.codecs import make_codec
from kvtier.codecs.adaptive import Adaptive
from kvtier.codecs.frame import ANY_ELEMENTS
from kvtier.errors import ConfigError
from kvtier.tiers.file_format import Form
from kvtier.tiers.file_io import Rates
from kvtier.tiers.file_runs import Move
from kvtier.types import whole_pages

AUTO: Final = "auto"
CHOICES: Final = ("raw", "lz4", "zstd", AUTO)
PAUSE_S: Final = 60.0
"""After a codec has failed, blocks are written as they are for so long."""
_ANY_GAIN_PAYS: Final = 1.0
"""Bytes a second of a medium so slow that only the ratio counts."""
_UNKNOWN: Final = 1e15
"""A medium of which nothing is known yet is taken for so fast that no codec pays."""

Pack = Callable[[Sequence[Move]], None]

_log = logs.get("file")


def make_pack(name: str, rates: Rates, clock_s: Callable[[], float] = time.monotonic) -> Pack:
    """What gives moves of one stripe their form and payload, before they are written; thread-safe.

    Raises
    ------
    ConfigError
        The name is none of `CHOICES`.
    """
    if name not in CHOICES:
        raise ConfigError(f"nvme_codec is {name!r}: allowed are {', '.join(CHOICES)}")
    if name == "raw":
        return lambda moves: None
    names = ("lz4", "zstd") if name == AUTO else (name,)
    adaptive = Adaptive([make_codec(each, ANY_ELEMENTS) for each in names])

    def bytes_per_s() -> float:
        if name != AUTO:
            return _ANY_GAIN_PAYS
        return rates.reading.bytes_per_s or rates.writing.bytes_per_s or _UNKNOWN

    paused_until_s = -math.inf

    def pack(moves: Sequence[Move]) -> None:
        nonlocal paused_until_s
        if clock_s() < paused_until_s:
            return
        for fingerprint, group in itertools.groupby(moves, lambda move: move.record.fingerprint):
            its = [move for move in group if whole_pages(move.record.block_bytes) > whole_pages(1)]
            if not its:
                continue
            try:
                codec, payloads = adaptive.encode(fingerprint, [move.memory for move in its], bytes_per_s())
            except Exception as error:  # a library that fails costs what it would have gained, not the block
                paused_until_s = clock_s() + PAUSE_S
                _log.warning("a codec failed: blocks are written as they are", error=repr(error))
                return
            for move, payload in zip(its, payloads, strict=True):
                if payload is not None and whole_pages(len(payload)) < whole_pages(move.record.block_bytes):
                    move.form, move.payload = Form(codec.wire_id, len(payload)), payload

    return pack
