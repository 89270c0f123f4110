"""Reading what the kernel shows of devices and mounts: small texts, never an exception, never a wait.

What lies there may be missing, garbage, a loop of links or a pipe: a reader gets an empty answer then.
Every function takes the root, so that a tree made of files stands for another machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")
MOUNTINFO: Final = Path("/proc/self/mountinfo")
MAX_TEXT_BYTES: Final = 4096
"""An attribute of the kernel is at most one page."""
MAX_MOUNTS_BYTES: Final = 4 << 20
MAX_NAMES: Final = 8192
"""Entries that are looked at in one directory."""
MAX_LISTED: Final = 65_536
"""CPUs or nodes that one list may name."""
OFF: Final = -1
"""What the kernel writes as "off": no limit."""
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,19}")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Content of a file without white space around it; empty where it cannot be read.

    What cannot be printed is replaced: the text goes to terminals and logs.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its writer
    except (OSError, ValueError):
        return ""
    raw = bytearray()
    try:
        while len(raw) < max_bytes and (piece := os.read(fd, max_bytes - len(raw))):
            raw += piece
    except OSError:
        return ""
    finally:
        os.close(fd)
    decoded = raw.decode(errors="replace").strip()
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in decoded)


def number(path: Path) -> int | None:
    """A whole number; `OFF` for "off" and for anything negative, None where there is none."""
    value = text(path)
    if value == "off":
        return OFF
    return max(OFF, int(value)) if _NUMBER.fullmatch(value) else None


def numbers(listed: str) -> tuple[int, ...]:
    """The numbers of a list like ``0-3,8``, in order; empty where it is none or names too many."""
    found: set[int] = set()
    for part in listed.split(",") if listed else ():
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            return ()
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= MAX_LISTED or len(found) > MAX_LISTED:
            return ()
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def chosen(value: str) -> str:
    """The word in brackets of a choice like ``always [madvise] never``; without brackets the text itself."""
    match = re.search(r"\[([^\]]*)\]", value)
    return match[1] if match else value


def names(directory: Path) -> list[str]:
    """Names in a directory, sorted; empty where it cannot be listed."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                found.append(entry.name)
                if len(found) == MAX_NAMES:
                    break
    except (OSError, ValueError):
        return []
    return sorted(found)


def real(path: Path) -> Path:
    """The path with its links followed, as far as that goes; a loop of links stays as it is."""
    return Path(os.path.realpath(path))


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: where, of which kind, from what, with which options of its file system."""

    point: str
    kind: str
    source: str
    options: tuple[str, ...]


def mount_of(path: Path, mountinfo: Path = MOUNTINFO) -> Mount | None:
    """The mount that `path` lies in, by name alone (links followed); None where no line fits."""
    wanted = os.path.realpath(path)
    best: Mount | None = None
    for line in text(mountinfo, MAX_MOUNTS_BYTES).splitlines():
        mount = _parse_mount(line)
        if mount is None or not _lies_in(wanted, mount.point):
            continue
        if best is None or len(mount.point) >= len(best.point):  # a later one covers an earlier one
            best = mount
    return best


def _lies_in(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _parse_mount(line: str) -> Mount | None:
    before, dash, after = line.partition(" - ")
    head, tail = before.split(" "), after.split(" ")
    if not dash or len(head) < 6 or len(tail) < 2:
        return None
    options = tuple(tail[2].split(",")) if len(tail) > 2 else ()
    return Mount(_unescape(head[4]), tail[0], _unescape(tail[1]), options)


def _unescape(value: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), value)
