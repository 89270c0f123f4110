"""The way to each peer: one channel, who it is now, and whether it keeps failing. All on the event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import grpc

from kvtier import logs
from kvtier.config import Config
from kvtier.core.config import CALL_ID_BYTES
from kvtier.errors import (
    DeadlineExceeded,
    KvtierError,
    ProtocolMismatch,
    TransferFault,
    Unavailable,
    UnknownId,
)
from kvtier.interfaces import Remote, Transfer
from kvtier.remote import answers
from kvtier.remote.answers import Acquired, Peer
from kvtier.remote.breaker import Breaker
from kvtier.remote.channels import open_channel, restored
from kvtier.remote.tls import Tls, load_tls
from kvtier.types import PROTOCOL_VERSION, Key, NodeRecord, pack_keys
from kvtier.v1 import peer_pb2 as pb
from kvtier.v1 import peer_pb2_grpc

GREETING_TIMEOUT_S: Final = 2.0
RELEASE_TIMEOUT_S: Final = 2.0
"""A lease that cannot be given back in this time runs out by itself."""
MAX_ENDING: Final = 256
"""Leases of one peer that are being given back at once; more run out by themselves."""
CLOSE_GRACE_S: Final = 0.5
TRANSFER_PENALTY_S: Final = 60.0
"""A transfer that failed with a peer comes after the others for so long."""

T = TypeVar("T", bound=KvtierError)

log = logs.get("peers")


class PeerLink:
    """One life of one peer.

    Every call is bounded by its `timeout_s`, and raises from `kvtier.errors`: `Unavailable` where the peer
    does not answer, or not what it should, else what the peer refused with. Each fault is told to the
    breaker, and makes the next call say hello again.

    Parameters
    ----------
    me
        This node's id and incarnation.
    tls
        None: plain, which is refused off the loopback unless the configuration says `insecure`.
    before
        Is waited for before the first call: what is known of an earlier life has been forgotten by then.

    Attributes
    ----------
    is_reached
        Whether it ever answered.
    transfer
        By which bytes came from it last; empty until some have.
    """

    def __init__(
        self,
        record: NodeRecord,
        me: tuple[str, int],
        config: Config,
        tls: Tls | None = None,
        *,
        before: Awaitable[object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record = record
        self.breaker = Breaker(clock)
        self.is_reached = False
        self.transfer = ""
        self._me = me
        self._config = config
        self._tls = tls
        self._before = before
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._peer: Peer | None = None
        self._greeting = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()
        self._penalties: dict[str, float] = {}
        self._is_closed = False
        self._greeter: asyncio.Task[None] | None = None

    @property
    def last_error(self) -> str:
        """Of the last fault; empty where all is well."""
        return self.breaker.last_error

    # ---- greetings

    def greet(self) -> None:
        """Say hello in the background, again and again until it is answered.

        So the first request finds the way open, and none is spent on finding out that a peer is gone, or
        whether it is back.
        """
        if not self._is_closed and (self._greeter is None or self._greeter.done()):
            self._greeter = asyncio.get_running_loop().create_task(self._greet_until_answered())

    async def _greet_until_answered(self) -> None:
        while True:
            await asyncio.sleep(self.breaker.retry_in_s)
            was_open = self.breaker.has_failed
            try:
                await self.hello(GREETING_TIMEOUT_S)
            except ProtocolMismatch:
                self._reconnect()  # the breaker has been told
            except KvtierError as error:
                self._reconnect()  # what hangs or garbles one connection is not met on a new one
                if was_open:
                    self.breaker.silent(error)
            else:
                self.breaker.answered()
                return

    # ---- calls

    async def hello(self, timeout_s: float) -> Peer:
        """Who the peer is; asked once, and again after each fault."""
        if self._peer is not None:
            return self._peer
        try:
            async with asyncio.timeout(timeout_s), self._greeting:  # several pulls may begin at once
                if self._peer is None:
                    self._peer = await self._greet(timeout_s)
        except TimeoutError as error:
            raise self._fault(DeadlineExceeded(f"peer {self.record.name!r} did not say hello")) from error
        return self._peer

    def doubt(self) -> None:
        """What the peer said of itself may be wrong by now: the next call says hello again."""
        self._peer = None

    async def _greet(self, timeout_s: float) -> Peer:
        if self._before is not None:
            await asyncio.shield(self._before)  # others wait for the same
        request = pb.HelloRequest(
            protocol_version=PROTOCOL_VERSION,
            node_id=self._me[0],
            incarnation=self._me[1],
            wants_metadata=True,
        )
        answer = await self._call("Hello", request, timeout_s)
        try:
            peer = answers.peer(answer, self.record)
        except KvtierError as error:
            raise self._fault(error) from None
        self.is_reached = True
        return peer

    async def acquire(
        self, keys: Sequence[Key], shard: int, fingerprint: bytes, block_bytes: int, timeout_s: float
    ) -> Acquired:
        """A lease on the leading blocks that the peer has in its arena, and how many are coming there.

        `hello` comes first where it has to.
        """
        end_s = self._clock() + timeout_s
        peer = await self.hello(timeout_s)
        request = pb.AcquireRequest(
            call_id=os.urandom(CALL_ID_BYTES),
            node_id=self._me[0],
            incarnation=peer.incarnation,
            keys=pack_keys(keys),
            shard=shard,
            fingerprint=fingerprint,
            block_bytes=block_bytes,
            owner_id=self.record.node,
            waits=True,
        )
        try:
            answer = await self._call("Acquire", request, end_s - self._clock())
        except (Unavailable, asyncio.CancelledError):  # the lease may have been granted all the same
            self._in_background(self._give_up(request))
            raise
        try:
            return answers.acquired(answer, peer, keys, block_bytes)
        except KvtierError as error:
            raise self._fault(error) from None

    async def release(self, lease: int, shard: int, corrupt_keys: Sequence[Key], timeout_s: float) -> bool:
        """End a lease; whether it was valid all along."""
        request = pb.ReleaseLeaseRequest(
            call_id=os.urandom(CALL_ID_BYTES),
            node_id=self._me[0],
            lease_id=lease,
            corrupt_keys=pack_keys(corrupt_keys),
            shard=shard,
        )
        try:
            answer = await self._send("ReleaseLease", request, timeout_s)
        except UnknownId:  # so long over that the peer has forgotten it
            return False
        except KvtierError as error:
            raise self._fault(error) from error.__cause__
        return bool(answer.valid)

    def end(self, lease: int, shard: int, corrupt_keys: Sequence[Key] = ()) -> None:
        """Begin to give a lease back: nobody has to wait for it, and no cancellation stops it."""
        self._in_background(self._end(lease, shard, corrupt_keys))

    async def _end(self, lease: int, shard: int, corrupt_keys: Sequence[Key]) -> None:
        try:
            if not await self.release(lease, shard, corrupt_keys, RELEASE_TIMEOUT_S):
                log.info("a lease had ended before the pull did", node=self.record.node)
        except KvtierError as error:
            log.info("a lease was not given back: it runs out", node=self.record.node, error=str(error))

    async def _give_up(self, request: pb.AcquireRequest) -> None:
        """A repeat of the call gets its first answer, and with it the lease that nobody heard of."""
        with suppress(KvtierError):
            answer = await self._send("Acquire", request, RELEASE_TIMEOUT_S)
            if answer.lease_id:
                await self.release(answer.lease_id, request.shard, (), RELEASE_TIMEOUT_S)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        if self._is_closed or len(self._ending) >= MAX_ENDING:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # ---- faults

    async def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return await self._send(method, request, timeout_s)
        except KvtierError as error:
            raise self._fault(error) from error.__cause__

    def _fault(self, error: T) -> T:
        """Count a fault of the peer; from now on it has to say hello again."""
        self._peer = None
        if isinstance(error, ProtocolMismatch):
            if self.last_error != str(error):
                log.warning(
                    "a peer is not used", node=self.record.node, name=self.record.name, why=str(error)
                )
            self.breaker.trip(error)
        elif self.breaker.failed(error):
            log.warning(
                "a peer failed: it is left alone until it answers",
                node=self.record.node,
                name=self.record.name,
                error=str(error),
            )
            self._reconnect()
        self.greet()
        return error

    def failed(self, error: KvtierError) -> None:
        """A transfer from the peer failed, or gave wrong bytes."""
        self._fault(error)

    def penalise(self, transfer: str) -> None:
        """This way of reading failed: the others come first for a while."""
        self._penalties[transfer] = self._clock() + TRANSFER_PENALTY_S

    def penalty(self, transfer: str) -> float:
        """For sorting: 0 for what never failed of late, more for what failed later."""
        until_s = self._penalties.get(transfer, 0.0)
        return until_s if until_s > self._clock() else 0.0

    # ---- the channel

    def channel(self) -> grpc.aio.Channel:
        """Made when it is needed first, and anew after the breaker has opened.

        Raises
        ------
        Unavailable
            The link is closed, or the peer's address may not be used.
        """
        if self._channel is None:
            if self._is_closed:
                raise Unavailable("the way to this peer is closed: it is gone, or began a new life")
            self._channel = open_channel(self.record.address, self._config, self._tls)
            self._stub = peer_pb2_grpc.PeerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        return self._channel

    async def _send(self, method: str, request: Any, timeout_s: float) -> Any:
        """One call; raises from `kvtier.errors` without further effect."""
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no time was left to call peer {self.record.name!r}")
        self.channel()
        try:
            answer = await getattr(self._stub, method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise restored(error, self.record.name) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Unavailable("the way to this peer was closed during a call") from None  # not by our caller
        except grpc.aio.UsageError as error:
            raise Unavailable("the way to this peer was closed before a call") from error
        if answer is None:  # what gRPC makes of bytes that are no message
            raise answers.nonsense("no message")
        return answer

    def _reconnect(self) -> None:
        """A connection into a black hole takes long to find out; a new one does not."""
        if self._channel is not None and not self._is_closed:
            channel, self._channel = self._channel, None
            self._in_background(channel.close(CLOSE_GRACE_S))

    async def close(self) -> None:
        """Give leases back for `CLOSE_GRACE_S`, then end every call; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._peer = None
        if self._greeter is not None:
            self._greeter.cancel()
            await asyncio.gather(self._greeter, return_exceptions=True)
        ending = list(self._ending)
        if ending:
            await asyncio.wait(ending, timeout=CLOSE_GRACE_S)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)


