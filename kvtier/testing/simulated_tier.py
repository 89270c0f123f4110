"""The tiers below in the simulator: a disk that is late, fails, lies and turns bits, and outlives the node.

Its pages lie in an arena of their own that no restart empties. The first page of a slot holds its header. Far
memory, which may lie above it, is late and turns bits; it has no headers, and every restart empties it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.testing.simulated_node import CORRUPT, PageId, Violation, Writer, content, pages_of
from kvtier.types import BlockRecord, Slot, TierKind

if TYPE_CHECKING:
    from kvtier.testing.simulator import Simulation

Steps = Generator[float, None, None]
_POLL_S: Final = 0.2
_MAX_STALL_S: Final = 8.0


class SimulatedTier:
    """Carries out what the core says about the tiers below, one page at a time."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._node = simulation.node
        self._rng = simulation.rng
        self.is_down = False
        self._is_told = False

    def run(self, steps: Steps) -> None:
        """Go on with a copy until it has ended, or the daemon that makes it."""
        incarnation = self._node.incarnation

        def step() -> None:
            if self._node.incarnation != incarnation:
                steps.close()
                return
            for delay_s in steps:
                self._simulation.after(delay_s, step)
                return

        step()

    def go_down(self) -> None:
        """The device does not answer any more; the node finds out after a while, or not before it is back."""
        self.is_down = True
        self._simulation.after(self._rng.uniform(0, 3), self._tell)

    def come_back(self) -> None:
        """It answers again."""
        self.is_down = False
        self._simulation.after(self._rng.uniform(0, 1), self._tell)

    def restarted(self) -> None:
        """A new daemon takes it to be well."""
        self._is_told = False
        self._tell()

    def _tell(self) -> None:
        if self.is_down != self._is_told:
            self._is_told = self.is_down
            self._node.is_told_down = self.is_down
            self._simulation.handle((m.TierDown if self.is_down else m.TierUp)(TierKind.NVME))

    def _wait(self, tier: TierKind, *, may_stall: bool) -> Steps:
        if may_stall and self._rng.random() < 0.3:
            yield self._rng.uniform(0, _MAX_STALL_S)
        yield self._rng.expovariate(200)
        while tier is TierKind.NVME and self.is_down and not self._simulation.closing:
            yield _POLL_S

    # ---- down

    def demote(self, demote: m.Demote) -> Steps:
        """Copy down: all of it, a part that then counts for nothing, or nothing at all that says it was."""
        node, rng = self._node, self._rng
        is_disk = demote.tier is TierKind.NVME
        fate = rng.choices(("well", "late", "EIO", "lost"), (10, 2, 1, 1) if is_disk else (10, 2, 0, 0))[0]
        fails_at = rng.randrange(len(demote.slots)) if fate == "EIO" else None
        writer = (node.daemon, rng.getrandbits(32))
        for slot in demote.slots:
            node.copy_begins(slot, writer)
        reading = node.reads(demote.sources, demote.records)
        written: list[int] = []
        corrupt: list[int] = []
        for index, (source, slot, record) in enumerate(
            zip(demote.sources, demote.slots, demote.records, strict=True)
        ):
            yield from self._wait(demote.tier, may_stall=fate == "late")
            if index == fails_at:
                break
            tokens = [node.read(page) for page in pages_of(source)]
            if tokens != [content(record.block, number) for number in range(len(tokens))]:
                if CORRUPT not in tokens and record.block in reading.blocks:
                    raise Violation(f"a demote copies {tokens[0]!r} from a slot that should hold a block")
                corrupt.append(index)
                continue
            if not is_disk:
                yield from self._write_pages(pages_of(slot), tokens, writer)
                written.append(index)
                continue
            node.torn.add(slot)
            if fate != "lost":
                yield from self._write(slot, record, tokens, writer)
            written.append(index)
        for slot in demote.slots:
            node.copy_ends(slot, writer)
        reading.end()
        fault = "" if fails_at is None else "EIO"
        self._simulation.handle(m.Demoted(demote.demote, [] if fault else written, corrupt, fault))

    def _write(self, slot: Slot, record: BlockRecord, tokens: list[object], writer: Writer) -> Steps:
        """Header and bytes in any order; a crash in between leaves a slot that looks as if it were whole."""
        node = self._node
        pages = list(zip(pages_of(slot), [record, *tokens], strict=True))
        if self._rng.random() < 0.5:
            pages.reverse()
        node.forget_headers(slot)
        node.torn.add(slot)
        node.headers[slot] = record
        yield from self._write_pages([page for page, _ in pages], [token for _, token in pages], writer)
        node.torn.discard(slot)

    def _write_pages(self, pages: Sequence[PageId], tokens: Sequence[object], writer: Writer) -> Steps:
        for page, token in zip(pages, tokens, strict=True):
            self._node.write(page, token, writer)
            yield self._rng.expovariate(2000)

    # ---- up

    def fetch(self, fetch: m.Fetch) -> Steps:
        """Read, verify, and put where it is wanted; if it takes too long, go on all the same."""
        node, rng = self._node, self._rng
        is_disk = fetch.tier is TierKind.NVME
        fate = rng.choices(("well", "late", "EIO"), (8, 2, 1) if is_disk else (8, 2, 0))[0]
        fails_at = rng.randrange(len(fetch.slots)) if fate == "EIO" else None
        writer = (node.daemon, rng.getrandbits(32))
        for slot in fetch.slots:
            node.copy_begins(slot, writer)
        reading = node.reads(fetch.sources, fetch.records)
        state = {"overdue": False, "ended": False}
        self._simulation.after(fetch.timeout_s, self._overdue(fetch, state, node.incarnation))
        fault, wrong, ready = "", list[bytes](), list[bytes]()
        for index, (source, slot, record) in enumerate(
            zip(fetch.sources, fetch.slots, fetch.records, strict=True)
        ):
            yield from self._wait(fetch.tier, may_stall=fate == "late")
            tokens = [node.read(page) for page in pages_of(source)]
            if not is_disk:
                tokens.insert(0, record)
            if index == fails_at or not self._is_right(tokens, record):
                fault = "EIO" if index == fails_at else "corrupt"
                wrong = [] if index == fails_at else [record.block.key]
                if wrong and record.block in reading.blocks and not self._may_be_wrong(tokens, source):
                    raise Violation(f"a fetch of {record.block} finds {tokens}")
                break
            yield from self._write_pages(pages_of(slot), tokens[1:], writer)
            ready.append(record.checksum)
            if not state["overdue"] and rng.random() < 0.7:
                for written in fetch.slots[index + 1 - len(ready) : index + 1]:
                    node.copy_ends(written, writer)  # of what has arrived nothing is written any more
                self._simulation.handle(m.Arrived(fetch.pull, ready))
                ready = []
        if ready and not state["overdue"]:
            self._simulation.handle(m.Arrived(fetch.pull, ready))
        for slot in fetch.slots:
            node.copy_ends(slot, writer)
        reading.end()
        state["ended"] = True
        self._simulation.handle(m.PullEnded(fetch.pull, fault, wrong))

    def _overdue(self, fetch: m.Fetch, state: dict[str, bool], incarnation: int) -> Callable[[], None]:
        def late() -> None:
            if not state["ended"] and self._node.incarnation == incarnation:
                state["overdue"] = True
                self._simulation.handle(m.Overdue(fetch.pull))

        return late

    @staticmethod
    def _is_right(tokens: list[object], record: BlockRecord) -> bool:
        header, *rest = tokens
        if not isinstance(header, BlockRecord):
            return False
        same = (header.block, header.checksum) == (record.block, record.checksum)
        return same and rest == [content(record.block, number) for number in range(len(rest))]

    def _may_be_wrong(self, tokens: list[object], source: Slot) -> bool:
        """Whether the device itself is to blame: it turned a bit, or a write never reached it."""
        return CORRUPT in tokens or source in self._node.torn
