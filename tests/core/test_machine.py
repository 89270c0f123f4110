"""Any order of events: `check()` after each, and what is visible as a model of one page says.

The model: a key of a shard is visible iff it was committed or has arrived, and was neither evicted, dropped
nor lost since, and a prompt can load the leading keys that are visible, and those that pulls bring. What the
core evicts by itself is learnt from it, but never a protected block, never anything while there is room,
never a block before those that continue it. What is published is what is visible.

There may be tiers below, far memory and NVMe. Each has its own model, of what demotes have written, what was
said to have been found at the start, and nobody dropped since; what fetches bring comes like what pulls do.
There may be device memory: what promotes have written there and nobody dropped since, of what is visible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.core import messages as m
from kvtier.core.cache import CacheCore
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.core.policies import POLICIES
from kvtier.core.stats import BlockPlace
from kvtier.errors import Conflict, LimitExceeded, UnknownId
from kvtier.types import BlockId, BlockRecord, Key, Layout, LayoutKind, LayoutOrder, Location, Slot, TierKind

PAGE = 4096
ENGINES = {"a": 1, "b": 1, "c": 2}
SHARDS = (0, 1)
NODES = ("p", "q")
NODES_OF = {
    letter: [Location(node, 1, TierKind.DRAM) for node in nodes]
    for letter, nodes in {"p": "p", "q": "q", "b": "pq", "-": ""}.items()
}
PLACES = st.sampled_from(("pppppp", "qqbpqp", "bbqqpp", "ppp", "pp-pp"))
PARENTS: dict[Key, Key | None] = {}
PATHS = st.lists(st.sampled_from((0, 0, 0, 1)), min_size=1, max_size=6)


def _layout(pages: int) -> Layout:
    return Layout(LayoutKind.MLA, 1, 1, PAGE * pages, "uint8", 1, LayoutOrder.NHD, PAGE * pages)


LAYOUTS = {pages: _layout(pages) for pages in ENGINES.values()}


def _keys(pages: int, path: list[int]) -> list[Key]:
    key = bytes([pages])
    keys: list[Key] = []
    for turn in path:
        key = hashlib.sha256(key + bytes([turn])).digest()
        PARENTS[key] = keys[-1] if keys else None
        keys.append(key)
    return keys


@dataclass
class Read:
    """A lease: of `keys` the first `told` are named, and as many as `promised` will be, or it is told not.

    A peer's is never told more, but what comes has its place under it.
    """

    party: str
    shard: int
    keys: list[Key]
    deadline_s: float
    told: int
    promised: int
    waits: bool
    is_peer: bool = False
    copies: dict[Key, Slot] = field(default_factory=dict)


@dataclass
class Coming:
    """What a pull or a fetch brings; nobody waits for the rest of one that is overdue."""

    shard: int
    keys: list[Key]
    fetch: m.Fetch | None = None
    arrived: int = 0
    is_overdue: bool = False


@dataclass
class Going:
    """A demote; of what was lost above meanwhile nobody knows what was copied."""

    demote: m.Demote
    names: list[tuple[int, Key]]
    lost: set[int] = field(default_factory=set)


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.calls = 0
        self.engines: set[str] = set()
        self.visible: dict[tuple[int, Key], Key | None] = {}  # (shard, key) -> parent
        self.reservations: dict[int, tuple[str, int, dict[Key, Key | None], float]] = {}
        self.leases: dict[int, Read] = {}
        self.finds: list[m.Find] = []
        self.pulls: dict[int, Coming] = {}
        self.replicas: set[tuple[int, Key]] = set()
        self.published: dict[tuple[int, Key], TierKind] = {}
        self.own: dict[str, list[Key]] = {}  # what engines said that they have, oldest first
        self.in_hbm: set[Key] = set()
        self.below: dict[TierKind, dict[tuple[int, Key], Key | None]] = {}  # as `visible`
        self.copies: set[tuple[int, Key]] = set()
        self.demotes: dict[int, Going] = {}
        self.is_down = False
        self.invalid: set[int] = set()
        self.verifies: list[m.Verify] = []
        self.drops: list[m.Drop] = []
        self.last: tuple[m.Event, m.Action] | None = None

    @initialize(
        frees_at_once=st.booleans(),
        extents=st.integers(2, 4),
        fraction=st.sampled_from((0.25, 1.0)),
        pulled=st.sampled_from((0.3, 1.0, 1.0)),
        max_pulls=st.sampled_from((1, 8, 8)),
        leased=st.sampled_from((0.5, 1.0)),
        nvme=st.sampled_from((0, 2, 3, 6)),
        nvme_frees_at_once=st.booleans(),
        far=st.sampled_from((0, 0, 1, 2, 4)),
        high=st.sampled_from((0.01, 0.01, 0.6)),
        lent=st.sampled_from((0.3, 0.6, 1.0, 1.0)),
        given=st.sampled_from((0.3, 1.0, 1.0)),
        uses=st.sampled_from((1, 1, 2)),
        batch=st.sampled_from((1, 3, 8)),
        found=PATHS,
        policy=st.sampled_from(sorted(POLICIES)),
        by_worth=st.booleans(),
        hbm=st.sampled_from((0, 0, 1, 2)),
        used=st.sampled_from((1, 2, 2, 3)),
    )
    def begin(
        self,
        frees_at_once: bool,
        extents: int,
        fraction: float,
        pulled: float,
        max_pulls: int,
        leased: float,
        nvme: int,
        nvme_frees_at_once: bool,
        far: int,
        high: float,
        lent: float,
        given: float,
        uses: int,
        batch: int,
        found: list[int],
        policy: str,
        by_worth: bool,
        hbm: int,
        used: int,
    ) -> None:
        config = CoreConfig(
            max_leased_fraction=leased,
            lease_ttl_s=3,
            hold_ttl_s=2,
            reservation_ttl_s=4,
            max_replies=4,
            max_unfinished_fraction=fraction,
            has_index=True,
            max_pulls=max_pulls,
            max_pulled_fraction=pulled,
            max_given_fraction=given,
            demote_high_fraction=high,
            admit_after_uses=uses,
            admit_by_worth=by_worth,
            max_demotes=max(1, max_pulls // 3),
            demote_batch_bytes=batch * PAGE,
            max_fetches=max_pulls,
            max_fetched_fraction=pulled,
            max_lends=max(1, max_pulls // 2),
            max_lent_fraction=lent,
            max_engine_blocks=4,
            promote_after_uses=used,
        )
        size = (min(extents, 3) if nvme or far else extents) * 4 * PAGE
        more = 0 if nvme or far else 8 * PAGE  # a small tier, so that more goes through the one below
        tier = TierSpec(TierKind.DRAM, size + more, size, 4 * PAGE, frees_at_once)
        below = TierSpec(
            TierKind.NVME,
            nvme * 6 * PAGE,
            nvme * 6 * PAGE,
            6 * PAGE,
            nvme_frees_at_once,
            header_bytes=PAGE,
            outlives=True,
        )
        between = TierSpec(TierKind.FAR, far * 4 * PAGE, far * 4 * PAGE, 4 * PAGE)
        device = TierSpec(TierKind.HBM, hbm * 4 * PAGE, hbm * 4 * PAGE, 4 * PAGE)
        below_it = [*([below] if nvme else []), *([between] if far else [])]
        tiers = [tier, *below_it, *([device] if hbm else [])]
        self.core = CacheCore(config, tiers, POLICIES[policy])
        self.below = {its.kind: {} for its in self.core.lower}
        if nvme:
            self.recover(_keys(1, found))
        for name in ENGINES:
            self.register(name)

    def recover(self, keys: list[Key]) -> None:
        """The tier below still has these blocks, found last one first; of some that is not true."""
        blocks: list[tuple[Slot, BlockRecord]] = []
        for index, key in enumerate(keys[:4]):
            slot = Slot(0, index // 3, index * 2 * PAGE, 2 * PAGE)
            record = BlockRecord(BlockId(key, 0), PARENTS[key], LAYOUTS[1].fingerprint(), PAGE, key[:16])
            blocks.append((slot, record))
            self.below[TierKind.NVME][0, key] = PARENTS[key]
        self.do(m.Recovered(TierKind.NVME, blocks[::-1], is_last=False))
        self.do(m.Recovered(TierKind.NVME, blocks, is_last=True))

    def call_id(self) -> bytes:
        self.calls += 1
        return self.calls.to_bytes(16, "little")

    def do(self, event: m.Event) -> m.Action | None:
        actions = self.core.handle(event, self.now_s)
        reply: m.Action | None = None
        for action in actions:
            match action:
                case m.Verify():
                    self.verifies.append(action)
                case m.Drop():
                    self.drops.append(action)
                case m.Lost():
                    for block in action.blocks:
                        self._gone(block.shard, block.key)
                        self._lost(TierKind.DRAM, (block.shard, block.key))
                        self.invalid |= {
                            n
                            for n, v in self.leases.items()
                            if block.shard == v.shard and block.key in v.keys
                        }
                case m.Find():
                    self.finds = [*self.finds[-3:], action]
                case m.Pull():
                    self._pull(action)
                case m.Fetch():
                    self._fetch(action)
                case m.Demote():
                    self._demote(action)
                case m.Ready():
                    self._ready(action)
                case m.Publish():
                    self._publish(action)
                case _:
                    reply = action
        if reply is not None and getattr(event, "call_id", None) is not None:
            self.last = (event, reply)
        return reply

    def fingerprint(self, engine: str) -> bytes:
        return LAYOUTS[ENGINES[engine]].fingerprint()

    def run(self, shard: int, keys: list[Key], *, coming: bool = False) -> int:
        known = self.visible.keys() | (self.pulling() if coming else set())
        count = 0
        while count < len(keys) and (shard, keys[count]) in known:
            count += 1
        return count

    def pulling(self) -> set[tuple[int, Key]]:
        return {
            (its.shard, key)
            for its in self.pulls.values()
            if not its.is_overdue
            for key in its.keys[its.arrived :]
        }

    def going(self, into: TierKind) -> set[tuple[int, Key]]:
        """What demotes are writing there."""
        return {name for its in self.demotes.values() if its.demote.tier is into for name in its.names}

    def leaving(self, source: TierKind) -> set[tuple[int, Key]]:
        """What demotes read there, and nobody has found to be wrong."""
        return {
            name
            for its in self.demotes.values()
            if its.demote.source is source
            for index, name in enumerate(its.names)
            if index not in its.lost
        }

    def _lost(self, tier: TierKind, name: tuple[int, Key]) -> None:
        for its in self.demotes.values():
            if its.demote.source is tier and name in its.names:
                its.lost.add(its.names.index(name))

    def names_below(self) -> set[tuple[int, Key]]:
        return {name for names in self.below.values() for name in names}

    def _gone(self, shard: int, key: Key) -> None:
        del self.visible[shard, key]
        self.replicas.discard((shard, key))

    def _pull(self, pull: m.Pull) -> None:
        assert pull.node in NODES
        self._comes(pull.pull, Coming(pull.shard, pull.keys), pull.slots)

    def _fetch(self, fetch: m.Fetch) -> None:
        assert not self.is_down or fetch.tier is not TierKind.NVME
        assert fetch.timeout_s >= 0.1
        shard = fetch.records[0].block.shard
        keys = [record.block.key for record in fetch.records]
        assert all(record.block.shard == shard for record in fetch.records)
        assert [record.checksum for record in fetch.records] == [key[:16] for key in keys]
        slots = {(p.block.shard, p.block.key): p.slot for p in self._places(keys, fetch.tier)}
        assert [slots[shard, key] for key in keys] == fetch.sources, "it reads what is not there"
        self._comes(fetch.pull, Coming(shard, keys, fetch), fetch.slots)

    def _demote(self, demote: m.Demote) -> None:
        assert not self.is_down or demote.tier is not TierKind.NVME
        names = [(record.block.shard, record.block.key) for record in demote.records]
        assert len(set(names)) == len(names) == len(demote.slots) == len(demote.sources) > 0
        assert not set(names) & self.going(demote.tier), "what goes down already is copied again"
        here = self._places([key for _, key in names], demote.source)
        slots = {(place.block.shard, place.block.key): place.slot for place in here}
        assert [slots[name] for name in names] == demote.sources, "it copies what is not here"
        there = {(p.block.shard, p.block.key) for p in self._places([k for _, k in names], demote.tier)}
        assert not set(names) & there, "what is below is copied again"
        self.demotes[demote.demote] = Going(demote, names)
        for record in demote.records:
            assert record.parent == PARENTS[record.block.key]
            assert record.checksum == record.block.key[:16]
        same = [its for its in self.demotes.values() if its.demote.tier is demote.tier]
        assert len(same) <= self.core.config.max_demotes

    def _comes(self, number: int, pull: Coming, slots: list[Slot]) -> None:
        assert number not in self.pulls
        wanted = {(pull.shard, key) for key in pull.keys}
        assert len(wanted) == len(pull.keys) == len(slots) > 0
        assert not wanted & self.visible.keys(), "what is here is pulled"
        assert not wanted & self.pulling(), "what is coming is pulled again"
        assert not wanted & self.storing(), "what is being stored is pulled"
        assert all(PARENTS[key] == above for above, key in pairwise(pull.keys)), "no chain"
        self.pulls[number] = pull

    def _ready(self, ready: m.Ready) -> None:
        lease = self.leases[ready.lease]
        assert ready.first == lease.told < lease.promised or (ready.is_last and not ready.slots)
        assert len(ready.slots) == len(ready.checksums)
        lease.told += len(ready.slots)
        assert lease.told <= lease.promised
        assert lease.waits
        if ready.is_last:
            lease.promised = lease.told
            lease.waits = False
        else:
            assert lease.told < lease.promised
        told = lease.keys[ready.first : lease.told]
        assert ready.checksums == [key[:16] for key in told]

    def _publish(self, publish: m.Publish) -> None:
        if publish.tier is TierKind.HBM:
            assert {block.shard for block in (*publish.added, *publish.removed)} == {0}
            assert {block.key for block in publish.removed} <= self.in_hbm
            assert not {block.key for block in publish.added} & self.in_hbm
            self.in_hbm -= {block.key for block in publish.removed}
            self.in_hbm |= {block.key for block in publish.added}
            return
        for block in publish.removed:
            assert self.published.pop((block.shard, block.key)) == publish.tier
        for block in publish.added:
            assert (block.shard, block.key) not in self.published
            self.published[block.shard, block.key] = publish.tier

    # ---- engines come and go

    @rule(engine=st.sampled_from(sorted(ENGINES)))
    def register(self, engine: str) -> None:
        layout = LAYOUTS[ENGINES[engine]]
        maps = self.core.copies is not None and engine != "b"
        event = m.RegisterEngine(self.call_id(), engine, layout, layout.fingerprint(), maps_device=maps)
        assert self.do(event) == m.Registered(layout.slot_bytes)
        self.engines.add(engine)

    @rule(engine=st.sampled_from(sorted(ENGINES)), back=st.sampled_from((True, True, True, False)))
    def die(self, engine: str, back: bool) -> None:
        self.do(m.EngineDied(engine))
        self.engines.discard(engine)
        self.reservations = {i: r for i, r in self.reservations.items() if r[0] != engine}
        self.leases = {i: lease for i, lease in self.leases.items() if lease.party != engine}
        self.own.pop(engine, None)
        if self.last is not None and getattr(self.last[0], "engine", None) == engine:
            self.last = None
        if back:
            self.register(engine)

    @rule(
        engine=st.sampled_from(sorted(ENGINES)),
        path=PATHS,
        gone=PATHS,
        clear=st.sampled_from((False, False, True)),
    )
    def report_resident(self, engine: str, path: list[int], gone: list[int], clear: bool) -> None:
        """What engines have in their own memory is known, published, and changes nothing else."""
        added = _keys(ENGINES[engine], path)
        removed = [key for key in _keys(ENGINES[engine], gone) if key not in added]
        before = self.core.stats().tiers
        try:
            reply = self.do(m.ReportResident(self.call_id(), engine, added, removed, clear))
        except UnknownId:
            assert engine not in self.engines
            return
        had = [] if clear else self.own.get(engine, [])
        self.own[engine] = ([key for key in had if key not in (*removed, *added)] + added)[-4:]
        assert reply == m.Noted(len(self.own[engine]))
        assert self.core.stats().tiers == before

    # ---- stores

    @rule(
        engine=st.sampled_from(sorted(ENGINES)),
        path=PATHS,
        other=PATHS,
        shard=st.sampled_from(SHARDS),
    )
    def store_two(self, engine: str, path: list[int], other: list[int], shard: int) -> None:
        for one in (path, other):
            self.reserve(engine, one, 0, shard, commit=True)

    @rule(
        engine=st.sampled_from(sorted(ENGINES)),
        path=PATHS,
        skip=st.integers(0, 3),
        shard=st.sampled_from(SHARDS),
        commit=st.booleans(),
    )
    def reserve(self, engine: str, path: list[int], skip: int, shard: int, commit: bool) -> None:
        keys = _keys(ENGINES[engine], path)
        skip = min(skip, len(keys) - 1)
        above = keys[skip - 1] if skip else None
        event = m.Reserve(self.call_id(), engine, above, keys[skip:], shard, self.fingerprint(engine))
        before = self._resident_bytes()
        try:
            reply = self.do(event)
        except UnknownId:
            assert engine not in self.engines or (above is not None and self._unreachable(shard, keys[:skip]))
            return
        assert isinstance(reply, m.Reserved)
        granted: dict[Key, Key | None] = {}
        for key, state in zip(event.keys, reply.states, strict=True):
            if state is m.ReserveState.GRANTED:
                assert (shard, key) not in self.visible
                assert (shard, key) not in self.pulling(), "what is coming is stored, too"
                granted[key] = above
            if state is m.ReserveState.PRESENT:
                assert (shard, key) in self.visible, "present blocks of the chain stay"
                self.replicas.discard((shard, key))
            if state is m.ReserveState.BUSY:
                assert (shard, key) in self.storing() | self.pulling()
            above = key
        self._learn_evictions()
        if m.ReserveState.REFUSED not in reply.states and not granted:
            assert self._resident_bytes() == before, "nothing goes where nothing is needed"
        if granted:
            self.reservations[reply.reservation] = (engine, shard, granted, self.now_s + 4)
            if commit:
                self._commit(reply.reservation, list(granted))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.reservations)))
        keys = list(self.reservations[number][2])
        some = data.draw(st.lists(st.sampled_from(keys), unique=True, min_size=1))
        self._commit(number, some)

    def _commit(self, number: int, keys: list[Key]) -> None:
        engine, shard, granted, _ = self.reservations[number]
        event = m.Commit(self.call_id(), engine, number, keys, [key[:16] for key in keys])
        if self._expired(number):
            try:
                self.do(event)
            except UnknownId:
                return
            raise AssertionError("an expired reservation was committed")
        assert self.do(event) == m.Committed(len(keys))
        for key in keys:
            self.visible[shard, key] = granted.pop(key)
        if not granted:
            del self.reservations[number]

    def _expired(self, number: int) -> bool:
        return number in self.core.reservations.expired

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), everything=st.booleans())
    def abort(self, data: st.DataObject, everything: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.reservations)))
        engine, _, granted, _ = self.reservations[number]
        keys = data.draw(st.lists(st.sampled_from(list(granted)), unique=True, min_size=1))
        reply = self.do(m.Abort(self.call_id(), engine, number, [] if everything else keys))
        assert reply == m.Aborted(len(granted) if everything else len(keys))
        for key in list(granted) if everything else keys:
            del granted[key]
        if not granted:
            del self.reservations[number]

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def a_stranger_commits(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.reservations)))
        owner, _, granted, _ = self.reservations[number]
        for stranger in sorted(self.engines - {owner}):
            key = next(iter(granted))
            for event in (
                m.Commit(self.call_id(), stranger, number, [key], [key[:16]]),
                m.Abort(self.call_id(), stranger, number),
            ):
                try:
                    self.do(event)
                except Conflict:
                    continue
                raise AssertionError("somebody else's reservation was ended")

    # ---- loads

    @rule(
        engine=st.sampled_from(sorted(ENGINES)),
        path=PATHS,
        request=st.sampled_from("xyz"),
        shards=st.integers(1, 2),
        compute_s=st.sampled_from((0.0, 1.0, 1e-6)),
    )
    def lookup(self, engine: str, path: list[int], request: str, shards: int, compute_s: float) -> None:
        keys = _keys(ENGINES[engine], path)
        self.offered = 0
        event = m.Lookup(engine, request, keys, shards, self.fingerprint(engine), compute_s)
        finds = len(self.finds)
        try:
            reply = self.do(event)
        except UnknownId:
            assert engine not in self.engines
            return
        self._learn_evictions()
        self._check_offer(event, reply)
        if len(self.finds) > finds:
            assert self.finds[-1] == m.Find(event, self.offered)
            assert reply.reason in ("missing", "slow")
        if reply.reason == "missing" and self.core.lower and not self.is_down:
            after = keys[reply.blocks]
            had = self.visible.keys() | self.pulling() | self.names_below()
            if not any((shard, after) in self.storing() for shard in range(shards)):
                assert not all((shard, after) in had for shard in range(shards)), "it was to be had below"

    def _check_offer(self, lookup: m.Lookup, reply: m.Action | None) -> None:
        assert isinstance(reply, m.Offered)
        self.offered = reply.blocks
        keys, shards = list(lookup.keys), range(lookup.shard_count)
        here = min(self.run(shard, keys) for shard in shards)
        found = min(self.run(shard, keys, coming=True) for shard in shards)
        assert self.core.match(keys, lookup.shard_count) == here
        assert reply.coming == max(0, reply.blocks - here)
        match reply.reason:
            case "limit":
                assert reply.blocks <= found
            case "slow":
                assert lookup.block_compute_s
                assert here <= reply.blocks <= found
            case reason:
                assert reply.blocks == found
                assert reason == ("" if found == len(keys) else "missing")

    @rule(
        engine=st.sampled_from(sorted(ENGINES)),
        path=PATHS,
        request=st.sampled_from("xyz"),
        shard=st.sampled_from(SHARDS),
    )
    def load(self, engine: str, path: list[int], request: str, shard: int) -> None:
        keys = _keys(ENGINES[engine], path)
        try:
            reply = self.do(m.Load(self.call_id(), engine, request, keys, shard))
        except (UnknownId, LimitExceeded):
            assert engine not in self.engines
            return
        assert isinstance(reply, m.Leased)
        self._leased(engine, shard, keys, reply)
        if not reply.copies:
            return
        assert engine != "b", "told to an engine that cannot read it"
        assert len(reply.copies) == len(reply.slots)
        told = {key: copy for key, copy in zip(keys, reply.copies, strict=False) if copy is not None}
        there = self._places(told, TierKind.HBM)
        assert {its.block.key: its.slot for its in there if its.block.shard == shard} == told
        self.leases[reply.lease].copies = told

    def _leased(self, party: str, shard: int, keys: list[Key], reply: m.Leased) -> None:
        count = len(reply.slots)
        whole = count + reply.coming
        here = self.run(shard, keys)
        assert count == here if reply.coming else count <= here
        assert whole <= self.run(shard, keys, coming=True)
        assert reply.checksums == [key[:16] for key in keys[:count]]
        assert bool(reply.lease) == bool(whole)
        if whole:
            self.leases[reply.lease] = Read(
                party, shard, keys[:whole], self.now_s + 3, count, whole, reply.coming > 0
            )

    @rule(
        engine=st.sampled_from(sorted(ENGINES)),
        path=PATHS,
        request=st.sampled_from("xyz"),
        shards=st.integers(1, 2),
        later=st.sampled_from((0.0, 0.0, 1.0, 2.0)),
    )
    def read(self, engine: str, path: list[int], request: str, shards: int, later: float) -> None:
        """What was held is there, until the hold's time is over, whatever happens meanwhile."""
        self.store_two(engine, path, path, 0)
        self.lookup(engine, path, request, shards, 0.0)
        held = self.offered
        self.store_two(engine, [1] * 6, [1, 0] * 3, 1)
        self.tick(later)
        before = set(self.leases)
        for shard in range(shards if held else 0):
            self.load(engine, path[:held], request, shard)
        if later < 2.0 and engine in self.engines:
            assert len(self.leases) - len(before) == (shards if held else 0)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), corrupt=st.booleans())
    def release(self, data: st.DataObject, corrupt: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases.pop(number)
        wrong = lease.keys[:1] if corrupt else []
        try:
            reply = self.do(m.Release(self.call_id(), lease.party, number, None, wrong, lease.shard))
        except UnknownId:
            assert lease.party not in self.engines
            assert self.now_s >= lease.deadline_s, "a peer is forgotten while it has leases"
            return
        assert isinstance(reply, m.Released)
        if number in self.invalid:
            assert not reply.valid
        if not lease.is_peer and lease.party in ENGINES:
            self._lose_copies(lease.shard, wrong)
        if reply.valid:
            assert self.now_s < lease.deadline_s
            told = {(lease.shard, key) for key in lease.keys[: lease.told]}
            assert told <= self.visible.keys(), "valid, and yet something went"
        for again in (number, number + 10**6):
            try:
                self.do(m.Release(self.call_id(), lease.party, again))
            except UnknownId:
                continue
            raise AssertionError("a lease was released twice")

    def _lose_copies(self, shard: int, wrong: list[Key]) -> None:
        """Copies that may be wrong are gone, and no lease that was told of one of them is valid."""
        for key in wrong:
            assert not [its for its in self._places([key], TierKind.HBM) if its.block.shard == shard]
            self.invalid |= {n for n, its in self.leases.items() if its.shard == shard and key in its.copies}

    @rule(
        engine=st.sampled_from(sorted(ENGINES)),
        path=PATHS,
        shard=st.sampled_from(SHARDS),
        times=st.integers(1, 3),
        ends_with=st.sampled_from(("", "", "lost", "wrong")),
    )
    def go_up(self, engine: str, path: list[int], shard: int, times: int, ends_with: str) -> None:
        """Store, use often, let it be copied into device memory, and load it from there."""
        self.reserve(engine, path, 0, shard, commit=True)
        for _ in range(times):
            before = set(self.leases)
            self.load(engine, path, "v", shard)
            for number in self.leases.keys() - before:
                lease = self.leases.pop(number)
                self.do(m.Release(self.call_id(), engine, number, None, [], shard))
                assert lease.shard == shard
        self.tick(1.0)
        for number in [n for n, its in self.demotes.items() if its.demote.tier is TierKind.HBM]:
            every = list(range(len(self.demotes[number].names)))
            if ends_with == "wrong":
                self._end_demote(number, every[:-1], "", {every[-1]})
            else:
                self._end_demote(number, [] if ends_with == "lost" else every, ends_with)
        self.load(engine, path, "v", shard)

    @rule(engine=st.sampled_from(sorted(ENGINES)), request=st.sampled_from("xyz"))
    def release_hold(self, engine: str, request: str) -> None:
        if engine in self.engines:
            self.do(m.Release(self.call_id(), engine, None, request))

    # ---- other nodes

    @precondition(lambda self: self.finds)
    @rule(places=st.tuples(PLACES, PLACES), again=st.booleans())
    def located(self, places: tuple[str, str], again: bool) -> None:
        """An answer of the index, whatever happened since it was asked; perhaps not the only one."""
        find = self.finds[-1] if again else self.finds.pop()
        shards = [[NODES_OF[letter] for letter in letters] for letters in places[: find.lookup.shard_count]]
        try:
            reply = self.do(m.Located(find.lookup, find.first, shards))
        except UnknownId:
            return
        self._learn_evictions()
        self._check_offer(find.lookup, reply)

    @rule(
        engine=st.sampled_from(sorted(ENGINES)),
        path=PATHS,
        shards=st.integers(1, 2),
        places=st.tuples(PLACES, PLACES),
        counts=st.lists(st.integers(0, 6), max_size=4),
        loads_at=st.integers(0, 4),
        ends_at=st.integers(0, 8),
    )
    def prefetch(
        self,
        engine: str,
        path: list[int],
        shards: int,
        places: tuple[str, str],
        counts: list[int],
        loads_at: int,
        ends_at: int,
    ) -> None:
        """A lookup whose tail is elsewhere, and which is loaded while it is still coming."""
        self.lookup(engine, path, "z", shards, 0.0)
        if self.finds and self.finds[-1].lookup.request == "z":
            self.located(places, again=False)
        if engine not in self.engines:
            return
        held = path[: self.offered]
        for step, count in enumerate([*counts, 0, 0, 0, 0]):
            if step == loads_at and held:
                for shard in range(shards):
                    self.load(engine, held, "z", shard)
            if self.pulls:
                number = sorted(self.pulls)[-1 - step % len(self.pulls)]
                if step == ends_at:
                    self._end_pull(number, "lease")
                elif count:
                    self._arrive(number, count)

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), count=st.integers(1, 6))
    def arrive(self, data: st.DataObject, count: int) -> None:
        self._arrive(data.draw(st.sampled_from(sorted(self.pulls))), count)

    def _arrive(self, number: int, count: int) -> None:
        pull = self.pulls[number]
        if pull.is_overdue:
            return
        keys = pull.keys[pull.arrived : pull.arrived + count]
        pull.arrived += len(keys)
        for key in keys:
            self.visible[pull.shard, key] = PARENTS[key]
            if pull.fetch is None or pull.fetch.yields:
                self.replicas.add((pull.shard, key))
        assert self.do(m.Arrived(number, [key[:16] for key in keys])) is None

    @precondition(lambda self: any(pull.fetch and not pull.is_overdue for pull in self.pulls.values()))
    @rule(data=st.data())
    def overdue(self, data: st.DataObject) -> None:
        running = [number for number, pull in self.pulls.items() if pull.fetch and not pull.is_overdue]
        number = data.draw(st.sampled_from(sorted(running)))
        pull = self.pulls[number]
        self._cut(pull)
        pull.is_overdue = True
        assert self.do(m.Overdue(number)) is None

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), fault=st.sampled_from(("", "timeout")), wrong=st.integers(0, 2))
    def pull_ends(self, data: st.DataObject, fault: str, wrong: int) -> None:
        self._end_pull(data.draw(st.sampled_from(sorted(self.pulls))), fault, wrong)

    def _end_pull(self, number: int, fault: str, wrong: int = 0) -> None:
        pull = self.pulls.pop(number)
        if not pull.is_overdue:
            self._cut(pull)
        bad = pull.keys[pull.arrived : pull.arrived + wrong] if pull.fetch else []
        for key in bad:
            assert pull.fetch is not None
            self.below[pull.fetch.tier].pop((pull.shard, key), None)
            self._lost(pull.fetch.tier, (pull.shard, key))
        assert self.do(m.PullEnded(number, fault, bad)) is None

    def _cut(self, pull: Coming) -> None:
        missing = set(pull.keys[pull.arrived :])
        for lease in self.leases.values():
            waits = lease.waits or lease.is_peer
            if waits and lease.shard == pull.shard and missing & set(lease.keys[: lease.promised]):
                gone = min(lease.keys.index(key) for key in missing & set(lease.keys))
                lease.promised = min(lease.promised, gone)

    # ---- the tier below

    @precondition(lambda self: self.demotes)
    @rule(data=st.data(), written=st.sampled_from(("all", "all", "all", "some", "none")))
    def demote_ends(self, data: st.DataObject, written: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.demotes)))
        names = self.demotes[number].names
        every = list(range(len(names)))
        if written == "some":
            some = data.draw(st.lists(st.sampled_from(every), unique=True))
            self._end_demote(number, some, data.draw(st.sampled_from(("", "EIO"))), set(every) - set(some))
        else:
            self._end_demote(number, every if written == "all" else [], "" if written == "all" else "EIO")

    def _end_demote(
        self, number: int, written: list[int], fault: str = "", corrupt: set[int] | None = None
    ) -> None:
        going = self.demotes.pop(number)
        for index in set(written) - going.lost:
            shard, key = going.names[index]
            if going.demote.tier is TierKind.HBM:
                self.copies.add((shard, key))
            else:
                self.below[going.demote.tier][shard, key] = PARENTS[key]
        for index in (corrupt or set()) - going.lost:
            if going.demote.source is not TierKind.DRAM:
                self.below[going.demote.source].pop(going.names[index], None)
        verifies = len(self.verifies)
        assert self.do(m.Demoted(number, written, sorted(corrupt or ()), fault)) is None
        for verify in self.verifies[verifies:]:
            assert (verify.block.shard, verify.block.key) in going.names

    @precondition(lambda self: self.core.lower)
    @rule(down=st.sampled_from((True, False, False)))
    def tier_down_or_up(self, down: bool) -> None:
        if TierKind.NVME not in self.below:
            return
        self.is_down = down
        self.do((m.TierDown if self.is_down else m.TierUp)(TierKind.NVME))

    @precondition(lambda self: self.core.lower)
    @rule(
        engine=st.sampled_from(sorted(ENGINES)),
        path=PATHS,
        fills=st.integers(1, 4),
        counts=st.lists(st.integers(1, 6), max_size=3),
        ends_with=st.sampled_from(("", "late", "wrong", "EIO", "not at all")),
    )
    def go_down_and_up(
        self, engine: str, path: list[int], fills: int, counts: list[int], ends_with: str
    ) -> None:
        """Store, let it be copied down and evicted, then look it up and load it while it comes."""
        self._sink(engine, path, fills)
        self.lookup(engine, path, "w", 1, 0.0)
        if engine not in self.engines or not self.offered:
            return
        self.load(engine, path[: self.offered], "w", 0)
        fetches = [number for number, pull in self.pulls.items() if pull.fetch and not pull.is_overdue]
        for number in fetches:
            for count in counts:
                self._arrive(number, count)
            if ends_with == "late":
                self._cut(self.pulls[number])
                self.pulls[number].is_overdue = True
                self.do(m.Overdue(number))
            if ends_with != "not at all":
                self._end_pull(number, ends_with, ends_with == "wrong")

    def _sink(self, engine: str, path: list[int], fills: int) -> None:
        """Store, let it be copied down, and store so much else that it is evicted."""
        self.tier_down_or_up(down=False)
        self.reserve(engine, path, 0, 0, commit=True)
        self.tick(1.0)
        for number in list(self.demotes):
            self._end_demote(number, list(range(len(self.demotes[number].names))))
        for fill in range(fills):
            self.reserve("c", [1, fill % 2, 1, fill // 2, 1, 1], 0, fill % 2, commit=True)

    @rule(
        node=st.sampled_from(NODES),
        pages=st.sampled_from((1, 2)),
        path=PATHS,
        shard=st.sampled_from(SHARDS),
        waits=st.booleans(),
        skip=st.sampled_from((0, 0, 1, 2)),
    )
    def acquire(self, node: str, pages: int, path: list[int], shard: int, waits: bool, skip: int) -> None:
        self._acquire(node, pages, path, shard, waits, skip)

    def _acquire(
        self, node: str, pages: int, path: list[int], shard: int, waits: bool, skip: int
    ) -> m.Leased:
        keys = _keys(pages, path)
        keys = keys[min(skip, len(keys) - 1) :]
        event = m.Acquire(self.call_id(), node, keys, shard, LAYOUTS[pages].fingerprint(), waits)
        running = set(self.pulls)
        reply = self.do(event)
        assert isinstance(reply, m.Leased)
        self._learn_evictions()
        begun = [self.pulls[number] for number in self.pulls.keys() - running]
        assert all(pull.fetch is not None and pull.fetch.yields for pull in begun)
        assert len(begun) <= 1
        if not waits:
            assert not begun
            assert not reply.coming
            self._leased(m.peer_name(node), shard, keys, reply)
            return reply
        count, whole = len(reply.slots), len(reply.slots) + reply.coming
        assert count == self.run(shard, keys) if reply.coming else count <= self.run(shard, keys)
        assert reply.checksums == [key[:16] for key in keys[:count]]
        had = self.visible.keys() | self.pulling() | self.names_below()
        assert all((shard, key) in had for key in keys[:whole]), "what nobody has is coming"
        if reply.lease:
            promised = len(self.core.leases.leases[reply.lease].blocks)
            assert count <= promised <= min(whole, self.run(shard, keys, coming=True))
            self.leases[reply.lease] = Read(
                m.peer_name(node), shard, keys[:promised], self.now_s + 3, count, promised, False, True
            )
        else:
            assert not count
        return reply

    @precondition(lambda self: self.core.lower)
    @rule(
        path=PATHS, steps=st.integers(2, 6), count=st.integers(1, 3), fault=st.sampled_from(("", "", "EIO"))
    )
    def lend(self, path: list[int], steps: int, count: int, fault: str) -> None:
        """A peer asks again and again, while what lies below comes; and gives back what it had before."""
        self._sink("a", path, 4)
        mine: list[int] = []
        skip = 0
        for _ in range(steps):
            reply = self._acquire("p", 1, path, 0, waits=True, skip=skip)
            for number in mine:
                if number in self.leases:
                    self.leases.pop(number)
                    self.do(m.Release(self.call_id(), m.peer_name("p"), number, None, [], 0))
            mine = [reply.lease] if reply.lease else []
            while self.drops:
                self.dropped()
            skip += len(reply.slots)
            if skip >= len(path) or not reply.coming:
                break
            for number in [n for n, pull in self.pulls.items() if pull.fetch and pull.fetch.yields]:
                self._arrive(number, count)
                if number in self.pulls and self.pulls[number].arrived == len(self.pulls[number].keys):
                    self._end_pull(number, "")
                elif fault:
                    self._end_pull(number, fault)

    # ---- operators, the node, time

    @rule(pages=st.sampled_from((1, 2)), path=PATHS, ttl_s=st.floats(0.5, 6))
    def pin(self, pages: int, path: list[int], ttl_s: float) -> None:
        keys = _keys(pages, path)
        try:
            reply = self.do(m.Pin(self.call_id(), keys, ttl_s))
        except LimitExceeded:
            return
        assert isinstance(reply, m.Pinned)
        assert reply.blocks == max(self.run(shard, keys) for shard in SHARDS)

    @rule(pages=st.sampled_from((1, 2)), path=PATHS)
    def unpin(self, pages: int, path: list[int]) -> None:
        self.do(m.Unpin(self.call_id(), None, _keys(pages, path)))

    @rule(pages=st.sampled_from((1, 2)), path=PATHS)
    def evict(self, pages: int, path: list[int]) -> None:
        keys = _keys(pages, path)
        reply = self.do(m.Evict(self.call_id(), keys))
        assert isinstance(reply, m.Evicted)
        before = sum(map(len, self.below.values()))
        gone = self._learn_evictions()
        assert len(gone) <= reply.blocks <= len(gone) + before - sum(map(len, self.below.values()))

    @rule(blocks=st.integers(1, 3))
    def scrub(self, blocks: int) -> None:
        self.do(m.Scrub(blocks))

    @precondition(lambda self: self.verifies)
    @rule(intact=st.booleans())
    def verified(self, intact: bool) -> None:
        verify = self.verifies.pop(0)
        assert (verify.block.shard, verify.block.key) in self.visible, "it was guarded meanwhile"
        self.do(m.Verified(verify.verify, intact))
        assert ((verify.block.shard, verify.block.key) in self.visible) == intact

    @precondition(lambda self: self.drops)
    @rule()
    def dropped(self) -> None:
        drop = self.drops.pop(0)
        self.do(m.Dropped(drop.tier, drop.slots))

    @rule()
    def grow(self) -> None:
        tier = self.core.stats().tiers[0]
        self.do(m.Grow(tier.kind, min(tier.capacity_bytes, tier.allocated_bytes + 2 * PAGE)))

    @rule(seconds=st.sampled_from((0.0, 0.5, 1.0, 3.0)))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(m.Tick())
        if self.last is not None and self._party_of(self.last[0]) not in self.core.engines.peers | {"": None}:
            self.last = None
        for number, (*_, deadline_s) in self.reservations.items():
            assert self._expired(number) == (deadline_s <= self.now_s)

    @precondition(lambda self: self.last is not None)
    @rule()
    def repeat(self) -> None:
        assert self.last is not None
        event, first = self.last
        assert self.core.handle(event, self.now_s) == [first]

    # ---- what must hold

    @staticmethod
    def _party_of(event: m.Event) -> str:
        """The peer that speaks; empty for anybody else."""
        name = m.peer_name(event.peer) if isinstance(event, m.Acquire) else getattr(event, "engine", "")
        return name if name.startswith(m.peer_name("")) else ""

    def _resident_bytes(self) -> int:
        return self.core.stats().tiers[0].resident_bytes

    def storing(self) -> set[tuple[int, Key]]:
        return {(r[1], key) for n, r in self.reservations.items() if not self._expired(n) for key in r[2]}

    def _unreachable(self, shard: int, prefix: list[Key]) -> bool:
        """Some block of the prefix is neither visible nor being stored nor coming."""
        pending = self.storing() | self.pulling()
        return any((shard, key) not in self.visible and (shard, key) not in pending for key in prefix)

    def _is_reachable(self, shard: int, key: Key) -> bool:
        """Every ancestor is visible, or being stored, or coming."""
        pending = self.storing() | self.pulling()
        at = self.visible[shard, key]
        while at is not None:
            if (shard, at) in self.visible:
                at = self.visible[shard, at]
            elif (shard, at) in pending:
                at = PARENTS[at]
            else:
                return False
        return True

    def _is_reachable_below(self, tier: TierKind, shard: int, key: Key) -> bool:
        going, below = self.going(tier), self.below[tier]
        at = below[shard, key]
        while at is not None:
            if (shard, at) not in below and (shard, at) not in going:
                return False
            at = PARENTS[at]
        return True

    def _places(self, keys: Iterable[Key], tier: TierKind) -> list[BlockPlace]:
        return [place for place in self.core.places(list(dict.fromkeys(keys))) if place.tier is tier]

    def _learn_evictions(self) -> set[tuple[int, Key]]:
        self._learn_below()
        places = self._places([key for _, key in self.visible], TierKind.DRAM)
        here = {(place.block.shard, place.block.key) for place in places}
        gone = self.visible.keys() - here
        for shard, key in here:
            parent = self.visible[shard, key]
            assert parent is None or (shard, parent) not in gone, "a block went before one that continues it"
        for number, lease in self.leases.items():
            if self.now_s < lease.deadline_s and number not in self.invalid:
                kept = {(lease.shard, key) for key in lease.keys[: lease.promised]}
                assert not gone & kept, "a leased block went"
        for verify in self.verifies:
            assert (verify.block.shard, verify.block.key) not in gone, "a block went that is being verified"
        assert not gone & self.leaving(TierKind.DRAM), "a block went that is being copied"
        for name in list(gone):
            self._gone(*name)
        return gone

    def _learn_below(self) -> None:
        for tier, below in self.below.items():
            self._learn_tier(tier, below)
        self._learn_copies()

    def _learn_copies(self) -> None:
        if self.core.copies is None:
            return
        every = self._places([key for keys in self.core.ids().values() for key in keys], TierKind.HBM)
        here = {(place.block.shard, place.block.key): place.slot for place in every}
        assert here.keys() <= self.copies, "a copy that nobody has written"
        for number, lease in self.leases.items():
            if self.now_s < lease.deadline_s and number not in self.invalid:
                for key, slot in lease.copies.items():
                    assert here.get((lease.shard, key)) == slot, "a leased copy went"
        self.copies = set(here)

    def _learn_tier(self, tier: TierKind, below: dict[tuple[int, Key], Key | None]) -> None:
        places = self._places([key for _, key in below], tier)
        here = {(place.block.shard, place.block.key) for place in places}
        every = self._places([key for keys in self.core.ids().values() for key in keys], tier)
        assert len(every) == len(places), "something is below that nobody has written"
        assert here <= below.keys(), "something is below that nobody has written"
        gone = below.keys() - here
        assert not gone & self.leaving(tier), "a block went below that is being copied"
        for name in here:
            parent = below[name]
            assert parent is None or (name[0], parent) not in gone, "one went below before its continuation"
        for pull in self.pulls.values():
            reads = pull.fetch is not None and pull.fetch.tier is tier
            read = {(pull.shard, key) for key in pull.keys if reads}
            assert not gone & read, "a block went below that is being read"
        for name in list(gone):
            del below[name]

    @invariant()
    def invariants(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        self._learn_below()
        places = self._places([k for _, k in self.visible], TierKind.DRAM)
        assert {(place.block.shard, place.block.key) for place in places} == self.visible.keys()
        assert {(p.block.shard, p.block.key) for p in places if p.replica} == self.replicas
        published = {}
        for tier, below in reversed(self.below.items()):
            published |= {name: tier for name in below if self._is_reachable_below(tier, *name)}
        published |= {name: TierKind.DRAM for name in self.visible if self._is_reachable(*name)}
        assert self.published == published
        held = {key for keys in self.own.values() for key in keys}
        assert self.in_hbm == held
        holders = {(p.holder, p.block.key) for p in self.core.engine_blocks.places(list(PARENTS))}
        assert holders == {(engine, key) for engine, keys in self.own.items() for key in keys}
        stats = self.core.stats().tiers
        counts = [len(self.visible), *map(len, self.below.values())]
        assert [tier.blocks for tier in stats if tier.kind is not TierKind.HBM] == counts
        assert [tier.blocks for tier in stats if tier.kind is TierKind.HBM] in ([], [len(self.copies)])
        running = [its for demotes in self.core.copying for its in demotes.running]
        assert sorted(running) == sorted(self.demotes)
        assert self.core.pulls.running.keys() == self.pulls.keys()
        for number, lease in self.leases.items():
            assert lease.waits or lease.is_peer or lease.told == lease.promised
            if lease.waits and number in self.core.leases.leases:
                key = (lease.shard, lease.keys[lease.told])
                assert key in self.pulling(), "a lease waits for what will never come"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for tier in self.below:
            self.do(m.TierDown(tier))  # nothing new begins
        for number in list(self.pulls):
            del self.pulls[number]
            self.do(m.PullEnded(number, "cancelled"))
        for number in list(self.demotes):
            self._end_demote(number, [], "cancelled")
        for engine in ENGINES:
            self.die(engine, back=False)
        for verify in self.verifies:
            self.core.handle(m.Verified(verify.verify, intact=True), self.now_s)
        self.now_s += 100
        self.do(m.Tick())
        for number in list(self.demotes):  # what waited to be copied, and nobody reads any more
            self._end_demote(number, [], "cancelled")
        self._learn_below()
        everything = [
            key for _, key in (*self.visible, *(name for names in self.below.values() for name in names))
        ]
        if everything:
            reply = self.do(m.Evict(self.call_id(), everything))
            assert reply == m.Evicted(len(everything), 0)
        while self.drops:
            self.dropped()
        for residency in self.core.residencies:
            for tier in residency.tiers.values():
                assert len(tier.free_extents) == len(tier.extents), "memory is stranded at the end"
            assert not any(residency.shards.values())
        self.core.check()


CoreMachine.TestCase.settings = settings(
    max_examples=400,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCore = CoreMachine.TestCase
