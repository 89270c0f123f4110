"""The archive that the kernel starts from: busybox, the modules in their order, and a script."""

from __future__ import annotations

import lzma
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

MODULES: Final = (
    "crc32c_generic",  # looked up by name at run time: no module depends on it
    "virtio_pci",
    "virtio_rng",
    "9pnet_virtio",
    "9p",
    "overlay",
    "ext4",
    "brd",
    "nvmet_tcp",
    "nvme_tcp",
)
DISK_KIB: Final = 128 << 10
DISKS: Final = 2
PARAMETERS: Final = {"brd": f"rd_nr={DISKS} rd_size={DISK_KIB}"}
_SCRIPT: Final = """#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
while read -r name parameters; do insmod "/modules/$name" $parameters || echo "no module $name"; done < /order
mkdir -p /host /upper /system
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=524288 host /host || poweroff -f
mount -t tmpfs -o size=256m upper /upper
mkdir /upper/new /upper/work
mount -t overlay -o lowerdir=/host,upperdir=/upper/new,workdir=/upper/work root /system || poweroff -f
mkdir -p /system/proc /system/sys /system/dev /system/run /system/tmp
mount -t proc proc /system/proc
mount -t sysfs sys /system/sys
mount -t devtmpfs dev /system/dev
mkdir -p /system/dev/shm
mount -t tmpfs tmpfs /system/dev/shm
mount -t configfs configfs /system/sys/kernel/config
cp /bin/busybox /system/run/busybox
ip link set lo up
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
/bin/busybox chroot /system /run/busybox sh -c {command}
/bin/busybox poweroff -f
"""


def build(modules: Path, busybox: Path, command: Sequence[str], directory: Path) -> bytes:
    """The archive; its script runs `command` in `directory` of the host's root, then ends the machine."""
    inner = f"cd {shlex.quote(str(directory))} && exec {shlex.join(command)}"
    found = list(_in_order({_name(path): path for path in modules.rglob("*.ko*")}, MODULES))
    order = "".join(f"{name}.ko {PARAMETERS.get(name, '')}\n" for name, _ in found)
    entries: list[tuple[str, int, bytes]] = [(name, stat.S_IFDIR | 0o755, b"") for name in ("bin", "modules")]
    entries += [(name, stat.S_IFDIR | 0o755, b"") for name in ("proc", "sys", "dev")]
    entries += [
        ("init", stat.S_IFREG | 0o755, _SCRIPT.replace("{command}", shlex.quote(inner)).encode()),
        ("order", stat.S_IFREG | 0o644, order.encode()),
        ("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()),
        *((f"modules/{name}.ko", stat.S_IFREG | 0o644, content) for name, content in found),
    ]
    return b"".join(_cpio(entries))


def _in_order(paths: dict[str, Path], wanted: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Each module once, behind everything that it depends on; what the kernel has built in is left out."""
    done: set[str] = set()

    def add(name: str) -> Iterator[tuple[str, bytes]]:
        if name in done or name not in paths:
            return
        done.add(name)
        content = paths[name].read_bytes()
        if paths[name].suffix == ".xz":
            content = lzma.decompress(content)
        for below in _depends(content):
            yield from add(below)
        yield name, content

    for name in wanted:
        yield from add(name)


def _depends(content: bytes) -> list[str]:
    """What `modinfo` shows as `depends`."""
    begin = content.find(b"\0depends=")
    listed = content[begin + 9 : content.index(b"\0", begin + 9)].decode() if begin >= 0 else ""
    return [_plain(name) for name in listed.split(",") if name]


def _name(path: Path) -> str:
    return _plain(path.name.partition(".ko")[0])


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _cpio(entries: Iterable[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """The format `newc`: a header of hexadecimal numbers, name, content, each filled up to 4 bytes."""
    for number, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        yield head + bytes(-len(head) % 4)
        yield content + bytes(-len(content) % 4)
