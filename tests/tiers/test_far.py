from __future__ import annotations

import asyncio
import contextlib
import mmap
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier import machine
from kvtier.errors import ConfigError, ResourceShortage
from kvtier.interfaces import Durable, Mapped
from kvtier.testing.tier_tests import MakeTier, TierTests, read_all, record_of, slot_of, write_all
from kvtier.tiers import far, numa, shm
from kvtier.tiers.far import FarMemory
from kvtier.types import PAGE_SIZE_BYTES, TierKind
from tests.tiers.machines import Machine

MIB = 1 << 20
NODES = numa.memory_nodes()
NODE = next((node.node for node in NODES if node.total_bytes), None)
"""A node of this machine that has memory."""


def make_far(regions: list[tuple[int | None, int]], extent_bytes: int = MIB, **options: object) -> FarMemory:
    values: dict[str, object] = {"nodes": NODES}
    return FarMemory(regions, extent_bytes=extent_bytes, **(values | options))  # type: ignore[arg-type]


class TestFarMemory(TierTests):
    """One region, wherever the kernel puts it."""

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return lambda: make_far([(None, 4 * MIB)])


class TestFarMemoryOfSeveralNodes(TierTests):
    """Two regions, one of them bound to a real node, each as small as can be."""

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return lambda: make_far([(NODE, MIB), (None, MIB)])


async def test_it_is_mapped_below_dram_and_outlives_nothing() -> None:
    tier = make_far([(None, 2 * MIB)])
    assert tier.kind is TierKind.FAR
    assert isinstance(tier, Mapped)
    assert not isinstance(tier, Durable)
    assert tier.traits.frees_at_once
    assert tier.allocated_bytes == 0


