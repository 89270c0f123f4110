from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import mmap
import os
import random
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import machine
from kvtier.errors import AlreadyRunning, ConfigError, ResourceShortage, TierFault
from kvtier.interfaces import Growing, Mapped
from kvtier.testing.tier_tests import MakeTier, TierTests, read_all, slot_of, write_all
from kvtier.tiers import leftovers, shm
from kvtier.tiers.arena import Arena
from tests.tiers.processes import DAEMON, ENGINE, Process, names, process, used_bytes

MIB = 1 << 20
NODE = "a1" * 16
OTHER = "b2" * 16
THIRD = "c3" * 16
CAP = 8 * MIB
EXTENT = MIB
DEADLINE_S = 20.0

Make = Callable[..., Arena]


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "small"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture
def make(shm_dir: Path) -> Make:
    def make(incarnation: int = 1, node_id: str = NODE, **options: Any) -> Arena:
        options = {"capacity_bytes": CAP, "extent_bytes": EXTENT, "shm_dir": shm_dir} | options
        return Arena(node_id=node_id, incarnation=incarnation, **options)

    return make


def daemon_options(shm_dir: Path, incarnation: int = 1, node_id: str = NODE, **options: Any) -> str:
    return json.dumps(
        {"node_id": node_id, "incarnation": incarnation, "capacity_bytes": CAP, "extent_bytes": EXTENT}
        | {"shm_dir": str(shm_dir)}
        | options
    )


def arena_of(shm_dir: Path, incarnation: int = 1, node_id: str = NODE) -> Path:
    return shm_dir / f"kvtier-{node_id[:12]}-{incarnation}.arena"


async def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        await asyncio.sleep(0.005)


async def settle(arena: Arena) -> int:
    """Let the step that runs and one more whole step end."""
    for _ in range(2):
        arena.grow()
        await until(lambda: arena._step is None or arena._step.done())
    return arena.grow()


class TestArena(TierTests):
    @pytest.fixture
    def make_tier(self, make: Make) -> MakeTier:
        incarnations = iter(range(1, 100))
        return lambda: make(next(incarnations))

    async def test_it_is_what_the_node_expects(self, make: Make) -> None:
        arena = make()
        assert isinstance(arena, Mapped)
        assert isinstance(arena, Growing)
        assert arena.traits.frees_at_once


async def test_the_file_is_private_whole_touched_and_gone_after_close(make: Make, shm_dir: Path) -> None:
    heard: list[tuple[int, int]] = []
    arena = make(incarnation=2**32 + 7, on_progress=lambda done, total: heard.append((done, total)))
    before = os.umask(0)
    try:
        await arena.open()
    finally:
        os.umask(before)
    status = arena.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE(leftovers.owner_path(shm_dir, NODE).stat().st_mode) == 0o600
    assert status.st_size == CAP
    assert status.st_blocks * 512 == CAP == arena.allocated_bytes
    assert shm.address_of(arena._mapping) % mmap.PAGESIZE == 0
    assert heard == [(done * MIB, CAP) for done in range(9)]
    assert arena.arena_id == 7
    assert resident_bytes(arena.path) == CAP
    assert arena.old_arena_bytes == 0
    await arena.close()
    assert names(shm_dir) == []
    assert arena.allocated_bytes == 0
    assert arena.grow() == 0


def resident_bytes(path: Path) -> int:
    """Bytes of a mapped file for which this process has page tables."""
    sections = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    mine = "".join(section for section in sections if str(path) in section)
    return sum(int(found) * 1024 for found in re.findall(r"^Rss: +(\d+) kB", mine, re.M))


