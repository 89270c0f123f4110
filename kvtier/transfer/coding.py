"""Pieces of a stream through codecs: in a few threads, never on the event loop.

The unit is a piece of at most `checks.PIECE_BYTES`, one message: blocks are cut, or several put together.
Each message stands for itself: a damaged one costs its reader a piece, and nothing is kept from one to the
next.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from kvtier import logs
from kvtier.codecs import CODEC_NAMES, codec_of, make_codec
from kvtier.codecs.adaptive import Adaptive
from kvtier.codecs.frame import ANY_ELEMENTS
from kvtier.errors import Corruption, KvtierError, TransferFault
from kvtier.v1 import peer_pb2 as pb

RAW_NAME: Final = "raw"
RAW: Final = CODEC_NAMES.index(RAW_NAME)
WIRE_CODECS: Final = tuple(CODEC_NAMES.index(name) for name in ("lz4", "zstd"))
"""Wire ids of what streams go through; never a lossy one."""
THREADS: Final = 2
MAX_WORKING: Final = 8
"""Pieces of all streams that are in threads, or wait for one; further ones stay where they are."""
AHEAD: Final = 3
"""Pieces of one stream that are worked on, while the one before is sent or written."""
MAX_CODED_STREAMS: Final = 32
"""A node encodes for so many streams at once; more are sent as they are."""
PAUSE_S: Final = 60.0
"""After a codec has failed, pieces are sent as they are for so long."""
_ANY_GAIN_PAYS: Final = 1.0
"""Bytes a second of a way of which the asker knows nothing: it asked, so it is slow."""
_DATA_TAG: Final = b"\x0a"
"""Of field 1, length-delimited: `ReadResponse.data`."""

Count = Callable[[str, str, int, int], object]
"""Told direction (``in``, ``out``), codec, bytes of blocks, bytes on the wire."""

T = TypeVar("T")

_log = logs.get("transfer")


def count_nothing(direction: str, codec: str, block_bytes: int, wire_bytes: int) -> None:
    """For whoever has no metrics."""


class Crew:
    """Threads for what takes a codec's time; used from the event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvtier-wire")
        self._places = asyncio.Semaphore(MAX_WORKING)

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. It must touch nothing but memory of its own: where the caller is
        cancelled it goes on, and keeps its place until it ends.

        Raises
        ------
        TransferFault
            The crew was closed.
        """
        await self._places.acquire()
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RuntimeError:
            self._places.release()
            raise TransferFault("the transfer was closed") from None
        running.add_done_callback(self._done)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():
                raise TransferFault("the transfer was closed") from None
            raise

    def _done(self, running: asyncio.Future[T]) -> None:
        self._places.release()
        if not running.cancelled():
            running.exception()  # whoever waited has it; nobody else has to hear of it

    def close(self) -> None:
        """Nothing new begins; idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def raw_message(piece: Sequence[memoryview]) -> bytes:
    """A serialised `ReadResponse`: made by hand, since that copies the bytes once instead of three times."""
    return b"".join((_DATA_TAG, _varint(sum(map(len, piece))), *piece))


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


class Encoder:
    """The owner's side: makes messages of pieces, through the codec that pays for their namespace."""

    def __init__(self, count: Count = count_nothing, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._crew = Crew()
        self._adaptive = Adaptive([make_codec(CODEC_NAMES[wire_id], ANY_ELEMENTS) for wire_id in WIRE_CODECS])
        self._count = count
        self._clock_s = clock_s
        self._paused_until_s = -math.inf
        self._streams = 0

    def takes(self, codecs: Collection[int]) -> bool:
        """Whether a stream to an asker that reads these codecs goes through `messages` now."""
        is_idle = self._streams < MAX_CODED_STREAMS and self._clock_s() >= self._paused_until_s
        return is_idle and not set(WIRE_CODECS).isdisjoint(codecs)

    async def messages(
        self,
        pieces: Iterable[Sequence[memoryview]],
        fingerprint: bytes,
        codecs: Collection[int],
        bytes_per_s: float,
    ) -> AsyncGenerator[bytes, None]:
        """Serialised `ReadResponse`s, in order; some pieces are encoded while one is sent.

        Parameters
        ----------
        pieces
            Each is copied, on the loop, when its turn has come: then whoever makes them may still raise.
        bytes_per_s
            What the asker gets without a codec; 0: it does not know.
        """
        rate = bytes_per_s or _ANY_GAIN_PAYS
        ahead: deque[asyncio.Task[bytes]] = deque()
        self._streams += 1
        try:
            for piece in pieces:
                if self._adaptive.skips(fingerprint, rate, is_pipelined=True, among=codecs):
                    while ahead:
                        yield await ahead.popleft()
                    yield self._raw(piece)
                    continue
                if len(ahead) == AHEAD:
                    yield await ahead.popleft()
                copy = b"".join(piece)
                ahead.append(asyncio.ensure_future(self._message(copy, fingerprint, codecs, rate)))
            while ahead:
                yield await ahead.popleft()
        finally:
            self._streams -= 1
            await give_up(ahead)

    def _raw(self, piece: Sequence[memoryview]) -> bytes:
        message = raw_message(piece)
        self._count("out", RAW_NAME, sum(map(len, piece)), len(message))
        return message

    async def _message(self, piece: bytes, fingerprint: bytes, codecs: Collection[int], rate: float) -> bytes:
        name, message = await self._crew.run(lambda: self._encode(piece, fingerprint, codecs, rate))
        self._count("out", name, len(piece), len(message))
        return message

    def _encode(
        self, piece: bytes, fingerprint: bytes, codecs: Collection[int], rate: float
    ) -> tuple[str, bytes]:
        """In a thread."""
        view = memoryview(piece)
        if self._clock_s() >= self._paused_until_s:
            try:
                codec, (payload,) = self._adaptive.encode(
                    fingerprint, [view], rate, is_pipelined=True, among=codecs
                )
            except Exception as error:  # a library that fails costs what it would have gained, not the bytes
                self._paused_until_s = self._clock_s() + PAUSE_S
                _log.warning("a codec failed: blocks are sent as they are", error=repr(error))
            else:
                if payload is not None:
                    said = pb.ReadResponse(data=payload, codec=codec.wire_id, size_bytes=len(piece))
                    return codec.name, said.SerializeToString()
        return RAW_NAME, raw_message([view])

    def close(self) -> None:
        """Nothing is encoded any more; idempotent."""
        self._crew.close()


class Spoilt(TransferFault):
    """What came as a codec's payload is none."""


async def decode(crew: Crew, wire_id: int, payload: memoryview, size_bytes: int) -> bytearray:
    """The asker's side: the piece that a message stands for, whose form has been checked.

    Raises
    ------
    TransferFault
        It is no payload of this codec for so many bytes.
    """

    def work() -> bytearray:
        piece = bytearray(size_bytes)
        codec_of(wire_id).decode(payload, memoryview(piece))
        return piece

    try:
        return await crew.run(work)
    except Corruption as error:
        raise Spoilt(f"the peer sent what does not decode: {error}") from error
    except KvtierError:
        raise
    except Exception as error:  # a library that fails on what a peer made up
        raise Spoilt(f"the peer sent what a codec fails on: {error!r}") from error


async def give_up(tasks: Iterable[asyncio.Task[T]]) -> None:
    """Cancel tasks that nobody waits for any more."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
