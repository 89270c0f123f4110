"""The private server: starts, dies with its owner however that dies, comes back, leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, IndexFault
from kvtier.index import embedded, open_index
from kvtier.index.embedded import LOG_NAME, SOCKET_NAME, EmbeddedIndex
from kvtier.testing.index_tests import begin, blocks_of, eventually, found, place, record_of
from kvtier.types import TierKind
from tests.index.conftest import MakeConfig
from tests.index.servers import wait_until


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def make(make_config: MakeConfig) -> EmbeddedIndex:
    index = open_index(make_config())
    assert isinstance(index, EmbeddedIndex)
    return index


async def test_life(make_config: MakeConfig, tmp_path: Path) -> None:
    """Open and close, again and again; nobody else can reach it; nothing but its log is left."""
    index = make(make_config)
    await index.close()
    pids = set()
    for _ in range(2):
        await index.open()
        await index.open()
        pid = index.pid
        assert pid is not None
        pids.add(pid)
        assert is_alive(pid)
        assert stat.S_IMODE((tmp_path / SOCKET_NAME).stat().st_mode) == 0o700
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        inodes = {link.partition("[")[2].rstrip("]") for link in links if link.startswith("socket:")}
        tcp = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        assert not inodes & {line.split()[9] for line in tcp.splitlines() if len(line.split()) > 9}
        record = await begin(index, record_of(1))
        await index.publish(record, blocks_of(3), TierKind.DRAM)
        assert await found(index, blocks_of(3)) == [{place(record)}] * 3
        await index.close()
        await index.close()
        assert not is_alive(pid)
        assert index.pid is None
        assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]
    assert len(pids) == 2


async def test_its_death_is_healed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed, it is started again; the node learns that everything is lost."""
    monkeypatch.setattr(embedded, "RESTART_AFTER_S", 0.05)
    index = make(make_config)
    await index.open()
    record = await begin(index, record_of(1))
    for _ in range(2):
        pid = index.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

        async def is_back() -> bool:
            try:
                return not await index.heartbeat(record)
            except IndexFault:
                return False

        await eventually(is_back)
        assert index.pid != pid
        assert await index.heartbeat(record)
    await index.close()


async def test_restarting_is_given_up_with_close(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "RESTART_AFTER_S", 0.05)
    index = make(make_config)
    await index.open()
    monkeypatch.setattr(EmbeddedIndex, "_command", lambda self: ["/bin/false"])
    assert index.pid is not None
    os.kill(index.pid, signal.SIGKILL)
    await asyncio.sleep(0.3)
    with pytest.raises(IndexFault):
        await index.nodes()
    await index.close()
    assert index.pid is None


async def test_does_not_start(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Says what the server said; leaves nothing."""
    broken = ["/bin/sh", "-c", "echo no room at the inn >&2; exit 3"]
    monkeypatch.setattr(EmbeddedIndex, "_command", lambda self: broken)
    index = make(make_config)
    with pytest.raises(IndexFault, match="no room at the inn"):
        await index.open()
    assert index.pid is None
    assert not (tmp_path / SOCKET_NAME).exists()


async def test_starts_too_slowly(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(EmbeddedIndex, "_command", lambda self: ["/bin/sleep", "1000"])
    index = make(make_config)
    with pytest.raises(IndexFault, match="does not start"):
        await index.open()
    assert index.pid is None


async def _is_started(index: EmbeddedIndex) -> bool:
    return index.pid is not None


async def test_open_is_cancelled(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller with a deadline of its own leaves no process behind."""
    monkeypatch.setattr(EmbeddedIndex, "_command", lambda self: ["/bin/sleep", "1000"])
    index = make(make_config)
    task = asyncio.create_task(index.open())
    await eventually(lambda: _is_started(index))
    pid = index.pid
    assert pid is not None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not is_alive(pid)
    await index.close()


async def test_a_stale_socket_is_in_nobodys_way(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / SOCKET_NAME).write_text("left behind")
    index = make(make_config)
    await index.open()
    assert await index.nodes() == []
    await index.close()


def test_a_path_that_is_too_long(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose a shorter run_dir"):
        open_index(make_config(run_dir=tmp_path / ("x" * 100), socket="/tmp/s"))


OWNER = """
import asyncio, signal, sys
from pathlib import Path
from kvtier.config import Config
from kvtier.index import open_index

async def main():
    path = Path(sys.argv[1])
    index = open_index(Config(run_dir=path, data_dir=path, dram_bytes="64MiB"))
    await index.open()
    print(index.pid, flush=True)
    await asyncio.sleep(1000)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_dies_with_its_owner(number: signal.Signals, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_alive(pid)
        owner.send_signal(number)
        owner.wait(10)
        wait_until(lambda: not is_alive(pid), "the server's death")
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
