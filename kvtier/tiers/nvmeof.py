"""From a directory or a block device to the NVMe controllers behind it, and their timeouts.

`inspect` only reads: mount -> block device -> disk (through partitions, device mapper, md and loop devices)
-> namespace -> its controllers, several under native multipath. `kvtier.tiers.preflight` judges it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.tiers import sysfs
from kvtier.tiers.sysfs import MOUNTINFO, SYSFS

MAX_DEPTH: Final = 16
"""Block devices that may lie on top of each other."""
MAX_DEVICES: Final = 256
"""Block devices looked at for one path."""
LOCAL_TRANSPORTS: Final = frozenset({"pcie", "apple-nvme"})
_NAMESPACE: Final = re.compile(r"nvme[0-9]+(c[0-9]+)?n[0-9]+")
_CONTROLLER: Final = re.compile(r"nvme[0-9]+")
_PATH_DISK: Final = re.compile(r"nvme[0-9]+c[0-9]+n([0-9]+)")
_MEMORY: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_NETWORK: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "glusterfs"})


@dataclass(frozen=True, slots=True)
class Controller:
    """One way to a namespace. What the kernel does not show, or shows as garbage, is None or empty.

    Attributes
    ----------
    name, directory
        ``nvme0`` and where its attributes are; writing them there changes a live controller.
    transport, address, state, subsystem_nqn
        As the kernel writes them: ``tcp``, ``traddr=10.0.0.1,trsvcid=4420``, ``live``.
    keep_alive_s
        0: none is sent. A controller keeps it until it is disconnected.
    fast_io_fail_s
        So long after the loss is noticed I/O waits for a reconnect, then it fails; `OFF`: no limit.
    ctrl_loss_s
        So long a reconnect is tried, then the controller and what waits for it is gone; `OFF`: for ever.
    io_timeout_ms, queue
        A command without answer so long begins the recovery; None where it is not shown. And where that
        can be changed for this path.
    numa_node
        `OFF` where it belongs to none.
    """

    name: str
    directory: Path
    transport: str
    address: str
    state: str
    subsystem_nqn: str
    keep_alive_s: int | None
    fast_io_fail_s: int | None
    ctrl_loss_s: int | None
    reconnect_delay_s: int | None
    io_timeout_ms: int | None
    queue: Path | None
    numa_node: int | None
    queue_count: int | None

    @property
    def is_remote(self) -> bool:
        """NVMe-oF; what names no transport counts as local, since no attribute of fabrics is there either."""
        return bool(self.transport) and self.transport not in LOCAL_TRANSPORTS


@dataclass(frozen=True, slots=True)
class Namespace:
    """A disk, ``nvme0n1``, and the ways to it.

    Attributes
    ----------
    subsystem
        Where its attributes are, if the kernel's own multipath stands between; None: one controller only.
    io_policy
        How it chooses a path (``numa``, ``round-robin``, ``queue-depth``).
    delayed_removal_s
        So long I/O waits for a path after the last one is gone; 0 where the kernel does not know that.
    """

    name: str
    controllers: tuple[Controller, ...]
    subsystem: Path | None
    io_policy: str
    delayed_removal_s: int


@dataclass(frozen=True, slots=True)
class Storage:
    """What lies under a path.

    Attributes
    ----------
    namespaces
        NVMe disks, each once.
    others
        Other disks at the bottom (``sda``, ``vda``).
    queueing
        dm-multipath devices on the way: they may keep I/O themselves while no path works.
    problem
        Why nothing, or not everything, is known; empty where all is.
    """

    path: str
    namespaces: tuple[Namespace, ...] = ()
    others: tuple[str, ...] = ()
    queueing: tuple[str, ...] = ()
    problem: str = ""


def inspect(path: Path, *, root: Path = SYSFS, mountinfo: Path = MOUNTINFO) -> Storage:
    """What lies under a directory, a file or a block device.

    Asks for the status of `path` itself, which waits where its mount no longer answers; everything else is
    the kernel's own memory. Never raises because of what it finds.
    """
    device, problem = _device_of(path, root, mountinfo)
    if not device:
        return Storage(str(path), problem=problem)
    walk = _Walk(root, mountinfo)
    walk.visit(device, 0)
    namespaces = tuple(read_namespace(name, root) for name in walk.namespaces)
    return Storage(str(path), namespaces, tuple(walk.others), tuple(walk.queueing), walk.problem)


def read_namespace(name: str, root: Path = SYSFS) -> Namespace:
    """A disk ``nvme0n1`` and its controllers."""
    disk = root / "class/block" / name
    above = sysfs.real(disk / "device")
    delayed_s = sysfs.number(disk / "delayed_removal_secs") or 0
    if (above / "transport").is_file():
        controller = read_controller(_directory(above, root), disk / "queue")
        return Namespace(name, (controller,), None, "", max(0, delayed_s))
    paths = tuple(_paths_of_subsystem(above, name, root))
    subsystem = root / "class/nvme-subsystem" / above.name
    subsystem = subsystem if subsystem.is_dir() else above
    return Namespace(name, paths, subsystem, sysfs.text(above / "iopolicy"), max(0, delayed_s))


def read_controller(directory: Path, queue: Path | None = None) -> Controller:
    """The attributes of one controller; `queue` has the settings of its path to one namespace."""

    def value(name: str) -> int | None:
        return sysfs.number(directory / name)

    return Controller(
        name=directory.name,
        directory=directory,
        transport=sysfs.text(directory / "transport"),
        address=sysfs.text(directory / "address"),
        state=sysfs.text(directory / "state"),
        subsystem_nqn=sysfs.text(directory / "subsysnqn"),
        keep_alive_s=value("kato"),
        fast_io_fail_s=value("fast_io_fail_tmo"),
        ctrl_loss_s=value("ctrl_loss_tmo"),
        reconnect_delay_s=value("reconnect_delay"),
        io_timeout_ms=sysfs.number(queue / "io_timeout") if queue else None,
        queue=queue,
        numa_node=value("numa_node"),
        queue_count=value("queue_count"),
    )


def _directory(controller: Path, root: Path) -> Path:
    """The short name of a controller's directory, where it has one: commands are made of it."""
    short = root / "class/nvme" / controller.name
    return short if short.is_dir() else controller


