"""`kvtier check`: what works on this machine, why not, and what to do."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from kvtier import machine
from kvtier.cli import output
from kvtier.cli.findings import DEGRADED, MISSING, OK, Finding, finding
from kvtier.cli.memory import memory_findings
from kvtier.cli.options import (
    DAEMON_TIMEOUT_S,
    AsJson,
    ConfigFile,
    is_listened_on,
    with_config_options,
)
from kvtier.cli.probes import PROBES
from kvtier.cli.reach import TIMEOUT_S, check_addresses, index_finding, own_finding, peer_findings
from kvtier.cli.storage import storage_findings
from kvtier.client import AdminClient
from kvtier.config import Config
from kvtier.errors import DeadlineExceeded, KvtierError, ResourceShortage
from kvtier.identity import node_id_of, refuse_owned
from kvtier.liveness import check_run_dir, check_socket_place
from kvtier.metrics import Metrics, MetricsServer
from kvtier.types import PAGE_SIZE_BYTES, TierKind
from kvtier.v1 import admin_pb2 as pb

PROBE_TIMEOUT_S: Final = 90.0
_ASKED: Final = 3
"""Index, peers and storage are asked at the same time, while this thread asks the daemon."""
_COLOURS: Final = {OK: "green", DEGRADED: "yellow", MISSING: "red"}


@with_config_options
def check(
    *,
    config: ConfigFile = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="HOST:PORT of another node to call as well; may be repeated."),
    ] = None,
    nvme: Annotated[
        list[str] | None,
        typer.Option(
            "--nvme", help="Directory or block device for the NVMe tier to look at; may be repeated."
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help=f"Leave a probe out: {', '.join(PROBES)}.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    **values: Any,
) -> None:
    """Show what works on this machine: ok, degraded (kvtier runs, slower or with less), or missing.

    Takes the options of `kvtier serve`, so that it judges the daemon that would run with them. Exit code 1:
    something that `kvtier serve` needs is missing, or an index, a peer or a path that was named does not
    answer.
    """
    unknown = set(skip or ()) - set(PROBES)
    if unknown:
        raise typer.BadParameter(f"there is no probe {', '.join(sorted(unknown))}: {', '.join(PROBES)}")
    settings = Config.load(config, **values)
    names = [name for name in PROBES if name not in (skip or ())]
    if settings.index and "index" in names:
        names.remove("index")  # it tries the private one, which would not be used
    check_addresses(peer or ())
    progress = output.Progress(quiet=not names)
    waiting = f"asking the daemon, the index, peers and storage, {TIMEOUT_S:g} s at most for each"
    with (
        progress.shown(),
        output.patience(waiting),
        ThreadPoolExecutor(max_workers=len(names) + _ASKED) as pool,
    ):
        progress(f"probing {', '.join(names)}")
        arguments = {"gpu": [settings.hbm_device, str(settings.hbm_bytes)]}
        running = [pool.submit(_probe, name, arguments=arguments.get(name, [])) for name in names]
        asked = pool.submit(_index, settings)
        peers = pool.submit(peer_findings, settings, peer or ())
        storage = pool.submit(
            storage_findings, nvme or (), settings.tier_deadline_s, may_be_made=settings.nvme_paths
        )
        found = local_findings(settings)
        is_running = any(each["name"] == "daemon" and each["state"] != MISSING for each in found)
        found += storage.result() + asked.result()
        if settings.index:
            found.append(own_finding(settings, is_running=is_running))
        found += peers.result()
        found += [each for future in running for each in future.result()]
    for each in found:  # a running daemon has its device memory already
        each["needed"] |= each["name"] == "hbm" and settings.hbm_bytes > 0 and not is_running
    ready = not any(each["state"] != OK and each["needed"] for each in found)
    if as_json:
        output.print_json({"ok": ready, "checks": found})
    else:
        output.print_table(
            "what works here",
            ["what", "state", "why", "what to do"],
            [
                [each["name"], Text(each["state"], _COLOURS[each["state"]]), each["why"], each["todo"]]
                for each in found
            ],
        )
    if not ready:
        raise typer.Exit(output.NEGATIVE)


def _index(config: Config) -> list[Finding]:
    """Where one is named: the private one has a probe of its own."""
    return [index_finding(config)] if config.index else []


def local_findings(config: Config) -> list[Finding]:
    """What can be seen without loading anything; a running daemon's own memory and port count as fine."""
    daemon, running = _daemon(config)
    return [
        _shared_memory(config, running),
        _memory(config),
        _memlock(config),
        *memory_findings(config, is_running=running is not None),
        _data_dir(config, running),
        _run_dir(config, running),
        _metrics_port(config, running),
        daemon,
    ]


