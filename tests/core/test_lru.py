"""The LRU policy against the obvious implementation."""

from __future__ import annotations

import random

from kvtier.core.policies import LruPolicy
from kvtier.types import BlockId


def block(number: int) -> BlockId:
    return BlockId(number.to_bytes(32, "big"), 0)


def test_the_oldest_candidate_goes_first() -> None:
    policy = LruPolicy()
    policy.touch([block(3)])
    policy.touch([block(1), block(2)])
    policy.touch([block(4)])
    assert policy.victim() is None, "touched is not offered"
    for number in (1, 4, 3):
        policy.add(block(number))
    assert policy.victim() == block(3)
    assert policy.victim() == block(3), "asking takes nothing away"
    policy.withdraw(block(3))
    assert policy.victim() == block(1)
    policy.touch([block(1)])
    assert policy.victim() == block(4)
    policy.forget(block(4))
    policy.add(block(3))
    assert policy.victim() == block(3), "what it was touched at is remembered while it is no candidate"
    policy.forget(block(3))
    policy.forget(block(1))
    assert policy.victim() is None
    policy.forget(block(2))
    policy.check(set(), set())


def test_against_a_model_with_bounded_garbage() -> None:
    rng = random.Random(5)
    policy = LruPolicy()
    order: list[int] = []  # least recent first
    candidates: set[int] = set()
    for step in range(20_000):
        match rng.randrange(6):
            case 0 | 1:
                number = rng.randrange(60)
                policy.touch([block(number)])
                order = [other for other in order if other != number] + [number]
            case 2 if free := [number for number in order if number not in candidates]:
                candidates.add(number := rng.choice(free))
                policy.add(block(number))
            case 3 if candidates:
                candidates.remove(number := rng.choice(sorted(candidates)))
                policy.withdraw(block(number))
            case 4 if order:
                order.remove(number := rng.choice(order))
                candidates.discard(number)
                policy.forget(block(number))
        oldest = next((number for number in order if number in candidates), None)
        assert policy.victim() == (None if oldest is None else block(oldest))
        if step % 50 == 0:
            policy.check({block(n) for n in order}, {block(n) for n in candidates})
