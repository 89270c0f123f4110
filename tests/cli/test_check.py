from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import check, options, output, reach
from kvtier.cli.findings import DEGRADED, MISSING, OK, Finding
from kvtier.cli.probes import PROBES
from kvtier.config import Config
from kvtier.daemon import Daemon
from kvtier.demo.node import NodeProcess
from kvtier.errors import DeadlineExceeded, ResourceShortage
from kvtier.server.app import CONNECTIONS_PER_ENGINE, OTHER_CONNECTIONS
from tests.cli.conftest import Kvtier
from tests.remote.peering import certificates
from tests.tiers.file_harness import small_tmpfs

DEADLINE_S = 30.0


def config(directory: Path, **values: object) -> Config:
    settings = {
        "data_dir": directory / "data",
        "run_dir": directory / "run",
        "dram_bytes": 64 << 20,
        "metrics_port": 0,
    }
    return Config(**{**settings, **values})


def found(settings: Config) -> dict[str, Finding]:
    return {each["name"].split(" /")[0]: each for each in check.local_findings(settings)}


def test_a_machine_that_is_fine(short_dir: Path) -> None:
    findings = found(config(short_dir))
    for name in ("shared memory", "memory", "data_dir", "run_dir", "metrics port"):
        assert findings[name]["state"] == OK, findings[name]
    assert findings["daemon"]["state"] == MISSING
    assert findings["daemon"]["todo"] == "kvtier serve"
    assert not findings["daemon"]["needed"]


def test_a_running_daemon_is_seen_and_its_port_is_no_fault(node: NodeProcess) -> None:
    port = int(node.readiness["metrics_address"].rpartition(":")[2])
    findings = found(config(node.socket.parent.parent, socket=node.socket, metrics_port=port))
    assert findings["daemon"]["state"] == OK
    assert findings["metrics port"]["state"] == OK
    assert "the daemon has 16 MiB" in findings["shared memory"]["why"]


def test_too_little_memory(short_dir: Path) -> None:
    findings = found(config(short_dir, dram_bytes=1 << 49))
    for name in ("shared memory", "memory"):
        assert findings[name]["state"] == MISSING
        assert findings[name]["needed"]
        assert "KVTIER_DRAM_BYTES" in findings[name]["todo"]
    assert findings["memlock"]["state"] in (OK, DEGRADED)  # unlimited here or not


def test_shared_memory_of_one_extent_is_a_page_too_small(short_dir: Path) -> None:
    """What Docker gives by default; `check` says what `serve` says, and the advice leads somewhere."""
    with small_tmpfs(short_dir / "shm", 64 << 20) as shm:
        settings = config(short_dir, shm_dir=shm, dram_bytes="auto", index="none")
        finding = found(settings)["shared memory"]
        assert (finding["state"], finding["needed"]) == (MISSING, True)
        with pytest.raises(ResourceShortage, match=r"--shm-size.*extent_bytes"):
            asyncio.run(_start(settings))
        smaller = config(short_dir, shm_dir=shm, dram_bytes="auto", index="none", extent_bytes="8MiB")
        assert found(smaller)["shared memory"]["state"] == OK
        asyncio.run(_start(smaller))


async def _start(settings: Config) -> None:
    daemon = Daemon(settings)
    await daemon.start()
    await daemon.stop()


def test_shared_memory_on_a_disk_or_nowhere(short_dir: Path) -> None:
    assert found(config(short_dir, shm_dir="/proc/self"))["shared memory"]["state"] in (DEGRADED, MISSING)
    nowhere = found(config(short_dir, shm_dir=short_dir / "none"))["shared memory"]
    assert (nowhere["state"], nowhere["needed"]) == (MISSING, True)


def test_directories_that_cannot_be_made(short_dir: Path) -> None:
    (short_dir / "file").write_text("")
    finding = found(config(short_dir, data_dir=short_dir / "file" / "data"))["data_dir"]
    assert (finding["state"], finding["needed"]) == (MISSING, True)


