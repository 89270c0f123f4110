"""Which engines are registered, with which layout, and what each of them occupies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvtier.core.blocks import Shape
from kvtier.core.config import CoreConfig
from kvtier.core.ledger import Ledger
from kvtier.core.messages import RegisterEngine
from kvtier.core.residency import Residency
from kvtier.core.stats import EngineStats
from kvtier.errors import Conflict, InvalidRequest, LimitExceeded, UnknownId
from kvtier.types import Layout

if TYPE_CHECKING:
    from kvtier.core.leases import Lease
    from kvtier.core.reservations import Reservation

_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")
_MAX_DESCRIPTION: Final = 256


class Engine:
    """One engine process, from its registration to the proof of its death."""

    __slots__ = (
        "description",
        "layout",
        "leases",
        "ledger",
        "name",
        "quarantined_bytes",
        "registered_at_s",
        "reservations",
        "reserved_bytes",
        "shape",
    )

    def __init__(self, name: str, description: str, layout: Layout, shape: Shape, now_s: float) -> None:
        self.name = name
        self.description = description
        self.layout = layout
        self.shape = shape
        self.registered_at_s = now_s
        self.ledger = Ledger()
        self.leases: dict[int, Lease] = {}
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
    """The register."""

    def __init__(self, config: CoreConfig, residency: Residency) -> None:
        self._config = config
        self._residency = residency
        self.by_name: dict[str, Engine] = {}

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
        engine = Engine(event.engine, event.description[:_MAX_DESCRIPTION], layout, shape, now_s)
        self.by_name[event.engine] = engine
        self._residency.add_ledger(engine.ledger)
        return engine

    def remove(self, engine: Engine) -> None:
        """It is dead. Its ledger lives as long as holds are charged to it."""
        del self.by_name[engine.name]
        engine.ledger.closed = True

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
