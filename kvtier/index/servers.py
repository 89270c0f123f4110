"""Talks to one server, the master that sentinels name, or the nodes of a Cluster. Decides nothing.

Connections, TLS, authentication and sentinels are redis-py's. Requests are packed by ourselves and sent
in one write to each server, then all answers are read: for 256 keys that costs half of what redis-py's own
commands do, and a third of its pipelines on a Cluster. Nothing here bounds time: callers do, and a call that
is cancelled in the middle drops its connections, so that no answer is ever taken for another's.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, MovedError, ReadOnlyError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from kvtier.index.address import Address

MAX_CONNECTIONS: Final = 16
"""To one server at once; whoever needs another waits, within the bound of its call."""
SENTINEL_TIMEOUT_S: Final = 0.5
"""A sentinel that is silent so long is passed over."""
TOPOLOGY_TIMEOUT_S: Final = 0.5
"""Likewise a node of a Cluster that is asked who has which slots."""
MAX_SLOTS: Final = 16_384
MAX_CLUSTER_NODES: Final = 1000
Place = tuple[str, int]
_CONNECTION_KINDS: Final = {False: Connection, True: SSLConnection}


class Request(NamedTuple):
    """One packed command, and the hash slot that all of its keys have."""

    slot: int
    packed: bytes


def pack(*parts: bytes) -> bytes:
    """A command as it is sent."""
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def pack_mget(keys: Sequence[bytes]) -> bytes:
    """MGET of keys that all have the same length."""
    size = len(keys[0])
    head = b"*%d\r\n$4\r\nMGET\r\n$%d\r\n" % (len(keys) + 1, size)
    return head + (b"\r\n$%d\r\n" % size).join(keys) + b"\r\n"


class Options(NamedTuple):
    """How connections are made: the CA's file (empty: the system's), and who this is."""

    ca_file: str
    credentials: CredentialProvider | None

    def connection(self, address: Address) -> dict[str, Any]:
        """Arguments of redis-py's connections."""
        arguments: dict[str, Any] = {
            "credential_provider": self.credentials,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": None,
            "socket_connect_timeout": None,
        }
        if address.kind != "socket":
            arguments |= {"socket_keepalive": True}
        if address.tls:
            arguments |= {"ssl_ca_certs": self.ca_file or None, "ssl_check_hostname": True}
        return arguments


class Server:
    """The connections to one server."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._vacant = asyncio.Semaphore(MAX_CONNECTIONS)

    async def send(self, packed: bytes) -> AbstractConnection:
        """Write commands; whoever calls this calls `give_back`."""
        await self._vacant.acquire()
        try:
            connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        except BaseException:
            self._vacant.release()
            raise
        try:
            await connection.send_packed_command(packed, check_health=False)
        except BaseException:
            await self.give_back(connection, is_clean=False)
            raise
        return connection

    async def give_back(self, connection: AbstractConnection, *, is_clean: bool) -> None:
        """End the use of a connection; one on which answers are still to come is closed."""
        try:
            if not is_clean:
                await connection.disconnect(nowait=True)
            await self._pool.release(connection)
        finally:
            self._vacant.release()

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.disconnect()


async def receive(connection: AbstractConnection, count: int) -> list[Any]:
    """That many answers; an error that the server answers is one of them."""
    answers: list[Any] = []
    for _ in range(count):
        try:
            answers.append(await connection.read_response())
        except ResponseError as error:
            answers.append(error)
    return answers


async def converse(
    plan: Sequence[tuple[Server, Sequence[bytes]]], meanwhile: Callable[[], None] | None = None
) -> list[list[Any]]:
    """Send each server its commands, do `meanwhile`, then read all answers, in order.

    The same order of servers in every plan: calls that wait for connections never wait in a circle.
    """
    begun: list[tuple[Server, AbstractConnection, int]] = []
    answers: list[list[Any]] = []
    try:
        for server, commands in plan:
            begun.append((server, await server.send(b"".join(commands)), len(commands)))
        if meanwhile is not None:
            meanwhile()
        for _, connection, count in begun:
            answers.append(await receive(connection, count))
    finally:
        for number, (server, connection, _) in enumerate(begun):
            await server.give_back(connection, is_clean=number < len(answers))
    return answers


class Servers(ABC):
    """All that a URL names.

    Attributes
    ----------
    by_slot
        Whether the keys of one request have to have one hash slot.
    """

    by_slot: ClassVar[bool]

    @abstractmethod
    async def exchange(
        self, requests: Sequence[Request], meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """The answer to each request; an error that a server answers is one of them.

        `meanwhile` is work for the time that the servers take: called when all has been sent, at least once
        where answers are returned, perhaps again where something is asked again.

        Raises
        ------
        redis.RedisError, OSError
            A server cannot be reached, or breaks off.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""


