"""One load: lease, copy, verify, release. Loaded is only what the release answered valid."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.client.admin import new_call_id
from kvtier.client.copies import BEGIN_BEFORE_BYTES, SlotMemory, checksum, groups
from kvtier.client.device import DeviceMapping
from kvtier.client.mapping import ArenaMapping
from kvtier.client.pages import Pages
from kvtier.client.parallel import Workers
from kvtier.client.results import BUDGET, CORRUPT, EXPIRED, MISSING, reason_of
from kvtier.client.session import Link, Session
from kvtier.client.stub import Begun, Deadline
from kvtier.errors import KvtierError, TierFault
from kvtier.types import CHECKSUM_SIZE_BYTES, Key, pack_keys, sampled
from kvtier.v1 import engine_pb2 as pb

NO_SLOT: Final = 2**64 - 1
"""In place of the offset of a copy where a block has none in device memory."""
RELEASE_TIMEOUT_S: Final = 0.05
"""A release may take so long even where the copy has used up the budget."""


@dataclass(slots=True)
class _Named:
    """Slots of the arena that a message names, and copies to read instead (empty: none; `NO_SLOT`: not one).

    Threads that copy change `copies` in groups of their own only.
    """

    offsets: list[int]
    copies: list[int]

    def is_copy(self, index: int) -> bool:
        """Whether this block is read from device memory."""
        return bool(self.copies) and self.copies[index] != NO_SLOT

    def count_copies(self, begin: int, end: int) -> int:
        """How many of ``[begin, end)`` are."""
        return sum(self.is_copy(i) for i in range(begin, end)) if self.copies else 0

    def leave_copies(self, begin: int, end: int) -> None:
        """Read ``[begin, end)`` from the arena: the lease is of both."""
        self.copies[begin:end] = [NO_SLOT] * (end - begin)

    def parts(self, begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Maximal runs within ``[begin, end)`` that lie in one memory, and whether that is the device's."""
        if not self.copies:
            yield begin, end, False
            return
        at = begin
        for i in range(begin + 1, end + 1):
            if i == end or self.is_copy(i) != self.is_copy(at):
                yield at, i, self.is_copy(at)
                at = i


