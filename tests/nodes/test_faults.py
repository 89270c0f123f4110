"""What goes wrong between nodes, with real processes: never a wrong byte, never a wait beyond the bound, and
recovery without a hand. Each fault shows in a metric or the status, and in the log.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.client import AdminClient
from tests.client.harness import until
from tests.nodes.harness import HEARTBEAT_S, OTHER_PROTOCOL, Node, Valkey, nothing_is_held, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Make = Callable[..., Node]
BLOCKS = 48
HOUR_S = 3600.0


def pair(make: Make, **options: object) -> tuple[Node, Node]:
    """An owner and one that asks it, who know each other."""
    owner, asker = make("owner", **options), make("asker", **options)
    until(lambda: owner.peers() and asker.peers(), "the two nodes see each other")
    return owner, asker


def during(fault: Callable[[], object], act: Callable[[], Any], after_s: float) -> Any:
    """`act`, with `fault` happening `after_s` after it began."""
    timer = threading.Timer(after_s, fault)
    timer.start()
    try:
        return act()
    finally:
        timer.join()


@pytest.mark.parametrize("transfer", ["nixl", "stream"])
def test_a_node_loads_what_another_stored(make_node: Make, transfer: str) -> None:
    owner, asker = pair(make_node, transfer=transfer)
    keys = prompt(BLOCKS)
    wanted = owner.store(keys, range(BLOCKS))
    asker.fetches_all(keys, wanted)
    assert asker.status().counters.pulled_blocks >= BLOCKS
    assert owner.status().counters.given_blocks >= BLOCKS
    (peer,) = asker.peers()
    assert (peer.transfer, peer.state) == (transfer, "up")
    assert peer.pull_bytes_per_s > 0
    with AdminClient(asker.daemon.socket) as admin:
        places = admin.lookup_prefix(keys, everywhere=True)
    assert places.blocks == BLOCKS
    assert {place.node_id for place in places.places} == {owner.status().node_id, asker.status().node_id}
    assert all(
        place.replica for place in places.places if place.node_id == asker.status().node_id and not place.hint
    )
    until(lambda: nothing_is_held(owner) and nothing_is_held(asker), "nothing is held any more")
    # What came is here now: no second journey.
    pulled = asker.status().counters.pulled_blocks
    asker.fetches_all(keys, wanted)
    assert asker.status().counters.pulled_blocks == pulled


@pytest.mark.parametrize("transfer", ["nixl", "stream"])
def test_the_owner_is_killed_in_the_middle(make_node: Make, transfer: str) -> None:
    owner, asker = pair(make_node, transfer=transfer)
    keys = prompt(BLOCKS)
    wanted = owner.store(keys, range(BLOCKS))
    if transfer == "stream":
        owner.proxy.mode = "slow"
    during(owner.daemon.kill, lambda: asker.fetch(keys, wanted), 0.03)
    until(lambda: nothing_is_held(asker), "the pull has ended")
    until(lambda: not asker.peers(), "the dead node is not listed any more")
    assert asker.metric("kvtier_peers") == 0
    assert "a node is gone" in asker.log()
    assert asker.fetch(keys, wanted)[1] < 2.0  # nobody is asked in vain
    owner.proxy.mode = "pass"
    owner.daemon.start()
    wanted = owner.store(keys, range(BLOCKS))
    asker.evict(keys)
    asker.fetches_all(keys, wanted)


@pytest.mark.parametrize("transfer", ["nixl", "stream"])
def test_the_owner_is_stopped_in_the_middle(make_node: Make, transfer: str) -> None:
    owner, asker = pair(make_node, transfer=transfer, dead_after_s=60)
    keys = prompt(BLOCKS)
    wanted = owner.store(keys, range(BLOCKS))
    if transfer == "stream":
        owner.proxy.mode = "slow"
    for delay_s in (0.0, 0.02, 0.1):
        during(lambda: owner.daemon.signal(signal.SIGSTOP), lambda: asker.fetch(keys, wanted), delay_s)
        # Others use the slots of a pull that was given up; whoever wrote to them late would be found out.
        other = prompt(BLOCKS)
        mine = asker.engine.store(other, range(BLOCKS))
        owner.daemon.signal(signal.SIGCONT)
        time.sleep(0.3)  # what was under way when the owner stopped goes on now
        assert asker.fetch(other, mine)[0] == BLOCKS
        asker.evict(other)
        asker.evict(keys)
    if transfer == "stream":  # with NIXL the owner's daemon has no part in it once the lease is there
        assert asker.failed_pulls() > 0
        assert "a pull failed" in asker.log()
    owner.proxy.mode = "pass"
    asker.fetches_all(keys, wanted)
    until(lambda: nothing_is_held(owner) and nothing_is_held(asker), "nothing is held any more")


@pytest.mark.parametrize("transfer", ["nixl", "stream"])
def test_a_silent_owner_costs_one_request_and_no_more(make_node: Make, transfer: str) -> None:
    owner, asker = pair(make_node, transfer=transfer, dead_after_s=60)
    keys = prompt(BLOCKS)
    wanted = owner.store(keys, range(BLOCKS))
    asker.fetches_all(keys, wanted)
    asker.evict(keys)
    owner.daemon.signal(signal.SIGSTOP)
    for _ in range(20):
        asker.fetch(keys, wanted)
        time.sleep(0.1)
    assert asker.failed_pulls() <= 2, "requests wait for it again and again"
    assert asker.peers()[0].state == "failing"
    assert asker.metric("kvtier_peers", state="failing") == 1
    assert "left alone until it answers" in asker.log()
    owner.daemon.signal(signal.SIGCONT)
    asker.fetches_all(keys, wanted)
    until(lambda: asker.peers()[0].state == "up", "it is used again")


@pytest.mark.parametrize("mode", ["swallow", "refuse", "garbage"])
def test_the_way_to_the_owner_breaks_in_the_middle(make_node: Make, mode: str) -> None:
    owner, asker = pair(make_node, transfer="stream")
    keys = prompt(BLOCKS)
    wanted = owner.store(keys, range(BLOCKS))
    owner.proxy.mode = "slow"

    def break_it() -> None:
        owner.proxy.mode = mode

    loaded, _ = during(break_it, lambda: asker.fetch(keys, wanted), 0.2)
    assert loaded < BLOCKS
    until(lambda: asker.status().counters.failed_pulls > 0, "the failed pull is counted")
    until(lambda: nothing_is_held(asker), "the pull has ended")
    for _ in range(6):
        asker.fetch(keys, wanted)
    until(lambda: asker.peers() and asker.peers()[0].state == "failing", "the breaker is open")
    assert asker.peers()[0].last_error
    loaded, took_s = asker.fetch(keys, wanted)
    assert took_s < 1.0  # an open breaker costs nothing
    assert asker.failed_pulls() > 0
    assert asker.metric("kvtier_peers", state="failing") == 1
    assert "a pull failed" in asker.log()
    owner.proxy.mode = "pass"
    asker.fetches_all(keys, wanted)
    until(lambda: asker.peers()[0].state == "up", "the breaker is closed again")


def test_a_slow_owner_is_cut_and_then_not_offered(make_node: Make) -> None:
    owner, asker = pair(make_node, transfer="stream", pull_floor_s=0.5)
    keys = prompt(BLOCKS)
    wanted = owner.store(keys, range(BLOCKS))
    owner.proxy.mode = "slow"  # 48 MiB at about 1.6 MiB/s
    loaded, _ = asker.fetch(keys, wanted)
    assert loaded < BLOCKS
    until(lambda: asker.metric("kvtier_pulls_total", reason="timeout") > 0, "it is counted")
    assert "a pull failed" in asker.log()
    owner.proxy.mode = "pass"
    asker.fetches_all(keys, wanted)


def test_blocks_that_are_evicted_at_the_owner_while_they_are_pulled(make_node: Make) -> None:
    owner, asker = pair(make_node, transfer="stream", lease_ttl_s=0.3, tick_s=0.05)
    keys = prompt(BLOCKS)
    wanted = owner.store(keys, range(BLOCKS))
    owner.proxy.mode = "slow"

    def overwrite() -> None:
        """The lease has run out: others take its slots while the bytes still travel."""
        time.sleep(0.5)
        for _ in range(4):
            owner.engine.store(prompt(40), range(40))

    during(overwrite, lambda: asker.fetch(keys, wanted), 0.0)
    until(lambda: asker.failed_pulls() > 0, "it is counted")
    assert "a pull failed" in asker.log()
    until(lambda: nothing_is_held(owner) and nothing_is_held(asker), "nothing is held any more")


def test_redis_is_killed_flushed_and_replaced(make_node: Make, valkey: Valkey) -> None:
    owner, asker = pair(make_node)
    keys = prompt(BLOCKS)
    wanted = owner.store(keys, range(BLOCKS))
    valkey.kill()
    until(lambda: not owner.status().index_reachable, "the status says that the index is gone")
    more = prompt(8)
    mine = owner.engine.store(more, range(50, 58))
    assert owner.fetch(more, mine, begin=60)[0] == 8  # everything local goes on
    assert asker.fetch(more, mine)[1] < 2.0
    assert owner.metric("kvtier_index_up") == 0
    assert owner.metric("kvtier_index_faults_total") > 0
    assert "the index cannot be reached" in owner.log()
    valkey.start()  # the same place, and nothing in it
    asker.fetches_all(keys, wanted)
    asker.fetches_all(more, mine)
    asker.evict([*keys, *more])
    assert valkey.say("FLUSHALL").startswith(b"+OK")
    asker.fetches_all(keys, wanted)
    assert owner.metric("kvtier_index_up") == 1
    assert "publishing all that it has" in owner.log()


def test_nodes_that_start_without_redis(make_node: Make, valkey: Valkey) -> None:
    valkey.kill()
    owner, asker = make_node("owner"), make_node("asker")
    keys = prompt(BLOCKS)
    wanted = owner.engine.store(keys, range(BLOCKS))
    assert owner.fetch(keys, wanted, begin=48)[0] == BLOCKS
    assert not owner.status().index_reachable
    assert asker.fetch(keys, wanted)[0] == 0
    assert asker.metric("kvtier_index_up") == 0
    assert "the index cannot be reached" in asker.log()
    valkey.start()
    asker.fetches_all(keys, wanted)


def test_a_restarted_owner_s_old_entries_do_not_count(make_node: Make) -> None:
    owner, asker = pair(make_node)
    keys = prompt(BLOCKS)
    wanted = owner.store(keys, range(BLOCKS))
    asker.fetches_all(keys, wanted)  # metadata of the first life is known now
    asker.evict(keys)
    before = owner.status().incarnation
    owner.daemon.kill()
    owner.daemon.start()
    assert owner.status().incarnation > before
    assert asker.fetch(keys, wanted)[0] == 0
    wanted = owner.store(keys, range(BLOCKS))
    asker.fetches_all(keys, wanted)


def test_refill_after_a_restart_comes_from_the_other_node(make_node: Make) -> None:
    owner, asker = pair(make_node)
    keys = prompt(BLOCKS)
    wanted = owner.store(keys, range(BLOCKS))
    asker.fetches_all(keys, wanted)
    until(lambda: asker.status().unpublished == 0, "replicas are published")
    owner.daemon.kill()
    owner.daemon.start()
    owner.fetches_all(keys, wanted)
    assert owner.status().counters.pulled_blocks >= BLOCKS


def test_a_node_whose_clock_is_an_hour_off(make_node: Make) -> None:
    owner, asker = make_node("owner", clock_offset_s=HOUR_S), make_node("asker")
    third = make_node("third", clock_offset_s=-HOUR_S)
    until(lambda: len(asker.peers()) == 2 and len(owner.peers()) == 2, "the nodes see each other")
    keys = prompt(16)
    wanted = owner.store(keys, range(16))
    asker.fetches_all(keys, wanted)
    third.fetches_all(keys, wanted)
    time.sleep(5 * HEARTBEAT_S)
    assert len(asker.peers()) == 2
    for node, ahead_s in ((owner, HOUR_S), (asker, 0.0), (third, -HOUR_S)):
        assert node.metric("kvtier_clock_ahead_seconds") == pytest.approx(ahead_s, abs=5.0)
        assert ("clock is not that of the index" in node.log()) == bool(ahead_s)


def test_a_peer_of_another_protocol_version(make_node: Make) -> None:
    """Rolling upgrades: the two see each other, share nothing, and say why; later they share."""
    owner, asker = pair(make_node, transfer="stream")
    keys = prompt(BLOCKS)
    wanted = owner.store(keys, range(BLOCKS))
    owner.daemon.kill()
    owner.daemon.start(OTHER_PROTOCOL)
    until(lambda: owner.peers() and asker.peers(), "the two nodes see each other")
    for node in (owner, asker):
        until(lambda node=node: node.peers()[0].last_error, "it is said why nothing is shared")  # type: ignore[misc]
        assert "protocol" in node.peers()[0].last_error
        assert node.metric("kvtier_peers", state="failing") == 1
        assert "protocol" in node.log()
    loaded, took_s = asker.fetch(keys, wanted)
    assert (loaded, took_s < 2.0) == (0, True)
    owner.daemon.kill()
    owner.daemon.start()
    wanted = owner.store(keys, range(BLOCKS))
    asker.fetches_all(keys, wanted)


def test_two_daemons_of_one_identity(make_node: Make) -> None:
    owner, asker = pair(make_node)
    twin = make_node("twin", identity_of=owner)
    until(lambda: owner.daemon.process.poll() is not None, "the older daemon stops serving")
    assert owner.daemon.process.returncode != 0
    assert "must stop" in owner.log()
    keys = prompt(16)
    wanted = twin.store(keys, range(16))
    asker.fetches_all(keys, wanted)


def test_many_nodes_fetch_from_each_other_at_once(make_node: Make) -> None:
    """One owner, three askers at the same time, each with its own prompts beside the shared one."""
    owner = make_node("owner")
    askers = [make_node(f"asker{i}") for i in range(3)]
    until(lambda: all(len(node.peers()) == 3 for node in [owner, *askers]), "the nodes see each other")
    shared = prompt(24)
    wanted = owner.store(shared, range(24))
    failures: list[BaseException] = []

    def work(number: int, node: Node) -> None:
        try:
            node.fetches_all(shared, wanted)
            own = prompt(8)
            mine = node.store(own, range(30, 38))
            owner.fetches_all(own, mine, begin=30 + 8 * number)  # its pages are shared by all threads here
        except BaseException as error:  # told below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=its) for its in enumerate(askers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
