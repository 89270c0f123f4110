"""What has to be true on real NVMe-oF: the only program of the guest, `python -m tests.nvmeof.guest`."""

from __future__ import annotations

import asyncio
import random
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # what the guest imports, it imports step by step: each takes seconds there
    from kvtier.tiers.file import FileTier
    from kvtier.types import Slot
    from tests.nvmeof.target import Nvme

MARK: Final = "nvmeof: "
PASSED: Final = "everything held"
DEADLINE_S: Final = 5.0
BLOCKS: Final = 16
BLOCK_BYTES: Final = 64 << 10
SUITE_TIMEOUT_S: Final = 300.0
RECOVERY_TIMEOUT_S: Final = 60.0
SLACK_S: Final = 3.0
"""An emulated machine on a busy one is late."""


def say(text: str) -> None:
    """One line for whoever watches the console."""
    print(f"{MARK}{text}", flush=True)


def main() -> int:
    """All steps, in order; the first that does not hold ends it."""
    steps = (
        defaults_are_complained_of_and_mended,
        ports_that_go_down_are_seen,
        directories_lead_to_their_namespace,
        the_script_of_the_guide_does_the_same,
        the_tier_passes_its_suite,
        a_blackhole_is_a_quarantine,
        a_target_that_stops_is_a_quarantine,
        a_file_system_wants_a_new_mount,
        without_the_advice_the_tier_keeps_its_deadline_too,
    )
    try:
        for step in steps:
            began_s = time.monotonic()
            step()
            say(f"{step.__name__.replace('_', ' ')} ({time.monotonic() - began_s:.1f} s)")
    except BaseException:
        traceback.print_exc()
        say("FAILED")
        return 1
    say(PASSED)
    return 0


# ---- the preflight


def defaults_are_complained_of_and_mended() -> None:
    """Connected by nvme-cli with its defaults; then what `kvtier check` says is done, word for word."""
    from tests.nvmeof import target

    nvme = target.Nvme([Path(root) for root in sys.argv[1:]])
    target.serve([Path("/dev/ram0"), Path("/dev/ram1")])
    for port in target.PORTS:
        nvme.connect(port)
    target.until("both disks are there", lambda: target.DISK.exists() and target.DIRECTORY_DISK.exists(), 30)
    target.until("both paths are live", target.all_live, 30)
    path, *problems = _check(target.DISK)
    for word in ("nvme0n1, 2 paths by numa", "NVMe-oF tcp", f"traddr={target.ADDRESS}", "4421", target.NQN):
        assert word in path["why"], path
    assert path["state"] == "degraded"
    wait = problems[0]["why"]
    for name in ("nvme0", "nvme1"):
        known = f"{name} fast_io_fail_tmo off, ctrl_loss_tmo 600, io_timeout (ms) 30000, kato 5"
        assert known in wait, wait
    assert all("ctrl_loss_tmo" in each["todo"] for each in problems[1:]), problems
    for disk in (
        target.DISK,
        target.DISK,
        target.DIRECTORY_DISK,
    ):  # what is connected anew needs a second look
        _obey(nvme, disk)
    for disk in (target.DISK, target.DIRECTORY_DISK):
        (path,) = _check(disk)
        assert path["state"] == "ok", path
    say(f"  now {path['why'].rpartition(', ')[2]}")


def _obey(nvme: Nvme, disk: Path) -> None:
    from tests.nvmeof import target

    commands = "; ".join(problem["todo"] for problem in _check(disk)).split("; ")
    gone = False
    for command in commands:
        if command.startswith("nvme ") or (command.startswith("echo ") and not gone):
            say(f"  {command}")
            nvme.run(command)
            target.until("both paths are live", target.all_live, 30)
        gone = gone or command.startswith("nvme ")


