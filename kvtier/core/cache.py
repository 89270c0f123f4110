"""The core: decides which block lies where, who may read or write it, and what goes first.

Pure: it is told events with the time, and answers actions. It never awaits, opens or measures
anything, so the same code runs in the daemon, in the seeded simulator and in trace replay.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse
from typing import Final

from kvtier.core import messages as m
from kvtier.core.blocks import RESIDENT, Block
from kvtier.core.checks import check_core
from kvtier.core.config import CALL_ID_BYTES, CoreConfig, TierSpec
from kvtier.core.copies import Copies
from kvtier.core.demotes import Demotes
from kvtier.core.engine_blocks import EngineBlocks
from kvtier.core.engines import Engine, Engines, is_peer
from kvtier.core.leases import Leases
from kvtier.core.lending import Lending
from kvtier.core.lower import LowerTier
from kvtier.core.pins import Pins
from kvtier.core.policies import LruPolicy
from kvtier.core.promotes import Promotes
from kvtier.core.publishing import Publishing
from kvtier.core.pulls import Pulls
from kvtier.core.replies import ReplyCache
from kvtier.core.reservations import Reservations
from kvtier.core.residency import Residency
from kvtier.core.stats import BlockPlace, CoreStats, Counters
from kvtier.core.verifies import Verifies
from kvtier.core.views import places_of, stats_of, tier_of
from kvtier.errors import InvalidRequest, LimitExceeded
from kvtier.interfaces import Policy
from kvtier.types import KEY_SIZE_BYTES, MAX_SHARDS, BlockId, Key, Slot, TierKind

_KEY_SIZES: Final = {KEY_SIZE_BYTES}


class CacheCore:
    """One node's cache.

    Parameters
    ----------
    config
        Times and bounds.
    tiers
        What blocks can lie in, each kind once. New blocks go to the fastest, the top tier, from which
        engines and peers read; they are demoted to the next one, and fetched back from any. HBM is none of
        this chain: it has second copies of what lies in the top tier, for engines that map it.
    policy
        Makes one eviction policy for each tier and slot size.
    seed
        Must differ for each incarnation of a node (use the incarnation): the ids of leases and
        reservations start from it, so that one of an earlier incarnation is unknown, not mistaken.

    Not thread-safe: one caller, one event at a time. `now_s` must never decrease.
    """

    def __init__(
        self,
        config: CoreConfig,
        tiers: Sequence[TierSpec],
        policy: Callable[[], Policy] = LruPolicy,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.counters = Counters()
        top, *below = sorted(
            (spec for spec in tiers if spec.kind is not TierKind.HBM), key=lambda spec: spec.kind.rank
        )
        device = next((spec for spec in tiers if spec.kind is TierKind.HBM), None)
        publishing = Publishing() if config.has_index else None
        self.residency = Residency([top], policy, self.counters, publishing=publishing, demotes=bool(below))
        self.lower: list[LowerTier] = []
        self.demotes: list[Demotes] = []
        upper = self.residency
        for spec in below:
            is_last = spec is below[-1]
            above = [self.residency, *self.lower]
            tier = LowerTier(spec, policy, config, above, publishing=publishing, demotes=not is_last)
            upper.leaving = tier.left_above
            self.lower.append(tier)
            self.demotes.append(Demotes(config, upper, tier))
            upper = tier
        self.engines = Engines(config, self.residency)
        self.engine_blocks = EngineBlocks(config.max_engine_blocks, is_published=config.has_index)
        self.leases = Leases(config, self.residency, self.counters)
        self.copies: Copies | None = None
        self.promotes: Promotes | None = None
        if device is not None:
            self._hold_copies(device, policy)
        self.copying: list[Demotes] = [*self.demotes, *([self.promotes] if self.promotes else [])]
        self.residencies: list[Residency] = [
            self.residency,
            *self.lower,
            *([self.copies] if self.copies else []),
        ]
        self.reservations = Reservations(config, self.residency, self.counters)
        self.pins = Pins(config, self.residency)
        self.pulls = Pulls(config, self.residency, self.lower, self.leases, self.counters)
        self.lending = Lending(config, self.residency, self.lower, self.pulls, self.leases)
        self.verifies = Verifies(config, self.residency, self.leases, self.pins, self.counters)
        self.replies = ReplyCache(config.max_replies, config.max_reply_blocks)
        self._next_id = (random.Random(seed).getrandbits(31) << 32) + 1
        self._handlers: dict[type, Callable[..., list[m.Action]]] = {
            m.RegisterEngine: self._register,
            m.Lookup: self._lookup,
            m.Load: self._load,
            m.Release: self._release,
            m.Reserve: self._reserve,
            m.Commit: self._commit,
            m.Abort: self._abort,
            m.ReportResident: self._report_resident,
            m.Acquire: self._acquire,
            m.Located: self._located,
            m.Pin: self._pin,
            m.Unpin: self._unpin,
            m.Evict: self._evict,
            m.EngineDied: self._engine_died,
            m.Dropped: self._dropped,
            m.Verified: self._verified,
            m.Grow: self._grow,
            m.Scrub: self._scrub,
            m.Tick: self._tick,
            m.Arrived: self._arrived,
            m.PullEnded: self._pull_ended,
            m.Overdue: self._overdue,
            m.Demoted: self._demoted,
            m.Recovered: self._recovered,
            m.TierDown: self._tier_down,
            m.TierUp: self._tier_up,
        }

    def _hold_copies(self, device: TierSpec, policy: Callable[[], Policy]) -> None:
        copies = self.copies = self.leases.copies = Copies(device, policy, self.config, self.residency)
        promotes = self.promotes = Promotes(self.config, self.residency, copies, self.leases)
        below = self.residency.leaving

        def leaving(block: Block) -> None:
            promotes.gone(block)
            copies.left_top(block)
            if below is not None:
                below(block)

        self.residency.leaving = leaving

    # ---- the one mutator

    def handle(self, event: m.Event, now_s: float) -> list[m.Action]:
        """Apply one event.

        Parameters
        ----------
        event
            A request or an observation.
        now_s
            Seconds on any clock that never goes back.

        Returns
        -------
        list of Action
            The reply first if `event` is a request, then instructions for the node. A repeat of a
            call that was answered gives that answer alone.

        Raises
        ------
        KvtierError
            The request is refused; nothing has changed.
        """
        call_id = getattr(event, "call_id", None)
        if call_id is None:
            return self._handlers[type(event)](event, now_s)
        if len(call_id) != CALL_ID_BYTES:
            raise InvalidRequest(f"call_id has {len(call_id)} bytes: send {CALL_ID_BYTES} random ones")
        name = m.peer_name(event.peer) if isinstance(event, m.Acquire) else getattr(event, "engine", "")
        known = self.replies.get(name, call_id)
        if known is not None:
            return [known]
        actions = self._handlers[type(event)](event, now_s)
        self.replies.put(name, call_id, actions[0])  # type: ignore[arg-type]
        return actions

    # ---- reading

    def match(self, keys: Sequence[Key], shards: int) -> int:
        """How many leading keys all of shards 0 .. shards-1 have. Changes nothing, not even recency."""
        for shard in range(shards):
            keys = keys[: len(self.residency.run(keys, shard))]
        return len(keys)

    def reserved_slots(self, engine: str, reservation: int, keys: Sequence[Key]) -> list[Slot]:
        """The slots that a `Commit` of these keys would make visible; raises what the commit would."""
        _, blocks = self.reservations.pending(reservation, self.engines.get(engine), keys)
        return [block.slot() for block in blocks]

    def places(self, keys: Sequence[Key]) -> list[BlockPlace]:
        """Every place of every block that is named, whatever its shard; in the order of `keys`.

        Those in engines' own memory come from `engine_blocks.places`.
        """
        return places_of(self, keys)

    def tier_of(self, block: BlockId) -> TierKind | None:
        """The tier that a block is published in; None where no prompt could reach it."""
        return tier_of(self, block)

    def ids(self) -> dict[int, list[Key]]:
        """Shard -> keys of all that lies in any tier, each once; lost blocks' places may be among them."""
        keys = {shard: list(blocks) for shard, blocks in self.residency.shards.items()}
        above: list[Residency] = [self.residency]
        for tier in self.lower:
            for shard, blocks in tier.shards.items():
                more: Iterable[Key] = blocks
                for its in above:
                    more = filterfalse(its.shards.get(shard, {}).__contains__, more)
                keys.setdefault(shard, []).extend(more)
            above.append(tier)
        return keys

    def stats(self) -> CoreStats:
        """A copy of all figures."""
        return stats_of(self)

    def check(self) -> None:
        """Assert every invariant; costs a walk over everything."""
        check_core(self)

    # ---- validation shared by requests

    def _check_keys(self, keys: Sequence[Key], *, empty: bool = False) -> None:
        if not keys and not empty:
            raise InvalidRequest("no keys were sent: send at least one")
        if len(keys) > self.config.max_keys_per_call:
            raise LimitExceeded(f"{len(keys)} keys were sent: at most {self.config.max_keys_per_call} a call")
        if keys and set(map(len, keys)) != _KEY_SIZES:
            raise InvalidRequest(f"a key has not {KEY_SIZE_BYTES} bytes")

    @staticmethod
    def _check_shard(shard: int) -> None:
        if not 0 <= shard < MAX_SHARDS:
            raise InvalidRequest(f"shard is {shard}: allowed is 0 .. {MAX_SHARDS - 1}")

    @staticmethod
    def _check_request_id(request: str) -> None:
        if not 0 < len(request) <= 256:
            raise InvalidRequest(f"request id has {len(request)} characters: allowed is 1 .. 256")

    def _engine(self, event: m.Load | m.Commit | m.Abort) -> Engine:
        return self.engines.get(event.engine)

    def _all(self, now_s: float, *actions: m.Action) -> list[m.Action]:
        """These, and what the event has brought about besides."""
        result = list(actions)
        leases = self.leases
        if leases.readies:
            result += leases.readies
            leases.readies = []
        if self.copying:
            result += self._demote(now_s)
        for residency in self.residencies:
            if residency.drops:
                result += [m.Drop(kind, slots) for kind, slots in residency.drops.items()]
                residency.drops = {}
        return result + self.residency.changes()

    def _demote(self, now_s: float) -> list[m.Demote]:
        started: list[m.Demote] = []
        for demotes in self.copying:
            started += demotes.start(self._next_id + len(started), now_s)
        self._next_id += len(started)
        return started

    def _tier(self, kind: TierKind) -> Residency:
        return next(its for its in self.residencies if kind in its.tiers)

    def _lower(self, kind: TierKind) -> LowerTier:
        return next(tier for tier in self.lower if tier.kind == kind)

    # ---- requests of engines

    def _register(self, event: m.RegisterEngine, now_s: float) -> list[m.Action]:
        engine = self.engines.register(event, now_s)
        for residency in self.residencies:
            for tier in residency.tiers.values():
                tier.prune()
        return [m.Registered(engine.shape.slot_bytes)]

    def _lookup(self, event: m.Lookup, now_s: float) -> list[m.Action]:
        engine = self.engines.speaking(event.engine, event.fingerprint)
        self._check_keys(event.keys, empty=True)
        self._check_request_id(event.request)
        if not 1 <= event.shard_count <= MAX_SHARDS:
            raise InvalidRequest(f"shard_count is {event.shard_count}: allowed is 1 .. {MAX_SHARDS}")
        reply = self.leases.lookup(event, engine, now_s)
        if reply.reason != "missing":
            return [reply]
        actions: list[m.Action] = [reply]
        if self.lower and self.pulls.is_below(event, reply.blocks):
            reply, fetches = self.pulls.promote(event, reply.blocks, engine, self._next_id, now_s)
            self._next_id += len(fetches)
            actions = self._all(now_s, reply, *fetches)
            if reply.reason not in ("missing", "slow"):  # of what is slow here, a peer may be faster
                return actions
        if self.config.has_index and self.pulls.worth_finding(event, reply.blocks):
            actions.append(m.Find(event, reply.blocks))
        return actions

    def _located(self, event: m.Located, now_s: float) -> list[m.Action]:
        engine = self.engines.speaking(event.lookup.engine, event.lookup.fingerprint)
        reply, pulls = self.pulls.located(event, engine, self._next_id, now_s)
        self._next_id += len(pulls)
        return self._all(now_s, reply, *pulls)

    def _load(self, event: m.Load, now_s: float) -> list[m.Action]:
        engine = self._engine(event)
        self._check_keys(event.keys)
        self._check_shard(event.shard)
        self._check_request_id(event.request)
        reply = self.leases.load(event, self._next_id, engine, now_s)
        self._next_id += 1
        if self.demotes and reply.lease:
            self.demotes[0].used(self.leases.leases[reply.lease].blocks[-1])
        if self.promotes is not None and reply.lease and engine.maps_device:
            lease = self.leases.leases[reply.lease]
            self.promotes.read(lease.blocks[: lease.ready], now_s)
        return [reply]

    def _acquire(self, event: m.Acquire, now_s: float) -> list[m.Action]:
        self._check_keys(event.keys)
        self._check_shard(event.shard)
        peer = self.engines.peer(event.peer, now_s)
        reach = 0
        fetches: list[m.Fetch] = []
        if event.waits and self.lower:
            self.leases.check_leases(peer)
            reach, fetches = self.lending.bring(event, peer, self._next_id, now_s)
            self._next_id += len(fetches)
        reply = self.leases.give(event, self._next_id, peer, now_s, reach)
        self._next_id += 1
        return self._all(now_s, reply, *fetches) if event.waits else [reply]

    def _release(self, event: m.Release, now_s: float) -> list[m.Action]:
        party = self.engines.party(event.engine)
        self._check_keys(event.corrupt_keys, empty=True)
        self._check_shard(event.shard)
        if (event.lease is None) == (event.request is None):
            raise InvalidRequest("a release names either a lease or a request")
        if event.request is not None:
            if is_peer(party.name):
                raise InvalidRequest("a peer has no requests here: name a lease")
            self._check_request_id(event.request)
            return [self.leases.release_hold(event.request, now_s)]
        lease = self.leases.find(event, party)
        corrupt: Iterable[Key] = event.corrupt_keys
        if is_peer(party.name):  # an engine may be believed to know more than its lease
            party.used_s = now_s
            own = set() if lease is None else {block.id for block in lease.blocks}
            corrupt = [key for key in corrupt if BlockId(key, event.shard) in own]
        instructions = self.verifies.reported(corrupt, event.shard, self._next_id)
        self._next_id += len(instructions)
        released = self.leases.release(event, lease, now_s)
        if self.copies is None:
            return [released, *instructions]
        if not is_peer(party.name):
            self._suspect_copies(self.copies, event)
        return self._all(now_s, released, *instructions)

    def _suspect_copies(self, copies: Copies, event: m.Release) -> None:
        """An engine has read wrong bytes, perhaps from copies: they go at once, and can be had anew."""
        found = [copies.get(key, event.shard) for key in dict.fromkeys(event.corrupt_keys)]
        wrong = [copy for copy in found if copy is not None and copy.state == RESIDENT]
        if wrong:
            self.leases.copies_lost(wrong)
            copies.lose_wrong(wrong)

    def _reserve(self, event: m.Reserve, now_s: float) -> list[m.Action]:
        engine = self.engines.speaking(event.engine, event.fingerprint)
        self._check_keys(event.keys)
        self._check_shard(event.shard)
        if event.parent is not None:
            self._check_keys([event.parent])
        reply = self.reservations.reserve(event, self._next_id, engine, now_s)
        self._next_id += 1
        return self._all(now_s, reply)

    def _commit(self, event: m.Commit, now_s: float) -> list[m.Action]:
        engine = self._engine(event)
        self._check_keys(event.keys)
        return self._all(
            now_s,
            m.Committed(self.reservations.commit(event.reservation, engine, event.keys, event.checksums)),
        )

    def _abort(self, event: m.Abort, now_s: float) -> list[m.Action]:
        engine = self._engine(event)
        self._check_keys(event.keys, empty=True)
        return self._all(now_s, m.Aborted(self.reservations.abort(event.reservation, engine, event.keys)))

    def _report_resident(self, event: m.ReportResident, now_s: float) -> list[m.Action]:
        engine = self.engines.get(event.engine)
        self._check_keys(event.added, empty=True)
        self._check_keys(event.removed, empty=True)
        count = self.engine_blocks.report(engine.name, event.added, event.removed, clear=event.clear)
        return [m.Noted(count), *self.engine_blocks.changes()]

    # ---- requests of operators

    def _pin(self, event: m.Pin, now_s: float) -> list[m.Action]:
        self._check_keys(event.keys)
        reply = self.pins.pin(event, self._next_id, now_s)
        self._next_id += 1
        return [reply]

    def _unpin(self, event: m.Unpin, now_s: float) -> list[m.Action]:
        if (event.pin is None) == (not event.keys):
            raise InvalidRequest("an unpin names either a pin or keys")
        self._check_keys(event.keys, empty=True)
        return [m.Unpinned(self.pins.unpin(event))]

    def _evict(self, event: m.Evict, now_s: float) -> list[m.Action]:
        self._check_keys(event.keys)
        evicted, kept = self.residency.evict_named(event.keys)
        for tier in self.lower:
            dropped, used = tier.evict_named(event.keys)
            evicted, kept = evicted + dropped, kept + used
        return self._all(now_s, m.Evicted(evicted, kept))

    # ---- observations

    def _engine_died(self, event: m.EngineDied, now_s: float) -> list[m.Action]:
        engine = self.engines.by_name.get(event.engine)
        if engine is None:
            return []
        self.leases.engine_died(engine)
        self.reservations.engine_died(engine)
        self.engines.remove(engine)
        self.engine_blocks.forget(engine.name)
        self.replies.forget(engine.name)
        self.counters.dead_engines += 1
        return [*self._all(now_s), *self.engine_blocks.changes()]

    def _dropped(self, event: m.Dropped, now_s: float) -> list[m.Action]:
        self._tier(event.tier).dropped(event.tier, event.slots)
        for demotes in self.copying:
            demotes.room_made()
        return self._all(now_s)

    def _verified(self, event: m.Verified, now_s: float) -> list[m.Action]:
        block = self.verifies.in_flight[event.verify]
        instructions = self.verifies.verified(event)
        if not event.intact:
            for demotes in self.copying:
                demotes.block_lost(block)
        return self._all(now_s, *instructions)

    def _arrived(self, event: m.Arrived, now_s: float) -> list[m.Action]:
        self.pulls.arrived(event, now_s)
        return self._all(now_s)

    def _pull_ended(self, event: m.PullEnded, now_s: float) -> list[m.Action]:
        self._lost_below(self.pulls.ended(event, now_s))
        return self._all(now_s)

    def _overdue(self, event: m.Overdue, now_s: float) -> list[m.Action]:
        self.pulls.overdue(event, now_s)
        return self._all(now_s)

    def _demoted(self, event: m.Demoted, now_s: float) -> list[m.Action]:
        demotes = next(its for its in self.copying if event.demote in its.running)
        corrupt = demotes.ended(event, now_s)
        if isinstance(demotes.upper, LowerTier):
            self._lost_below(demotes.upper.lose_wrong(corrupt))
            return self._all(now_s)
        instructions: list[m.Action] = []
        for block in corrupt:
            verifies = self.verifies.reported([block.id.key], block.id.shard, self._next_id)
            self._next_id += len(verifies)
            instructions += verifies
        return self._all(now_s, *instructions)

    def _lost_below(self, blocks: Sequence[Block]) -> None:
        """These were wrong in a lower tier, and demotes from there may be reading their slots."""
        for demotes in self.demotes:
            for block in blocks:
                demotes.block_lost(block)

    def _recovered(self, event: m.Recovered, now_s: float) -> list[m.Action]:
        tier = self._lower(event.tier)
        assert tier.is_recovering, "a tier has said already all that it found"
        tier.recover(event.blocks)
        if event.is_last:
            tier.map.order_free_extents()
        tier.is_recovering = not event.is_last
        return self._all(now_s)

    def _tier_down(self, event: m.TierDown, now_s: float) -> list[m.Action]:
        self._lower(event.tier).is_down = True
        return []

    def _tier_up(self, event: m.TierUp, now_s: float) -> list[m.Action]:
        self._lower(event.tier).is_down = False
        for demotes in self.demotes:
            demotes.back()
        return self._all(now_s)

    def _grow(self, event: m.Grow, now_s: float) -> list[m.Action]:
        self._tier(event.tier).tiers[event.tier].grow(event.allocated_bytes)
        return []

    def _scrub(self, event: m.Scrub, now_s: float) -> list[m.Action]:
        instructions = self.verifies.scrub(event.blocks, self._next_id)
        self._next_id += len(instructions)
        return list(instructions)

    def _tick(self, event: m.Tick, now_s: float) -> list[m.Action]:
        self.leases.expire(now_s)
        self.pins.expire(now_s)
        self.reservations.expire(now_s)
        for name in self.engines.forget_idle_peers(now_s):
            self.replies.forget(name)
        return self._all(now_s)
