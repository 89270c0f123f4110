"""What a disk gives at best, by fio or by plain loops of this process: a denominator for benchmarks."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common import seconds

FIO_DEPTHS: Final = (4, 16, 32)
LOOP_THREADS: Final = (4, 8)
FIO_TIMEOUT_S: Final = 120


class Disk:
    """Whole passes with O_DIRECT over a file, in blocks of one size; one file is read, another one written.

    By fio where it is installed, in several queue depths (libaio), and by a loop of preadv and pwritev in
    this process, in several numbers of threads. Which is best is for whoever has measured them all to say.

    Attributes
    ----------
    reads, writes
        Name -> a pass, which gives bytes a second; those of fio, where it is there, have it in their names.
    """

    def __init__(self, directory: Path, block_bytes: int, blocks: int) -> None:
        self._block_bytes = block_bytes
        self._blocks = blocks
        self._memory = random_blocks(blocks, block_bytes)
        self._files = {way: directory / f"plain-{way}" for way in ("read", "write")}
        self._fds: dict[str, int] = {}
        for way, file in self._files.items():
            self._fds[way] = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(self._fds[way], 0, blocks * block_bytes)
            self._loop(
                os.pwritev, way, max(LOOP_THREADS)
            )()  # what was never written is read without the disk
        self.reads, self.writes = (
            {f"a loop, {threads} threads": self._loop(call, way, threads) for threads in LOOP_THREADS}
            for way, call in (("read", os.preadv), ("write", os.pwritev))
        )
        if shutil.which("fio"):
            self.reads |= {f"fio, depth {depth}": self._fio("read", depth) for depth in FIO_DEPTHS}
            self.writes |= {f"fio, depth {depth}": self._fio("write", depth) for depth in FIO_DEPTHS}

    def close(self) -> None:
        """The files go."""
        for way, file in self._files.items():
            os.close(self._fds[way])
            file.unlink()

    def _fio(self, way: str, depth: int) -> Callable[[], float]:
        command = ["fio", "--name=bench", f"--filename={self._files[way]}", f"--rw={way}"]
        command += [f"--bs={self._block_bytes}", f"--size={self._blocks * self._block_bytes}"]
        command += ["--direct=1", "--ioengine=libaio", f"--iodepth={depth}", "--output-format=json"]

        def arm() -> float:
            done = subprocess.run(command, capture_output=True, check=True, timeout=FIO_TIMEOUT_S)
            return float(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"])

        return arm

    def _loop(self, call: Callable[[int, Any, int], int], way: str, threads: int) -> Callable[[], float]:
        def one(number: int) -> None:
            moved = call(self._fds[way], [self._memory[number]], number * self._block_bytes)
            assert moved == self._block_bytes

        def arm() -> float:
            with ThreadPoolExecutor(threads) as pool:
                took_s = seconds(lambda: list(pool.map(one, range(self._blocks))))
            return self._blocks * self._block_bytes / took_s

        return arm


def random_blocks(count: int, block_bytes: int) -> Sequence[memoryview]:
    """Blocks side by side in page-aligned memory."""
    memory = memoryview(mmap.mmap(-1, count * block_bytes))
    filled = np.frombuffer(memory, np.uint64)
    filled[:] = np.random.default_rng(3).integers(0, 2**63, filled.shape, np.uint64)
    return [memory[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]
