from __future__ import annotations

import math
import os
import shlex
from pathlib import Path

import pytest

from kvtier.tiers import sysfs
from kvtier.tiers.nvmeof import MAX_DEPTH, Storage, inspect, read_controller
from kvtier.tiers.preflight import Timeouts, advice, connect_command, problems, waits_s
from tests.tiers.machines import LOCAL, NQN, SAFE, SAFE_PATHS, TCP, Machine

DEADLINE_S = 5.0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def here(tmp_path: Path) -> int:
    """The number of the device that `tmp_path` lies on: the tree may say what that device is."""
    return os.stat(tmp_path).st_dev


def look(machine: Machine, path: Path) -> Storage:
    return inspect(path, root=machine.root, mountinfo=machine.mountinfo)


def remote_disk(machine: Machine, here: int, timeout_ms: int = 30_000, **changes: str) -> None:
    controller = machine.controller("nvme0", **{**TCP, **changes})
    machine.disk("nvme0n1", controller, here, queue__io_timeout=str(timeout_ms))


def todos(storage: Storage, nodes: tuple[int, ...] = ()) -> str:
    return "\n".join(problem.todo for problem in problems(storage, DEADLINE_S, nodes))


def test_a_local_drive(machine: Machine, tmp_path: Path, here: int) -> None:
    controller = machine.controller("nvme0", **LOCAL)
    machine.disk("nvme0n1", controller, here, queue__io_timeout="30000")
    storage = look(machine, tmp_path)
    (namespace,) = storage.namespaces
    (found,) = namespace.controllers
    assert (namespace.name, namespace.subsystem, storage.others, storage.problem) == ("nvme0n1", None, (), "")
    assert (found.name, found.transport, found.address) == ("nvme0", "pcie", "0000:01:00.0")
    assert (found.state, found.queue_count, found.numa_node, found.is_remote) == ("live", 9, 0, False)
    assert found.fast_io_fail_s is None
    assert problems(storage, DEADLINE_S) == []


@pytest.mark.parametrize("transport", ["tcp", "rdma", "fc", "loop"])
def test_what_a_fabric_shows(machine: Machine, tmp_path: Path, here: int, transport: str) -> None:
    remote_disk(machine, here, transport=transport)
    ((found,),) = [each.controllers for each in look(machine, tmp_path).namespaces]
    assert found.is_remote
    assert found.directory == machine.root / "class/nvme/nvme0"
    assert (found.transport, found.subsystem_nqn) == (transport, NQN)
    assert (found.keep_alive_s, found.ctrl_loss_s, found.reconnect_delay_s) == (5, 600, 10)
    assert (found.fast_io_fail_s, found.io_timeout_ms, found.numa_node) == (sysfs.OFF, 30_000, sysfs.OFF)


def test_defaults_block_too_long_and_every_command_that_mends_it_is_named(
    machine: Machine, tmp_path: Path, here: int
) -> None:
    remote_disk(machine, here)
    wait, loss = problems(look(machine, tmp_path), DEADLINE_S)
    assert (wait.where, wait.fatal) == ("nvme0n1", False)
    assert "631 s" in wait.why  # a command times out, recovery, then ctrl_loss_tmo
    assert "nvme0 fast_io_fail_tmo off, ctrl_loss_tmo 600, io_timeout (ms) 30000, kato 5" in wait.why
    attributes = machine.root / "class/nvme/nvme0"
    assert wait.todo.split("; ") == [
        f"echo 3000 > {machine.root}/class/block/nvme0n1/queue/io_timeout",
        f"echo 1 > {attributes}/fast_io_fail_tmo",
        f"nvme disconnect -d nvme0 && nvme connect -t tcp -n {NQN} -a 10.0.0.1 -s 4420 "
        "--ctrl-loss-tmo=-1 --reconnect-delay=2 --keep-alive-tmo=2",
        "then check again",
    ]
    assert loss.todo == f"echo -1 > {attributes}/ctrl_loss_tmo"


