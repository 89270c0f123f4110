"""The order of each policy, by itself and in the core: what it keeps, drops and remembers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence

import pytest

from kvtier.core import messages as m
from kvtier.core.policies import POLICIES, LruPolicy, S3FifoPolicy, WorthPolicy
from kvtier.core.policies.heap import LazyHeap
from kvtier.core.policies.worth import DEPTH_OF_DOUBLE, MAX_REUSE
from kvtier.interfaces import Policy
from kvtier.types import BlockId, Key
from tests.core.world import PAGE, G, R, World, chain, make_layout

each = pytest.mark.parametrize("policy", POLICIES)
each_but_lru = pytest.mark.parametrize("policy", [name for name in POLICIES if name != "lru"])


def block(number: int) -> BlockId:
    return BlockId(number.to_bytes(32, "big"), 0)


class Told:
    """A policy and what it was told: as a core would, and checked after each step."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.now = 0
        self.residents: set[BlockId] = set()
        self.candidates: dict[BlockId, int] = {}

    def store(self, number: int, uses: int = 0, depth: int = 0) -> None:
        """A new block, which is a candidate at once."""
        self.policy.came(block(number))
        self.residents.add(block(number))
        self.access(number, uses, depth)

    def access(self, number: int, uses: int, depth: int = 0, after: int | None = None) -> None:
        """It is a candidate (again), accessed just now."""
        id = block(number)
        if id in self.candidates:
            self.policy.withdraw(id)
        self.now += 1
        self.candidates[id] = self.now
        self.policy.add(id, self.now, uses, depth, None if after is None else block(after))
        self.check()

    def forget(self, id: BlockId) -> None:
        self.residents.remove(id)
        self.candidates.pop(id, None)
        self.policy.forget(id)
        self.check()

    def evict(self) -> int:
        id = self.policy.victim()
        assert id is not None
        assert self.policy.victim() == id, "asked again it answers the same"
        assert id in self.candidates
        self.forget(id)
        return int.from_bytes(id.key, "big")

    def check(self) -> None:
        self.policy.check(self.candidates, self.residents)


# ---- each by itself


def test_lru_the_oldest_access_goes_first() -> None:
    told = Told(LruPolicy())
    assert told.policy.victim() is None
    for number in (1, 2, 3):
        told.store(number)
    told.access(1, uses=9)
    assert [told.evict() for _ in range(3)] == [2, 3, 1]
    assert told.policy.victim() is None


def test_s3fifo_what_was_used_stays_and_what_was_not_goes_first() -> None:
    told = Told(S3FifoPolicy())
    for number in range(10):
        told.store(number)
    told.access(2, uses=1)
    told.access(4, uses=1)
    for number in range(10, 30):
        told.store(number)
    gone = [told.evict() for _ in range(25)]
    assert gone == [n for n in range(30) if n not in (2, 4)][:25], (
        "first in, first out, but for what was used"
    )


def test_s3fifo_what_comes_back_soon_enters_main() -> None:
    told = Told(S3FifoPolicy())
    for number in range(20):
        told.store(number)
    assert told.evict() == 0
    told.store(0)
    for number in range(20, 39):
        told.store(number)
        assert told.evict() != 0
    told.store(40)
    assert [told.evict() for _ in range(17)] == list(range(20, 37))


def test_s3fifo_ghosts_are_forgotten_after_as_many_more() -> None:
    told = Told(S3FifoPolicy())
    for number in range(4):
        told.store(number)
    for number in range(4, 12):
        told.evict()
        told.store(number)
    told.evict()
    told.store(0)  # it went eight blocks ago, where four are remembered
    for number in range(20, 23):
        told.evict()
        told.store(number)
    assert told.evict() == 0, "it counts as new"


def test_s3fifo_main_gives_another_round_for_each_use_and_not_for_ever() -> None:
    told = Told(S3FifoPolicy())
    told.store(1)
    told.access(1, uses=1)
    told.store(2)
    told.access(2, uses=1)
    assert told.policy.victim() == block(1), "both are in main, their uses are spent"
    told.access(1, uses=8)
    assert told.evict() == 2
    rounds = 0
    while 1 in [int.from_bytes(id.key, "big") for id in told.residents]:
        told.store(100 + rounds)
        told.access(100 + rounds, uses=1)
        told.evict()
        rounds += 1
    assert 2 <= rounds <= 6, "eight uses are three rounds at most"


