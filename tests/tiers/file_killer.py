"""Lives and deaths of a daemon's file tier: ``python -m tests.tiers.file_killer DIRECTORY SEED KILLS``.

Forks one child after the other: each opens the tier, compares everything it finds with the log that the dead
ones have left, then writes and drops blocks until it is killed. Prints what happened as JSON; anything wrong
is exit code 1 and a line on stderr. Forking a process that has everything imported makes a life cost some
milliseconds.

The log has a line for each step: ``b`` a write begins, ``w`` it has ended, ``d`` a drop begins, ``x`` it has
ended; then the key. A block is never written twice, so what was dropped must never be seen again.

A death may cut a line of the log: the kernel writes page by page, and a killed process gets no further than
the page that it is in. The step of a line that is cut had not begun, or is one less that is known. What the
next life adds begins a new line, or its first step would be lost behind the rest of the cut one: a block that
was dropped, unknown to the log, looks like one that the tier has lost.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.testing.tier_tests import record_of, slot_of
from kvtier.tiers import file_format
from kvtier.tiers.file import FileTier
from kvtier.tiers.file_io import Calls
from kvtier.types import PAGE_SIZE_BYTES, BlockRecord, Slot

MIB = 1 << 20
CAP = 12 * MIB
EXTENT = MIB
SIZES = (12 << 10, 124 << 10, MIB - PAGE_SIZE_BYTES)
CODECS = ("raw", "lz4", "zstd")
NOISE: Final = os.urandom(2 * MIB)
CONTENTS: Final = (
    NOISE,
    (np.frombuffer(NOISE, "<u2") & 0x0FFF).tobytes(),  # half of each float is nearly known: zstd gains some
    NOISE[:1024] * (len(NOISE) // 1024),
)
"""By layout: what no codec gains anything on, what one gains something on, what both gain nearly all on."""
PIECE_BYTES = 32 << 10
MAX_LIFE_S = 0.03
PATIENCE_S = 60.0
PR_SET_PDEATHSIG = 1

Pairs = list[tuple[Slot, BlockRecord]]


class Log:
    """What all lives have done, a line a step; a line may be cut by death, the lines behind it are whole."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "log"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, step: str, pairs: Pairs) -> None:
        lines = "".join(f"\n{step} {record.block.key.hex()}" for _, record in pairs)
        os.write(self._fd, f"{lines}\n".encode())

    def keys(self) -> dict[str, set[str]]:
        """Keys of each step."""
        steps: dict[str, set[str]] = {step: set() for step in "bwdx"}
        for line in self.path.read_text().splitlines():
            step, _, key = line.partition(" ")
            if len(key) == 64:
                steps[step].add(key)
        return steps


