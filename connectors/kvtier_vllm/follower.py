"""Tells the node which blocks the engine has in its own memory, in a thread of its own.

What the engine's scheduler does here is to say under which root keys begin now; it never waits. Where the
node does not take a report, or has begun anew, it is told everything again: no report has to be kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvtier.types import Key
from kvtier_vllm.kv_events import Event
from kvtier_vllm.residents import Residents

POLL_S: Final = 0.2
"""So long the thread waits for events before it looks for anything else."""
REPORT_EVERY_S: Final = 0.1
"""Changes of so long a time become one report."""
REFRESH_S: Final = 15.0
"""Without changes the node is asked so often whether it still knows this engine."""
FIRST_RETRY_S: Final = 0.5
MAX_RETRY_S: Final = 15.0
CLOSE_TIMEOUT_S: Final = 2.0

logger = logging.getLogger("vllm.kvtier")


class ReportClient(Protocol):
    """The part of `EngineClient` that is used here."""

    def report_resident(  # noqa: D102
        self, added: Sequence[Key], removed: Sequence[Key] = (), *, clear: bool = False
    ) -> str | None: ...


class Source(Protocol):
    """`EventSource`, made and used in the follower's thread."""

    def receive(self, timeout_s: float) -> list[Event]: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


@dataclass(slots=True)
class FollowerCounters:
    """What the follower did, for logs and tests; `resident_blocks` is now."""

    reports: int = 0
    failed_reports: int = 0
    anew: int = 0
    resident_blocks: int = 0


class Reporter:
    """Brings the node to what `residents` say. Not thread-safe.

    Attributes
    ----------
    counters
        `anew`: how often the node was told everything, from nothing.
    """

    def __init__(
        self, residents: Residents, client: ReportClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters = FollowerCounters()
        self._residents = residents
        self._client = client
        self._clock = clock
        self._registration = ""  # under which the node was told all; empty: it was not
        self._may_know = False  # whether the node may have been told anything
        self._due_s = 0.0
        self._refresh_s = 0.0
        self._retry_s = FIRST_RETRY_S

    def step(self) -> None:
        """Tell what has changed, if it is time."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        changes = self._residents.take()
        self.counters.resident_blocks = len(self._residents)
        if self._registration and not changes.clear:
            if changes.added or changes.removed or now_s >= self._refresh_s:
                self._tell(list(changes.added), list(changes.removed), clear=False)
        elif self._may_know or self._residents:
            self.counters.anew += 1
            self._tell(self._residents.keys(), (), clear=True)

    def give_up(self) -> None:
        """Nothing is known any more: take back what the node was told."""
        if self._may_know:
            self._client.report_resident((), clear=True)

    def _tell(self, added: Sequence[Key], removed: Sequence[Key], *, clear: bool) -> None:
        self.counters.reports += 1
        self._may_know = True
        registration = self._client.report_resident(added, removed, clear=clear)
        now_s = self._clock()
        if registration is None:
            self.counters.failed_reports += 1
            self._registration = ""
            self._due_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            return
        # Of what was told under another registration the node knows nothing: all of it again, soon.
        self._registration = registration if clear or registration == self._registration else ""
        self._due_s = now_s + REPORT_EVERY_S
        self._refresh_s = now_s + REFRESH_S
        self._retry_s = FIRST_RETRY_S


class Follower:
    """Follows the engine's events from `start` to `close`.

    Parameters
    ----------
    make_source
        Opens the subscription; called in the thread.
    block_tokens, max_blocks
        Tokens of a kvtier block, and blocks that the engine's memory has.
    """

    def __init__(
        self,
        make_source: Callable[[], Source],
        client: ReportClient,
        block_tokens: int,
        max_blocks: int,
    ) -> None:
        self.residents = Residents(block_tokens, max_blocks)
        self.reporter = Reporter(self.residents, client)
        self._make_source = make_source
        self._root: Key | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-kv-events", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def serve(self, root: Key | None) -> None:
        """From now on chains begin with this key; None: what the engine has is of no use to anybody."""
        self._root = root

    def close(self) -> None:
        """End the thread; bounded."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            source = self._make_source()
            try:
                while not self._ends.is_set():
                    self._step(source)
            finally:
                source.close()
        except Exception:
            logger.exception("kvtier: KV events are not followed any more because of an internal error")
            self.reporter.give_up()

    def _step(self, source: Source) -> None:
        events = source.receive(POLL_S)
        root = self._root
        if root != self.residents.root:
            self.residents.begin(root)
        self.residents.apply(events)
        self.reporter.step()
