"""Whether a codec pays, for each namespace anew, from samples of what is really stored.

A block that goes at `r` bytes a second as it is takes ``1 / r`` seconds a byte. Through a codec of ratio `q`
that decodes at `d` it takes ``1 / (q r) + 1 / d``. The steps overlap in part, so this is what a codec costs
at most: it is used where even so it gains `MARGIN`. On a way between two nodes one piece is encoded while
the one before travels and a third is decoded: there the slowest step counts, encoding at `e` among them.

Ratio and speeds are measured on a piece of a block now and then, in the thread that encodes, under the load
that there is: while the processor is busy codecs are slow, and blocks go as they are.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.codecs.raw import RawCodec
from kvtier.errors import ConfigError
from kvtier.interfaces import Codec

MARGIN: Final = 0.1
SAMPLE_BYTES: Final = 256 << 10
FIRST_SAMPLES: Final = 4
"""So many of the first blocks of a namespace are sampled, and nothing is encoded before the first."""
SAMPLE_EVERY_BLOCKS: Final = 512
"""A power of two; before it each power of two is one too, so that first ones that were unlucky, since the
processor was just busy, are soon outweighed."""
MAX_NAMESPACES: Final = 256
_WEIGHT: Final = 0.25
_MAX_CHANGE: Final = 4.0
_STEP_BYTES: Final = 4096
_NO_COST_BYTES_PER_S: Final = 1e15


@dataclass(frozen=True, slots=True)
class Sample:
    """What a codec makes of a namespace's blocks: size before by size after, bytes of blocks a second."""

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    def s_per_byte(self, bytes_per_s: float, *, is_pipelined: bool) -> float:
        """What one byte of a block takes through the codec and a medium, or a way, of this rate."""
        moved_s, decoded_s = 1 / (self.ratio * bytes_per_s), 1 / self.decode_bytes_per_s
        return max(moved_s, decoded_s, 1 / self.encode_bytes_per_s) if is_pipelined else moved_s + decoded_s


class _Warm(threading.local):
    """Codecs that this thread has used: the first use makes what all others find, and is no measure."""

    def __init__(self) -> None:
        self.codecs: set[int] = set()


@dataclass(slots=True)
class _Namespace:
    blocks: int = 0
    samples: dict[int, Sample] = field(default_factory=dict)


