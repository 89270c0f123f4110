"""Starts that fail leave nothing behind, stops neither; engines die, daemons restart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.daemon import Daemon
from kvtier.errors import AlreadyRunning, ConfigError, ResourceShortage
from tests.server import harness
from tests.server.harness import DEADLINE_S, LAYOUT, RawEngine, Wire, chain, until

KEYS = chain(1, 4)
ROOT = Path(__file__).parents[2]


def nothing_is_left(home: Path, shm: Path) -> None:
    assert list(shm.iterdir()) == []
    assert not (home / "run" / "kvtier.sock").exists()


async def starts(config: Any) -> None:
    """The same directories serve a new daemon: no lock, port or socket was left taken."""
    daemon = Daemon(config)
    await daemon.start()
    await daemon.stop()


# ---- starts that cannot be


async def test_a_data_directory_owned_by_a_live_daemon(daemon: Daemon, wire: Wire, tmp_path: Path) -> None:
    before = await wire.state()
    files = sorted(daemon.config.shm_dir.iterdir())
    # with everything else of its own
    other = harness.config(tmp_path, daemon.config.shm_dir, run_dir=tmp_path / "other")
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"):
        await Daemon(other).start()
    assert not (tmp_path / "other").exists()
    assert await wire.state() == before
    assert sorted(daemon.config.shm_dir.iterdir()) == files


async def test_a_socket_that_another_daemon_answers_on(daemon: Daemon, wire: Wire, tmp_path: Path) -> None:
    before = await wire.state()
    other = harness.config(tmp_path, daemon.config.shm_dir, data_dir=tmp_path / "other")
    with pytest.raises(AlreadyRunning, match=r"kvtier\.sock"):
        await Daemon(other).start()
    assert not (tmp_path / "other").exists()
    assert await wire.state() == before


async def test_a_socket_of_a_dead_daemon_is_replaced(tmp_path: Path, shm: Path) -> None:
    config = harness.config(tmp_path, shm)
    config.run_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(config.socket))
    assert config.socket.is_socket()
    daemon = Daemon(config)
    await daemon.start()
    wire = Wire(daemon.socket)
    assert (await wire.status()).state == "serving"
    assert config.socket.stat().st_mode & 0o777 == 0o600
    assert config.run_dir.stat().st_mode & 0o777 == 0o700
    await wire.close()
    await daemon.stop()
    nothing_is_left(tmp_path, shm)


async def test_a_file_where_the_socket_should_be(tmp_path: Path, shm: Path) -> None:
    config = harness.config(tmp_path, shm)
    config.run_dir.mkdir(mode=0o700)
    config.socket.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        await Daemon(config).start()
    assert config.socket.read_text() == "precious"
    assert list(shm.iterdir()) == []


async def test_a_socket_that_engines_would_look_for_elsewhere(tmp_path: Path, shm: Path) -> None:
    config = harness.config(tmp_path, shm, socket=tmp_path / "elsewhere" / "kvtier.sock")
    with pytest.raises(ConfigError, match=r"socket is .* run_dir"):
        await Daemon(config).start()
    nothing_is_left(tmp_path, shm)
    await starts(harness.config(tmp_path, shm, socket=tmp_path / "run" / "another.sock"))


async def test_a_metrics_port_in_use(tmp_path: Path, shm: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = harness.config(tmp_path, shm, metrics_port=port)
        with pytest.raises(ResourceShortage, match=f"metrics_port {port}"):
            await Daemon(config).start()
        nothing_is_left(tmp_path, shm)
    await starts(config)


async def test_an_arena_larger_than_memory(tmp_path: Path, shm: Path) -> None:
    config = harness.config(tmp_path, shm, dram_bytes=1 << 45, metrics_port=0)
    with pytest.raises(ResourceShortage, match="dram_bytes"):
        await Daemon(config).start()
    nothing_is_left(tmp_path, shm)
    await starts(harness.config(tmp_path, shm))


async def test_a_start_that_is_cancelled(tmp_path: Path, shm: Path) -> None:
    begun = asyncio.Event()
    daemon = Daemon(harness.config(tmp_path, shm, dram_bytes=64 << 20), lambda *_: begun.set())
    start = asyncio.create_task(daemon.start())
    await begun.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    nothing_is_left(tmp_path, shm)
    await starts(harness.config(tmp_path, shm))


async def test_a_stop_twice_and_a_stop_before_the_start(tmp_path: Path, shm: Path) -> None:
    daemon = Daemon(harness.config(tmp_path, shm))
    await daemon.stop()
    daemon = Daemon(harness.config(tmp_path, shm))
    await daemon.start()
    await daemon.stop()
    await daemon.stop()
    nothing_is_left(tmp_path, shm)


# ---- metrics


async def scrape(address: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE_S) as reply:
            return str(reply.read().decode())

    return await asyncio.to_thread(get)


async def test_metrics_on_loopback(tmp_path: Path, shm: Path) -> None:
    daemon = Daemon(harness.config(tmp_path, shm, metrics_port=0))
    await daemon.start()
    wire = Wire(daemon.socket)
    engine = RawEngine(wire, daemon.config.run_dir)
    await engine.register()
    await engine.store(KEYS)
    with pytest.raises(grpc.aio.AioRpcError):
        await wire.engine.Release(engine.release_request(lease_id=5))
    status = await wire.status()
    assert status.metrics_address == daemon.metrics_address
    assert daemon.metrics_address.startswith("127.0.0.1:")
    text = await scrape(daemon.metrics_address)
    lines = text.splitlines()
    assert "kvtier_stored_blocks_total 4.0" in lines
    assert f'kvtier_tier_bytes{{state="resident",tier="dram"}} {4.0 * LAYOUT.slot_bytes}' in lines
    assert 'kvtier_rpc_errors_total{error="UnknownId",method="Release"} 1.0' in lines
    assert 'kvtier_rpc_seconds_count{method="Reserve"} 1.0' in lines
    # few series, and none that names an engine or a key
    assert sum(not line.startswith("#") for line in lines) < 300
    assert engine.name not in text
    assert KEYS[0].hex() not in text
    engine.close()
    await wire.close()
    await daemon.stop()
    with socket.socket() as again:  # the port is free
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(daemon.metrics_address.rpartition(":")[2])))


async def test_a_client_of_the_metrics_that_says_nothing_holds_nobody_up(tmp_path: Path, shm: Path) -> None:
    daemon = Daemon(harness.config(tmp_path, shm, metrics_port=0))
    await daemon.start()
    host, _, port = daemon.metrics_address.rpartition(":")
    with socket.create_connection((host, int(port))) as silent:
        assert "kvtier_uptime_seconds" in await scrape(daemon.metrics_address)
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # it was not only answered after this one had been left
            silent.recv(1)
        await daemon.stop()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((host, int(port)))


# ---- engines that die


ENGINE_SCRIPT = """
import asyncio, sys
from pathlib import Path
from tests.server.harness import RawEngine, Wire, chain