def ports_that_go_down_are_seen() -> None:
    """One path down: a warning. All down: nothing can be read."""
    from tests.nvmeof import target

    target.close_port(target.PORTS[1])
    target.until("one path is down", lambda: "connecting" in target.states().values(), 30)
    path, problem = _check(target.DISK)
    assert (path["state"], problem["needed"]) == ("degraded", False), (path, problem)
    assert "connecting" in problem["why"]
    target.close_port(target.PORTS[0])
    target.until("all are down", lambda: [*target.states().values()] == ["connecting"] * 2, 30)
    assert all(each["needed"] for each in _check(target.DISK))
    for port in target.PORTS:
        target.open_port(port)
    target.until("both are back", target.all_live, RECOVERY_TIMEOUT_S)
    assert [each["state"] for each in _check(target.DISK)] == ["ok"]


def directories_lead_to_their_namespace() -> None:
    """ext4 on the second namespace, mounted."""
    from kvtier.tiers.nvmeof import inspect
    from tests.nvmeof import target
    from tests.nvmeof.tier_suite import MOUNTED

    MOUNTED.mkdir(parents=True)
    _run("mke2fs", "-q", "-t", "ext4", str(target.DIRECTORY_DISK))
    _run("/run/busybox", "mount", "-t", "ext4", str(target.DIRECTORY_DISK), str(MOUNTED))
    (MOUNTED / "below").mkdir()
    storage = inspect(MOUNTED / "below")
    assert [each.name for each in storage.namespaces] == [target.DIRECTORY_DISK.name], storage
    assert len(storage.namespaces[0].controllers) == 2


def the_script_of_the_guide_does_the_same() -> None:
    """`deploy/nvmeof/connect.sh`, path after path, under the mounted disk."""
    from tests.nvmeof import target

    nvme = target.Nvme([Path(root) for root in sys.argv[1:]])
    for name in target.states():
        port = target.port_of(name)
        nvme.run(f"nvme disconnect -d {name}")
        nvme.run(
            "KEEP_ALIVE_S=1 IO_TIMEOUT_MS=4000 FAST_IO_FAIL_S=0 "
            f"sh deploy/nvmeof/connect.sh tcp {target.ADDRESS} {port} {target.NQN}"
        )
        target.until("both paths are live", target.all_live, 30)
    for disk in (target.DISK, target.DIRECTORY_DISK):
        (path,) = _check(disk)
        assert path["state"] == "ok", path


# ---- the tier


