"""The scheduler's side of the connector: what to ask, offer, load and save.

Runs in vLLM's scheduling thread, which it never makes wait while anything is being computed: lookups
run in a few threads of their own and are only polled. The life of a request here:

1. `on_new_request` submits its lookup.
2. `matched_tokens` polls the answer. Not there yet: ``None`` once, afterwards a miss. Where the engine
   has nothing else to do, it waits for the answer instead, up to the lookup's own deadline.
3. `after_alloc` turns an accepted offer into a `LoadOrder`; the worker's `StepReport` says how it went.
   A request whose load failed gets no further offer (else it would fail again and again).
4. `step_orders` orders saves of prompt blocks as steps complete them. What was found by the lookup is
   not saved again.
5. `finished` says whether blocks must be retained for saves under way.

An *era* is a generation of the cache under one version of the weights. A request belongs to the era in
which it arrived; when the era ends, it is neither offered nor saved anything any more. A new era begins
to be served only when the engine's own cache was emptied, since blocks computed before must not be
saved under its keys.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvtier.types import Key, Layout, Namespace, chain_keys
from kvtier_vllm.checks import beyond_tokens
from kvtier_vllm.identity import revised_identity
from kvtier_vllm.metadata import LoadOrder, SaveOrder, StepOrders, StepReport, WeightsState, hold_id
from kvtier_vllm.settings import Settings

logger = logging.getLogger("vllm.kvtier")

UNREACHABLE: Final = "unreachable"
"""`Offer.reason` where the node did not answer."""
RENEW_AFTER_S: Final = 10.0
"""An offer that a request has not used by then is asked for again: holds are bounded in time."""


class Offer(Protocol):
    """What `EngineClient.lookup` answers."""

    @property
    def blocks(self) -> int: ...  # noqa: D102

    @property
    def estimate_s(self) -> float: ...  # noqa: D102

    @property
    def reason(self) -> str: ...  # noqa: D102


class LookupClient(Protocol):
    """The part of `EngineClient` that the scheduler uses."""

    def lookup(self, request_id: str, keys: list[Key]) -> Offer: ...  # noqa: D102

    def release_hold(self, request_id: str) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class NoOffer:
    """The answer to a lookup that went wrong."""

    blocks: int = 0
    estimate_s: float = 0.0
    reason: str = UNREACHABLE


NOTHING: Final = NoOffer()


@dataclass(slots=True)
class Counters:
    """What the scheduler's side did, for logs and tests."""

    lookups: int = 0
    offered_blocks: int = 0
    loaded_blocks: int = 0
    failed_loads: int = 0
    saved_jobs: int = 0
    late_lookups: int = 0
    asked_again: int = 0
    crowded_lookups: int = 0
    crowded_saves: int = 0
    bypassed: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Tracked:
    """One request between `on_new_request` and `finished`."""

    request: Any
    era: int
    max_blocks: int
    keys: list[Key] | None = None
    answer: Future[Offer | None] | None = None
    renewal: Future[Offer | None] | None = None
    asked_s: float = 0.0
    postponed: bool = False
    offerable: bool = True
    failed: bool = False
    known: int = 0
    saved: int = 0
    start: int = 0
    loading: tuple[int, int] | None = None
    saving: set[int] = field(default_factory=set)

    @property
    def id(self) -> str:
        return str(self.request.request_id)


