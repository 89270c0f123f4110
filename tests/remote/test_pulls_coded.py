"""Pulls over links that are slower than codecs, and over others: which ask for codecs, and the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.remote import pulls
from kvtier.server import peer_service
from kvtier.transfer import ways
from kvtier.transfer.coding import WIRE_CODECS, Encoder
from kvtier.types import Key, NodeRecord
from kvtier.v1 import peer_pb2 as pb
from tests.codecs.blocks import bfloat16
from tests.remote import peering
from tests.remote.peering import (
    BLOCK_BYTES,
    DEADLINE_S,
    OWNER_ID,
    Asker,
    Owner,
    Proxy,
    chain,
    config,
    shared_memory,
)

KEYS = chain(1, 512)
SIZE_BYTES = len(KEYS) * BLOCK_BYTES
"""8 MiB."""
LINK_BYTES_PER_S = 30e6
ROOM: dict[str, Any] = {"dram_bytes": 16 << 20, "transfer_codec": "auto"}


@pytest.fixture
def shm() -> Iterator[Path]:
    with shared_memory() as path:
        yield path


@pytest.fixture(autouse=True)
def content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as engines make them."""
    made = {key: bfloat16(BLOCK_BYTES // 2, int.from_bytes(key[:4], "big")) for key in KEYS}
    monkeypatch.setattr(peering, "content", made.__getitem__)


Make = Callable[..., Awaitable["Scene"]]


class Scene:
    """An owner with all blocks, a link that can be slow, an asker, and what it asked for."""

    def __init__(self, owner: Owner, asker: Asker, proxy: Proxy, record: NodeRecord) -> None:
        self.owner, self.asker, self.proxy, self.record = owner, asker, proxy, record

    async def pull(self, keys: list[Key] = KEYS) -> tuple[int, str]:
        """Every block that arrives is compared; see `Asker.pull`."""
        return await self.asker.pull(self.record, keys)

    def came(self, codec: str, what: str = "block") -> float:
        labels = {"direction": "in", "codec": codec}
        return self._value(self.asker, f"kvtier_stream_{what}_bytes_total", labels)

    def given(self, codec: str, what: str = "block") -> float:
        labels = {"direction": "out", "codec": codec}
        return self._value(self.owner, f"kvtier_stream_{what}_bytes_total", labels)

    @staticmethod
    def _value(side: Owner | Asker, name: str, labels: dict[str, str]) -> float:
        return side.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def scene(
    home: Path, shm: Path, owner_has: dict[str, Any], asker_has: dict[str, Any]
) -> AsyncIterator[Scene]:
    owner = await Owner(config(home / "owner", shm, **(ROOM | owner_has))).start()
    asker = await Asker(config(home / "asker", shm, **(ROOM | asker_has))).start()
    proxy = Proxy(owner.server.address)
    proxy.back_bytes_per_s = LINK_BYTES_PER_S
    try:
        await owner.store(KEYS)
        record = owner.record(address=await proxy.start())
        asker.peers.update([record])
        yield Scene(owner, asker, proxy, record)
    finally:
        await asker.stop()
        await proxy.stop()
        await owner.stop()


@pytest.fixture
async def slow(tmp_path: Path, shm: Path) -> AsyncIterator[Scene]:
    async with scene(tmp_path, shm, {}, {}) as made:
        yield made


async def test_a_slow_link_is_asked_for_a_codec_and_the_bytes_are_right(slow: Scene) -> None:
    assert await slow.pull() == (len(KEYS), "")
    assert await slow.pull() == (len(KEYS), "")
    assert slow.came("zstd") > SIZE_BYTES / 2, "asked for at latest by the second pull"
    before, wire_before = slow.came("zstd"), slow.proxy.back_bytes
    assert await slow.pull() == (len(KEYS), "")
    assert slow.came("zstd") == before + SIZE_BYTES
    assert slow.proxy.back_bytes - wire_before < 0.8 * SIZE_BYTES, "less went over the link"
    assert slow.came("zstd", "wire") < 0.8 * slow.came("zstd")
    assert slow.came("raw", "wire") >= slow.came("raw") > 0, "the first ones came as they are"
    assert slow.given("zstd") == slow.came("zstd")
    assert slow.given("zstd", "wire") == slow.came("zstd", "wire")
    assert slow.asker.counted("whole") == 3


async def test_a_fast_link_is_not_asked(slow: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine makes of it: what codecs make is taken for less than that."""
    slow.proxy.back_bytes_per_s = 0.0
    monkeypatch.setattr(ways, "CODED_BYTES_PER_S", 1e6)
    for _ in range(4):
        assert await slow.pull() == (len(KEYS), "")
    assert slow.came("raw") == 4 * SIZE_BYTES
    assert slow.came("zstd") == slow.came("lz4") == 0


async def test_a_link_that_becomes_slow_is_asked_then(slow: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    slow.proxy.back_bytes_per_s = 0.0
    monkeypatch.setattr(ways, "CODED_BYTES_PER_S", 60e6)
    assert await slow.pull() == (len(KEYS), "")
    assert slow.came("zstd") == 0
    slow.proxy.back_bytes_per_s = LINK_BYTES_PER_S
    for _ in range(20):  # both figures have some way to go
        before = slow.came("zstd")
        assert await slow.pull() == (len(KEYS), "")
        if slow.came("zstd") == before + SIZE_BYTES:
            return
    raise AssertionError("no pull went through the codec")


async def test_a_namespace_on_which_nothing_is_gained_is_sent_as_it_is(
    slow: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asker asks; the owner's samples say no."""
    asked: list[tuple[int, ...]] = []
    takes = Encoder.takes

    def noted(self: Encoder, codecs: Any) -> bool:
        asked.append(tuple(codecs))
        return takes(self, codecs)

    monkeypatch.setattr(Encoder, "takes", noted)
    noise = {key: np.random.default_rng(number).bytes(BLOCK_BYTES) for number, key in enumerate(KEYS)}
    monkeypatch.setattr(peering, "content", noise.__getitem__)
    await slow.owner.evict(KEYS)
    await slow.owner.store(KEYS)
    for _ in range(3):
        assert await slow.pull() == (len(KEYS), "")
    assert slow.came("raw") == 3 * SIZE_BYTES
    assert WIRE_CODECS in asked
    assert () in asked


@pytest.mark.parametrize("side", ["owner", "asker"])
async def test_either_side_can_do_without(tmp_path: Path, shm: Path, side: str) -> None:
    off = {"transfer_codec": "off"}
    async with scene(tmp_path, shm, off if side == "owner" else {}, off if side == "asker" else {}) as made:
        for _ in range(3):
            assert await made.pull() == (len(KEYS), "")
        assert made.came("raw") == 3 * SIZE_BYTES


async def test_an_owner_of_the_older_form_sends_as_it_is(
    slow: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not see the fields that it does not know."""
    read = peer_service.PeerService.Read

    async def older(self: Any, request: pb.ReadRequest, context: Any) -> None:
        request.ClearField("codecs")
        request.ClearField("bytes_per_s")
        await read(self, request, context)

    monkeypatch.setattr(slow.owner.server._service, "Read", older.__get__(slow.owner.server._service))
    for _ in range(2):
        assert await slow.pull() == (len(KEYS), "")


# ---- an owner that means harm


async def until_whole(slow: Scene) -> None:
    for _ in range(int(DEADLINE_S / 0.05)):
        if await slow.pull() == (len(KEYS), ""):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the peer was never used again")


def lying(monkeypatch: pytest.MonkeyPatch, lie: Callable[[pb.ReadResponse], object]) -> list[int]:
    """Every payload that an owner sends is changed; how many were."""
    told: list[int] = []
    write = peer_service._write

    async def changed(context: Any, message: bytes) -> bool:
        said = pb.ReadResponse.FromString(message)
        if said.codec:
            lie(said)
            told.append(said.codec)
        return await write(context, said.SerializeToString())

    monkeypatch.setattr(peer_service, "_write", changed)
    return told


def cut(said: pb.ReadResponse) -> None:
    said.data = said.data[:-1]


def other_length(said: pb.ReadResponse) -> None:
    said.size_bytes -= 2


def another_codec(said: pb.ReadResponse) -> None:
    said.codec = 3 - said.codec


def huge(said: pb.ReadResponse) -> None:
    said.size_bytes = 2**32 - 1


@pytest.mark.parametrize("lie", [cut, other_length, another_codec, huge])
async def test_payloads_that_are_none_are_a_miss_and_count_against_the_peer(
    slow: Scene, monkeypatch: pytest.MonkeyPatch, lie: Callable[[pb.ReadResponse], object]
) -> None:
    told = lying(monkeypatch, lie)
    ends = []
    for _ in range(8):
        ends.append(await slow.pull())
        if ends[-1][1] == pulls.TRANSFER:
            break
    arrived, fault = ends[-1]
    assert told
    assert (fault, arrived < len(KEYS)) == (pulls.TRANSFER, True)
    link = slow.asker.peers.get(OWNER_ID)
    assert link is not None
    assert link.breaker.has_failed
    await until_whole(slow)
    count = len(told)
    assert await slow.pull() == (len(KEYS), "")
    assert len(told) == count, "it is not asked for payloads any more"


async def test_payloads_of_other_bytes_are_found_by_the_checksum_of_the_block(
    slow: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They decode, to blocks that nobody stored."""
    encode = Encoder._encode

    def other(self: Encoder, piece: bytes, *more: Any) -> tuple[str, bytes]:
        return encode(self, piece[:-1] + bytes((piece[-1] ^ 1,)), *more)

    while not slow.came("zstd"):
        assert await slow.pull() == (len(KEYS), "")
    monkeypatch.setattr(Encoder, "_encode", other)
    arrived, fault = await slow.pull()
    assert fault == pulls.CORRUPT
    assert arrived < len(KEYS)
    link = slow.asker.peers.get(OWNER_ID)
    assert link is not None
    assert link.breaker.has_failed
