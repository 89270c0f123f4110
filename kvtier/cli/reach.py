"""What `kvtier check` finds out about the index and about other nodes: by asking them, as a daemon would."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Sequence
from typing import Final

from kvtier.cli.findings import DEGRADED, MISSING, OK, Finding, finding, one_line
from kvtier.config import Config
from kvtier.errors import ConfigError, KvtierError, ProtocolMismatch, ResourceShortage, Unavailable
from kvtier.interfaces import Index
from kvtier.types import KEY_SIZE_BYTES, PROTOCOL_VERSION, BlockId, NodeRecord, TierKind

TIMEOUT_S: Final = 5.0
"""For each of index and peers; a daemon itself is less patient."""
ROUNDS: Final = 5
BLOCKS: Final = 64
_ID_DIGITS: Final = 12


def check_addresses(peers: Sequence[str]) -> None:
    """Raise `InvalidRequest` for what is no address."""
    from kvtier.remote.tls import parse_address

    for address in peers:
        parse_address(address)


def own_finding(config: Config, *, is_running: bool = False) -> Finding:
    """Whether other nodes can call this one with what is configured.

    Parameters
    ----------
    is_running
        A daemon answers on the configured socket: the port is its own.
    """
    from kvtier.remote.tls import join
    from kvtier.server.peer_app import check, refuse_busy_port
    from kvtier.transfer.environment import why_no_nixl

    if config.has_no_index:
        return finding("peers", DEGRADED, "without an index there are none", "set KVTIER_INDEX to its URL")
    if config.peer_port < 0:
        return finding("peers", DEGRADED, "peer_port is -1: this node shares nothing", "set KVTIER_PEER_PORT")
    try:
        credentials = check(config)
    except ConfigError as error:
        todo = "see `kvtier serve --help` for --peer-host, --peer-address, --tls-... and --insecure"
        return finding("peers", MISSING, str(error), todo, needed=True)
    if not is_running:
        try:
            refuse_busy_port(config)
        except ResourceShortage as error:
            todo = (
                "set KVTIER_PEER_HOST to an address of this machine, KVTIER_PEER_PORT to a free port (0: any)"
            )
            return finding("peers", MISSING, str(error), todo, needed=True)
    where = config.peer_address or (
        join(config.peer_host, config.peer_port)
        if config.peer_port
        else f"{config.peer_host}, on a port that is chosen at start"
    )
    if credentials is not None and config.transfer == "auto" and (why := why_no_nixl(config)):
        todo = "set KVTIER_TRANSFER to nixl where the network is yours alone, else to stream"
        return finding("peers", DEGRADED, f"{where}, bytes come by gRPC streams alone: {why}", todo)
    if credentials is not None:
        return finding("peers", OK, f"reach this node at {where}, with certificates of the configured CA")
    if config.insecure:
        todo = "set KVTIER_TLS_CERT_FILE, KVTIER_TLS_KEY_FILE and KVTIER_TLS_CA_FILE, and drop --insecure"
        return finding("peers", DEGRADED, f"{where}: whoever reaches it can read what is cached", todo)
    return finding("peers", OK, f"reach this node at {where}, on this machine only")


def index_finding(config: Config) -> Finding:
    """Whether the index that is configured answers, takes locations and gives them back, and how fast."""
    if config.has_no_index:
        return finding("index", DEGRADED, "none: this node shares nothing", "set KVTIER_INDEX to its URL")
    todo = "see that the server runs, and that KVTIER_INDEX, its user, password and CA are right"
    try:
        return asyncio.run(_ask_index(config))
    except ConfigError as error:
        return finding("index", MISSING, str(error), todo, needed=True)
    except (KvtierError, TimeoutError) as error:
        why = str(error) or f"no answer within {TIMEOUT_S:.0f} s"
        without = "`kvtier serve` starts without it and keeps trying, other nodes are not seen"
        return finding("index", MISSING, f"{why}; {without}", todo, needed=True)


async def _ask_index(config: Config) -> Finding:
    from kvtier.index import open_index  # no other command needs it
    from kvtier.index.address import redact

    index = open_index(config)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await index.open()
            nodes = await index.nodes()
            find_s = await _round_trip(index)
    finally:
        await index.close()
    names = ", ".join(sorted(node.name for node in nodes))
    live = f"{len(nodes)} live nodes: {names}" if nodes else "no live node yet"
    why = f"{redact(config.index)} answers, {BLOCKS} blocks are found in {find_s * 1000:.2f} ms, {live}"
    if find_s > config.index_timeout_s:
        return finding(
            "index",
            DEGRADED,
            f"{why}; a lookup waits {config.index_timeout_s * 1000:.0f} ms for it and then goes without",
            "bring it nearer, or set KVTIER_INDEX_TIMEOUT_S to more",
        )
    return finding("index", OK, why)


async def _round_trip(index: Index) -> float:
    """Publish, find and withdraw blocks that nobody has, of a node that there is not: nothing is left."""
    node = NodeRecord(secrets.token_hex(16), 1, secrets.token_hex(16), "check", "", PROTOCOL_VERSION, 0, 0)
    blocks = [BlockId(secrets.token_bytes(KEY_SIZE_BYTES), 0) for _ in range(BLOCKS)]
    await index.publish(node, blocks, TierKind.DRAM)
    try:
        times_s = []
        for _ in range(ROUNDS):
            begin_s = time.perf_counter()
            await index.find(blocks)
            times_s.append(time.perf_counter() - begin_s)
    finally:
        await index.withdraw(node, blocks)
    return statistics.median(times_s)


def peer_findings(config: Config, addresses: Sequence[str]) -> list[Finding]:
    """Whether nodes answer there, with the certificates that are configured, and how bytes come from them.

    All are asked at once.
    """

    async def ask_all() -> list[Finding]:
        return list(await asyncio.gather(*(_peer_finding(config, address) for address in addresses)))

    return asyncio.run(ask_all()) if addresses else []


async def _peer_finding(config: Config, address: str) -> Finding:
    try:
        return await _ask_peer(config, address)
    except ProtocolMismatch as error:
        todo = "install the same kvtier version on both"
        return finding(f"peer {address}", MISSING, str(error), todo, needed=True)
    except (KvtierError, TimeoutError) as error:
        return finding(
            f"peer {address}",
            MISSING,
            str(error) or f"no answer within {TIMEOUT_S:.0f} s",
            "see that the node runs with that --peer-host and --peer-port, that no firewall is between, and "
            "that both have certificates of the same CA",
            needed=True,
        )


async def _ask_peer(config: Config, address: str) -> Finding:
    import grpc

    from kvtier.remote.answers import other_version
    from kvtier.remote.link import PeerLink
    from kvtier.remote.tls import load_tls
    from kvtier.v1.peer_pb2 import HelloRequest
    from kvtier.v1.peer_pb2_grpc import PeerServiceStub

    me = secrets.token_hex(16)
    whoever = NodeRecord("", 0, "", address, address, PROTOCOL_VERSION, 0, 0)
    link = PeerLink(whoever, (me, 1), config, load_tls(config))
    request = HelloRequest(protocol_version=PROTOCOL_VERSION, node_id=me, incarnation=1, wants_metadata=True)
    try:
        stub = PeerServiceStub(link.channel())  # type: ignore[no-untyped-call]
        begin_s = time.perf_counter()
        answer = await stub.Hello(request, timeout=TIMEOUT_S)
        seconds = time.perf_counter() - begin_s
    except grpc.aio.AioRpcError as error:
        raise Unavailable(f"{error.code().name}: {one_line(error.details() or '')}") from None
    finally:
        await link.close()
    if answer.protocol_version != PROTOCOL_VERSION:
        raise other_version(answer.protocol_version)
    names = [offer.name for offer in answer.transfers]
    name, safe = f"peer {address}", "with TLS" if config.tls_cert_file else "without TLS"
    why = (
        f"node {answer.node_id[:_ID_DIGITS]} answers in {seconds * 1000:.1f} ms {safe}, bytes by "
        f"{', '.join(names) or 'nothing'}"
    )
    if not names:
        return finding(name, DEGRADED, f"{why}: nothing can be read from it", "see `kvtier status` there")
    if "nixl" not in names:
        return finding(
            name, DEGRADED, f"{why}: slower than NIXL", "see `kvtier status` and `kvtier check` there"
        )
    return finding(name, OK, why)