class Peers:
    """The links to all nodes that live; used from the event loop.

    Parameters
    ----------
    me
        This node's id and incarnation.
    transfers
        Told to forget peers that are gone; may still be filled later.

    Raises
    ------
    ConfigError
        The certificates cannot be used.
    """

    def __init__(
        self,
        me: tuple[str, int],
        config: Config,
        transfers: Sequence[Transfer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me = me
        self._config = config
        self._transfers = transfers
        self._clock = clock
        self._tls = load_tls(config)
        self._links: dict[str, PeerLink] = {}
        self._forgetting: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    def update(self, records: Sequence[NodeRecord]) -> None:
        """These nodes live and no others; links of an earlier life or to an earlier address are dropped."""
        if self._is_closed:
            return
        live = {record.node: record for record in records if record.node != self._me[0] and record.address}
        for node in self._links.keys() - live.keys():
            self._drop(node)
        for node, record in live.items():
            link = self._links.get(node)
            if link is not None and _is_same(link.record, record):
                link.record = record
                continue
            if link is not None:
                self._drop(node)
            before = self._forgetting.get(node)
            link = PeerLink(record, self._me, self._config, self._tls, before=before, clock=self._clock)
            self._links[node] = link
            link.greet()
            if record.protocol_version != PROTOCOL_VERSION:
                link.failed(answers.other_version(record.protocol_version))

    def get(self, node: str) -> PeerLink | None:
        """The link to a node that lives."""
        return self._links.get(node)

    def channel_of(self, remote: Remote) -> grpc.aio.Channel:
        """For the stream transfer: the channel to this very life of a peer.

        Raises
        ------
        TransferFault
            That life is over, or its address may not be used.
        """
        link = self._links.get(remote.node)
        if link is None or link.record.incarnation != remote.incarnation:
            raise TransferFault("the peer is gone, or began a new life")
        try:
            return link.channel()
        except KvtierError as error:
            raise TransferFault(str(error)) from error

    async def close(self) -> None:
        """Close every link; idempotent."""
        self._is_closed = True
        for node in list(self._links):
            self._drop(node)
        await asyncio.gather(*self._forgetting.values())

    def _drop(self, node: str) -> None:
        link = self._links.pop(node)
        task = asyncio.get_running_loop().create_task(self._forget(link, self._forgetting.get(node)))
        self._forgetting[node] = task
        task.add_done_callback(lambda done: self._forgotten(node, done))

    def _forgotten(self, node: str, task: asyncio.Task[None]) -> None:
        if self._forgetting.get(node) is task:
            del self._forgetting[node]

    async def _forget(self, link: PeerLink, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        await link.close()
        for transfer in tuple(self._transfers):
            try:
                await transfer.forget(link.record.node)
            except Exception as error:  # nothing may keep the next life of the peer from being used
                log.error("a bug in a transfer", transfer=transfer.name, exc_info=error)


def _is_same(old: NodeRecord, new: NodeRecord) -> bool:
    return (old.incarnation, old.address) == (new.incarnation, new.address)
