"""What peers are lent of the tiers below: it is fetched into the arena first, where they can read it.

A peer that waits asks again and again; each time the next blocks are fetched, as far as the bounds allow, so
that the first ones travel while later ones are read. Engines come first: fetches for peers have a smaller
budget, yield to those of engines, and what they have brought is the first to go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core import messages as m
from kvtier.core.blocks import GHOST, RESIDENT, Block, Shape
from kvtier.core.config import CoreConfig
from kvtier.core.engines import Party
from kvtier.core.extents import TierMap
from kvtier.core.leases import Leases
from kvtier.core.lower import LowerTier
from kvtier.core.pulls import Pulls
from kvtier.core.residency import Residency
from kvtier.types import Key, whole_pages


@dataclass(slots=True)
class Chain:
    """`blocks` of a tier below, each continuing the one before, the first one `above`, which is in the arena.

    `spare` leading ones were not asked for: nothing that continues them could be reached without them.
    """

    tier: LowerTier
    above: Block | None
    blocks: list[Block]
    spare: int


class Lending:
    """Decides what is fetched for peers; `Pulls` runs it."""

    def __init__(
        self,
        config: CoreConfig,
        residency: Residency,
        lower: Sequence[LowerTier],
        pulls: Pulls,
        leases: Leases,
    ) -> None:
        self._config = config
        self._residency = residency
        self._lower = lower
        self._pulls = pulls
        self._leases = leases

    def bring(self, event: m.Acquire, peer: Party, id: int, now_s: float) -> tuple[int, list[m.Fetch]]:
        """Begin to fetch what is next, if anything may be fetched now.

        Returns
        -------
        int
            So many leading keys the peer may have in the end: they are here, coming, or their turn comes.
        list
            At most one fetch.
        """
        run, _ = self._leases.lendable(event)
        at = len(run)
        if at == len(event.keys):
            return at, []
        chain = self._chain(event, run)
        if chain is None:
            return at, []
        shape = _shape(chain.blocks[0].shape)
        tier = self._tier()
        left_bytes = int(tier.allocated_bytes * peer.share) - peer.ledger.bytes
        if chain.above is not None:
            left_bytes -= peer.ledger.cost(chain.above)
        del chain.blocks[max(0, left_bytes) // shape.slot_bytes :]
        reached = len(chain.blocks) - chain.spare
        if reached <= 0:
            return at, []  # what comes before would take all that this peer may have
        return at + reached, self._begin(chain, shape, peer, id, now_s)

    def _begin(self, chain: Chain, shape: Shape, peer: Party, id: int, now_s: float) -> list[m.Fetch]:
        pulls, residency, tier = self._pulls, self._residency, self._tier()
        lending, fetching = pulls.lending, pulls.fetching
        room_bytes = min(lending.room_bytes(tier), fetching.room_bytes(tier))
        count = min(len(chain.blocks), room_bytes // shape.slot_bytes)
        if (
            count <= 0
            or lending.running >= lending.most
            or fetching.running >= fetching.most
            or pulls.lent_to(peer.name) >= self._config.max_lends_per_peer
        ):
            return []
        pool = tier.pool(shape.slot_bytes)
        if chain.above is not None:
            residency.guard(chain.above)
        residency.make_room(tier, pool, count)
        if chain.above is not None:
            residency.unguard(chain.above)
        count = min(count, pool.free)
        fetches = []
        if count:
            blocks = chain.blocks[:count]
            fetches = [pulls.lend(blocks, chain.above, chain.tier, shape, peer.name, id, now_s)]
        pool.give_back()
        return fetches

    # ---- what it would be

    def _chain(self, event: m.Acquire, run: Sequence[Block]) -> Chain | None:
        """What follows `run` in one tier below, with all that has to be in the arena before it."""
        key = event.keys[len(run)]
        first: Block | None = None
        for tier in self._lower:
            first = self._lendable(tier, key, event)
            if first is not None:
                break
        if first is None:
            return None
        before = self._before(tier, first, event)
        if before is None:
            return None
        above, spare = before
        if run and above is not run[-1]:
            return None  # the keys are no chain
        chain = Chain(tier, above, [*reversed(spare), first], len(spare))
        most = self._tier().allocated_bytes // whole_pages(first.shape.block_bytes)
        for key in event.keys[len(run) + 1 :]:
            block = self._lendable(tier, key, event) if len(chain.blocks) < most else None
            if block is None or block.parent is None or block.parent.id != chain.blocks[-1].id:
                break
            chain.blocks.append(block)
        return chain

    def _before(
        self, tier: LowerTier, first: Block, event: m.Acquire
    ) -> tuple[Block | None, list[Block]] | None:
        """The deepest ancestor in the arena, and those below it, deepest first; None: they cannot be had."""
        most = self._tier().allocated_bytes // whole_pages(first.shape.block_bytes)
        spare: list[Block] = []
        at = first
        while at.parent is not None:
            key = at.parent.id.key
            above = self._residency.get(key, event.shard)
            if above is not None and above.state != GHOST:
                return (above, spare) if _continuable(above, event.fingerprint) else None
            found = self._lendable(tier, key, event)
            if found is None or len(spare) >= most:
                return None
            spare.append(found)
            at = found
        return None, spare

    def _lendable(self, tier: LowerTier, key: Key, event: m.Acquire) -> Block | None:
        """The block in a tier below, if it can be fetched: it is not in the arena, and would fit there."""
        block = None if tier.is_down else tier.get(key, event.shard)
        if block is None or block.state != RESIDENT or block.shape.fingerprint != event.fingerprint:
            return None
        if whole_pages(block.shape.block_bytes) > self._tier().spec.extent_bytes:
            return None
        here = self._residency.get(key, event.shard)
        if here is None:
            return block
        kin = here.first_child
        if here.state != GHOST or (kin is not None and kin.shape != _shape(block.shape)):
            return None
        return block

    def _tier(self) -> TierMap:
        return next(iter(self._residency.tiers.values()))


def _shape(below: Shape) -> Shape:
    """The same block as it lies in the arena."""
    return Shape(below.fingerprint, below.block_bytes, whole_pages(below.block_bytes))


def _continuable(block: Block, fingerprint: bytes) -> bool:
    """Whether it is here, or being fetched, with all that comes before it."""
    if block.orphan or block.shape.fingerprint != fingerprint:
        return False
    return block.state == RESIDENT or (block.pull is not None and block.pull.kind is not None)