def obey(machine: Machine, storage: Storage) -> None:
    """Do what the preflight says in the tree; a new connection begins with the defaults."""
    queues = {each.name: each.queue for disk in storage.namespaces for each in disk.controllers}
    for command in "; ".join(problem.todo for problem in problems(storage, DEADLINE_S)).split("; "):
        words = shlex.split(command) or ["then"]
        if words[0] == "echo":
            Path(words[3]).write_text("off\n" if words[1] == "-1" else words[1] + "\n")
            continue
        if words[0] == "then":
            return
        given = dict(word[2:].split("=") for word in words if word.startswith("--"))
        assert words[:3] == ["nvme", "disconnect", "-d"]
        name = words[3]
        machine.write(
            machine.root / "class/nvme" / name,
            kato=given["keep-alive-tmo"],
            fast_io_fail_tmo="off",
            ctrl_loss_tmo=given["ctrl-loss-tmo"],
        )
        (queues[name] / "io_timeout").write_text("30000\n")


@pytest.mark.parametrize("paths", [1, 2])
def test_commands_of_the_preflight_leave_nothing_to_say(
    machine: Machine, tmp_path: Path, here: int, paths: int
) -> None:
    if paths == 1:
        remote_disk(machine, here)
    else:
        multipath(machine, here, **TCP)
    assert problems(look(machine, tmp_path), DEADLINE_S)
    for _ in range(2):
        obey(machine, look(machine, tmp_path))
    assert problems(look(machine, tmp_path), DEADLINE_S) == []


def test_for_ever_where_both_limits_are_off(machine: Machine, tmp_path: Path, here: int) -> None:
    remote_disk(machine, here, ctrl_loss_tmo="off")
    (wait,) = problems(look(machine, tmp_path), DEADLINE_S)
    assert "for ever" in wait.why


def test_only_what_is_too_long_is_changed(machine: Machine, tmp_path: Path, here: int) -> None:
    remote_disk(machine, here, 3000, **{**SAFE, "fast_io_fail_tmo": "60"})
    assert todos(look(machine, tmp_path)) == f"echo 1 > {machine.root}/class/nvme/nvme0/fast_io_fail_tmo"
    machine.write(machine.root / "class/nvme/nvme0", fast_io_fail_tmo="1")
    assert todos(look(machine, tmp_path)) == ""
    machine.write(machine.root / "class/block/nvme0n1", queue__io_timeout="30000")
    assert todos(look(machine, tmp_path)).startswith("echo 3000 > ")
    machine.write(machine.root / "class/block/nvme0n1", queue__io_timeout="3000")
    machine.write(machine.root / "class/nvme/nvme0", kato="5")
    assert todos(look(machine, tmp_path)).startswith("nvme disconnect -d nvme0 && ")


def test_a_deadline_that_no_kernel_keeps(machine: Machine, tmp_path: Path, here: int) -> None:
    remote_disk(machine, here)
    wait, _ = problems(look(machine, tmp_path), 2.0)
    assert wait.todo.endswith("give the tier a deadline of 3 s: the kernel needs so long")


def test_a_kernel_without_fast_io_fail(machine: Machine, tmp_path: Path, here: int) -> None:
    attributes = {name: value for name, value in TCP.items() if name != "fast_io_fail_tmo"}
    machine.disk("nvme0n1", machine.controller("nvme0", **attributes), here)
    assert "5.11" in todos(look(machine, tmp_path))


def test_keep_alives_that_are_off(machine: Machine, tmp_path: Path, here: int) -> None:
    remote_disk(machine, here, 3000, **{**SAFE, "kato": "0"})
    (problem,) = problems(look(machine, tmp_path), DEADLINE_S)
    assert problem.todo.startswith("nvme disconnect -d nvme0 && nvme connect ")
    assert "--keep-alive-tmo=2" in problem.todo


