"""One breaker for each peer: a peer that fails is left alone until it answers again, then tried once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 10.0
PROBE_S: Final = 2.0
"""A probe has so long to tell how it went, before another one is let through."""


class Breaker:
    """Closed: everything passes. Open: nothing does, until the peer `answered` a greeting made after
    `retry_in_s`; then one pull in each `PROBE_S`, until one succeeds or fails.

    One fault opens it: whatever waits for a peer that is silent is a request that waits. Greetings cost no
    request anything; but a peer that answers them and never gives a byte is failing too, so they alone are no
    success.

    Attributes
    ----------
    last_error
        What went wrong last, for operators; empty after a success.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.last_error = ""
        self._clock = clock
        self._has_failed = False
        self._has_answered = False
        self._is_probing = False
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at_s = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the last that is known of the peer is a fault."""
        return self._has_failed

    @property
    def retry_in_s(self) -> float:
        """How long to wait before the peer is greeted, or asked, again."""
        return max(0.0, self._retry_at_s - self._clock()) if self._has_failed else 0.0

    def is_open(self, now_s: float) -> bool:
        """Whether the peer is left alone now. Changes nothing."""
        return self._has_failed and (not self._has_answered or now_s < self._retry_at_s)

    def admit(self) -> bool:
        """Whether a pull may begin. Where the breaker is half open it is the probe, and others wait."""
        now_s = self._clock()
        if self.is_open(now_s):
            return False
        if self._has_failed:
            self._is_probing = True
            self._retry_at_s = now_s + PROBE_S
        return True

    def answered(self) -> None:
        """The peer answered a greeting: a pull may try it."""
        self._has_answered = True

    def failed(self, error: Exception) -> bool:
        """Count a fault of a pull; True where the breaker opens by it, having been closed."""
        self.last_error = str(error) or type(error).__name__
        if self._has_failed and not self._is_probing:
            return False  # of a pull that began before the breaker opened
        was_closed = not self._has_failed
        self._open()
        return was_closed

    def silent(self, error: Exception) -> None:
        """The peer did not answer a greeting that was made while the breaker is open."""
        self.last_error = str(error) or type(error).__name__
        self._open()

    def trip(self, error: Exception) -> None:
        """Open at once, for as long as it gets: what is wrong does not pass by itself."""
        self.last_error = str(error)
        self._backoff_s = MAX_BACKOFF_S
        self._open()

    def _open(self) -> None:
        self._has_failed = True
        self._has_answered = self._is_probing = False
        self._retry_at_s = self._clock() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def succeeded(self) -> None:
        """All is well again."""
        self._has_failed = self._is_probing = False
        self._backoff_s = FIRST_BACKOFF_S
        self.last_error = ""
