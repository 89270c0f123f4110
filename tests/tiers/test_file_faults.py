"""A device of the file tier that fails, stops or goes away: misses at once, no hangs; and it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from kvtier.errors import ResourceShortage, TierFault
from kvtier.tiers import file_threads
from kvtier.tiers.file import FileTier
from kvtier.tiers.file_io import CHECK_EVERY_S, Calls
from tests.tiers.file_harness import (
    CAP,
    DEADLINE_S,
    KIB,
    MIB,
    Blocks,
    abandon,
    found_by,
    loop_device,
    make_file_tier,
    opened,
    until,
)

pytestmark = pytest.mark.asyncio
SHORT_S = 0.2


class Device:
    """The kernel's calls, less what was told to fail or to stop."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.stops: dict[str, threading.Event] = {}
        self.waiting = 0
        self.short = 0
        self.calls = Calls(self._preadv, self._pwritev, self._fdatasync)

    def stop(self, name: str) -> None:
        self.stops[name] = threading.Event()

    def go(self) -> None:
        for event in self.stops.values():
            event.set()
        self.stops.clear()

    def _before(self, name: str) -> None:
        if (event := self.stops.get(name)) is not None:
            self.waiting += 1
            assert event.wait(DEADLINE_S)
            self.waiting -= 1
        if (code := self.errors.get(name)) is not None:
            raise OSError(code, os.strerror(code))

    def _preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._before("read")
        return os.preadv(fd, self._some(buffers), offset)

    def _pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._before("write")
        return os.pwritev(fd, self._some(buffers), offset)

    def _some(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        """As much as a device takes at once that takes less than it is given."""
        return [buffers[0][: self.short]] if self.short else buffers

    def _fdatasync(self, fd: int) -> None:
        self._before("flush")
        os.fdatasync(fd)


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.go()


@pytest_asyncio.fixture
async def tier(tmp_path: Path, device: Device) -> AsyncIterator[FileTier]:
    async with opened(tmp_path / "tier", calls=device.calls, deadline_s=SHORT_S, threads=4) as tier:
        yield tier
        device.errors.clear()
        device.go()


async def all_refused(tier: FileTier, blocks: Blocks) -> None:
    """Every use is a fault at once, whatever the device does."""
    begin_s = time.monotonic()
    for use in (blocks.wrong(tier), blocks.write(tier), tier.drop(blocks.slots), tier.checkpoint()):
        with pytest.raises(TierFault):
            await asyncio.wait_for(use, DEADLINE_S)
    assert time.monotonic() - begin_s < DEADLINE_S


def stall() -> None:
    """The loop does not look meanwhile."""
    time.sleep(0.1)


async def come_back(tier: FileTier) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not await tier.probe():
        assert time.monotonic() < end_s, tier.fault
        await asyncio.sleep(0.01)
    assert tier.fault == ""


# ---- errors


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENODEV, errno.ESTALE, errno.EROFS])
@pytest.mark.parametrize("operation", ["read", "write", "flush"])
async def test_any_error_quarantines_until_the_device_works(
    tier: FileTier, device: Device, operation: str, code: int
) -> None:
    blocks = await Blocks(20).write(tier)
    device.errors[operation] = code
    use = {"read": blocks.wrong, "write": blocks.write}.get(operation)
    with pytest.raises(TierFault, match=os.strerror(code)):
        await (use(tier) if use else tier.drop(blocks.slots[:1]))
    assert os.strerror(code) in tier.fault
    device.errors.clear()
    await all_refused(tier, blocks)
    device.errors[operation] = code
    assert not await tier.probe()
    device.errors.clear()
    assert await tier.probe()
    assert tier.fault == ""
    again = await Blocks(20, seed=1).write(tier)
    assert await again.wrong(tier) == []


async def test_drops_that_were_refused_are_made_up_for(tmp_path: Path, device: Device) -> None:
    """Also where the slot serves another block, or the extent another size, by the time it comes back."""
    path = tmp_path / "tier"
    async with opened(path, calls=device.calls) as tier:
        blocks = await Blocks(24).write(tier)
        device.errors["write"] = errno.EIO
        for slots in (blocks.slots[:3], blocks.slots[16:]):
            with pytest.raises(TierFault):
                await tier.drop(slots)
        device.errors.clear()
        assert await blocks.wrong(tier) if not tier.fault else True
        await come_back(tier)
        assert await blocks.wrong(tier) == [0, 1, 2, *range(16, 24)]
        fresh = await Blocks(1, seed=1).write(tier, first=1)
        await abandon(tier)
    async with opened(path) as tier:
        assert found_by(tier) == [*fresh.pairs(), *blocks.pairs()[3:16]]


