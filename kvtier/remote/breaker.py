"""One breaker for each peer: a peer that keeps failing is left alone for a while, then tried once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

FAULTS_TO_OPEN: Final = 3
"""So many faults in a row, and the peer is left alone."""
FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 15.0
PROBE_S: Final = 2.0
"""A probe has so long to tell how it went, before another one is let through."""


class Breaker:
    """Closed: everything passes. Open: nothing does, until `retry_at_s`; then one probe in each `PROBE_S`.

    The unit is a whole pull. A peer that answers calls but never gives a byte is failing too, so an answered
    call alone is no success.

    Attributes
    ----------
    last_error
        What went wrong last, for operators; empty after a success.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.last_error = ""
        self._clock = clock
        self._faults = 0
        self._is_probing = False
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at_s = 0.0
        self._is_probing = False

    def is_open(self, now_s: float) -> bool:
        """Whether the peer is left alone now. Changes nothing."""
        return self._faults >= FAULTS_TO_OPEN and now_s < self._retry_at_s

    def admit(self) -> bool:
        """Whether a pull may begin. Where the breaker is half open it is the probe, and others wait."""
        now_s = self._clock()
        if self.is_open(now_s):
            return False
        if self._faults >= FAULTS_TO_OPEN:
            self._is_probing = True
            self._retry_at_s = now_s + PROBE_S
        return True

    def failed(self, error: Exception) -> bool:
        """Count a fault; True where the breaker opens by it, having been closed."""
        was_open = self._faults >= FAULTS_TO_OPEN
        self._faults += 1
        self.last_error = str(error) or type(error).__name__
        if self._faults < FAULTS_TO_OPEN or (was_open and not self._is_probing):
            return False  # in the second case a pull that began before the breaker opened
        self._is_probing = False
        self._retry_at_s = self._clock() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        return not was_open

    def trip(self, error: Exception) -> None:
        """Open at once, for as long as it gets: what is wrong does not pass by itself."""
        self._faults = FAULTS_TO_OPEN - 1
        self._backoff_s = MAX_BACKOFF_S
        self.failed(error)

    def succeeded(self) -> None:
        """All is well again."""
        self._faults = 0
        self._is_probing = False
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at_s = 0.0
        self.last_error = ""
