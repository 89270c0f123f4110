"""The index in Redis or Valkey: one server, sentinels, or a Cluster. How it looks there is in `codec`.

Every call ends within its bound: `index_timeout_s` for `find`, `CALL_TIMEOUT_S` for each round trip of the
others. Nothing is retried but what a Cluster says has moved: callers retry, connections come back by
themselves. Errors that a server answers are faults; what it stores is left out where it is not well-formed.
"""

from __future__ import annotations

import asyncio
import binascii
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final

from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    ClusterCrossSlotError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from kvtier.config import Config
from kvtier.errors import ConfigError, Fenced, IndexFault
from kvtier.index import codec, scripts
from kvtier.index.address import Address
from kvtier.index.servers import MAX_SLOTS, Options, Request, Servers, connect, pack, pack_mget
from kvtier.interfaces import Index
from kvtier.types import BlockId, Location, NodeRecord, TierKind

CALL_TIMEOUT_S: Final = 2.0
"""Bound of each round trip other than those of `find`."""
SCRIPT_BLOCKS: Final = 128
"""Blocks in one run of a script: half a millisecond in which the server answers nobody else."""
ROUND_BLOCKS: Final = 256
"""Blocks that are written in one round trip: a server carries out all that it has read of one connection
before it looks at the next, so this is how long a lookup may wait for a publication.
"""
CLUSTER_ROUND_BLOCKS: Final = 4096
"""The same in a Cluster, where they are divided by 64 tags and several nodes."""
MGET_BLOCKS: Final = 1024
RELIST_S: Final = 0.05
"""An unknown node in a location makes `find` list the nodes anew, but not more often than this."""
MAX_ERROR_CHARS: Final = 200

_PUBLISH, _WITHDRAW, _REGISTER, _HEARTBEAT, _LEAVE, _NODES = (
    scripts.compact(script)
    for script in (
        scripts.PUBLISH,
        scripts.WITHDRAW,
        scripts.REGISTER,
        scripts.HEARTBEAT,
        scripts.LEAVE,
        scripts.NODES,
    )
)


def hash_slot(tag: str) -> int:
    """The slot in a Cluster of keys with this hash tag."""
    return binascii.crc_hqx(tag.encode(), 0) % MAX_SLOTS


_SLOTS: Final = tuple(hash_slot(tag) for tag in codec.TAGS)
_NODES_SLOT: Final = hash_slot(codec.NODES_TAG)


def pack_eval(script: bytes, keys: Sequence[bytes], *arguments: bytes) -> bytes:
    """A script with its keys and arguments."""
    return pack(b"EVAL", script, b"%d" % len(keys), *keys, *arguments)


