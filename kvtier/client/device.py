"""The node's device memory in this process: second copies of blocks, under the same leases as the arena.

Mapped when a load first names a copy there, by the node's own code (`kvtier.tiers.device`, imported only
then), and unmapped before the arena of the same session is: copies run inside its `use`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvtier.client.mapping import lie_within
from kvtier.errors import KvtierError, Unavailable

logger = logging.getLogger("kvtier.client")


def kind_of(device: str) -> str:
    """``cuda`` of ``cuda:0``: pages and device memory of one kind are near each other."""
    return device.partition(":")[0]


class DeviceMapping:
    """One mapped slab. Thread-safe, but for `close`, which whoever made it calls when no copy runs.

    Attributes
    ----------
    address
        Where it begins: a pointer of this process on ``cpu``, of the device on ``cuda``.

    Parameters
    ----------
    handle, size_bytes
        As the node said when this engine registered.
    kind
        What it has to be: the address of another kind must not be touched as one of this kind.

    Raises
    ------
    Unavailable
        It cannot be mapped here; says why.
    """

    def __init__(self, handle: bytes, size_bytes: int, kind: str) -> None:
        from kvtier.tiers.device import import_slab

        try:
            self._slab = import_slab(handle)
        except KvtierError:
            raise
        except Exception as error:  # whatever drivers, their bindings, and a handle that is none raise
            raise Unavailable(f"the node's device memory cannot be mapped here ({error!r})") from error
        self.size_bytes = self._slab.size_bytes
        self.address = self._slab.address
        if (self._slab.kind, self.size_bytes) != (kind, size_bytes):
            self.close()
            raise Unavailable(
                f"the node's device memory is {self.size_bytes} bytes of {self._slab.kind}, "
                f"not {size_bytes} of {kind}: restart it"
            )

    def check(self, offsets: Sequence[int], slot_bytes: int) -> bool:
        """Whether all slots lie in it and none overlaps another."""
        return lie_within(offsets, slot_bytes, self.size_bytes)

    def block(self, offset: int, size_bytes: int) -> memoryview:
        """A block's bytes in host memory: themselves where that is what they lie in, else copied out."""
        if self._slab.kind == "cpu":
            return self._slab.view(offset, size_bytes)  # type: ignore[attr-defined,no-any-return]
        copied = memoryview(bytearray(size_bytes))
        self._slab.copy_out([(offset, copied)])
        return copied

    def tensor(self) -> Any:
        """All of it as a torch tensor of bytes, on its device."""
        return self._slab.tensor()

    def close(self) -> None:
        """Unmap it; idempotent. Raises nothing: the arena is unmapped next."""
        try:
            self._slab.close()
        except Exception as error:
            logger.warning("kvtier: the node's device memory cannot be unmapped: %s", error)