async def test_a_device_that_takes_less_than_it_is_given_gets_the_rest(
    tier: FileTier, device: Device
) -> None:
    device.short = 4096
    blocks = await Blocks(20, 9 * KIB).write(tier)
    assert await blocks.wrong(tier) == []


async def test_a_device_that_takes_nothing_is_a_fault(tmp_path: Path) -> None:
    taken = [0]

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset) if taken[0] < 3 else 0

    async with opened(tmp_path / "tier", calls=Calls(pwritev=pwritev)) as tier:
        taken[0] = 3
        with pytest.raises(TierFault, match="no bytes"):
            await Blocks(3).write(tier)
        taken[0] = 0
        await come_back(tier)


async def test_a_device_that_fails_at_the_start_is_named(tmp_path: Path, device: Device) -> None:
    async with opened(tmp_path / "tier") as tier:
        blocks = await Blocks(3).write(tier)
    for operation in ("read", "write", "flush"):
        device.errors = {operation: errno.EIO}
        tier = make_file_tier(
            tmp_path / "new" if operation != "read" else tmp_path / "tier", calls=device.calls
        )
        with pytest.raises(ResourceShortage, match="repair the device"):
            await tier.open()
    async with opened(tmp_path / "tier") as tier:
        assert await blocks.wrong(tier) == []


# ---- a device that does not answer


@pytest.mark.parametrize("operation", ["read", "write", "flush"])
async def test_a_stopped_device_costs_one_deadline_and_keeps_its_buffers(
    tier: FileTier, device: Device, operation: str
) -> None:
    blocks = await Blocks(20).write(tier)
    device.stop(operation)
    uses = {"read": blocks.wrong, "write": blocks.write, "flush": lambda tier: tier.drop(blocks.slots[:1])}
    stuck = asyncio.ensure_future(uses[operation](tier))
    await until(lambda: tier.fault, "the tier notices")
    assert "has not answered" in tier.fault
    await all_refused(tier, blocks)
    stuck.cancel()
    for _ in range(3):
        assert not await tier.probe()
    assert not stuck.done(), "the kernel still has its buffers"
    assert device.waiting
    device.go()
    with pytest.raises((asyncio.CancelledError, TierFault)):
        await stuck
    await come_back(tier)
    again = await Blocks(20, seed=1).write(tier)
    assert await again.wrong(tier) == []


