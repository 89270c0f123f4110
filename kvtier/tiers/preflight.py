"""Whether the kernel lets go of I/O in time when storage goes away, and the command that makes it so.

The file tier stops waiting at its own deadline, whatever the kernel does. But what it no longer waits for
still holds its buffers and threads until the kernel answers, so the kernel should fail I/O before that.

What happens in an NVMe-oF host whose target is suddenly silent, as observed on real controllers
(`make nvmeof-test`; kernels differ, this is the slowest of them, 6.1.115 and later stable ones):

1. A command is not answered within ``queue/io_timeout``, or a keep-alive (sent every half ``kato``) within
   ``kato``: recovery begins. The kernel's timers add up to a second to each of these.
2. Recovery waits for a keep-alive that is under way, until that has timed out; where the keep-alive itself
   began the recovery, for another ``kato``.
3. Under multipath the I/O now goes to the next path, which may be as silent; its keep-alives have been
   running out meanwhile.
4. With no path left, I/O is kept for a reconnect until ``fast_io_fail_tmo``, counted from here; where that is
   off, until the controller is given up after ``ctrl_loss_tmo``.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.tiers.nvmeof import Controller, Namespace, Storage
from kvtier.tiers.sysfs import OFF

KERNEL_IO_TIMEOUT_S: Final = 30.0
"""What `nvme_core.io_timeout` is unless it has been changed."""
TIMER_S: Final = 1.0
"""So much later than asked a timer of the block layer may fire."""
RECONNECT_DELAY_S: Final = 2
LONGEST_KEEP_ALIVE_S: Final = 5
"""The kernel's default; shorter ones load target and network more."""
_LIVE: Final = "live"
_HOPELESS: Final = ("deleting", "deleting (no IO)", "dead")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """What decides how long I/O waits; None and `OFF` as in `Controller`."""

    io_s: float
    keep_alive_s: int | None
    fast_io_fail_s: int | None
    ctrl_loss_s: int | None

    @classmethod
    def of(cls, controller: Controller) -> Timeouts:
        """Those of a live controller."""
        timeout_ms = controller.io_timeout_ms
        io_s = KERNEL_IO_TIMEOUT_S if timeout_ms is None or timeout_ms < 0 else timeout_ms / 1000
        return cls(io_s, controller.keep_alive_s, controller.fast_io_fail_s, controller.ctrl_loss_s)

    @property
    def notices_s(self) -> float:
        """The longest that I/O on a path with a silent target takes to come back from it."""
        alone_s = self.io_s + TIMER_S
        keep_alive_s = self.keep_alive_s or 0
        if keep_alive_s <= 0:
            return alone_s
        return max(alone_s, min(self.io_s, keep_alive_s / 2) + keep_alive_s + TIMER_S)

    @property
    def lapses_s(self) -> float:
        """So long after its target fell silent a path is known to be dead, with or without I/O."""
        keep_alive_s = self.keep_alive_s or 0
        return keep_alive_s / 2 + 2 * (keep_alive_s + TIMER_S) if keep_alive_s > 0 else math.inf

    @property
    def holds_s(self) -> float:
        """How long I/O is kept for a reconnect after that; without a limit, or one shown, for ever."""
        limits = [
            float(limit)
            for limit in (self.fast_io_fail_s, self.ctrl_loss_s)
            if limit is not None and limit != OFF
        ]
        return min(limits, default=math.inf)


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


def waits_s(paths: Sequence[Timeouts]) -> float:
    """The longest that I/O waits when the targets of all paths fall silent; infinite if nothing ends it."""
    elapsed_s = 0.0
    for path in paths:
        first = not elapsed_s
        tried_s = elapsed_s + path.notices_s
        elapsed_s = tried_s if first else min(tried_s, max(elapsed_s, path.lapses_s))
    return elapsed_s + max((path.holds_s for path in paths), default=0.0)


def advice(deadline_s: float, paths: int) -> Timeouts:
    """The most patient settings with which I/O waits no longer than the deadline; else the quickest.

    `fast_io_fail_tmo` is 0 only where it has to be: the shortest break then fails I/O.
    """
    candidates = [
        Timeouts(io_s, keep_alive_s, fail_s, OFF)
        for fail_s in (1, 0)
        for keep_alive_s in range(1, LONGEST_KEEP_ALIVE_S + 1)
        for io_s in range(1, max(1, int(deadline_s - TIMER_S)) + 1)
    ]
    fitting = [each for each in candidates if waits_s([each] * paths) <= deadline_s]
    return max(fitting, key=_patience, default=Timeouts(1, 1, 0, OFF))


def _patience(timeouts: Timeouts) -> tuple[float, ...]:
    keep_alive_s = timeouts.keep_alive_s or 0
    return timeouts.holds_s, min(timeouts.io_s, keep_alive_s), timeouts.io_s, keep_alive_s


