"""The mapped arena: bounds, growth, its flock, and that it is never unmapped under a copy."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.client.mapping import POPULATE_CHUNK_BYTES, ArenaMapping, slots_at
from kvtier.errors import TierFault, Unavailable
from tests.client.harness import mapped_arenas

MIB = 1 << 20
SLOT = 8192


@pytest.fixture
def path(shm: Path) -> Path:
    path = shm / "kvtier-test-1.arena"
    with path.open("wb") as file:
        file.truncate(4 * MIB)
        os.posix_fallocate(file.fileno(), 0, 2 * MIB)
    path.chmod(0o600)
    return path


@pytest.fixture
def arena(path: Path) -> Iterator[ArenaMapping]:
    arena = ArenaMapping(str(path), 4 * MIB, 2 * MIB)
    yield arena
    arena.retire()


def is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_writes_are_seen_through_the_file(arena: ArenaMapping, path: Path) -> None:
    arena.bytes[4096:4100] = [1, 2, 3, 4]
    with path.open("rb") as file:
        file.seek(4096)
        assert file.read(4) == bytes([1, 2, 3, 4])
    assert bytes(arena.view[4096:4100]) == bytes([1, 2, 3, 4])


@pytest.mark.parametrize(
    "offsets",
    [
        [2 * MIB],  # the first byte that is not allocated
        [2 * MIB - 4096],  # ends beyond
        [4 * MIB],
        [2**63],
        [2**64 - 1],
        [2**64 - SLOT],  # the end wraps around
        [0, 100],  # not a page
        [4096 + 8],
        [0, 4096],  # overlap
        [SLOT, 0, SLOT],  # twice the same
    ],
)
def test_no_slot_outside_is_touched(arena: ArenaMapping, offsets: list[int]) -> None:
    assert not arena.check(offsets, SLOT)
    with pytest.raises(TierFault, match="nothing was touched"):
        slots_at(arena, offsets, SLOT)


def test_good_slots(arena: ArenaMapping) -> None:
    assert arena.check([], SLOT)
    assert arena.check([0], SLOT)
    assert arena.check([4096, 4096 + SLOT, 2 * MIB - SLOT], SLOT)


def test_it_grows_and_never_shrinks(arena: ArenaMapping) -> None:
    arena.grow(3 * MIB)
    assert arena.check([2 * MIB], SLOT)
    for size in (MIB, 5 * MIB):
        arena.grow(size)
        assert arena.allocated_bytes == 3 * MIB


def test_holes_are_not_populated(arena: ArenaMapping, path: Path) -> None:
    while arena.populate():
        pass
    assert arena.is_populated
    assert path.stat().st_blocks * 512 == 2 * MIB
    assert POPULATE_CHUNK_BYTES < 1 << 30


def test_it_is_unmapped_only_after_the_last_copy(arena: ArenaMapping, path: Path) -> None:
    inside, leave = threading.Event(), threading.Event()
    ended: list[str] = []

    def copy() -> None:
        with arena.use():
            inside.set()
            leave.wait(10)
            arena.bytes[0] = 9  # would be a segmentation fault

    thread = threading.Thread(target=copy)
    thread.start()
    inside.wait(10)
    arena.retire(lambda: ended.append("end"))
    arena.retire()
    assert not ended
    assert is_locked(path)
    assert len(mapped_arenas()) == 1
    with pytest.raises(Unavailable), arena.use():
        pass
    leave.set()
    thread.join()
    assert ended == ["end"]
    assert not is_locked(path)
    assert mapped_arenas() == []
    assert not arena.populate()


def test_the_flock_says_that_it_is_in_use(arena: ArenaMapping, path: Path) -> None:
    assert is_locked(path)
    arena.retire()
    assert not is_locked(path)


def test_it_sees_that_its_name_is_gone(arena: ArenaMapping, path: Path) -> None:
    assert not arena.is_orphaned()
    path.rename(path.with_suffix(".old"))
    assert arena.is_orphaned()
    path.touch()
    assert arena.is_orphaned()
    path.unlink()
    path.with_suffix(".old").unlink()
    assert arena.is_orphaned()
    arena.retire()
    assert not arena.is_orphaned()


def test_what_is_no_arena_is_refused(path: Path, shm: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be opened"):
        ArenaMapping(str(shm / "none.arena"), MIB, MIB)
    with pytest.raises(Unavailable, match="cannot be opened"):
        ArenaMapping("/dev/shm/\0", MIB, MIB)
    link = shm / "link.arena"
    link.symlink_to(path)
    with pytest.raises(Unavailable, match="cannot be opened"):
        ArenaMapping(str(link), MIB, MIB)
    with pytest.raises(Unavailable, match="shorter"):
        ArenaMapping(str(path), 5 * MIB, MIB)
    os.mkfifo(shm / "fifo.arena")
    with pytest.raises(Unavailable):
        ArenaMapping(str(shm / "fifo.arena"), MIB, MIB)
    for size, allocated in ((MIB, 2 * MIB), (0, 0), (1 << 60, MIB)):
        with pytest.raises(Unavailable, match="names an arena"):
            ArenaMapping(str(path), size, allocated)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(Unavailable):
        ArenaMapping(str(path), 5 * MIB, MIB)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert mapped_arenas() == []


def test_one_that_is_being_given_up_is_not_mapped(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(Unavailable, match="given up"):
        ArenaMapping(str(path), 4 * MIB, MIB)
    os.close(fd)