def _paths_of_subsystem(subsystem: Path, disk: str, root: Path) -> Iterator[Controller]:
    """Controllers of a subsystem that have this namespace: each has a hidden disk ``nvme0c1n1`` for it.

    Where no controller shows one (none is connected yet, or a kernel that hides them), all count.
    """
    links = [name for name in sysfs.names(subsystem) if _CONTROLLER.fullmatch(name)]
    controllers = [_directory(sysfs.real(subsystem / name), root) for name in links]
    queues = [_hidden_queue(controller, disk) for controller in controllers]
    for controller, queue in zip(controllers, queues, strict=True):
        if queue is not None or not any(queues):
            yield read_controller(controller, queue)


def _hidden_queue(controller: Path, disk: str) -> Path | None:
    for name in sysfs.names(controller):
        match = _PATH_DISK.fullmatch(name)
        if match and disk.endswith(f"n{match[1]}"):
            return controller / name / "queue"
    return None


class _Walk:
    """From one block device down to the disks at the bottom; each device is looked at once."""

    def __init__(self, root: Path, mountinfo: Path) -> None:
        self._root = root
        self._mountinfo = mountinfo
        self._seen: set[str] = set()
        self.namespaces: list[str] = []
        self.others: list[str] = []
        self.queueing: list[str] = []
        self.problem = ""

    def visit(self, name: str, depth: int) -> None:
        if name in self._seen:
            return
        self._seen.add(name)
        if depth > MAX_DEPTH or len(self._seen) > MAX_DEVICES:
            self._say(f"more than {MAX_DEPTH} block devices lie on top of each other")
            return
        device = sysfs.real(self._root / "class/block" / name)
        if not device.is_dir():
            self._say(f"{self._root} does not show the block device {name}")
        elif (device / "partition").exists():
            self.visit(device.parent.name, depth + 1)
        elif _NAMESPACE.fullmatch(name):
            self.namespaces.append(name)
        else:
            self._visit_below(name, device, depth)

    def _visit_below(self, name: str, device: Path, depth: int) -> None:
        if sysfs.text(device / "dm/uuid").startswith("mpath-"):
            self.queueing.append(sysfs.text(device / "dm/name") or name)
        below = sysfs.names(device / "slaves")
        backing = sysfs.text(device / "loop/backing_file")
        if not below and backing.startswith("/"):
            under, problem = _device_of(Path(backing), self._root, self._mountinfo)
            below = [under] if under else []
            self._say(problem)
        for each in below:
            self.visit(each, depth + 1)
        if not below:
            self.others.append(name)

    def _say(self, problem: str) -> None:
        self.problem = self.problem or problem


def _device_of(path: Path, root: Path, mountinfo: Path) -> tuple[str, str]:
    """Name of the block device that is, or carries, `path`; or empty and why there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return "", f"{path}: {reason}"
    number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    name = _name_of(number, root)
    if name or stat.S_ISBLK(status.st_mode):
        return name, "" if name else f"{root} does not show the block device {path}"
    return _device_of_mount(path, root, mountinfo)


def _name_of(number: int, root: Path) -> str:
    try:
        link = os.readlink(root / "dev/block" / f"{os.major(number)}:{os.minor(number)}")
    except OSError:
        return ""
    return os.path.basename(link)


def _device_of_mount(path: Path, root: Path, mountinfo: Path) -> tuple[str, str]:
    """For file systems whose files bear a number of no device (btrfs), or that have no device at all."""
    mount = sysfs.mount_of(path, mountinfo)
    if mount is None:
        return "", f"no mount is known that {path} lies in"
    if mount.kind in _MEMORY:
        return "", f"{path} lies in memory ({mount.kind}), not on a disk"
    if mount.kind in _NETWORK:
        return "", f"{path} lies on another machine ({mount.kind} from {mount.source})"
    name = os.path.basename(os.path.realpath(mount.source)) if mount.source.startswith("/") else ""
    if name and (root / "class/block" / name).exists():
        return name, ""
    return "", f"{path} lies in {mount.kind} from {mount.source}: its block device cannot be seen from here"