class Life:
    """One child."""

    def __init__(self, directory: Path, seed: int, ready_fd: int) -> None:
        self.rng = random.Random(seed)
        self.directory = directory
        calls = Calls(pwritev=write_a_piece) if self.rng.random() < 0.5 else Calls()
        self.tier = make_tier(directory, self.rng.choice(CODECS), calls)
        self.log = Log(directory)
        self.ready_fd = ready_fd
        self.held: dict[Slot, BlockRecord] = {}

    async def run(self) -> None:
        await self.tier.open()
        await self.check()
        os.write(self.ready_fd, b"%d %d\n" % (len(self.held), self.encoded()))
        while True:
            extents = self.rng.sample(range(self.extents), 3)
            await asyncio.gather(*(self.step(extent) for extent in extents))
            if self.rng.random() < 0.1:
                await self.tier.checkpoint()

    @property
    def extents(self) -> int:
        return self.tier.allocated_bytes // EXTENT

    async def check(self) -> None:
        """All that was found is whole, is where it was written; nothing is missing or back from the dead."""
        steps = self.log.keys()
        pairs = [pair for batch in self.tier.recovered() for pair in batch]
        self.held = dict(pairs)
        keys = {record.block.key.hex() for record in self.held.values()}
        assert len(keys) == len(self.held) == len(pairs), "a block or a slot was found twice"
        assert keys <= steps["b"], "a block was found that nobody wrote"
        assert not keys & steps["x"], "a dropped block is back"
        missing = steps["w"] - steps["d"] - keys
        assert not missing, f"{len(missing)} written blocks are missing"
        for extent in range(self.extents):
            sizes = {slot.size_bytes for slot in self.held if slot.extent == extent}
            assert len(sizes) <= 1, "an extent serves two slot sizes"
        assert all(self.is_slot(slot) for slot in self.held), "a slot lies across others"
        await self.compare(pairs)
        used = sum(path.stat().st_blocks * 512 for path in (self.directory / "tier").rglob("*"))
        assert used <= CAP, "the cap is exceeded"

    def encoded(self) -> int:
        """How many of the blocks lie there as a codec's payload."""
        rows = (self.tier._extents[slot.extent].row(self.tier._index(slot)) for slot in self.held)
        return sum(file_format.unpack_row(row).form.codec != file_format.CODEC_RAW for row in rows)

    def is_slot(self, slot: Slot) -> bool:
        within = slot.offset_bytes - slot.extent * EXTENT
        fits = 0 <= within <= EXTENT - slot.size_bytes and within % slot.size_bytes == 0
        return fits and 0 <= slot.extent < self.extents

    async def compare(self, pairs: Pairs) -> None:
        buffers = [bytearray(record.block_bytes) for _, record in pairs]
        slots, records = [slot for slot, _ in pairs], [record for _, record in pairs]
        wrong = await self.tier.read(slots, records, [memoryview(buffer) for buffer in buffers])
        assert wrong == [], "recovered blocks are wrong"
        for record, buffer in zip(records, buffers, strict=True):
            assert hashlib.sha256(buffer).digest() == record.block.key, "wrong bytes were served"

    async def step(self, extent: int) -> None:
        """Drop some blocks of an extent, write some; in another size where none is left."""
        its = [pair for pair in self.held.items() if pair[0].extent == extent]
        gone = self.rng.sample(its, self.rng.randint(0, len(its)))
        if self.rng.random() < 0.3:
            gone = its
        await self.drop(gone)
        left = [slot for slot in self.held if slot.extent == extent]
        block_bytes = left[0].size_bytes - PAGE_SIZE_BYTES if left else self.rng.choice(SIZES)
        count = EXTENT // (block_bytes + PAGE_SIZE_BYTES)
        free = {slot_of(self.tier, extent, number, block_bytes) for number in range(count)} - set(left)
        some = self.rng.sample(sorted(free, key=str), min(len(free), 4))
        await self.write(sorted(some, key=lambda slot: slot.offset_bytes))

    async def drop(self, pairs: Pairs) -> None:
        if pairs:
            self.log.add("d", pairs)
            await self.tier.drop([slot for slot, _ in pairs])
            self.log.add("x", pairs)
        for slot, _ in pairs:
            del self.held[slot]

    async def write(self, slots: list[Slot]) -> Pairs:
        layouts = [self.rng.randrange(len(CONTENTS)) for _ in slots]
        payloads = [
            self.content(layout, slot.size_bytes - PAGE_SIZE_BYTES)
            for layout, slot in zip(layouts, slots, strict=True)
        ]
        pairs = [
            (slot, record_of(payload, fingerprint=bytes([layout]) * 32))
            for slot, payload, layout in zip(slots, payloads, layouts, strict=True)
        ]
        self.log.add("b", pairs)
        records = [record for _, record in pairs]
        await self.tier.write(slots, records, [memoryview(payload) for payload in payloads])
        self.log.add("w", pairs)
        self.held.update(pairs)
        return pairs

    def content(self, layout: int, size_bytes: int) -> bytes:
        """Of its layout's kind, and like no other block."""
        begin = self.rng.randrange(len(NOISE) - size_bytes)
        return os.urandom(16) + CONTENTS[layout][begin : begin + size_bytes - 16]

    async def finish(self) -> None:
        """Nothing has leaked: every byte can be used again."""
        await self.tier.open()
        await self.check()
        for block_bytes in SIZES:
            await self.drop(list(self.held.items()))
            for extent in range(self.extents):
                count = EXTENT // (block_bytes + PAGE_SIZE_BYTES)
                slots = [slot_of(self.tier, extent, number, block_bytes) for number in range(count)]
                await self.compare(await self.write(slots))
        await self.tier.close()


def write_a_piece(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """The kernel may take less than it is given; so a death falls between two pieces more often."""
    return os.pwritev(fd, [buffers[0][:PIECE_BYTES]], offset)


def make_tier(directory: Path, codec: str, calls: Calls) -> FileTier:
    return FileTier(
        codec=codec,
        calls=calls,
        node_id="a1" * 16,
        paths=[directory / "tier"],
        capacity_bytes=CAP,
        extent_bytes=EXTENT,
        keep_free_bytes=0,
        threads=3,
    )


def child(directory: Path, seed: int, ready_fd: int, last: bool) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        life = Life(directory, seed, ready_fd)
        asyncio.run(life.finish() if last else life.run())
        code = 0
    except BaseException as error:
        print(f"life {seed}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(code)


def live(directory: Path, seed: int, rng: random.Random, last: bool = False) -> tuple[int, int] | None:
    """One life; how many blocks it found and how many of them encoded, None where it was killed before it
    could tell.
    """
    ready, writer = os.pipe()
    pid = os.fork()
    if not pid:
        child(directory, seed, writer, last)
    os.close(writer)
    found = None
    if rng.random() < 0.8 and not last:
        assert select.select([ready], [], [], PATIENCE_S)[0], "a life does not begin"
        told = os.read(ready, 64)
        if told:
            blocks, encoded = map(int, told.split())
            found = blocks, encoded
    if not last:
        time.sleep(rng.uniform(0, MAX_LIFE_S))
        os.kill(pid, signal.SIGKILL)
    os.close(ready)
    _, status = os.waitpid(pid, 0)
    if status != (0 if last else signal.SIGKILL):
        sys.exit(1)
    return found


def main() -> None:
    directory, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    log = Log(directory)
    found: list[tuple[int, int] | None] = []
    unfinished: set[str] = set()
    in_a_write = 0
    for number in range(kills):
        found.append(live(directory, seed * 10_000 + number, rng))
        steps = log.keys()
        fresh = steps["b"] - steps["w"] - unfinished
        in_a_write += bool(fresh)
        unfinished |= fresh
    live(directory, seed * 10_000 + kills, rng, last=True)
    told = [pair for pair in found if pair is not None]
    blocks, encoded = (sum(pair[i] for pair in told) for i in (0, 1))
    counts = {"kills": kills, "checked": len(told), "blocks": blocks, "encoded": encoded}
    print(json.dumps(counts | {"writing": in_a_write}))


if __name__ == "__main__":
    main()
