"""`TransferTests` on NIXL (what UCX chooses on one machine, and forced TCP) and on gRPC streams.

Streams: as they are, through codecs, and from a peer that knows none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import grpc
import pytest

from kvtier.interfaces import Remote, Transfer
from kvtier.testing.transfer_tests import (
    ARENA_BYTES,
    TIMEOUT_S,
    MakeTransfer,
    PeerProcess,
    StartPeer,
    TransferTests,
)
from kvtier.transfer.nixl import NixlTransfer
from kvtier.transfer.stream import StreamTransfer
from tests.transfer.peer import coded_content
from tests.transfer.processes import peers


@pytest.mark.slow
class TestNixl(TransferTests):
    @pytest.fixture
    def make_transfer(self) -> MakeTransfer:
        return lambda: NixlTransfer("127.0.0.1")

    @pytest.fixture(scope="class")
    @classmethod
    def start_peer(cls) -> Iterator[StartPeer]:
        with peers("nixl") as start:
            yield start


@pytest.mark.slow
class TestNixlOverTcp(TestNixl):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _force_tcp(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UCX_TLS", "tcp")
            yield


ASKS_FOR_CODECS = 1e6
"""A way that is taken for so slow is asked for codecs at once."""


class TestStream(TransferTests):
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def counted(self) -> Counter[str]:
        """Bytes of blocks that came, by codec."""
        return Counter()

    @pytest.fixture
    def make_transfer(self, counted: Counter[str]) -> MakeTransfer:
        channels: dict[str, Any] = {}

        def channel_of(remote: Remote) -> grpc.aio.Channel:
            if remote.address not in channels:
                options = [("grpc.use_local_subchannel_pool", 1)]
                channels[remote.address] = grpc.aio.insecure_channel(remote.address, options=options)
            channel: grpc.aio.Channel = channels[remote.address]
            return channel

        def count(direction: str, codec: str, block_bytes: int, wire_bytes: int) -> None:
            counted[codec] += block_bytes

        return lambda: StreamTransfer(channel_of, "f" * 32, count=count, **self.options)

    @pytest.fixture(scope="class")
    @classmethod
    def start_peer(cls) -> Iterator[StartPeer]:
        with peers("stream") as start:
            yield start


class TestStreamOfAnOlderPeer(TestStream):
    """It is asked for codecs, and sends all as it is."""

    options: ClassVar[dict[str, Any]] = {"raw_bytes_per_s": ASKS_FOR_CODECS}


class TestStreamThroughCodecs(TestStream):
    options: ClassVar[dict[str, Any]] = {"raw_bytes_per_s": ASKS_FOR_CODECS}

    def content(self, seed: int) -> bytes:
        return coded_content(seed)

    @pytest.fixture(scope="class")
    @classmethod
    def start_peer(cls) -> Iterator[StartPeer]:
        with peers("coded") as start:
            yield start

    async def test_it_does_go_through_a_codec(
        self, transfer: Transfer, peer: PeerProcess, memory: memoryview, counted: Counter[str]
    ) -> None:
        await transfer.pull(peer.remote, [0], [ARENA_BYTES], [0], TIMEOUT_S)
        assert memory == self.content(1)
        assert counted["zstd"] > 0.9 * ARENA_BYTES
