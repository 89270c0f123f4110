"""How fast this engine computes prompts: timed in the worker, averaged in the scheduler's process.

The node weighs what it could fetch from elsewhere against it. Only steps that mostly compute prompts count,
each with all its tokens: what the engine achieves while it is busy with whatever else there is, not what a
lone request would see, so that batching leaves the figure as it is. Nothing here waits: on a GPU the two
ends of a step are events of its stream, read in a later step, when they have passed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

MIN_STEP_TOKENS: Final = 128
"""Steps of fewer tokens are made of their overhead."""
MIN_PROMPT_SHARE: Final = 0.5
MAX_PENDING: Final = 8
"""Steps of a GPU whose end is awaited; of one more the oldest is forgotten."""
MAX_TIMES: Final = 64
"""Steps kept until the next report."""
HALF_LIFE_TOKENS: Final = 8192
"""After so many tokens a measurement counts half."""
MAX_STRIDE: Final = 4.0
"""One step moves the average as if it had been at most so many times slower or faster."""
MIN_TOKEN_S: Final = 1e-8
MAX_TOKEN_S: Final = 1.0


class StepTime(NamedTuple):
    """One step: all tokens that it computed, and the seconds that they took."""

    tokens: int
    seconds: float


def timed_tokens(total: int, scheduled: Mapping[str, int], left: Mapping[str, int]) -> int:
    """Tokens of a step that is worth timing; 0 for any other.

    Parameters
    ----------
    total
        Tokens of the step.
    scheduled
        The same by request.
    left
        Tokens of the prompt that are not computed yet, by request; others count as decoding.
    """
    if total < MIN_STEP_TOKENS:
        return 0
    prompt = sum(min(scheduled[name], max(0, count)) for name, count in left.items())
    return total if prompt >= MIN_PROMPT_SHARE * total else 0


class Stopwatch:
    """Times steps in the worker; not thread-safe.

    Parameters
    ----------
    device
        Where the steps run, None for the CPU.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._tokens = 0
        self._begin: Any = None
        self._pending: deque[tuple[int, Any, Any]] = deque(maxlen=MAX_PENDING)
        self._times: deque[StepTime] = deque(maxlen=MAX_TIMES)

    def start(self, tokens: int) -> None:
        """A step of `tokens` begins; 0: it is not timed."""
        self._tokens = tokens
        if tokens:
            self._begin = self._now()

    def stop(self) -> None:
        """Its work is done, or submitted."""
        if not self._tokens:
            return
        tokens, self._tokens = self._tokens, 0
        if self._device is None:
            self._times.append(StepTime(tokens, time.perf_counter() - self._begin))
        else:
            self._pending.append((tokens, self._begin, self._now()))

    def take(self) -> list[StepTime]:
        """Steps whose end has passed since the last call."""
        while self._pending and self._pending[0][2].query():
            tokens, begin, end = self._pending.popleft()
            self._times.append(StepTime(tokens, begin.elapsed_time(end) / 1000))
        times = list(self._times)
        self._times.clear()
        return times

    def _now(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class PrefillRate:
    """The average over steps, weighted by their tokens. Written by one thread, read by any."""

    def __init__(self) -> None:
        self._token_s = 0.0
        self._is_warm = False

    def note(self, step: StepTime) -> None:
        """One more step; the engine's first one pays for first use and does not count."""
        if not self._is_warm:
            self._is_warm = True
            return
        token_s = min(max(step.seconds / step.tokens, MIN_TOKEN_S), MAX_TOKEN_S)
        if not self._token_s:
            self._token_s = token_s
            return
        token_s = min(max(token_s, self._token_s / MAX_STRIDE), self._token_s * MAX_STRIDE)
        weight = 1.0 - 0.5 ** (step.tokens / HALF_LIFE_TOKENS)
        self._token_s += weight * (token_s - self._token_s)

    def block_compute_s(self, block_tokens: int) -> float:
        """Seconds that a block of `block_tokens` takes to compute; 0 while nothing is known."""
        return self._token_s * block_tokens
