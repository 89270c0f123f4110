"""What a node has to say of itself and of its blocks, read from its core when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, overload

from kvtier.core.cache import CacheCore
from kvtier.core.messages import peer_name
from kvtier.types import BlockId, Key, TierKind

_PEER: Final = peer_name("")


@dataclass(frozen=True, slots=True)
class Holdings:
    """See `holdings_of`.

    Attributes
    ----------
    load
        0 (idle) .. 1 (as many pulls as this node serves at once).
    residents
        Ids of all blocks as they are now, a list of its own. Some may not be resident: ask `tier_of`.
    tier_of
        Where a block lies, None where no peer could get it: not resident, or an ancestor was lost.
    down
        Tiers that do not work now: what lies there alone nobody gets.
    engine_residents, engine_tier_of
        As `residents` and `tier_of`, of what engines have in their own memory.
    """

    capacity_bytes: Callable[[], int]
    resident_bytes: Callable[[], int]
    load: Callable[[], float]
    residents: Callable[[], Sequence[BlockId]]
    tier_of: Callable[[BlockId], TierKind | None]
    down: Callable[[], tuple[TierKind, ...]] = tuple
    engine_residents: Callable[[], Sequence[BlockId]] = tuple
    engine_tier_of: Callable[[BlockId], TierKind | None] = lambda _: None


def holdings_of(core: CacheCore, max_pulls: int) -> Holdings:
    """The holdings of a node with this core; `max_pulls` is as many as a node serves at once."""
    tiers = [tier for residency in (core.residency, *core.lower) for tier in residency.tiers.values()]

    def given_leases() -> int:
        return sum(lease.engine.name.startswith(_PEER) for lease in core.leases.leases.values())

    return Holdings(
        capacity_bytes=lambda: sum(tier.spec.capacity_bytes for tier in tiers),
        resident_bytes=lambda: sum(tier.resident_bytes for tier in tiers),
        load=lambda: min(1.0, given_leases() / max_pulls),
        residents=lambda: Ids(core.ids()),
        tier_of=core.tier_of,
        down=lambda: tuple(tier.kind for tier in core.lower if tier.is_down),
        engine_residents=lambda: Ids({0: core.engine_blocks.keys()}),
        engine_tier_of=lambda block: TierKind.HBM if core.engine_blocks.has(block) else None,
    )


class Ids(Sequence[BlockId]):
    """Block ids made when they are asked for: to list a million at once would stop the loop for too long."""

    def __init__(self, keys: dict[int, list[Key]]) -> None:
        self._keys = keys
        self._length = sum(map(len, keys.values()))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> BlockId: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockId]: ...
    def __getitem__(self, index: int | slice) -> BlockId | list[BlockId]:
        if isinstance(index, int):
            return self[index : index + 1][0]
        begin, end, step = index.indices(self._length)
        assert step == 1, "only runs of ids are wanted"
        found: list[BlockId] = []
        for shard, keys in self._keys.items():
            found += [BlockId(key, shard) for key in keys[max(0, begin) : max(0, end)]]
            begin, end = begin - len(keys), end - len(keys)
        return found
