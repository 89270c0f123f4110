"""`kvtier demo` as a newcomer runs it: what it shows, and that nothing of it is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

DEMO_TIMEOUT_S = 900.0
GONE_TIMEOUT_S = 30.0
KEYS = {
    "cold_ttft_s",
    "engine_hot_ttft_s",
    "local_hit_ttft_s",
    "restart_hit_ttft_s",
    "prompt_tokens",
    "loaded_tokens",
    "texts_equal",
}


class Demo:
    """A demo process, every process that was ever seen below it, and what lay around before."""

    def __init__(self, result: Path) -> None:
        self.result = result
        self.before = leavings()
        self.seen: dict[int, psutil.Process] = {}
        self.process = psutil.Popen(
            [sys.executable, "-m", "kvtier.cli.main", "demo", "--json", str(result)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def watch(self) -> list[str]:
        """Note the processes that are there now; returns their command lines."""
        lines = []
        try:
            for child in self.process.children(recursive=True):
                self.seen[child.pid] = child
                lines.append(" ".join(child.cmdline()))
        except psutil.Error:  # one ended while it was looked at
            pass
        return lines

    def wait(self) -> int:
        """The exit status."""
        deadline_s = time.monotonic() + DEMO_TIMEOUT_S
        while self.process.poll() is None:
            self.watch()
            assert time.monotonic() < deadline_s, "the demo did not end"
            time.sleep(0.2)
        return int(self.process.returncode)

    def assert_nothing_is_left(self) -> None:
        """Neither processes nor shared memory nor directories."""
        _, alive = psutil.wait_procs(list(self.seen.values()), GONE_TIMEOUT_S)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert leavings() <= self.before

    def close(self) -> None:
        for process in [self.process, *self.seen.values()]:
            if process.is_running():
                process.kill()
        self.process.communicate()


def leavings() -> set[Path]:
    """What a demo could leave behind."""
    return {*Path("/dev/shm").glob("kvtier-*"), *Path("/tmp").glob("kvtier-demo-*")}


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path / "result.json")
    try:
        yield demo
    finally:
        demo.close()


@pytest.mark.slow
@pytest.mark.timeout(DEMO_TIMEOUT_S + 60)
def test_a_prefix_computed_once_is_loaded(demo: Demo) -> None:
    status = demo.wait()
    assert demo.process.stdout is not None
    output = demo.process.stdout.read().decode()
    assert status == 0, output[-4000:]
    result = json.loads(demo.result.read_text())
    assert result.keys() >= KEYS
    assert result["texts_equal"] is True
    assert result["prompt_tokens"] > 3900
    assert result["loaded_tokens"] >= 0.95 * (result["prompt_tokens"] - 32)
    # Loading is an order of magnitude faster; a third holds on any machine and fails if it was computed.
    assert result["local_hit_ttft_s"] < result["cold_ttft_s"] / 3
    assert result["restart_hit_ttft_s"] < result["cold_ttft_s"] / 3
    demo.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.timeout(DEMO_TIMEOUT_S + 60)
def test_interrupted_in_the_middle_nothing_is_left(demo: Demo) -> None:
    deadline_s = time.monotonic() + DEMO_TIMEOUT_S
    while not any("api_server" in line for line in demo.watch()):
        assert demo.process.poll() is None, "the demo ended before its engine was there"
        assert time.monotonic() < deadline_s, "no engine was started"
        time.sleep(0.1)
    time.sleep(3.0)  # the engine has started processes of its own by now
    demo.watch()
    demo.process.send_signal(signal.SIGINT)
    assert demo.wait() == 128 + signal.SIGINT
    demo.assert_nothing_is_left()
    assert not demo.result.exists()
