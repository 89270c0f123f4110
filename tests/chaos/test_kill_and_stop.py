"""kill -9 and SIGSTOP of daemon and engines at random moments: no wrong byte, no leak after recovery."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.client import AdminClient
from kvtier.errors import KvtierError

FAULTS = 200
ENGINES = 2
SEED = int(os.environ.get("KVTIER_CHAOS_SEED", "20261202"))
START_TIMEOUT_S = 30.0
RECOVERY_TIMEOUT_S = 30.0
LEASE_TTL_S = 0.4
MAX_STOP_S = 0.8
"""Longer than any right to read or write: leases expire and slots go into quarantine under a stopped copy."""
ROOT = Path(__file__).parents[2]


@dataclass
class Cluster:
    """One daemon and its engines, as processes."""

    home: Path
    daemon: subprocess.Popen[bytes] | None = None
    engines: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    reports: list[Path] = field(default_factory=list)
    started: int = 0
    expired_leases: int = 0

    def count_expired(self) -> None:
        admin = AdminClient(str(self.socket))
        try:
            self.expired_leases += admin.status().counters.expired_leases
        except KvtierError:
            pass  # busy: one sample less
        finally:
            admin.close()

    @property
    def socket(self) -> Path:
        return self.home / "run" / "kvtier.sock"

    def start_daemon(self) -> None:
        options = {
            "KVTIER_DATA_DIR": self.home / "data",
            "KVTIER_RUN_DIR": self.home / "run",
            "KVTIER_SHM_DIR": self.home / "shm",
            "KVTIER_DRAM_BYTES": "24MiB",
            "KVTIER_EXTENT_BYTES": "1MiB",
            "KVTIER_METRICS_PORT": "-1",
            "KVTIER_LEASE_TTL_S": LEASE_TTL_S,
            "KVTIER_HOLD_TTL_S": LEASE_TTL_S,
            "KVTIER_RESERVATION_TTL_S": LEASE_TTL_S,
            "KVTIER_TICK_S": "0.1",
            "KVTIER_OLD_ARENA_DEADLINE_S": "2",
            "KVTIER_ENGINE_POLL_S": "0.1",
        }
        with (self.home / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "kvtier.cli.main", "serve"],
                env=os.environ | {name: str(value) for name, value in options.items()},
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        self.wait_for_status()

    def wait_for_status(self) -> object:
        admin = AdminClient(str(self.socket))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        try:
            while True:
                assert self.daemon is not None
                assert self.daemon.poll() is None, self.log()
                try:
                    return admin.status()
                except KvtierError:
                    assert time.monotonic() < deadline_s, self.log()
                    time.sleep(0.05)
        finally:
            admin.close()

    def start_engine(self, slot: int) -> None:
        self.started += 1
        report = self.home / f"engine-{self.started}.json"
        self.reports.append(report)
        with (self.home / "engines.log").open("ab") as log:
            self.engines[slot] = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.chaos.engine",
                    str(self.socket),
                    str(self.started),
                    str(report),
                ],
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    def log(self) -> str:
        return (self.home / "daemon.log").read_text()[-4000:]

    def close(self) -> None:
        for process in [*self.engines.values(), self.daemon]:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    shm = Path("/dev/shm") / f"kvtier-chaos-{os.getpid()}"
    shm.mkdir(mode=0o700)
    (tmp_path / "shm").symlink_to(shm)
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.close()
        for path in shm.iterdir():
            path.unlink()
        shm.rmdir()


def totals(cluster: Cluster) -> dict[str, int]:
    reports = [json.loads(path.read_text()) for path in cluster.reports if path.exists()]
    return {name: sum(report[name] for report in reports) for name in reports[0]}


def disturb(cluster: Cluster, dice: random.Random) -> str:
    """One fault; whatever was killed is started again, whatever was stopped goes on."""
    time.sleep(dice.uniform(0.02, 0.5))
    victim = dice.choice(["daemon", *cluster.engines])
    process = cluster.daemon if victim == "daemon" else cluster.engines[victim]
    assert process is not None
    assert process.poll() is None, f"{victim} died by itself: {cluster.log()}"
    if dice.random() < 0.5:
        process.send_signal(signal.SIGSTOP)
        time.sleep(dice.uniform(0.0, MAX_STOP_S))
        process.send_signal(signal.SIGCONT)
        return f"stop {victim}"
    if victim == "daemon":
        cluster.count_expired()
    process.kill()
    process.wait()
    if victim == "daemon":
        cluster.start_daemon()
    else:
        cluster.start_engine(victim)
    return f"kill {victim}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_and_stop_at_random_moments(cluster: Cluster) -> None:
    dice = random.Random(SEED)
    cluster.start_daemon()
    for slot in range(ENGINES):
        cluster.start_engine(slot)
    faults: dict[str, int] = {}
    for _ in range(FAULTS):
        kind = disturb(cluster, dice).split()[0]
        faults[kind] = faults.get(kind, 0) + 1

    for process in cluster.engines.values():
        process.terminate()
    for process in cluster.engines.values():
        assert process.wait(START_TIMEOUT_S) == 0, (cluster.home / "engines.log").read_text()[-2000:]
    counts = totals(cluster)
    cluster.count_expired()
    print(f"seed {SEED}: {faults}, {counts}, {cluster.expired_leases} leases expired")
    assert cluster.expired_leases, "no stop outlived a lease"
    assert counts["mismatches"] == 0
    assert counts["loaded"] > 1000, "the engines hardly loaded anything: the faults tested nothing"

    wait_until_nothing_is_leaked(cluster)
    check_that_it_still_works(cluster)


def wait_until_nothing_is_leaked(cluster: Cluster) -> None:
    """Every byte is resident or free, no engine is left, and the only arena is the live daemon's."""
    admin = AdminClient(str(cluster.socket))
    deadline_s = time.monotonic() + RECOVERY_TIMEOUT_S
    while True:
        status = admin.status()
        tier = status.tiers[0]
        held = {
            "reserved": tier.reserved_bytes,
            "quarantined": tier.quarantined_bytes,
            "draining": tier.draining_bytes,
            "leased": tier.leased_bytes,
            "old arenas": tier.old_arena_bytes,
            "missing": tier.capacity_bytes - tier.allocated_bytes,
            "engines": len(status.engines),
            "engine files": len(list((cluster.home / "run" / "engines").iterdir())),
            "arenas": len(list((cluster.home / "shm").glob("*.arena"))) - 1,
        }
        if not any(held.values()):
            break
        assert time.monotonic() < deadline_s, f"leaked: {held}\n{cluster.log()}"
        time.sleep(0.2)
    admin.close()


def check_that_it_still_works(cluster: Cluster) -> None:
    before = totals(cluster)
    cluster.start_engine(0)
    deadline_s = time.monotonic() + RECOVERY_TIMEOUT_S
    while totals(cluster)["loaded"] < before["loaded"] + 100:
        assert time.monotonic() < deadline_s, cluster.log()
        assert cluster.engines[0].poll() is None, (cluster.home / "engines.log").read_text()[-2000:]
        time.sleep(0.1)
    cluster.engines[0].terminate()
    assert cluster.engines[0].wait(START_TIMEOUT_S) == 0
    assert totals(cluster)["mismatches"] == 0
