"""In the guest: a target that the kernel serves over TCP (nvmet), and the host side that connects to it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

NQN: Final = "nqn.2026-01.example.kvtier:test"
ADDRESS: Final = "127.0.0.1"
PORTS: Final = (4420, 4421)
HOST: Final = "0f2b6f1c-6a55-4c3e-9a43-0c7e1d6b7a10"
"""Identity of the host, the same for both paths."""
DISK: Final = Path("/dev/nvme0n1")
DIRECTORY_DISK: Final = Path("/dev/nvme0n2")
_CONFIG: Final = Path("/sys/kernel/config/nvmet")
_CLASS: Final = Path("/sys/class/nvme")


def until(what: str, holds: Callable[[], bool], timeout_s: float) -> None:
    """Wait for something that has to come true."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.1)


def serve(disks: Sequence[Path]) -> None:
    """One subsystem with these disks as namespaces 1, 2, ..., on every port."""
    subsystem = _CONFIG / "subsystems" / NQN
    subsystem.mkdir()
    (subsystem / "attr_allow_any_host").write_text("1")
    for number, disk in enumerate(disks, start=1):
        namespace = subsystem / f"namespaces/{number}"
        namespace.mkdir()
        (namespace / "device_path").write_text(str(disk))
        (namespace / "enable").write_text("1")
    for number, port in enumerate(PORTS, start=1):
        directory = _CONFIG / f"ports/{number}"
        directory.mkdir()
        for name, value in (("trtype", "tcp"), ("adrfam", "ipv4"), ("traddr", ADDRESS), ("trsvcid", port)):
            (directory / f"addr_{name}").write_text(str(value))
        open_port(port)


def open_port(port: int) -> None:
    """Serve the subsystem there."""
    _link(port).symlink_to(_CONFIG / "subsystems" / NQN)


def close_port(port: int) -> None:
    """Stop serving: connections end at once, and new ones are refused."""
    _link(port).unlink()


def cut_network() -> None:
    """From now on every packet is lost, and nobody is told: a blackhole."""
    _network("down")


def mend_network() -> None:
    """Packets arrive again."""
    _network("up")


class Nvme:
    """nvme-cli, as an operator uses it."""

    def __init__(self, roots: Sequence[Path]) -> None:
        libraries = [str(each) for root in roots for each in root.glob("**/lib/*-linux-gnu")]
        self._environment = {**os.environ, "PATH": f"{roots[0]}/usr/sbin:{os.environ['PATH']}"}
        self._environment["LD_LIBRARY_PATH"] = ":".join(libraries)
        etc = Path("/etc/nvme")
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "hostnqn").write_text(f"nqn.2014-08.org.nvmexpress:uuid:{HOST}\n")
        (etc / "hostid").write_text(f"{HOST}\n")

    def run(self, command: str) -> None:
        """A line for the shell; fails as it does."""
        done = subprocess.run(
            ["/run/busybox", "sh", "-c", command],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def connect(self, port: int) -> None:
        """With the defaults of nvme-cli and the kernel."""
        self.run(f"nvme connect -t tcp -a {ADDRESS} -s {port} -n {NQN}")


def states() -> dict[str, str]:
    """Controller -> its state."""
    return {each.name: (each / "state").read_text().strip() for each in sorted(_CLASS.glob("nvme*"))}


def port_of(controller: str) -> int:
    """The port that a controller is connected to."""
    address = (_CLASS / controller / "address").read_text()
    (port,) = (port for port in PORTS if f"trsvcid={port}" in address)
    return port


def all_live() -> bool:
    """Whether there is a live controller for every port, and the disk has a path through each."""
    paths = [*_CLASS.glob(f"nvme*/nvme*c*{DISK.name[-2:]}")]
    return [*states().values()] == ["live"] * len(PORTS) and len(paths) == len(PORTS)


def set_all(attribute: str, value: int) -> None:
    """Change an attribute of every controller that is connected."""
    for name in states():
        (_CLASS / name / attribute).write_text(f"{value}\n")


def _link(port: int) -> Path:
    return _CONFIG / f"ports/{PORTS.index(port) + 1}/subsystems" / NQN


def _network(state: str) -> None:
    subprocess.run(["/run/busybox", "ip", "link", "set", "lo", state], check=True, timeout=30)