@pytest.mark.parametrize(
    ("io_s", "keep_alive_s", "fail_s", "paths", "observed_s"),
    [
        (3, 5, 1, 1, 7.8),
        (3, 5, 1, 2, 12.7),
        (2, 5, 0, 1, 6.8),
        (30, 1, 1, 1, 4.6),
        (30, 5, 1, 1, 13.9),
    ],
)
def test_no_kernel_has_been_seen_to_wait_longer(
    io_s: float, keep_alive_s: int, fail_s: int, paths: int, observed_s: float
) -> None:
    """Times until I/O failed after every packet was lost: nvme-tcp of Linux 6.1, real sockets."""
    assert waits_s([Timeouts(io_s, keep_alive_s, fail_s, sysfs.OFF)] * paths) >= observed_s


@pytest.mark.parametrize("paths", [1, 2, 4])
@pytest.mark.parametrize("deadline_s", [1.0, 2.5, 5.0, 7.5, 30.0, 600.0])
def test_advice_keeps_the_deadline_where_one_can(deadline_s: float, paths: int) -> None:
    found = advice(deadline_s, paths)
    least_s = waits_s([Timeouts(1, 1, 0, sysfs.OFF)] * paths)
    assert waits_s([found] * paths) <= max(deadline_s, least_s)
    assert waits_s([Timeouts(30, 5, sysfs.OFF, sysfs.OFF)] * paths) == math.inf


@pytest.mark.parametrize(
    ("state", "todo"),
    [
        ("connecting", "10.0.0.1"),
        ("resetting", "10.0.0.1"),
        ("dead", "nvme connect -t tcp"),
        ("deleting (no IO)", "nvme connect -t tcp"),
        ("", "nvme connect"),
    ],
)
def test_a_controller_that_is_not_live(
    machine: Machine, tmp_path: Path, here: int, state: str, todo: str
) -> None:
    remote_disk(machine, here, 3000, **SAFE, state=state)
    (problem,) = problems(look(machine, tmp_path), DEADLINE_S)
    assert problem.fatal
    assert todo in problem.todo


def multipath(machine: Machine, here: int, **second: str) -> None:
    """Two controllers with the namespace and a third one of the subsystem without it."""
    controllers = [
        machine.controller("nvme0", **{**TCP, **SAFE_PATHS, "numa_node": "0"}),
        machine.controller("nvme1", **{**TCP, **SAFE_PATHS, "numa_node": "1", **second}),
        machine.controller("nvme2", **{**TCP, "state": "dead"}),
    ]
    subsystem = machine.subsystem("nvme-subsys0", *controllers)
    machine.hidden("nvme0c0n1", controllers[0], 4000)
    machine.hidden("nvme0c1n1", controllers[1], 4000)
    machine.hidden("nvme0c2n7", controllers[2], 30_000)
    machine.disk("nvme0n1", subsystem, here)


def test_multipath_knows_its_paths(machine: Machine, tmp_path: Path, here: int) -> None:
    multipath(machine, here)
    storage = look(machine, tmp_path)
    (namespace,) = storage.namespaces
    assert [each.name for each in namespace.controllers] == ["nvme0", "nvme1"]
    assert namespace.io_policy == "numa"
    assert namespace.subsystem == machine.root / "class/nvme-subsystem/nvme-subsys0"
    assert {each.io_timeout_ms for each in namespace.controllers} == {4000}
    assert problems(storage, DEADLINE_S, (0,)) == []  # the kernel takes the near path by itself


def test_one_path_down_is_not_the_end_but_all_are(machine: Machine, tmp_path: Path, here: int) -> None:
    multipath(machine, here, state="connecting")
    (problem,) = problems(look(machine, tmp_path), DEADLINE_S)
    assert (problem.where, problem.fatal) == ("nvme1", False)
    machine.write(machine.root / "class/nvme/nvme0", state="connecting")
    assert [each.fatal for each in problems(look(machine, tmp_path), DEADLINE_S)] == [True, True]


