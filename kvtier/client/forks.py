"""Forks: engines fork, and neither gRPC's threads nor locks of other threads survive that in the child.

1. gRPC copes with a fork only if told so before it is imported, and only while no call is alive: its own
   handler would wait in the child for the end of calls whose threads are not there. So calls pass a gate,
   and a fork waits until none is inside; after `FORK_WAIT_S` it ends them by closing their channels.
2. In the child every object that asked for it starts anew: own channel, own engine id, own lock.
3. Where gRPC could not be told (somebody imported it first) a child of a process that has used it would
   hang for ever in its first call. There kvtier is off: everything is a miss.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Final, Protocol

from kvtier.errors import Unavailable

FORK_WAIT_S: Final = 2.0
"""A fork waits so long for calls that run (their deadlines are shorter by default), then ends them."""
SETTLE_S: Final = 0.02
ABORT_SETTLE_S: Final = 0.2
"""After a call (after closed channels) gRPC's own threads tidy up. A fork in between could leave one of its
locks held in the child, where every call would then be late: a miss, but one for life."""
_VARIABLE: Final = "GRPC_ENABLE_FORK_SUPPORT"
_ENABLED: Final = "grpc" not in sys.modules or os.environ.get(_VARIABLE, "").lower() in ("1", "true", "yes")


class ForkAware(Protocol):
    """Something that has to start anew in a child."""

    def end_calls(self) -> None:
        """Runs in the parent before a fork that calls hold up: make them fail now."""
        ...

    def after_fork(self) -> None:
        """Runs in the child, where only this thread exists: drop what belongs to the parent."""
        ...


class _Gate:
    """Counts calls inside gRPC; a fork closes it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inside = 0
        self.forking = False
        self.was_used = False
        self.left_at_s = 0.0


_gate = _Gate()
_mine = threading.local()
_broken = False
_objects: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def enable() -> None:
    """Tell gRPC that this process may fork; effective before gRPC is imported."""
    os.environ.setdefault(_VARIABLE, "1")


def watch(thing: ForkAware) -> None:
    """Call its `after_fork` in every child from now on."""
    _objects.add(thing)


@contextlib.contextmanager
def grpc_call() -> Iterator[None]:
    """Wrap every call into gRPC; raises `Unavailable` in a child where gRPC would hang."""
    if _broken:
        raise Unavailable(
            "gRPC was in use when this process was forked and cannot be used here: start it with spawn, or "
            f"set {_VARIABLE}=1"
        )
    if getattr(_mine, "gate", None) is _gate:  # inside already: waiting for a fork would stop it
        yield
        return
    gate = _gate
    with gate.changed:
        while gate.forking:
            gate.changed.wait(FORK_WAIT_S)
        gate.inside += 1
        gate.was_used = True
    _mine.gate = gate
    try:
        yield
    finally:
        _mine.gate = None
        with gate.changed:
            gate.inside -= 1
            gate.left_at_s = time.monotonic()
            if gate.forking:
                gate.changed.notify_all()


def _before() -> None:
    gate = _gate
    gate.changed.acquire()
    gate.forking = True
    if not gate.changed.wait_for(lambda: gate.inside == 0, FORK_WAIT_S):
        for thing in list(_objects):
            thing.end_calls()
        gate.changed.wait_for(lambda: gate.inside == 0, FORK_WAIT_S)
        time.sleep(ABORT_SETTLE_S)
    elif gate.was_used:
        time.sleep(max(0.0, gate.left_at_s + SETTLE_S - time.monotonic()))


def _after_in_parent() -> None:
    gate = _gate
    gate.forking = False
    gate.changed.notify_all()
    gate.changed.release()


def _after_in_child() -> None:
    global _gate, _broken
    old, _gate = _gate, _Gate()
    _gate.was_used = old.was_used
    _broken = _broken or (old.was_used and (old.inside > 0 or not _ENABLED))
    for thing in list(_objects):
        thing.after_fork()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