def the_tier_passes_its_suite() -> None:
    """`TierTests` on the raw namespace and in the directory."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--basetemp=/run/pytest", "tests/nvmeof/tier_suite.py"]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    say(f"  {done.stdout.strip().splitlines()[-1]}")


def a_blackhole_is_a_quarantine() -> None:
    """Packets are lost in the middle of reads and writes, and arrive again later."""
    from tests.nvmeof import target

    asyncio.run(_outage(target.DISK, target.cut_network, target.mend_network))


def a_target_that_stops_is_a_quarantine() -> None:
    """Connections are closed and new ones refused."""
    from tests.nvmeof import target

    def close() -> None:
        for port in target.PORTS:
            target.close_port(port)

    def serve() -> None:
        for port in target.PORTS:
            target.open_port(port)

    asyncio.run(_outage(target.DISK, close, serve))


def without_the_advice_the_tier_keeps_its_deadline_too() -> None:
    """With fast_io_fail_tmo off the kernel keeps the I/O until the target is back: only the tier gives up."""
    from tests.nvmeof import target

    target.set_all("fast_io_fail_tmo", -1)
    asyncio.run(_outage(target.DISK, target.cut_network, target.mend_network, kernel_lets_go=False))


def a_file_system_wants_a_new_mount() -> None:
    """ext4 that could not write its journal gives up for good; on a new mount the tier goes on by itself."""
    from tests.nvmeof import target
    from tests.nvmeof.tier_suite import MOUNTED

    def mend() -> None:
        target.mend_network()
        target.until("both paths are live", target.all_live, RECOVERY_TIMEOUT_S)
        probe = MOUNTED / "probe"
        try:
            probe.touch()
            say("  this time the file system has survived")
        except OSError as error:
            say(f"  the target is back, the file system is not: {error.strerror}")
            _run("/run/busybox", "umount", "-l", str(MOUNTED))
            _run("/run/busybox", "mount", "-t", "ext4", str(target.DIRECTORY_DISK), str(MOUNTED))
            probe.touch()
            say("  mounted anew")

    asyncio.run(_outage(MOUNTED / "outage", target.cut_network, mend))


async def _outage(
    path: Path, drop: Callable[[], None], mend: Callable[[], None], *, kernel_lets_go: bool = True
) -> None:
    """A tier under load loses its target: quarantine in time, no wrong byte, and back by itself.

    1. blocks are written and read in a loop;
    2. the target goes: the tier has a `fault` within its deadline, and refuses new calls at once;
    3. with the advised timeouts the kernel ends the calls that hang while the target is still away, otherwise
       they end when it is back;
    4. the target returns: `probe` succeeds, and all that had been written is there, bit for bit.
    """
    from kvtier.errors import TierFault
    from kvtier.testing.tier_tests import read_all, record_of, slot_of
    from tests.nvmeof import target
    from tests.nvmeof.tier_suite import blank, make_tier

    if path == target.DISK:
        blank(path)
    tier = make_tier(path)
    await tier.open()
    content = random.Random(1)
    slots = [slot_of(tier, index, 0, BLOCK_BYTES) for index in range(BLOCKS)]
    payloads = [content.randbytes(BLOCK_BYTES) for _ in slots]
    records = [record_of(payload) for payload in payloads]
    await tier.write(slots, records, [memoryview(payload) for payload in payloads])
    await tier.checkpoint()  # a file system forgets what has not been flushed
    loads = [asyncio.create_task(_load(tier, slots[half::2], payloads[half::2])) for half in range(2)]
    await asyncio.sleep(1)
    assert not any(load.done() for load in loads)
    drop()
    began_s = time.monotonic()
    while not tier.fault:
        assert time.monotonic() - began_s < DEADLINE_S + 10, "no quarantine"
        await asyncio.sleep(0.05)
    say(f"  quarantined after {time.monotonic() - began_s:.1f} s: {tier.fault}")
    refused_s = time.monotonic()
    for _ in range(3):
        try:
            await read_all(tier, slots, payloads)
        except TierFault:
            continue
        raise AssertionError("a quarantined tier gave blocks")
    assert time.monotonic() - refused_s < 1, "refusals have to come at once"
    assert not await tier.probe()
    if kernel_lets_go:
        await asyncio.wait(loads, timeout=30)
        assert all(load.done() for load in loads), "the kernel still keeps the I/O"
        let_go_s = time.monotonic() - began_s
        say(f"  the kernel let go after {let_go_s:.1f} s")
        assert let_go_s < DEADLINE_S + SLACK_S
    else:
        await asyncio.sleep(5)
        assert not all(load.done() for load in loads), (
            "the kernel let go: nothing shows that it would keep I/O"
        )
    assert not await tier.probe()
    mend()
    mended_s = time.monotonic()
    while not await tier.probe():
        assert time.monotonic() - mended_s < RECOVERY_TIMEOUT_S, tier.fault
        await asyncio.sleep(0.1)
    say(f"  back {time.monotonic() - mended_s:.1f} s after the target")
    found = await asyncio.gather(*loads, return_exceptions=True)
    assert all(isinstance(each, TierFault) for each in found), found
    assert tier.fault == ""
    again = await read_all(tier, slots, payloads)
    assert again[2:] == payloads[2:]
    for block, payload in zip(again[:2], payloads[:2], strict=True):
        assert block in (payload, None), "what was being written may be missing, but never wrong"
    await tier.close()
    target.until("all paths are live", target.all_live, RECOVERY_TIMEOUT_S)


async def _load(tier: FileTier, slots: Sequence[Slot], payloads: Sequence[bytes]) -> None:
    """Reads and writes until the tier refuses; a block is rewritten with what it holds."""
    from kvtier.testing.tier_tests import read_all, write_all

    while True:
        await write_all(tier, slots[:1], payloads[:1])
        assert await read_all(tier, slots, payloads) == payloads


def _check(path: Path) -> list[dict[str, Any]]:
    from kvtier.cli.storage import storage_findings

    return storage_findings([str(path)], DEADLINE_S)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"


if __name__ == "__main__":
    sys.exit(main())