def test_paths_on_other_nodes(machine: Machine, tmp_path: Path, here: int) -> None:
    multipath(machine, here)
    machine.write(machine.root / "class/nvme-subsystem/nvme-subsys0", iopolicy="round-robin")
    (problem,) = problems(look(machine, tmp_path), DEADLINE_S, (0,))
    assert (problem.where, problem.fatal) == ("nvme1", False)
    assert problem.todo.endswith("nvme-subsys0/iopolicy")
    far = problems(look(machine, tmp_path), DEADLINE_S, (3,))
    assert [each.where for each in far] == ["nvme0", "nvme1"]
    assert "numactl --cpunodebind=1" in far[1].todo


def test_a_disk_that_outlives_its_paths(machine: Machine, tmp_path: Path, here: int) -> None:
    multipath(machine, here)
    machine.write(machine.root / "class/block/nvme0n1", delayed_removal_secs="60")
    (problem,) = problems(look(machine, tmp_path), DEADLINE_S)
    assert problem.todo == "echo 0 > /sys/block/nvme0n1/delayed_removal_secs"


def test_a_subsystem_without_controllers(machine: Machine, tmp_path: Path, here: int) -> None:
    machine.disk("nvme0n1", machine.subsystem("nvme-subsys0"), here)
    (problem,) = problems(look(machine, tmp_path), DEADLINE_S)
    assert problem.fatal


def test_a_partition_and_volumes_over_several_disks(machine: Machine, tmp_path: Path, here: int) -> None:
    for name, attributes in (("nvme0", LOCAL), ("nvme1", TCP)):
        disk = machine.disk(f"{name}n1", machine.controller(name, **attributes))
        machine.block(machine.write(disk / f"{name}n1p2", partition="2"))
    machine.mapper("md0", "nvme0n1p2", "nvme1n1p2")
    machine.block(machine.root / "devices/virtual/block/sda")
    machine.mapper("dm-0", "md0", "sda", number=here, dm__uuid="LVM-abc", dm__name="vg-kv")
    storage = look(machine, tmp_path)
    assert [each.name for each in storage.namespaces] == ["nvme0n1", "nvme1n1"]
    assert storage.others == ("sda",)
    assert storage.queueing == ()


def test_device_mapper_multipath_may_queue_for_ever(machine: Machine, tmp_path: Path, here: int) -> None:
    machine.block(machine.root / "devices/virtual/block/sda")
    machine.mapper("dm-0", "sda", number=here, dm__uuid="mpath-3600", dm__name="mpath a")
    (problem,) = problems(look(machine, tmp_path), DEADLINE_S)
    assert "dmsetup message 'mpath a' 0 fail_if_no_path" in problem.todo


def test_a_loop_device_over_a_file(machine: Machine, tmp_path: Path, here: int) -> None:
    remote_disk(machine, here)
    (tmp_path / "image").write_bytes(b"")
    machine.write(machine.root / "devices/virtual/block/loop3", loop__backing_file=str(tmp_path / "image"))
    machine.block(machine.root / "devices/virtual/block/loop3")
    machine.mapper("dm-0", "loop3")
    machine.mounts([(str(tmp_path), "btrfs", "/dev/dm-0", "rw")])
    (machine.root / "dev/block" / f"{os.major(here)}:{os.minor(here)}").unlink()
    (tmp_path / "image").unlink()
    assert "No such file" in look(machine, tmp_path).problem  # and nothing raises
    machine.write(machine.root / "devices/virtual/block/loop3", loop__backing_file=str(tmp_path))
    assert look(machine, tmp_path).problem == ""  # it lies on itself: seen once


def test_file_systems_whose_numbers_name_no_device(machine: Machine, tmp_path: Path) -> None:
    machine.disk("nvme0n1", machine.controller("nvme0", **TCP))
    odd = tmp_path / "with blank"
    odd.mkdir()
    point = str(odd).replace(" ", "\\040")
    for kind, source, words in (
        ("btrfs", "/dev/nvme0n1", ""),
        ("tmpfs", "tmpfs", "in memory"),
        ("nfs4", "server:/kv", "another machine"),
        ("overlay", "overlay", "cannot be seen"),
        ("ext4", "/dev/root", "cannot be seen"),
    ):
        machine.mounts([("/", "ext4", "/dev/nowhere", "rw"), (point, kind, source, "rw")])
        storage = look(machine, odd)
        assert words in storage.problem
        assert bool(storage.namespaces) == (kind == "btrfs")
    machine.mounts([])
    assert "no mount" in look(machine, odd).problem


