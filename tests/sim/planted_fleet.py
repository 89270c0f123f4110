"""Bugs planted into what nodes do with each other, one at a time: the fleet has to find each from outside.

They are run without `CacheCore.check`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvtier.core import messages as m
from kvtier.core.blocks import Block
from kvtier.core.cache import CacheCore
from kvtier.core.engines import Engines, Party
from kvtier.core.forest import Forest
from kvtier.core.holds import Holds
from kvtier.core.leases import Leases
from kvtier.core.plans import Budget
from kvtier.core.pulls import Pulls
from kvtier.core.replies import ReplyCache
from kvtier.core.residency import Residency
from kvtier.hashing import Hasher
from kvtier.remote import answers, pulls
from kvtier.remote.membership import Membership
from kvtier.remote.publisher import Publisher
from kvtier.remote.pulls import Puller
from kvtier.remote.remote import Remote
from kvtier.server import peer_wire
from kvtier.testing.fleet_transfer import SimulatedTransfer
from kvtier.types import Location
from kvtier.v1 import peer_pb2 as pb

Plant = Callable[[pytest.MonkeyPatch], None]


def pulls_end_on_a_timer(patch: pytest.MonkeyPatch) -> None:
    run = Puller.run

    async def wrong(self: Puller, pull: m.Pull, report: Any) -> None:
        task = asyncio.ensure_future(run(self, pull, lambda _: None))
        await asyncio.wait([task], timeout=0.05)
        report(m.PullEnded(pull.pull, "timeout"))

    patch.setattr(Puller, "run", wrong)


def a_transfer_that_is_late_is_left_alone(patch: pytest.MonkeyPatch) -> None:
    async def wrong(self: SimulatedTransfer) -> None:
        return None

    patch.setattr(SimulatedTransfer, "_destroy_surely", wrong)


def pulls_do_not_wait_for_the_other_batch(patch: pytest.MonkeyPatch) -> None:
    async def wrong(tasks: Sequence[asyncio.Task[None]]) -> None:
        return None

    patch.setattr(pulls, "settle", wrong)


def pulled_bytes_are_not_verified(patch: pytest.MonkeyPatch) -> None:
    async def wrong(self: Hasher, blocks: Any, checksums: Any) -> list[int]:
        return []

    patch.setattr(Hasher, "differing", wrong)


def the_clock_of_a_lease_is_ignored(patch: pytest.MonkeyPatch) -> None:
    transfer = Puller._transfer

    async def wrong(self: Puller, job: Any, *args: Any) -> None:
        job.lease_end_s = math.inf
        await transfer(self, job, *args)

    patch.setattr(Puller, "_transfer", wrong)


def owners_ignore_which_life_is_asked(patch: pytest.MonkeyPatch) -> None:
    acquire = peer_wire.acquire

    def wrong(message: pb.AcquireRequest, me: tuple[str, int], *args: Any) -> m.Acquire:
        return acquire(message, (message.owner_id, message.incarnation), *args)

    def anybody(answer: pb.HelloResponse, record: Any) -> answers.Peer:
        return hello(answer, replace(record, node=answer.node_id, incarnation=answer.incarnation))

    hello = answers.peer
    patch.setattr(peer_wire, "acquire", wrong)
    patch.setattr(answers, "peer", anybody)


def places_of_dead_lives_count(patch: pytest.MonkeyPatch) -> None:
    def wrong(places: Sequence[Location], usable: object) -> tuple[Location, ...]:
        return tuple(places)

    patch.setattr(Remote, "_counting", staticmethod(wrong))


def repeated_messages_are_done_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplyCache, "get", lambda self, engine, call_id: None)


def removals_are_not_told_to_the_index(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "remove", lambda self, blocks: None)


def a_lost_index_gets_no_snapshot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "republish", lambda self: None)


def an_older_life_goes_on_when_it_is_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_give_up", lambda self, error: None)


def a_failed_pull_is_not_reported(patch: pytest.MonkeyPatch) -> None:
    run = Puller.run

    async def wrong(self: Puller, pull: m.Pull, report: Any) -> None:
        await run(self, pull, lambda event: None if getattr(event, "fault", "") else report(event))

    patch.setattr(Puller, "run", wrong)


def blocks_arrive_before_they_are_here(patch: pytest.MonkeyPatch) -> None:
    stream = Puller._stream

    async def wrong(self: Puller, job: Any, transfer: Any, peer: Any, acquired: Any) -> None:
        if not job.arrived:
            job.arrived = 1
            job.report(m.Arrived(job.pull.pull, acquired.checksums[:1]))
        await stream(self, job, transfer, peer, acquired)

    patch.setattr(Puller, "_stream", wrong)


def blocks_are_named_by_their_place_in_the_batch(patch: pytest.MonkeyPatch) -> None:
    acquired = answers.acquired

    def wrong(*args: Any) -> answers.Acquired:
        its = acquired(*args)
        return replace(its, slots=its.slots[::-1], checksums=its.checksums[::-1])

    patch.setattr(answers, "acquired", wrong)


def a_dead_node_lives_on(patch: pytest.MonkeyPatch) -> None:
    answered = Membership._answered

    def wrong(self: Membership, records: Any) -> None:
        known = {its.record.node: its.record for its in self._seen.values()}
        answered(
            self, list((known | {record.node: known.get(record.node, record) for record in records}).values())
        )

    patch.setattr(Membership, "_answered", wrong)


# ---- in the core


def replicas_are_counted_twice(patch: pytest.MonkeyPatch) -> None:
    commit = Forest.commit

    def wrong(self: Forest, block: Block, checksum: bytes) -> None:
        commit(self, block, checksum)
        if block.replica:
            block.pool().tier.resident_bytes += block.shape.slot_bytes

    patch.setattr(Forest, "commit", wrong)


def slots_of_pulls_go_back_on_a_timer(patch: pytest.MonkeyPatch) -> None:
    tick, ended = CacheCore._tick, Pulls.ended

    def wrong_tick(self: CacheCore, event: m.Tick, now_s: float) -> list[m.Action]:
        for id, entry in list(self.pulls.running.items()):
            if now_s - entry.since_s > 0.1:
                self.pulls.ended(m.PullEnded(id, "late"), now_s)
        return tick(self, event, now_s)

    def wrong_ended(self: Pulls, event: m.PullEnded, now_s: float) -> None:
        if event.pull in self.running:
            ended(self, event, now_s)

    patch.setattr(CacheCore, "_tick", wrong_tick)
    patch.setattr(Pulls, "ended", wrong_ended)


def nobody_is_told_that_a_pull_failed(patch: pytest.MonkeyPatch) -> None:
    cut = Leases._cut

    def wrong(self: Leases, lease: Any, count: int) -> None:
        cut(self, lease, count)
        self.readies = [ready for ready in self.readies if ready.slots]

    patch.setattr(Leases, "_cut", wrong)


def nobody_is_told_what_arrives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "arrived", lambda self, blocks: None)


def holds_outlive_what_never_came(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holds, "shorten", lambda self, rest: None)


def leases_of_peers_do_not_protect(patch: pytest.MonkeyPatch) -> None:
    give, end = Leases.give, Leases.end

    def wrong_give(self: Leases, event: m.Acquire, lease: int, *args: Any) -> m.Leased:
        reply = give(self, event, lease, *args)
        if reply.lease:
            self._residency.unguard(self.leases[lease].blocks[-1])
        return reply

    def wrong_end(self: Leases, lease: Any) -> None:
        if lease.engine.name.startswith("peer:"):
            self._residency.guard(lease.blocks[-1])
        end(self, lease)

    patch.setattr(Leases, "give", wrong_give)
    patch.setattr(Leases, "end", wrong_end)


def a_peer_may_lease_everything(patch: pytest.MonkeyPatch) -> None:
    peer = Engines.peer

    def wrong(self: Engines, node: str, now_s: float) -> Party:
        party = peer(self, node, now_s)
        party.share = 1.0
        return party

    patch.setattr(Engines, "peer", wrong)


def pulls_may_fill_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Budget, "room_bytes", lambda self, tier: tier.allocated_bytes)


def evictions_are_not_published(patch: pytest.MonkeyPatch) -> None:
    changes = Residency.changes

    def wrong(self: Residency) -> list[m.Publish]:
        return [replace(publish, removed=[]) for publish in changes(self)]

    patch.setattr(Residency, "changes", wrong)


PLANTS: list[Plant] = [
    pulls_end_on_a_timer,
    a_transfer_that_is_late_is_left_alone,
    pulls_do_not_wait_for_the_other_batch,
    pulled_bytes_are_not_verified,
    the_clock_of_a_lease_is_ignored,
    owners_ignore_which_life_is_asked,
    places_of_dead_lives_count,
    repeated_messages_are_done_again,
    removals_are_not_told_to_the_index,
    a_lost_index_gets_no_snapshot,
    an_older_life_goes_on_when_it_is_fenced,
    a_failed_pull_is_not_reported,
    blocks_arrive_before_they_are_here,
    blocks_are_named_by_their_place_in_the_batch,
    a_dead_node_lives_on,
    replicas_are_counted_twice,
    slots_of_pulls_go_back_on_a_timer,
    nobody_is_told_that_a_pull_failed,
    nobody_is_told_what_arrives,
    holds_outlive_what_never_came,
    leases_of_peers_do_not_protect,
    a_peer_may_lease_everything,
    pulls_may_fill_everything,
    evictions_are_not_published,
]