def test_a_port_in_use_and_metrics_off(short_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finding = found(config(short_dir, metrics_port=taken.getsockname()[1]))["metrics port"]
    assert (finding["state"], finding["needed"]) == (MISSING, True)
    assert found(config(short_dir, metrics_port=-1))["metrics port"]["state"] == DEGRADED


def test_what_serve_refuses_is_not_called_ok(node: NodeProcess, short_dir: Path) -> None:
    """Asked through the functions that serve itself calls; nothing is made by asking."""
    home = node.socket.parent.parent
    other = config(short_dir / "other")
    owned = found(config(short_dir / "other", data_dir=home / "data"))["data_dir"]
    assert (owned["state"], owned["needed"]) == (MISSING, True)
    assert f"pid {node.readiness['pid']}" in owned["why"]
    own = found(config(home, socket=node.socket))
    assert own["data_dir"]["state"] == own["run_dir"]["state"] == OK
    open_to_all = short_dir / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    finding = found(config(short_dir / "other", run_dir=open_to_all))["run_dir"]
    assert (finding["state"], finding["needed"]) == (MISSING, True)
    assert "0777" in finding["why"]
    elsewhere = found(config(short_dir / "other", socket=short_dir / "elsewhere.sock"))["run_dir"]
    assert (elsewhere["state"], elsewhere["needed"]) == (MISSING, True)
    assert "a name in run_dir" in elsewhere["why"]
    (short_dir / "damaged").mkdir()
    for name in ("daemon.lock", "node.json"):
        (short_dir / "damaged" / name).write_text("nonsense")
    assert "damaged" in found(config(short_dir / "other", data_dir=short_dir / "damaged"))["data_dir"]["why"]
    assert found(other)["data_dir"]["state"] == OK
    assert not other.data_dir.exists()
    assert not other.run_dir.exists()


def test_a_socket_that_is_none_or_taken(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = short_dir / "taken"
    run.mkdir(mode=0o700)
    (run / "kvtier.sock").write_text("")
    assert "no socket" in found(config(short_dir, run_dir=run))["run_dir"]["why"]
    (run / "kvtier.sock").unlink()
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(run / "kvtier.sock"))
        assert found(config(short_dir, run_dir=run))["run_dir"]["state"] == OK  # a dead daemon's
        assert (run / "kvtier.sock").exists()
        taken.listen(0)
        monkeypatch.setattr(check, "DAEMON_TIMEOUT_S", 0.2)
        finding = found(config(short_dir, run_dir=run))["run_dir"]
    assert (finding["state"], finding["needed"]) == (MISSING, True)
    assert "listens" in finding["why"]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_daemon_that_hangs_is_not_missing(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said what is waited for while one waits, then what is true."""
    for module in (check, options):
        monkeypatch.setattr(module, "DAEMON_TIMEOUT_S", 0.5)
    monkeypatch.setattr(output, "NOTICE_AFTER_S", 0.05)
    with stopped(node.readiness["pid"]):
        finding = found(config(node.socket.parent.parent, socket=node.socket))["daemon"]
        with (
            pytest.raises(DeadlineExceeded, match="does not answer") as caught,
            options.daemon(None, str(node.socket)) as client,
        ):
            client.status()
    assert (finding["state"], finding["needed"]) == (DEGRADED, True)
    assert "does not answer" in finding["why"]
    assert output.exit_code(caught.value) == output.UNREACHABLE
    assert f"waiting for the daemon on {node.socket}" in capsys.readouterr().err
    with options.daemon(None, str(node.socket)) as client:
        assert client.status().node_id == node.readiness["node_id"]


def test_a_daemon_whose_connections_are_all_used_is_busy_not_missing(short_dir: Path, kvtier: Kvtier) -> None:
    shm = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/dev/shm"))
    limit = CONNECTIONS_PER_ENGINE + OTHER_CONNECTIONS
    with ExitStack() as opened:
        opened.callback(shutil.rmtree, shm)
        sizes = {"dram_bytes": 1 << 20, "extent_bytes": 1 << 20, "max_engines": 1}
        busy = opened.enter_context(NodeProcess(short_dir / "busy", shm_dir=shm, **sizes))
        busy.admin.close()
        for _ in range(limit):
            each = opened.enter_context(socket.socket(socket.AF_UNIX))
            each.settimeout(DEADLINE_S)
            each.connect(str(busy.socket))
            each.recv(1)  # it has been taken, or refused
        done = kvtier("status", "--socket", str(busy.socket))
        assert (done.returncode, done.stdout) == (output.UNREACHABLE, "")
        assert "is busy" in done.stderr
        assert "no daemon" not in done.stderr
        finding = found(config(short_dir / "busy", socket=busy.socket))["daemon"]
        assert (finding["state"], finding["needed"]) == (DEGRADED, True)
        assert "is busy" in finding["why"]


def test_peers_are_asked_all_at_once(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them hangs up only when all have been called."""
    monkeypatch.setattr(reach, "TIMEOUT_S", DEADLINE_S)
    all_called = threading.Barrier(3, timeout=DEADLINE_S / 2)

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            all_called.wait()

    with ExitStack() as opened:
        listeners = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        threads = [threading.Thread(target=answer, args=(each,), daemon=True) for each in listeners]
        for thread in threads:
            thread.start()
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in listeners]
        findings = reach.peer_findings(config(short_dir), addresses)
        for thread in threads:
            thread.join(DEADLINE_S)
    assert not all_called.broken
    assert [each["name"] for each in findings] == [f"peer {address}" for address in addresses]
    assert {each["state"] for each in findings} == {MISSING}


def test_what_takes_no_time_is_waited_for_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with output.patience("waiting"):
        pass
    assert capsys.readouterr().err == ""


def test_a_peer_port_in_use_and_one_that_is_chosen_at_start(short_dir: Path) -> None:
    shared = {"index": "redis://127.0.0.1:1"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = reach.own_finding(config(short_dir, peer_port=port, **shared))
        assert (finding["state"], finding["needed"]) == (MISSING, True)
        assert str(port) in finding["why"]
        own = reach.own_finding(config(short_dir, peer_port=port, **shared), is_running=True)
        assert (own["state"], f":{port}" in own["why"]) == (OK, True)
    assert ":0" not in reach.own_finding(config(short_dir, **shared))["why"]
    assert "chosen at start" in reach.own_finding(config(short_dir, **shared))["why"]


def test_file_systems() -> None:
    assert check._filesystem(Path("/proc/self")) == "proc"
    assert check._filesystem(Path("/dev/shm")) == "tmpfs"


@pytest.mark.parametrize("name", ["nixl", "gpu", "index"])
def test_probes_answer(name: str) -> None:
    for finding in check._probe(name):
        assert finding["state"] in (OK, DEGRADED, MISSING)
        assert finding["why"]
        assert finding["todo"] or finding["state"] == OK


def test_a_probe_that_fails_or_hangs_is_a_finding() -> None:
    (failed,) = check._probe("no such probe")
    assert failed["state"] == MISSING
    assert "KeyError" in failed["why"]
    (slow,) = check._probe("nixl", timeout_s=0.001)
    assert slow["state"] == MISSING
    assert "did not end" in slow["why"]


def test_the_command(kvtier: Kvtier, node: NodeProcess) -> None:
    skipped = [word for name in PROBES if name != "gpu" for word in ("--skip", name)]
    environment = {
        "KVTIER_SOCKET": str(node.socket),
        "KVTIER_DATA_DIR": str(node.socket.parent.parent / "data"),
        "KVTIER_RUN_DIR": str(node.socket.parent),
        "KVTIER_DRAM_BYTES": "64MiB",
    }
    path = str(node.socket.parent)
    done = kvtier("check", "--json", "--nvme", path, *skipped, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert f"nvme {path}" in {each["name"] for each in report["checks"]}
    assert {"shared memory", "memlock", "daemon", "cuda", "gds"} <= {
        each["name"] for each in report["checks"]
    }
    assert kvtier("check", "--nvme", "/nowhere", *skipped, **environment).returncode == 1
    bad = kvtier("check", *skipped, **{**environment, "KVTIER_SHM_DIR": "/nowhere"})
    assert bad.returncode == 1
    assert "KVTIER_SHM_DIR" in bad.stdout


def test_what_foreign_libraries_print_stays_off_stdout() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtier.cli.probes", "nixl"], capture_output=True, check=True
    )
    assert isinstance(json.loads(done.stdout), list)


def test_how_other_nodes_would_call_this_one(short_dir: Path) -> None:
    shared = {"index": "redis://127.0.0.1:1"}
    assert reach.own_finding(config(short_dir, **shared))["state"] == OK
    for values, state, word in (
        ({"peer_host": "10.0.0.7"}, MISSING, "tls_cert_file"),
        ({"peer_host": "0.0.0.0", "insecure": True}, MISSING, "peer_address"),
        ({"peer_host": "192.0.2.7", "insecure": True}, MISSING, "192.0.2.7"),  # nobody's address
        ({"peer_host": "0.0.0.0", "peer_address": "h:7", "insecure": True}, DEGRADED, "h:7"),
        ({"tls_cert_file": Path("/nowhere")}, MISSING, "tls_key_file"),
        ({"peer_port": -1}, DEGRADED, "-1"),
        ({"index": "none"}, DEGRADED, "index"),
    ):
        finding = reach.own_finding(config(short_dir, **{**shared, **values}))
        assert finding["state"] == state, finding
        assert word in finding["why"]
        assert finding["todo"]


def test_with_certificates_bytes_come_by_streams(short_dir: Path) -> None:
    values: dict[str, Any] = {"index": "redis://127.0.0.1:1", "peer_host": "0.0.0.0", "peer_address": "h:7"}
    values |= certificates(short_dir / "ca")
    finding = reach.own_finding(config(short_dir, **values))
    assert finding["state"] == DEGRADED
    assert "streams alone" in finding["why"]
    assert "KVTIER_TRANSFER" in finding["todo"]
    for transfer in ("nixl", "stream"):
        assert reach.own_finding(config(short_dir, **values, transfer=transfer))["state"] == OK


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1", "http://somewhere", "redis+cluster://127.0.0.1:1", "rediss://u:secret@"]
)
def test_an_index_that_cannot_be_reached(short_dir: Path, url: str) -> None:
    finding = reach.index_finding(config(short_dir, index=url))
    assert (finding["state"], finding["needed"]) == (MISSING, True)
    assert finding["todo"]
    assert "secret" not in finding["why"]
