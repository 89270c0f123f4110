"""The process that holds a NIXL agent: ``python -m kvtier.transfer.agent`` (started by `process.py` only).

Native code that talks to other machines lives here and not in the daemon: NIXL cannot cancel a transfer, but
a process can be killed, and then nothing writes any more; and where UCX aborts its process (an owner whose
puller vanished in the middle, damaged metadata), the daemon goes on with the next agent.

One thread does everything: it takes what the daemon says, posts transfers, and makes progress for own
transfers and for peers that read from here. It polls only while a transfer is in flight or peers hold leases;
between two polls that found nothing to do it pauses, longer and longer.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import secrets
import select
import signal
import socket
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from importlib import metadata as packages
from typing import Any, Final, NoReturn

import numpy as np

from kvtier.errors import TransferFault
from kvtier.transfer import frames, offer
from kvtier.transfer.packages import PACKAGES

FIRST_PAUSE_S: Final = 20e-6
FLIGHT_PAUSE_S: Final = 200e-6
SERVE_PAUSE_S: Final = 1e-3
IDLE_PAUSE_S: Final = 1.0
"""Without anything to do: often enough to close the connections of peers that are gone."""
BUSY_S: Final = 8e-6
"""A poll that took longer has moved bytes, so the next one follows at once."""
MAX_PEERS: Final = 1024
RECEIVE_BYTES: Final = 1 << 20
POPULATE_BYTES: Final = 32 << 20
"""One step of touching the arena's pages, while there is nothing else to do."""
_MADV_POPULATE_WRITE: Final = 23
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_TIMERSLACK: Final = 29
_TIMER_SLACK_NS: Final = 1000


@dataclass(frozen=True, slots=True)
class _Peer:
    incarnation: int
    data: bytes
    offer: offer.Offer


@dataclass(frozen=True, slots=True)
class _Flight:
    number: int
    node: str
    handle: Any


