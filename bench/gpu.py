"""One GPU: what copies, the HBM tier and cuFile reach there, and of what the machine itself can do.

Every figure has its own ceiling in the same rounds: torch's copy of as many bytes in one piece, between a
pinned buffer and the device, or on the device. All content is compared, outside the measured time.

- **arena**: slots of the arena, pinned, to pages of an engine on the device and back (`kvtier.client`), in
  runs and scattered, so that the kernels that gather and scatter are in it;
- **gather**: pages to pages by way of the device alone, without the bus;
- **hbm**: the HBM tier's own writes and reads from pinned memory, and an engine in another process that has
  mapped its slab by CUDA IPC, copying slots on the device;
- **gds**: slots of the file tier to the slab and back by cuFile, all checksums computed on the device, beside
  the same by way of host memory. Direct or in compatibility mode: the result says which.

``python -m bench gpu --device cpu`` runs every step on device ``cpu``, to try the script itself; its figures
say nothing, and the result is void.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from bench.common import MIN_ROUNDS, at_least, interleave, median, seconds
from bench.disk import random_blocks
from kvtier.client import Pages
from kvtier.client.mapping import ArenaMapping
from kvtier.errors import Unavailable
from kvtier.tiers import device as devices
from kvtier.tiers.device import Slab
from kvtier.tiers.file import FileTier
from kvtier.tiers.gds import Gds, make_mover
from kvtier.tiers.hbm import HbmTier
from kvtier.types import PAGE_SIZE_BYTES, BlockId, BlockRecord, Layout, LayoutKind, LayoutOrder, Slot

MIB: Final = 1 << 20
LAYOUT: Final = Layout(LayoutKind.GQA, 32, 2, 64, "bfloat16", 64, LayoutOrder.HND, 32 << 10)
BLOCKS: Final = 256
FEW_BLOCKS: Final = 16
EXTENT_BYTES: Final = 64 * MIB
COPY_SHARE: Final = 0.80
HBM_SHARE: Final = 0.90
TIMEOUT_S: Final = 60.0
NODE: Final = "9b" * 16


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; see the module. Without a GPU, says why and ends the program, having written nothing."""
    parser = argparse.ArgumentParser(prog="python -m bench gpu")
    parser.add_argument("--device", default="cuda:0", help="cpu: only to try the script")
    parser.add_argument("--directory", type=Path, help="on the NVMe drive that is to be read")
    options = parser.parse_args(args.extra)
    if why := devices.why_not(options.device):
        print(f"no GPU: {why}")
        sys.exit(0)
    return Bench(options.device, options.directory, max(args.rounds, MIN_ROUNDS)).run()