class Adaptive:
    """Chooses among codecs; thread-safe.

    Parameters
    ----------
    candidates
        Exact codecs of different wire ids; raw is always one.
    clock
        Seconds; for tests.
    """

    def __init__(
        self, candidates: Sequence[Codec], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        for codec in candidates:
            if codec.is_lossy:
                raise ConfigError(f"{codec.name} is lossy: no codec is lossy by choice of the node")
        self._raw: Codec = RawCodec()
        self._candidates = {
            codec.wire_id: codec for codec in candidates if codec.wire_id != self._raw.wire_id
        }
        self._clock = clock
        self._namespaces: OrderedDict[bytes, _Namespace] = OrderedDict()
        self._lock = threading.Lock()
        self._warm = _Warm()

    def encode(
        self,
        fingerprint: bytes,
        blocks: Sequence[memoryview],
        bytes_per_s: float,
        *,
        is_pipelined: bool = False,
        among: Collection[int] | None = None,
    ) -> tuple[Codec, list[bytes | None]]:
        """The codec that pays, and what it makes of these blocks of one namespace.

        Parameters
        ----------
        fingerprint
            Of the blocks' layout.
        bytes_per_s
            What medium or link move, as measured.
        is_pipelined
            Whether somebody waits for all of it, and its steps run at the same time: a transfer. For a
            demotion nobody waits, and what is written now is read much later.
        among
            Wire ids that whoever decodes knows; None: all.
        """
        self._sample_some(fingerprint, blocks)
        codec = self.choose(fingerprint, bytes_per_s, is_pipelined=is_pipelined, among=among)
        return codec, codec.encode(blocks)

    def choose(
        self,
        fingerprint: bytes,
        bytes_per_s: float,
        *,
        is_pipelined: bool = False,
        among: Collection[int] | None = None,
    ) -> Codec:
        """The codec that pays; raw where none does, or nothing is known yet."""
        best, best_s = self._raw, (1 - MARGIN) / bytes_per_s
        for wire_id, sample in self.samples(fingerprint).items():
            cost_s = sample.s_per_byte(bytes_per_s, is_pipelined=is_pipelined)
            if cost_s < best_s and (among is None or wire_id in among):
                best, best_s = self._candidates[wire_id], cost_s
        return best

    def skips(
        self,
        fingerprint: bytes,
        bytes_per_s: float,
        *,
        is_pipelined: bool = False,
        among: Collection[int] | None = None,
    ) -> bool:
        """Whether the next block goes as it is and is no sample, so that `encode` need not be called: counts
        it. Costs microseconds, for whoever calls `encode` in a thread.
        """
        with self._lock:
            known = self._namespaces.get(fingerprint)
            if known is None or _is_sample(known.blocks):
                return False
        if self.choose(fingerprint, bytes_per_s, is_pipelined=is_pipelined, among=among) is not self._raw:
            return False
        with self._lock:
            known.blocks += 1
        return True

    def samples(self, fingerprint: bytes) -> dict[int, Sample]:
        """What has been measured, by wire id."""
        with self._lock:
            known = self._namespaces.get(fingerprint)
            return {} if known is None else dict(known.samples)

    def _sample_some(self, fingerprint: bytes, blocks: Sequence[memoryview]) -> None:
        with self._lock:
            known = self._namespaces.pop(fingerprint, None) or _Namespace()
            self._namespaces[fingerprint] = known
            while len(self._namespaces) > MAX_NAMESPACES:
                self._namespaces.popitem(last=False)
            first = known.blocks
            known.blocks += len(blocks)
        # One block a call at most: a large batch must not wait for many samples.
        for number in range(len(blocks)):
            if _is_sample(first + number):
                self._sample(known, blocks[number], first + number)
                return

    def _sample(self, known: _Namespace, block: memoryview, number: int) -> None:
        if not len(block):
            return
        # A piece from another place each time: layers differ, and so do keys and values.
        steps = max(0, len(block) - SAMPLE_BYTES) // _STEP_BYTES
        begin = number * 7919 % (steps + 1) * _STEP_BYTES
        piece = block[begin : begin + SAMPLE_BYTES]
        for wire_id, codec in self._candidates.items():
            if wire_id not in self._warm.codecs:
                self._warm.codecs.add(wire_id)
                self._measure(codec, piece)
            sample = self._measure(codec, piece)
            with self._lock:
                old = known.samples.get(wire_id)
                known.samples[wire_id] = sample if old is None else _mean(old, sample)

    def _measure(self, codec: Codec, piece: memoryview) -> Sample:
        begin_s = self._clock()
        payload = codec.encode([piece])[0]
        encoded_s = self._clock()
        if payload is None:
            return Sample(1.0, len(piece) / max(encoded_s - begin_s, 1e-9), _NO_COST_BYTES_PER_S)
        into = bytearray(len(piece))
        decode_s = self._clock()
        codec.decode(memoryview(payload), memoryview(into))
        end_s = self._clock()
        return Sample(
            len(piece) / len(payload),
            len(piece) / max(encoded_s - begin_s, 1e-9),
            len(piece) / max(end_s - decode_s, 1e-9),
        )


def _is_sample(number: int) -> bool:
    """Whether the block of this number, of its namespace, is one."""
    return number < FIRST_SAMPLES or number % SAMPLE_EVERY_BLOCKS == 0 or number & (number - 1) == 0


def _mean(old: Sample, new: Sample) -> Sample:
    """Moving averages of what a byte costs, since costs add up and rates do not; a sample during which the
    thread had to wait, for a processor or the interpreter, must not decide alone.
    """

    def mix(a: float, b: float) -> float:
        b = min(max(b, a / _MAX_CHANGE), a * _MAX_CHANGE)
        return 1 / ((1 - _WEIGHT) / a + _WEIGHT / b)

    return Sample(
        mix(old.ratio, new.ratio),
        mix(old.encode_bytes_per_s, new.encode_bytes_per_s),
        mix(old.decode_bytes_per_s, new.decode_bytes_per_s),
    )