class Agent:
    """The NIXL agent and what is under way.

    Parameters
    ----------
    api
        The module ``nixl_cu12._api`` or its twin for another CUDA.
    memory
        The arena as mapped here.
    """

    def __init__(self, api: Any, version: str, memory: mmap.mmap, size_bytes: int, skip_bytes: int) -> None:
        self.name = secrets.token_hex(16)
        self._version = version
        self._base = int(np.frombuffer(memory, np.uint8).ctypes.data) + skip_bytes
        self._nixl = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._nixl.create_backend("UCX", {})
        self._nixl.register_memory([(self._base, size_bytes, 0, "")], "DRAM")
        self.offer = offer.Offer(
            self.name, version, self._base, size_bytes, bytes(self._nixl.get_agent_metadata())
        )
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._flights: list[_Flight] = []
        self._leaving: set[str] = set()
        self._serve_until_s = 0.0
        self._pause_s = 0.0

    # ---- what the daemon says

    def pull(self, head: dict[str, Any], body: bytes) -> list[bytes]:
        """Begin a transfer; answers at once only where it is over already.

        Raises
        ------
        TransferFault
            Nothing was begun.
        """
        rows_bytes = 24 * head["count"]
        rows = np.frombuffer(body[:rows_bytes], "<u8").reshape(3, head["count"])
        peer = self._peer(head["node"], head["incarnation"], body[rows_bytes:])
        sources, sizes, into = rows
        if int((sources + sizes).max()) > peer.offer.size_bytes:
            raise TransferFault("a slot lies outside the arena that the peer's agent offers")
        handle = self._prepare(peer, sources, sizes, into)
        flight = _Flight(head["id"], head["node"], handle)
        state = self._nixl.transfer(handle)  # an exception from here on breaks the agent: see `run`
        self._pause_s = 0.0
        return self._settle(flight, state)

    def _prepare(self, peer: _Peer, sources: Any, sizes: Any, into: Any) -> Any:
        zeros = np.zeros(len(sizes), np.uint64)
        local = np.column_stack((into + np.uint64(self._base), sizes, zeros))
        remote = np.column_stack((sources + np.uint64(peer.offer.base_address), sizes, zeros))
        try:
            return self._nixl.initialize_xfer(
                "READ",
                self._nixl.get_xfer_descs(local, "DRAM"),
                self._nixl.get_xfer_descs(remote, "DRAM"),
                peer.offer.name,
            )
        except Exception as error:
            raise TransferFault(f"NIXL refused the transfer: {_name(error)}") from error

    def _peer(self, node: str, incarnation: int, data: bytes) -> _Peer:
        """What is known of the peer, replaced where its life or its agent is another one."""
        known = self._peers.get(node)
        if known is not None and known.incarnation == incarnation and known.data == data:
            self._peers.move_to_end(node)
            return known
        theirs = offer.unpack(data, self._version)
        self.forget(node)
        if node in self._peers:
            raise TransferFault("a transfer from the peer's earlier agent is still under way")
        names = {peer.offer.name for peer in self._peers.values()}
        if theirs.name == self.name or theirs.name in names:
            raise TransferFault("the peer's NIXL metadata is that of another node")
        if len(self._peers) >= MAX_PEERS:
            self.forget(next(iter(self._peers)))
        self._load(theirs)
        peer = self._peers[node] = _Peer(incarnation, data, theirs)
        return peer

    def _load(self, theirs: offer.Offer) -> None:
        try:
            loaded = self._nixl.add_remote_agent(theirs.metadata)
        except Exception as error:
            raise TransferFault(f"NIXL cannot use the peer's metadata: {_name(error)}") from error
        name = loaded.decode("ascii", "replace") if isinstance(loaded, bytes) else str(loaded)
        if name != theirs.name:
            self._remove(name)
            raise TransferFault("the peer's NIXL metadata names another agent than its offer")

    def forget(self, node: str) -> None:
        """Drop a peer, at once or after the last transfer that still runs from it."""
        if any(flight.node == node for flight in self._flights):
            self._leaving.add(node)
            return
        self._leaving.discard(node)
        peer = self._peers.pop(node, None)
        if peer is not None:
            self._remove(peer.offer.name)

    def _remove(self, name: str) -> None:
        try:
            self._nixl.remove_remote_agent(name)
        except Exception as error:
            raise TransferFault(f"NIXL cannot drop a peer: {_name(error)}") from error

    def serve(self, seconds: float) -> None:
        """Peers may read from here for so long from now."""
        self._serve_until_s = time.monotonic() + seconds
        self._pause_s = min(self._pause_s, FIRST_PAUSE_S)

    # ---- what is under way

    @property
    def is_idle(self) -> bool:
        """Neither does a transfer run nor may a peer read."""
        return not self._flights and time.monotonic() >= self._serve_until_s

    def progress(self) -> list[bytes]:
        """Poll once; returns what the daemon has to be told, and sets `pause_s`."""
        begin_s = time.perf_counter()
        answers: list[bytes] = []
        if self._flights:
            flights, self._flights = self._flights, []
            for flight in flights:
                answers += self._settle(flight, self._nixl.check_xfer_state(flight.handle))
        else:
            self._nixl.get_new_notifs()
        if answers or time.perf_counter() - begin_s > BUSY_S:
            self._pause_s = 0.0
        else:
            self._pause_s = max(FIRST_PAUSE_S, 2 * self._pause_s)
        return answers

    @property
    def pause_s(self) -> float:
        """How long to wait before the next poll, unless the daemon says something."""
        if self._flights:
            return min(self._pause_s, FLIGHT_PAUSE_S)
        return IDLE_PAUSE_S if self.is_idle else min(self._pause_s, SERVE_PAUSE_S)

    def _settle(self, flight: _Flight, state: str) -> list[bytes]:
        if state == "PROC":
            self._flights.append(flight)
            return []
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")
        self._nixl.release_xfer_handle(flight.handle)
        if flight.node in self._leaving:
            self.forget(flight.node)
        return [frames.pack({"kind": "done", "id": flight.number})]


