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

from bench.common import median, seconds

FIO_DEPTHS: Final = (1, 4, 16, 32)
LOOP_THREADS: Final = (1, 4, 8)
PROBES: Final = 3
FIO_TIMEOUT_S: Final = 120


class Disk:
    """The best O_DIRECT figure for whole passes over one file, in blocks of one size.

    Where fio is installed it is fio's best queue depth (libaio), else the best number of threads of a plain
    loop of preadv and pwritev; the best of each direction is found first, by `PROBES` passes of each.

    Attributes
    ----------
    names
        What the best of ``read`` and ``write`` is.
    """

    def __init__(self, file: Path, block_bytes: int, blocks: int) -> None:
        self._file = file
        self._block_bytes = block_bytes
        self._blocks = blocks
        self._memory = random_blocks(blocks, block_bytes)
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._arms: dict[str, dict[str, Callable[[], float]]] = {"read": {}, "write": {}}
        for way, function in (("write", os.pwritev), ("read", os.preadv)):
            for threads in LOOP_THREADS:
                self._arms[way][f"plain loop, {threads} threads"] = self._looping(function, threads)
        next(iter(self._arms["write"].values()))()  # bytes that were never written are read without the disk
        if shutil.which("fio"):
            self._arms = {
                way: {f"fio, depth {depth}": self._fio(way, depth) for depth in FIO_DEPTHS}
                for way in ("read", "write")
            }
        self.names = {way: self._best(arms) for way, arms in self._arms.items()}

    @staticmethod
    def _best(arms: dict[str, Callable[[], float]]) -> str:
        rates = {name: median([arm() for _ in range(PROBES)]) for name, arm in arms.items()}
        return max(rates, key=rates.__getitem__)

    def read(self) -> float:
        """Bytes a second of one pass, the best way."""
        return self._arms["read"][self.names["read"]]()

    def write(self) -> float:
        """Bytes a second of one pass, the best way."""
        return self._arms["write"][self.names["write"]]()

    def close(self) -> None:
        """The file goes."""
        os.close(self._fd)
        self._file.unlink()

    def _fio(self, way: str, depth: int) -> Callable[[], float]:
        command = ["fio", "--name=bench", f"--filename={self._file}", f"--rw={way}"]
        command += [f"--bs={self._block_bytes}", f"--size={self._blocks * self._block_bytes}"]
        command += ["--direct=1", "--ioengine=libaio", f"--iodepth={depth}", "--output-format=json"]

        def arm() -> float:
            done = subprocess.run(command, capture_output=True, check=True, timeout=FIO_TIMEOUT_S)
            return float(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"])

        return arm

    def _looping(self, function: Callable[[int, Any, int], int], threads: int) -> Callable[[], float]:
        def one(number: int) -> None:
            moved = function(self._fd, [self._memory[number]], number * self._block_bytes)
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
