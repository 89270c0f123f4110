"""Processes of the arena tests: a daemon's arena without the daemon, and an engine's mapping."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

DAEMON = """
import asyncio, json, resource, sys
from pathlib import Path
from kvtier import machine
from kvtier.tiers.arena import Arena

async def main(options):
    for name, value in options.pop("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if options.pop("endless", False):  # so that not the machine's memory but the limit decides
        for probe in ("memory_total_bytes", "memory_available_bytes"):
            setattr(machine, probe, lambda: 1 << 60)
        machine.free_bytes = lambda directory: 1 << 60
    options["shm_dir"] = Path(options["shm_dir"])
    announce = options.pop("announce", False)
    arena = Arena(**options)
    if announce:
        print("starting", flush=True)
    try:
        await arena.open()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        return
    if arena.allocated_bytes:
        arena._bytes[:5] = b"alive"
    print("open", arena.allocated_bytes, flush=True)
    for line in sys.stdin:
        print(bytes(arena._bytes[:5]).decode(), flush=True)
    await arena.close()

asyncio.run(main(json.loads(sys.argv[1])))
"""

ENGINE = """
import fcntl, mmap, os, sys

path = sys.argv[1]
fd = os.open(path, os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_SH)
assert os.path.samestat(os.stat(path), os.fstat(fd))
mapping = mmap.mmap(fd, 0)
os.close(fd)  # the mapping alone keeps the lock
print("mapped", flush=True)
for line in sys.stdin:
    command = line.split()
    if command[0] == "unmap":
        mapping.close()
        print("unmapped", flush=True)
    elif command[0] == "write":
        mapping[: int(command[1])] = b"\\xff" * int(command[1])
        print("written", flush=True)
    else:
        print(int(command[1]) - mapping[: int(command[1])].count(0), flush=True)
"""


class Process:
    """A child that answers each line with a line; killed at the end."""

    def __init__(self, script: str, argument: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", script, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def hear(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{line}\n")
        self.child.stdin.flush()
        return self.hear()

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def leave(self) -> int:
        assert self.child.stdin is not None
        self.child.stdin.close()
        return self.child.wait(timeout=30)


@contextlib.contextmanager
def process(script: str, argument: str, first: str) -> Iterator[Process]:
    child = Process(script, argument)
    try:
        heard = child.hear()
        assert heard.startswith(first), heard
        yield child
    finally:
        child.kill()
        for stream in (child.child.stdin, child.child.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def used_bytes(fds: Sequence[int]) -> int:
    """Memory behind open files, named or not."""
    return sum(os.fstat(fd).st_blocks * 512 for fd in fds)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
