"""What an engine uses: lookups, loads and stores that never fail it."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Literal, Self

from kvtier.client import arguments, forks
from kvtier.client.admin import new_call_id
from kvtier.client.loads import LoadRun
from kvtier.client.pages import Pages
from kvtier.client.parallel import Workers
from kvtier.client.results import ClientStats, Counters, LoadResult, Offer, StoreResult, reason_of
from kvtier.client.session import Link, Session
from kvtier.client.stores import StoreRun
from kvtier.client.stub import Deadline
from kvtier.errors import InvalidRequest, KvtierError, TierFault
from kvtier.types import (
    MAX_SHARDS,
    Key,
    Layout,
    TierKind,
    pack_keys,
)
from kvtier.v1 import engine_pb2 as pb

STORE_TIMEOUT_S: Final = 30.0
STORE_ROUND_BYTES: Final = 512 << 20
"""A longer store is committed in rounds of so many bytes: visible sooner, and within an engine's share."""
PREPARE_TIMEOUT_S: Final = 10.0
PREPARE_POLL_S: Final = 0.002
MAX_ESTIMATES: Final = 4096
"""Offers whose estimate is remembered until the load."""
ASSUMED_BYTES_PER_S: Final = 1e9
"""Where no estimate is known."""
MAX_COPY_THREADS: Final = 64
REPORT_KEYS: Final = 4096
"""In one call of a report: the node is kept busy by it for a few milliseconds."""

Verify = Literal["off", "sample", "all"]

logger = logging.getLogger("kvtier.client")