def test_s3fifo_what_is_uncovered_takes_the_place_of_what_went() -> None:
    told = Told(S3FifoPolicy())
    for number in (1, 2):  # the ends of two prompts of two blocks, each used once
        told.policy.came(block(10 + number))
        told.residents.add(block(10 + number))
        told.store(number, depth=1)
        told.access(number, uses=1, depth=1)
    order = []
    for _ in range(2):
        id = told.policy.victim()
        assert id is not None
        number = int.from_bytes(id.key, "big")
        told.candidates[block(10 + number)] = 1
        told.policy.add(block(10 + number), 1, 1, 0, id)
        told.forget(id)
        order += [number, told.evict()]
    assert order == [1, 11, 2, 12], "a prompt goes in one piece"


def test_worth_a_use_is_one_more_lifetime() -> None:
    told = Told(WorthPolicy())
    for number in range(10):
        told.store(number)
    told.access(0, uses=1)
    lived = {}
    for number in range(10, 60):
        told.store(number)
        lived.setdefault(told.evict(), told.now)
    assert lived[0] > lived[10] > lived[1]
    lifetime = lived[20] - 22  # number n was stored at n + 2
    assert 1.5 * lifetime < lived[0] - 11 < 2.5 * lifetime


def test_worth_deep_blocks_and_often_used_ones_stay_longer_in_this_order() -> None:
    told = Told(WorthPolicy())
    for number in range(100, 120):
        told.store(number)
    assert [told.evict() for _ in range(20)] == list(range(100, 120)), "the length of a life is known now"
    for number in range(200, 210):
        told.store(number)
    told.store(1, depth=DEPTH_OF_DOUBLE)
    told.store(2, uses=3)
    told.store(3)
    told.store(4, uses=3, depth=DEPTH_OF_DOUBLE)
    for number in range(10, 30):
        told.store(number)
    order = [told.evict() for _ in range(len(told.residents))]
    assert [n for n in order if n < 10] == [3, 1, 2, 4]
    assert order[-1] == 4


def test_worth_ages_what_was_hot_is_gone_after_a_few_lifetimes() -> None:
    told = Told(WorthPolicy())
    for number in range(20):
        told.store(number)
    told.access(0, uses=10**6)
    for number in range(100, 100 + 20 * 12):
        told.store(number)
        if told.evict() == 0:
            break
    else:
        pytest.fail("what was hot once stays for ever")
    assert told.now > 20 * 3, "and not at once"


def test_worth_what_comes_back_has_its_earlier_life() -> None:
    told = Told(WorthPolicy())
    for number in range(10):
        told.store(number)
    assert told.evict() == 0
    told.store(0)
    for number in range(10, 18):
        told.store(number)
        assert told.evict() != 0
    lived = 0
    while told.evict() != 0:
        told.store(100 + lived)
        lived += 1
    assert lived >= 5


def test_worth_an_earlier_life_counts_no_more_than_a_hot_one() -> None:
    told = Told(WorthPolicy())
    for life in range(3 * MAX_REUSE):
        told.store(0)
        told.store(1)
        told.forget(block(0))
        told.forget(block(1))
        del life
    told.store(0)
    told.check()


# ---- all alike


@each
def test_candidates_come_and_go_in_any_order(policy: str) -> None:
    rng = random.Random(5)
    told = Told(POLICIES[policy]())
    uses: dict[BlockId, int] = {}
    for step in range(6000):
        what = rng.random()
        if what < 0.35 and len(told.residents) < 50:
            number = rng.randrange(80)
            if block(number) not in told.residents:
                uses[block(number)] = 0
                told.store(number, depth=number % 7)
        elif what < 0.6 and told.residents:
            id = rng.choice(sorted(told.residents))
            uses[id] += rng.random() < 0.5
            told.access(int.from_bytes(id.key, "big"), uses[id])
        elif what < 0.75 and told.candidates:
            id = rng.choice(sorted(told.candidates))
            told.policy.withdraw(id)
            del told.candidates[id]
            told.check()
        elif what < 0.8 and told.residents:
            told.forget(rng.choice(sorted(told.residents)))
        elif told.candidates:
            told.evict()
        victim = told.policy.victim()
        assert (victim is None) == (not told.candidates), step
        if policy == "lru":
            assert victim == min(told.candidates, key=told.candidates.__getitem__, default=None)
    while told.candidates:
        told.evict()