class RedisIndex(Index):
    """See `kvtier.interfaces.Index`. Used from one event loop.

    Parameters
    ----------
    address
        From `parse_address`.
    credentials
        Asked for user and password with each new connection; None where there are none.
    """

    name: ClassVar[str] = "redis"

    def __init__(
        self, address: Address, config: Config, credentials: CredentialProvider | None = None
    ) -> None:
        self.address = address
        self._options = Options(str(config.index_ca_file or ""), credentials)
        self._credentials = credentials
        self._keys = codec.Keys(config.index_prefix)
        self._ttl_s = max(1, round(config.index_ttl_s))
        self._dead_after_ms = max(1, round(config.dead_after_s * 1000))
        self._timeout_s = config.index_timeout_s
        self._servers: Servers | None = None
        self._resolver = codec.Resolver()
        self._odd_records = 0
        self._listed_at_s = -float("inf")
        self._clock_offset_s = 0.0
        self._has_heard_time = False

    @property
    def garbage(self) -> int:
        """See `Index`."""
        return self._resolver.garbage + self._odd_records

    def now_s(self) -> float | None:
        """See `Dated`."""
        return time.monotonic() + self._clock_offset_s if self._has_heard_time else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address})"

    # ---- life

    async def open(self) -> None:
        """See `Index`."""
        if self._servers is not None:
            return
        self._servers = connect(self.address, self._options)
        try:
            async with self._bounded("open", CALL_TIMEOUT_S, is_opening=True):
                await self._list()
                if not self._servers.by_slot:  # where it is one of a Cluster, this says so
                    await self._exchange([Request(0, pack_mget(self._keys.one_of_each_tag()))])
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See `Index`."""
        servers, self._servers = self._servers, None
        self._resolver = codec.Resolver(self._resolver.garbage)
        self._listed_at_s = -float("inf")
        if servers is not None:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await servers.close()
            except (RedisError, OSError):
                pass  # it is gone anyway

    # ---- nodes

    async def register(self, record: NodeRecord) -> int:
        """See `Index`."""
        incarnation = _number(await self._of_node("register", _REGISTER, record))
        if not record.incarnation <= incarnation < scripts.MAX_INCARNATION:
            raise self._odd("register")
        return incarnation

    async def heartbeat(self, record: NodeRecord) -> bool:
        """See `Index`."""
        answer = await self._of_node("heartbeat", _HEARTBEAT, record)
        if not isinstance(answer, list) or len(answer) != 2 or answer[0] not in (-1, 0, 1):
            raise self._odd("heartbeat")
        if answer[0] == -1:
            raise Fenced(
                f"another daemon of node {record.node} is registered with incarnation {_number(answer[1])}, "
                f"this one has {record.incarnation}: this one must stop; if both are meant to run, give each "
                "a data_dir of its own"
            )
        return bool(answer[0])

    async def leave(self, record: NodeRecord) -> None:
        """See `Index`."""
        await self._of_node("leave", _LEAVE, record)

    async def nodes(self) -> list[NodeRecord]:
        """See `Index`."""
        async with self._bounded("list the nodes", CALL_TIMEOUT_S):
            return await self._list()

    async def _of_node(self, operation: str, script: bytes, record: NodeRecord) -> Any:
        codec.check_record(record)
        packed = pack_eval(
            script,
            self._keys.node(record.node),
            b"%d" % record.incarnation,
            record.instance.encode(),
            codec.encode_record(record),
            b"%d" % self._dead_after_ms,
            record.node.encode(),
        )
        async with self._bounded(operation, CALL_TIMEOUT_S):
            (answer,) = await self._exchange([Request(_NODES_SLOT, packed)])
            return answer

    async def _list(self) -> list[NodeRecord]:
        packed = pack_eval(_NODES, [self._keys.nodes()])
        (answer,) = await self._exchange([Request(_NODES_SLOT, packed)])
        if not isinstance(answer, list) or len(answer) != 2 or not isinstance(answer[1], list):
            raise self._odd("list the nodes")
        self._clock_offset_s = _number(answer[0]) - time.monotonic()
        self._has_heard_time = True
        ids = codec.decode_ids(answer[1])
        requests = [
            Request(
                _NODES_SLOT,
                pack(b"GETRANGE", self._keys.record(node), b"0", b"%d" % codec.MAX_RECORD_BYTES),
            )
            for node in ids
        ]
        values = await self._exchange(requests, is_lenient=True) if requests else []
        decoded = list(map(codec.decode_record, ids, values))
        self._odd_records += sum(bool(raw) and its is None for raw, its in zip(values, decoded, strict=True))
        records = sorted((record for record in decoded if record is not None), key=lambda record: record.node)
        self._listed_at_s = time.monotonic()
        self._resolver.update(records)
        return records

    # ---- locations

    async def publish(self, record: NodeRecord, blocks: Sequence[BlockId], tier: TierKind) -> None:
        """See `Index`."""
        await self._write("publish", _PUBLISH, record, blocks, tier)

    async def withdraw(self, record: NodeRecord, blocks: Sequence[BlockId], *, in_hbm: bool = False) -> None:
        """See `Index`."""
        tier = TierKind.HBM if in_hbm else TierKind.DRAM
        await self._write("withdraw", _WITHDRAW, record, blocks, tier)

    async def _write(
        self, operation: str, script: bytes, record: NodeRecord, blocks: Sequence[BlockId], tier: TierKind
    ) -> None:
        codec.check_record(record)
        head = codec.entry_head(record.node, record.incarnation, tier)
        ttl = b"%d" % self._ttl_s
        is_cluster = self._servers is not None and self._servers.by_slot
        step = CLUSTER_ROUND_BLOCKS if is_cluster else ROUND_BLOCKS
        requests = following = self._packed(blocks[:step], script, head, ttl)
        for begin in range(0, len(blocks), step):
            rest = blocks[begin + step : begin + 2 * step]

            def prepare(rest: Sequence[BlockId] = rest) -> None:
                nonlocal following
                following = self._packed(rest, script, head, ttl)

            async with self._bounded(operation, CALL_TIMEOUT_S):
                await self._exchange(requests, prepare)
            requests = following

    def _packed(self, blocks: Sequence[BlockId], script: bytes, head: bytes, ttl: bytes) -> list[Request]:
        return [
            Request(slot, pack_eval(script, keys, head, ttl))
            for slot, keys in self._batches(blocks, head[15] == TierKind.HBM)
        ]

    def _batches(self, blocks: Sequence[BlockId], in_hbm: bool) -> Iterator[tuple[int, list[bytes]]]:
        """Keys of one slot where that matters, at most `SCRIPT_BLOCKS`."""
        for slot, keys, _ in self._by_slot(blocks, in_hbm):
            for begin in range(0, len(keys), SCRIPT_BLOCKS):
                yield slot, keys[begin : begin + SCRIPT_BLOCKS]

    def _by_slot(
        self, blocks: Sequence[BlockId], in_hbm: bool
    ) -> Iterable[tuple[int, list[bytes], Sequence[int]]]:
        """Slot, keys, and the places of these in `blocks`."""
        keys = self._keys.blocks(blocks, in_hbm=in_hbm)
        if self._servers is None or not self._servers.by_slot:
            return [(0, keys, range(len(keys)))]
        groups: dict[int, tuple[list[bytes], list[int]]] = {}
        for number, block in enumerate(blocks):
            its = groups.setdefault(block[0][0] & 63, ([], []))
            its[0].append(keys[number])
            its[1].append(number)
        return [(_SLOTS[tag], *its) for tag, its in groups.items()]

    async def find(self, blocks: Sequence[BlockId], *, in_hbm: bool = False) -> list[tuple[Location, ...]]:
        """See `Index`."""
        if not blocks:
            return []
        async with self._bounded("find", self._timeout_s):
            if self._listed_at_s < 0:
                await self._list()
            values = await self._read(blocks, in_hbm)
            found = self._resolve(values)
            if self._resolver.has_news and time.monotonic() - self._listed_at_s > RELIST_S:
                await self._list()
                found = self._resolve(values)
                self._resolver.has_news = False
            return [_in_hbm(places) for places in found] if in_hbm else found

    def _resolve(self, values: Sequence[bytes | None]) -> list[tuple[Location, ...]]:
        return self._resolver.resolve(values, int(time.monotonic() + self._clock_offset_s))

    async def _read(self, blocks: Sequence[BlockId], in_hbm: bool) -> list[bytes | None]:
        requests, places = [], []
        for slot, keys, numbers in self._by_slot(blocks, in_hbm):
            for begin in range(0, len(keys), MGET_BLOCKS):
                requests.append(Request(slot, pack_mget(keys[begin : begin + MGET_BLOCKS])))
                places.append(numbers[begin : begin + MGET_BLOCKS])
        answers = await self._exchange(requests)
        values: list[bytes | None] = [None] * len(blocks)
        for its, answer in zip(places, answers, strict=True):
            if not isinstance(answer, list) or len(answer) != len(its):
                raise self._odd("find")
            if isinstance(its, range):
                values[its.start : its.stop] = answer
            else:
                for number, value in zip(its, answer, strict=True):
                    values[number] = value
        return values

    # ---- calls

    async def _exchange(
        self,
        requests: Sequence[Request],
        meanwhile: Callable[[], None] | None = None,
        *,
        is_lenient: bool = False,
    ) -> list[Any]:
        """The answers; one that is an error is raised, or left to the caller."""
        if self._servers is None:
            raise IndexFault(f"the index {self.address} is not open")
        answers = await self._servers.exchange(requests, meanwhile)
        if not is_lenient:
            for answer in answers:
                if isinstance(answer, ResponseError):
                    raise answer
        return answers

    @asynccontextmanager
    async def _bounded(
        self, operation: str, timeout_s: float, *, is_opening: bool = False
    ) -> AsyncIterator[None]:
        """Ends in time; whatever goes wrong is a fault, except at `open` what can never work."""
        where = f"the index {self.address}"
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except (IndexFault, Fenced):
            raise
        except ConfigError as error:
            if is_opening:
                raise
            raise IndexFault(f"{where} cannot be used ({operation}): {error}") from None
        except TimeoutError:
            raise IndexFault(f"{where} did not answer within {timeout_s:g} s ({operation})") from None
        except (RedisError, OSError, ValueError, TypeError, RecursionError, MemoryError) as error:
            text = self._text(error)
            todo = _todo(error, text) if is_opening else ""
            if todo:
                raise ConfigError(f"index is {self.address}: {text}; {todo}") from None
            raise IndexFault(f"{where} cannot be used ({operation}): {text}") from None

    def _odd(self, operation: str) -> IndexFault:
        return IndexFault(f"the index {self.address} answers what no Redis answers ({operation})")

    def _text(self, error: BaseException) -> str:
        """What a server or the system says: short, printable, without the password.

        Servers do repeat it: ``unknown command 'AUTH', with args beginning with: ...``.
        """
        text = str(error) or type(error).__name__
        for secret in _secrets(self._credentials):
            text = text.replace(secret, "***")
        return "".join(char if char.isprintable() else " " for char in text[:MAX_ERROR_CHARS])


def _in_hbm(places: tuple[Location, ...]) -> tuple[Location, ...]:
    """Whoever writes there what is not in HBM is not believed."""
    return tuple(place for place in places if place.tier is TierKind.HBM)


def _secrets(credentials: CredentialProvider | None) -> list[str]:
    if credentials is None:
        return []
    try:
        return [part for part in credentials.get_credentials()[-1:] if part]
    except ConfigError:
        return []


def _number(value: object) -> int:
    """A count that a script answers; 0 where it is none."""
    if type(value) is bytes and value.isdigit() and len(value) < 20:
        return int(value)
    return 0


def _todo(error: BaseException, text: str) -> str:
    """What to do where an address can never work; empty where it may later."""
    if isinstance(error, AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
        return "set index_user and index_password_file to what the server knows"
    if isinstance(error, NoPermissionError) or text.startswith("NOPERM"):
        return "allow the user the keys of index_prefix and the commands +@read +@write +@scripting +time"
    if isinstance(error, MovedError | ClusterCrossSlotError):
        return "it belongs to a Cluster: write redis+cluster://"
    if "cluster support disabled" in text:
        return "it belongs to no Cluster: write redis://"
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        return "set index_ca_file to the CA that signed its certificate, and the host to a name that it bears"
    if text.startswith("ERR unknown command"):
        return "kvtier needs Redis 7 or Valkey"
    return ""
