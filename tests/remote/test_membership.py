"""Who lives, on a real Valkey: comings, goings, deaths, fences, and an index that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtier.config import Config
from kvtier.errors import Fenced
from kvtier.remote.membership import Membership
from kvtier.types import NodeRecord
from tests.remote.harness import Cuttable, record, until

MakeIndex = Callable[..., Awaitable[Cuttable]]
Settings = Callable[..., Config]


class Member:
    """One node's membership and all that it was told."""

    def __init__(
        self, index: Cuttable, config: Config, record: NodeRecord, *, is_registered: bool = True
    ) -> None:
        self.index = index
        self.record = record
        self.changes: list[list[NodeRecord]] = []
        self.fences: list[Fenced] = []
        self.losses = 0
        self.faults: list[str] = []
        self.membership = Membership(
            index,
            lambda: self.record,
            config,
            is_registered=is_registered,
            on_change=self.changes.append,
            on_fenced=self.fences.append,
            on_lost=self._lose,
            on_fault=self.faults.append,
        )
        self.task: asyncio.Task[None] | None = None

    def _lose(self) -> None:
        self.losses += 1

    @property
    def live(self) -> set[str]:
        return {each.name for each in self.membership.live.values()}

    def start(self) -> None:
        self.task = asyncio.create_task(self.membership.run())

    async def die(self) -> None:
        """Without a word."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def make_member(make_index: MakeIndex, settings: Settings) -> Any:
    made: list[Member] = []

    async def make(
        node: int, incarnation: int = 1, instance: str = "a", *, registers: bool = True, **values: Any
    ) -> Member:
        config = settings(**values)
        index = await make_index(config)
        its = record(node, incarnation, instance)
        if registers:
            its = replace(its, incarnation=await index.register(its))
        made.append(Member(index, config, its, is_registered=registers))
        made[-1].start()
        return made[-1]

    yield make
    for member in made:
        await member.die()


async def test_nodes_see_each_other_come_and_go(make_member: Any) -> None:
    one = await make_member(1)
    two = await make_member(2)
    three = await make_member(3)
    await until(lambda: one.live == {"node-2", "node-3"}, "one sees two and three")
    await until(lambda: two.live == {"node-1", "node-3"}, "two sees one and three, not itself")
    await three.die()
    await three.membership.leave()
    assert three.live == set()
    await until(lambda: one.live == two.live ^ {"node-1", "node-2"} == {"node-2"}, "three has left")
    assert [{record.name for record in told} for told in one.changes[-1:]] == [{"node-2"}]
    assert one.losses == two.losses == 0
    assert one.membership.is_up
    assert one.membership.last_error == ""


async def test_a_dead_node_is_forgotten(make_member: Any) -> None:
    one = await make_member(1, dead_after_s=1.0)
    two = await make_member(2, dead_after_s=1.0)
    await until(lambda: one.live == {"node-2"}, "one sees two")
    await two.die()
    await until(lambda: not one.live, "two is dead", deadline_s=10.0)


async def test_what_a_node_says_of_itself_is_told(make_member: Any) -> None:
    one = await make_member(1)
    two = await make_member(2)
    await until(lambda: one.live == {"node-2"}, "one sees two")
    two.record = replace(two.record, address="127.0.0.1:9", load=0.5)
    await until(
        lambda: (
            [(each.address, each.load) for each in one.membership.live.values()] == [("127.0.0.1:9", 0.5)]
        ),
        "one hears of the new address",
    )


async def test_a_younger_daemon_of_the_same_identity_fences_the_older(make_member: Any) -> None:
    old = await make_member(1)
    other = await make_member(2)
    await until(lambda: old.live == {"node-2"}, "they see each other")
    young = await make_member(1, instance="b")
    assert young.record.incarnation > old.record.incarnation
    await until(lambda: old.fences, "the older is told")
    assert old.live == set()
    assert old.task is not None
    await old.task
    said = len(old.index.calls)
    await until(
        lambda: [each.incarnation for each in other.membership.live.values()] == [young.record.incarnation],
        "others see the younger",
    )
    await old.membership.leave()
    assert len(old.index.calls) == said, "a fenced daemon says nothing more"
    assert young.fences == []
    assert len(old.fences) == 1


async def test_two_instances_of_one_incarnation_do_not_both_live(make_member: Any) -> None:
    """Copies of one data directory, both started without the index."""
    one = await make_member(1, 5, "a", registers=False)
    await until(lambda: one.losses, "the first is known")
    two = await make_member(1, 5, "b", registers=False)
    await until(lambda: two.fences, "the second is fenced")
    assert one.fences == []


async def test_an_index_that_forgets_is_told_again(make_member: Any, valkey: Any) -> None:
    one = await make_member(1)
    two = await make_member(2)
    await until(lambda: one.live and two.live, "they see each other")
    with valkey.client() as client:
        client.flushall()
    await until(lambda: one.losses == 1 and two.losses == 1, "both notice")
    await until(lambda: one.live == {"node-2"} and two.live == {"node-1"}, "they see each other again")
    assert one.fences == two.fences == []


async def test_without_the_index_others_are_forgotten_and_found_again(make_member: Any) -> None:
    one = await make_member(1)
    await make_member(2)
    await until(lambda: one.live == {"node-2"}, "one sees two")
    one.index.is_cut = True
    await until(lambda: not one.membership.is_up, "one notices")
    assert "mend" in one.membership.last_error
    await until(lambda: not one.live, "nobody counts that was not heard of for so long", deadline_s=10.0)
    assert set(one.faults) <= {"heartbeat", "nodes"}
    one.index.is_cut = False
    await until(lambda: one.live == {"node-2"}, "one is back")
    assert one.membership.last_error == ""
    await until(lambda: one.losses == 1, "the index had dropped it meanwhile")


async def test_a_short_loss_changes_nothing(make_member: Any) -> None:
    one = await make_member(1, dead_after_s=30.0)
    await make_member(2, dead_after_s=30.0)
    await until(lambda: one.live == {"node-2"}, "one sees two")
    told = len(one.changes)
    one.index.is_cut = True
    await until(lambda: len(one.faults) >= 3, "it tries again and again")
    one.index.is_cut = False
    await until(lambda: one.membership.is_up, "it answers again")
    assert len(one.changes) == told
    assert one.losses == 0


async def test_a_node_that_begins_without_the_index_is_new_to_it(make_member: Any) -> None:
    one = await make_member(1, 7, registers=False)
    two = await make_member(2)
    await until(lambda: two.live == {"node-1"}, "it is known by its own incarnation")
    assert [each.incarnation for each in two.membership.live.values()] == [7]
    assert one.losses == 1


async def test_a_hanging_index_is_given_up(make_member: Any) -> None:
    """It neither answers nor breaks: every call has its bound, and the node leaves in bounded time."""
    one = await make_member(1)
    await until(lambda: one.membership.is_up and "nodes" in one.index.calls, "it works")
    one.index.passes.clear()
    await until(lambda: len(one.faults) >= 2, "calls are given up")
    assert one.membership.last_error == "no answer in time"
    await one.die()
    await one.membership.leave()


async def test_clocks_of_different_nodes_do_not_matter(make_index: MakeIndex, settings: Settings) -> None:
    """One of two is an hour ahead and one of them an hour behind: they see each other all the same."""
    tasks = []
    live: list[Membership] = []
    for node, ahead_s in ((1, 3600.0), (2, -3600.0)):
        index = await make_index()
        its = replace(record(node), incarnation=await index.register(record(node)))
        membership = Membership(
            index,
            lambda its=its: its,  # type: ignore[misc]
            settings(dead_after_s=1.0),
            is_registered=True,
            on_change=lambda _: None,
            on_fenced=lambda _: pytest.fail("fenced"),
            on_lost=lambda: pytest.fail("lost"),
            clock=lambda ahead_s=ahead_s: asyncio.get_running_loop().time() + ahead_s,  # type: ignore[misc]
        )
        live.append(membership)
        tasks.append(asyncio.create_task(membership.run()))
    await until(lambda: all(len(each.live) == 1 for each in live), "they see each other")
    begin = len(live[0]._index.calls)  # type: ignore[attr-defined]
    await until(
        lambda: (
            all(len(each.live) == 1 for each in live) and live[0]._index.calls[begin:].count("heartbeat") > 6
        ),  # type: ignore[attr-defined]
        "and go on for longer than a dead node counts",
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
