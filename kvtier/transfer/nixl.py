"""Bytes through NIXL: each node reads its peers' arenas by itself, the peer's daemon does nothing.

The agent lives in a process of its own (`agent.py`). A second one stands by, so that a transfer that did not
end in time costs no more than the transfers that were under way: its process is killed, the other takes over
under another name, and peers find its metadata in the next hello.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from kvtier import logs
from kvtier.errors import TransferFault, Unavailable
from kvtier.interfaces import Remote, Transfer
from kvtier.transfer import offer
from kvtier.transfer.checks import check_ranges
from kvtier.transfer.environment import agent_environment
from kvtier.transfer.packages import PACKAGES, nixl_version
from kvtier.transfer.process import AgentProcess
from kvtier.transfer.shared import SharedFile, file_of

GRACE_S: Final = 0.1
"""A transfer that is cancelled, or whose time is over, may still end by itself for so long; killing its
agent would end those of others too."""
LONG_LIFE_S: Final = 10.0
FIRST_PAUSE_S: Final = 0.25
LAST_PAUSE_S: Final = 60.0
"""Before an agent is started whose forerunner did not live long, or could not be started."""
MAX_DESCRIPTORS: Final = 131_072
"""Of one pull."""

_log = logs.get("transfer")


class NixlTransfer(Transfer):
    """Pulls with NIXL's UCX backend.

    Parameters
    ----------
    peer_host
        The address of the peer service: UCX listens on that network only.
    """

    name: ClassVar[str] = "nixl"

    def __init__(self, peer_host: str) -> None:
        self._environment = agent_environment(peer_host, os.environ)
        self._version = nixl_version()
        self._shared: SharedFile | None = None
        self._agent: AgentProcess | None = None
        self._next: asyncio.Task[AgentProcess] | None = None
        self._pause_s = 0.0
        self._used_since_s = 0.0
        self._serve_until_s = 0.0
        self._memory_bytes = 0

    # ---- its life

    async def open(self, memory: memoryview) -> None:
        """See `Transfer`; `memory` has to be shared memory, since another process maps it too."""
        if self._agent is not None:
            return
        if not self._version:
            raise Unavailable(f"none of {', '.join(PACKAGES.values())} is installed")
        self._memory_bytes = memory.nbytes
        self._shared = file_of(memory)
        try:
            self._use(await AgentProcess.start(self._shared, self._environment))
        except BaseException:
            await self.close()
            raise
        self._prepare_next()

    async def close(self) -> None:
        """See `Transfer`: the processes are gone, and their mappings of the arena with them."""
        shared, self._shared = self._shared, None
        following, self._next = self._next, None
        agent, self._agent = self._agent, None
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
            if not following.cancelled() and following.exception() is None:
                await following.result().end("the daemon stops")
        if agent is not None:
            await agent.end("the daemon stops")
        if shared is not None:
            os.close(shared.fd)

    def _prepare_next(self) -> None:
        assert self._shared is not None
        self._next = asyncio.create_task(self._start_next(self._shared, self._pause_s))

    async def _start_next(self, shared: SharedFile, pause_s: float) -> AgentProcess:
        """One that stands by; tries for as long as it takes."""
        while True:
            await asyncio.sleep(pause_s)
            try:
                return await AgentProcess.start(shared, self._environment)
            except Unavailable as error:
                _log.warning("a NIXL agent cannot be started; trying again", why=str(error))
            pause_s = min(max(FIRST_PAUSE_S, 2 * pause_s), LAST_PAUSE_S)

    def _use(self, agent: AgentProcess) -> None:
        self._agent = agent
        self._used_since_s = time.monotonic()
        agent.on_end = lambda why: self._ended(agent, why)
        left_s = self._serve_until_s - self._used_since_s
        if left_s > 0:
            agent.serve(left_s)

    def _ended(self, agent: AgentProcess, why: str) -> None:
        """It ended by itself: a transfer failed half-way, or native code gave up."""
        _log.warning("a NIXL agent is replaced", why=why)
        self._replace(agent)

    def _replace(self, agent: AgentProcess) -> None:
        """The next one takes over, at once if it is there. Where they die young, they come more slowly."""
        if self._agent is not agent or self._shared is None:
            return
        self._agent = None
        is_old = time.monotonic() - self._used_since_s > LONG_LIFE_S
        self._pause_s = 0.0 if is_old else min(max(FIRST_PAUSE_S, 2 * self._pause_s), LAST_PAUSE_S)
        self._take_over()

    def _take_over(self) -> None:
        following = self._next
        if following is None or following.cancelled():  # closed meanwhile
            return
        if not following.done():
            following.add_done_callback(lambda _: self._take_over())
            return
        agent = following.result()
        self._prepare_next()
        if agent.is_alive:
            self._use(agent)
        else:
            self._take_over()

    # ---- peers read from here

    def metadata(self) -> bytes:
        """See `Transfer`; empty while an agent is being replaced."""
        agent = self._agent
        return b"" if agent is None or not agent.is_alive else agent.offer

    async def serve(self, seconds: float) -> None:
        """See `Transfer`: UCX answers over TCP, and says hello over anything, only while it is polled."""
        self._serve_until_s = time.monotonic() + seconds
        if self._agent is not None:
            self._agent.serve(seconds)

    # ---- this node reads from peers

    async def pull(
        self,
        remote: Remote,
        sources: Sequence[int],
        sizes: Sequence[int],
        into: Sequence[int],
        timeout_s: float,
    ) -> None:
        """See `Transfer`. A transfer that has begun and fails ends the agent, so that it certainly stops."""
        if self._shared is None:
            raise TransferFault("the transfer is not open")
        if not sources and not sizes and not into:
            return
        check_ranges(sources, sizes, into, self._memory_bytes)
        if len(sizes) > MAX_DESCRIPTORS:
            raise TransferFault(f"{len(sizes)} blocks are too many for one pull: at most {MAX_DESCRIPTORS}")
        offer.unpack(remote.metadata, self._version)
        agent = self._agent
        if agent is None:
            raise TransferFault("the NIXL agent is just being replaced")
        rows = np.array((sources, sizes, into), "<u8")
        head = {"node": remote.node, "incarnation": remote.incarnation, "count": len(sizes)}
        future = agent.pull(head, rows.tobytes() + remote.metadata)
        try:
            await asyncio.wait((future,), timeout=timeout_s + GRACE_S)
        except asyncio.CancelledError:
            await self._stop(agent, future, GRACE_S, "a transfer was cancelled and did not end")
            raise
        if not future.done():
            await self._stop(agent, future, 0.0, "a transfer did not end in time")
            raise TransferFault(
                f"the bytes were not here within {timeout_s:.3g} s; the agent was ended: nothing writes now"
            )
        future.result()

    async def _stop(
        self, agent: AgentProcess, future: asyncio.Future[None], grace_s: float, why: str
    ) -> None:
        """Return when the transfer has ended, one way or the other."""
        cancelled = False
        end_s = time.monotonic() + grace_s
        while not future.done() and (left_s := end_s - time.monotonic()) > 0:
            try:
                await asyncio.wait((future,), timeout=left_s)
            except asyncio.CancelledError:
                cancelled = True
        if not future.done():
            _log.warning("a NIXL agent is replaced", why=why)
            try:
                await agent.end(why)
            finally:
                self._replace(agent)
        if not future.cancelled():
            future.exception()
        if cancelled:
            raise asyncio.CancelledError

    async def forget(self, node: str) -> None:
        """See `Transfer`."""
        if self._agent is not None:
            future = self._agent.forget(node)
            await asyncio.wait((future,), timeout=GRACE_S)
            if future.done() and not future.cancelled():
                future.exception()
