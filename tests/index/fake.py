"""Servers that are none: what a TCP port can do to a client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def fake_server(talk: Talk) -> AsyncIterator[int]:
    """A port where `talk` answers each connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await talk(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def silence(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Accepts and never answers."""
    while await reader.read(1 << 16):
        pass


def answering(answer: bytes, *, forever: bool = False) -> Talk:
    """Answers whatever comes with the same bytes, or with an endless stream of them."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(answer)
            await writer.drain()
            while forever:
                writer.write(answer)
                await writer.drain()

    return talk


@asynccontextmanager
async def blackhole() -> AsyncIterator[int]:
    """A port on which connections are neither accepted nor refused: its backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        try:
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
                fillers.append(filler)
            await asyncio.sleep(0.05)
            yield port
        finally:
            for filler in fillers:
                filler.close()
