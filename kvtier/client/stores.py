"""One round of a store: reserve, copy, hash, commit; whatever is not committed is given back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier.client.admin import new_call_id
from kvtier.client.copies import BEGIN_BEFORE_BYTES, checksum, groups
from kvtier.client.mapping import ArenaMapping
from kvtier.client.pages import Pages
from kvtier.client.parallel import Workers
from kvtier.client.results import DEADLINE, STOPPED, StoreResult, reason_of
from kvtier.client.session import Link, Session, abort_request
from kvtier.client.stub import Begun, Deadline
from kvtier.errors import KvtierError, TierFault, Unavailable
from kvtier.types import Key, Layout, pack_keys
from kvtier.v1 import engine_pb2 as pb

_GRANTED = pb.RESERVE_STATE_GRANTED
_PRESENT = pb.RESERVE_STATE_PRESENT
_BUSY = pb.RESERVE_STATE_BUSY


class StoreRun:
    """See the module. Used once, by one thread; the arena stays mapped meanwhile."""

    def __init__(
        self,
        link: Link,
        session: Session,
        arena: ArenaMapping,
        pages: Pages,
        workers: Workers,
        stop: threading.Event | None,
        call_timeout_s: float,
    ) -> None:
        self._link = link
        self._session = session
        self._arena = arena
        self._pages = pages
        self._workers = workers
        self._stop = stop
        self._call_timeout_s = call_timeout_s
        self._commit: Begun | None = None

    def run(
        self,
        parent: Key | None,
        keys: Sequence[Key],
        block_ids: Sequence[int],
        shard: int,
        fingerprint: bytes,
        deadline: Deadline,
    ) -> StoreResult:
        """No copy runs any more when this returns."""
        request = pb.ReserveRequest(
            call_id=new_call_id(),
            engine_id=self._session.engine_id,
            parent=parent or b"",
            keys=pack_keys(keys),
            shard=shard,
            fingerprint=fingerprint,
        )
        try:
            reply = self._call("Reserve", request, deadline)
        except KvtierError as error:
            if isinstance(error, Unavailable):
                # It may have been granted all the same, and only the answer was lost.
                self._link.abandon(self._session, 0, request)
            return StoreResult(reason=reason_of(error))
        states = reply.states
        granted = [i for i, state in enumerate(states) if state == _GRANTED]
        committed, reason = 0, ""
        if reply.reservation_id:
            committed, reason = self._fill(reply, keys, block_ids, granted, deadline)
        return StoreResult(
            committed=committed,
            present=states.count(_PRESENT),
            busy=states.count(_BUSY),
            refused=len(states) - len(granted) - states.count(_PRESENT) - states.count(_BUSY),
            reason=reason,
        )

    def _fill(
        self,
        reply: pb.ReserveResponse,
        keys: Sequence[Key],
        block_ids: Sequence[int],
        granted: Sequence[int],
        deadline: Deadline,
    ) -> tuple[int, str]:
        """How many were committed, and why not all that were granted."""
        try:
            offsets = self._accept(reply, len(keys), granted)
            checksums = self._copy(offsets, [block_ids[i] for i in granted], deadline)
            if checksums is None:
                self._abort(reply.reservation_id)
                return 0, DEADLINE if deadline.is_over() else STOPPED
            request = pb.CommitRequest(
                call_id=new_call_id(),
                engine_id=self._session.engine_id,
                reservation_id=reply.reservation_id,
                keys=pack_keys(keys[i] for i in granted),
                checksums=b"".join(checksums),
            )
            return int(self._call("Commit", request, deadline, self._commit).committed), ""
        except KvtierError as error:
            self._abort(reply.reservation_id)
            return 0, reason_of(error)
        except BaseException:
            self._abort(reply.reservation_id)
            raise
        finally:
            if self._commit is not None:
                self._commit.drop()

    def _accept(self, reply: pb.ReserveResponse, asked: int, granted: Sequence[int]) -> list[int]:
        """The granted slots; raises `TierFault` before anything is touched."""
        if len(reply.states) != asked or len(reply.slots) != 8 * asked or not granted:
            raise TierFault("the node's answer to a reservation is malformed: nothing was stored")
        offsets: list[int] = np.frombuffer(reply.slots, "<u8")[list(granted)].tolist()
        self._link.check_slots(self._session, self._arena, offsets)
        return offsets

    def _copy(self, offsets: list[int], ids: list[int], deadline: Deadline) -> list[bytes] | None:
        """Checksums of what now is in the slots; None where the copy was stopped."""
        layout: Layout = self._pages.layout
        copier = self._pages.copier

        def copy(begin: int, end: int) -> list[bytes]:
            copier.to_slots(self._arena, offsets[begin:end], ids[begin:end])
            # Of the slots, not of the pages: a page that changed meanwhile gives a block that is wrong
            # for its key, but never one that does not match its checksum.
            return [checksum(self._arena, offset, layout.block_bytes) for offset in offsets[begin:end]]

        checksums: list[bytes] = []
        parts = list(groups(len(offsets), layout.block_bytes, copier.store_group_bytes))
        for wave in self._workers.waves(parts):
            if deadline.is_over() or (self._stop is not None and self._stop.is_set()):
                return None
            left_bytes = (len(offsets) - wave[0][0]) * layout.block_bytes
            if self._commit is None and wave[0][0] and left_bytes <= BEGIN_BEFORE_BYTES:
                self._commit = self._link.begin("Commit", self._call_timeout_s)
            for part in self._workers.map(copy, wave):
                checksums += part
        if self._stop is not None and self._stop.is_set():
            return None
        return checksums

    def _abort(self, reservation: int) -> None:
        """Now if the node answers, else in the background: a slot that is forgotten is lost to everybody."""
        request = abort_request(self._session, reservation)
        try:
            self._link.call(
                self._session, "Abort", request, Deadline(self._call_timeout_s), self._call_timeout_s
            )
        except Unavailable:
            self._link.abandon(self._session, reservation)
        except KvtierError:
            pass  # the node does not know it (any more)

    def _call(self, method: str, request: object, deadline: Deadline, begun: Begun | None = None) -> Any:
        return self._link.call(self._session, method, request, deadline, self._call_timeout_s, begun)
