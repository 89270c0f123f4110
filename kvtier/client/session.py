"""Being known to a node: registration, its loss and its renewal.

A `Session` lasts from one registration to the restart of the node (or the end of the client); the next
one has an engine id, a lock and an arena of its own. So an id of a lease or a reservation that a copy
still carries from before a restart can never be taken for one that the new daemon gave out. An old session
ends, its arena unmapped, as soon as no copy runs on it.

A `Link` keeps a session for its client, in one background thread a process. Calls never wait for an
unreachable node: the first failure opens a breaker, the thread probes, and until it succeeds every call
fails at once.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvtier.client import forks
from kvtier.client.admin import new_call_id
from kvtier.client.device import DeviceMapping, kind_of
from kvtier.client.liveness import EngineLock
from kvtier.client.mapping import ArenaMapping, slots_at
from kvtier.client.stub import Begun, Deadline, Wire
from kvtier.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    KvtierError,
    LimitExceeded,
    Unavailable,
    UnknownId,
)
from kvtier.types import PROTOCOL_VERSION, Layout
from kvtier.v1 import engine_pb2 as pb

TICK_S: Final = 0.5
"""How often the node's life is looked at, how soon a probe is repeated, and abandoned reservations."""
PROBE_TIMEOUT_S: Final = 1.0
REFUSED_RETRY_S: Final = 10.0
"""A node that refused to register this engine is asked again after this time."""
REFRESH_S: Final = 5.0
"""How often a node whose arena is not whole yet is asked how much of it there is."""
LATE_ANSWERS: Final = 2
"""Answers in a row that came too late; then the node counts as unreachable."""
LATE_FROM_S: Final = 0.02
"""A call that was given less time than this says nothing about the node."""
MAX_ABANDONED: Final = 256
"""Reservations waiting to be given back; one more ends the session, which gives all of them back."""
ABORT_ATTEMPTS: Final = 5

logger = logging.getLogger("kvtier.client")


class Session:
    """One registration of this process. Thread-safe."""

    def __init__(self, lock: EngineLock, reply: pb.RegisterResponse, layout: Layout) -> None:
        check_registration(reply, layout)
        self.engine_id = lock.engine_id
        self.node_id = reply.node_id
        self.incarnation = reply.incarnation
        self.max_keys = reply.max_keys_per_call
        self.slot_bytes = reply.slot_bytes
        self.verify_loads = reply.verify_loads
        self.is_retired = False
        self._reply = reply
        self._engine_lock = lock
        self._guard = threading.Lock()
        self._arena: ArenaMapping | None = None
        self._device: DeviceMapping | None = None
        self._device_failed = False

    def arena(self) -> ArenaMapping:
        """The node's arena, mapped on first use: a process that only looks up maps nothing."""
        with self._guard:
            if self.is_retired:
                raise Unavailable("the node was restarted: register again")
            if self._arena is None:
                arena = self._reply.arena
                self._arena = ArenaMapping(arena.path, arena.size_bytes, arena.allocated_bytes)
            return self._arena

    def device(self, kind: str) -> DeviceMapping | None:
        """The node's device memory, mapped on first use, from inside the arena's `use`.

        None where it has none of this kind, or none that can be read here, which is tried once.
        """
        with self._guard:
            memory = self._reply.device_memory
            if self._device_failed or self._arena is None or kind_of(memory.device) != kind:
                return None
            if self._device is None and memory.handle:
                try:
                    self._device = DeviceMapping(memory.handle, memory.size_bytes, kind)
                except KvtierError as error:
                    self._give_device_up(error)
                    return None
                self._arena.before_unmap(self._device.close)
            return self._device

    def give_device_up(self, error: KvtierError) -> None:
        """It is mapped, but cannot be copied from: it stays so with the arena, and is not read any more."""
        with self._guard:
            if not self._device_failed:
                self._give_device_up(error)

    def _give_device_up(self, error: KvtierError) -> None:
        self._device_failed = True
        logger.warning("kvtier: the node's device memory is not read here, but its arena: %s", error)

    @property
    def mapped(self) -> ArenaMapping | None:
        """The arena if it is mapped."""
        return self._arena

    @property
    def is_whole(self) -> bool:
        """Whether all of the arena is allocated."""
        return self._reply.arena.allocated_bytes >= self._reply.arena.size_bytes

    def renew(self, reply: pb.RegisterResponse) -> bool:
        """Take what the same daemon says now; False where it is another one."""
        if (reply.node_id, reply.incarnation) != (self.node_id, self.incarnation):
            return False
        with self._guard:
            self._reply = reply
            if self._arena is not None:
                self._arena.grow(reply.arena.allocated_bytes)
        return True

    def retire(self) -> None:
        """End it: the arena is unmapped and the lock dropped when the last copy has ended. Idempotent."""
        with self._guard:
            if self.is_retired:
                return
            self.is_retired = True
        # Not before the copies have ended: the lock's end is the proof that none runs.
        if self._arena is None:
            self._engine_lock.close()
        else:
            self._arena.retire(self._engine_lock.close)

    def forget(self) -> None:
        """In a forked child: it belongs to the parent."""
        self.is_retired = True
        self._engine_lock.forget()
        if self._arena is not None:
            self._arena.forget()


