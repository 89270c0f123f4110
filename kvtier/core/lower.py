"""A tier below the one that engines store in: what is copied down lies here, and may outlive the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from kvtier.core.blocks import GHOST, RESIDENT, Block, Shape
from kvtier.core.config import CoreConfig, TierSpec
from kvtier.core.publishing import Publishing
from kvtier.core.rates import Source
from kvtier.core.residency import Residency
from kvtier.core.stats import Counters
from kvtier.interfaces import Policy
from kvtier.types import (
    CHECKSUM_SIZE_BYTES,
    KEY_SIZE_BYTES,
    MAX_SHARDS,
    BlockId,
    BlockRecord,
    Location,
    Slot,
    whole_pages,
)

MAX_SECOND_CHANCES: Final = 64
"""Victims that may be passed over for one slot, because a tier above has used them since."""
MAX_SHAPES: Final = 1024
"""Layouts that are remembered; beyond it they are made anew."""
_FINGERPRINT_SIZE_BYTES: Final = 32


@dataclass(slots=True)
class LowerCounters:
    """Since the core was made; never decreasing."""

    demoted_blocks: int = 0
    failed_demotes: int = 0
    fetched_blocks: int = 0
    failed_fetches: int = 0
    wrong_blocks: int = 0
    recovered_blocks: int = 0


class LowerTier(Residency):
    """The blocks of one such tier. They are read by fetches alone, each of which verifies what it reads.

    Attributes
    ----------
    is_down
        Nothing is fetched from it or demoted to it.
    is_recovering
        It may yet say what it has found: nothing is demoted to it.
    source
        How fast it gives.
    location
        It as a place that `Plans` may choose.

    Parameters
    ----------
    above
        All tiers above, the fastest first; what is demoted to this one comes from the last of them.
    """

    scrubs: ClassVar[bool] = False

    def __init__(
        self,
        spec: TierSpec,
        policy: Callable[[], Policy],
        config: CoreConfig,
        above: Sequence[Residency],
        *,
        publishing: Publishing | None,
        demotes: bool,
    ) -> None:
        self.dropped_blocks = Counters()
        super().__init__([spec], policy, self.dropped_blocks, publishing=publishing, demotes=demotes)
        self.kind = spec.kind
        self.map = self.tiers[spec.kind]
        self.is_down = False
        self.is_recovering = spec.outlives
        self.source = Source(
            f"tier:{spec.kind.name.lower()}", config.fetch_bytes_per_s, config.fetch_overhead_s, spec.kind
        )
        self.location = Location(self.source.node, 0, spec.kind)
        self.counts = LowerCounters()
        self._above = tuple(above)
        self._shapes: dict[tuple[bytes, int], Shape] = {}

    # ---- what the tier above says

    def shape(self, shape: Shape) -> Shape:
        """The same block as it lies here, behind its header."""
        slot_bytes = whole_pages(shape.block_bytes) + self.map.spec.header_bytes
        return self._shape(shape.fingerprint, shape.block_bytes, slot_bytes)

    def _shape(self, fingerprint: bytes, block_bytes: int, slot_bytes: int) -> Shape:
        name = (fingerprint, slot_bytes)
        shape = self._shapes.get(name)
        if shape is None or shape.block_bytes != block_bytes:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[name] = Shape(fingerprint, block_bytes, slot_bytes)
        return shape

    def _twin(self, block: Block) -> Block | None:
        """The same block in that tier above where it was used last."""
        twins = [tier.get(block.id.key, block.id.shard) for tier in self._above]
        here = [twin for twin in twins if twin is not None and twin.state == RESIDENT]
        return max(here, key=lambda twin: twin.last, default=None)

    # ---- eviction

    def _victim(self, policy: Policy) -> Block | None:
        """The policy's victim, but what was used in a tier above meanwhile is as young here as there."""
        block = super()._victim(policy)
        for _ in range(MAX_SECOND_CHANCES):
            twin = None if block is None else self._twin(block)
            if block is None or twin is None or twin.last <= block.last:
                break
            self.left_above(twin)
            block = super()._victim(policy)
        return block

    def left_above(self, twin: Block) -> None:
        """What is here of a block that leaves the tier above, or was used there, is as young and used."""
        block = self.get(twin.id.key, twin.id.shard)
        if block is None or block.state != RESIDENT:
            if self.leaving is not None:
                self.leaving(twin)
            return
        if twin.last <= block.last:
            return
        was_candidate = block.candidate
        if was_candidate:
            self._withdraw(block)
        self.renew(block, twin.last)
        block.uses = max(block.uses, twin.uses)
        block.continued = max(block.continued, twin.continued)
        if was_candidate:
            self._refresh(block)

    @staticmethod
    def renew(block: Block, accessed: int) -> None:
        """An access, whose number is the top tier's, to a block that is no candidate."""
        block.last = max(block.last, accessed)
        extent = block.extent
        assert extent is not None
        extent.last = max(extent.last, accessed)

    # ---- what is wrong

    def lose_wrong(self, blocks: Sequence[Block]) -> list[Block]:
        """These were read and are not what they should be; returns those that had not gone already."""
        lost = [block for block in blocks if block.state == RESIDENT]
        for block in lost:
            self.counts.wrong_blocks += 1
            self.free(self.lose(block))
        return lost

    def is_worth_more(self, block: Block) -> bool:
        """Whether the policy would keep a block of the tier above longer than what has to go for it."""
        pool = self.map.pools.get(self.shape(block.shape).slot_bytes)
        if pool is None or pool.free or pool.orphans or self.map.free_extents:
            return True
        victim = self._victim(pool.policy)
        if victim is None:
            return True
        turn = pool.policy.turn
        return turn(block.id, block.last, block.reuse(), block.depth) > turn(
            victim.id, victim.last, victim.reuse(), victim.depth
        )

    # ---- recovery

    def recover(self, found: Sequence[tuple[Slot, BlockRecord]]) -> int:
        """Put back what the medium still holds, as far as it fits together; returns how many blocks.

        Nothing of it is believed. What is left away lies in slots that count as free.
        """
        top = self._above[0]
        top.accesses += 1
        recovered: list[Block] = []
        for slot, record in found:
            block = self._recover(slot, record, top.accesses)
            if block is not None:
                recovered.append(block)
        # Only now: the next block would have all of its ancestors guarded anew, however many there are.
        for block in recovered:
            self.unguard(block)
        self.counts.recovered_blocks += len(recovered)
        return len(recovered)

    def _recover(self, slot: Slot, record: BlockRecord, accessed: int) -> Block | None:
        """The block, guarded."""
        if not _is_sound(slot, record, self.map.spec.header_bytes):
            return None
        shape = self._shape(record.fingerprint, record.block_bytes, slot.size_bytes)
        if not self._fits_in(record, shape):
            return None
        place = self.map.claim(slot)
        if place is None:
            return None
        parent = None
        if record.parent is not None:
            parent = self._named(BlockId(record.parent, record.block.shard), shape)
        block = self.admit(record.block, parent, shape, place)
        self.commit(block, record.checksum)
        self.renew(block, accessed)
        return block

    def _fits_in(self, record: BlockRecord, shape: Shape) -> bool:
        """Whether the block is not here yet, has kin of its own layout alone, and continues none of them."""
        block = self.get(*record.block)
        if block is not None and block.state != GHOST:
            return False
        child = None if block is None else block.first_child
        if child is not None and child.shape != shape:
            return False
        parent = None if record.parent is None else self.get(record.parent, record.block.shard)
        if parent is None:
            return True
        kin = parent.first_child if parent.state == GHOST else parent
        if kin is not None and kin.shape != shape:
            return False
        at: Block | None = parent
        while at is not None and child is not None:
            if at is block:
                return False  # a circle
            at = at.parent
        return True

    def _named(self, id: BlockId, shape: Shape) -> Block:
        """The block or ghost, which is made if need be: it stays as long as a child refers to it."""
        blocks = self.shards.setdefault(id.shard, {})
        block = blocks.get(id.key)
        if block is None:
            block = blocks[id.key] = Block(id, shape)
        return block


def _is_sound(slot: Slot, record: BlockRecord, header_bytes: int) -> bool:
    (key, shard), parent = record.block, record.parent
    return (
        len(key) == KEY_SIZE_BYTES
        and (parent is None or (len(parent) == KEY_SIZE_BYTES and parent != key))
        and 0 <= shard < MAX_SHARDS
        and len(record.fingerprint) == _FINGERPRINT_SIZE_BYTES
        and len(record.checksum) == CHECKSUM_SIZE_BYTES
        and 0 < record.block_bytes <= slot.size_bytes - header_bytes
    )
