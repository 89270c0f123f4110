"""What operators are told of other nodes: translated, nothing decided."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

from kvtier import logs
from kvtier.core.stats import PeerStats
from kvtier.errors import InvalidRequest, KvtierError, UnknownId
from kvtier.index.address import redact
from kvtier.node import Node
from kvtier.remote.remote import NO_INDEX, NodeView, Remote
from kvtier.server.wire import MAX_DESCRIPTION_CHARS
from kvtier.types import MAX_SHARDS, BlockId, Key, Location
from kvtier.v1 import admin_pb2 as pb

PLACES_TIMEOUT_S: Final = 2.0
"""An operator waits so long for the index; then only what is here is shown."""

_DETAILS: Final = {
    "nixl": "one-sided reads by UCX: RDMA, shared memory or TCP, whatever both nodes have",
    "stream": "gRPC on the connection to the peer",
}

log = logs.get("admin")


def fill_status(status: pb.GetStatusResponse, node: Node) -> None:
    """The fields of a status that concern other nodes."""
    remote = node.remote
    if remote is None:
        status.index = NO_INDEX
        status.index_reachable = True
        return
    status.index = redact(node.config.index) if node.config.index else remote.index_text
    status.index_reachable = remote.index_up
    status.unpublished = remote.unpublished
    status.peer_address = remote.peer_address
    status.transfers.extend(
        pb.TransferStatus(name=each.name, usable=True, detail=_DETAILS.get(each.name, ""))
        for each in remote.transfers
    )
    status.transfers.extend(
        pb.TransferStatus(name=name, usable=False, detail=why) for name, why in remote.unusable.items()
    )
    status.notices.extend(remote.notices)


def list_nodes(node: Node) -> list[pb.NodeStatus]:
    """This node, then every other one that lives."""
    if node.remote is None:
        return [_alone(node)]
    peers: dict[str, list[PeerStats]] = {}
    for peer in sorted(node.stats().peers, key=lambda its: its.tier):
        peers.setdefault(peer.node, []).append(peer)
    return [_status(view, peers.get(view.record.node, ())) for view in node.remote.nodes()]


def get_node(node: Node, name: str) -> pb.NodeStatus:
    """The one of this name or id; an id may be shortened while it is unambiguous.

    Raises
    ------
    InvalidRequest
        The name is none, or several nodes are meant by it.
    UnknownId
        No live node is meant by it.
    """
    if not (0 < len(name) <= MAX_DESCRIPTION_CHARS and name.isprintable()):
        raise InvalidRequest("node is no name: send the name or the id of a node")
    nodes = list_nodes(node)
    for matches in (
        [each for each in nodes if each.node_id == name],
        [each for each in nodes if each.name == name],
        [each for each in nodes if each.node_id.startswith(name)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            ids = ", ".join(each.node_id for each in matches)
            raise InvalidRequest(f"{name!r} can be any of {ids}: give an id")
    raise UnknownId(f"no live node is called {name!r}: `kvtier nodes` lists them")


def _alone(node: Node) -> pb.NodeStatus:
    tiers = node.stats().tiers
    return pb.NodeStatus(
        node_id=node.identity.node_id,
        name=node.config.node_name,
        incarnation=node.identity.incarnation,
        is_self=True,
        capacity_bytes=sum(tier.capacity_bytes for tier in tiers),
        resident_bytes=sum(tier.resident_bytes for tier in tiers),
        state="up",
    )


def _status(view: NodeView, peers: Sequence[PeerStats]) -> pb.NodeStatus:
    """`peers`: what was learnt of each of its tiers, the fastest first, which shows what the way gives."""
    record = view.record
    status = pb.NodeStatus(
        node_id=record.node,
        name=record.name,
        incarnation=record.incarnation,
        address=record.address,
        is_self=view.is_self,
        capacity_bytes=record.capacity_bytes,
        resident_bytes=record.resident_bytes,
        load=record.load,
        state=view.state,
        transfer=view.transfer,
        last_error=view.last_error,
    )
    if peers:
        status.pull_bytes_per_s = peers[0].bytes_per_s
        status.round_trip_s = peers[0].round_trip_s
        status.pulled_blocks = sum(peer.pulled_blocks for peer in peers)
        status.failed_pulls = sum(peer.failed_pulls for peer in peers)
    return status


async def hints(remote: Remote, keys: Sequence[Key], shards: int) -> list[pb.BlockPlace]:
    """What the index says of other nodes; nothing where it does not answer.

    Parameters
    ----------
    shards
        Shards that are known here. Further ones are asked for as long as there are any.
    """
    found: list[pb.BlockPlace] = []
    try:
        async with asyncio.timeout(PLACES_TIMEOUT_S):
            for shard in range(MAX_SHARDS):
                blocks = [BlockId(key, shard) for key in keys]
                its = list(_places(await remote.places(blocks), shard))
                if not its and shard >= shards:
                    break
                found += its
    except (KvtierError, TimeoutError) as error:
        log.info("the index did not say where blocks are", error=str(error) or "no answer in time")
    return found


def _places(locations: Sequence[Sequence[Location]], shard: int) -> Iterator[pb.BlockPlace]:
    for index, its in enumerate(locations):
        for location in its:
            yield pb.BlockPlace(
                index=index,
                shard=shard,
                node_id=location.node,
                incarnation=location.incarnation,
                tier=location.tier,
                hint=True,
            )