async def test_calls_that_wait_behind_stuck_ones_end(tier: FileTier, device: Device) -> None:
    """All threads are stuck: what was queued behind them has touched nothing and lets go."""
    blocks = await Blocks(100).write(tier)
    device.stop("read")
    calls = [asyncio.ensure_future(blocks.wrong(tier, [position])) for position in range(0, 100, 10)]
    await until(lambda: device.waiting == 4, "all threads are stuck")
    ended, pending = await asyncio.wait(calls, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    await until(lambda: sum(call.done() for call in calls) == 6, "the others let go")
    assert len(pending) >= 4
    device.go()
    await asyncio.wait(calls)
    assert sum(isinstance(call.exception(), TierFault) for call in calls if not call.cancelled()) >= 6
    await come_back(tier)
    assert await blocks.wrong(tier) == []
    assert ended


async def test_a_slow_operation_quarantines_though_nobody_looked(tmp_path: Path, device: Device) -> None:
    async with opened(tmp_path / "tier", calls=device.calls, deadline_s=0.05) as tier:
        blocks = await Blocks(1).write(tier)
        device.stop("read")
        reading = asyncio.ensure_future(blocks.wrong(tier))
        await until(lambda: device.waiting, "the read is on its way")
        stall()
        device.go()
        with contextlib.suppress(TierFault):
            await reading
        assert tier.fault
        await come_back(tier)


async def test_a_device_that_stops_during_a_checkpoint_or_a_probe(tier: FileTier, device: Device) -> None:
    blocks = await Blocks(3).write(tier)
    device.stop("flush")
    with pytest.raises(TierFault, match="not answered"):
        await asyncio.wait_for(tier.checkpoint(), DEADLINE_S)
    assert not await tier.probe(), "the checkpoint still runs"
    device.go()
    await come_back(tier)
    device.errors["read"] = errno.EIO
    with pytest.raises(TierFault):
        await blocks.wrong(tier)
    device.errors.clear()
    device.stop("read")
    assert not await asyncio.wait_for(tier.probe(), DEADLINE_S)
    assert not await asyncio.wait_for(tier.probe(), DEADLINE_S)
    device.go()
    await come_back(tier)
    assert await blocks.wrong(tier) == []


async def test_a_probe_that_is_stuck_can_be_cancelled(tier: FileTier, device: Device) -> None:
    blocks = await Blocks(3).write(tier)
    device.errors["read"] = errno.EIO
    with pytest.raises(TierFault):
        await blocks.wrong(tier)
    device.errors.clear()
    device.stop("read")
    probing = asyncio.create_task(tier.probe())
    await until(lambda: device.waiting, "the probe is on its way")
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(probing, DEADLINE_S)
    device.go()
    await come_back(tier)


async def test_a_checkpoint_of_nothing_new_writes_nothing(tier: FileTier) -> None:
    blocks = await Blocks(3).write(tier)
    await tier.checkpoint()
    written_bytes = tier.written_bytes
    await tier.checkpoint()
    assert tier.written_bytes == written_bytes
    await tier.drop(blocks.slots[:1])
    dropped_bytes = tier.written_bytes
    await tier.checkpoint()
    assert tier.written_bytes > dropped_bytes > written_bytes


async def test_a_checkpoint_that_failed_is_made_up_for(tier: FileTier, device: Device) -> None:
    blocks = await Blocks(3).write(tier)
    await tier.checkpoint()
    await tier.drop(blocks.slots[:1])
    device.errors["flush"] = errno.EIO
    with pytest.raises(TierFault):
        await tier.checkpoint()
    device.errors.clear()
    await come_back(tier)
    before_bytes = tier.written_bytes
    await tier.checkpoint()
    assert tier.written_bytes > before_bytes


async def test_a_checkpoint_leaves_out_what_changes_and_nothing_else(tmp_path: Path, device: Device) -> None:
    async with opened(tmp_path / "tier", calls=device.calls, threads=4) as tier:
        blocks = await Blocks(3).write(tier)
        await tier.checkpoint()
        device.stop("read")
        reading = asyncio.create_task(blocks.wrong(tier))
        await until(lambda: device.waiting, "the read is on its way")
        before_bytes = tier.written_bytes
        await tier.checkpoint()
        assert tier.written_bytes == before_bytes, "a read changes nothing"
        device.go()
        assert await reading == []
        device.stop("flush")
        dropping = asyncio.create_task(tier.drop(blocks.slots[:1]))
        await until(lambda: device.waiting, "the drop is on its way")
        left_out = asyncio.create_task(tier.checkpoint())
        await asyncio.sleep(0)
        device.go()
        await asyncio.gather(dropping, left_out)
        before_bytes = tier.written_bytes
        await tier.checkpoint()
        assert tier.written_bytes > before_bytes, "the extent was left out, and is in it now"
        before_bytes = tier.written_bytes
        await tier.checkpoint()
        assert tier.written_bytes == before_bytes
        await abandon(tier)
    async with opened(tmp_path / "tier") as tier:
        assert found_by(tier) == blocks.pairs()[1:]


async def test_a_device_that_stops_before_the_start_and_at_the_end_holds_nobody_up(
    tmp_path: Path, device: Device
) -> None:
    path = tmp_path / "tier"
    async with opened(path):
        pass
    device.stop("read")
    tier = make_file_tier(path, calls=device.calls, deadline_s=0.05)
    with pytest.raises(ResourceShortage, match="not answered"):
        await asyncio.wait_for(tier.open(), DEADLINE_S)
    device.go()
    await until(lambda: not device.waiting, "the thread is back")
    other = make_file_tier(tmp_path / "other", calls=device.calls, deadline_s=0.05)
    await other.open()
    await Blocks(1).write(other)
    device.stop("flush")
    await asyncio.wait_for(other.close(), DEADLINE_S)


async def test_writes_wait_for_one_that_is_far_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash may have cut short lies within a window of positions, so a slow write holds others up."""
    monkeypatch.setattr(file_threads, "WINDOW_BYTES", 64 * KIB)
    slow = threading.Event()
    first: list[int] = []

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if len(buffers) > 1 and not first:
            first.append(offset)
            assert slow.wait(DEADLINE_S)
        return os.pwritev(fd, buffers, offset)

    async with opened(tmp_path / "tier", calls=Calls(pwritev=pwritev), threads=4) as tier:
        writes = [asyncio.ensure_future(Blocks(1, seed=i).write(tier, first=2 * i)) for i in range(8)]
        await until(
            lambda: sum(write.done() for write in writes) == 3, "three fit the window behind the first"
        )
        await asyncio.sleep(0.05)
        assert sum(write.done() for write in writes) == 3
        slow.set()
        for write in writes:
            assert await (await write).wrong(tier) == []


# ---- devices of the kernel's own


async def test_a_directory_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    async with opened(path) as tier:
        blocks = await Blocks(20).write(tier)
        path.rename(tmp_path / "away")

        async def notices() -> bool:
            with contextlib.suppress(TierFault):
                await blocks.wrong(tier)
            return bool(tier.fault)

        end_s = time.monotonic() + DEADLINE_S
        while not await notices():
            assert time.monotonic() < end_s
            await asyncio.sleep(CHECK_EVERY_S / 10)
        assert "No such file" in tier.fault
        assert not await tier.probe()
        assert not path.exists(), "a probe makes nothing"
        shutil.copytree(tmp_path / "away", path)  # another file with the same content
        await come_back(tier)
        assert await blocks.wrong(tier) == []
        (path / "kvtier.slab").unlink()
        shutil.rmtree(tmp_path / "away")
        async with opened(tmp_path / "strange"):
            pass
        (tmp_path / "strange" / "kvtier.slab").rename(path / "kvtier.slab")
        end_s = time.monotonic() + DEADLINE_S
        while not await notices():
            assert time.monotonic() < end_s
            await asyncio.sleep(CHECK_EVERY_S / 10)
        assert not await tier.probe(), "another medium is none"


async def test_a_loop_device_whose_file_is_cut_off_gives_eio(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    with loop_device(backing) as device:
        async with opened(device) as tier:
            blocks = await Blocks(20).write(tier)
            dropped = await Blocks(3, seed=1).write(tier, first=20)
            whole = backing.read_bytes()
            os.truncate(backing, 0)
            with pytest.raises(TierFault, match="Input/output error"):
                await blocks.wrong(tier)
            await all_refused(tier, dropped)
            assert not await tier.probe()
            with backing.open("r+b") as file:
                file.write(whole)
            await come_back(tier)
            assert await blocks.wrong(tier) == []
        async with opened(device) as tier:
            assert found_by(tier) == blocks.pairs()


@contextlib.contextmanager
def frozen_file_system(tmp_path: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """An ext4 of its own, and the commands that stop it and let it go on; a skip where there is none."""
    for tool in ("mkfs.ext4", "fsfreeze", "mount"):
        if shutil.which(tool) is None:
            pytest.skip(f"no file system that can be frozen: {tool} is not installed")
    with loop_device(tmp_path / "backing", 16 * MIB) as device:
        subprocess.run(["mkfs.ext4", "-q", str(device)], check=True, timeout=60)
        place = tmp_path / "frozen"
        place.mkdir()
        mounted = subprocess.run(
            ["mount", str(device), str(place)], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            pytest.skip(f"no file system that can be frozen: {mounted.stderr.strip()}")
        try:
            yield place, ["fsfreeze", "--freeze", str(place)], ["fsfreeze", "--unfreeze", str(place)]
        finally:
            subprocess.run(
                ["fsfreeze", "--unfreeze", str(place)], check=False, capture_output=True, timeout=30
            )
            subprocess.run(["umount", str(place)], check=True, timeout=60)


@pytest.mark.slow
async def test_a_frozen_file_system_is_a_device_that_stops(tmp_path: Path) -> None:
    """The kernel itself holds the writes: misses after one deadline, and all is well after the thaw."""
    with frozen_file_system(tmp_path) as (place, freeze, thaw):
        async with opened(place / "tier", deadline_s=0.5, capacity_bytes=CAP) as tier:
            blocks = await Blocks(20).write(tier)
            await asyncio.to_thread(subprocess.run, freeze, check=True, timeout=30)
            try:
                late = Blocks(20, seed=1)
                writing = asyncio.ensure_future(late.write(tier))
                await until(lambda: tier.fault, "the tier notices")
                await all_refused(tier, blocks)
                assert not await tier.probe()
                assert not writing.done(), "the kernel still has its buffers"
            finally:
                await asyncio.to_thread(subprocess.run, thaw, check=True, timeout=30)
            with contextlib.suppress(TierFault):
                await writing
            await come_back(tier)
            again = await Blocks(20, seed=2).write(tier)
            assert await again.wrong(tier) == []
