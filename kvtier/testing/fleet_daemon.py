"""One daemon of a simulated fleet: the real core, node and remote on simulated media."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from kvtier.core.config import TierSpec
from kvtier.errors import Fenced, Unavailable
from kvtier.hashing import Hasher
from kvtier.identity import Identity
from kvtier.interfaces import Tier, TierTraits, Transfer
from kvtier.node import Node
from kvtier.remote.holdings import holdings_of
from kvtier.remote.life import Life, begin_life
from kvtier.remote.pulls import Puller
from kvtier.remote.remote import Remote
from kvtier.testing.fleet_index import IndexClient
from kvtier.testing.fleet_judge import Judge, JudgedCore
from kvtier.testing.fleet_memory import Arena
from kvtier.testing.fleet_peers import FleetPeers
from kvtier.testing.fleet_transfer import Copy, FirstTransfer, SecondTransfer, SimulatedTransfer
from kvtier.testing.fleet_world import Process
from kvtier.types import BlockRecord, Slot, TierKind

if TYPE_CHECKING:
    from kvtier.testing.fleet import Fleet
    from kvtier.testing.fleet_engine import FleetEngine

EPOCH_S: Final = 1_700_000_000
"""What the right wall clock shows at the begin of a history."""


@dataclass(slots=True, eq=False)
class Site:
    """A machine: what outlives its daemons. Another may have a copy of its data directory, with `node` in it.

    Attributes
    ----------
    clock_offset_s
        By so much its clocks are wrong.
    last_incarnation
        As ``node.json`` says.
    """

    name: str
    node: str
    clock_offset_s: float
    last_incarnation: int = 0
    engines: list[FleetEngine] = field(default_factory=list)
    daemon: Daemon | None = None


@dataclass(frozen=True, slots=True)
class _Identity:
    node_id: str
    incarnation: int

    def adopt(self, data_dir: Path, incarnation: int) -> _Identity:
        return replace(self, incarnation=incarnation)


class _Locks:
    """Engines' locks, as the kernel keeps them."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def held(self, engine: str) -> bool:
        return any(its.name == engine for its in self._site.engines)

    def sweep(self, known: set[str]) -> list[str]:
        return []

    def remove(self, engine: str) -> None:
        """The kernel forgot it already."""

    def close(self) -> None:
        """Nothing is open."""