class Single(Servers):
    """One server, on TCP or on a Unix socket."""

    by_slot = False

    def __init__(self, address: Address, options: Options) -> None:
        arguments = options.connection(address)
        if address.path is not None:
            pool = ConnectionPool(UnixDomainSocketConnection, path=str(address.path), **arguments)
        else:
            host, port = address.hosts[0]
            kind = _CONNECTION_KINDS[address.tls]
            pool = ConnectionPool(kind, host=host, port=port, db=address.database, **arguments)
        self._server = Server(pool)

    async def exchange(
        self, requests: Sequence[Request], meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """See `Servers`."""
        (answers,) = await converse([(self._server, [request.packed for request in requests])], meanwhile)
        if any(isinstance(answer, ReadOnlyError) for answer in answers):
            await self._server.close()  # its name may lead to the new master
        return answers

    async def close(self) -> None:
        """See `Servers`."""
        await self._server.close()


class Watched(Servers):
    """The master that sentinels name; looked for anew with each new connection."""

    by_slot = False

    def __init__(self, address: Address, options: Options) -> None:
        self._address = address
        self._options = options
        self._use(with_credentials=False)

    def _use(self, *, with_credentials: bool) -> None:
        """Sentinels have no users as a rule, or the same one as the servers."""
        arguments = self._options.connection(self._address)
        own = arguments | {
            "credential_provider": self._options.credentials if with_credentials else None,
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "ssl": self._address.tls,
        }
        self._with_credentials = with_credentials
        self._sentinel = Sentinel(self._address.hosts, sentinel_kwargs=own)  # type: ignore[no-untyped-call]
        pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
            self._address.master, self._sentinel, ssl=self._address.tls, **arguments
        )
        self._server = Server(pool)

    async def exchange(
        self, requests: Sequence[Request], meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """See `Servers`."""
        commands = [request.packed for request in requests]
        try:
            (answers,) = await converse([(self._server, commands)], meanwhile)
        except AuthenticationError:
            if self._with_credentials or self._options.credentials is None:
                raise
            await self.close()
            self._use(with_credentials=True)
            (answers,) = await converse([(self._server, commands)], meanwhile)
        except (LookupError, AttributeError, TypeError):  # of redis-py, which believes sentinels
            raise RedisConnectionError("a sentinel's answer is not well-formed") from None
        return answers

    async def close(self) -> None:
        """See `Servers`."""
        await self._server.close()
        await self._sentinel.aclose()


class Cluster(Servers):
    """The nodes of a Cluster; who has which slots is asked whenever one says MOVED, or is not there."""

    by_slot = True

    def __init__(self, address: Address, options: Options) -> None:
        self._address = address
        self._arguments = options.connection(address)
        self._servers: dict[Place, Server] = {}
        self._by_slot: list[Place | None] = [None] * MAX_SLOTS
        self._asked = 0
        self._is_stale = True
        self._asking = asyncio.Lock()

    async def exchange(
        self, requests: Sequence[Request], meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """See `Servers`."""
        try:
            if self._is_stale:
                await self._ask()
            answers = await self._once(requests, meanwhile)
            moved = [number for number, answer in enumerate(answers) if isinstance(answer, MovedError)]
            if moved:
                await self._ask()
                again = await self._once([requests[number] for number in moved])
                for number, answer in zip(moved, again, strict=True):
                    answers[number] = answer
        except BaseException:
            self._is_stale = True  # a node was not there, or too slow: it may have a successor
            raise
        return answers

    async def _once(
        self, requests: Sequence[Request], meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        numbers: dict[Place, list[int]] = {}
        for number, request in enumerate(requests):
            place = self._by_slot[request.slot]
            if place is None:
                raise RedisConnectionError(f"no node of the Cluster serves slot {request.slot}")
            numbers.setdefault(place, []).append(number)
        places = sorted(numbers)
        plan = [(self._servers[place], [requests[n].packed for n in numbers[place]]) for place in places]
        answers: list[Any] = [None] * len(requests)
        for place, its in zip(places, await converse(plan, meanwhile), strict=True):
            for number, answer in zip(numbers[place], its, strict=True):
                answers[number] = answer
        return answers

    # ---- who has which slots

    async def _ask(self) -> None:
        """Ask nodes that are known and those of the URL, until one answers sensibly."""
        before = self._asked
        async with self._asking:
            if self._asked != before:
                return  # another call has just learned it
            places = list(dict.fromkeys([*self._servers, *self._address.hosts]))
            random.shuffle(places)
            error: Exception = RedisConnectionError("no node of the Cluster answers")
            for place in places:
                try:
                    async with asyncio.timeout(TOPOLOGY_TIMEOUT_S):
                        await self._learn(place, await self._slots_of(place))
                    return
                except (OSError, ResponseError, RedisConnectionError) as failure:
                    error = (
                        failure if str(failure) else RedisConnectionError(f"{place[0]}:{place[1]} is silent")
                    )
            raise error

    async def _slots_of(self, place: Place) -> Any:
        server = self._server(place)
        ((answer,),) = await converse([(server, [pack(b"CLUSTER", b"SLOTS")])])
        if isinstance(answer, ResponseError):
            raise answer
        return answer

    async def _learn(self, asked: Place, answer: Any) -> None:
        by_slot: list[Place | None] = [None] * MAX_SLOTS
        places: set[Place] = set()
        try:
            for first, last, (host, port, *_), *_replicas in answer:
                place = (host.decode() or asked[0], int(port))
                places.add(place)
                if not 0 <= first <= last < MAX_SLOTS or len(places) > MAX_CLUSTER_NODES:
                    raise ValueError("impossible slots")
                by_slot[first : last + 1] = [place] * (last + 1 - first)
        except (TypeError, ValueError, AttributeError):
            raise RedisConnectionError("the answer about the Cluster's slots is not well-formed") from None
        if not places:
            raise RedisConnectionError("it knows of no slots")
        for place in places:
            self._server(place)
        self._by_slot = by_slot
        self._asked += 1
        self._is_stale = False
        for place in self._servers.keys() - places - set(self._address.hosts):
            await self._servers.pop(place).close()

    def _server(self, place: Place) -> Server:
        server = self._servers.get(place)
        if server is None:
            kind = _CONNECTION_KINDS[self._address.tls]
            pool = ConnectionPool(kind, host=place[0], port=place[1], **self._arguments)
            server = self._servers[place] = Server(pool)
        return server

    async def close(self) -> None:
        """See `Servers`."""
        servers, self._servers, self._is_stale = self._servers, {}, True
        for server in servers.values():
            await server.close()


def connect(address: Address, options: Options) -> Servers:
    """What `address` names; nothing is connected yet."""
    kinds: dict[str, type[Single] | type[Watched] | type[Cluster]]
    kinds = {"single": Single, "socket": Single, "sentinel": Watched, "cluster": Cluster}
    return kinds[address.kind](address, options)