class LoadRun:
    """See the module. Used once, by one thread; the arena stays mapped meanwhile.

    Attributes
    ----------
    reason
        After `run`: why not all keys were loaded.
    corrupt
        After `run`: the blocks that did not have their checksum.
    from_device
        After `run`: how many blocks were copied from device memory.
    """

    def __init__(
        self,
        link: Link,
        session: Session,
        arena: ArenaMapping,
        pages: Pages,
        keys: Sequence[Key],
        block_ids: Sequence[int],
        verify: str,
        workers: Workers,
        call_timeout_s: float,
    ) -> None:
        self.reason = ""
        self.corrupt: list[Key] = []
        self.from_device = 0
        self._link = link
        self._session = session
        self._arena = arena
        self._device: DeviceMapping | None = None
        self._pages = pages
        self._keys = keys
        self._ids = block_ids
        self._verified = _choose(len(keys), verify)
        self._workers = workers
        self._lease = 0
        self._received = 0
        self._copied = 0
        self._call_timeout_s = call_timeout_s
        self._release_call: Begun | None = None

    def run(self, request_id: str, shard: int, deadline: Deadline) -> int:
        """Returns how many leading blocks are in place, 0 on any doubt."""
        try:
            return self._run(request_id, shard, deadline)
        finally:
            if self._release_call is not None:
                self._release_call.drop()

    def _run(self, request_id: str, shard: int, deadline: Deadline) -> int:
        given_s = deadline.left_s()
        try:
            self._receive(request_id, shard, deadline)
        except KvtierError as error:
            if self._lease and deadline.is_over():  # the copy or another node took the time, not this node
                self.reason = BUDGET
            else:
                self._link.failed(self._session, error, given_s)
                self.reason = reason_of(error)
        if not self._lease:
            self.reason = self.reason or MISSING
            return 0
        loaded = self._copied if self._release(shard, deadline) else 0
        if not self.reason and loaded < len(self._keys):
            self.reason = MISSING
        return loaded

    def _receive(self, request_id: str, shard: int, deadline: Deadline) -> None:
        request = pb.LoadRequest(
            call_id=new_call_id(),
            engine_id=self._session.engine_id,
            request_id=request_id,
            keys=pack_keys(self._keys),
            shard=shard,
        )
        # A stream keeps its deadline to the end: the copies between its messages are cut below instead.
        stream = self._link.wire.stream("Load", request, deadline.timeout_s(math.inf))
        with contextlib.closing(stream):
            for message in stream:
                self._link.answered()
                slots = self._accept(message)
                goes_on = not slots.offsets or self._copy(slots, message.checksums, deadline)
                if self._received == len(self._keys):
                    # All is here. Take the status, so that leaving does not look like a cancelled call.
                    with contextlib.suppress(KvtierError):
                        next(stream, None)
                    return
                if not goes_on:
                    return

    def _accept(self, message: pb.LoadResponse) -> _Named:
        """The slots of a message that is what it has to be; raises `TierFault` before anything is touched."""
        count = len(message.slots) // 8
        if (
            len(message.slots) != 8 * count
            or len(message.copies) not in (0, 8 * count)
            or len(message.checksums) != CHECKSUM_SIZE_BYTES * count
            or message.first != self._received
            or self._received + count > len(self._keys)
            or (self._lease and message.lease_id != self._lease)
            or (count and not message.lease_id)
        ):
            raise TierFault("the node's answer to a load is malformed: nothing more was loaded")
        self._lease = message.lease_id
        offsets: list[int] = np.frombuffer(message.slots, "<u8").tolist()
        self._link.check_slots(self._session, self._arena, offsets)
        self._received += count
        return self._prefer_copies(offsets, message.copies)

    def _prefer_copies(self, offsets: list[int], packed: bytes) -> _Named:
        """The slots in device memory where there are some, and it can be mapped and is near the pages."""
        device = self._session.device(self._pages.copier.device) if packed else None
        if device is None:
            return _Named(offsets, [])
        copies: list[int] = np.frombuffer(packed, "<u8").tolist()
        if not device.check([copy for copy in copies if copy != NO_SLOT], self._session.slot_bytes):
            raise TierFault(
                f"the node names slots outside the {device.size_bytes} bytes of its device memory, or "
                "overlapping ones: nothing was touched; restart the daemon"
            )
        self._device = device
        return _Named(offsets, copies)

    def _place(self, slots: _Named, index: int) -> tuple[SlotMemory, int]:
        """Where this block is read."""
        if not slots.is_copy(index):
            return self._arena, slots.offsets[index]
        assert self._device is not None
        return self._device, slots.copies[index]

    def _copy(self, slots: _Named, checksums: bytes, deadline: Deadline) -> bool:
        """Copy a message's blocks; False where the load ends here."""
        first = self._copied
        block_bytes = self._pages.layout.block_bytes

        def copy(begin: int, end: int) -> int:
            """Returns how many are good."""
            try:
                return self._copy_group(slots, checksums, first, begin, end)
            except TierFault as error:
                if not slots.count_copies(begin, end):
                    raise
                self._session.give_device_up(error)
                slots.leave_copies(begin, end)
                return self._copy_group(slots, checksums, first, begin, end)

        parts = list(groups(len(slots.offsets), block_bytes, self._pages.copier.load_group_bytes))
        for wave in self._workers.waves(parts):
            if deadline.is_over():
                self.reason = BUDGET
                return False
            left_bytes = (len(self._keys) - self._copied) * block_bytes
            if self._release_call is None and self._copied and left_bytes <= BEGIN_BEFORE_BYTES:
                self._release_call = self._link.begin("Release", self._call_timeout_s)
            for (begin, end), good in zip(wave, self._workers.map(copy, wave), strict=True):
                self._copied += good
                self.from_device += slots.count_copies(begin, begin + good)
                if good < end - begin:
                    self.reason = CORRUPT
                    return False
        return True

    def _copy_group(self, slots: _Named, checksums: bytes, first: int, begin: int, end: int) -> int:
        """Copy ``[begin, end)`` of a message whose first block is the load's `first`; how many are good."""
        for at, until, is_copy in slots.parts(begin, end):
            memory, _ = self._place(slots, at)
            offsets = (slots.copies if is_copy else slots.offsets)[at:until]
            self._pages.copier.to_pages(memory, offsets, self._ids[first + at : first + until])
        for i in range(begin, end):
            if first + i not in self._verified:
                continue
            found = checksum(*self._place(slots, i), self._pages.layout.block_bytes)
            if found != checksums[CHECKSUM_SIZE_BYTES * i : CHECKSUM_SIZE_BYTES * (i + 1)]:
                self.corrupt.append(self._keys[first + i])
                return i - begin
        return end - begin

    def _release(self, shard: int, deadline: Deadline) -> bool:
        request = pb.ReleaseRequest(
            call_id=new_call_id(),
            engine_id=self._session.engine_id,
            lease_id=self._lease,
            corrupt_keys=pack_keys(self.corrupt),
            shard=shard,
        )
        timeout_s = min(self._call_timeout_s, max(deadline.left_s(), RELEASE_TIMEOUT_S))
        try:
            reply = self._link.call(
                self._session, "Release", request, Deadline(timeout_s), timeout_s, self._release_call
            )
        except KvtierError as error:
            self.reason = reason_of(error)
            return False
        if not reply.valid:
            self.reason = self.reason or EXPIRED
        return bool(reply.valid)


def _choose(count: int, verify: str) -> range | frozenset[int]:
    """Which blocks of a load are verified."""
    if verify == "off":
        return range(0)
    if verify == "all":
        return range(count)
    return frozenset(sampled(count, random.randrange))