class EngineClient:
    """An engine's access to the daemon on its node. Blocking and thread-safe.

    Nothing is opened here: channel, arena and lock are made by the first call in the process that calls,
    and a forked child makes its own. A fault is a miss: no method raises because of the node. They raise
    `InvalidRequest` for arguments that cannot be right.

    Parameters
    ----------
    socket_path
        The daemon's Unix socket.
    layout
        What this engine's blocks are made of.
    description
        For operators, e.g. engine and model.
    shard
        Which shard of each block this process loads and stores.
    lookup_timeout_s
        Deadline of a lookup.
    call_timeout_s
        Deadline of every other single call.
    load_floor_s
        A load is given at least this time, however short its estimate.
    verify_loads
        Which loaded blocks are compared with their checksum; None: what the node is configured for.
    copy_threads
        Threads that one load or store copies with.
    device_memory
        Whether blocks may come from the node's device memory, if it has some that is near the pages.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        layout: Layout,
        *,
        description: str = "",
        shard: int = 0,
        lookup_timeout_s: float = 0.05,
        call_timeout_s: float = 1.0,
        load_floor_s: float = 0.1,
        verify_loads: Verify | None = None,
        copy_threads: int = 1,
        device_memory: bool = True,
    ) -> None:
        for name, value in (
            ("lookup_timeout_s", lookup_timeout_s),
            ("call_timeout_s", call_timeout_s),
            ("load_floor_s", load_floor_s),
        ):
            if not arguments.is_number(value) or not 0 < value < math.inf:
                raise InvalidRequest(f"{name} is {value!r}: allowed is a number of seconds above 0")
        if verify_loads not in (None, "off", "sample", "all"):
            raise InvalidRequest(f"verify_loads is {verify_loads!r}: allowed are off, sample, all and None")
        if not arguments.is_count(copy_threads, 1, MAX_COPY_THREADS):
            raise InvalidRequest(f"copy_threads is {copy_threads!r}: allowed is 1 .. {MAX_COPY_THREADS}")
        if not arguments.is_count(shard, 0, MAX_SHARDS - 1):
            raise InvalidRequest(f"shard is {shard!r}: allowed is 0 .. {MAX_SHARDS - 1}")
        self.layout = layout
        self._fingerprint = layout.fingerprint()
        self._shard = shard
        self._lookup_timeout_s = lookup_timeout_s
        self._call_timeout_s = call_timeout_s
        self._load_floor_s = load_floor_s
        self._verify_loads = verify_loads
        self._link = Link(
            arguments.socket_path(socket_path),
            layout,
            arguments.text("description", description),
            device_memory=bool(device_memory),
        )
        self._workers = Workers(copy_threads)
        self._counters = Counters()
        self._estimates: OrderedDict[str, float] = OrderedDict()
        self._estimates_lock = threading.Lock()
        forks.watch(self)

    def prepare(self, timeout_s: float = PREPARE_TIMEOUT_S) -> bool:
        """Register and map the arena before the first load or store has to; nobody needs to call it.

        Returns
        -------
        bool
            Whether all is ready; False after `timeout_s` or without a node, which is no reason to wait.
        """
        deadline = Deadline(arguments.seconds("timeout_s", timeout_s))
        try:
            arena = self._link.arena(self._link.session(deadline))
        except KvtierError as error:
            self._fault("prepare", error)
            return False
        while not (arena.is_populated or deadline.is_over()):
            time.sleep(PREPARE_POLL_S)
        return arena.is_populated

    def lookup(
        self, request_id: str, keys: Sequence[Key], shard_count: int = 1, *, block_compute_s: float = 0.0
    ) -> Offer:
        """How many leading blocks can be loaded; holds them for `request_id` until load, release or TTL.

        Parameters
        ----------
        request_id
            Unique among all engines of the node.
        keys
            A chain, from the first block of the prompt.
        shard_count
            A block counts if shards ``0 .. shard_count-1`` all have it.
        block_compute_s
            What the engine takes to compute one block (0: unknown): of what lies elsewhere only what loads
            faster is offered.
        """
        arguments.keys(keys)
        arguments.request_id(request_id)
        if not arguments.is_count(shard_count, 1, MAX_SHARDS):
            raise InvalidRequest(f"shard_count is {shard_count!r}: allowed is 1 .. {MAX_SHARDS}")
        if not arguments.is_number(block_compute_s) or not 0 <= block_compute_s < math.inf:
            raise InvalidRequest(f"block_compute_s is {block_compute_s!r}: allowed is 0 or more seconds")
        deadline = Deadline(self._lookup_timeout_s)
        self._counters.add(lookups=1, lookup_blocks=len(keys))
        try:
            session = self._link.session(deadline)
            request = pb.LookupRequest(
                engine_id=session.engine_id,
                request_id=request_id,
                keys=pack_keys(keys[: session.max_keys]),
                shard_count=shard_count,
                fingerprint=self._fingerprint,
                block_compute_s=block_compute_s,
            )
            offer = _offer(self._link.call(session, "Lookup", request, deadline, math.inf), len(keys))
        except KvtierError as error:
            return Offer(0, reason=self._fault("lookup", error))
        self._remember(request_id, offer)
        self._counters.add(offered_blocks=offer.blocks)
        return offer

    def load(
        self,
        request_id: str,
        keys: Sequence[Key],
        pages: Pages,
        block_ids: Sequence[int],
        *,
        budget_s: float | None = None,
    ) -> LoadResult:
        """Copy what a lookup offered into the engine's pages.

        Parameters
        ----------
        keys, block_ids
            Block ``keys[i]`` goes to page ``block_ids[i]``. Nobody else may use these pages meanwhile.
        budget_s
            The load is cut after this time; None: twice its estimate, at least `load_floor_s`.

        Returns
        -------
        LoadResult
            What is loaded was committed under exactly these keys, and its lease was valid until the last
            byte was copied. Pages of blocks that were not loaded may have been overwritten.
        """
        arguments.request_id(request_id)
        self._check(keys, pages, block_ids)
        if len(set(block_ids)) < len(block_ids):
            raise InvalidRequest("a block id is there twice: a page holds one block, give each its own")
        if budget_s is not None:
            budget_s = arguments.seconds("budget_s", budget_s)
        begin_s = time.monotonic()
        if not keys:
            return LoadResult(0)
        deadline = Deadline(self._budget_s(request_id, len(keys), budget_s))
        loaded, reason, corrupt = self._load(request_id, keys, pages, block_ids, deadline)
        self._counters.add(
            loads=1, loaded_blocks=loaded, failed_loads=loaded < len(keys), corrupt_blocks=corrupt
        )
        return LoadResult(loaded, reason, time.monotonic() - begin_s)

    def store(
        self,
        parent: Key | None,
        keys: Sequence[Key],
        pages: Pages,
        block_ids: Sequence[int],
        *,
        stop: threading.Event | None = None,
        timeout_s: float = STORE_TIMEOUT_S,
    ) -> StoreResult:
        """Offer new blocks to the node; when this returns, no copy of it runs and all may load them.

        Parameters
        ----------
        parent
            Key of the block before ``keys[0]``; None where that begins a prompt.
        keys, block_ids
            Block ``keys[i]`` lies in page ``block_ids[i]``, which must not change meanwhile.
        stop
            Checked every few blocks: if set, the store ends and what is not committed never will be.
        timeout_s
            The same after this time.
        """
        self._check(keys, pages, block_ids)
        arguments.parent(parent)
        if stop is not None and not hasattr(stop, "is_set"):
            raise InvalidRequest(f"stop is {stop!r}: allowed is a threading.Event")
        deadline = Deadline(arguments.seconds("timeout_s", timeout_s))
        total = StoreResult()
        step = max(1, STORE_ROUND_BYTES // self.layout.block_bytes)
        begin = 0
        while begin < len(keys) and not total.reason and not total.refused:
            before = parent if begin == 0 else keys[begin - 1]
            done, part = self._store(before, keys, pages, block_ids, begin, step, stop, deadline)
            total = _sum(total, part)
            begin += done
        total = _sum(total, StoreResult(refused=len(keys) - begin if not total.reason else 0))
        self._counters.add(
            stores=1,
            stored_blocks=total.committed,
            present_blocks=total.present,
            refused_blocks=total.refused,
            aborted_stores=bool(total.reason),
        )
        return total

    def release_hold(self, request_id: str) -> None:
        """Give an offer back that will not be loaded; one that is unknown or has ended is fine."""
        arguments.request_id(request_id)
        with self._estimates_lock:
            self._estimates.pop(request_id, None)
        deadline = Deadline(self._call_timeout_s)
        try:
            session = self._link.session(deadline)
            request = pb.ReleaseRequest(
                call_id=new_call_id(),
                engine_id=session.engine_id,
                request_id=request_id,
                shard=self._shard,
            )
            self._link.call(session, "Release", request, deadline, self._call_timeout_s)
        except KvtierError as error:
            self._fault("release", error)

    def report_resident(
        self, added: Sequence[Key], removed: Sequence[Key] = (), *, clear: bool = False
    ) -> str | None:
        """Tell the node what the engine's own memory has gained and lost; `clear`: first it lost all.

        Parameters
        ----------
        added, removed
            Each key once. They travel in calls of `REPORT_KEYS`, with `call_timeout_s` for each.

        Returns
        -------
        str or None
            Names the registration that it was told under: of what was told under another one the node knows
            nothing any more. None where not all was told; some may have been.
        """
        arguments.keys(added)
        arguments.keys(removed)
        try:
            session = self._link.session(Deadline(self._call_timeout_s))
            step = min(REPORT_KEYS, session.max_keys)
            nothing: Sequence[Key] = ()
            parts = [(nothing, removed[begin : begin + step]) for begin in range(0, len(removed), step)]
            parts += [(added[begin : begin + step], nothing) for begin in range(0, len(added), step)]
            for number, (gained, lost) in enumerate(parts or [(nothing, nothing)]):
                request = pb.ReportResidentRequest(
                    call_id=new_call_id(),
                    engine_id=session.engine_id,
                    added=pack_keys(gained),
                    removed=pack_keys(lost),
                    clear=clear and number == 0,
                )
                deadline = Deadline(self._call_timeout_s)
                self._link.call(session, "ReportResident", request, deadline, self._call_timeout_s)
        except KvtierError as error:
            self._fault("report", error)
            return None
        return session.engine_id

    def stats(self) -> ClientStats:
        """Counters since this process began."""
        return self._counters.read(registrations=self._link.registrations)

    def close(self) -> None:
        """End: the arena is unmapped when the copies that run have ended. Later calls miss. Idempotent."""
        self._link.close()
        self._workers.close()

    def after_fork(self) -> None:
        """In the child: begin anew."""
        self._workers.after_fork()
        self._counters.after_fork()
        self._estimates_lock = threading.Lock()
        self._estimates = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one load, one round of a store

    def _load(
        self, request_id: str, keys: Sequence[Key], pages: Pages, ids: Sequence[int], deadline: Deadline
    ) -> tuple[int, str, int]:
        session: Session | None = None
        given_s = deadline.left_s()
        try:
            session = self._link.session(deadline)
            arena = self._link.arena(session)
            with arena.use():
                count = min(len(keys), session.max_keys)
                verify = self._verify_loads or session.verify_loads
                run = LoadRun(
                    self._link,
                    session,
                    arena,
                    pages,
                    keys[:count],
                    ids[:count],
                    verify,
                    self._workers,
                    self._call_timeout_s,
                )
                loaded = run.run(request_id, self._shard, deadline)
        except KvtierError as error:
            if session is not None:
                self._link.failed(session, error, given_s)
            return 0, self._fault("load", error), 0
        if run.corrupt:
            logger.error(
                "kvtier: %d blocks did not have their checksum and were not loaded", len(run.corrupt)
            )
        self._counters.add(device_blocks=min(run.from_device, loaded))
        return loaded, run.reason if loaded < len(keys) else "", len(run.corrupt)

    def _store(
        self,
        parent: Key | None,
        keys: Sequence[Key],
        pages: Pages,
        ids: Sequence[int],
        begin: int,
        step: int,
        stop: threading.Event | None,
        deadline: Deadline,
    ) -> tuple[int, StoreResult]:
        """How many keys this round took on, and what became of them."""
        session: Session | None = None
        given_s = deadline.left_s()
        try:
            session = self._link.session(deadline)
            arena = self._link.arena(session)
            end = min(len(keys), begin + step, begin + session.max_keys)
            with arena.use():
                run = StoreRun(self._link, session, arena, pages, self._workers, stop, self._call_timeout_s)
                part = run.run(
                    parent, keys[begin:end], ids[begin:end], self._shard, self._fingerprint, deadline
                )
            return end - begin, part
        except KvtierError as error:
            if session is not None:
                self._link.failed(session, error, given_s)
            return 0, StoreResult(reason=self._fault("store", error))

    # ---- details

    def _budget_s(self, request_id: str, blocks: int, budget_s: float | None) -> float:
        with self._estimates_lock:
            estimate_s = self._estimates.pop(request_id, None)
        if budget_s is not None:
            return budget_s
        if estimate_s is None:
            estimate_s = blocks * self.layout.block_bytes / ASSUMED_BYTES_PER_S
        return max(2 * estimate_s, self._load_floor_s)

    def _remember(self, request_id: str, offer: Offer) -> None:
        with self._estimates_lock:
            self._estimates[request_id] = offer.estimate_s
            if len(self._estimates) > MAX_ESTIMATES:
                self._estimates.popitem(last=False)

    def _check(self, keys: Sequence[Key], pages: Pages, block_ids: Sequence[int]) -> None:
        arguments.keys(keys)
        arguments.block_ids(block_ids)
        if len(keys) != len(block_ids):
            raise InvalidRequest(f"{len(block_ids)} block ids were given for {len(keys)} keys")
        if not isinstance(pages, Pages):
            raise InvalidRequest("pages are made by Pages.from_tensors: something else was given")
        if pages.layout != self.layout:
            raise InvalidRequest("the pages have another layout than this client: make one client for each")
        pages.check(block_ids)

    def _fault(self, what: str, error: KvtierError) -> str:
        self._counters.add(faults=1)
        logger.debug("kvtier: %s failed: %s", what, error)
        return reason_of(error)


def _offer(reply: pb.LookupResponse, asked: int) -> Offer:
    if reply.blocks > asked or reply.coming > reply.blocks or not 0 <= reply.estimate_s < math.inf:
        raise TierFault("the node's answer to a lookup is malformed: it counts as a miss")
    kinds = {kind.value: kind for kind in TierKind}
    tiers = {kinds[count.tier]: count.blocks for count in reply.tiers if count.tier in kinds}
    return Offer(reply.blocks, reply.estimate_s, reply.reason, tiers, reply.coming)


def _sum(one: StoreResult, other: StoreResult) -> StoreResult:
    return StoreResult(
        one.committed + other.committed,
        one.present + other.present,
        one.busy + other.busy,
        one.refused + other.refused,
        one.reason or other.reason,
    )
