"""Memory on the NUMA nodes that it is meant for: which nodes those are, and the call that binds it there.

The kernel's `mbind` is called directly, so that no libnuma is needed. It binds a range of addresses,
whichever thread touches them first; for shared memory it binds the file's pages, whoever maps them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Sequence
from typing import Final, Literal

from kvtier.config import MAX_NUMA_NODES
from kvtier.errors import ConfigError, ResourceShortage
from kvtier.tiers import shm
from kvtier.tiers.numa import MemoryNode, nodes_of_cpus

_MPOL_BIND: Final = 2
_SYSCALLS: Final = {"x86_64": 237, "aarch64": 235}
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)

_libc = ctypes.CDLL(None, use_errno=True)


def near_nodes(
    wanted: int | Literal["auto"] | None, nodes: Sequence[MemoryNode], cpus: frozenset[int]
) -> tuple[int, ...]:
    """The nodes that the arena is to be bound to; none: it lies where the kernel puts it.

    Parameters
    ----------
    wanted
        The configured `numa_node`.
    nodes, cpus
        The machine's nodes, and the CPUs that this process may run on.

    Raises
    ------
    ConfigError
        There is no such node, or it has no memory.
    """
    if wanted is None:
        return ()
    if wanted == "auto":
        with_memory = [node for node in nodes if node.total_bytes]
        return tuple(nodes_of_cpus(with_memory, cpus))
    require("numa_node", wanted, nodes)
    return (wanted,)


def require(what: str, node: int, nodes: Sequence[MemoryNode]) -> None:
    """Raise `ConfigError` where this machine has no memory on `node`."""
    with_memory = [each.node for each in nodes if each.total_bytes]
    if node not in with_memory:
        there = ", ".join(map(str, with_memory)) or "none that the kernel shows"
        raise ConfigError(f"{what} names NUMA node {node}: allowed are nodes with memory, here {there}")


def check_room(what: str, wanted_bytes: int, bound: Sequence[int], nodes: Sequence[MemoryNode]) -> None:
    """Raise `ResourceShortage` where these nodes together cannot give so much.

    The kernel would not refuse: it would kill a process of its choice.
    """
    if not bound:
        return
    available = sum(each.available_bytes for each in nodes if each.node in bound)
    if wanted_bytes > available:
        where = ", ".join(map(str, bound))
        raise ResourceShortage(
            f"{what} needs {wanted_bytes} bytes on NUMA node {where}, but only {available} are available "
            "there: lower it, or name another node"
        )


def bind(mapping: mmap.mmap, nodes: Sequence[int]) -> str:
    """Let all memory of `mapping` that is not there yet come from these nodes alone.

    Returns
    -------
    str
        Why it was refused; empty where it is done.
    """
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        return f"mbind is not known on {platform.machine()}"
    words = (ctypes.c_ulong * (MAX_NUMA_NODES // _WORD_BITS))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    failed = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(shm.address_of(mapping)),
        ctypes.c_ulong(len(mapping)),
        ctypes.c_ulong(_MPOL_BIND),
        words,
        ctypes.c_ulong(MAX_NUMA_NODES + 1),  # the kernel takes one off
        ctypes.c_ulong(0),
    )
    return _why(ctypes.get_errno(), nodes) if failed else ""


def try_bind(nodes: Sequence[int]) -> str:
    """Whether `bind` would be allowed to do that: a try on one page, as the answer of `bind`."""
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        return bind(page, nodes)


def _why(code: int, nodes: Sequence[int]) -> str:
    where = ", ".join(map(str, nodes))
    causes = {
        errno.EPERM: "mbind is forbidden here (a container without CAP_SYS_NICE)",
        errno.ENOSYS: "the kernel has no mbind",
        errno.EINVAL: f"this process may not use node {where} (cpuset.mems), or it has no memory",
    }
    return f"{causes.get(code, 'mbind failed')}: {os.strerror(code)}"