async def test_what_is_not_what_it_was_never_leaves() -> None:
    tier = make_far([(None, MIB), (None, MIB)])
    await tier.open()
    try:
        slots = [slot_of(tier, index % 2, index // 2) for index in range(6)]
        payloads = [random.Random(index).randbytes(PAGE_SIZE_BYTES - index) for index in range(6)]
        await write_all(tier, slots, payloads)
        tier.view(slots[1])[PAGE_SIZE_BYTES - 2] ^= 1
        tier.view(slots[4])[0] ^= 0x80
        assert await read_all(tier, slots, payloads) == [
            None if index in (1, 4) else payload for index, payload in enumerate(payloads)
        ]
        (wrong,) = await tier.read([slots[0]], [record_of(payloads[2])], [memoryview(bytearray(4096))])
        assert wrong == 0, "another block's bytes"
    finally:
        await tier.close()


async def test_all_of_it_is_touched_at_open_and_given_back_at_close() -> None:
    before = _resident_bytes()
    seen: list[tuple[int, int]] = []
    tier = make_far([(None, 96 * MIB), (None, 32 * MIB)], 32 * MIB, on_progress=lambda *its: seen.append(its))
    await tier.open()
    await asyncio.sleep(0)
    assert _resident_bytes() - before >= 128 * MIB
    assert seen == sorted(seen)
    assert seen[-1] == (128 * MIB, 128 * MIB)
    await tier.close()
    assert _resident_bytes() - before < 64 * MIB


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_sizes_are_whole_extents() -> None:
    for size in (0, MIB // 2, MIB + 1):
        with pytest.raises(ConfigError, match="far_memory"):
            make_far([(None, size)])
    with pytest.raises(ConfigError, match="extent_bytes"):
        make_far([(None, MIB)], 1000)


async def test_a_node_that_is_not_here_is_a_clear_error(tmp_path: Path) -> None:
    there = Machine(tmp_path)
    there.node(0, cpus="0-1", total_kb=1 << 20, distance="10 20")
    there.node(2, cpus="", total_kb=0, distance="20 10")
    nodes = numa.memory_nodes(there.root)
    for node in (1, 2, 1023):
        tier = make_far([(None, MIB), (node, MIB)], nodes=nodes)
        with pytest.raises(
            ConfigError, match=f"names NUMA node {node}: allowed are nodes with memory, here 0"
        ):
            await tier.open()
        assert tier.allocated_bytes == 0


async def test_more_than_a_node_has_is_refused_before_the_kernel_kills_somebody(tmp_path: Path) -> None:
    there = Machine(tmp_path)
    there.node(0, cpus="0-1", total_kb=4096, distance="10")  # 2 MiB of them are free
    tier = make_far([(0, 4 * MIB)], nodes=numa.memory_nodes(there.root))
    with pytest.raises(ResourceShortage, match="on NUMA node 0, but only 2097152 are available"):
        await tier.open()


async def test_more_than_memory_is_refused() -> None:
    size = machine.memory_total_bytes() // MIB * MIB + 64 * MIB
    tier = make_far([(None, size)])
    with pytest.raises(ResourceShortage, match=f"far_memory is {size} bytes"):
        await tier.open()


async def test_an_open_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _resident_bytes()
    monkeypatch.setattr(shm, "CHUNK_BYTES", MIB)
    tier = make_far([(None, 256 * MIB)])
    opening = asyncio.create_task(tier.open())
    await asyncio.sleep(0.01)
    opening.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await opening
    await tier.close()
    assert _resident_bytes() - before < 64 * MIB


async def test_large_copies_leave_the_loop_free_and_end_before_they_are_cancelled() -> None:
    tier = make_far([(None, 128 * MIB)], 64 * MIB)
    await tier.open()
    try:
        payload = bytes(64 * MIB)
        slot = slot_of(tier, 1, 0, 64 * MIB)
        writing = asyncio.create_task(write_all(tier, [slot], [payload]))
        turns = 0
        while not writing.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 3
        buffer = bytearray(64 * MIB)
        reading = asyncio.create_task(tier.read([slot], [record_of(payload)], [memoryview(buffer)]))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        buffer[:] = b"?" * len(buffer)
        await asyncio.sleep(0.05)
        assert buffer.count(b"?") == len(buffer)
    finally:
        await tier.close()


# ---- where it lies


def numa_map(address: int) -> str:
    """The kernel's line on the mapping that begins there, or an empty text."""
    path = Path("/proc/self/numa_maps")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line for line in lines if line.startswith(f"{address:x} ")), "")


@pytest.fixture
def real_node() -> int:
    if NODE is None:
        pytest.skip("the kernel shows no NUMA nodes: nothing can be bound")
    if refused := far.binding.try_bind([NODE]):
        pytest.skip(f"memory cannot be bound on this machine: {refused}")
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("the kernel has no numa_maps: where memory lies is not to be seen")
    return NODE


async def test_its_memory_is_bound_to_its_node(real_node: int) -> None:
    tier = make_far([(real_node, 4 * MIB), (None, 4 * MIB)])
    await tier.open()
    try:
        bound, free = (numa_map(shm.address_of(its.mapping)) for its in tier._regions if its.mapping)
        assert f" bind:{real_node} " in bound
        assert f" N{real_node}=" in bound
        assert " default " in free or not free, "merged with what lies next to it"
        assert tier.notices == []
    finally:
        await tier.close()


FORBIDDEN = """
import asyncio, ctypes, struct, sys
NUMBER = {"x86_64": 237, "aarch64": 235}[__import__("platform").machine()]
def stmt(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
program = stmt(0x20, 0, 0, 0) + stmt(0x15, 0, 1, NUMBER)  # load the call's number, and compare
program += stmt(6, 0, 0, 0x00050001) + stmt(6, 0, 0, 0x7FFF0000)  # EPERM; allowed
code = ctypes.create_string_buffer(program)
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filter, 0, 0):
    sys.exit(f"no seccomp here: errno {ctypes.get_errno()}")
from pathlib import Path
from kvtier.tiers import numa
from kvtier.tiers.arena import Arena
from kvtier.tiers.far import FarMemory
nodes = numa.memory_nodes()
node = next(its.node for its in nodes if its.total_bytes)
arena = Arena(node_id="a1" * 16, incarnation=1, capacity_bytes=1 << 20, extent_bytes=1 << 20,
              shm_dir=Path(sys.argv[1]), bound_to=[node])
tier = FarMemory([(node, 1 << 20)], extent_bytes=1 << 20, nodes=nodes)
async def main():
    for each in (arena, tier):
        await each.open()
        print(each.allocated_bytes, each.notices)
        await each.close()
asyncio.run(main())
"""


def test_where_a_container_forbids_binding_it_goes_on_and_says_so(tmp_path: Path) -> None:
    if NODE is None:
        pytest.skip("the kernel shows no NUMA nodes: nothing can be bound")
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    if "no seccomp here" in done.stderr:
        pytest.skip(f"calls cannot be forbidden on this machine: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    near, further = (line for line in done.stdout.splitlines() if line.startswith(f"{MIB} ["))
    for line in (near, further):
        assert "mbind is forbidden here" in line
    assert f"not bound to NUMA node {NODE}" in near
    assert f"node {NODE}: its memory is not bound there" in further


async def test_huge_pages_are_asked_for_unless_they_are_off() -> None:
    page_bytes = numa.huge_page_bytes()
    has, setting = numa.anonymous_huge_choice()
    if not has or page_bytes > 4 * MIB:
        pytest.skip(f"anonymous memory has no huge pages on this machine: {setting}, {page_bytes} bytes each")
    found = {}
    for choice in ("off", "advise"):
        tier = make_far([(None, 16 * page_bytes)], page_bytes, huge_pages=choice)
        await tier.open()
        try:
            found[choice] = sum(shm.huge_bytes(its.mapping) for its in tier._regions if its.mapping)
        finally:
            await tier.close()
    assert found["advise"] >= 8 * page_bytes
    assert found["off"] == 0 or "always" in setting


async def test_children_and_core_dumps_get_none_of_it() -> None:
    tier = make_far([(None, MIB)])
    await tier.open()
    try:
        (region,) = tier._regions
        assert region.mapping is not None
        address, flags, is_here = shm.address_of(region.mapping), "", False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                is_here = int(match[1], 16) <= address < int(match[2], 16)
            elif is_here and line.startswith("VmFlags:"):
                flags = line
        assert {"dc", "dd"} <= set(flags.split()), flags
    finally:
        await tier.close()
