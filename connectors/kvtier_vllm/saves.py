"""Which saves are under way, and how many of the engine's blocks they keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.types import Key
from kvtier_vllm.metadata import SaveOrder


class SaveBook:
    """Saves that were ordered and have not ended. Not thread-safe.

    Parameters
    ----------
    max_blocks
        Blocks that may wait for their copy at once: the engine cannot reuse them meanwhile.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks = 0
        self._next_job = 0
        self._jobs: dict[int, tuple[str, int]] = {}

    @property
    def blocks(self) -> int:
        """Blocks of all saves under way."""
        return self._blocks

    @property
    def room(self) -> int:
        """Blocks that may still be ordered."""
        return self._max_blocks - self._blocks

    def order(
        self, request_id: str, keys: Sequence[Key], first: int, last: int, block_ids: Sequence[int]
    ) -> SaveOrder:
        """A save of the blocks ``first .. last-1`` of a prompt with these keys and this block table."""
        assert last - first <= self.room
        job, self._next_job = self._next_job, self._next_job + 1
        self._jobs[job] = (request_id, last - first)
        self._blocks += last - first
        parent = keys[first - 1] if first else None
        return SaveOrder(job, request_id, parent, tuple(keys[first:last]), tuple(block_ids[first:last]))

    def ended(self, job: int) -> str | None:
        """The request of a save that has ended, None if the save was forgotten before."""
        request_id, blocks = self._jobs.pop(job, (None, 0))
        self._blocks -= blocks
        return request_id

    def forget(self, jobs: Iterable[int]) -> None:
        """These saves are cut: whenever the worker says that they have ended, nobody waits for it."""
        for job in jobs:
            self.ended(job)
