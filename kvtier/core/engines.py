"""Who has rights: engines, registered with their layout, and peers; and what each of them occupies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvtier.core.blocks import Shape
from kvtier.core.config import CoreConfig
from kvtier.core.ledger import Ledger
from kvtier.core.messages import RegisterEngine, peer_name
from kvtier.core.residency import Residency
from kvtier.core.stats import EngineStats
from kvtier.errors import Conflict, InvalidRequest, LimitExceeded, UnknownId

if TYPE_CHECKING:
    from kvtier.core.leases import Lease
    from kvtier.core.reservations import Reservation

_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")
_MAX_DESCRIPTION: Final = 256
_PEER: Final = peer_name("")


def is_peer(name: str) -> bool:
    """Whether a party of this name is a peer."""
    return name.startswith(_PEER)


class Party:
    """Whoever may lease: an engine of this node, or a peer.

    `share` of a tier's allocated bytes is what its leases and holds may protect. `used_s` is when a peer
    last asked for anything.
    """

    __slots__ = ("leases", "ledger", "name", "share", "used_s")

    def __init__(self, name: str, share: float, now_s: float) -> None:
        self.name = name
        self.share = share
        self.ledger = Ledger()
        self.leases: dict[int, Lease] = {}
        self.used_s = now_s


class Engine(Party):
    """One engine process, from its registration to the proof of its death."""

    __slots__ = (
        "description",
        "layout",
        "maps_device",
        "quarantined_bytes",
        "registered_at_s",
        "reservations",
        "reserved_bytes",
        "shape",
    )

    def __init__(self, event: RegisterEngine, shape: Shape, share: float, now_s: float) -> None:
        super().__init__(event.engine, share, now_s)
        self.description = event.description[:_MAX_DESCRIPTION]
        self.layout = event.layout
        self.maps_device = event.maps_device
        self.shape = shape
        self.registered_at_s = now_s
        self.reservations: dict[int, Reservation] = {}
        self.reserved_bytes = 0
        self.quarantined_bytes = 0

    def stats(self) -> EngineStats:
        """A copy of its figures."""
        return EngineStats(
            engine=self.name,
            description=self.description,
            fingerprint=self.shape.fingerprint,
            slot_bytes=self.shape.slot_bytes,
            leased_bytes=self.ledger.bytes,
            reserved_bytes=self.reserved_bytes,
            quarantined_bytes=self.quarantined_bytes,
            leases=len(self.leases),
            registered_at_s=self.registered_at_s,
        )


class Engines:
    """The register of all parties, by name."""

    def __init__(self, config: CoreConfig, residency: Residency) -> None:
        self._config = config
        self._residency = residency
        self.by_name: dict[str, Engine] = {}
        self.peers: dict[str, Party] = {}

    def get(self, name: str) -> Engine:
        """The engine, or `UnknownId`: after a restart of the node every engine has to register again."""
        engine = self.by_name.get(name)
        if engine is None:
            raise UnknownId(f"engine {name[:64]!r} is not registered here: register first")
        return engine

    def speaking(self, name: str, fingerprint: bytes) -> Engine:
        """The engine, which must be registered under the layout it names."""
        engine = self.get(name)
        if fingerprint != engine.shape.fingerprint:
            raise Conflict(
                "the request names another layout than this engine is registered with: register anew"
            )
        return engine

    def register(self, event: RegisterEngine, now_s: float) -> Engine:
        """Enter an engine, or find it entered in the same way."""
        self._validate(event)
        known = self.by_name.get(event.engine)
        if known is not None:
            return known
        layout = event.layout
        shape = Shape(event.fingerprint, layout.block_bytes, layout.slot_bytes)
        engine = Engine(event, shape, self._config.max_leased_fraction, now_s)
        self.by_name[event.engine] = engine
        self._residency.add_ledger(engine.ledger)
        return engine

    def remove(self, engine: Engine) -> None:
        """It is dead. Its ledger lives as long as holds are charged to it."""
        del self.by_name[engine.name]
        engine.ledger.closed = True

    # ---- peers

    def party(self, name: str) -> Party:
        """The engine, or the peer that has asked for blocks not long ago; else `UnknownId`."""
        peer = self.peers.get(name)
        return self.get(name) if peer is None else peer

    def peer(self, node: str, now_s: float) -> Party:
        """The peer, which is known from now on, and for as long as it has leases or asks for some."""
        if not _NAME.fullmatch(node):
            raise InvalidRequest(f"node id {node[:64]!r} is not allowed: 1 to 64 of a-z, 0-9 and -")
        name = peer_name(node)
        peer = self.peers.get(name)
        if peer is None:
            if len(self.peers) >= self._config.max_peers:
                raise LimitExceeded(f"{len(self.peers)} peers have leases: raise max_peers")
            peer = self.peers[name] = Party(name, self._config.max_given_fraction, now_s)
            self._residency.add_ledger(peer.ledger)
        peer.used_s = now_s
        return peer

    def forget_idle_peers(self, now_s: float) -> list[str]:
        """Names of those that have no lease and whose last one would have run out by now; they are gone."""
        idle = [
            name
            for name, peer in self.peers.items()
            if not peer.leases and peer.used_s + self._config.lease_ttl_s <= now_s
        ]
        for name in idle:
            self.peers.pop(name).ledger.closed = True
        return idle

    def _validate(self, event: RegisterEngine) -> None:
        if not _NAME.fullmatch(event.engine):
            raise InvalidRequest(f"engine id {event.engine[:64]!r} is not allowed: 1 to 64 of a-z, 0-9 and -")
        if event.layout.fingerprint() != event.fingerprint:
            raise InvalidRequest(
                "fingerprint is not that of the layout sent with it: the two sides differ in version"
            )
        known = self.by_name.get(event.engine)
        if known is not None and known.layout != event.layout:
            raise Conflict(f"engine {event.engine!r} is registered with another layout: use a new engine id")
        for other in self.by_name.values():
            if other.shape.fingerprint == event.fingerprint and other.layout != event.layout:
                raise Conflict(f"engine {other.name!r} registered another layout under this fingerprint")
        if known is None and len(self.by_name) >= self._config.max_engines:
            raise LimitExceeded(f"{len(self.by_name)} engines are registered: raise max_engines or stop some")
        largest = min(tier.spec.extent_bytes for tier in self._residency.tiers.values())
        if event.layout.slot_bytes > largest:
            raise InvalidRequest(
                f"a block takes a slot of {event.layout.slot_bytes} bytes, more than an extent of {largest}: "
                "raise extent_bytes in the node's configuration"
            )
