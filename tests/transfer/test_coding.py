"""Streams through codecs: what is sent, what a hostile peer may send, and that the loop stays free."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import grpc
import lz4.block
import numpy as np
import pytest
import zstandard

from kvtier.codecs import CODEC_NAMES, codec_of
from kvtier.codecs.frame import FrameCodec
from kvtier.errors import TransferFault
from kvtier.interfaces import Remote
from kvtier.transfer import coding
from kvtier.transfer.checks import PIECE_BYTES
from kvtier.transfer.coding import WIRE_CODECS, Crew, Encoder, raw_message
from kvtier.transfer.stream import READ_METHOD, StreamTransfer
from kvtier.v1 import peer_pb2 as pb
from tests.codecs.blocks import bfloat16

FINGERPRINT = b"f" * 32
SLOW_BYTES_PER_S = 1e6
ZSTD = CODEC_NAMES.index("zstd")
LZ4 = CODEC_NAMES.index("lz4")
PIECE = bfloat16(PIECE_BYTES // 2)
NOISE = np.random.default_rng(1).bytes(PIECE_BYTES)
ARENA_BYTES = 4 * PIECE_BYTES
TIMEOUT_S = 20.0


async def sent(
    encoder: Encoder, pieces: Sequence[bytes], codecs: Sequence[int] = WIRE_CODECS, rate: float = 1e7
) -> list[pb.ReadResponse]:
    views = [[memoryview(piece)] for piece in pieces]
    async with aclosing(encoder.messages(views, FINGERPRINT, codecs, rate)) as messages:
        return [pb.ReadResponse.FromString(message) async for message in messages]


def decoded(message: pb.ReadResponse) -> bytes:
    if not message.codec:
        assert message.size_bytes == 0, "as older nodes send it"
        return message.data
    assert len(message.data) < message.size_bytes <= PIECE_BYTES
    into = bytearray(message.size_bytes)
    codec_of(message.codec).decode(memoryview(message.data), memoryview(into))
    return bytes(into)


@pytest.fixture
async def encoder() -> AsyncIterator[Encoder]:
    encoder = Encoder()
    yield encoder
    encoder.close()


# ---- what an owner sends


async def test_what_is_sent_is_what_was_given_and_smaller(encoder: Encoder) -> None:
    pieces = [bfloat16(PIECE_BYTES // 2, seed) for seed in range(8)] + [PIECE[:12_346]]
    messages = await sent(encoder, pieces)
    assert [decoded(message) for message in messages] == pieces
    assert {message.codec for message in messages[1:]} == {ZSTD}
    assert sum(len(message.data) for message in messages) < 0.8 * sum(map(len, pieces))


async def test_what_does_not_become_smaller_is_sent_as_it_is(encoder: Encoder) -> None:
    messages = await sent(encoder, [NOISE] * 6)
    assert [message.SerializeToString() for message in messages] == [raw_message([memoryview(NOISE)])] * 6


async def test_where_the_way_is_faster_than_the_codec_all_is_sent_as_it_is(encoder: Encoder) -> None:
    messages = await sent(encoder, [PIECE] * 6, rate=1e12)
    assert not any(message.codec for message in messages)


async def test_only_codecs_that_the_asker_reads(encoder: Encoder) -> None:
    same = bytes(range(256)) * (PIECE_BYTES // 256)
    assert {message.codec for message in await sent(encoder, [same] * 4, [LZ4, 77])} == {LZ4}
    assert encoder.takes([77, ZSTD])
    assert not encoder.takes([77, 3, 0])
    assert not encoder.takes([])


async def test_a_way_of_which_the_asker_knows_nothing_is_slow(encoder: Encoder) -> None:
    assert (await sent(encoder, [PIECE] * 3, rate=0.0))[-1].codec == ZSTD


async def test_a_codec_that_fails_costs_no_bytes(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(FrameCodec, "encode", fail)
    assert [decoded(message) for message in await sent(encoder, [PIECE] * 3)] == [PIECE] * 3
    monkeypatch.undo()
    assert not encoder.takes(WIRE_CODECS), "it is left alone for a while"
    encoder._clock_s = lambda: time.monotonic() + coding.PAUSE_S
    assert encoder.takes(WIRE_CODECS)


async def test_streams_at_once_are_bounded_and_end_with_their_reader(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coding, "MAX_CODED_STREAMS", 2)
    taken = 0

    def pieces() -> Iterator[list[memoryview]]:
        nonlocal taken
        while True:
            taken += 1
            yield [memoryview(PIECE)]

    streams = [encoder.messages(pieces(), FINGERPRINT, WIRE_CODECS, 1e7) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    assert not encoder.takes(WIRE_CODECS)
    assert taken <= 2 * (coding.AHEAD + 1), "no more is copied than is worked on"
    for stream in streams:
        await stream.aclose()
    assert encoder.takes(WIRE_CODECS)


async def test_threads_do_the_work_and_the_loop_stays_free(encoder: Encoder) -> None:
    """Every piece is encoded off the loop, in no more threads than there may be."""
    threads: set[threading.Thread] = set()
    encode = FrameCodec.encode

    def noted(self: FrameCodec, blocks: Sequence[memoryview]) -> list[bytes | None]:
        threads.add(threading.current_thread())
        return encode(self, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameCodec, "encode", noted)
        await asyncio.gather(*(sent(encoder, [PIECE] * 8) for _ in range(4)))
    own = (
        threads & encoder._crew._pool._threads
    )  # a piece of an earlier test's encoder may still be worked on
    assert 1 <= len(own) <= coding.THREADS
    assert threading.current_thread() not in threads


# ---- the crew


async def test_a_crew_is_bounded_and_outlives_its_callers() -> None:
    crew = Crew()
    all_run, goes_on, running = threading.Barrier(coding.THREADS + 1), threading.Event(), 0

    def work() -> int:
        nonlocal running
        running += 1
        if running <= coding.THREADS:
            all_run.wait(TIMEOUT_S)
        goes_on.wait(TIMEOUT_S)
        return 7

    tasks = [asyncio.create_task(crew.run(work)) for _ in range(3 * coding.MAX_WORKING)]
    await asyncio.to_thread(all_run.wait, TIMEOUT_S)
    assert crew._places.locked(), "further ones wait outside"
    for task in tasks[:-1]:
        task.cancel()
    await asyncio.sleep(0.01)
    assert running == coding.THREADS
    assert crew._places.locked(), "whoever left, the threads still work"
    goes_on.set()
    assert await tasks[-1] == 7
    assert all(task.cancelled() for task in tasks[:-1])
    assert await crew.run(lambda: 8) == 8
    crew.close()


async def test_a_closed_crew_is_a_fault_also_for_what_waits() -> None:
    crew = Crew()
    goes_on = threading.Event()
    tasks = [
        asyncio.create_task(crew.run(lambda: goes_on.wait(TIMEOUT_S))) for _ in range(coding.MAX_WORKING + 2)
    ]
    await asyncio.sleep(0.01)
    crew.close()
    crew.close()
    goes_on.set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert ends[: coding.THREADS] == [True] * coding.THREADS
    assert all(isinstance(end, TransferFault) for end in ends[coding.THREADS :])


# ---- what a hostile peer may send


class Liar:
    """Answers `Read` with these messages, as bytes."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.asked: list[pb.ReadRequest] = []

    async def start(self) -> str:
        async def read(request: pb.ReadRequest, context: Any) -> AsyncIterator[bytes]:
            self.asked.append(request)
            for message in self.messages:
                yield message

        handler = grpc.unary_stream_rpc_method_handler(read, pb.ReadRequest.FromString, None)
        service, _, method = READ_METHOD[1:].partition("/")
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return f"127.0.0.1:{port}"


