"""Comparisons of bytes with checksums that the node runs for the core."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.core.blocks import RESIDENT, Block
from kvtier.core.config import CoreConfig
from kvtier.core.leases import Leases
from kvtier.core.messages import Instruction, Lost, Verified, Verify
from kvtier.core.pins import Pins
from kvtier.core.residency import Residency
from kvtier.core.stats import Counters
from kvtier.types import Key


class Verifies:
    """Verifications in flight; each guards its block, and a block has at most one."""

    def __init__(
        self, config: CoreConfig, residency: Residency, leases: Leases, pins: Pins, counters: Counters
    ) -> None:
        self._config = config
        self._residency = residency
        self._leases = leases
        self._pins = pins
        self._counters = counters
        self.in_flight: dict[int, Block] = {}

    def reported(self, keys: Iterable[Key], shard: int, first_id: int) -> list[Instruction]:
        """An engine found other bytes than it was promised: see whether it is right."""
        blocks = [self._residency.get(key, shard) for key in dict.fromkeys(keys)]
        return self._start((block for block in blocks if block is not None), first_id)

    def scrub(self, count: int, first_id: int) -> list[Instruction]:
        """Up to `count` blocks that were never verified since their commit, oldest commit first."""
        queue = self._residency.unverified
        chosen: dict[Block, None] = {}
        while queue and len(chosen) < min(count, self._config.max_verifies - len(self.in_flight)):
            block = queue.popleft()
            if block.state == RESIDENT and not block.verified and not block.verifying:
                chosen[block] = None
        return self._start(chosen, first_id)

    def verified(self, event: Verified) -> list[Instruction]:
        """The outcome. A corrupt block is gone at once, and no lease on it is valid any more."""
        block = self.in_flight.pop(event.verify)
        block.verifying = False
        block.verified = True
        self._residency.unguard(block)
        if event.intact:
            return []
        self._counters.corrupt_blocks += 1
        self._leases.block_lost(block)
        self._pins.block_lost(block)
        self._residency.free(self._residency.lose(block))
        return [Lost([block.id], "corrupt")]

    def _start(self, blocks: Iterable[Block], first_id: int) -> list[Instruction]:
        instructions: list[Instruction] = []
        for block in blocks:
            if len(self.in_flight) >= self._config.max_verifies:
                break
            if block.state != RESIDENT or block.verifying:
                continue
            id = first_id + len(instructions)
            block.verifying = True
            self._residency.guard(block)
            self.in_flight[id] = block
            tier, slot = block.pool().tier.spec.kind, block.slot()
            shape = block.shape
            instructions.append(
                Verify(id, block.id, tier, slot, shape.block_bytes, block.checksum, shape.fingerprint)
            )
        return instructions