def test_paths_that_are_not_there(machine: Machine, tmp_path: Path) -> None:
    assert "No such file" in look(machine, tmp_path / "none").problem
    assert look(machine, Path("a\0b")).problem


def test_devices_in_a_circle_or_a_tower(machine: Machine, tmp_path: Path, here: int) -> None:
    machine.mapper("dm-0", "dm-1", number=here)
    machine.mapper("dm-1", "dm-0")
    assert look(machine, tmp_path) == Storage(str(tmp_path))
    for level in range(2, MAX_DEPTH + 5):
        machine.mapper(f"dm-{level}", f"dm-{level + 1}")
    machine.link(machine.root / "class/block/dm-0/slaves/dm-2", machine.root / "class/block/dm-2")
    assert "on top of each other" in look(machine, tmp_path).problem


GARBAGE = [
    b"",
    b"\0\xff\xfe",
    b"9" * 5000,
    b"-7",
    b"1e9",
    "٣".encode(),
    b"\x1b[31mred\nlines",
    b"off off",
    b"x" * 9999,
]


@pytest.mark.parametrize("content", GARBAGE)
def test_garbage_in_every_attribute(machine: Machine, tmp_path: Path, here: int, content: bytes) -> None:
    remote_disk(machine, here)
    controller = machine.root / "class/nvme/nvme0"
    for name in TCP:
        (controller / name).write_bytes(content)
    (machine.root / "class/block/nvme0n1/queue/io_timeout").write_bytes(content)
    storage = look(machine, tmp_path)
    for problem in problems(storage, DEADLINE_S, (0,)):
        assert "\x1b" not in problem.why + problem.todo
    (found,) = storage.namespaces[0].controllers
    assert found.queue_count in (None, sysfs.OFF)


def test_attributes_that_are_no_files(machine: Machine, tmp_path: Path, here: int) -> None:
    remote_disk(machine, here)
    controller = machine.root / "class/nvme/nvme0"
    for name in TCP:
        (controller / name).unlink()
    os.mkfifo(controller / "kato")  # a reader that waits for a writer would hang here
    (controller / "state").mkdir()
    (controller / "ctrl_loss_tmo").symlink_to("ctrl_loss_tmo")
    found = read_controller(controller)
    assert (found.keep_alive_s, found.state, found.ctrl_loss_s, found.is_remote) == (None, "", None, False)
    (machine.root / "class/block/nvme0n1/device").unlink()
    (machine.root / "class/block/nvme0n1/device").symlink_to("device")
    assert [each.fatal for each in problems(look(machine, tmp_path), DEADLINE_S)] == [True]
    (machine.root / "class/block/nvme0n1").unlink()
    assert "does not show" in look(machine, tmp_path).problem


def test_what_a_target_calls_itself_is_not_run(machine: Machine, tmp_path: Path, here: int) -> None:
    remote_disk(machine, here, subsysnqn="nqn;reboot", address="traddr=$(id),trsvcid=1 2")
    (controller,) = look(machine, tmp_path).namespaces[0].controllers
    command = connect_command(controller, advice(DEADLINE_S, 1))
    words = shlex.split(command)
    assert words[words.index("-n") + 1] == "nqn;reboot"
    assert "'nqn;reboot'" in command
    assert "'$(id)'" in command


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("5", (5,)),
        ("", ()),
        ("3-1", ()),
        ("0-999999999", ()),
        ("a", ()),
        (",", ()),
    ],
)
def test_lists(listed: str, expected: tuple[int, ...]) -> None:
    assert sysfs.numbers(listed) == expected


def test_this_machine_is_read_without_a_fault(tmp_path: Path) -> None:
    storage = inspect(tmp_path)
    assert storage.namespaces or storage.others or storage.problem