class Puller:
    """A transfer that takes the way for slow, and so asks for codecs."""

    def __init__(self, address: str, **values: Any) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.counted: list[tuple[str, str, int, int]] = []
        settings: dict[str, Any] = {
            "raw_bytes_per_s": SLOW_BYTES_PER_S,
            "count": lambda *what: self.counted.append(what),
        }
        self.transfer = StreamTransfer(lambda remote: self.channel, "f" * 32, **(settings | values))
        self.memory = memoryview(bytearray(ARENA_BYTES))
        self.remote = Remote("1" * 32, 1, address, 1, 0, b"", 1)

    async def pull(self, sizes: Sequence[int] = (PIECE_BYTES,), begin: int = PIECE_BYTES) -> None:
        into = [begin + sum(sizes[:number]) for number in range(len(sizes))]
        await self.transfer.pull(self.remote, list(into), sizes, into, TIMEOUT_S)


@pytest.fixture
async def liar() -> AsyncIterator[Liar]:
    liar = Liar()
    yield liar
    await liar.server.stop(None)


@pytest.fixture
async def puller(liar: Liar) -> AsyncIterator[Puller]:
    puller = Puller(await liar.start())
    await puller.transfer.open(puller.memory)
    yield puller
    await puller.transfer.close()
    await puller.channel.close()


