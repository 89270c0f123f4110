"""What `kvtier check` says of a directory or block device for the NVMe tier: what it is, and how it fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier import machine
from kvtier.cli import output
from kvtier.cli.findings import DEGRADED, MISSING, OK, Finding, finding, one_line
from kvtier.tiers import numa, preflight, sysfs
from kvtier.tiers.nvmeof import Controller, Namespace, Storage, inspect
from kvtier.tiers.preflight import Problem, Timeouts
from kvtier.tiers.silence import existing, silence

TIER_DEADLINE_S: Final = 5.0
"""So long the tier waits for its storage unless configured otherwise."""
ANSWER_TIMEOUT_S: Final = 5.0
"""A path that has not even told its status by then does not answer."""


def storage_findings(
    paths: Sequence[str],
    deadline_s: float = TIER_DEADLINE_S,
    *,
    may_be_made: Sequence[Path] = (),
    root: Path = sysfs.SYSFS,
    mountinfo: Path = sysfs.MOUNTINFO,
) -> list[Finding]:
    """One line for each path, and one for everything that is wrong with what lies under it.

    Parameters
    ----------
    may_be_made
        Further paths, of directories that `kvtier serve` makes where they are not there yet.
    """
    nodes = numa.memory_nodes(root)
    own = numa.nodes_of_cpus(nodes, numa.own_cpus()) if len(nodes) > 1 else []
    found: list[Finding] = []
    for name, makes in [*((path, False) for path in paths), *((str(path), True) for path in may_be_made)]:
        fault = silence(Path(name), ANSWER_TIMEOUT_S, may_be_made=makes)
        if fault:
            found.append(_unusable(name, fault))
            continue
        path = str(existing(Path(name)))
        storage = inspect(Path(path), root=root, mountinfo=mountinfo)
        wrong = preflight.problems(storage, deadline_s, own)
        found.append(_line(path, storage, wrong, deadline_s))
        found += [each for each in map(_problem_line, wrong) if each not in found]
    return found


def _unusable(path: str, fault: str) -> Finding:
    todo = "see that it is mounted, that its target answers, and that the path is right"
    return finding(f"nvme {path}", MISSING, fault, todo, needed=True)


def _line(path: str, storage: Storage, wrong: Sequence[Problem], deadline_s: float) -> Finding:
    name = f"nvme {path}"
    if not os.access(path, os.W_OK):
        todo = f"give this user the right to write to {path}"
        return finding(name, MISSING, "not writable for this user", todo, needed=True)
    why = "; ".join(filter(None, [_what(storage, deadline_s), _free(path), storage.problem]))
    if any(problem.fatal for problem in wrong):
        return finding(name, MISSING, why, "see the lines of its controllers", needed=True)
    if wrong:
        return finding(name, DEGRADED, why, "see the lines of its controllers")
    if storage.problem:
        todo = "mount a local disk or an NVMe-oF namespace there, or name its block device"
        return finding(name, DEGRADED, why, todo)
    return finding(name, OK, why)


def _problem_line(problem: Problem) -> Finding:
    state = MISSING if problem.fatal else DEGRADED
    return finding(f"nvme {problem.where}", state, problem.why, problem.todo, needed=problem.fatal)


def _what(storage: Storage, deadline_s: float) -> str:
    parts = [_namespace(each, deadline_s) for each in storage.namespaces]
    parts += [f"{name}: a disk without NVMe, its timeouts are not known" for name in storage.others]
    return "; ".join(parts)


def _namespace(namespace: Namespace, deadline_s: float) -> str:
    ways = ", ".join(map(_controller, namespace.controllers)) or "no controller"
    policy = f", {len(namespace.controllers)} paths by {namespace.io_policy}" if namespace.io_policy else ""
    return f"{namespace.name}{policy}: {ways}{_wait(namespace, deadline_s)}"


def _controller(controller: Controller) -> str:
    queues = f", {controller.queue_count} queues" if controller.queue_count else ""
    nqn = f" {controller.subsystem_nqn}" if controller.is_remote else ""
    kind = f"NVMe-oF {controller.transport}" if controller.is_remote else controller.transport or "NVMe"
    return f"{controller.name} {kind} {controller.address}{nqn} {controller.state or '?'}{queues}"


def _wait(namespace: Namespace, deadline_s: float) -> str:
    remote = [Timeouts.of(each) for each in namespace.controllers if each.is_remote]
    if remote:
        return f", I/O waits {preflight.waits_s(remote):g} s at most"
    notices_s = max((Timeouts.of(each).notices_s for each in namespace.controllers), default=0.0)
    if notices_s <= deadline_s:
        return ""
    return f", local: a drive without answer is reset after {notices_s:g} s, given up by the tier before"


def _free(path: str) -> str:
    try:
        return f"{output.size_text(machine.free_bytes(Path(path)))} free" if os.path.isdir(path) else ""
    except OSError as error:
        return one_line(error)
