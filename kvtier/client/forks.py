"""Forks: engines fork, and what belongs to the parent (locks, files, connections) is none of the child's."""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol


class ForkAware(Protocol):
    """Something that has to start anew in a child."""

    def after_fork(self) -> None:
        """Runs in the child, where only this thread exists: drop what belongs to the parent."""
        ...


_objects: Final[weakref.WeakSet[ForkAware]] = weakref.WeakSet()


def watch(thing: ForkAware) -> None:
    """Call its `after_fork` in every child from now on."""
    _objects.add(thing)


def _after_in_child() -> None:
    for thing in list(_objects):
        thing.after_fork()


os.register_at_fork(after_in_child=_after_in_child)