def coded(codec: int, payload: bytes, size_bytes: int) -> bytes:
    return pb.ReadResponse(data=payload, codec=codec, size_bytes=size_bytes).SerializeToString()


def payload_of(codec: int, piece: bytes) -> bytes:
    (payload,) = codec_of(codec).encode([memoryview(piece)])
    assert payload is not None
    return payload


GOOD = payload_of(ZSTD, PIECE)


async def test_payloads_and_pieces_as_they_are_make_up_blocks(liar: Liar, puller: Puller) -> None:
    """Cut anywhere: blocks of other sizes than the pieces, forms in any order."""
    whole = bfloat16(PIECE_BYTES)
    cuts = [0, 300_000, 300_001, 1_300_000, 1_300_000 + 4096, len(whole)]
    parts = [whole[a:b] for a, b in pairwise(cuts)]
    liar.messages = [
        coded(ZSTD, payload_of(ZSTD, parts[0]), len(parts[0])),
        raw_message([memoryview(parts[1])]),
        coded(LZ4, payload_of(LZ4, parts[2]), len(parts[2])),
        raw_message([memoryview(parts[3])]),
        coded(ZSTD, payload_of(ZSTD, parts[4]), len(parts[4])),
    ]
    sizes = [700_000, 1, 400_000, len(whole) - 1_100_001]
    await puller.pull(sizes)
    assert puller.memory[PIECE_BYTES : PIECE_BYTES + len(whole)] == whole
    assert not any(puller.memory[:PIECE_BYTES])
    assert not any(puller.memory[PIECE_BYTES + len(whole) :])
    (asked,) = liar.asked
    assert (tuple(asked.codecs), asked.bytes_per_s) == (WIRE_CODECS, SLOW_BYTES_PER_S)
    assert [(codec, size) for _, codec, size, _ in puller.counted] == list(
        zip(("zstd", "raw", "lz4", "raw", "zstd"), map(len, parts), strict=True)
    )
    assert [wire for *_, wire in puller.counted] == [len(message) for message in liar.messages]


def bomb(codec: int, compressed: bytes, plane_bytes: int) -> bytes:
    """A payload in form, of one plane that says `plane_bytes` and is much more."""
    head = bytes((1, codec, 0, 20)) + plane_bytes.to_bytes(4, "little")
    return head + len(compressed).to_bytes(4, "little") + compressed


ZEROS = bytes(256 << 20)
ZSTD_BOMB = zstandard.ZstdCompressor(write_content_size=False).compress(ZEROS)
LZ4_BOMB = lz4.block.compress(ZEROS[: 64 << 20], store_size=False)
del ZEROS