def connect_command(controller: Controller, wanted: Timeouts) -> str:
    """The whole `nvme connect` that makes this connection anew, with those timeouts that it alone can set.

    Not `fast_io_fail_tmo`, which sysfs takes at any time: nvme-cli of Debian 12, 2.3, has no option for it.
    """
    address = dict(part.partition("=")[::2] for part in controller.address.split(","))
    words = ["nvme", "connect", "-t", controller.transport, "-n", controller.subsystem_nqn]
    for option, name in (("-a", "traddr"), ("-s", "trsvcid"), ("-w", "host_traddr"), ("-f", "host_iface")):
        if address.get(name, "none") != "none":
            words += [option, address[name]]
    words += [
        "--ctrl-loss-tmo=-1",
        f"--reconnect-delay={RECONNECT_DELAY_S}",
        f"--keep-alive-tmo={wanted.keep_alive_s}",
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
    remote = [controller for controller in namespace.controllers if controller.is_remote]
    wanted = advice(deadline_s, len(remote))
    usable = any(controller.state == _LIVE for controller in namespace.controllers)
    for controller in namespace.controllers:
        if controller.state != _LIVE:
            yield _of_state(controller, wanted, fatal=not usable)
        yield from _of_node(namespace, controller, arena_nodes)
    if waits_s([Timeouts.of(controller) for controller in remote]) > deadline_s:
        yield _of_wait(namespace.name, remote, wanted, deadline_s)
    for controller in remote:
        yield from _of_loss(controller, wanted)
    if namespace.delayed_removal_s:
        attribute = f"/sys/block/{namespace.name}/delayed_removal_secs"
        why = f"I/O waits {namespace.delayed_removal_s} s for a path after the last one is gone"
        yield Problem(namespace.name, why, f"echo 0 > {attribute}")


def _of_state(controller: Controller, wanted: Timeouts, *, fatal: bool) -> Problem:
    state = controller.state or "in no state that the kernel shows"
    why = f"the controller is {state}, not {_LIVE}: I/O on it waits or fails"
    if not controller.is_remote:
        todo = f"nvme reset /dev/{controller.name}, and look at dmesg"
    elif controller.state in _HOPELESS or not controller.state:
        todo = connect_command(controller, wanted)
    else:
        every = controller.reconnect_delay_s
        pace = f"every {every} s " if every is not None and every > 0 else ""
        todo = f"see that the target answers at {controller.address}: the kernel tries {pace}by itself"
    return Problem(controller.name, why, todo, fatal)


def _of_wait(name: str, controllers: Sequence[Controller], wanted: Timeouts, deadline_s: float) -> Problem:
    """Live controllers are changed where that is enough; `kato` is changed by a new connection only.

    That begins with the kernel's defaults, often under another name: what else it needs a second look tells.
    """
    wait_s = waits_s([Timeouts.of(controller) for controller in controllers])
    limit = "for ever" if wait_s == math.inf else f"{wait_s:g} s"
    settings = "; ".join(f"{each.name} {_settings(each)}" for each in controllers)
    why = f"I/O may wait {limit} when the target falls silent, the tier waits {deadline_s:g} s: {settings}"
    changed = [
        Timeouts(min(now.io_s, wanted.io_s), now.keep_alive_s, wanted.fast_io_fail_s, now.ctrl_loss_s)
        for now in map(Timeouts.of, controllers)
    ]
    commands = [command for each in controllers for command in _live_commands(each, wanted)]
    if waits_s(changed) > deadline_s:
        commands += [_anew(each, wanted) for each in controllers if _is_slower(each.keep_alive_s, wanted)]
        commands.append("then check again")
    least_s = waits_s([wanted] * len(controllers))
    if least_s > deadline_s:
        commands.append(f"give the tier a deadline of {math.ceil(least_s)} s: the kernel needs so long")
    return Problem(name, why, "; ".join(commands))


def _live_commands(controller: Controller, wanted: Timeouts) -> Iterator[str]:
    now = Timeouts.of(controller)
    if now.io_s > wanted.io_s and controller.queue is not None:
        yield _echo(int(wanted.io_s * 1000), controller.queue / "io_timeout")
    fail_s = wanted.fast_io_fail_s or 0
    if now.fast_io_fail_s is None:
        yield f"{controller.name}: a kernel of 5.11 or later, which has fast_io_fail_tmo"
    elif now.fast_io_fail_s == OFF or now.fast_io_fail_s > fail_s:
        yield _echo(fail_s, controller.directory / "fast_io_fail_tmo")


def _is_slower(keep_alive_s: int | None, wanted: Timeouts) -> bool:
    return not keep_alive_s or keep_alive_s < 0 or keep_alive_s > (wanted.keep_alive_s or 0)


def _anew(controller: Controller, wanted: Timeouts) -> str:
    name = shlex.quote(controller.name)
    return f"nvme disconnect -d {name} && {connect_command(controller, wanted)}"


def _of_loss(controller: Controller, wanted: Timeouts) -> Iterator[Problem]:
    if controller.ctrl_loss_s is not None and controller.ctrl_loss_s != OFF:
        why = (
            f"a target that is away for {controller.ctrl_loss_s} s is given up, and its disk is gone until "
            "somebody connects again"
        )
        yield Problem(controller.name, why, _echo(-1, controller.directory / "ctrl_loss_tmo"))
    if controller.keep_alive_s == 0:
        why = "no keep-alives are sent: a target that is gone is noticed by the next I/O only"
        yield Problem(controller.name, why, _anew(controller, wanted))


def _settings(controller: Controller) -> str:
    return ", ".join(
        f"{name} {_text(value)}"
        for name, value in (
            ("fast_io_fail_tmo", controller.fast_io_fail_s),
            ("ctrl_loss_tmo", controller.ctrl_loss_s),
            ("io_timeout (ms)", controller.io_timeout_ms),
            ("kato", controller.keep_alive_s),
        )
    )


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


def _echo(value: int, attribute: Path) -> str:
    return f"echo {value} > {shlex.quote(str(attribute))}"


def _text(value: int | None) -> str:
    return "not shown" if value is None else "off" if value == OFF else str(value)
