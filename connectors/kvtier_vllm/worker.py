"""The worker's side of the connector: copies between the engine's KV memory and the node.

Runs in the worker's main thread, once a step, and copies in two threads of its own: one for loads, one
for saves. The main thread only hands over and collects; it waits for a copy in one case, when the
blocks under a save are about to be overwritten.

A save of step N is handed over at the start of step N+1, so that the copy competes with nothing that
the first token still waits for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

from kvtier.types import Key, Layout
from kvtier_vllm.lane import Job, Lane
from kvtier_vllm.lookups import SILENT
from kvtier_vllm.metadata import (
    Handshake,
    LoadOrder,
    SaveOrder,
    StepOrders,
    StepReport,
    hold_id,
)
from kvtier_vllm.prefill import Stopwatch
from kvtier_vllm.settings import Settings
from kvtier_vllm.weights import WeightsWatch

logger = logging.getLogger("vllm.kvtier")

IDLE_WAIT_S: Final = 0.01
"""A step that computes nothing waits up to this long for a copy to end: shorter steps take the copy's
processor and GIL. A request that arrives meanwhile waits no longer than this."""
CLOSE_TIMEOUT_S: Final = 5.0


class CopyClient(Protocol):
    """The part of `EngineClient` that the worker uses."""

    def prepare(self) -> bool: ...  # noqa: D102

    def load(  # noqa: D102
        self, request_id: str, keys: list[Key], pages: Any, block_ids: list[int], *, budget_s: float | None
    ) -> Any: ...

    def store(  # noqa: D102
        self,
        parent: Key | None,
        keys: list[Key],
        pages: Any,
        block_ids: list[int],
        *,
        stop: threading.Event | None,
        timeout_s: float,
    ) -> Any: ...

    def close(self) -> None: ...  # noqa: D102


class WorkerSide:
    """See the module. Called from the worker's main thread only.

    Parameters
    ----------
    engine_id
        As on the scheduler's side.
    """

    def __init__(self, settings: Settings, engine_id: str) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._client: CopyClient | None = None
        self._pages: Any = None
        self._handshake: Handshake | None = None
        self._fence_device: torch.device | None = None
        self._stopwatch = Stopwatch(None)
        self._orders: StepOrders | None = None
        self._unended: list[SaveOrder] = []
        self._changed = threading.Condition()
        self._load_lane: Lane[LoadOrder] = Lane("kvtier-load", self._load, self._changed)
        self._save_lane: Lane[SaveOrder] = Lane("kvtier-save", self._save, self._changed)
        self._pending: list[Job[SaveOrder]] = []
        self._unfinished: Counter[str] = Counter()
        self._finishing: set[str] = set()
        self._invalid: set[int] = set()
        self._report = StepReport()
        self.watch = WeightsWatch(self._weights_changing)

    # -- start and end ---------------------------------------------------------------------------------

    def serve(
        self,
        rows: Sequence[torch.Tensor],
        handshake: Handshake,
        make_client: Callable[[Layout], CopyClient],
        make_pages: Callable[[Sequence[torch.Tensor], Layout], Any],
    ) -> None:
        """Begin with the engine's KV memory, ``rows[layer][block]`` as bytes."""
        self._pages = make_pages(rows, handshake.layout)
        self._client = make_client(handshake.layout)
        self._handshake = handshake
        self._fence_device = rows[0].device if rows[0].device.type != "cpu" else None
        self._stopwatch = Stopwatch(self._fence_device)
        # Connecting and mapping take their time: not a request's, but this one.
        threading.Thread(target=self._client.prepare, name="kvtier-prepare", daemon=True).start()

    @property
    def handshake(self) -> Handshake | None:
        """What the scheduler's side has to know; None until `serve`."""
        return self._handshake

    def close(self) -> None:
        """Stop and join the copies; bounded."""
        self._pending.clear()
        ended = [lane.close(CLOSE_TIMEOUT_S) for lane in (self._load_lane, self._save_lane)]
        if self._client is not None and all(ended):
            self._client.close()

    # -- once a step, in this order --------------------------------------------------------------------

    def begin_step(self, orders: StepOrders) -> None:
        """Before anything is computed: end the saves of preempted requests, start other saves and loads.

        vLLM would let loads start after the step's computation; they touch none of its blocks, and a
        long prefill of another request should not delay them.
        """
        # A step that went wrong never ended: its saves did not happen.
        self._report.saved += [order.job for order in self._unended]
        self._orders, self._unended = orders, orders.saves
        if orders.preempted:
            self._cut_saves(lambda order: order.request_id in orders.preempted)
        for job in self._pending:
            self._save_lane.submit(job)
        self._pending.clear()
        self._finishing |= orders.finishing
        if orders.loads:
            self._start_loads(orders)
        self._stopwatch.start(orders.timed_tokens)

    def _start_loads(self, orders: StepOrders) -> None:
        fence = self._fence()
        valid = self._valid(orders)
        for order in orders.loads:
            job = Job(order, orders.epoch, fence)
            if not valid:
                job.stop.set()
            self._load_lane.submit(job)

    def end_step(self) -> None:
        """The step's KV is written (or will be, in the order of its stream): note its saves.

        With speculative decoding vLLM calls this after it has collected the step's results.
        """
        self._stopwatch.stop()
        saves, self._unended = self._unended, []
        if not saves:
            return
        assert self._orders is not None
        if not self._valid(self._orders):
            self._report.saved += [order.job for order in saves]
            return
        fence = self._fence()
        deadline_s = time.monotonic() + self._settings.save_timeout_s
        for order in saves:
            self._unfinished[order.request_id] += 1
            self._pending.append(Job(order, self._orders.epoch, fence, deadline_s))

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose retained blocks may go, and requests whose load has ended; each once."""
        self._save_lane.expire(time.monotonic())
        if self._orders is not None and self._orders.idle:
            self._wait_a_little()
        for save in self._save_lane.take_ended():
            self._note_saved(save)
        loaded: set[str] = set()
        for load in self._load_lane.take_ended():
            loaded.add(load.order.request_id)
            self._note_loaded(load)
        sent = {request_id for request_id in self._finishing if not self._unfinished[request_id]}
        self._finishing -= sent
        for request_id in sent:
            del self._unfinished[request_id]
        return sent, loaded

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of loads reported by the last `take_finished` that are not in place."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> StepReport | None:
        """News for the scheduler's side, None where there is none."""
        report, self._report = self._report, StepReport()
        state = self.watch.state
        if self._orders is not None and state.epoch != self._orders.epoch:
            report.weights = state
        report.computed = self._stopwatch.take()
        is_news = report.saved or report.loaded or report.weights or report.computed
        return report if is_news else None

    # -- details ---------------------------------------------------------------------------------------

    def _valid(self, orders: StepOrders) -> bool:
        """Whether the keys of this step stand for the weights that are here."""
        state = self.watch.check()
        return state.epoch == orders.epoch and not state.changed

    def _fence(self) -> Callable[[], None]:
        """Something for a copy thread to call: returns when this step's work on the KV is done."""
        if self._fence_device is None:
            return _nothing
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._fence_device))
        return event.synchronize  # type: ignore[no-any-return]

    def _wait_a_little(self) -> None:
        with self._changed:
            lanes: tuple[Lane[Any], ...] = (self._load_lane, self._save_lane)
            if any(lane.busy() for lane in lanes) and not any(lane.has_ended() for lane in lanes):
                self._changed.wait(IDLE_WAIT_S)

    def _note_saved(self, job: Job[SaveOrder]) -> None:
        self._report.saved.append(job.order.job)
        self._unfinished[job.order.request_id] -= 1
        if self._unfinished[job.order.request_id] == 0:
            del self._unfinished[job.order.request_id]

    def _note_loaded(self, job: Job[LoadOrder]) -> None:
        # The weights may have changed while it ran: what it brought belongs to the old ones.
        blocks = job.blocks if job.epoch == self.watch.state.epoch else 0
        self._report.loaded[job.order.request_id] = blocks
        self._invalid.update(job.order.block_ids[blocks:])

    def _cut_saves(self, match: Callable[[SaveOrder], bool]) -> None:
        kept: list[Job[SaveOrder]] = []
        for job in self._pending:
            if match(job.order):
                self._note_saved(job)
            else:
                kept.append(job)
        self._pending = kept
        self._save_lane.cut(match)

    def _weights_changing(self) -> None:
        """No copy may run while weights change or memory goes away."""
        self._cut_saves(lambda _: True)
        self._load_lane.cut(lambda _: True)

    # -- in the copy threads ---------------------------------------------------------------------------

    def _load(self, job: Job[LoadOrder]) -> int:
        assert self._client is not None
        if job.stop.is_set():
            return 0
        order = job.order
        result = self._client.load(
            hold_id(self._engine_id, order.request_id),
            list(order.keys),
            self._pages,
            list(order.block_ids),
            budget_s=order.budget_s,
        )
        if result.loaded < len(order.keys):
            logger.warning(
                "kvtier: %d of %d blocks were loaded (%s); the rest is computed",
                result.loaded,
                len(order.keys),
                result.failed_reason,
            )
        if result.loaded == 0 and result.failed_reason in SILENT:
            # Those behind it would wait for the same node, one deadline after the other.
            self._load_lane.drop(lambda _: True)
        return int(result.loaded)

    def _save(self, job: Job[SaveOrder]) -> int:
        assert self._client is not None
        order = job.order
        result = self._client.store(
            order.parent,
            list(order.keys),
            self._pages,
            list(order.block_ids),
            stop=job.stop,
            timeout_s=self._settings.save_timeout_s,
        )
        if result.reason in SILENT:
            self._save_lane.drop(lambda _: True)
        return int(result.committed)


def _nothing() -> None:
    return None
