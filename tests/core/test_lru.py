"""The LRU policy against the obvious implementation."""

from __future__ import annotations

import random

from kvtier.core.policies import LruPolicy
from kvtier.types import BlockId


def block(number: int) -> BlockId:
    return BlockId(number.to_bytes(32, "big"), 0)


def test_the_oldest_access_goes_first() -> None:
    policy = LruPolicy()
    assert policy.victim() is None
    for number, accessed in ((1, 5), (2, 3), (3, 4)):
        policy.add(block(number), accessed, 0, 0)
    assert policy.victim() == block(2)
    assert policy.victim() == block(2), "asking takes nothing away"
    policy.withdraw(block(2))
    assert policy.victim() == block(3)
    policy.add(block(2), 9, 0, 0)
    policy.forget(block(3))
    assert policy.victim() == block(1)
    policy.forget(block(1))
    assert policy.victim() == block(2)
    policy.forget(block(2))
    policy.forget(block(7))
    assert policy.victim() is None
    policy.check({})


def test_against_a_model_with_bounded_garbage() -> None:
    rng = random.Random(5)
    policy = LruPolicy()
    candidates: dict[int, int] = {}
    for step in range(20_000):
        if candidates and rng.random() < 0.49:
            number = rng.choice(sorted(candidates))
            del candidates[number]
            rng.choice((policy.withdraw, policy.forget))(block(number))
        elif free := sorted(set(range(60)) - candidates.keys()):
            number = rng.choice(free)
            candidates[number] = step
            policy.add(block(number), step, 0, 0)
        oldest = min(candidates, key=candidates.__getitem__, default=None)
        assert policy.victim() == (None if oldest is None else block(oldest))
        if step % 50 == 0:
            policy.check({block(n): accessed for n, accessed in candidates.items()})
