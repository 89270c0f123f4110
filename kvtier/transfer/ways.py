"""Whether to ask a peer for a codec: what its streams have given, as they are and through codecs. Pure.

Both rates are of blocks and end to end: encoding there, the way, decoding here, and whatever else the two
machines were doing. A codec is asked for where the way gives less than codecs make, and the loser is tried
again now and then, since neither rate stays what it was.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

RAW_BYTES_PER_S: Final = 1e9
"""Believed of a way until it has been measured: so fast that no codec is asked for."""
CODED_BYTES_PER_S: Final = 0.5e9
"""Believed of codecs until they have been measured: what one thread makes of bfloat16 under some load."""
GAIN: Final = 1.1
"""So many times the rate of the way codecs have to make before they are asked for, and the way that of codecs
before they are given up."""
ANEW_AFTER_S: Final = 20.0
"""After a pause of so long a form is measured anew; until enough has come the old figure counts."""
RAW_AGAIN_S: Final = 30.0
CODED_AGAIN_S: Final = 60.0
"""What has not been measured for so long is tried for a few reads, if it may be better by now."""
MEASURED_FROM_BYTES: Final = 4 << 20
"""So much has to come before something counts as measured."""
SPOILT_S: Final = 600.0
"""After a peer has sent what no codec decodes, it is not asked for any for so long."""
MAX_WAYS: Final = 4096
"""Peers that are remembered; beyond it the one that was read from longest ago goes."""
_WINDOW_BYTES: Final = 4 << 20
_LEAST_BYTES: Final = 1 << 20
_TRY_BYTES: Final = 32 << 20
_TIMES_A_TRY: Final = 20
_WEIGHT: Final = 0.2
_MAX_CHANGE: Final = 4.0


class _Form:
    """What one form of streams gives: the mean of what a byte takes, since costs add up, and of late more.

    `bytes_per_s` is what is believed until enough has come; likewise after a pause, when what was known may
    not hold any more and is measured anew.
    """

    __slots__ = (
        "_learnt_s",
        "_s_per_byte",
        "_windows",
        "bytes_per_s",
        "is_measured",
        "measured_s",
        "new_bytes",
    )

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.is_measured = False
        self.measured_s = self._learnt_s = now_s
        self.new_bytes = 0
        self._windows = 0
        self._s_per_byte = 0.0

    def learn(self, size_bytes: int, took_s: float, now_s: float) -> None:
        if now_s - took_s >= self._learnt_s + ANEW_AFTER_S:
            self._windows = self.new_bytes = 0
        self._learnt_s = now_s
        self._windows += 1
        seen = took_s / size_bytes
        if self._windows > 1:  # one message that waited, or several read at once, must not spoil the mean
            seen = min(max(seen, self._s_per_byte / _MAX_CHANGE), self._s_per_byte * _MAX_CHANGE)
        self._s_per_byte += max(_WEIGHT, 1 / self._windows) * (seen - self._s_per_byte)
        self.new_bytes += size_bytes
        if self.new_bytes >= MEASURED_FROM_BYTES:
            self.is_measured, self.measured_s = True, now_s
            self.bytes_per_s = 1 / self._s_per_byte

    def is_old(self, age_s: float, now_s: float) -> bool:
        """Whether that is so long ago that it is worth a try, which takes as long as `_TRY_BYTES` do."""
        return now_s >= self.measured_s + max(age_s, _TIMES_A_TRY * _TRY_BYTES / self.bytes_per_s)


class Way:
    """Between one peer and this node.

    What it gives is measured over all its reads together, since they share it: the bytes that came in a
    window during which at least one of them ran. A window begins with an arrival, so no round trip is in it.
    One in which a payload came counts for codecs: pieces that stayed as they are belong to that.
    """

    def __init__(self, now_s: float, raw_bytes_per_s: float = RAW_BYTES_PER_S) -> None:
        self._raw = _Form(raw_bytes_per_s, now_s)
        self._coded = _Form(CODED_BYTES_PER_S, now_s)
        self._is_on = False
        self._spoilt_until_s = now_s
        self._running = 0
        self._window_from_s: float | None = None
        self._window_until_s = now_s
        self._window_bytes = 0
        self._window_is_coded = False

    @property
    def raw_bytes_per_s(self) -> float:
        """What it gives of blocks as they are."""
        return self._raw.bytes_per_s

    @property
    def coded_bytes_per_s(self) -> float:
        """What it gives of blocks through codecs."""
        return self._coded.bytes_per_s

    def wants_codec(self, now_s: float) -> bool:
        """Whether the next read asks for one; what the peer then sends is for it to decide."""
        if now_s < self._spoilt_until_s:
            return False
        least = 1 / GAIN if self._is_on else GAIN
        self._is_on = self.coded_bytes_per_s > self.raw_bytes_per_s * least
        if self._is_on:
            return not self._raw.is_old(RAW_AGAIN_S, now_s)
        return (
            self._coded.is_measured
            and self.raw_bytes_per_s * GAIN < CODED_BYTES_PER_S
            and self._coded.is_old(CODED_AGAIN_S, now_s)
        )

    def began(self) -> None:
        """A read runs, until `ended`."""
        self._running += 1

    def came(self, size_bytes: int, now_s: float, *, is_coded: bool) -> None:
        """So many bytes of blocks."""
        self._window_is_coded |= is_coded
        self._window_until_s = now_s
        if self._window_from_s is None:
            self._window_from_s = now_s
            return
        self._window_bytes += size_bytes
        if self._window_bytes >= _WINDOW_BYTES:
            self._close_window(now_s)

    def ended(self) -> None:
        """A read is over, however."""
        self._running -= 1
        if not self._running:
            self._close_window(None)

    def _close_window(self, next_from_s: float | None) -> None:
        begin_s, end_s = self._window_from_s, self._window_until_s
        if begin_s is not None and end_s > begin_s and self._window_bytes >= _LEAST_BYTES:
            form = self._coded if self._window_is_coded else self._raw
            form.learn(self._window_bytes, end_s - begin_s, end_s)
        self._window_from_s, self._window_bytes, self._window_is_coded = next_from_s, 0, False

    def spoilt(self, now_s: float) -> None:
        """What came as a codec's payload was none."""
        self._spoilt_until_s = now_s + SPOILT_S


class Ways:
    """To all peers, bounded. Used from the event loop."""

    def __init__(self, raw_bytes_per_s: float = RAW_BYTES_PER_S) -> None:
        self._raw_bytes_per_s = raw_bytes_per_s
        self._ways: OrderedDict[str, Way] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ways)

    def to(self, node: str, now_s: float) -> Way:
        """The way to a peer, for a read that begins."""
        way = self._ways.pop(node, None) or Way(now_s, self._raw_bytes_per_s)
        self._ways[node] = way
        while len(self._ways) > MAX_WAYS:
            self._ways.popitem(last=False)
        return way

    def forget(self, node: str) -> None:
        """The peer is gone, or begins anew; idempotent."""
        self._ways.pop(node, None)
