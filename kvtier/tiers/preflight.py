"""Whether the kernel lets go of I/O in time when storage goes away, and the command that makes it so.

The file tier stops waiting at its own deadline, whatever the kernel does. But what it no longer waits for
still holds its buffers and threads until the kernel answers, so the kernel should fail I/O before that.

What passes until it does, for NVMe-oF: first the loss is noticed, by a command that is not answered within
``queue/io_timeout`` or by a keep-alive (sent every half ``kato``, given up after another one, or two periods
with traffic-based keep-alives); then I/O waits for a reconnect until ``fast_io_fail_tmo``, or, where that is
off, until the controller is given up after ``ctrl_loss_tmo``.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.tiers.nvmeof import Controller, Namespace, Storage
from kvtier.tiers.sysfs import OFF

KERNEL_IO_TIMEOUT_S: Final = 30.0
"""What `nvme_core.io_timeout` is unless it has been changed."""
KEEP_ALIVE_PERIODS: Final = 2
NOTICE_FRACTION: Final = 0.6
"""Part of the deadline in which a loss should be noticed; another 0.2 is for `fast_io_fail_tmo`."""
FAIL_FRACTION: Final = 0.2
RECONNECT_DELAY_S: Final = 2
KEEP_ALIVE_S: Final = 5
_LIVE: Final = "live"
_HOPELESS: Final = ("deleting", "deleting (no IO)", "dead")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to mend.

    Attributes
    ----------
    where
        Controller, disk or path.
    todo
        A command, or what to look at.
    fatal
        Nothing can be read or written as it is.
    """

    where: str
    why: str
    todo: str
    fatal: bool = False


def problems(storage: Storage, deadline_s: float, arena_nodes: Collection[int] = ()) -> list[Problem]:
    """What is wrong with `storage` for a tier that waits at most `deadline_s`.

    Parameters
    ----------
    arena_nodes
        NUMA nodes that the arena may lie on; empty where that does not matter.
    """
    found = [
        problem for each in storage.namespaces for problem in _of_namespace(each, deadline_s, arena_nodes)
    ]
    found += [_of_queueing(name) for name in storage.queueing]
    return found


def waits_s(controller: Controller) -> float:
    """The longest that I/O may wait for this way to the disk; infinite where nothing ends it."""
    return notices_s(controller) + holds_s(controller)


def notices_s(controller: Controller) -> float:
    """The longest until the loss of the target is noticed while I/O waits for it."""
    if controller.io_timeout_ms is None or controller.io_timeout_ms < 0:
        timeout_s = KERNEL_IO_TIMEOUT_S
    else:
        timeout_s = controller.io_timeout_ms / 1000
    if not controller.keep_alive_s or controller.keep_alive_s < 0:
        return timeout_s
    return min(timeout_s, float(KEEP_ALIVE_PERIODS * controller.keep_alive_s))


def holds_s(controller: Controller) -> float:
    """How long I/O is kept for a reconnect after that; without a limit, or without one shown, for ever."""
    limits = [
        float(limit)
        for limit in (controller.fast_io_fail_s, controller.ctrl_loss_s)
        if limit is not None and limit != OFF
    ]
    return min(limits, default=math.inf)


def connect_command(controller: Controller, deadline_s: float) -> str:
    """The whole `nvme connect` that makes this connection anew, with what suits the deadline."""
    address = dict(part.partition("=")[::2] for part in controller.address.split(","))
    words = ["nvme", "connect", "-t", controller.transport, "-n", controller.subsystem_nqn]
    for option, name in (("-a", "traddr"), ("-s", "trsvcid"), ("-w", "host_traddr"), ("-f", "host_iface")):
        if address.get(name, "none") != "none":
            words += [option, address[name]]
    words += [
        f"--fast_io_fail_tmo={_fail_s(deadline_s)}",
        "--ctrl-loss-tmo=-1",
        f"--reconnect-delay={RECONNECT_DELAY_S}",
        f"--keep-alive-tmo={KEEP_ALIVE_S}",
    ]
    return shlex.join(words)  # what a target calls itself is not ours: it must not run as a command


def _of_namespace(namespace: Namespace, deadline_s: float, arena_nodes: Collection[int]) -> Iterator[Problem]:
    if not namespace.controllers:
        yield Problem(
            namespace.name,
            "no controller is known that leads to it",
            "look at `nvme list-subsys`",
            fatal=True,
        )
    usable = any(controller.state == _LIVE for controller in namespace.controllers)
    for controller in namespace.controllers:
        if controller.state != _LIVE:
            yield _of_state(controller, deadline_s, fatal=not usable)
        if controller.is_remote:
            yield from _of_timeouts(controller, deadline_s)
        yield from _of_node(namespace, controller, arena_nodes)
    if namespace.delayed_removal_s:
        attribute = f"/sys/block/{namespace.name}/delayed_removal_secs"
        why = f"I/O waits {namespace.delayed_removal_s} s for a path after the last one is gone"
        yield Problem(namespace.name, why, f"echo 0 > {attribute}")


