"""A peer: ``python -m tests.transfer.peer nixl|stream|coded SEED``.

Says how it is read from; ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np

from kvtier.interfaces import Transfer
from kvtier.testing.transfer_tests import ARENA_BYTES, content, shared_memory
from kvtier.transfer.coding import Encoder
from kvtier.transfer.nixl import NixlTransfer
from kvtier.transfer.stream import StreamTransfer
from kvtier.v1 import peer_pb2 as pb
from kvtier.v1 import peer_pb2_grpc
from tests.codecs.blocks import bfloat16

SERVE_S = 3600.0
CHUNK_BYTES = 1_000_000


class Service(peer_pb2_grpc.PeerServiceServicer):
    """Reads of what is asked for, in pieces that do not fit the blocks; without `encoder` as an older node,
    which knows no codecs.
    """

    def __init__(self, memory: memoryview, encoder: Encoder | None = None) -> None:
        self._memory = memory
        self._encoder = encoder

    async def Read(self, request: pb.ReadRequest, context: Any) -> Any:
        offsets = np.frombuffer(request.slots, "<u8").tolist()
        sizes = np.frombuffer(request.sizes, "<u8").tolist()
        if any(offset + size > len(self._memory) for offset, size in zip(offsets, sizes, strict=True)):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "beyond the arena")
        views = [self._memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        data = b"".join(views)
        pieces = [data[begin : begin + CHUNK_BYTES] for begin in range(0, len(data), CHUNK_BYTES)]
        if self._encoder is None or not self._encoder.takes(request.codecs):
            for piece in pieces:
                yield pb.ReadResponse(data=piece)
            return
        cut = ([memoryview(piece)] for piece in pieces)
        coded = self._encoder.messages(cut, b"f" * 32, request.codecs, request.bytes_per_s)
        async with aclosing(coded) as messages:
            async for message in messages:
                yield pb.ReadResponse.FromString(message)


def coded_content(seed: int) -> bytes:
    """What a peer of the kind ``coded`` holds: codecs gain on it."""
    return bfloat16(ARENA_BYTES // 2, seed)


async def main(kind: str, seed: int) -> None:
    memory = memoryview(shared_memory())
    memory[:] = coded_content(seed) if kind == "coded" else content(seed)
    transfer: Transfer = NixlTransfer("127.0.0.1") if kind == "nixl" else StreamTransfer(_nobody, "")
    await transfer.open(memory)
    await transfer.serve(SERVE_S)
    server = grpc.aio.server()
    peer_pb2_grpc.add_PeerServiceServicer_to_server(
        Service(memory, Encoder() if kind == "coded" else None), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"metadata": transfer.metadata().hex(), "address": f"127.0.0.1:{port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
    await transfer.close()


def _nobody(remote: object) -> grpc.aio.Channel:
    raise AssertionError("this side only serves")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
