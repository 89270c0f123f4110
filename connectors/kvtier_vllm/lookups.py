"""Asks the node what it has of a prompt, in a few threads, so that the scheduler never waits for it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, Protocol

from kvtier.types import Key, Namespace, chain_keys
from kvtier_vllm.metadata import hold_id
from kvtier_vllm.prefill import PrefillRate
from kvtier_vllm.settings import Settings

logger = logging.getLogger("vllm.kvtier")

SILENT: Final = frozenset({"unreachable", "deadline"})
"""`Offer.reason`, and why a copy failed, where the node did not answer."""
RENEW_AFTER_S: Final = 10.0
"""An offer that has not been used by then is asked for again: a hold ends after a time."""
STALE_AFTER_S: Final = 25.0
"""An offer older than this is not used: its hold may have ended, and its blocks may be gone."""


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

    def lookup(  # noqa: D102
        self, request_id: str, keys: list[Key], *, block_compute_s: float
    ) -> Offer: ...

    def release_hold(self, request_id: str) -> None: ...  # noqa: D102

    def report_resident(  # noqa: D102
        self, added: Sequence[Key], removed: Sequence[Key] = (), *, clear: bool = False
    ) -> str | None: ...

    def close(self) -> None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class NoOffer:
    """The answer to a lookup that went wrong."""

    blocks: int = 0
    estimate_s: float = 0.0
    reason: str = "unreachable"


NOTHING: Final = NoOffer()


@dataclass(slots=True, eq=False)
class Prompt:
    """The whole blocks of a prompt; `keys` are there once its first lookup has begun."""

    request_id: str
    namespace: Namespace
    tokens: list[int]
    keys: list[Key] | None = None


class Lookup:
    """One question about one prompt."""

    __slots__ = ("asked_s", "future")

    def __init__(self, future: Future[Offer], asked_s: float) -> None:
        self.future = future
        self.asked_s = asked_s

    def answer(self) -> Offer | None:
        """The answer, None while it is not there. A lookup that went wrong offers nothing."""
        return _offer(self.future) if self.future.done() else None


class Lookups:
    """Questions to the node. Not thread-safe.

    Attributes
    ----------
    trusted
        Whether the last answer was one: false while the node does not answer.
    """

    def __init__(
        self,
        client: LookupClient,
        settings: Settings,
        engine_id: str,
        clock: Callable[[], float],
        prefill: PrefillRate,
    ) -> None:
        self.trusted = True
        self._client = client
        self._timeout_s = settings.lookup_timeout_s
        self._engine_id = engine_id
        self._clock = clock
        self._prefill = prefill
        self._closed = False
        self._pool = ThreadPoolExecutor(settings.lookup_threads, thread_name_prefix="kvtier-lookup")
        self._room = threading.BoundedSemaphore(settings.max_lookups)
        # The first call pays for the channel and the registration: not a request's, but this one.
        self._pool.submit(client.lookup, hold_id(engine_id, ""), [], block_compute_s=0.0)

    def ask(self, prompt: Prompt, *, only_keys: bool = False) -> Lookup | None:
        """Hash the prompt and look it up; None where too many wait for that already."""
        if not self._room.acquire(blocking=False):
            return None
        return Lookup(self._pool.submit(self._look_up, prompt, only_keys), self._clock())

    def wait(self, lookup: Lookup) -> None:
        """Return when the answer is there, or when it can no longer come in time."""
        left_s = lookup.asked_s + self._timeout_s - self._clock()
        wait((lookup.future,), timeout=max(0.0, left_s))

    def age_s(self, lookup: Lookup) -> float:
        """Seconds since it was asked."""
        return self._clock() - lookup.asked_s

    def give_back(self, prompt: Prompt, lookup: Lookup) -> None:
        """No load will follow: end the hold of the offer, now or when it comes."""
        lookup.future.add_done_callback(lambda future: self._release(prompt, _offer(future)))

    def close(self) -> None:
        """End the threads; bounded by the deadline of a lookup."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _release(self, prompt: Prompt, offer: Offer) -> None:
        if offer.blocks and not self._closed:
            with contextlib.suppress(RuntimeError):  # closed just now: the hold ends by itself
                self._pool.submit(self._client.release_hold, hold_id(self._engine_id, prompt.request_id))

    def _look_up(self, prompt: Prompt, only_keys: bool) -> Offer:
        """In a thread."""
        try:
            if prompt.keys is None:
                namespace = prompt.namespace
                prompt.keys = chain_keys(namespace.root(), prompt.tokens, namespace.block_tokens)
            if only_keys:
                return NOTHING
            offer = self._client.lookup(
                hold_id(self._engine_id, prompt.request_id),
                prompt.keys,
                block_compute_s=self._prefill.block_compute_s(prompt.namespace.block_tokens),
            )
            self.trusted = offer.reason not in SILENT
            return offer
        except Exception:
            logger.exception("kvtier: a lookup failed; it counts as a miss")
            return NOTHING
        finally:
            self._room.release()


def _offer(future: Future[Offer]) -> Offer:
    return NOTHING if future.cancelled() else future.result()
