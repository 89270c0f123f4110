"""Pins: an operator's wish that blocks stay."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.core.blocks import Block
from kvtier.core.config import MAX_PIN_TTL_S, CoreConfig
from kvtier.core.ledger import Ledger
from kvtier.core.messages import Pin, Pinned, Unpin
from kvtier.core.residency import Residency
from kvtier.errors import InvalidRequest, LimitExceeded
from kvtier.types import Key


@dataclass(slots=True, eq=False)
class PinEntry:
    """For each shard the deepest pinned block, and where blocks were lost also the one above; `key` is
    the deepest of all.
    """

    key: Key
    deepest: list[Block]
    deadline_s: float


class Pins:
    """All pins by id."""

    def __init__(self, config: CoreConfig, residency: Residency) -> None:
        self._config = config
        self._residency = residency
        self.pins: dict[int, PinEntry] = {}
        self.ledger = Ledger()
        residency.add_ledger(self.ledger)

    def __len__(self) -> int:
        return len(self.pins)

    def pin(self, event: Pin, pin: int, now_s: float) -> Pinned:
        """Protect what every shard has of the leading keys, under the id `pin`."""
        if not 0 < event.ttl_s <= MAX_PIN_TTL_S:
            raise InvalidRequest(f"ttl_s is {event.ttl_s}: allowed is above 0 and up to {MAX_PIN_TTL_S:.0f}")
        if len(self.pins) >= self._config.max_pins:
            raise LimitExceeded(f"{len(self.pins)} pins exist: unpin some or raise max_pins")
        runs = [run for shard in self._residency.shards if (run := self._residency.run(event.keys, shard))]
        if not runs:
            return Pinned(0, 0)
        tier = runs[0][0].pool().tier
        limit = int(tier.allocated_bytes * self._config.max_pinned_fraction)
        total = self.ledger.bytes + sum(self.ledger.cost(run[-1]) for run in runs)
        if total > limit:
            raise LimitExceeded(
                f"pins would protect {total} bytes, at most {limit} are allowed: "
                "unpin some or raise max_pinned_fraction"
            )
        for run in runs:
            self._residency.guard(run[-1])
            self.ledger.add(run[-1])
        deepest = max(runs, key=len)[-1].id.key
        blocks = max(map(len, runs))
        self.pins[pin] = PinEntry(deepest, [run[-1] for run in runs], now_s + event.ttl_s)
        return Pinned(pin, blocks)

    def unpin(self, event: Unpin) -> int:
        """End one pin, or all whose deepest block is the last of the keys; returns how many."""
        if event.pin is not None:
            pins = [event.pin] if event.pin in self.pins else []
        else:
            pins = [pin for pin, entry in self.pins.items() if entry.key == event.keys[-1]]
        for pin in pins:
            self._end(pin)
        return len(pins)

    def expire(self, now_s: float) -> None:
        """Every pin whose time is over ends."""
        for pin in [pin for pin, entry in self.pins.items() if entry.deadline_s <= now_s]:
            self._end(pin)

    def block_lost(self, block: Block) -> None:
        """A block turned out corrupt: pins go on above and below it."""
        above = block.parent
        if above is None or block not in self.ledger.counts:
            return
        for entry in self.pins.values():
            if any(_continues(pinned, block) for pinned in entry.deepest):
                entry.deepest.append(above)
                self._residency.guard(above)
                self.ledger.add(above)

    def _end(self, pin: int) -> None:
        for block in self.pins.pop(pin).deepest:
            self.ledger.remove(block)
            self._residency.unguard(block)


def _continues(block: Block, ancestor: Block) -> bool:
    at: Block | None = block
    while at is not None and at is not ancestor:
        at = at.parent
    return at is ancestor