def test_a_heap_finds_the_smallest_and_keeps_little_garbage() -> None:
    rng = random.Random(5)
    heap = LazyHeap()
    model: dict[int, int] = {}
    for step in range(10_000):
        number = rng.randrange(60)
        if rng.random() < 0.5:
            model.pop(number, None)
            heap.discard(block(number))
        else:
            model[number] = rng.randrange(step + 1)
            heap.put(block(number), model[number])
        least = min(model.values(), default=None)
        found = heap.peek()
        assert (None if found is None else heap.keys[found]) == least
        assert len(heap) == len(model)
        if step % 50 == 0:
            heap.check()


@each
def test_the_cost_of_a_call_is_flat(policy: str) -> None:
    """Steps of the interpreter, not time: those of a call among 16 times as many blocks are about as many."""
    costs = [_steps(POLICIES[policy], count) for count in (500, 8000)]
    assert costs[1] < 2 * costs[0], costs


def _steps(make: Callable[[], Policy], count: int) -> float:
    policy = make()
    for number in range(count):
        policy.came(block(number))
        policy.add(block(number), number, number % 3, number % 9)
    lines = 0

    def trace(frame: object, event: str, arg: object) -> object:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for number in range(count, 3 * count):
            victim = policy.victim()
            assert victim is not None
            policy.forget(victim)
            policy.came(block(number))
            policy.add(block(number), number, number % 3, number % 9)
    finally:
        sys.settrace(None)
    return lines / (2 * count)


# ---- in the core


def read(w: World, keys: Sequence[Key]) -> int:
    offer = w.lookup(keys)
    if offer.blocks:
        w.release(w.load(keys[: offer.blocks]).lease)
    return int(offer.blocks)


def _kept_after_a_scan(policy: str) -> int:
    w = World(slots=40, policy=policy)
    hot = chain("hot", 8)
    w.store(hot)
    for _ in range(2):
        read(w, hot)
    for i in range(12):  # 1.2 times the tier
        w.store(chain(f"scan{i}", 4))
    return w.match(hot)


def test_a_scan_flushes_what_is_reused_under_lru_alone() -> None:
    assert {policy: _kept_after_a_scan(policy) for policy in POLICIES} == {"lru": 0, "s3fifo": 8, "worth": 8}


@each_but_lru
def test_what_was_hot_goes_at_last(policy: str) -> None:
    w = World(slots=40, policy=policy)
    old, new = chain("old", 8), [chain(f"new{i}", 8) for i in range(5)]
    w.store(old)
    for _ in range(3):
        read(w, old)
    for _ in range(30):
        for keys in new:
            read(w, keys)
            w.store(keys)
        if not w.match(old):
            return
    pytest.fail("what nobody has used for 30 rounds is still here")


@each
def test_a_prefix_that_prompts_share_stays_longer_than_their_ends(policy: str) -> None:
    w = World(slots=24, policy=policy)
    stem = chain("stem", 4)
    w.store(stem)
    for i in range(20):
        assert read(w, stem) == 4
        w.store(chain(f"end{i}", 6, stem[-1]), stem[-1])
    assert w.match(stem) == 4


@each_but_lru
def test_a_block_that_is_continued_anew_counts_as_used(policy: str) -> None:
    """An engine that has the prefix in its own memory never loads it: it stores behind it alone."""
    w = World(slots=40, policy=policy)
    stem = chain("stem", 4)
    w.store(stem)
    for i in range(3):
        w.store(chain(f"end{i}", 2, stem[-1]), stem[-1])
    for i in range(9):
        w.store(chain(f"scan{i}", 4))
    assert w.match(stem) == 4