async def test_kernels_without_populate_are_touched_page_by_page(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "_MADV_POPULATE_WRITE", 0x7FFF)  # the kernel answers EINVAL, as old ones do
    arena = make()
    await arena.open()
    assert resident_bytes(arena.path) == CAP
    await arena.close()


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"capacity_bytes": CAP + 1}, "dram_bytes"),
        ({"capacity_bytes": 0}, "dram_bytes"),
        ({"extent_bytes": 1000}, "extent_bytes"),
        ({"extent_bytes": 0}, "extent_bytes"),
    ],
)
def test_sizes_are_whole_extents_of_whole_pages(make: Make, sizes: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make(**sizes)


# ---- too little of something


async def test_more_than_memory_is_a_clear_error(make: Make, shm_dir: Path) -> None:
    arena = make(capacity_bytes=1 << 50)
    with pytest.raises(ResourceShortage, match=rf"dram_bytes is {1 << 50} .*{machine.memory_total_bytes()}"):
        await arena.open()
    assert names(shm_dir) == []


async def test_more_than_is_available_is_a_clear_error(
    make: Make, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory_available_bytes", lambda: CAP - 1)
    with pytest.raises(ResourceShortage, match=rf"dram_bytes is {CAP} .*only {CAP - 1} bytes of memory"):
        await make().open()
    assert names(shm_dir) == []


async def test_more_than_the_file_system_has_is_a_clear_error(
    make: Make, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory is said to be endless, so that what /dev/shm itself has free decides.
    monkeypatch.setattr(machine, "memory_total_bytes", lambda: 1 << 60)
    monkeypatch.setattr(machine, "memory_available_bytes", lambda: 1 << 60)
    with pytest.raises(ResourceShortage, match=rf"dram_bytes is {1 << 50} .* free in {shm_dir}"):
        await make(capacity_bytes=1 << 50).open()
    assert names(shm_dir) == []


async def test_a_short_file_system_is_a_clear_error(make: Make, small_tmpfs: Path) -> None:
    with pytest.raises(
        ResourceShortage, match=rf"dram_bytes is {64 * MIB} .*{32 * MIB - 4096} bytes are free"
    ):
        await make(capacity_bytes=64 * MIB, shm_dir=small_tmpfs).open()
    assert names(small_tmpfs) == []
    arena = make(capacity_bytes=30 * MIB, shm_dir=small_tmpfs)
    await arena.open()
    await arena.close()


async def test_space_that_others_take_meanwhile_leaves_nothing_behind(
    make: Make, small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda directory: 1 << 40)  # true at the check, not later
    with pytest.raises(ResourceShortage, match=rf"dram_bytes is {64 * MIB}, but {small_tmpfs} is full"):
        await make(capacity_bytes=64 * MIB, shm_dir=small_tmpfs).open()
    assert names(small_tmpfs) == []
    monkeypatch.undo()
    assert machine.free_bytes(small_tmpfs) == 32 * MIB


@pytest.mark.parametrize(
    ("limit", "value", "size_bytes", "cause"),
    [("RLIMIT_FSIZE", CAP // 2, CAP, "ulimit -f"), ("RLIMIT_AS", 1 << 40, 1 << 40, "ulimit -v")],
)
def test_limits_of_the_process_are_clear_errors(
    shm_dir: Path, limit: str, value: int, size_bytes: int, cause: str
) -> None:
    child = Process(
        DAEMON,
        daemon_options(shm_dir, capacity_bytes=size_bytes, limits={limit: value}, endless=True),
    )
    heard = child.hear()
    assert child.leave() == 0
    assert re.fullmatch(rf"ResourceShortage dram_bytes is {size_bytes}, but .*{cause}.*", heard), heard
    assert names(shm_dir) == []


async def test_a_missing_directory_is_a_clear_error(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ResourceShortage, match=r"shm_dir is .*none"):
        await make(shm_dir=tmp_path / "none").open()


async def test_growth_that_fails_gives_back_and_tries_again(make: Make, small_tmpfs: Path) -> None:
    options: dict[str, Any] = {"extent_bytes": 2 * MIB, "shm_dir": small_tmpfs}
    first = make(1, capacity_bytes=16 * MIB, **options)
    await first.open()
    with process(ENGINE, str(first.path), "mapped") as engine:
        hoarder = os.open(first.path, os.O_RDWR)  # keeps the memory without the lock that it should hold
        kill_in_place(first)
        arena = make(2, capacity_bytes=24 * MIB, **options)
        await arena.open()
        assert (arena.allocated_bytes, arena.old_arena_bytes) == (8 * MIB, 16 * MIB)
        engine.leave()
    # 32 MiB less the hoarded 16 and a page of the owner's file: seven extents of two.
    await until(lambda: arena.grow() == 14 * MIB)
    assert await settle(arena) == 14 * MIB
    assert arena.path.stat().st_blocks * 512 == 14 * MIB
    os.close(hoarder)
    await until(lambda: arena.grow() == 24 * MIB)
    await arena.close()
    assert names(small_tmpfs) == []


def kill_in_place(arena: Arena) -> None:
    """What the kernel does to a killed daemon's descriptors and mapping, without a process."""
    assert arena._bytes is not None
    assert arena._mapping is not None
    assert arena._fd is not None
    assert arena._owner_fd is not None
    assert arena._worker is not None
    arena._bytes.release()
    arena._mapping.close()
    os.close(arena._fd)
    os.close(arena._owner_fd)
    arena._worker.shutdown()


# ---- what dead daemons leave, and live ones keep


async def test_a_killed_daemon_s_arena_is_removed_at_the_next_start(make: Make, shm_dir: Path) -> None:
    with process(DAEMON, daemon_options(shm_dir), "open") as daemon:
        daemon.kill()
    assert names(shm_dir) == [arena_of(shm_dir).name, leftovers.owner_path(shm_dir, NODE).name]
    arena = make(2)
    await arena.open()
    assert (arena.allocated_bytes, arena.old_arena_bytes) == (CAP, 0)
    assert not arena_of(shm_dir).exists()
    await arena.close()
    assert names(shm_dir) == []


async def test_a_half_made_arena_is_a_leftover_too(make: Make, shm_dir: Path) -> None:
    half = arena_of(shm_dir, 1)
    half.touch()
    os.truncate(half, CAP)
    arena = make(2)
    await arena.open()
    assert names(shm_dir) == [arena.path.name, leftovers.owner_path(shm_dir, NODE).name]
    await arena.close()


async def test_the_arena_of_a_live_daemon_of_another_node_is_never_removed(make: Make, shm_dir: Path) -> None:
    with process(DAEMON, daemon_options(shm_dir, node_id=OTHER), "open") as other:
        before = names(shm_dir)
        for incarnation in (1, 2):
            arena = make(incarnation)
            await arena.open()
            assert set(before) < set(names(shm_dir))
            assert other.ask("content?") == "alive"
            await arena.close()
        assert names(shm_dir) == before
        other.kill()
        arena = make(3)
        await arena.open()
        assert names(shm_dir) == [arena.path.name, leftovers.owner_path(shm_dir, NODE).name]
        await arena.close()


async def test_an_orphan_that_an_engine_maps_stays_until_it_is_unmapped(make: Make, shm_dir: Path) -> None:
    with process(DAEMON, daemon_options(shm_dir, node_id=OTHER), "open") as other:
        path = arena_of(shm_dir, node_id=OTHER)
        with process(ENGINE, str(path), "mapped") as engine:
            other.kill()
            arena = make()
            await arena.open()
            assert arena.allocated_bytes == CAP  # another node's bytes count against that node's cap
            await arena.close()
            assert names(shm_dir) == [
                path.with_suffix(".old").name,
                leftovers.owner_path(shm_dir, OTHER).name,
            ]
            assert engine.ask(f"count {CAP}") == str(len("alive"))
            # Its own node finds and counts it, whoever saw it in between.
            arena = make(2, node_id=OTHER)
            await arena.open()
            assert (arena.allocated_bytes, arena.old_arena_bytes) == (0, CAP)
            kill_in_place(arena)
    arena = make()
    await arena.open()
    assert names(shm_dir) == [arena.path.name, leftovers.owner_path(shm_dir, NODE).name]
    await arena.close()


async def test_arenas_without_an_owner_file_and_foreign_files_are_left_alone(
    make: Make, shm_dir: Path
) -> None:
    kept = [
        arena_of(shm_dir, node_id=OTHER),
        shm_dir / "kvtier-notes.txt",
        shm_dir / "kvtier-a1a1a1a1a1a1-x.arena",
    ]
    for path in kept:
        path.write_bytes(b"x")
    target = shm_dir / "target"
    target.write_bytes(b"x")
    link = arena_of(shm_dir, 1)
    link.symlink_to(target)
    arena = make(2)
    await arena.open()
    await arena.close()
    assert all(path.exists() for path in [*kept, target, link])


async def test_a_live_daemon_of_the_same_node_is_named(
    make: Make, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "OWNER_WAIT_S", 0.2)
    with process(DAEMON, daemon_options(shm_dir), "open") as live:
        before = names(shm_dir)
        with pytest.raises(AlreadyRunning, match=rf"pid {live.child.pid}\b"):
            await make(2).open()
        assert names(shm_dir) == before
        assert live.ask("content?") == "alive"


async def test_a_start_waits_for_a_daemon_that_clears_its_leftovers(make: Make, shm_dir: Path) -> None:
    owner = leftovers.owner_path(shm_dir, NODE)
    fd = os.open(owner, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    arena = make()
    opening = asyncio.create_task(arena.open())
    await asyncio.sleep(0.1)
    assert not opening.done()
    owner.unlink()
    os.close(fd)
    await opening
    assert os.path.samestat(owner.stat(), os.fstat(arena._owner_fd or -1))
    await arena.close()


async def test_an_owner_file_that_is_no_file_is_refused(make: Make, shm_dir: Path) -> None:
    target = shm_dir / "target"
    target.write_bytes(b"precious")
    leftovers.owner_path(shm_dir, NODE).symlink_to(target)
    with pytest.raises(ResourceShortage, match=r"shm_dir is .*\.owner"):
        await make().open()
    assert target.read_bytes() == b"precious"


# ---- older arenas that engines still map


async def test_older_arenas_count_against_the_cap_until_engines_move_over(make: Make, shm_dir: Path) -> None:
    with process(DAEMON, daemon_options(shm_dir, capacity_bytes=3 * MIB), "open") as first:
        old_fd = os.open(arena_of(shm_dir), os.O_RDWR)
        with process(ENGINE, str(arena_of(shm_dir)), "mapped") as engine:
            first.kill()
            arena = make(2)
            await arena.open()
            new_fd = os.open(arena.path, os.O_RDWR)
            assert (arena.allocated_bytes, arena.old_arena_bytes) == (5 * MIB, 3 * MIB)
            for _ in range(3):
                assert await settle(arena) == 5 * MIB
                assert used_bytes([old_fd, new_fd]) == CAP
            with pytest.raises(TierFault):
                arena.view(slot_of(arena, 5, 0))
            os.close(old_fd)
            assert engine.ask("unmap") == "unmapped"
            await until(lambda: arena.grow() == CAP)
            assert used_bytes([new_fd]) == CAP
            arena.view(slot_of(arena, 7, 0))[:] = b"x" * 4096
            assert arena.old_arena_bytes == 0
            os.close(new_fd)
            await arena.close()
    assert names(shm_dir) == []


async def test_the_cap_holds_over_any_number_of_deaths(make: Make, shm_dir: Path) -> None:
    """Retired arenas keep a name, so that a third daemon counts what the second one inherited."""
    fds: list[int] = []
    with process(DAEMON, daemon_options(shm_dir, 1, capacity_bytes=3 * MIB), "open") as first:
        fds.append(os.open(arena_of(shm_dir, 1), os.O_RDWR))
        with process(ENGINE, str(arena_of(shm_dir, 1)), "mapped") as old_engine:
            first.kill()
            with process(DAEMON, daemon_options(shm_dir, 2), f"open {5 * MIB}") as second:
                fds.append(os.open(arena_of(shm_dir, 2), os.O_RDWR))
                with process(ENGINE, str(arena_of(shm_dir, 2)), "mapped") as new_engine:
                    second.kill()
                    arena = make(3)
                    await arena.open()
                    fds.append(os.open(arena.path, os.O_RDWR))
                    assert (arena.allocated_bytes, arena.old_arena_bytes) == (0, CAP)
                    assert await settle(arena) == 0
                    assert used_bytes(fds) == CAP
                    old_engine.kill()
                    os.close(fds.pop(0))
                    await until(lambda: arena.grow() == 3 * MIB)
                    assert used_bytes(fds) == CAP
                    new_engine.kill()
                    os.close(fds.pop(0))
                    await until(lambda: arena.grow() == CAP)
                    assert used_bytes(fds) == CAP
                    await arena.close()
    os.close(fds.pop())
    assert names(shm_dir) == []


async def test_past_the_deadline_memory_is_taken_from_under_the_engine(make: Make, shm_dir: Path) -> None:
    now_s = 0.0
    with process(DAEMON, daemon_options(shm_dir), "open") as first:
        old_fd = os.open(arena_of(shm_dir), os.O_RDWR)
        with process(ENGINE, str(arena_of(shm_dir)), "mapped") as engine:
            assert engine.ask(f"write {CAP}") == "written"
            first.kill()
            arena = make(2, old_arena_deadline_s=30, clock_s=lambda: now_s)
            await arena.open()
            new_fd = os.open(arena.path, os.O_RDWR)
            now_s = 29.9
            assert await settle(arena) == 0
            assert engine.ask(f"count {CAP}") == str(CAP)
            now_s = 30.0
            await until(lambda: arena.grow() == CAP)
            assert used_bytes([old_fd, new_fd]) == CAP
            assert arena.old_arena_bytes == 0
            # The engine lives: no SIGBUS, zeros. What it takes again is taken from it again.
            assert engine.ask(f"count {CAP}") == "0"
            assert engine.ask(f"write {MIB}") == "written"
            await settle(arena)
            assert used_bytes([old_fd, new_fd]) == CAP
            assert engine.ask(f"count {MIB}") == "0"
            assert engine.leave() == 0
            await until(lambda: (arena.grow(), not arena._old)[1])
            os.close(old_fd)
            os.close(new_fd)
            await arena.close()
    assert names(shm_dir) == []


async def test_a_clean_stop_gives_the_memory_back_though_an_engine_maps_it(make: Make, shm_dir: Path) -> None:
    arena = make()
    await arena.open()
    arena.view(slot_of(arena, 0, 0))[:5] = b"bytes"
    with process(ENGINE, str(arena.path), "mapped") as engine:
        assert engine.ask("count 4096") == "5"
        fd = os.open(arena.path, os.O_RDWR)
        await arena.close()
        assert used_bytes([fd]) == 0
        assert engine.ask("count 4096") == "0"
        assert engine.ask(f"write {MIB}") == "written"  # a copy that was under way
        arena = make(2)
        await arena.open()
        assert (arena.allocated_bytes, arena.old_arena_bytes) == (CAP - MIB, MIB)
        assert used_bytes([fd]) + arena.path.stat().st_blocks * 512 == CAP
        os.close(fd)
    await until(lambda: arena.grow() == CAP)
    await arena.close()
    assert names(shm_dir) == []


async def test_an_engine_that_maps_while_the_arena_is_retired_notices(make: Make, shm_dir: Path) -> None:
    """The race told in leftovers.py: the engine opened the file, the daemon probes, the engine locks."""
    with process(DAEMON, daemon_options(shm_dir), "open") as first:
        path = arena_of(shm_dir)
        fd = os.open(path, os.O_RDWR)
        first.kill()
        arena = make(2)
        await arena.open()
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert not path.exists()
        assert arena.old_arena_bytes == 0
        os.close(fd)
        await arena.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_the_cap_holds_wherever_daemons_and_engines_die(make: Make, shm_dir: Path, seed: int) -> None:
    """Kill -9 at random points of a start: what is mapped has a name, what has a name is within the cap."""
    cap, extent = 64 * MIB, 4 * MIB
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        engines: list[tuple[Process, os.stat_result]] = []
        for incarnation in range(1, 13):
            options = daemon_options(
                shm_dir, incarnation, capacity_bytes=cap, extent_bytes=extent, announce=True
            )
            daemon = stack.enter_context(process(DAEMON, options, "starting"))
            end_s = time.monotonic() + rng.uniform(0, 0.15)
            mapped = False
            while time.monotonic() < end_s:
                await asyncio.sleep(0.001)
                assert named_bytes(shm_dir) <= cap
                path = arena_of(shm_dir, incarnation)
                if not mapped and rng.random() < 0.3 and path.exists() and path.stat().st_size:
                    mapped = True
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        engines.append((stack.enter_context(process(ENGINE, str(path), "mapped")), status))
            daemon.kill()
            assert named_bytes(shm_dir) <= cap
            named = {(shm_dir / name).stat().st_ino for name in names(shm_dir)}
            assert all(status.st_ino in named for _, status in engines)
            if len(engines) > 2:
                engines.pop(rng.randrange(len(engines)))[0].kill()
        arena = make(100, capacity_bytes=cap, extent_bytes=extent)
        await arena.open()
        for engine, _ in engines:
            engine.kill()
        await until(lambda: (arena.grow() == cap, named_bytes(shm_dir) <= cap) == (True, True))
        await arena.close()
    assert names(shm_dir) == []


def named_bytes(shm_dir: Path) -> int:
    """Memory behind every arena with a name; of two sums, since a daemon may free and take in between."""

    def total() -> int:
        found = 0
        for name in names(shm_dir):
            with contextlib.suppress(FileNotFoundError):  # renamed or removed since
                found += 0 if name.endswith(".owner") else (shm_dir / name).stat().st_blocks * 512
        return found

    return min(total(), total())


# ---- the arena's own life


async def test_a_view_outlives_close_without_a_crash(make: Make) -> None:
    arena = make()
    await arena.open()
    view = arena.view(slot_of(arena, 0, 0))
    view[:5] = b"bytes"
    await arena.close()
    assert not arena.path.exists()
    assert view.nbytes == 4096
    view[:] = bytes(4096)


async def test_a_start_that_is_cancelled_leaves_nothing(make: Make, shm_dir: Path) -> None:
    heard: list[int] = []

    def cancel(done: int, total: int) -> None:
        heard.append(done)
        opening.cancel()

    arena = make(capacity_bytes=64 * MIB, on_progress=cancel)
    opening = asyncio.create_task(arena.open())
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert heard
    assert names(shm_dir) == []


async def test_growing_stops_at_close(make: Make, shm_dir: Path) -> None:
    with process(DAEMON, daemon_options(shm_dir), "open") as first:
        engine = os.open(arena_of(shm_dir), os.O_RDWR)
        fcntl.flock(engine, fcntl.LOCK_SH)
        first.kill()
    arena = make(2)
    await arena.open()
    assert arena.grow() == 0
    os.close(engine)
    arena.grow()
    await arena.close()
    assert names(shm_dir) == []
    assert arena.allocated_bytes == 0


async def test_a_full_arena_has_nothing_to_do_in_grow(make: Make) -> None:
    arena = make()
    await arena.open()
    assert arena.grow() == CAP
    assert arena._step is None
    await arena.close()


async def test_large_copies_leave_the_loop_free(make: Make) -> None:
    """Copies over the bound for the loop's own thread carry the same bytes."""
    arena = make()
    await arena.open()
    slot = slot_of(arena, 3, 0, EXTENT)
    payload = os.urandom(EXTENT)
    await write_all(arena, [slot], [payload])
    assert arena.view(slot) == payload
    assert await read_all(arena, [slot], [payload]) == [payload]
    await arena.close()


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_somebody_removed_is_a_clear_error_and_close_still_works(
    make: Make, shm_dir: Path, replaced: bool
) -> None:
    arena = make()
    await arena.open()
    assert arena.grow() == CAP
    arena.path.unlink()
    if replaced:
        arena.path.write_bytes(b"not ours")
    with pytest.raises(ResourceShortage, match="removed by somebody else"):
        arena.grow()
    await arena.close()
    await arena.close()
    left = [name for name in names(shm_dir) if name.endswith(".arena")]
    assert left == ([arena.path.name] if replaced else [])
