"""Which kvtier blocks lie whole in the engine's own memory, as its events say.

An event names blocks by the engine's own hashes; a hash leads to a key by the chain of tokens that begins
with a prompt. So a block whose parent is not known is not known either: it counts as absent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvtier.errors import InvalidRequest
from kvtier.types import Key, chain_keys
from kvtier_vllm.kv_events import Cleared, Event, Hash, Removed, Stored

MAX_BLOCKS: Final = 131_072
"""Blocks of the engine that are remembered at most; those stored longest ago are forgotten first."""
MAX_PARTS: Final = 64
"""Engine blocks that one kvtier block may consist of; smaller ones are not followed."""


class _Link(NamedTuple):
    """Where a block of the engine stands in the chain.

    Attributes
    ----------
    base
        Key of the last kvtier block that is whole at its end, or the root.
    tail
        Tokens since.
    parts
        Engine blocks that the last, or the growing, kvtier block consists of, this one included.
    """

    base: Key
    tail: tuple[int, ...]
    parts: tuple[Hash, ...]


@dataclass(slots=True)
class Changes:
    """What came and went since the last `take`; `clear`: first all went."""

    added: dict[Key, None] = field(default_factory=dict)
    removed: dict[Key, None] = field(default_factory=dict)
    clear: bool = False


class Residents:
    """Not thread-safe.

    The engine may have a block twice: when it drops one of them, the block counts as gone though the other
    is still there.

    Attributes
    ----------
    root
        Where all chains begin; None: nothing counts.
    unknown
        Blocks that were left out since their parent is not known, or they are too small.
    """

    def __init__(self, block_tokens: int, max_blocks: int = MAX_BLOCKS) -> None:
        self.root: Key | None = None
        self.unknown = 0
        self._block_tokens = block_tokens
        self._max_blocks = max(1, min(max_blocks, MAX_BLOCKS))
        self._links: dict[Hash, _Link] = {}
        self._wholes: dict[Hash, list[Hash]] = {}  # part -> blocks that end a key which needs it
        self._keys: dict[Key, Hash] = {}
        self._changes = Changes()

    def __len__(self) -> int:
        return len(self._keys)

    def begin(self, root: Key | None) -> None:
        """All that was known is void; from now on chains begin with this."""
        self.root = root
        self._forget()

    def apply(self, events: Iterable[Event]) -> None:
        """Follow these."""
        if self.root is None:
            return
        for event in events:
            match event:
                case Stored():
                    self._stored(event, self.root)
                case Removed():
                    for its in event.hashes:
                        self._drop(its)
                case Cleared():
                    self._forget()

    def take(self) -> Changes:
        """What is to be told."""
        changes, self._changes = self._changes, Changes()
        return changes

    def keys(self) -> list[Key]:
        """All that is whole now."""
        return list(self._keys)

    # ---- details

    def _stored(self, event: Stored, root: Key) -> None:
        size, step = self._block_tokens, event.block_tokens
        begin = _Link(root, (), ()) if event.parent is None else self._links.get(event.parent)
        if begin is None or size % step or size // step > MAX_PARTS or len(begin.tail) % step:
            self.unknown += len(event.hashes)
            return
        tokens = [*begin.tail, *event.tokens]
        try:
            keys = chain_keys(begin.base, tokens, size)
        except InvalidRequest:  # a token that is none
            self.unknown += len(event.hashes)
            return
        parts, at = begin.parts if begin.tail else (), len(begin.tail)
        for its in event.hashes:
            at += step
            parts = (*parts, its)
            whole, rest = divmod(at, size)
            base = keys[whole - 1] if whole else begin.base
            self._enter(its, _Link(base, tuple(tokens[at - rest : at]), parts))
            if not rest:
                parts = ()

    def _enter(self, its: Hash, link: _Link) -> None:
        if self._links.get(its) == link:
            return  # told again
        self._drop(its)
        if any(part not in self._links for part in link.parts[:-1]):
            self.unknown += 1  # a part of it is gone already
            return
        self._links[its] = link
        if not link.tail:
            for part in link.parts[:-1]:
                self._wholes.setdefault(part, []).append(its)
            self._keys[link.base] = its
            _change(link.base, self._changes.added, self._changes.removed)
        while len(self._links) > self._max_blocks:
            self._drop(next(iter(self._links)))

    def _drop(self, its: Hash) -> None:
        link = self._links.pop(its, None)
        for whole in self._wholes.pop(its, ()):
            self._drop(whole)
        if link is None or link.tail:
            return
        for part in link.parts[:-1]:
            wholes = self._wholes.get(part)
            if wholes is not None:
                wholes.remove(its)
                if not wholes:
                    del self._wholes[part]
        if self._keys.get(link.base) == its:
            del self._keys[link.base]
            _change(link.base, self._changes.removed, self._changes.added)

    def _forget(self) -> None:
        self._links.clear()
        self._wholes.clear()
        self._keys.clear()
        self._changes = Changes(clear=True)


def _change(key: Key, to: dict[Key, None], undone: dict[Key, None]) -> None:
    """Enter a change, or take its opposite back where nobody has been told of that yet."""
    if key in undone:
        del undone[key]
    else:
        to[key] = None