class _Memory(Tier):
    """The arena as a tier; may be of the kind that does not free at once."""

    kind: ClassVar[TierKind] = TierKind.DRAM
    traits: ClassVar[TierTraits] = TierTraits(frees_at_once=True)

    def __init__(self, arena: Arena, spec: TierSpec) -> None:
        self._arena = arena
        self._spec = spec
        self._drops = 0

    @property
    def capacity_bytes(self) -> int:
        return self._spec.capacity_bytes

    @property
    def allocated_bytes(self) -> int:
        return self._spec.allocated_bytes

    @property
    def extent_bytes(self) -> int:
        return self._spec.extent_bytes

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes."""
        return memoryview(self._arena.memory)[slot.offset_bytes : slot.offset_bytes + slot.size_bytes]

    async def open(self) -> None:
        """Always there."""

    async def read(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], into: Sequence[memoryview]
    ) -> list[int]:
        raise AssertionError("an arena is mapped")

    async def write(
        self, slots: Sequence[Slot], records: Sequence[BlockRecord], payloads: Sequence[memoryview]
    ) -> None:
        raise AssertionError("an arena is mapped")

    async def drop(self, slots: Sequence[Slot]) -> None:
        self._drops += 1
        owner = ("drop", self._drops)
        for slot in slots:
            self._arena.own(slot, owner)
        await asyncio.sleep(self._arena.world.rng.expovariate(5))
        for slot in slots:
            self._arena.disown(slot, owner)

    async def close(self) -> None:
        """The memory stays, for whoever still maps it."""


class Daemon(Process):
    """One life of a node, from its start to its death."""

    def __init__(self, fleet: Fleet, site: Site) -> None:
        super().__init__(fleet.world, f"{site.name}'s daemon")
        self.fleet = fleet
        self.site = site
        self.incarnation = 0
        self.is_fenced = False
        self.node: Node | None = None
        self.remote: Remote | None = None
        fleet.arenas.append((Arena(fleet.world, len(fleet.arenas), fleet.tier.capacity_bytes), self))
        self.arena = fleet.arenas[-1][0]
        kinds: list[type[SimulatedTransfer]] = [FirstTransfer, SecondTransfer]
        self.transfers = [
            kind(self, self.arena, fleet.fates, self._transfer_of) for kind in kinds[: fleet.ways]
        ]
        self.judge = Judge(
            self, fleet.truth, self.arena, fleet.core_config, site.node, self.clock, self._counts_as_live
        )

    def clock(self) -> float:
        """This machine's monotonic clock."""
        return self.world.now_s + self.site.clock_offset_s

    def node_now(self) -> Node:
        """The node, once it serves."""
        if self.node is None or self.dead:
            raise Unavailable("the daemon does not serve yet")
        return self.node

    def _counts_as_live(self, node: str, incarnation: int) -> bool:
        assert self.remote is not None
        record = self.remote.membership.live.get(node)
        return record is not None and record.incarnation == incarnation

    def _transfer_of(self, arena: int, name: str) -> SimulatedTransfer:
        owner = self.fleet.arenas[arena][1]
        return next(transfer for transfer in owner.transfers if transfer.name == name)

    # ---- life

    async def run(self) -> None:
        """Start and serve until killed, or fenced."""
        site, config = self.site, self.fleet.config
        index = IndexClient(self.fleet.index, site.name)
        begin = max(site.last_incarnation + 1, int(EPOCH_S + self.clock()))
        life = await begin_life(index, cast(Identity, _Identity(site.node, begin)), config)
        site.last_incarnation = self.incarnation = life.identity.incarnation
        self.judge.incarnation = self.incarnation
        self.node = node = self._make_node(life, index)
        await node.start()
        node.join(site.name)
        assert node.failed is not None
        error = await node.failed
        if not isinstance(error, Fenced):
            self.world.judge(error)
            return
        self.world.count("fenced")
        self.is_fenced = True
        await self.stop()

    def _make_node(self, life: Life, index: IndexClient) -> Node:
        fleet = self.fleet
        spec = replace(fleet.tier, arena=self.arena.number)
        core = JudgedCore(fleet.core_config, [spec], self.incarnation, self.judge)
        transfers: list[Transfer] = []
        peers = FleetPeers(self, fleet.config, transfers)
        memory = _Memory(self.arena, spec)
        hasher = Hasher({memory.kind: memory})
        puller = Puller(peers, transfers, memory.view, hasher, fleet.config, fleet.metrics, clock=self.clock)

        async def open_transfers() -> list[Transfer]:
            return list(self.transfers)

        self.remote = Remote(
            index=index,
            peers=peers,
            puller=puller,
            transfers=transfers,
            open_transfers=open_transfers,
            holdings=holdings_of(core, fleet.config.max_pulls),
            life=life,
            config=fleet.config,
            metrics=fleet.metrics,
            clock=self.clock,
        )
        return Node(
            core=core,
            tiers=[memory],
            identity=life.identity,
            locks=cast(Any, _Locks(self.site)),
            config=fleet.config,
            metrics=fleet.metrics,
            hasher=hasher,
            remote=self.remote,
            clock=self.clock,
            seed=self.incarnation,
        )

    async def stop(self) -> None:
        """As an operator stops it: once the node has stopped, every pull has ended and nothing is written."""
        if self.node is not None:
            await self.node.stop()
            running = sum(isinstance(writer, Copy) for writer in self.arena.running.values())
            if not self.dead and (self.judge.pulls or running):
                self.world.violate(f"{self.name} stopped, but pulls go on in {running} pages")
        self.end()

    def end(self) -> None:
        """It is gone, and every task of it; what it wrote stays in its arena."""
        for transfer in self.transfers:
            transfer.stop_now()
        self.kill()
        if self.site.daemon is self:
            self.site.daemon = None