@each
def test_replicas_go_first(policy: str) -> None:
    w = World(slots=8, policy=policy, has_index=True, max_pulled_fraction=1.0)
    pulled, own = chain("pulled", 4), chain("own", 4)
    w.store(own)
    _, (pull,) = w.locate(pulled, "pppp")
    w.arrive(pull, 4)
    w.end(pull)
    w.release_hold()
    for _ in range(5):
        read(w, pulled)
    w.store(chain("new", 4))
    assert w.match(own) == 4
    assert w.match(pulled) == 0


@each
def test_a_replica_that_becomes_own_is_known_to_one_policy(policy: str) -> None:
    w = World(slots=8, policy=policy, has_index=True, max_pulled_fraction=1.0)
    keys = chain("a", 4)
    _, (pull,) = w.locate(keys, "pppp")
    w.arrive(pull, 4)
    w.end(pull)
    w.release_hold()
    w.store(keys)
    w.store(chain("b", 8))
    assert w.match(keys) == 0
    w.store(keys)
    assert w.match(keys) == 4


@each
def test_stores_never_wait_for_demotes(policy: str) -> None:
    """The medium answers nothing: what demotes hold is bounded, and the rest of the tier serves stores."""
    w = World(slots=32, nvme=64, policy=policy, max_demotes=2, demote_batch_bytes=4 * PAGE)
    for i in range(40):
        assert w.store(chain(f"p{i}", 4)) == [G] * 4
        assert w.tier().resident_bytes <= 32 * PAGE
    assert len(w.demotes) == 2


@each
def test_above_the_watermark_what_goes_next_is_below(policy: str) -> None:
    """Demotes keep up: then whatever a store evicts is in the tier below, so that nothing is lost."""
    w = World(slots=32, nvme=400, nvme_frees_at_once=True, policy=policy, demote_high_fraction=0.5)
    prompts = [chain(f"p{i}", 4) for i in range(40)]
    for i, keys in enumerate(prompts):
        w.store(keys)
        w.demote_all()
        read(w, prompts[i // 2])
        w.demote_all()
    assert all(max(w.match(keys), w.in_nvme(keys)) == 4 for keys in prompts)


@each
def test_a_full_tier_below_takes_what_is_worth_more_alone(policy: str) -> None:
    """`admit_by_worth`: a scan is written down under LRU alone, where the latest is worth most."""
    w = World(
        slots=16,
        nvme=16,
        nvme_frees_at_once=True,
        policy=policy,
        demote_high_fraction=0.1,
        admit_by_worth=True,
    )
    hot = [chain(f"hot{i}", 4) for i in range(4)]
    for _ in range(3):
        for keys in hot:
            read(w, keys)
            w.store(keys)
            w.demote_all()
    w.tick()
    w.demote_all()
    before = w.core.lower[0].counts.demoted_blocks
    assert [w.in_nvme(keys) for keys in hot] == [4] * 4
    for i in range(3):
        w.store(chain(f"scan{i}", 4))
        w.demote_all()
    written = w.core.lower[0].counts.demoted_blocks - before
    assert (written > 0) == (policy == "lru")


@each
def test_a_take_over_by_another_size_leaves_nothing_remembered(policy: str) -> None:
    w = World(slots=16, policy=policy)
    w.register("f", make_layout(4))
    for i in range(6):
        w.store(chain(f"a{i}", 4))
        read(w, chain(f"a{i}", 4))
    assert R not in w.store(chain("big", 4), engine="f")
    assert R not in w.store(chain("b", 16))


@each
def test_corrupt_blocks_in_the_middle_leave_the_policy_right(policy: str) -> None:
    w = World(slots=16, policy=policy)
    keys = chain("a", 6)
    w.store(keys)
    w.release(w.load(keys).lease, corrupt=[keys[2]])
    (verify,) = w.told(m.Verify)
    w.do(m.Verified(verify.verify, intact=False))
    assert w.match(keys) == 2
    w.store(keys)
    w.store(chain("b", 16))
    assert w.match(keys) == 0