async def main():
    wire = Wire(Path(sys.argv[1]))
    engine = RawEngine(wire, Path(sys.argv[2]), name="victim")
    await engine.register()
    await engine.store(chain(1, 4))
    await wire.engine.Lookup(engine.lookup_request(chain(1, 4), "held"))
    await engine.load(chain(1, 4))
    await engine.reserve(chain(5, 3))
    print("ready", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_an_engine_that_is_killed_frees_everything_and_disturbs_nobody(
    daemon: Daemon, engine: RawEngine, wire: Wire
) -> None:
    await engine.store(chain(2, 4))
    (mine,) = await engine.load(chain(2, 4))
    reserved = await engine.reserve(chain(3, 2))
    before = await wire.state()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENGINE_SCRIPT, str(daemon.socket), str(daemon.config.run_dir),
        stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), DEADLINE_S) == b"ready\n"
        status = await wire.status()
        assert {e.engine_id for e in status.engines} == {"victim", engine.name}
        tier = status.tiers[0]
        assert tier.reserved_bytes == 5 * LAYOUT.slot_bytes
        assert tier.leased_bytes >= 8 * LAYOUT.slot_bytes
        assert (daemon.config.run_dir / "engines" / "victim.lock").exists()
    finally:
        process.kill()
        await process.wait()

    async def buried() -> bool:
        return len((await wire.status()).engines) == 1

    await until(buried, "the dead engine is noticed")
    after = await wire.state()
    assert list(after.engines) == list(before.engines)
    assert after.tiers[0].reserved_bytes == before.tiers[0].reserved_bytes
    assert after.counters.dead_engines == 1
    assert not (daemon.config.run_dir / "engines" / "victim.lock").exists()
    # what it had committed is here; what it held for a request is held until the request's hold ends
    assert (await wire.engine.Lookup(engine.lookup_request(chain(1, 4), "held"))).blocks == 4
    assert (await wire.engine.Release(engine.release_request(request_id="held"))).valid
    # what the other engine had goes on as if nothing had been
    assert (await wire.engine.Release(engine.release_request(lease_id=mine.lease_id))).valid
    request = engine.commit_request(reserved.reservation_id, chain(3, 2))
    assert (await wire.engine.Commit(request)).committed == 2
    assert daemon.node is not None
    daemon.node.core.check()
    # and the name can be used again
    again = RawEngine(wire, daemon.config.run_dir, name="victim")
    await again.register()
    again.close()


async def test_lock_files_of_dead_engines_are_removed_at_start(tmp_path: Path, shm: Path) -> None:
    config = harness.config(tmp_path, shm)
    engines = config.run_dir / "engines"
    engines.mkdir(mode=0o700, parents=True)
    config.run_dir.chmod(0o700)
    (engines / "dead.lock").touch(0o600)
    (engines / "notes.txt").touch(0o600)
    await starts(config)
    assert [path.name for path in engines.iterdir()] == ["notes.txt"]


