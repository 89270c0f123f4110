"""A daemon of its own for the demo, the tests and the benchmarks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from kvtier.client import AdminClient
from kvtier.demo.processes import DemoFailed, Supervised
from kvtier.v1 import admin_pb2 as pb

START_TIMEOUT_S: Final = 60.0
STORE_TIMEOUT_S: Final = 30.0
PEERS_TIMEOUT_S: Final = 60.0
ENGINE_CLIENTS: Final = 2
"""vLLM's scheduler and its worker register one by one."""
_POLL_S: Final = 0.02


class NodeProcess:
    """`kvtier serve` in a private directory; ready when constructed, a context manager.

    Parameters
    ----------
    directory
        Private and short (it holds the socket); the caller removes it. A node that is started again in the
        same directory is the same node with its next incarnation.
    options
        Fields of `Config` beyond what this sets: directories, and any free metrics port.

    Attributes
    ----------
    readiness
        What ``kvtier serve --json`` said.
    start_s
        From before the process was started until it was ready.
    """

    def __init__(self, directory: Path, **options: object) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self.socket = directory / "run" / "kvtier.sock"
        values = {
            "data_dir": directory / "data",
            "run_dir": self.socket.parent,
            "socket": self.socket,
            "metrics_port": 0,
            **options,
        }
        command = [sys.executable, "-m", "kvtier.cli.main", "serve", "--json", "--log-format", "json"]
        for name, value in values.items():
            option = name.replace("_", "-")
            command += (
                [f"--{'' if value else 'no-'}{option}"]
                if isinstance(value, bool)
                else [f"--{option}", str(value)]
            )
        log = directory / "daemon.log"
        log.unlink(missing_ok=True)
        begin_s = time.monotonic()
        self.process = Supervised("the kvtier daemon", command, log=log, environment=_environment())
        self.readiness: Mapping[str, Any] = {}
        try:
            self.process.wait_until(self._is_ready, timeout_s=START_TIMEOUT_S)
            self.start_s = time.monotonic() - begin_s
            self.admin = AdminClient(str(self.socket))
        except BaseException:
            self.process.stop()
            raise

    def _is_ready(self) -> bool:
        # stdout and stderr share the file: the readiness is the one object that is no log line
        for text in f"\n{self.process.tail()}".split("\n{\n")[1:]:
            try:
                self.readiness, _ = json.JSONDecoder().raw_decode("{" + text)
            except ValueError:
                return False
            return True
        return False

    def status(self) -> pb.GetStatusResponse:
        """The daemon's status."""
        return self.admin.status()

    def wait_stored(self, blocks: int, *, timeout_s: float = STORE_TIMEOUT_S) -> None:
        """Wait until `blocks` blocks in all have been stored here; raises `DemoFailed`."""
        self._wait(
            lambda: self.status().counters.stored_blocks >= blocks,
            f"the engine did not store {blocks} blocks",
            timeout_s,
        )

    def wait_blocks(self, tier: str, blocks: int) -> None:
        """Wait until the tier has `blocks` blocks or more; raises `DemoFailed`."""
        self._wait(
            lambda: any(its.name == tier and its.blocks >= blocks for its in self.status().tiers),
            f"the tier {tier} did not get {blocks} blocks",
            STORE_TIMEOUT_S,
        )

    def wait_published(self) -> None:
        """Wait until the index knows all that is here; raises `DemoFailed`."""

        def is_published() -> bool:
            status = self.status()
            return status.index_reachable and status.unpublished == 0

        self._wait(is_published, "the index was not told what is here", PEERS_TIMEOUT_S)

    def wait_peers(self, count: int) -> None:
        """Wait until it lists `count` live nodes, itself included; raises `DemoFailed`."""
        self._wait(
            lambda: len(self.admin.list_nodes().nodes) >= count,
            f"the index does not list {count} nodes",
            PEERS_TIMEOUT_S,
        )

    def wait_engine(self) -> None:
        """Wait until an engine's two processes are registered and the whole arena is there; `DemoFailed`."""

        def is_ready() -> bool:
            status = self.status()
            return status.state == "serving" and len(status.engines) >= ENGINE_CLIENTS

        self._wait(is_ready, "no engine registered with the new daemon", PEERS_TIMEOUT_S)

    def _wait(self, until: Callable[[], bool], fault: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline:
                raise DemoFailed(f"{fault} within {timeout_s:.0f} s\n{self.process.tail()}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the daemon in order; idempotent."""
        self.admin.close()
        self.process.stop()

    def kill(self) -> None:
        """End the daemon as a crash would."""
        self.admin.close()
        self.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _environment() -> dict[str, str]:
    """Ours without KVTIER_*: what a user set for the real daemon is not meant for this one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
