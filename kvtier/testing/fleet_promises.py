"""What a core has promised, as whoever was promised may understand it, and what it may not promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.core import messages as m
from kvtier.core.config import CoreConfig
from kvtier.hashing import checksum
from kvtier.testing.fleet_memory import Arena, Version, version_of
from kvtier.testing.fleet_world import Process, World
from kvtier.testing.simulated_node import PageId, pages_of
from kvtier.types import BlockId, Key, Slot


@dataclass(slots=True)
class Party:
    """A lease as its holder may understand it: of `promised` blocks those in `slots` are named.

    `is_void`: a block of it was found corrupt, so that it protects nothing any more.
    """

    name: str
    blocks: list[BlockId]
    slots: list[Slot]
    promised: int
    deadline_s: float
    is_told_all: bool
    is_void: bool = False


@dataclass(slots=True)
class Offer:
    """Until `deadline_s` a load of one of these shards must find `blocks` of the keys, here or coming."""

    keys: list[Key]
    shards: list[int]
    blocks: int
    deadline_s: float


@dataclass(slots=True)
class RunningPull:
    """A pull that the core has begun and nobody has ended, and the leases that were granted to it."""

    action: m.Pull
    arrived: int = 0
    leases: list[tuple[Promises, int]] = field(default_factory=list)


@dataclass(slots=True)
class Grant:
    """What a `Reserve` granted and nobody has committed or aborted yet."""

    engine: str
    slots: dict[Key, Slot]


@dataclass(slots=True)
class Truth:
    """What no node can know: all that was ever committed."""

    committed: dict[BlockId, dict[Version, None]] = field(default_factory=dict)
    checks_cores: bool = True


class Promises:
    """The promises of one core; told of each by `Judge`.

    Parameters
    ----------
    clock
        The node's.
    counts_as_live
        Whether this node's membership has this incarnation of a node.
    """

    def __init__(
        self,
        process: Process,
        truth: Truth,
        arena: Arena,
        config: CoreConfig,
        node: str,
        clock: Callable[[], float],
        counts_as_live: Callable[[str, int], bool],
    ) -> None:
        self.process = process
        self.world: World = process.world
        self.truth = truth
        self.arena = arena
        self.config = config
        self.node = node
        self.incarnation = 0
        self.clock = clock
        self.leases: dict[int, Party] = {}
        self.offers: dict[str, Offer] = {}
        self.pulls: dict[int, RunningPull] = {}
        self.grants: dict[int, Grant] = {}
        self.slot_bytes: dict[Key, int] = {}
        self._pulling: dict[BlockId, int] = {}
        self._counts_as_live = counts_as_live

    # ---- replies

    def offered(self, lookup: m.Lookup, reply: m.Offered, now_s: float) -> None:
        """A hold began, or was renewed."""
        if not 0 <= reply.coming <= reply.blocks <= len(lookup.keys):
            self.world.violate(f"an offer of {reply.blocks} blocks with {reply.coming} coming")
        self.world.count("offered", reply.blocks)
        self.world.count("offered coming", reply.coming)
        self.offers.pop(lookup.request, None)
        if reply.blocks:
            shards = list(range(lookup.shard_count))
            deadline_s = now_s + reply.hold_ttl_s
            self.offers[lookup.request] = Offer(list(lookup.keys), shards, reply.blocks, deadline_s)

    def loaded(self, event: m.Load, reply: m.Leased, now_s: float) -> None:
        """A lease for an engine; what was held for it has to be in it."""
        offer = self.offers.get(event.request)
        promised = len(reply.slots) + reply.coming
        if offer is not None and event.shard in offer.shards:
            offer.shards.remove(event.shard)
            held = offer.keys[: offer.blocks]
            if now_s < offer.deadline_s and list(event.keys[: len(held)]) == held and promised < len(held):
                self.world.violate(f"{len(held)} blocks were held, {promised} are here or coming")
        self._leased(event.engine, event.keys, event.shard, reply, now_s)

    def acquired(self, event: m.Acquire, reply: m.Leased, now_s: float) -> None:
        """A lease for a peer, within its share."""
        if reply.coming:
            self.world.violate("a peer was promised blocks that are not here")
        name = m.peer_name(event.peer)
        self._leased(name, event.keys, event.shard, reply, now_s)
        given = {slot: None for its in self.leases.values() if its.name == name for slot in its.slots}
        limit = len(self.arena.memory) * self.config.max_given_fraction
        if sum(slot.size_bytes for slot in given) > limit:
            self.world.violate(f"{name} leases more than its share")

    def _leased(self, name: str, keys: Sequence[Key], shard: int, reply: m.Leased, now_s: float) -> None:
        promised = len(reply.slots) + reply.coming
        if bool(reply.lease) != bool(promised) or promised > len(keys):
            self.world.violate(f"lease {reply.lease} of {promised} blocks for {len(keys)} keys")
        if not reply.lease:
            return
        blocks = [BlockId(key, shard) for key in keys[:promised]]
        deadline_s = now_s + reply.lease_ttl_s
        self.leases[reply.lease] = Party(
            name, blocks, list(reply.slots), promised, deadline_s, not reply.coming
        )

    def released(self, event: m.Release, reply: m.Released, now_s: float) -> None:
        """A lease or a hold ended."""
        if event.request is not None:
            self.offers.pop(event.request, None)
        if event.lease is None:
            return
        lease = self.leases.pop(event.lease, None)
        if reply.valid and (lease is None or lease.is_void or lease.deadline_s <= now_s):
            self.world.violate("a lease that is over was released as valid")

    def reserved(self, event: m.Reserve, reply: m.Reserved) -> None:
        """Slots for a store."""
        granted = {key: slot for key, slot in zip(event.keys, reply.slots, strict=True) if slot is not None}
        for key, slot in granted.items():
            self._give(key, slot, ("store", reply.reservation))
        if granted:
            self.world.count("granted", len(granted))
            self.grants[reply.reservation] = Grant(event.engine, granted)

    def _give(self, key: Key, slot: Slot, owner: tuple[str, int]) -> None:
        self.slot_bytes[key] = slot.size_bytes
        pages = pages_of(slot)
        for lease in self.leases.values():
            if not lease.is_void and _overlap(pages, lease.slots):
                self.world.violate(f"slot {slot} was given to {owner} while it is leased to {lease.name}")
        self.arena.own(slot, owner)

    def disown(self, reservation: int, keys: Sequence[Key]) -> None:
        """These slots of a reservation are written no more."""
        grant = self.grants[reservation]
        for key in list(keys):
            self.arena.disown(grant.slots.pop(key), ("store", reservation))
        if not grant.slots:
            del self.grants[reservation]

    def engine_died(self, engine: str) -> None:
        """Nothing of it reads or writes any more."""
        self.leases = {id: its for id, its in self.leases.items() if its.name != engine}
        for id in [id for id, grant in self.grants.items() if grant.engine == engine]:
            self.disown(id, list(self.grants[id].slots))

    # ---- pulls

    def located(self, event: m.Located) -> None:
        """Only places that count may be counted."""
        for shard in event.places:
            for place in (place for places in shard for place in places):
                if place.node == self.node or not self._counts_as_live(place.node, place.incarnation):
                    self.world.violate(f"a place at {place} counted")

    def pull_begins(self, pull: m.Pull) -> None:
        """Its slots are nobody else's, and within bounds."""
        if pull.pull in self.pulls or not pull.keys or len(pull.keys) != len(pull.slots):
            self.world.violate(f"pull {pull.pull} is no new pull of {len(pull.keys)} blocks")
        if pull.node == self.node or not self._counts_as_live(pull.node, pull.incarnation):
            self.world.violate(f"a pull from {pull.node}, incarnation {pull.incarnation}")
        self.world.count("pulled", len(pull.keys))
        self.pulls[pull.pull] = RunningPull(pull)
        for key, slot in zip(pull.keys, pull.slots, strict=True):
            self._give(key, slot, ("pull", pull.pull))
            self._pulling[BlockId(key, pull.shard)] = pull.pull
        filling = sum(
            slot.size_bytes for its in self.pulls.values() for slot in its.action.slots[its.arrived :]
        )
        limit = len(self.arena.memory) * self.config.max_pulled_fraction
        if len(self.pulls) > self.config.max_pulls or filling > limit:
            self.world.violate(f"{len(self.pulls)} pulls fill {filling} bytes: more than their bound")

    def granted_by(
        self, owner: Promises, asked: tuple[str, int], shard: int, keys: Sequence[Key], lease: int
    ) -> None:
        """A peer granted this lease, perhaps to a pull that wants these blocks from it."""
        if owner.incarnation != asked[1]:  # Acquire does not name the node that it is for
            self.world.violate("another life of a node than the one that was asked gave a lease")
        pull = self.pulls.get(self._pulling.get(BlockId(keys[0], shard), 0))
        if pull is not None and (pull.action.node, pull.action.incarnation) == asked:
            pull.leases.append((owner, lease))

    def arrived(self, event: m.Arrived) -> None:
        """Bytes are right, and were so under a lease."""
        pull = self.pulls.get(event.pull)
        if pull is None or pull.arrived + len(event.checksums) > len(pull.action.keys):
            self.world.violate(f"pull {event.pull} brings more than it was to bring")
            return
        action = pull.action
        self._judge_lease(pull)
        for checksum_ in event.checksums:
            block, slot = BlockId(action.keys[pull.arrived], action.shard), action.slots[pull.arrived]
            content = self.arena.read(slot)[: action.block_bytes]
            if not self.arena.is_flipped(slot) and (
                version_of(block, content) not in self.truth.committed.get(block, {})
                or checksum(memoryview(content)) != checksum_
            ):
                self.world.violate("a pulled block has wrong bytes")
            self.arena.disown(slot, ("pull", event.pull))
            del self._pulling[block]
            pull.arrived += 1
        self.world.count("arrived", len(event.checksums))

    def _judge_lease(self, pull: RunningPull) -> None:
        for owner, id in pull.leases:
            lease = owner.leases.get(id)
            if owner.process.dead or (lease is not None and owner.clock() < lease.deadline_s):
                return  # what came before its death is as good as ever
        self.world.violate("blocks of a pull were trusted though its lease is over")

    def pull_ended(self, event: m.PullEnded) -> None:
        """Once each; what has not arrived never will."""
        pull = self.pulls.pop(event.pull, None)
        if pull is None:
            self.world.violate(f"pull {event.pull} ended, which is not running")
            return
        self.world.count("pull failed" if event.fault else "pull ended")
        missing = pull.action.keys[pull.arrived :]
        for key, slot in zip(missing, pull.action.slots[pull.arrived :], strict=True):
            self.arena.disown(slot, ("pull", event.pull))
            del self._pulling[BlockId(key, pull.action.shard)]
        for key in missing:
            self._cut(BlockId(key, pull.action.shard))

    def _cut(self, block: BlockId) -> None:
        """It will not come: what was promised ends before it."""
        for lease in self.leases.values():
            if block in lease.blocks:
                lease.promised = min(lease.promised, lease.blocks.index(block))
        for offer in self.offers.values():
            if block.key in offer.keys[: offer.blocks]:
                offer.blocks = offer.keys.index(block.key)

    def nobody_waits_in_vain(self) -> None:
        """A lease that was not told its last is told more, or ends: what it waits for is on its way."""
        for id, lease in self.leases.items():
            waits = not lease.is_told_all and not lease.is_void
            if waits and lease.blocks[len(lease.slots)] not in self._pulling:
                self.world.violate(f"lease {id} waits for blocks that nobody brings")

    def ready(self, ready: m.Ready) -> None:
        """In order, and to the last."""
        lease = self.leases.get(ready.lease)
        if lease is None or lease.is_told_all or ready.first != len(lease.slots):
            self.world.violate(f"lease {ready.lease} is told of blocks that it does not wait for")
            return
        lease.slots += ready.slots
        lease.is_told_all = ready.is_last
        if len(lease.slots) > len(lease.blocks):
            self.world.violate("a lease is told of more blocks than it has")
        if ready.is_last and len(lease.slots) < lease.promised and not lease.is_void:
            self.world.violate("a lease is told that no more blocks come, but they do")
        self.world.count("ready", len(ready.slots))


def _overlap(pages: Sequence[PageId], slots: Sequence[Slot]) -> bool:
    return any(page in pages for slot in slots for page in pages_of(slot))
