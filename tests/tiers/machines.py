"""A sysfs made of files: names, nesting and links as a kernel makes them (6.1, seen on real controllers)."""

from __future__ import annotations

import os
from pathlib import Path

NQN = "nqn.2026-01.example:kv"
TCP = {
    "transport": "tcp",
    "address": "traddr=10.0.0.1,trsvcid=4420,src_addr=10.0.0.9",
    "state": "live",
    "subsysnqn": NQN,
    "kato": "5",
    "ctrl_loss_tmo": "600",
    "reconnect_delay": "10",
    "fast_io_fail_tmo": "off",
    "numa_node": "-1",
    "queue_count": "5",
}
SAFE = {"ctrl_loss_tmo": "off", "fast_io_fail_tmo": "1", "kato": "2"}
"""With an I/O timeout of 3 s all is well for a deadline of 5 s."""
SAFE_PATHS = {"ctrl_loss_tmo": "off", "fast_io_fail_tmo": "0", "kato": "1"}
"""The same for two paths, with an I/O timeout of 4 s."""
LOCAL = {
    "transport": "pcie",
    "address": "0000:01:00.0",
    "state": "live",
    "subsysnqn": "nqn.2014-08.org.nvmexpress:disk",
    "kato": "0",
    "numa_node": "0",
    "queue_count": "9",
}


class Machine:
    """Builds the tree under `root`, and a mountinfo next to it."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "sys"
        self.mountinfo = directory / "mountinfo"
        for each in ("class/block", "class/nvme", "class/nvme-subsystem", "dev/block", "devices"):
            (self.root / each).mkdir(parents=True)
        self.mounts([])

    def write(self, directory: Path, **attributes: str) -> Path:
        for name, value in attributes.items():
            path = directory / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value + "\n")
        return directory

    def mounts(self, lines: list[tuple[str, str, str, str]]) -> None:
        """(mount point, kind, source, options of the file system)."""
        self.mountinfo.write_text(
            "".join(
                f"{20 + index} 1 0:{50 + index} / {point} rw,relatime shared:1 - {kind} {source} {options}\n"
                for index, (point, kind, source, options) in enumerate(lines)
            )
        )

    def controller(self, name: str, **attributes: str) -> Path:
        where = "pci0000:00" if attributes.get("transport") == "pcie" else "virtual/nvme-fabrics/ctl"
        directory = self.write(self.root / "devices" / where / name, **attributes)
        self.link(self.root / "class/nvme" / name, directory)
        return directory

    def subsystem(self, name: str, *controllers: Path, policy: str = "numa") -> Path:
        directory = self.root / "devices/virtual/nvme-subsystem" / name
        self.write(directory, iopolicy=policy, subsysnqn=NQN)
        self.link(self.root / "class/nvme-subsystem" / name, directory)
        for controller in controllers:
            self.link(directory / controller.name, controller)
        return directory

    def disk(self, name: str, parent: Path, number: int = 0, **attributes: str) -> Path:
        """A block device below `parent`, which its link `device` names; `number` as `os.stat` gives it."""
        directory = self.write(parent / name, **attributes)
        directory.mkdir(parents=True, exist_ok=True)
        self.link(directory / "device", parent)
        return self.block(directory, number)

    def block(self, directory: Path, number: int = 0) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        self.link(self.root / "class/block" / directory.name, directory)
        if number:
            where = self.root / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
            self.link(where, directory)
        return directory

    def hidden(self, name: str, controller: Path, io_timeout_ms: int) -> None:
        """The disk of one path under multipath; it has no name in /sys/class/block of its own use here."""
        self.write(controller / name, queue__io_timeout=str(io_timeout_ms), ana_state="optimized")

    def mapper(self, name: str, *slaves: str, number: int = 0, **attributes: str) -> Path:
        directory = self.write(self.root / "devices/virtual/block" / name, **attributes)
        (directory / "slaves").mkdir(parents=True)
        for slave in slaves:
            self.link(directory / "slaves" / slave, self.root / "class/block" / slave)
        return self.block(directory, number)

    @staticmethod
    def link(where: Path, target: Path) -> None:
        where.parent.mkdir(parents=True, exist_ok=True)
        where.symlink_to(os.path.relpath(target, where.parent.resolve()))

    def node(self, node: int, *, cpus: str, total_kb: int, distance: str, pages: str = "0") -> Path:
        directory = self.root / f"devices/system/node/node{node}"
        self.write(directory, cpulist=cpus, distance=distance)
        lines = [f"MemTotal:  {total_kb} kB", f"MemFree:  {total_kb // 2} kB", "Active(anon):   12 kB"]
        self.write(directory, meminfo="\n".join(f"Node {node} {line}" for line in lines))
        size = directory / "hugepages/hugepages-2048kB"
        self.write(size, nr_hugepages=pages, free_hugepages=pages, surplus_hugepages="0")
        return directory
