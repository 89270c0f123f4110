"""Under which namespace the engine's KV may be cached now, if at all.

An *era* is a generation of the cache under one version of the weights. A request belongs to the era in
which it arrived; when the era ends, it is neither offered nor saved anything any more. A new era is
served only once the engine's own cache was empty, since blocks that were computed before must not be
saved under its keys.
"""

from __future__ import annotations

import os
from typing import Any

from kvtier.types import Namespace
from kvtier_vllm.identity import revised_identity
from kvtier_vllm.metadata import Handshake, WeightsState


class Eras:
    """The current era. Not thread-safe.

    Attributes
    ----------
    number
        Counts eras.
    epoch
        Version of the weights that the current keys stand for.
    """

    def __init__(self, weights: bytes, tenant: str) -> None:
        self.number = 0
        self.epoch = 0
        self._loaded_weights = weights
        self._weights = weights
        self._tenant = tenant
        self._generation = b""
        self._weights_changed = False
        self._clean = True

    @property
    def serving(self) -> bool:
        """Whether anything may be looked up or saved."""
        return self._clean and not self._weights_changed

    def namespace(self, handshake: Handshake, salt: str | None) -> Namespace:
        """The namespace of a request with this salt."""
        return Namespace(
            weights=self._weights,
            kv_dtype=handshake.kv_dtype,
            layout=handshake.layout.fingerprint(),
            block_tokens=handshake.layout.block_tokens,
            tenant=self._tenant,
            salt=(salt or "").encode(),
            generation=self._generation,
        )

    def reset(self) -> None:
        """Begin a new generation: nothing cached so far is found again."""
        self._generation = os.urandom(16)
        self._begin()

    def adopt(self, state: WeightsState) -> None:
        """The worker has other weights than those that the keys stand for."""
        if state.epoch == self.epoch:
            return
        self.epoch = state.epoch
        self._weights_changed = state.changed
        if not state.changed:
            self._weights = revised_identity(self._loaded_weights, state.revision)
        self._begin()

    def try_to_serve(self, kv_cache_manager: Any) -> None:
        """Empty the engine's own cache as soon as nothing uses it: its blocks are of an earlier era."""
        if not self._clean and not self._weights_changed and kv_cache_manager.usage == 0:
            self._clean = bool(kv_cache_manager.reset_prefix_cache())

    def _begin(self) -> None:
        self.number += 1
        self._clean = False