def _of_state(controller: Controller, deadline_s: float, *, fatal: bool) -> Problem:
    state = controller.state or "in no state that the kernel shows"
    why = f"the controller is {state}, not {_LIVE}: I/O on it waits or fails"
    if not controller.is_remote:
        todo = f"nvme reset /dev/{controller.name}, and look at dmesg"
    elif controller.state in _HOPELESS or not controller.state:
        todo = connect_command(controller, deadline_s)
    else:
        every = controller.reconnect_delay_s
        pace = f"every {every} s " if every is not None and every > 0 else ""
        todo = f"see that the target answers at {controller.address}: the kernel tries {pace}by itself"
    return Problem(controller.name, why, todo, fatal)


def _of_timeouts(controller: Controller, deadline_s: float) -> Iterator[Problem]:
    wait_s = waits_s(controller)
    if wait_s > deadline_s:
        yield _of_wait(controller, wait_s, deadline_s)
    if controller.ctrl_loss_s is not None and controller.ctrl_loss_s != OFF:
        why = (
            f"a target that is away for {controller.ctrl_loss_s} s is given up, and its disk is gone until "
            "somebody connects again"
        )
        yield Problem(controller.name, why, _echo(-1, controller.directory / "ctrl_loss_tmo"))
    if controller.keep_alive_s == 0:
        why = "no keep-alives are sent: a target that is gone is noticed by the next I/O only"
        name = shlex.quote(controller.name)
        todo = f"nvme disconnect -d {name} && {connect_command(controller, deadline_s)}"
        yield Problem(controller.name, why, todo)


def _of_wait(controller: Controller, wait_s: float, deadline_s: float) -> Problem:
    """Both parts of the wait are mended only where they alone, or together, are too long."""
    limit = "for ever" if wait_s == math.inf else f"{wait_s:g} s"
    settings = ", ".join(
        f"{name} {_text(value)}"
        for name, value in (
            ("fast_io_fail_tmo", controller.fast_io_fail_s),
            ("ctrl_loss_tmo", controller.ctrl_loss_s),
            ("io_timeout (ms)", controller.io_timeout_ms),
            ("kato", controller.keep_alive_s),
        )
    )
    why = f"I/O may wait {limit} when the target goes away, the tier waits {deadline_s:g} s: {settings}"
    notice_s, fail_s = notices_s(controller), _fail_s(deadline_s)
    commands = []
    if notice_s + fail_s > deadline_s and controller.queue is not None:
        timeout_ms = int(NOTICE_FRACTION * deadline_s * 1000)
        notice_s = timeout_ms / 1000
        commands.append(_echo(timeout_ms, controller.queue / "io_timeout"))
    if notice_s + holds_s(controller) > deadline_s:
        if controller.fast_io_fail_s is None:
            commands.append("a kernel of 5.11 or later, which has fast_io_fail_tmo")
        else:
            commands.append(_echo(fail_s, controller.directory / "fast_io_fail_tmo"))
    commands.append(f"at the next connect: {connect_command(controller, deadline_s)}")
    return Problem(controller.name, why, "; ".join(commands))


def _of_node(namespace: Namespace, controller: Controller, arena_nodes: Collection[int]) -> Iterator[Problem]:
    node = controller.numa_node
    if node is None or node == OFF or not arena_nodes or node in arena_nodes:
        return
    nearer = any(other.numa_node in arena_nodes and other.state == _LIVE for other in namespace.controllers)
    if nearer and namespace.io_policy == "numa":
        return  # the kernel takes the near path by itself
    nodes = ", ".join(str(each) for each in sorted(arena_nodes))
    why = f"attached to NUMA node {node}, the arena lies on {nodes}: every byte crosses over"
    if nearer and namespace.subsystem is not None:
        todo = f"echo numa > {shlex.quote(str(namespace.subsystem / 'iopolicy'))}"
    else:
        todo = f"numactl --cpunodebind={node} --membind={node} kvtier serve"
    yield Problem(controller.name, why, todo)


def _of_queueing(name: str) -> Problem:
    return Problem(
        name,
        "dm-multipath may keep I/O while no path works (queue_if_no_path), for ever",
        f"set `no_path_retry fail` in multipath.conf; now: dmsetup message {shlex.quote(name)} 0 "
        "fail_if_no_path",
    )


def _fail_s(deadline_s: float) -> int:
    return int(deadline_s * FAIL_FRACTION)


def _echo(value: int, attribute: Path) -> str:
    return f"echo {value} > {shlex.quote(str(attribute))}"


def _text(value: int | None) -> str:
    return "not shown" if value is None else "off" if value == OFF else str(value)
