"""How nodes of a simulated fleet speak: the real links, on the simulated network, and the owner's side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier.config import Config
from kvtier.core import messages as m
from kvtier.errors import DeadlineExceeded, Unavailable
from kvtier.interfaces import Transfer
from kvtier.remote.link import PeerLink, Peers
from kvtier.server import peer_wire as wire
from kvtier.types import PROTOCOL_VERSION, NodeRecord, unpack_keys
from kvtier.v1 import peer_pb2 as pb

if TYPE_CHECKING:
    from kvtier.testing.fleet_daemon import Daemon
    from kvtier.testing.fleet_judge import Judge


class _Channel:
    async def close(self, grace: float | None) -> None:
        """Nothing is open."""


class FleetLink(PeerLink):
    """A link whose calls travel over the simulated network."""

    daemon: ClassVar[Daemon]

    def channel(self) -> Any:
        """Nothing that could be used."""
        return _Channel()

    async def _send(self, method: str, request: Any, timeout_s: float) -> Any:
        daemon, world = self.daemon, self.daemon.world
        if daemon.dead or self._is_closed:
            raise Unavailable("this daemon is dead")
        target = world.detours.get(self.record.address, self.record.address)
        site = daemon.fleet.sites[target]

        async def serve(server: Daemon) -> tuple[Any, Judge]:
            return await _ANSWERS[method](server, request), server.judge

        try:
            async with asyncio.timeout(timeout_s):
                answer, owner = await world.call(daemon.site.name, target, lambda: site.daemon, serve)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{target} did not answer in time") from error
        if method == "Acquire" and answer.lease_id:
            keys = unpack_keys(request.keys, max_keys=len(request.keys))
            asked = (self.record.node, self.record.incarnation)
            daemon.judge.granted_by(owner, asked, request.shard, keys, answer.lease_id)
        return answer


class FleetPeers(Peers):
    """The real register of links, each a `FleetLink` of `daemon`."""

    def __init__(self, daemon: Daemon, config: Config, transfers: Sequence[Transfer]) -> None:
        super().__init__((daemon.site.node, daemon.incarnation), config, transfers, daemon.clock)
        self._link = type("FleetLinkOfOne", (FleetLink,), {"daemon": daemon})

    def update(self, records: Sequence[NodeRecord]) -> None:
        """See `Peers.update`."""
        super().update(records)
        for link in self._links.values():
            link.__class__ = self._link


# ---- the owner's side


async def _hello(daemon: Daemon, request: pb.HelloRequest) -> pb.HelloResponse:
    daemon.node_now()
    return pb.HelloResponse(
        protocol_version=PROTOCOL_VERSION,
        node_id=daemon.site.node,
        incarnation=daemon.incarnation,
        arena_id=daemon.arena.number,
        arena_bytes=len(daemon.arena.memory),
        base_address=0,
        transfers=[pb.TransferOffer(name=its.name, metadata=its.metadata()) for its in daemon.transfers],
    )


async def _acquire(daemon: Daemon, request: pb.AcquireRequest) -> pb.AcquireResponse:
    node, config = daemon.node_now(), daemon.fleet.config
    me = (daemon.site.node, daemon.incarnation)
    event = wire.acquire(request, me, config.max_keys_per_call, daemon.fleet.tier.extent_bytes)
    reply = await node.execute(event)
    assert isinstance(reply, m.Leased)
    return wire.leased(reply, daemon.arena.number)


async def _release(daemon: Daemon, request: pb.ReleaseLeaseRequest) -> pb.ReleaseLeaseResponse:
    event = wire.release(request, daemon.fleet.config.max_keys_per_call)
    reply = await daemon.node_now().execute(event)
    assert isinstance(reply, m.Released)
    return pb.ReleaseLeaseResponse(valid=reply.valid)


_ANSWERS: dict[str, Any] = {"Hello": _hello, "Acquire": _acquire, "ReleaseLease": _release}