def _daemon(config: Config) -> tuple[Finding, pb.GetStatusResponse | None]:
    try:
        with AdminClient(config.socket, timeout_s=DAEMON_TIMEOUT_S) as client:
            status = client.status()
    except KvtierError as error:
        if is_listened_on(config.socket):
            return _hanging(config, error), None
        why = f"nobody answers on {config.socket}" if not config.socket.exists() else str(error)
        return finding("daemon", MISSING, f"{why}: engines compute everything", "kvtier serve"), None
    why = f"{status.state}, version {status.version}, {len(status.engines)} engines, index {status.index}"
    if status.notices:
        return finding("daemon", DEGRADED, f"{why}; {'; '.join(status.notices)}"), status
    return finding("daemon", OK, why), status


def _hanging(config: Config, error: KvtierError) -> Finding:
    """A daemon that is there, and answers nobody: another one cannot start beside it."""
    hangs = isinstance(error, DeadlineExceeded)
    why = f"does not answer within {DAEMON_TIMEOUT_S:g} s" if hangs else f"is busy ({error})"
    todo = (
        "see whether it is stopped, and its log; end it and start it anew if it stays so"
        if hangs
        else "try again, and see who has so many connections open"
    )
    return finding(
        "daemon", DEGRADED, f"what listens on {config.socket} {why}: engines compute all", todo, needed=True
    )


def _shared_memory(config: Config, running: pb.GetStatusResponse | None) -> Finding:
    name = "shared memory"
    smaller = (
        "enlarge it (docker run --shm-size, mount -o remount,size=), or set KVTIER_DRAM_BYTES to less, and "
        "KVTIER_EXTENT_BYTES where it is one extent already"
    )
    try:
        free = machine.free_bytes(config.shm_dir)
    except OSError as error:
        return finding(
            name, MISSING, f"{config.shm_dir}: {error.strerror}", "set KVTIER_SHM_DIR to a tmpfs", needed=True
        )
    if _filesystem(config.shm_dir) not in ("tmpfs", "ramfs", "hugetlbfs"):
        why = f"{config.shm_dir} is no tmpfs: what it holds is written to disk"
        return finding(name, DEGRADED, why, "set KVTIER_SHM_DIR to a tmpfs")
    if running is not None:
        own = sum(tier.capacity_bytes for tier in running.tiers if tier.tier == TierKind.DRAM)
        return finding(name, OK, f"the daemon has {output.size_text(own)}, {output.size_text(free)} are free")
    wanted = output.size_text(config.dram_bytes)
    why = f"{config.shm_dir} has {output.size_text(free)} free, dram_bytes is {wanted}"
    if free < config.dram_bytes + PAGE_SIZE_BYTES:  # beside the arena lies the file that says whose it is
        return finding(name, MISSING, why, smaller, needed=True)
    return finding(name, OK, why)


def _memory(config: Config) -> Finding:
    total = machine.memory_total_bytes()
    far = sum(region.size_bytes for region in config.far_memory)
    why = f"{output.size_text(total)} in all, dram_bytes is {output.size_text(config.dram_bytes)}"
    why += f", far_memory {output.size_text(far)}" if far else ""
    less = f"set KVTIER_DRAM_BYTES{' or KVTIER_FAR_MEMORY' if far else ''} to less"
    if config.dram_bytes + far > total:
        return finding("memory", MISSING, why, less, needed=True)
    if config.dram_bytes + far > total * 3 // 4:
        return finding("memory", DEGRADED, f"{why}: little is left for engines", less)
    return finding("memory", OK, why)