# ---- daemons that die


async def test_a_restart_knows_no_engine_and_grows_as_they_let_go(tmp_path: Path, shm: Path) -> None:
    config = harness.config(tmp_path, shm, old_arena_deadline_s=3600)
    daemon = Daemon(config)
    await daemon.start()
    wire = Wire(daemon.socket)
    engine = RawEngine(wire, config.run_dir)
    first = await engine.register()
    await engine.store(KEYS)
    lease = (await engine.load(KEYS))[0].lease_id
    await wire.close()
    await daemon.stop()

    daemon = Daemon(config)
    await daemon.start()
    wire = engine.wire = Wire(daemon.socket)
    status = await wire.status()
    assert status.incarnation > first.incarnation
    assert len(status.engines) == 0
    for call in (
        wire.engine.Lookup(engine.lookup_request(KEYS)),
        wire.engine.Release(engine.release_request(lease_id=lease)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert "register" in (caught.value.details() or "")
    assert engine.memory is not None
    engine.memory.close()
    second = await engine.register()
    assert second.incarnation == status.incarnation
    assert (await wire.engine.Lookup(engine.lookup_request(KEYS))).blocks == 0
    await engine.store(KEYS)
    engine.close()
    await wire.close()
    await daemon.stop()


SERVE_SCRIPT = """
import asyncio, json, sys
from kvtier.config import Config
from kvtier.daemon import run_daemon

asyncio.run(run_daemon(
    Config(**json.loads(sys.argv[1])),
    on_ready=lambda daemon: print("ready", flush=True),
    on_progress=lambda done, total: print("progress", done, total, flush=True),
))
print("stopped", flush=True)
"""


def serve(config: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVE_SCRIPT, config.model_dump_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def read_until(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(word):
            return lines
    raise AssertionError(f"never said {word}: {lines}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(tmp_path: Path, shm: Path, number: signal.Signals) -> None:
    process = serve(harness.config(tmp_path, shm, log_format="json"))
    lines = read_until(process, "ready")
    assert lines[-2] == f"progress {4 << 20} {4 << 20}\n"
    assert len(list(shm.glob("*.arena"))) == 1
    process.send_signal(number)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "stopped\n")
    events = [json.loads(line) for line in err.splitlines()]
    assert [event["event"] for event in events] == ["ready", "stopped"]
    nothing_is_left(tmp_path, shm)
    assert list((tmp_path / "run" / "engines").iterdir()) == []


def test_a_signal_during_the_start_leaves_nothing(tmp_path: Path, shm: Path) -> None:
    process = serve(harness.config(tmp_path, shm, dram_bytes=1 << 30))
    read_until(process, "progress")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert out.endswith("stopped\n")
    nothing_is_left(tmp_path, shm)


async def test_a_killed_daemons_memory_counts_until_engines_let_go(tmp_path: Path, shm: Path) -> None:
    config = harness.config(tmp_path, shm, old_arena_deadline_s=3600)
    process = serve(config)
    read_until(process, "ready")
    wire = Wire(config.socket)
    engine = RawEngine(wire, config.run_dir)
    await engine.register()
    await engine.store(KEYS)
    process.kill()
    process.communicate()
    await wire.close()

    daemon = Daemon(config)
    await daemon.start()
    wire = engine.wire = Wire(daemon.socket)
    status = await wire.status()
    assert status.state == "growing"
    tier = status.tiers[0]
    assert tier.old_arena_bytes + tier.allocated_bytes <= tier.capacity_bytes
    assert tier.old_arena_bytes > 0
    assert any("earlier daemon" in notice for notice in status.notices)
    assert engine.memory is not None
    engine.memory.close()

    async def grown() -> bool:
        status = await wire.status()
        return status.state == "serving" and status.tiers[0].old_arena_bytes == 0

    await until(grown, "the arena grows to its cap")
    await engine.register()
    await engine.store(KEYS)
    engine.close()
    await wire.close()
    await daemon.stop()
    nothing_is_left(tmp_path, shm)


async def test_a_bug_stops_the_daemon(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a bug left half done is not served from: the node says so, and whoever runs it stops it."""
    from kvtier.core import messages
    from kvtier.daemon import run_daemon

    ready: asyncio.Future[Callable[[], None]] = asyncio.get_running_loop().create_future()
    config = harness.config(tmp_path, shm)

    def broken(event: Any, now_s: float) -> list[Any]:
        raise AssertionError("an invariant does not hold")

    def on_ready(daemon: Daemon) -> None:
        assert daemon.node is not None
        monkeypatch.setitem(daemon.node.core._handlers, messages.Tick, broken)
        ready.set_result(lambda: None)

    with pytest.raises(RuntimeError, match="bug"):
        await asyncio.wait_for(run_daemon(config, on_ready), DEADLINE_S)
    assert ready.done()
    nothing_is_left(tmp_path, shm)