LIES = {
    "no payload": coded(ZSTD, b"", PIECE_BYTES),
    "a codec that was not asked for": coded(3, GOOD, PIECE_BYTES),
    "a codec that nobody knows": coded(2**32 - 1, GOOD, PIECE_BYTES),
    "another codec's payload": coded(LZ4, GOOD, PIECE_BYTES),
    "noise": coded(ZSTD, NOISE[:5000], PIECE_BYTES),
    "a flipped bit": coded(ZSTD, GOOD[:9] + bytes((GOOD[9] ^ 0x40,)) + GOOD[10:], PIECE_BYTES),
    "cut off": coded(ZSTD, GOOD[:-1], PIECE_BYTES),
    "longer than it says": coded(ZSTD, GOOD + b"\0", PIECE_BYTES),
    "of no bytes": coded(ZSTD, GOOD, 0),
    "of fewer bytes": coded(ZSTD, GOOD, PIECE_BYTES - 2),
    "of more bytes than a piece": coded(ZSTD, GOOD, PIECE_BYTES + 2),
    "of 4 GiB": coded(ZSTD, GOOD, 2**32 - 1),
    "no smaller than what it stands for": coded(ZSTD, GOOD, len(GOOD)),
    "a bomb, zstd": coded(ZSTD, bomb(ZSTD, ZSTD_BOMB, PIECE_BYTES), PIECE_BYTES),
    "a bomb, lz4": coded(LZ4, bomb(LZ4, LZ4_BOMB, PIECE_BYTES), PIECE_BYTES),
    "a bomb that says how large it is": coded(
        ZSTD, bomb(ZSTD, zstandard.ZstdCompressor().compress(bytes(64 << 20)), PIECE_BYTES), PIECE_BYTES
    ),
}


@pytest.mark.parametrize("lie", LIES)
async def test_lies_are_faults_and_no_codec_is_asked_for_any_more(
    liar: Liar, puller: Puller, lie: str
) -> None:
    liar.messages = [LIES[lie]]
    with pytest.raises(TransferFault):
        await puller.pull()
    assert not any(puller.memory), "nothing of it was written"
    liar.messages = [raw_message([memoryview(PIECE)])]
    await puller.pull()
    assert puller.memory[PIECE_BYTES : 2 * PIECE_BYTES] == PIECE
    assert len(liar.asked) == 2
    if "codec that" not in lie:  # that is no payload, so nothing is held against payloads
        assert not liar.asked[1].codecs


async def test_more_than_was_asked_for_in_payloads(liar: Liar, puller: Puller) -> None:
    liar.messages = [coded(ZSTD, GOOD, PIECE_BYTES)] * 2
    with pytest.raises(TransferFault, match="unasked for"):
        await puller.pull([PIECE_BYTES + 10])
    assert not any(puller.memory[2 * PIECE_BYTES + 10 :])


async def test_less_than_was_asked_for_in_payloads(liar: Liar, puller: Puller) -> None:
    liar.messages = [coded(ZSTD, GOOD, PIECE_BYTES)]
    with pytest.raises(TransferFault, match="of 2097152"):
        await puller.pull([PIECE_BYTES] * 2)


async def test_payloads_without_being_asked(liar: Liar) -> None:
    puller = Puller(await liar.start(), codecs=())
    await puller.transfer.open(puller.memory)
    liar.messages = [coded(ZSTD, GOOD, PIECE_BYTES)]
    with pytest.raises(TransferFault, match="not asked for"):
        await puller.pull()
    assert not liar.asked[0].codecs
    assert liar.asked[0].bytes_per_s == 0
    await puller.transfer.close()
    await puller.channel.close()


async def test_a_library_that_fails_on_what_a_peer_made_up_is_a_fault(
    liar: Liar, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OverflowError("too much")

    monkeypatch.setattr(FrameCodec, "decode", fail)
    liar.messages = [coded(ZSTD, GOOD, PIECE_BYTES)]
    with pytest.raises(TransferFault, match="a codec fails on"):
        await puller.pull()


async def test_nothing_is_written_after_a_pull_that_was_cancelled_while_it_decoded(
    liar: Liar, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    decode = FrameCodec.decode

    def slow(self: FrameCodec, payload: memoryview, into: memoryview) -> None:
        begun.set()
        goes_on.wait(TIMEOUT_S)
        decode(self, payload, into)

    monkeypatch.setattr(FrameCodec, "decode", slow)
    liar.messages = [coded(ZSTD, GOOD, PIECE_BYTES)]
    task = asyncio.create_task(puller.pull())
    assert await asyncio.to_thread(begun.wait, TIMEOUT_S)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    goes_on.set()
    await asyncio.sleep(0.1)
    assert not any(puller.memory)
