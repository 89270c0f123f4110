"""What engines have in their own memory, as they say: it is shown and published, and never read from here.

Only the engine itself can use such a block. So nothing here is offered, leased, pinned or evicted, and the
tiers know nothing of it. A block is all shards' at once: it is kept and published as shard 0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from kvtier.core.messages import Publish
from kvtier.core.stats import BlockPlace
from kvtier.types import BlockId, Key, Slot, TierKind

NOWHERE: Final = Slot(0, 0, 0, 0)
"""Where in its memory an engine has a block it does not say."""


class EngineBlocks:
    """Keys by the engine that has them. What comes and goes between two `changes` is not told.

    Parameters
    ----------
    max_blocks
        Keys of one engine; beyond it those that it named longest ago are forgotten.
    """

    def __init__(self, max_blocks: int, *, is_published: bool) -> None:
        self._max_blocks = max_blocks
        self._is_published = is_published
        self._by_engine: dict[str, dict[Key, None]] = {}
        self._holders: dict[Key, int] = {}
        self._added: dict[Key, None] = {}
        self._removed: dict[Key, None] = {}

    def report(self, engine: str, added: Sequence[Key], removed: Sequence[Key], *, clear: bool) -> int:
        """An engine gained and lost these, after it lost all where `clear`; returns how many it has now."""
        if clear:
            self.forget(engine)
        its = self._by_engine.setdefault(engine, {})
        for key in removed:
            self._drop(its, key)
        for key in added:
            if key in its:
                del its[key]  # named again: now the youngest
            else:
                self._gain(key)
            its[key] = None
        while len(its) > self._max_blocks:
            self._drop(its, next(iter(its)))
        if not its:
            del self._by_engine[engine]
        return len(its)

    def forget(self, engine: str) -> None:
        """It is dead, or has lost all."""
        for key in self._by_engine.pop(engine, ()):
            self._lose(key)

    # ---- reading

    def count(self, engine: str) -> int:
        """How many keys the engine has."""
        return len(self._by_engine.get(engine, ()))

    def has(self, block: BlockId) -> bool:
        """Whether any engine has it."""
        return block.shard == 0 and block.key in self._holders

    def keys(self) -> list[Key]:
        """Of all engines, each once."""
        return list(self._holders)

    def places(self, keys: Sequence[Key]) -> list[BlockPlace]:
        """Which engines have these, in the order of `keys`."""
        return [
            BlockPlace(index, BlockId(key, 0), TierKind.HBM, NOWHERE, 0, False, holder=engine)
            for index, key in enumerate(keys)
            if key in self._holders
            for engine, its in self._by_engine.items()
            if key in its
        ]

    def changes(self) -> list[Publish]:
        """What the first engine gained and the last one lost since the last call."""
        if not self._added and not self._removed:
            return []
        added, removed = ([BlockId(key, 0) for key in keys] for keys in (self._added, self._removed))
        self._added, self._removed = {}, {}
        return [Publish(TierKind.HBM, added, removed)]

    def check(self, engines: Collection[str]) -> None:
        """Assert the bound, that only these engines have anything, and that holders are counted right."""
        assert self._by_engine.keys() <= set(engines), "an engine that is gone still has blocks"
        counts: dict[Key, int] = {}
        for its in self._by_engine.values():
            assert 0 < len(its) <= self._max_blocks, "an engine has nothing, or more than the bound"
            for key in its:
                counts[key] = counts.get(key, 0) + 1
        assert counts == self._holders, "holders are not those that have the block"
        assert not self._added, "changes were made and not handed out"
        assert not self._removed, "changes were made and not handed out"

    # ---- details

    def _drop(self, its: dict[Key, None], key: Key) -> None:
        if key in its:
            del its[key]
            self._lose(key)

    def _gain(self, key: Key) -> None:
        count = self._holders.get(key, 0)
        self._holders[key] = count + 1
        if not count and self._is_published:
            _change(key, self._added, self._removed)

    def _lose(self, key: Key) -> None:
        count = self._holders[key] - 1
        if count:
            self._holders[key] = count
            return
        del self._holders[key]
        if self._is_published:
            _change(key, self._removed, self._added)


def _change(key: Key, to: dict[Key, None], undone: dict[Key, None]) -> None:
    """Enter a change, or take its opposite back where nobody has been told of that yet."""
    if key in undone:
        del undone[key]
    else:
        to[key] = None