def _memlock(config: Config) -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return finding("memlock", OK, "unlimited")
    why = f"limit is {output.size_text(limit)}"
    if limit >= config.dram_bytes:
        return finding("memlock", OK, why)
    return finding(
        "memlock",
        DEGRADED,
        f"{why}, less than dram_bytes: memory cannot be pinned for GPUs and RDMA",
        "ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit",
    )


def _directory(name: str, path: Path) -> Finding:
    """Whether the daemon could make or use it; makes nothing itself."""
    existing = next(each for each in (path, *path.parents) if each.exists())
    what = f"{name} {path}"
    if not existing.is_dir():
        return finding(
            what, MISSING, f"{existing} is no directory", f"set KVTIER_{name.upper()}", needed=True
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        return finding(
            what,
            MISSING,
            f"{existing} is not writable for this user",
            f"set KVTIER_{name.upper()}",
            needed=True,
        )
    return finding(what, OK, "writable" if existing == path else "does not exist yet, can be made")


def _data_dir(config: Config, running: pb.GetStatusResponse | None) -> Finding:
    try:
        if running is None or running.node_id != node_id_of(config.data_dir):  # else it is its own
            refuse_owned(config.data_dir)
    except KvtierError as error:
        return _refused(f"data_dir {config.data_dir}", error, "KVTIER_DATA_DIR")
    return _directory("data_dir", config.data_dir)


def _run_dir(config: Config, running: pb.GetStatusResponse | None) -> Finding:
    from kvtier.server.app import is_stale_socket  # heavy: only this command needs it

    try:
        check_run_dir(config.run_dir)
        if running is None:
            check_socket_place(config.socket, config.run_dir)
            is_stale_socket(config.socket)
    except KvtierError as error:
        return _refused(f"run_dir {config.run_dir}", error, "KVTIER_RUN_DIR")
    return _directory("run_dir", config.run_dir)


def _refused(name: str, error: KvtierError, variable: str) -> Finding:
    """What `kvtier serve` would say."""
    return finding(name, MISSING, str(error), f"do as it says, or set {variable}", needed=True)


def _metrics_port(config: Config, running: pb.GetStatusResponse | None) -> Finding:
    name, port = "metrics port", config.metrics_port
    if port < 0:
        return finding(name, DEGRADED, "metrics are off", "set KVTIER_METRICS_PORT to 9470")
    if running is not None:
        return finding(name, OK, f"the daemon serves {running.metrics_address or 'no metrics'}")
    server = MetricsServer(Metrics(), port)
    try:
        server.bind()
    except ResourceShortage as error:
        return finding(name, MISSING, str(error), "set KVTIER_METRICS_PORT (0: any free one)", needed=True)
    server.stop()
    return finding(name, OK, f"port {port} is free" if port else "any free port")


def _filesystem(path: Path) -> str:
    """Type of the file system that `path` lies in, from the longest mount point above it."""
    best, kind = -1, ""
    real = os.path.realpath(path)
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, this, *_ = line.split()
        if os.path.commonpath([mount, real]) == mount and len(mount) >= best:
            best, kind = len(mount), this
    return kind


def _probe(name: str, timeout_s: float = PROBE_TIMEOUT_S, arguments: Sequence[str] = ()) -> list[Finding]:
    command = [sys.executable, "-m", "kvtier.cli.probes", name, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return [
            finding(
                name,
                MISSING,
                f"the probe did not end within {timeout_s:.0f} s",
                "run it alone: " + " ".join(command),
            )
        ]
    try:
        found: list[Finding] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = f"the probe ended with status {done.returncode}: {' '.join(last)}"
        return [finding(name, MISSING, why, "run it alone: " + " ".join(command))]
    return found