def check_registration(reply: pb.RegisterResponse, layout: Layout) -> None:
    """Raise `Conflict` where the node's answer cannot be worked with."""
    if reply.slot_bytes < layout.block_bytes or reply.max_keys_per_call < 1:
        raise Conflict(
            f"the node gives slots of {reply.slot_bytes} bytes for blocks of {layout.block_bytes}, and "
            f"{reply.max_keys_per_call} keys a call: install the same kvtier version on both"
        )
    if reply.slot_bytes != layout.slot_bytes:
        raise Conflict(
            f"the node's slots have {reply.slot_bytes} bytes, this layout's {layout.slot_bytes}: "
            "install the same kvtier version on both"
        )
    if not math.isfinite(reply.reservation_ttl_s) or reply.reservation_ttl_s <= 0:
        raise Conflict(f"the node's reservations last {reply.reservation_ttl_s} s: restart it")


class Abandoned:
    """A reservation to be given back: its id, or the call whose answer never came."""

    __slots__ = ("attempts", "request", "reservation", "session")

    def __init__(self, session: Session, reservation: int, request: pb.ReserveRequest | None) -> None:
        self.session = session
        self.reservation = reservation
        self.request = request
        self.attempts = 0


class Link:
    """Keeps one session to the node of `socket_path`. Thread-safe; opens nothing before the first call."""

    def __init__(
        self, socket_path: str, layout: Layout, description: str, *, device_memory: bool = False
    ) -> None:
        self.wire = Wire(socket_path)
        self.registrations = 0
        self._run_dir = Path(socket_path).absolute().parent
        self._layout = layout
        self._description = description
        self._maps_device_memory = device_memory
        self._is_closed = False
        self._reset()
        forks.watch(self)
        _links.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._session: Session | None = None
        self._fault: KvtierError | None = None
        self._wants_arena = False
        self._late = 0
        self._wake = False
        self._abandoned: deque[Abandoned] = deque()

    def after_fork(self) -> None:
        """In the child: forget the parent's session, begin with the next call."""
        session = self._session
        self.wire.after_fork()
        self._reset()
        if session is not None:
            session.forget()

    # ---- for calls

    def session(self, deadline: Deadline) -> Session:
        """The session; raises at once while the node is known to be unreachable."""
        with self._changed:
            self._start()
            while True:
                if self._is_closed:
                    raise Unavailable("the client is closed")
                if self._fault is not None:
                    raise type(self._fault)(*self._fault.args)  # its own traceback in every thread
                if self._session is not None:
                    return self._session
                self._changed.wait(deadline.left_s())
                if self._session is None and self._fault is None and deadline.is_over():
                    # The next calls need not find out for themselves; the thread goes on trying.
                    self._fault = DeadlineExceeded("the node has not answered the registration yet")
                    raise self._fault

    def arena(self, session: Session) -> ArenaMapping:
        """The session's arena, mapped; from now on new sessions map theirs at once."""
        arena = session.mapped
        if arena is None:
            arena = session.arena()
            with self._changed:
                self._wants_arena = True
                self._wake_up()  # the thread fills the page tables
        return arena

    def begin(self, method: str, limit_s: float) -> Begun | None:
        """Announce a call; None where that is not possible, which the call itself will find out."""
        try:
            return self.wire.begin(method, limit_s)
        except KvtierError:
            return None

    def call(
        self,
        session: Session,
        method: str,
        request: Any,
        deadline: Deadline,
        limit_s: float,
        begun: Begun | None = None,
    ) -> Any:
        """One call; after a broken connection it is repeated once, with the same call id."""
        given_s = min(deadline.left_s(), limit_s)
        try:
            try:
                reply = self.wire.call(method, request, deadline.timeout_s(limit_s), begun)
            except DeadlineExceeded:
                raise
            except Unavailable:
                reply = self.wire.call(method, request, deadline.timeout_s(limit_s))
        except KvtierError as error:
            self.failed(session, error, given_s)
            raise
        self.answered()
        return reply

    def answered(self) -> None:
        """The node has answered in time."""
        self._late = 0

    def failed(self, session: Session, error: KvtierError, given_s: float = math.inf) -> None:
        """A call failed: open the breaker where the node is gone, hangs, or has forgotten this engine.

        Of a node that had less than `LATE_FROM_S` to answer nothing is learned.
        """
        is_late = isinstance(error, DeadlineExceeded)
        if is_late and given_s < LATE_FROM_S:
            return
        is_gone = isinstance(error, Unavailable) and not is_late
        is_forgotten = isinstance(error, UnknownId) and "register first" in str(error)
        if not (is_late or is_gone or is_forgotten):
            self._late = 0
            return
        with self._changed:
            self._late = self._late + 1 if is_late else 0
            if self._session is not session or (is_late and self._late < LATE_ANSWERS):
                return
            self._fault = (
                error if not is_forgotten else Unavailable("the node was restarted: registering again")
            )
            self._wake_up()

    def check_slots(self, session: Session, arena: ArenaMapping, offsets: Sequence[int]) -> None:
        """Raise `TierFault` unless these slots may be touched; an arena may have grown meanwhile."""
        if not arena.check(offsets, session.slot_bytes) and not session.is_whole:
            self._renew(session)
        slots_at(arena, offsets, session.slot_bytes)

    def abandon(self, session: Session, reservation: int, request: pb.ReserveRequest | None = None) -> None:
        """Give a reservation back in the background; no copy into its slots can still run."""
        with self._changed:
            if self._session is not session:
                return  # given back with the session's lock
            self._abandoned.append(Abandoned(session, reservation, request))
            is_full = len(self._abandoned) > MAX_ABANDONED
            self._wake_up()
        if is_full:
            self._drop(session)

    def close(self) -> None:
        """End session, thread and channel; copies that run end first by themselves. Idempotent."""
        with self._changed:
            self._is_closed = True
            session, self._session = self._session, None
            thread = self._thread
            self._changed.notify_all()
        if session is not None:
            session.retire()
        self.wire.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(PROBE_TIMEOUT_S + TICK_S)

    def __del__(self) -> None:
        self.close()

    # ---- in the background

    def _start(self) -> None:
        if self._thread is None and not self._is_closed:
            self._wake = True
            # The thread must not keep a client alive that nobody closes.
            self._thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._changed), name="kvtier-client", daemon=True
            )
            self._thread.start()

    def _wake_up(self) -> None:
        self._wake = True
        self._changed.notify_all()

    def wait(self) -> None:
        """The thread's pause; `_changed` is held."""
        if not self._wake and not self._is_closed:
            self._changed.wait(TICK_S)
        self._wake = False

    def step(self, now_s: float, memory: _Memory) -> bool:
        """One round of the thread; whether it wants another one at once."""
        session, fault = self._session, self._fault
        if session is not None and session.mapped is not None and session.mapped.is_orphaned():
            self._drop(session)
            session = None
        if (session is None or fault is not None) and now_s >= memory.retry_at_s:
            memory.retry_at_s = now_s + self._connect(session, memory)
            session = self._session
        if session is None or self._fault is not None:
            return False
        if not session.is_whole and now_s >= memory.refresh_at_s:
            memory.refresh_at_s = now_s + REFRESH_S
            self._quietly_renew(session)
        if session.mapped is not None and session.mapped.populate():
            return True
        self._give_back()
        return False

    def _connect(self, session: Session | None, memory: _Memory) -> float:
        """Renew the session or open a new one; returns when to try again where that failed."""
        try:
            if session is not None and not self._renew(session):
                self._drop(session)
                session = None
            if session is None:
                self._open()
        except KvtierError as error:
            if not memory.is_logged:
                logger.warning("kvtier is off until the node at %s answers: %s", self._run_dir, error)
            memory.is_logged = True
            if session is not None and not isinstance(error, Unavailable):
                self._drop(session)  # it refuses this very engine: the next attempt is a new one
            with self._changed:
                self._fault = error
                self._changed.notify_all()
            is_refused = isinstance(error, Conflict | InvalidRequest | LimitExceeded) and session is None
            return REFUSED_RETRY_S if is_refused else TICK_S / 2
        if memory.is_logged:
            logger.warning("kvtier is on again: the node at %s answers", self._run_dir)
        memory.is_logged = False
        with self._changed:
            self._fault = None
            self._late = 0
            self._changed.notify_all()
        return 0.0

    def _renew(self, session: Session) -> bool:
        return session.renew(self._register(session.engine_id))

    def _quietly_renew(self, session: Session) -> None:
        try:
            self._renew(session)
        except KvtierError as error:
            self.failed(session, error)

    def _open(self) -> None:
        lock = EngineLock(self._run_dir)
        try:
            session = Session(lock, self._register(lock.engine_id), self._layout)
        except BaseException:
            lock.close()
            raise
        try:
            if self._wants_arena:
                session.arena()
            with self._changed:
                if self._is_closed:
                    raise Unavailable("the client is closed")
                self._session = session
        except BaseException:
            session.retire()
            raise
        self.registrations += 1

    def _register(self, engine_id: str) -> pb.RegisterResponse:
        layout = self._layout
        request = pb.RegisterRequest(
            protocol_version=PROTOCOL_VERSION,
            call_id=new_call_id(),
            engine_id=engine_id,
            layout=pb.Layout(
                kind=layout.kind,
                num_layers=layout.num_layers,
                num_kv_heads=layout.num_kv_heads,
                head_dim=layout.head_dim,
                dtype=layout.dtype,
                block_tokens=layout.block_tokens,
                order=layout.order,
                layer_block_bytes=layout.layer_block_bytes,
                interior=layout.interior,
                scale_bytes=layout.scale_bytes,
                padding_bytes=layout.padding_bytes,
            ),
            fingerprint=layout.fingerprint(),
            description=self._description,
            maps_device_memory=self._maps_device_memory,
        )
        return self.wire.call("Register", request, PROBE_TIMEOUT_S)  # type: ignore[no-any-return]

    def _drop(self, session: Session) -> None:
        """Retire a session and what waits to be given back with it."""
        with self._changed:
            if self._session is session:
                self._session = None
            self._abandoned = deque(item for item in self._abandoned if item.session is not session)
            self._wake_up()
        session.retire()

    def _give_back(self) -> None:
        """Try each abandoned reservation once; after `ABORT_ATTEMPTS` the end of the session does it."""
        for _ in range(len(self._abandoned)):
            with self._changed:
                if not self._abandoned:
                    return
                item = self._abandoned.popleft()
            if item.session is not self._session:
                continue
            try:
                self._abort(item)
            except UnknownId:
                continue  # the node does not know it any more
            except KvtierError as error:
                item.attempts += 1
                self.failed(item.session, error)
                if item.attempts >= ABORT_ATTEMPTS:
                    self._drop(item.session)
                    return
                with self._changed:
                    self._abandoned.append(item)

    def _abort(self, item: Abandoned) -> None:
        if item.request is not None:
            # Its answer never came: the same call id brings the first answer, and with it the id.
            reply = self.wire.call("Reserve", item.request, PROBE_TIMEOUT_S)
            item.reservation, item.request = reply.reservation_id, None
        if item.reservation:
            self.wire.call("Abort", abort_request(item.session, item.reservation), PROBE_TIMEOUT_S)


def abort_request(session: Session, reservation: int) -> pb.AbortRequest:
    """Give back all that is not committed."""
    return pb.AbortRequest(call_id=new_call_id(), engine_id=session.engine_id, reservation_id=reservation)


class _Memory:
    """What the thread remembers between its rounds."""

    def __init__(self) -> None:
        self.retry_at_s = 0.0
        self.refresh_at_s = 0.0
        self.is_logged = False


def _run(link_ref: weakref.ref[Link], changed: threading.Condition) -> None:
    memory = _Memory()
    busy = False
    while True:
        link = link_ref()
        if link is None:
            return
        with changed:
            if not busy:
                link.wait()
            if link._is_closed or link._changed is not changed:
                return
        try:
            busy = link.step(time.monotonic(), memory)
        except Exception:
            logger.exception("kvtier: a bug in the client's thread")
            busy = False
        del link


_links: weakref.WeakSet[Link] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """An orderly exit frees what the node keeps for this engine at once, not with its next look."""
    for link in list(_links):
        link.close()
