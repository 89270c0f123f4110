"""Bugs planted into policies, one at a time: what a policy is told and what it keeps no longer fit together.

No engine would suffer from most of them at once, so they are run with `CacheCore.check`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.core.policies.heap import LazyHeap
from kvtier.core.policies.lru import LruPolicy
from kvtier.core.policies.s3fifo import S3FifoPolicy
from kvtier.core.policies.worth import WorthPolicy
from kvtier.types import BlockId

Plant = Callable[[pytest.MonkeyPatch], None]


def lru_keeps_candidates_that_are_protected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LruPolicy, "withdraw", lambda self, block: None)


def lru_loses_every_tenth_candidate(patch: pytest.MonkeyPatch) -> None:
    put = LazyHeap.put

    def wrong(self: LazyHeap, block: BlockId, key: float) -> None:
        put(self, block, key)
        if block.key[0] < 26:
            self._heap.remove((key, block))

    patch.setattr(LazyHeap, "put", wrong)


def s3fifo_places_in_main_outlive_their_blocks(patch: pytest.MonkeyPatch) -> None:
    forget = S3FifoPolicy.forget

    def wrong(self: S3FifoPolicy, block: BlockId) -> None:
        state = self._promoted.get(block)
        forget(self, block)
        if state is not None:
            self._promoted[block] = state

    patch.setattr(S3FifoPolicy, "forget", wrong)


def s3fifo_ghosts_are_never_forgotten(patch: pytest.MonkeyPatch) -> None:
    forget = S3FifoPolicy.forget

    def wrong(self: S3FifoPolicy, block: BlockId) -> None:
        before = dict(self._ghosts)
        forget(self, block)
        self._ghosts.update(before)

    patch.setattr(S3FifoPolicy, "forget", wrong)


def s3fifo_protected_ends_stay_in_small(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: S3FifoPolicy, block: BlockId) -> None:
        del self._uses[block]
        self._main.discard(block)

    patch.setattr(S3FifoPolicy, "withdraw", wrong)


def worth_remembers_all_that_ever_went(patch: pytest.MonkeyPatch) -> None:
    forget = WorthPolicy.forget

    def wrong(self: WorthPolicy, block: BlockId) -> None:
        before = dict(self._gone)
        forget(self, block)
        self._gone.update(before)

    patch.setattr(WorthPolicy, "forget", wrong)


def worth_earlier_lives_outlive_their_blocks(patch: pytest.MonkeyPatch) -> None:
    forget = WorthPolicy.forget

    def wrong(self: WorthPolicy, block: BlockId) -> None:
        earlier = self._earlier.get(block)
        forget(self, block)
        if earlier is not None:
            self._earlier[block] = earlier

    patch.setattr(WorthPolicy, "forget", wrong)


def worth_is_not_told_what_comes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorthPolicy, "came", lambda self, block: None)


PLANTS: dict[str, list[Plant]] = {
    "lru": [lru_keeps_candidates_that_are_protected, lru_loses_every_tenth_candidate],
    "s3fifo": [
        s3fifo_places_in_main_outlive_their_blocks,
        s3fifo_ghosts_are_never_forgotten,
        s3fifo_protected_ends_stay_in_small,
    ],
    "worth": [
        worth_remembers_all_that_ever_went,
        worth_earlier_lives_outlive_their_blocks,
        worth_is_not_told_what_comes,
    ],
}
