"""Which block lies in which slot, what must stay, and what goes first.

Blocks of one shard form a forest: the parent of a block is the block before it in its prompt. Three
facts are kept on it, each updated where it changes:

guards
    Direct reasons to stay (leases, holds, pins, verifications, an unfinished store) plus the number
    of children that have guards. So one reason on the deepest block of a prefix protects the whole
    prefix, and costs a walk only up to the first ancestor that is guarded already.
candidate
    Resident, no children, no guards: exactly these are offered to the policy.
orphan
    Some ancestor was lost, so that no prompt can reach the block: these go before all others.
replica
    Pulled from another node, which still has it as far as anybody knows: these go next.

A **ghost** is the place of a lost block that others still refer to (children, or guards that have not
ended yet). It has no slot and no parent; storing its key again fills it and reconnects its children.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from kvtier.core.blocks import GHOST, PENDING, RESIDENT, Block, Shape
from kvtier.core.config import TierSpec
from kvtier.core.extents import Place, TierMap
from kvtier.core.ledger import Ledger
from kvtier.core.publishing import Publishing
from kvtier.interfaces import Policy
from kvtier.types import BlockId, Key

_UNVERIFIED_SLACK: Final = 1024


class Forest:
    """The blocks of a tier, by shard and key, and what follows from how they depend on each other."""

    scrubs: ClassVar[bool] = True
    """Whether bytes here are compared with their checksums in the background, since not every read does."""

    def __init__(
        self,
        specs: Sequence[TierSpec],
        policy: Callable[[], Policy],
        *,
        publishing: Publishing | None = None,
        demotes: bool = False,
    ) -> None:
        self.tiers = {spec.kind: TierMap(spec, policy, demotes=demotes) for spec in specs}
        self.shards: dict[int, dict[Key, Block]] = {}
        self.ledgers: list[Ledger] = []
        self.unverified: deque[Block] = deque()
        self.accesses = 0
        self.leaving: Callable[[Block], None] | None = None
        """Told of each resident block that is about to be lost: the tier below, if there is one."""
        self.publishing = publishing
        if publishing is not None:
            publishing.forests.append(self)

    def add_ledger(self, ledger: Ledger) -> None:
        """Keep `ledger` right when blocks are lost, until it is closed and empty."""
        self.ledgers = [known for known in self.ledgers if known.counts or not known.closed]
        self.ledgers.append(ledger)

    # ---- reading

    def get(self, key: Key, shard: int) -> Block | None:
        """The block or ghost under this id."""
        blocks = self.shards.get(shard)
        return None if blocks is None else blocks.get(key)

    def run(self, keys: Sequence[Key], shard: int, fingerprint: bytes | None = None) -> list[Block]:
        """The leading keys that are resident, one chain of one layout that no lost block interrupts."""
        blocks = self.shards.get(shard)
        if not blocks or not keys:
            return []
        first = blocks.get(keys[0])
        if first is None or first.state != RESIDENT or first.orphan:
            return []
        if fingerprint is not None and first.shape.fingerprint != fingerprint:
            return []
        run = [first]
        find = blocks.get
        previous = first
        for key in keys[1:]:
            block = find(key)
            if block is None or block.state != RESIDENT or block.parent is not previous:
                break
            run.append(block)
            previous = block
        return run

    def extend(
        self, run: list[Block], keys: Sequence[Key], shard: int, fingerprint: bytes | None = None
    ) -> None:
        """Lengthen `run`, a result of `run`, by what pulls are bringing, and by what is here behind that."""
        blocks = self.shards.get(shard)
        if not blocks:
            return
        previous = run[-1] if run else None
        for key in keys[len(run) :]:
            block = blocks.get(key)
            if block is None or (block.pull is None and block.state != RESIDENT):
                return
            if previous is not None:
                if block.parent is not previous:
                    return
            elif block.orphan or (fingerprint is not None and block.shape.fingerprint != fingerprint):
                return
            run.append(block)
            previous = block

    def touch(self, run: Sequence[Block]) -> None:
        """An access to blocks that are guarded, as `Policy` expects."""
        self.accesses = now = self.accesses + 1
        for block in run:
            block.last = now
            block.extent.last = now  # type: ignore[union-attr]

    @staticmethod
    def use(run: Sequence[Block]) -> None:
        """These blocks, which are guarded, are read or were to be stored again: it paid to have them."""
        for block in run:
            block.uses += 1

    # ---- guards

    def guard(self, block: Block) -> None:
        """One more reason for `block`, and so for its ancestors, to stay."""
        at: Block | None = block
        if block.candidate:
            self._withdraw(block)
        while at is not None:
            guards = at.guards
            at.guards = guards + 1
            if guards:
                return
            if at.extent is not None:
                at.extent.guarded += 1
            at = at.parent

    def unguard(self, block: Block) -> None:
        """One reason less; undoes one `guard`."""
        at: Block | None = block
        while at is not None:
            guards = at.guards = at.guards - 1
            if guards:
                return
            if at.extent is not None:
                at.extent.guarded -= 1
            parent = at.parent
            if at.first_child is None:
                self._refresh(at)
            at = parent

    def _refresh(self, block: Block, after: BlockId | None = None) -> None:
        if block.first_child is not None or block.guards:
            return
        if block.state == RESIDENT and not block.candidate:
            block.candidate = True
            pool = block.pool()
            if block.orphan:
                pool.orphans[block] = None
            elif block.replica:
                pool.replicas.add(block.id, block.last, block.reuse(), block.depth, after)
            else:
                pool.policy.add(block.id, block.last, block.reuse(), block.depth, after)
        elif block.state == GHOST:
            del self.shards[block.id.shard][block.id.key]

    def _withdraw(self, block: Block) -> None:
        block.candidate = False
        pool = block.pool()
        if block.orphan:
            del pool.orphans[block]
        elif block.replica:
            pool.replicas.withdraw(block.id)
        else:
            pool.policy.withdraw(block.id)

    # ---- coming and going

    def admit(self, id: BlockId, parent: Block | None, shape: Shape, place: Place) -> Block:
        """A block that somebody stores from now on: not visible, and guarded by the store itself."""
        blocks = self.shards.setdefault(id.shard, {})
        block = blocks.get(id.key)
        if block is None:
            block = blocks[id.key] = Block(id, shape)
        assert block.state == GHOST
        block.shape = shape
        block.state = PENDING
        block.extent, block.index = extent, index = place
        extent.blocks[index] = block
        if block.guards:
            extent.guarded += 1
        block.orphan = parent is not None and (parent.state == GHOST or parent.orphan)
        self._attach(block, parent)
        if block.first_child is not None and not block.orphan:
            self._mark_below(block, orphan=False)
        self.guard(block)
        extent.pool.tier.reserved_bytes += shape.slot_bytes  # type: ignore[union-attr]
        return block

    def commit(self, block: Block, checksum: bytes) -> None:
        """A pending block becomes visible; the caller touches it before the next event.

        One that a pull has brought becomes a replica. Its bytes have just been verified, as those of a fetch.
        """
        assert block.state == PENDING
        block.checksum = checksum
        block.state = RESIDENT
        pull = block.pull
        block.replica = pull is not None and pull.makes_replicas
        block.verified = pull is not None or not self.scrubs
        block.verifying = False
        block.pull = None
        pool = block.pool()
        (pool.replicas if block.replica else pool.policy).came(block.id)
        tier = pool.tier
        tier.reserved_bytes -= block.shape.slot_bytes
        tier.resident_bytes += block.shape.slot_bytes
        tier.blocks += 1
        if not block.orphan and self.publishing is not None:
            self.publishing.show(self, block)
        if block.replica:
            tier.replica_bytes += block.shape.slot_bytes
        if block.verified:
            return
        self.unverified.append(block)
        if len(self.unverified) > 2 * tier.blocks + _UNVERIFIED_SLACK:
            self.unverified = deque(dict.fromkeys(b for b in self.unverified if b.state == RESIDENT))

    def own(self, block: Block) -> None:
        """A guarded replica is an ordinary block from now on."""
        assert block.replica
        assert block.guards
        block.replica = False
        pool = block.pool()
        pool.replicas.forget(block.id)
        pool.policy.came(block.id)
        pool.tier.replica_bytes -= block.shape.slot_bytes

    def lose(self, block: Block) -> Place:
        """Take a block out of its slot, whatever refers to it; the caller frees or keeps the slot."""
        extent, index = block.extent, block.index
        assert extent is not None
        pool = block.pool()
        tier = pool.tier
        slot_bytes = block.shape.slot_bytes
        if block.candidate and block.orphan:
            self._withdraw(block)
        block.candidate = False
        policy = None
        if block.state == RESIDENT:
            if self.leaving is not None:
                self.leaving(block)
            policy = pool.replicas if block.replica else pool.policy
            tier.resident_bytes -= slot_bytes
            tier.blocks -= 1
            if block.replica:
                tier.replica_bytes -= slot_bytes
            if not block.orphan and self.publishing is not None:
                self.publishing.hide(self, block)
        else:
            tier.reserved_bytes -= slot_bytes
        if block.guards:
            extent.guarded -= 1
        self._detach(block)
        if policy is not None:
            policy.forget(block.id)
        extent.blocks[index] = None
        block.extent = None
        block.state = GHOST
        block.orphan = block.replica = False
        block.uses = block.continued = 0
        block.pull = None
        block.checksum = b""
        if block.first_child is not None:
            self._mark_below(block, orphan=True)
        self._refresh(block)
        return extent, index

    def _attach(self, block: Block, parent: Block | None) -> None:
        block.parent = parent
        if block.guards:
            for ledger in self.ledgers:
                ledger.join(block)
        if parent is None:
            block.depth = 0
            return
        block.depth = parent.depth + 1
        if parent.candidate:
            self._withdraw(parent)
        first = parent.first_child
        block.next = first
        if first is not None:
            first.previous = block
        parent.first_child = block
        if block.guards:
            self.guard(parent)

    def _detach(self, block: Block) -> None:
        parent = block.parent
        if block.guards:
            for ledger in self.ledgers:
                ledger.cut(block)
        block.parent = None
        if parent is None:
            return
        if block.previous is None:
            parent.first_child = block.next
        else:
            block.previous.next = block.next
        if block.next is not None:
            block.next.previous = block.previous
        block.next = block.previous = None
        if block.guards:
            self.unguard(parent)
        else:
            self._refresh(parent, block.id)

    def _mark_below(self, ancestor: Block, *, orphan: bool) -> None:
        """`ancestor` was lost or is back: once for each descendant, however deep."""
        stack = list(ancestor.children())
        while stack:
            block = stack.pop()
            if block.orphan == orphan:
                continue
            stack.extend(block.children())
            was_candidate = block.candidate
            if was_candidate:
                self._withdraw(block)
            block.orphan = orphan
            block.depth = block.parent.depth + 1  # type: ignore[union-attr]  # a ghost's is known when it is back
            if was_candidate:
                self._refresh(block)
            if block.state == RESIDENT and self.publishing is not None:
                (self.publishing.hide if orphan else self.publishing.show)(self, block)
