"""The demo as a user runs it: what it reports, and that nothing is left, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.demo.guard import descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
DEMO = [sys.executable, "-m", "kvtier.cli.main", "demo"]
STEP_DEADLINE_S = 900.0


def traces() -> set[str]:
    """What a demo could leave behind where everybody can see it."""
    return {
        str(path)
        for where, pattern in (
            ("/dev/shm", "*"),
            ("/tmp", "kvtier-demo-*"),
            ("/tmp", "vllm*"),
            ("/tmp", "valkey-*"),
        )
        for path in Path(where).glob(pattern)
    }


def processes_of(mark: str) -> list[int]:
    """Every process that carries `mark` in its environment, wherever it was handed to."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                environment = Path("/proc", entry, "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in environment:
                found.append(int(entry))
    return found


@pytest.fixture
def marked() -> Iterator[dict[str, str]]:
    """An environment by which everything that the demo starts can be told from what others run."""
    mark = f"KVTIER_TEST_MARK_{os.getpid()}_{time.monotonic_ns()}"
    yield {**os.environ, mark: "1"}
    left = processes_of(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def left_by(pids: set[int], before: set[str]) -> set[str]:
    """New traces, less those of tests that run at the same time: named by a process, or by a kvtier node."""
    return {
        trace
        for trace in traces() - before
        if "kvtier-demo-" in trace or any(f"_{pid}_" in trace or f"-{pid}-" in trace for pid in pids)
    }


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STEP_DEADLINE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_demo(tmp_path: Path, marked: dict[str, str]) -> None:
    before = traces()
    seen: set[int] = set()
    target = tmp_path / "result.json"
    with subprocess.Popen(
        [*DEMO, "--json", str(target)], env=marked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        while demo.poll() is None:
            seen.update(descendants(demo.pid))
            time.sleep(0.5)
        assert demo.stdout is not None
        assert demo.stderr is not None
        out, err = demo.stdout.read(), demo.stderr.read()
    assert demo.returncode == 0, out + err
    result = json.loads(target.read_text())
    assert result["texts_equal"] is True
    runs = {run["name"]: run for run in result["runs"]}
    first, second = result["reference_texts"]
    assert first == result["reference_text"]
    assert first.strip() != second.strip() != ""
    assert {run["text"] for run in runs.values() if run["question"] == 1} == {first}
    assert {run["text"] for run in runs.values() if run["question"] == 2} == {second}
    block = result["block_tokens"]
    assert 3900 <= result["prompt_tokens"] <= 4100
    whole = result["prompt_tokens"] // block * block
    shared = result["shared_prefix_tokens"] // block * block
    assert shared < whole
    loaded = {name: run["loaded_tokens"] for name, run in runs.items()}
    assert loaded["cold"] == loaded["engine hot"] == 0
    assert loaded["remote hit"] >= 0.95 * shared
    for name in ("local hit", "restart hit", "replica hit", "refill hit"):
        assert 0.95 * whole <= loaded[name] <= whole
    assert result["loaded_tokens"] == min(loaded[name] for name in loaded if name.endswith(" hit"))
    assert {name for name, run in runs.items() if run["pulled_tokens"]} == {"remote hit", "refill hit"}
    assert {name: run["node"] for name, run in runs.items() if "hit" in name} == {
        "local hit": "A",
        "restart hit": "A",
        "remote hit": "B",
        "replica hit": "B",
        "refill hit": "A",
    }
    for name in runs:
        assert 0 < result[f"{name.replace(' ', '_')}_ttft_s"] < result["seconds"]
    assert result["transfer"] in ("nixl", "stream")
    for text in ("restart hit", "remote hit", "refill hit", "the other node"):
        assert text in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json"]
    assert left_by(seen, before) == set()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, marked: dict[str, str], signum: signal.Signals
) -> None:
    before = traces()
    log = tmp_path / "stderr"
    target = tmp_path / "result.json"
    with log.open("w") as errors:
        demo = subprocess.Popen([*DEMO, "--json", str(target)], env=marked, stdout=errors, stderr=errors)
    # With SIGINT while the nodes start, with SIGTERM when both are there and two engines start.
    step = "starting an index and the nodes" if signum is signal.SIGINT else "starting two vLLM servers"
    wait_for(lambda: step in log.read_text() or demo.poll() is not None)
    some = 3 if signum is signal.SIGINT else 11
    wait_for(lambda: len(descendants(demo.pid)) >= some or demo.poll() is not None)
    seen = set(descendants(demo.pid))
    demo.send_signal(signum)
    assert demo.wait(60) == 128 + signum, log.read_text()
    assert "everything that was started is gone" in log.read_text()
    assert not target.exists()
    assert left_by(seen, before) == set()
