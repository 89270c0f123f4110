"""Watches one core in a fleet: what it says, and whether it is what a core may say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvtier.core import messages as m
from kvtier.core.blocks import RESIDENT
from kvtier.core.cache import CacheCore
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.errors import KvtierError
from kvtier.testing.fleet_promises import Promises
from kvtier.types import PAGE_SIZE_BYTES, BlockId, TierKind


class Judge(Promises):
    """`before` and `after` are told each event; the first thing that must not be ends the history."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.published: dict[BlockId, TierKind] = {}
        self._replies: dict[tuple[str, bytes], m.Action] = {}

    # ---- each event

    def before(self, event: m.Event, now_s: float) -> None:
        """What the event itself says ends at once, whatever the core makes of it."""
        self.world.steps += 1
        self.world.count(type(event).__name__)
        match event:
            case m.Tick():
                self.leases = {id: its for id, its in self.leases.items() if its.deadline_s > now_s}
                self.offers = {id: its for id, its in self.offers.items() if its.deadline_s > now_s}
            case m.EngineDied():
                self._replies = {name: its for name, its in self._replies.items() if name[0] != event.engine}
                self.engine_died(event.engine)
            case m.Arrived():
                self.arrived(event)
            case m.PullEnded():
                self.pull_ended(event)
            case m.Located():
                self.located(event)

    def refused(self, event: m.Event) -> None:
        """The core raised a fault."""
        self.world.count(f"{type(event).__name__} refused")
        name = _call_of(event)
        if name is not None and name in self._replies and self._must_repeat(name):
            self.world.violate(f"a repeat of {type(event).__name__} was refused, the first was not")

    def after(self, event: m.Event, actions: Sequence[m.Action], now_s: float) -> None:
        """The core answered."""
        reply: m.Action | None = None
        for action in actions:
            match action:
                case m.Pull():
                    self.pull_begins(action)
                case m.Ready():
                    self.ready(action)
                case m.Publish():
                    self._publish(action)
                case m.Lost():
                    self._lost(action)
                case m.Drop() | m.Verify() | m.Find():
                    pass
                case _:
                    reply = action
        if reply is not None and not self._is_repeat(event, reply):
            self._answered(event, reply, now_s)
        self.nobody_waits_in_vain()

    def _is_repeat(self, event: m.Event, reply: m.Action) -> bool:
        name = _call_of(event)
        if name is None:
            return False
        first = self._replies.get(name)
        if first is not None and (first == reply or self._must_repeat(name)):
            if first != reply:
                self.world.violate(f"a repeat of {type(event).__name__} was answered differently")
            return True
        self._replies[name] = reply
        return False

    def _must_repeat(self, name: tuple[str, bytes]) -> bool:
        """A peer that has no lease is forgotten, and its answers with it."""
        first = self._replies[name]
        return not name[0].startswith("peer:") or (isinstance(first, m.Leased) and first.lease in self.leases)

    def _answered(self, event: m.Event, reply: m.Action, now_s: float) -> None:
        match event, reply:
            case m.Lookup(), m.Offered():
                self.offered(event, reply, now_s)
            case m.Located(), m.Offered():
                self.offered(event.lookup, reply, now_s)
            case m.Load(), m.Leased():
                self.loaded(event, reply, now_s)
            case m.Acquire(), m.Leased():
                self.acquired(event, reply, now_s)
            case m.Release(), m.Released():
                self.released(event, reply, now_s)
            case m.Reserve(), m.Reserved():
                self.reserved(event, reply)
            case m.Commit(), m.Committed():
                self.disown(event.reservation, event.keys)
            case m.Abort(), m.Aborted():
                self.disown(event.reservation, event.keys or list(self.grants[event.reservation].slots))

    # ---- what is here

    def _publish(self, publish: m.Publish) -> None:
        for block in publish.removed:
            if self.published.pop(block, None) is None:
                self.world.violate("a block was withdrawn that was not published")
        for block in publish.added:
            self.published[block] = publish.tier

    def _lost(self, lost: m.Lost) -> None:
        self.world.count("lost", len(lost.blocks))
        for block in lost.blocks:
            for lease in self.leases.values():
                lease.is_void = lease.is_void or block in lease.blocks
            self.offers = {id: its for id, its in self.offers.items() if block.key not in its.keys}

    def balance(self, core: CacheCore) -> None:
        """Caps, and what the core says that it holds."""
        resident = [
            block
            for blocks in core.residency.shards.values()
            for block in blocks.values()
            if block.state == RESIDENT
        ]
        reachable = {its.id: its.pool().tier.spec.kind for its in resident if not its.orphan}
        if reachable != self.published:
            self.world.violate(f"{len(self.published)} blocks are published, {len(reachable)} can be had")
        tier = core.stats().tiers[0]
        unfinished = tier.reserved_bytes + tier.quarantined_bytes
        used = tier.resident_bytes + unfinished + tier.draining_bytes
        if not used <= tier.allocated_bytes <= tier.capacity_bytes:
            self.world.violate(f"{used} bytes of {tier.allocated_bytes} are used")
        if tier.resident_bytes != sum(self.slot_bytes[block.id.key] for block in resident):
            self.world.violate(f"{tier.resident_bytes} resident bytes are counted, which is wrong")
        owned = sum(owner[0] != "drop" for owner in self.arena.owners.values()) * PAGE_SIZE_BYTES
        if unfinished != owned:
            self.world.violate(f"{unfinished} unfinished bytes are counted, {owned} are owned by writers")


def _call_of(event: m.Event) -> tuple[str, bytes] | None:
    call_id: bytes | None = getattr(event, "call_id", None)
    if call_id is None:
        return None
    peer = getattr(event, "peer", None)
    name: str = getattr(event, "engine", "") if peer is None else m.peer_name(peer)
    return name, call_id


class JudgedCore(CacheCore):
    """The real core, watched; it says nothing more once its process is dead."""

    def __init__(self, config: CoreConfig, tiers: Sequence[TierSpec], seed: int, judge: Judge) -> None:
        self.judge = judge
        super().__init__(config, tiers, seed=seed)

    def handle(self, event: m.Event, now_s: float) -> list[m.Action]:
        """See `CacheCore.handle`."""
        if self.judge.process.dead:
            raise asyncio.CancelledError("the daemon is dead")
        try:
            return self._judged(event, now_s)
        except KvtierError:
            raise
        except Exception as error:
            self.judge.world.judge(error)
            raise

    def _judged(self, event: m.Event, now_s: float) -> list[m.Action]:
        truth = self.judge.truth
        self.judge.before(event, now_s)
        try:
            actions: list[Any] = super().handle(event, now_s)
        except KvtierError:
            self.judge.refused(event)
            if truth.checks_cores:
                self.check()
            raise
        self.judge.after(event, actions, now_s)
        if self.judge.world.is_calm and isinstance(event, m.Tick | m.Scrub):
            return actions  # most of what happens then, and changes nothing
        self.judge.balance(self)
        if truth.checks_cores:
            self.check()
        return actions