class Process:
    """The agent, its daemon's socket, and the loop."""

    def __init__(self, connection: socket.socket, agent: Agent, populate: Populate) -> None:
        self._socket = connection
        self._agent = agent
        self._populate = populate
        self._unpacker = frames.Unpacker()

    def run(self) -> NoReturn:
        """Until the daemon is gone, or an error after which a transfer may still write."""
        self._socket.sendall(frames.pack({"kind": "ready"}, offer.pack(self._agent.offer)))
        while True:
            try:
                self._step()
            except Exception as error:
                # A transfer that failed may be half done, and NIXL cannot say when it stops: nobody but the
                # end of the process can.
                self._socket.sendall(frames.pack({"kind": "broken", "why": _name(error)}))
                os._exit(1)

    def _step(self) -> None:
        pause_s = self._agent.pause_s
        if self._agent.is_idle and self._populate.step():
            pause_s = 0.0
        readable, _, _ = select.select([self._socket], [], [], pause_s)
        if readable:
            data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                os._exit(0)  # the daemon is gone; leaving in an orderly way would run native exit handlers
            for head, body in self._unpacker.feed(data):
                self._take(head, body)
        for answer in self._agent.progress():
            self._socket.sendall(answer)

    def _take(self, head: dict[str, Any], body: bytes) -> None:
        try:
            match head["kind"]:
                case "pull":
                    for answer in self._agent.pull(head, body):
                        self._socket.sendall(answer)
                case "serve":
                    self._agent.serve(head["seconds"])
                case "forget":
                    self._agent.forget(head["node"])
                    self._socket.sendall(frames.pack({"kind": "done", "id": head["id"]}))
        except TransferFault as error:
            self._socket.sendall(frames.pack({"kind": "failed", "id": head["id"], "why": str(error)}))


class Populate:
    """Touches the arena's pages that memory stands behind, so that the first pulls need no page faults."""

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self._fd = fd
        self._memory = memory
        self._at = 0

    def step(self) -> bool:
        """Do some of it; False where nothing is left to do. Holes are skipped: touching fills them."""
        end = len(self._memory)
        if self._at >= end:
            return False
        try:
            begin = os.lseek(self._fd, self._at, os.SEEK_DATA)
            hole = os.lseek(self._fd, begin, os.SEEK_HOLE)
            stop = min(hole, begin + POPULATE_BYTES, end)
            if begin < stop:
                self._memory.madvise(_MADV_POPULATE_WRITE, begin, stop - begin)
            self._at = max(stop, self._at + mmap.PAGESIZE)
        except OSError:  # no data behind it, or an old kernel: pages come when they are needed
            self._at = end
        return True


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _load() -> tuple[Any, str]:
    """NIXL's Python module and its version."""
    import importlib
    import logging

    for name, distribution in PACKAGES.items():
        try:
            api = importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            continue
        logging.getLogger("nixl").setLevel(logging.ERROR)
        return api, packages.version(distribution)
    raise RuntimeError(f"none of {', '.join(PACKAGES.values())} is installed")


def _settle_process(parent: int) -> None:
    """End with the daemon, leave signals of the terminal to it, never dump the arena into a core file."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS)
    if os.getppid() != parent:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main(argv: list[str]) -> NoReturn:
    """Arguments: descriptor of the socket, of the arena, offset and size in it, process id of the daemon."""
    socket_fd, arena_fd, offset_bytes, size_bytes, parent = (int(each) for each in argv)
    _settle_process(parent)
    connection = socket.socket(fileno=socket_fd)
    try:
        fcntl.flock(
            arena_fd, fcntl.LOCK_SH | fcntl.LOCK_NB
        )  # like an engine: this mapping counts as long as it is there
        skip_bytes = offset_bytes % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(arena_fd, size_bytes + skip_bytes, offset=offset_bytes - skip_bytes)
        api, version = _load()
        agent = Agent(api, version, memory, size_bytes, skip_bytes)
    except Exception as error:
        connection.sendall(frames.pack({"kind": "unusable", "why": _name(error)}))
        os._exit(2)
    Process(connection, agent, Populate(arena_fd, memory)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
