"""One agent process, as its daemon sees it: started, spoken to, and dead for certain when `end` returns."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import kvtier
from kvtier import logs
from kvtier.errors import TransferFault, Unavailable
from kvtier.transfer import frames
from kvtier.transfer.shared import SharedFile

START_TIMEOUT_S: Final = 30.0
MODULE: Final = "kvtier.transfer.agent"
RECEIVE_BYTES: Final = 64 << 10
MAX_UNSENT_BYTES: Final = 64 << 20
STDERR_LINES: Final = 20
STDERR_LINE_CHARS: Final = 300

_log = logs.get("transfer")


class AgentProcess:
    """Lives on the loop that started it.

    Attributes
    ----------
    offer
        What peers need to read from here.
    on_end
        Called once when it has ended without having been asked to, with the reason.
    """

    def __init__(self, process: asyncio.subprocess.Process, connection: socket.socket) -> None:
        self.offer = b""
        self.on_end: Callable[[str], object] = lambda why: None
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)  # asyncio's own kill may reap, and then its wait goes wrong
        self._socket = connection
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._words: deque[str] = deque(maxlen=STDERR_LINES)
        self._why = ""
        self._is_ending = False
        self._was_asked = False
        self._unsent = bytearray()
        self._listening = asyncio.create_task(self._listen())
        self._reading = asyncio.create_task(self._read_words())

    @classmethod
    async def start(cls, shared: SharedFile, environment: Mapping[str, str]) -> AgentProcess:
        """One that can be used.

        Raises
        ------
        Unavailable
            NIXL does not work here; says why. Nothing is left behind.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        numbers = (theirs.fileno(), shared.fd, shared.offset_bytes, shared.size_bytes, os.getpid())
        root = str(Path(kvtier.__path__[0]).parent)
        path = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH", ""))))
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", MODULE, *map(str, numbers)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(theirs.fileno(), shared.fd),
                    start_new_session=True,
                    env={**environment, "PYTHONPATH": path},
                )
            except BaseException as error:
                ours.close()
                if isinstance(error, OSError):
                    raise Unavailable(f"NIXL's process cannot be started: {error.strerror}") from error
                raise
        agent = cls(process, ours)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(agent._ready)
        except BaseException as error:
            await agent.end("it did not become ready")
            if isinstance(error, TimeoutError):
                raise Unavailable(f"NIXL was not ready within {START_TIMEOUT_S:.0f} s") from None
            raise
        return agent

    # ---- what it is asked

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it takes orders."""
        return not self._is_ending

    def pull(self, head: Mapping[str, Any], body: bytes) -> asyncio.Future[None]:
        """Done when the bytes are there; `TransferFault` when nothing writes any more."""
        return self._ask({"kind": "pull", **head}, body)

    def forget(self, node: str) -> asyncio.Future[None]:
        """Done when it has been heard."""
        return self._ask({"kind": "forget", "node": node}, b"")

    def serve(self, seconds: float) -> None:
        """Peers may read for so long from now."""
        if not self._is_ending:
            self._send(frames.pack({"kind": "serve", "seconds": seconds}))

    def _ask(self, head: dict[str, Any], body: bytes) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_ending:
            future.set_exception(TransferFault(f"NIXL's process ended: {self._why}"))
            return future
        number = next(self._numbers)
        self._waiting[number] = future
        self._send(frames.pack({**head, "id": number}, body))
        return future

    def _send(self, frame: bytes) -> None:
        """At once where the socket takes it; the rest goes when it can."""
        waits = bool(self._unsent)
        self._unsent += frame
        if not waits and self._flush():
            return
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._kill("it does not take orders any more")
        elif not waits:
            asyncio.get_running_loop().add_writer(self._socket, self._flush)

    def _flush(self) -> bool:
        """Send what can be sent; True where nothing is left."""
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()
            self._kill("it does not take orders any more")
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._socket)
        return not self._unsent

    # ---- what it says

    async def _listen(self) -> None:
        """Until it has ended, whatever the reason: then nothing of it writes any more."""
        loop = asyncio.get_running_loop()
        unpacker = frames.Unpacker()
        try:
            while data := await loop.sock_recv(self._socket, RECEIVE_BYTES):
                for head, body in unpacker.feed(data):
                    self._take(head, body)
            self._kill(self._why or "it ended by itself")
        except Exception as error:
            self._kill(f"it cannot be understood ({type(error).__name__})")
        await self._process.wait()
        os.close(self._pidfd)
        self._pidfd = -1
        loop.remove_writer(self._socket)
        self._socket.close()
        await self._reading
        self._fail_all()

    def _take(self, head: Mapping[str, Any], body: bytes) -> None:
        match head["kind"]:
            case "ready":
                self.offer = body
                self._ready.set_result(None)
            case "unusable" | "broken":
                self._why = str(head["why"])
            case "done" | "failed" as kind:
                future = self._waiting.pop(int(head["id"]))
                if future.done():
                    return
                if kind == "done":
                    future.set_result(None)
                else:
                    future.set_exception(TransferFault(str(head["why"])))

    def _fail_all(self) -> None:
        words = f" ({self._words[-1]})" if self._words else ""
        why = f"NIXL's process ended: {self._why}{words}"
        if not self._ready.done():
            self._ready.set_exception(Unavailable(why))
            self._ready.exception()  # whoever waits for it gets it; nobody may
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(TransferFault(why))
                future.exception()
        self._waiting.clear()
        if not self._was_asked:
            self.on_end(why)

    async def _read_words(self) -> None:
        """What native code prints: kept for the message about its end."""
        stream = self._process.stderr
        assert stream is not None
        with suppress(ValueError):  # a line without end
            while line := await stream.readline():
                text = line.decode("utf-8", "replace").strip()[:STDERR_LINE_CHARS]
                if text:
                    self._words.append(text)
                    _log.debug("NIXL's process says", text=text)

    # ---- its end

    def _kill(self, why: str) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._why = self._why or why
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self, why: str) -> None:
        """Kill it, and return when it is dead: nothing of it writes any more. Idempotent.

        A cancelled caller waits all the same.
        """
        self._was_asked = self._was_asked or not self._is_ending
        self._kill(why)
        cancelled: asyncio.CancelledError | None = None
        while not self._listening.done():
            try:
                await asyncio.shield(self._listening)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