class SchedulerSide:
    """See the module. Not thread-safe, except where it says so.

    Parameters
    ----------
    weights
        `identity.weights_identity` of the engine.
    engine_id
        Makes request ids unique on the node; the worker uses the same.
    num_blocks
        Blocks of the engine's own cache.
    make_client
        Makes the client once the layout is known.
    """

    def __init__(
        self,
        settings: Settings,
        weights: bytes,
        engine_id: str,
        num_blocks: int,
        make_client: Callable[[Layout], LookupClient],
        *,
        loads: bool = True,
        saves: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self._settings = settings
        self._engine_id = engine_id
        self._base_weights = weights
        self._weights = weights
        self._make_client = make_client
        self._loads, self._saves = loads, saves
        self._clock = clock
        self._client: LookupClient | None = None
        self._layout: Layout | None = None
        self._kv_dtype = ""
        self._pool = ThreadPoolExecutor(settings.lookup_threads, thread_name_prefix="kvtier-lookup")
        self._pending = threading.BoundedSemaphore(settings.max_lookups)
        self._kv_cache_manager: Any = None
        self._requests: dict[str, _Tracked] = {}
        self._era = 0
        self._generation = b""
        self._epoch = 0
        self._weights_changed = False
        self._clean = True
        self._idle = True
        self._trusted = True
        self._closed = False
        self._next_job = 0
        self._jobs: dict[int, tuple[str, int]] = {}
        self._saving_blocks = 0
        self._max_saving_blocks = max(1, int(num_blocks * settings.save_fraction))
        self._new_loads: list[LoadOrder] = []
        self._finishing: set[str] = set()
        self._retained: set[str] = set()

    # -- what vLLM calls ------------------------------------------------------------------------------

    def bind(self, kv_cache_manager: Any) -> None:
        """vLLM's cache manager, through which a new era empties the engine's own cache."""
        self._kv_cache_manager = kv_cache_manager

    def shake_hands(self, layout: Layout, kv_dtype: str) -> None:
        """The worker has said what its blocks look like: lookups can begin."""
        self._layout, self._kv_dtype = layout, kv_dtype
        self._client = client = self._make_client(layout)
        # The first lookup pays for the channel and the registration: not a request's, but this one.
        self._pool.submit(client.lookup, self._hold_id(""), [])

    def on_new_request(self, request: Any) -> None:
        """Start the lookup of a request, if kvtier can do anything for it."""
        reason = beyond_tokens(request)
        if reason:
            self._bypass(reason)
            return
        self._try_to_clean()
        if self._layout is None or not self._serving():
            return
        block_tokens = self._layout.block_tokens
        blocks = request.num_prompt_tokens // block_tokens
        if blocks == 0:
            return
        tracked = _Tracked(request, self._era, blocks)
        tracked.offerable = self._loads and not request.skip_reading_prefix_cache
        self._requests[tracked.id] = tracked
        self._ask(tracked)

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `num_computed_tokens` can be loaded; None: ask again, once."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not self._may_offer(tracked):
            return 0, False
        offer = self._poll(tracked)
        if offer is None:
            return (None, False) if self._postpone(tracked) else (0, False)
        assert self._layout is not None
        block_tokens = self._layout.block_tokens
        # At least one token is left to compute: its logits are what the request came for.
        usable = min(offer.blocks, tracked.max_blocks, (request.num_tokens - 1) // block_tokens)
        tracked.start = num_computed_tokens // block_tokens
        count = usable - tracked.start
        if count < self._settings.min_load_blocks:
            return 0, False
        return count * block_tokens, True

    def after_alloc(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        """vLLM has blocks for the request: load what was offered, or give the offer back."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.loading is not None:
            return
        if num_external_tokens == 0:
            self._withdraw(tracked)
            return
        assert self._layout is not None
        assert tracked.keys is not None
        offer = _offer(tracked.answer) if tracked.answer is not None else None
        assert offer is not None
        self._learn(tracked, offer)
        first, count = tracked.start, num_external_tokens // self._layout.block_tokens
        ids = block_ids[first : first + count]
        assert len(ids) == count, "vLLM allocated fewer blocks than it wants loaded"
        tracked.loading = (first, count)
        tracked.answer = tracked.renewal = None
        tracked.offerable = False
        self.counters.offered_blocks += count
        self._new_loads.append(
            LoadOrder(
                tracked.id,
                tuple(tracked.keys[first : first + count]),
                tuple(ids),
                max(2 * offer.estimate_s, self._settings.load_floor_s),
            )
        )

    def step_orders(self, output: Any) -> StepOrders:
        """What the worker has to do in the step that vLLM has just planned."""
        preempted = frozenset(output.preempted_req_ids or ())
        for request_id in preempted:
            self._preempted(request_id, resumed=request_id in output.num_scheduled_tokens)
        orders = StepOrders(
            epoch=self._epoch,
            loads=self._new_loads,
            saves=self._new_saves(output) if self._saves and self._serving() else [],
            preempted=preempted,
            finishing=frozenset(self._finishing),
            idle=output.total_num_scheduled_tokens == 0,
        )
        self._new_loads = []
        self._finishing.clear()
        self._idle = orders.idle
        return orders

    def report(self, report: StepReport | None, finished_sending: Iterable[str]) -> None:
        """What the worker has done; called before vLLM acts on the same news."""
        self._retained.difference_update(finished_sending)
        if report is not None:
            for job in report.saved:
                self._saved(job)
            for request_id, blocks in report.loaded.items():
                self._loaded(request_id, blocks)
            if report.weights is not None:
                self._adopt(report.weights)
        self._try_to_clean()

    def finished(self, request: Any) -> bool:
        """The request is over; True: retain its blocks until `finished_sending` names it."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._withdraw(tracked)
        # Blocks of a load under way are retained by vLLM itself until the load is reported.
        if tracked.loading is not None or not tracked.saving:
            return False
        self._finishing.add(tracked.id)
        self._retained.add(tracked.id)
        return True

    def forget(self, request_id: str) -> None:
        """Neither offer nor save this request any more; only before it was offered anything."""
        tracked = self._requests.get(request_id)
        if tracked is not None and tracked.loading is None and not tracked.saving:
            self._withdraw(self._requests.pop(request_id))

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will be free soon, so that vLLM need not preempt for them."""
        return bool(self._retained)

    def reset_cache(self) -> bool:
        """Nothing cached so far is used by this engine again."""
        self._generation = os.urandom(16)
        self._new_era()
        self._try_to_clean()
        return True

    def close(self) -> None:
        """End the lookups; bounded by their deadline."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._client is not None:
            self._client.close()

    def _hold_id(self, request_id: str) -> str:
        return hold_id(self._engine_id, request_id)

    # -- lookups --------------------------------------------------------------------------------------

    def _ask(self, tracked: _Tracked) -> None:
        tracked.answer = self._submit(tracked)
        tracked.offerable = tracked.offerable and tracked.answer is not None

    def _submit(self, tracked: _Tracked) -> Future[Offer | None] | None:
        """Hash and look up in a thread; a crowd of waiting lookups makes one more a miss."""
        tracked.asked_s = self._clock()
        if not self._pending.acquire(blocking=False):
            self.counters.crowded_lookups += 1
            return None
        self.counters.lookups += 1
        namespace = self._namespace(tracked.request.cache_salt)
        return self._pool.submit(self._look_up, tracked, namespace, tracked.offerable)

    def _namespace(self, salt: str | None) -> Namespace:
        assert self._layout is not None
        return Namespace(
            weights=self._weights,
            kv_dtype=self._kv_dtype,
            layout=self._layout.fingerprint(),
            block_tokens=self._layout.block_tokens,
            tenant=self._settings.tenant,
            salt=(salt or "").encode(),
            generation=self._generation,
        )

    def _look_up(self, tracked: _Tracked, namespace: Namespace, wanted: bool) -> Offer | None:
        """In a thread: the keys of the prompt, and what the node has of them."""
        try:
            assert self._client is not None
            keys = tracked.keys
            if keys is None:
                keys = chain_keys(namespace.root(), tracked.request.prompt_token_ids, namespace.block_tokens)
                tracked.keys = keys
            if not wanted:
                return None
            offer = self._client.lookup(self._hold_id(tracked.id), keys)
            self._trusted = offer.reason != UNREACHABLE
            return offer
        except Exception:
            logger.exception("kvtier: a lookup failed; it counts as a miss")
            raise
        finally:
            self._pending.release()

    def _poll(self, tracked: _Tracked) -> Offer | None:
        """The answer if it is there. An engine with nothing else to do waits for it."""
        answer = tracked.answer
        assert answer is not None
        if not answer.done() and self._may_wait():
            left_s = tracked.asked_s + self._settings.lookup_timeout_s - self._clock()
            wait((answer,), timeout=max(0.0, left_s))
        if not answer.done():
            return None
        self._renew(tracked)
        return _offer(answer) or NOTHING

    def _may_wait(self) -> bool:
        """Whether nobody is kept waiting, and the node has answered lately."""
        idle = self._idle or (self._kv_cache_manager is not None and self._kv_cache_manager.usage == 0)
        return idle and self._trusted

    def _renew(self, tracked: _Tracked) -> None:
        """Ask again about an offer that has been waiting for long, and use the old one until then."""
        if tracked.renewal is not None and tracked.renewal.done():
            tracked.answer, tracked.renewal = tracked.renewal, None
        age_s = self._clock() - tracked.asked_s
        if tracked.renewal is None and age_s > RENEW_AFTER_S:
            tracked.renewal = self._submit(tracked)

    def _postpone(self, tracked: _Tracked) -> bool:
        """Whether vLLM should ask again: it costs the request a step, so once at most."""
        if not tracked.postponed and not self._may_wait():
            tracked.postponed = True
            self.counters.asked_again += 1
            return True
        self.counters.late_lookups += 1
        self._withdraw(tracked)
        return False

    def _may_offer(self, tracked: _Tracked) -> bool:
        return (
            tracked.offerable
            and tracked.answer is not None
            and tracked.era == self._era
            and not self._weights_changed
        )

    def _withdraw(self, tracked: _Tracked) -> None:
        """No load will follow: give back what the node may be holding, now or when it answers."""
        for answer in (tracked.answer, tracked.renewal):
            if answer is not None:
                answer.add_done_callback(lambda done: self._release(tracked.id, done))
        if tracked.answer is not None and tracked.answer.done():
            self._learn(tracked, _offer(tracked.answer))
        tracked.answer = tracked.renewal = None
        tracked.offerable = False

    def _release(self, request_id: str, answer: Future[Offer | None]) -> None:
        offer = _offer(answer)
        if offer is not None and offer.blocks and not self._closed:
            assert self._client is not None
            with contextlib.suppress(RuntimeError):  # closed just now: the hold ends by its TTL
                self._pool.submit(self._client.release_hold, self._hold_id(request_id))

    # -- loads and saves ------------------------------------------------------------------------------

    def _learn(self, tracked: _Tracked, offer: Offer | None) -> None:
        """What the node has is not saved again."""
        if offer is not None:
            tracked.known = min(offer.blocks, tracked.max_blocks)
            tracked.saved = max(tracked.saved, tracked.known)

    def _loaded(self, request_id: str, blocks: int) -> None:
        tracked = self._requests.get(request_id)
        self.counters.loaded_blocks += blocks
        if tracked is None or tracked.loading is None:  # aborted meanwhile
            return
        first, count = tracked.loading
        tracked.loading = None
        if blocks == count:
            return
        self.counters.failed_loads += 1
        tracked.failed = True
        tracked.known = tracked.saved = min(tracked.known, first + blocks)
        self._correct_cached_tokens(tracked, blocks)

    def _correct_cached_tokens(self, tracked: _Tracked, blocks: int) -> None:
        """vLLM counted the whole offer as cached; without any computed block it counts anew itself."""
        stats = tracked.request.prefill_stats
        if stats is None or tracked.request.num_preemptions > 0:
            return
        assert self._layout is not None
        stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, blocks * self._layout.block_tokens)

    def _new_saves(self, output: Any) -> list[SaveOrder]:
        """Saves of the prompt blocks that this step completes."""
        saves: list[SaveOrder] = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.saved >= tracked.max_blocks or tracked.era != self._era:
                continue
            save = self._save(tracked, num_tokens, output.kv_connector_block_state)
            if save is not None:
                saves.append(save)
        return saves

    def _save(self, tracked: _Tracked, num_tokens: int, block_state: Any) -> SaveOrder | None:
        assert self._layout is not None
        done_tokens = min(tracked.request.num_computed_tokens + num_tokens, tracked.request.num_prompt_tokens)
        first = tracked.saved
        last = done_tokens // self._layout.block_tokens
        if last <= first or tracked.keys is None:
            return None
        room = self._max_saving_blocks - self._saving_blocks
        if last - first > room:
            # What finds no room is tried again with the request's next step.
            self.counters.crowded_saves += 1
            last = first + room
            if last == first:
                return None
        block_ids = block_state.get_block_ids(tracked.id)
        assert block_ids is not None
        job, self._next_job = self._next_job, self._next_job + 1
        self._jobs[job] = (tracked.id, last - first)
        self._saving_blocks += last - first
        tracked.saving.add(job)
        tracked.saved = last
        return SaveOrder(
            job,
            tracked.id,
            tracked.keys[first - 1] if first else None,
            tuple(tracked.keys[first:last]),
            tuple(block_ids[0][first:last]),
        )

    def _saved(self, job: int) -> None:
        request_id, blocks = self._jobs.pop(job, ("", 0))
        if not blocks:  # its request was preempted, and forgotten with it
            return
        self._saving_blocks -= blocks
        self.counters.saved_jobs += 1
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.saving.discard(job)

    def _preempted(self, request_id: str, resumed: bool) -> None:
        """Its blocks are gone and its saves are cut by the worker; it may be offered a load again."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        for job in tracked.saving:
            self._saving_blocks -= self._jobs.pop(job)[1]
        tracked.saving.clear()
        tracked.saved = tracked.known
        if tracked.failed or resumed or not self._loads or tracked.era != self._era or not self._serving():
            return
        self._withdraw(tracked)
        tracked.offerable = not tracked.request.skip_reading_prefix_cache
        if tracked.offerable:
            self._ask(tracked)

    # -- eras -----------------------------------------------------------------------------------------

    def _serving(self) -> bool:
        return self._client is not None and self._clean and not self._weights_changed

    def _new_era(self) -> None:
        self._era += 1
        self._clean = False

    def _try_to_clean(self) -> None:
        """Empty the engine's own cache as soon as nothing uses it: its blocks are of an earlier era."""
        if self._clean or self._weights_changed:
            return
        manager = self._kv_cache_manager
        self._clean = manager is None or (manager.usage == 0 and bool(manager.reset_prefix_cache()))

    def _adopt(self, state: WeightsState) -> None:
        """The worker's weights are others than those that the keys stand for."""
        if state.epoch == self._epoch:
            return
        self._epoch = state.epoch
        self._weights_changed = state.changed
        if not state.changed:
            self._weights = revised_identity(self._base_weights, state.revision)
        self._new_era()

    def _bypass(self, reason: str) -> None:
        count = self.counters.bypassed.get(reason, 0)
        self.counters.bypassed[reason] = count + 1
        if count == 0:
            logger.warning("kvtier: requests with %s are not cached (said once)", reason)


def _offer(answer: Future[Offer | None]) -> Offer | None:
    """The result of a lookup that is done; None where it failed or was not wanted."""
    if answer.cancelled() or answer.exception() is not None:
        return None
    return answer.result()
