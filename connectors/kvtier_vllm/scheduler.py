"""The scheduler's side of the connector: what to ask, offer, load and save.

Runs in vLLM's scheduling thread, which it never makes wait while anything is being computed. The life
of a request here:

1. `on_new_request` starts its lookup.
2. `matched_tokens` looks for the answer. Not there yet: ``None`` once, afterwards a miss. Where the
   engine has nothing else to do, it waits for the answer instead, up to the lookup's own deadline.
3. `after_alloc` turns an accepted offer into a `LoadOrder`; the worker's `StepReport` says how it went.
   A request whose load failed gets no further offer (else it would fail again and again).
4. `step_orders` orders saves of prompt blocks as steps complete them. What the lookup found is not
   saved again.
5. `finished` says whether blocks must be retained for saves under way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvtier.types import Layout
from kvtier_vllm.checks import beyond_tokens
from kvtier_vllm.eras import Eras
from kvtier_vllm.event_source import Endpoints, EventSource
from kvtier_vllm.follower import Follower
from kvtier_vllm.lookups import (
    RENEW_AFTER_S,
    STALE_AFTER_S,
    Lookup,
    LookupClient,
    Lookups,
    Offer,
    Prompt,
)
from kvtier_vllm.metadata import Handshake, LoadOrder, SaveOrder, StepOrders, StepReport
from kvtier_vllm.prefill import MIN_STEP_TOKENS, PrefillRate, timed_tokens
from kvtier_vllm.saves import SaveBook
from kvtier_vllm.settings import Settings

logger = logging.getLogger("vllm.kvtier")


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
    """One request between `on_new_request` and `finished`.

    Attributes
    ----------
    max_blocks
        Whole blocks of its prompt.
    lookup, renewal
        The question whose answer counts, and one that will replace it.
    postponed
        vLLM was told once to ask again.
    offerable
        False once an offer was taken, withdrawn or missed; a preemption makes it true again.
    known, saved
        Leading blocks that the node has, and that need no further save.
    start
        Where the last offer began.
    loading
        First block and number of blocks of the load under way.
    saving
        Jobs under way.
    """

    request: Any
    era: int
    prompt: Prompt
    max_blocks: int
    lookup: Lookup | None = None
    renewal: Lookup | None = None
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
        return self.prompt.request_id


class SchedulerSide:
    """See the module. Not thread-safe.

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
    events
        Where the engine's KV events can be followed; None where it publishes none.
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
        events: Endpoints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self.eras = Eras(weights, settings.tenant)
        self.prefill = PrefillRate()
        self._settings = settings
        self._engine_id = engine_id
        self._make_client = make_client
        self._loads, self._saves = loads, saves
        self._clock = clock
        self._lookups: Lookups | None = None
        self._num_blocks = num_blocks
        self._events = events
        self.follower: Follower | None = None
        self._followed = (-1, False)
        self._handshake: Handshake | None = None
        self._block_tokens = 1
        self._kv_cache_manager: Any = None
        self._requests: dict[str, _Tracked] = {}
        self._idle = True
        self.save_book = SaveBook(max(1, int(num_blocks * settings.save_fraction)))
        self._new_loads: list[LoadOrder] = []
        self._finishing: set[str] = set()
        self._retained: set[str] = set()

    # -- what vLLM calls ------------------------------------------------------------------------------

    def bind(self, kv_cache_manager: Any) -> None:
        """vLLM's cache manager, through which a new era empties the engine's own cache."""
        self._kv_cache_manager = kv_cache_manager

    def shake_hands(self, handshake: Handshake) -> None:
        """The worker has said what its blocks look like: lookups can begin."""
        self._handshake = handshake
        self._block_tokens = handshake.layout.block_tokens
        client = self._make_client(handshake.layout)
        self._lookups = Lookups(client, self._settings, self._engine_id, self._clock, self.prefill)
        if self._events is not None:
            events = self._events
            self.follower = Follower(
                lambda: EventSource(events), client, self._block_tokens, self._num_blocks
            )
            self._guide_follower()
            self.follower.start()

    def on_new_request(self, request: Any) -> None:
        """Start the lookup of a request, if kvtier can do anything for it."""
        reason = beyond_tokens(request)
        if reason:
            self._bypass(reason)
            return
        self._try_to_serve()
        blocks = request.num_prompt_tokens // self._block_tokens
        if self._handshake is None or not self.eras.serving or blocks == 0:
            return
        namespace = self.eras.namespace(self._handshake, request.cache_salt)
        prompt = Prompt(request.request_id, namespace, request.prompt_token_ids)
        tracked = self._requests[prompt.request_id] = _Tracked(request, self.eras.number, prompt, blocks)
        self._ask(tracked)

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `num_computed_tokens` can be loaded; None: ask again, once."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not tracked.offerable or not self._is_current(tracked):
            return 0, False
        offer = self._poll(tracked)
        if offer is None:
            return (None, False) if self._postpone(tracked) else (0, False)
        # At least one token is left to compute: its logits are what the request came for.
        usable = min(offer.blocks, tracked.max_blocks, (request.num_tokens - 1) // self._block_tokens)
        tracked.start = num_computed_tokens // self._block_tokens
        count = usable - tracked.start
        if count < self._settings.min_load_blocks:
            return 0, False
        return count * self._block_tokens, True

    def after_alloc(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        """vLLM has blocks for the request: load what was offered, or give the offer back."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.loading is not None:
            return
        if num_external_tokens == 0:
            self._withdraw(tracked)
            return
        offer = tracked.lookup.answer() if tracked.lookup is not None else None
        keys = tracked.prompt.keys
        assert offer is not None
        assert keys is not None
        self._learn(tracked, offer)
        first, last = tracked.start, tracked.start + num_external_tokens // self._block_tokens
        assert len(block_ids) >= last, "vLLM allocated fewer blocks than it wants loaded"
        tracked.loading = (first, last - first)
        tracked.lookup = tracked.renewal = None
        tracked.offerable = False
        self.counters.offered_blocks += last - first
        budget_s = max(2 * offer.estimate_s, self._settings.load_floor_s)
        self._new_loads.append(
            LoadOrder(tracked.id, tuple(keys[first:last]), tuple(block_ids[first:last]), budget_s)
        )

    def step_orders(self, output: Any) -> StepOrders:
        """What the worker has to do in the step that vLLM has just planned."""
        preempted = frozenset(output.preempted_req_ids or ())
        for request_id in preempted:
            self._preempted(request_id, resumed=request_id in output.num_scheduled_tokens)
        orders = StepOrders(
            epoch=self.eras.epoch,
            loads=self._new_loads,
            saves=self._new_saves(output) if self._saves and self.eras.serving else [],
            preempted=preempted,
            finishing=frozenset(self._finishing),
            idle=output.total_num_scheduled_tokens == 0,
            timed_tokens=self._timed_tokens(output),
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
            for step in report.computed:
                self.prefill.note(step)
            if report.weights is not None:
                self.eras.adopt(report.weights)
        self._try_to_serve()

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
        self.eras.reset()
        self._try_to_serve()
        return True

    def close(self) -> None:
        """End the lookups, bounded by their deadline, and say how many requests were bypassed, and why."""
        for reason, count in self.counters.bypassed.items():
            logger.info("kvtier: %d requests with %s were not cached", count, reason)
        if self.follower is not None:
            self.follower.close()
        if self._lookups is not None:
            self._lookups.close()

    # -- eras -----------------------------------------------------------------------------------------

    def _try_to_serve(self) -> None:
        self.eras.try_to_serve(self._kv_cache_manager)
        if self.follower is not None:
            self._guide_follower()

    def _guide_follower(self) -> None:
        """Tell it when the era changes: the engine empties its own cache before it serves a new one."""
        now = (self.eras.number, self.eras.serving)
        if self.follower is None or self._handshake is None or now == self._followed:
            return
        self._followed = now
        root = self.eras.namespace(self._handshake, None).root() if self.eras.serving else None
        self.follower.serve(root)

    # -- offers ---------------------------------------------------------------------------------------

    def _ask(self, tracked: _Tracked) -> None:
        assert self._lookups is not None
        wanted = self._loads and not tracked.request.skip_reading_prefix_cache
        tracked.lookup = self._lookups.ask(tracked.prompt, only_keys=not wanted)
        tracked.offerable = wanted and tracked.lookup is not None
        if tracked.lookup is None:
            self.counters.crowded_lookups += 1
        else:
            self.counters.lookups += 1

    def _is_current(self, tracked: _Tracked) -> bool:
        return tracked.era == self.eras.number and self.eras.serving

    def _poll(self, tracked: _Tracked) -> Offer | None:
        """The answer if it is there. An engine with nothing else to do waits for it."""
        assert self._lookups is not None
        self._renew(tracked)
        lookup = tracked.lookup
        assert lookup is not None
        if not lookup.future.done() and self._may_wait():
            self._lookups.wait(lookup)
        return lookup.answer()

    def _may_wait(self) -> bool:
        """Whether nobody is kept waiting, and the node has answered lately."""
        assert self._lookups is not None
        return self._lookups.trusted and (self._idle or self._kv_cache_manager.usage == 0)

    def _renew(self, tracked: _Tracked) -> None:
        """Ask again about an offer that waits for long; use the old one meanwhile, unless it is stale."""
        assert self._lookups is not None
        assert tracked.lookup is not None
        age_s = self._lookups.age_s(tracked.lookup)
        if tracked.renewal is None and age_s > RENEW_AFTER_S:
            tracked.renewal = self._lookups.ask(tracked.prompt)
            self.counters.lookups += tracked.renewal is not None
        if tracked.renewal is not None and (tracked.renewal.future.done() or age_s > STALE_AFTER_S):
            tracked.lookup, tracked.renewal = tracked.renewal, None

    def _postpone(self, tracked: _Tracked) -> bool:
        """Whether vLLM should ask again: it costs the request a step, so once at most."""
        if not tracked.postponed and not self._may_wait():
            tracked.postponed = True
            self.counters.asked_again += 1
            return True
        self.counters.late_lookups += 1
        self._withdraw(tracked)
        return False

    def _withdraw(self, tracked: _Tracked) -> None:
        """No load will follow: give back what the node holds for the request, now or when it answers."""
        for lookup in (tracked.lookup, tracked.renewal):
            if lookup is not None:
                assert self._lookups is not None
                self._lookups.give_back(tracked.prompt, lookup)
        offer = tracked.lookup.answer() if tracked.lookup is not None else None
        if offer is not None:
            self._learn(tracked, offer)
        tracked.lookup = tracked.renewal = None
        tracked.offerable = False

    def _learn(self, tracked: _Tracked, offer: Offer) -> None:
        """What the node has is not saved again."""
        tracked.known = min(offer.blocks, tracked.max_blocks)
        tracked.saved = max(tracked.saved, tracked.known)

    # -- loads and saves ------------------------------------------------------------------------------

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
        self._correct_cached_tokens(tracked.request, blocks)

    def _correct_cached_tokens(self, request: Any, blocks: int) -> None:
        """vLLM counted the whole offer as cached; without any computed block it counts anew itself."""
        stats = request.prefill_stats
        if stats is not None and request.num_preemptions == 0:
            loaded_tokens = blocks * self._block_tokens
            stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, loaded_tokens)

    def _timed_tokens(self, output: Any) -> int:
        total, scheduled = output.total_num_scheduled_tokens, output.num_scheduled_tokens
        if total < MIN_STEP_TOKENS:  # most steps: they only decode
            return 0
        requests = {name: self._requests[name].request for name in scheduled if name in self._requests}
        left = {name: each.num_prompt_tokens - each.num_computed_tokens for name, each in requests.items()}
        return timed_tokens(total, scheduled, left)

    def _new_saves(self, output: Any) -> list[SaveOrder]:
        """Saves of the prompt blocks that this step completes."""
        saves: list[SaveOrder] = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.saved >= tracked.max_blocks or not self._is_current(tracked):
                continue
            save = self._save(tracked, num_tokens, output.kv_connector_block_state)
            if save is not None:
                saves.append(save)
        return saves

    def _save(self, tracked: _Tracked, num_tokens: int, block_state: Any) -> SaveOrder | None:
        request, keys, first = tracked.request, tracked.prompt.keys, tracked.saved
        done_tokens = min(request.num_computed_tokens + num_tokens, request.num_prompt_tokens)
        last = done_tokens // self._block_tokens
        if last <= first or keys is None:
            return None
        if last - first > self.save_book.room:
            # What finds no room is tried again with the request's next step.
            self.counters.crowded_saves += 1
            last = first + self.save_book.room
            if last == first:
                return None
        block_ids = block_state.get_block_ids(tracked.id)
        assert block_ids is not None
        order = self.save_book.order(tracked.id, keys, first, last, block_ids[0])
        tracked.saving.add(order.job)
        tracked.saved = last
        return order

    def _saved(self, job: int) -> None:
        request_id = self.save_book.ended(job)
        if request_id is None:  # its request was preempted
            return
        self.counters.saved_jobs += 1
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.saving.discard(job)

    def _preempted(self, request_id: str, resumed: bool) -> None:
        """Its blocks are gone and its saves are cut by the worker; it may be offered a load again."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        self.save_book.forget(tracked.saving)
        tracked.saving.clear()
        tracked.saved = tracked.known
        if not tracked.failed and not resumed and tracked.loading is None and self._is_current(tracked):
            self._withdraw(tracked)
            self._ask(tracked)

    def _bypass(self, reason: str) -> None:
        count = self.counters.bypassed.get(reason, 0)
        self.counters.bypassed[reason] = count + 1
        if count == 0:
            logger.warning("kvtier: requests with %s are not cached (said once)", reason)