class Bench:
    """All measurements on one device."""

    def __init__(self, device: str, directory: Path | None, rounds: int) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._directory = directory
        self._rounds = rounds
        self._is_cuda = device != "cpu"
        self._count = BLOCKS if self._is_cuda else FEW_BLOCKS
        self._size_bytes = self._count * LAYOUT.block_bytes
        self._result: dict[str, Any] = {"rounds": rounds, "device": self._name(), "targets": {}, "void": ""}

    def run(self) -> dict[str, Any]:
        """The result as a benchmark has it."""
        if not self._is_cuda:
            self._result["void"] = "device cpu stands for HBM: the script works, its figures say nothing"
        for name, part in (("arena", self._arena), ("hbm", self._hbm), ("gds", self._gds)):
            print(f"bench gpu: {name} on {self._device}", file=sys.stderr, flush=True)
            self._result[name] = part()
        return self._result

    def _name(self) -> dict[str, Any]:
        if not self._is_cuda:
            return {"name": "cpu"}
        found = self._torch.cuda.get_device_properties(self._device)
        return {
            "name": found.name,
            "memory_bytes": found.total_memory,
            "cuda": self._torch.version.cuda,
            "torch": self._torch.__version__,
        }

    def _settle(self) -> None:
        if self._is_cuda:
            self._torch.cuda.synchronize(self._device)

    def _rate(self, work: Callable[[], object]) -> Callable[[], float]:
        """An arm: bytes a second of one call, its copies ended."""

        def arm() -> float:
            self._settle()

            def whole() -> None:
                work()
                self._settle()

            return self._size_bytes / seconds(whole)

        return arm

    def _measure(self, arms: dict[str, Callable[[], object]]) -> dict[str, Any]:
        rates = {name: self._rate(work) for name, work in arms.items()}
        for arm in rates.values():
            arm()
        raw = interleave(rates, self._rounds)
        return {"bytes_per_s": raw, "median_bytes_per_s": {name: median(raw[name]) for name in raw}}

    def _target(self, name: str, found: dict[str, Any], of: str, share: float) -> None:
        raw = found["bytes_per_s"]
        value = median([a / b for a, b in zip(raw[name], raw[of], strict=True)])
        self._result["targets"][f"{name}, of {of}"] = at_least(value, share)

    def _ceilings(self) -> dict[str, Callable[[], object]]:
        """Between one pinned buffer and the device, each way, and on the device."""
        torch = self._torch
        host = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        there, other = (
            torch.empty(self._size_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)
        )
        host.fill_(1)
        return {
            "H2D": lambda: there.copy_(host, non_blocking=True),
            "D2H": lambda: host.copy_(there, non_blocking=True),
            "D2D": lambda: other.copy_(there, non_blocking=True),
        }

    # ---- the engine's copies

    def _arena(self) -> dict[str, Any]:
        torch, count = self._torch, self._count
        directory = Path("/dev/shm")
        with ExitStack() as undo:
            file = Path(tempfile.mkstemp(prefix="kvtier-bench-", dir=directory)[1])
            undo.callback(file.unlink)
            with file.open("wb") as whole:
                whole.write(np.random.default_rng(1).integers(0, 256, self._size_bytes, np.uint8).data)
            arena = ArenaMapping(str(file), self._size_bytes, self._size_bytes)
            undo.callback(arena.retire)
            shape = (count, LAYOUT.layer_block_bytes)
            tensors = [
                torch.zeros(shape, dtype=torch.uint8, device=self._device) for _ in range(LAYOUT.num_layers)
            ]
            pages = Pages.from_tensors(tensors, LAYOUT)
            runs = list(range(count))
            mixed = [int(i) for i in np.random.default_rng(2).permutation(count)]
            offsets = [i * LAYOUT.slot_bytes for i in range(count)]
            groups = self._groups(pages)
            before = bytes(arena.view)

            def both(ids: list[int], way: str) -> Callable[[], None]:
                move = getattr(pages.copier, way)
                return lambda: [move(arena, offsets[a:b], ids[a:b]) for a, b in groups]  # type: ignore[return-value]

            with arena.use():
                found = self._measure(
                    {
                        **self._ceilings(),
                        "load": both(runs, "to_pages"),
                        "load, scattered": both(mixed, "to_pages"),
                        "store": both(runs, "to_slots"),
                        "store, scattered": both(mixed, "to_slots"),
                    }
                )
                both(mixed, "to_pages")()
                arena.bytes[:] = 0
                both(mixed, "to_slots")()
                assert bytes(arena.view) == before, "blocks differ after a way to the device and back"
        for name, of in (("load", "H2D"), ("store", "D2H")):
            self._target(name, found, of, COPY_SHARE)
            self._target(f"{name}, scattered", found, of, COPY_SHARE)
        found["gather"] = self._gather(tensors, mixed)
        return found

    @staticmethod
    def _groups(pages: Pages) -> list[tuple[int, int]]:
        step = max(1, pages.copier.load_group_bytes // LAYOUT.block_bytes)
        count = pages.num_blocks
        return [(begin, min(count, begin + step)) for begin in range(0, count, step)]

    def _gather(self, tensors: list[Any], ids: list[int]) -> dict[str, Any]:
        """What the client does on the device alone: pages to a buffer, and from it to pages."""
        torch = self._torch
        rows = torch.tensor(ids, device=self._device)
        shape = (len(ids), LAYOUT.num_layers, LAYOUT.layer_block_bytes)
        buffer = torch.zeros(shape, dtype=torch.uint8, device=self._device)

        def gather() -> None:
            for layer, memory in enumerate(tensors):
                buffer[:, layer] = memory.index_select(0, rows)

        def scatter() -> None:
            for layer, memory in enumerate(tensors):
                memory.index_copy_(0, rows, buffer[:, layer])

        return self._measure({"D2D": self._ceilings()["D2D"], "gather": gather, "scatter": scatter})

    # ---- the HBM tier

    def _tier(self) -> HbmTier:
        slots_bytes = -(-self._size_bytes // EXTENT_BYTES) * EXTENT_BYTES
        return HbmTier(
            incarnation=1, capacity_bytes=slots_bytes, extent_bytes=EXTENT_BYTES, device=self._device
        )

    def _hbm(self) -> dict[str, Any]:
        loop = asyncio.new_event_loop()
        tier = self._tier()
        loop.run_until_complete(tier.open())
        try:
            blocks = Blocks(self._count, tier.arena_id, self._pinned())
            back = self._pinned()
            views = blocks.views(back)
            found = self._measure(
                {
                    **self._ceilings(),
                    "tier write": lambda: loop.run_until_complete(
                        tier.write(blocks.slots, blocks.records, blocks.payloads)
                    ),
                    "tier read": lambda: loop.run_until_complete(
                        tier.read(blocks.slots, blocks.records, views)
                    ),
                }
            )
            assert np.array_equal(back, blocks.memory), "the HBM tier gives other bytes than it got"
            offsets = [tier.offset_of(slot) for slot in blocks.slots]
            found["ipc"] = self._other_process(tier.handle(), offsets, blocks)
        finally:
            loop.run_until_complete(tier.close())
            loop.close()
        self._target("tier write", found, "H2D", HBM_SHARE)
        self._target("tier read", found, "D2H", HBM_SHARE)
        return found

    def _pinned(self) -> np.ndarray:
        torch = self._torch
        memory = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        return np.asarray(memory.numpy())

    def _other_process(self, handle: bytes, offsets: list[int], blocks: Blocks) -> dict[str, Any]:
        """An engine of its own that maps the slab, compares every block, and copies slots on the device."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        checksums = [record.checksum for record in blocks.records]
        args = (handle, offsets, checksums, self._rounds, there)
        engine = context.Process(target=_engine, args=args, daemon=True)
        engine.start()
        try:
            if not here.poll(TIMEOUT_S):
                raise Unavailable("the process that maps the slab does not answer")
            answer: dict[str, Any] = here.recv()
        finally:
            engine.join(TIMEOUT_S)
            engine.kill()
        assert answer["wrong"] == 0, f"{answer['wrong']} blocks differ in the process that mapped them"
        answer["median_bytes_per_s"] = median(answer["bytes_per_s"])
        return answer

    # ---- cuFile

    def _gds(self) -> dict[str, Any]:
        directory = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=self._directory))
        loop = asyncio.new_event_loop()
        tier = self._tier()
        told: dict[str, int] = {}

        def report(way: str, how: str, blocks: int) -> None:
            told[f"{way} {how}"] = told.get(f"{way} {how}", 0) + blocks

        file = FileTier(
            node_id=NODE,
            paths=[directory],
            capacity_bytes=2 * self._size_bytes + 4 * EXTENT_BYTES,
            extent_bytes=EXTENT_BYTES,
        )
        try:
            loop.run_until_complete(tier.open())
            loop.run_until_complete(file.open())
            found = self._measure_gds(loop, file, tier, report)
            found["blocks"] = told
        finally:
            loop.run_until_complete(file.close())
            loop.run_until_complete(tier.close())
            loop.close()
            shutil.rmtree(directory)
        return found

    def _measure_gds(
        self,
        loop: asyncio.AbstractEventLoop,
        file: FileTier,
        tier: HbmTier,
        report: Callable[[str, str, int], None],
    ) -> dict[str, Any]:
        blocks = Blocks(self._count, tier.arena_id, self._pinned())
        slab: Slab = tier.slab
        offsets = [tier.offset_of(slot) for slot in blocks.slots]
        slots = blocks.file_slots()
        by_host = Gds(file, slab, None)
        try:
            mover, why = make_mover(slab), ""
        except Unavailable as error:
            mover, why = None, str(error)
        direct = Gds(file, slab, mover, report)
        slab.copy_in(list(zip(offsets, blocks.payloads, strict=True)))
        arms: dict[str, Callable[[], object]] = {}
        for name, gds in (("by host memory", by_host), *((("by cuFile", direct),) if mover else ())):
            arms[f"store {name}"] = lambda gds=gds: loop.run_until_complete(  # type: ignore[misc]
                gds.store(slots, blocks.records, offsets)
            )
            arms[f"load {name}"] = lambda gds=gds: loop.run_until_complete(  # type: ignore[misc]
                gds.load(slots, blocks.records, offsets)
            )
        found = self._measure(arms)
        slab.zero([(0, slab.size_bytes)])
        wrong = loop.run_until_complete(direct.load(slots, blocks.records, offsets))
        back = self._pinned()
        slab.copy_out(list(zip(offsets, blocks.views(back), strict=True)))
        assert wrong == [], f"{len(wrong)} blocks on the medium are wrong"
        assert np.array_equal(back, blocks.memory), "blocks differ after a way to the medium and back"
        found |= {"mode": direct.mode, "why_not": why, "verified": "XXH3-128 of all bytes, on the device"}
        for gds in (direct, by_host):
            loop.run_until_complete(gds.close())
        return found


class Blocks:
    """Random blocks in one piece of host memory, with slots of the slab and of the file tier."""

    def __init__(self, count: int, arena: int, memory: np.ndarray) -> None:
        self.memory = memory
        block_bytes = LAYOUT.block_bytes
        for at, block in enumerate(random_blocks(count, block_bytes)):
            memory[at * block_bytes : (at + 1) * block_bytes] = np.frombuffer(block, np.uint8)
        self.payloads = self.views(memory)
        self.records = [
            BlockRecord(
                BlockId(i.to_bytes(32, "big"), 0),
                None,
                bytes(32),
                block_bytes,
                xxhash.xxh3_128_digest(payload),
            )
            for i, payload in enumerate(self.payloads)
        ]
        self.slots = _slots(count, arena, LAYOUT.slot_bytes)

    @staticmethod
    def views(memory: np.ndarray) -> list[memoryview]:
        """The blocks in a piece of memory as large as this one's."""
        step = LAYOUT.block_bytes
        return [memory.data[at : at + step] for at in range(0, memory.nbytes, step)]

    def file_slots(self) -> list[Slot]:
        """As many of the file tier."""
        return _slots(len(self.slots), FileTier.arena_id, LAYOUT.slot_bytes + PAGE_SIZE_BYTES)


def _slots(count: int, arena: int, size_bytes: int) -> list[Slot]:
    each = EXTENT_BYTES // size_bytes
    return [
        Slot(arena, n // each, n // each * EXTENT_BYTES + n % each * size_bytes, size_bytes)
        for n in range(count)
    ]


def _engine(
    handle: bytes, offsets: list[int], checksums: list[bytes], rounds: int, answer: Connection
) -> None:
    """In another process: map the slab, compare, measure copies on the device."""
    began_s = time.perf_counter()
    slab = devices.import_slab(handle)
    mapped_s = time.perf_counter() - began_s
    buffers = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in offsets]
    slab.copy_out(list(zip(offsets, buffers, strict=True)))
    wrong = sum(
        xxhash.xxh3_128_digest(buffer) != expected
        for buffer, expected in zip(buffers, checksums, strict=True)
    )
    import torch

    device = slab.device
    target = torch.empty((len(offsets), LAYOUT.block_bytes), dtype=torch.uint8, device=device)

    def copy() -> None:
        memory = slab.tensor()
        for row, at in zip(target, offsets, strict=True):
            row.copy_(memory[at : at + LAYOUT.block_bytes], non_blocking=True)
        if device != "cpu":
            torch.cuda.synchronize(device)

    copy()
    size_bytes = len(offsets) * LAYOUT.block_bytes
    rates = [size_bytes / seconds(copy) for _ in range(rounds)]
    slab.close()
    answer.send({"wrong": wrong, "mapped_s": mapped_s, "bytes_per_s": rates})
    answer.close()
