"""`TransferTests` on NIXL (what UCX chooses on one machine, and forced TCP) and on gRPC streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvtier.interfaces import Remote
from kvtier.testing.transfer_tests import MakeTransfer, StartPeer, TransferTests
from kvtier.transfer.nixl import NixlTransfer
from kvtier.transfer.stream import StreamTransfer
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


class TestStream(TransferTests):
    @pytest.fixture
    def make_transfer(self) -> MakeTransfer:
        channels: dict[str, Any] = {}

        def channel_of(remote: Remote) -> grpc.aio.Channel:
            if remote.address not in channels:
                options = [("grpc.use_local_subchannel_pool", 1)]
                channels[remote.address] = grpc.aio.insecure_channel(remote.address, options=options)
            channel: grpc.aio.Channel = channels[remote.address]
            return channel

        return lambda: StreamTransfer(channel_of, "f" * 32)

    @pytest.fixture(scope="class")
    @classmethod
    def start_peer(cls) -> Iterator[StartPeer]:
        with peers("stream") as start:
            yield start
