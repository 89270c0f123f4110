"""Whether to ask a peer for a codec: what its streams have given, as they are and through codecs. Pure.

Both rates are of blocks and end to end: encoding there, the way, decoding here, and whatever else the two
machines were doing. A codec is asked for where the way gives less than codecs make, and the loser is tried
again now and then, since neither rate stays what it was.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvtier.core.rates import Source

RAW_BYTES_PER_S: Final = 1e9
"""Believed of a way until it has been measured: so fast that no codec is asked for."""
CODED_BYTES_PER_S: Final = 0.5e9
"""Believed of codecs until they have been measured: what one thread makes of bfloat16 under some load."""
GAIN: Final = 1.1
"""So many times the rate of the way codecs have to make before they are asked for; not to stay so."""
RAW_AGAIN_S: Final = 30.0
CODED_AGAIN_S: Final = 60.0
"""What has not been measured for so long is tried for a few reads, if it may be better by now."""
MEASURED_FROM_BYTES: Final = 2 << 20
"""So much has to come before something counts as measured."""
SPOILT_S: Final = 600.0
"""After a peer has sent what no codec decodes, it is not asked for any for so long."""
MAX_WAYS: Final = 4096
"""Peers that are remembered; beyond it the one that was read from longest ago goes."""


class _Form:
    """Streams of one form from one peer, all together."""

    __slots__ = ("is_measured", "measured_s", "new_bytes", "source")

    def __init__(self, node: str, bytes_per_s: float, now_s: float) -> None:
        self.source = Source(node, bytes_per_s, 0.0)
        self.is_measured = False
        self.measured_s = now_s
        self.new_bytes = 0

    @property
    def bytes_per_s(self) -> float:
        return 1 / self.source.s_per_byte

    def came(self, size_bytes: int, now_s: float) -> None:
        self.source.arrived(size_bytes, now_s)
        self.new_bytes += size_bytes
        if self.new_bytes >= MEASURED_FROM_BYTES:
            self.is_measured, self.measured_s, self.new_bytes = True, now_s, 0

    def is_old(self, age_s: float, now_s: float) -> bool:
        return now_s >= self.measured_s + age_s


class Way:
    """Between one peer and this node."""

    def __init__(self, node: str, now_s: float, raw_bytes_per_s: float = RAW_BYTES_PER_S) -> None:
        self._raw = _Form(node, raw_bytes_per_s, now_s)
        self._coded = _Form(node, CODED_BYTES_PER_S, now_s)
        self._is_on = False
        self._spoilt_until_s = now_s

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
        self._is_on = self.coded_bytes_per_s > self.raw_bytes_per_s * (1 if self._is_on else GAIN)
        if self._is_on:
            return not self._raw.is_old(RAW_AGAIN_S, now_s)
        return (
            self._coded.is_measured
            and self.raw_bytes_per_s * GAIN < CODED_BYTES_PER_S
            and self._coded.is_old(CODED_AGAIN_S, now_s)
        )

    def spoilt(self, now_s: float) -> None:
        """What came as a codec's payload was none."""
        self._spoilt_until_s = now_s + SPOILT_S


class Reading:
    """One read of `size_bytes` that runs, until `ended`: tells its way what comes, in which form."""

    def __init__(self, way: Way, size_bytes: int) -> None:
        self._way = way
        self._left_bytes = size_bytes
        self._form: _Form | None = None

    def came(self, size_bytes: int, now_s: float, *, is_coded: bool) -> None:
        """So many bytes of blocks; from the first payload on the read counts as coded, pieces that stayed
        as they are included.
        """
        form = self._form
        if form is None or (is_coded and form is not self._way._coded):
            self.ended(now_s)
            form = self._form = self._way._coded if is_coded else self._way._raw
            form.source.started(self._left_bytes)
        form.came(size_bytes, now_s)
        self._left_bytes -= size_bytes

    def ended(self, now_s: float) -> None:
        """Nothing more comes; idempotent."""
        form, self._form = self._form, None
        if form is not None:
            form.source.ended(self._left_bytes, 1, 0, now_s, failed=False)


class Ways:
    """To all peers, bounded. Used from the event loop."""

    def __init__(self, raw_bytes_per_s: float = RAW_BYTES_PER_S) -> None:
        self._raw_bytes_per_s = raw_bytes_per_s
        self._ways: OrderedDict[str, Way] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ways)

    def to(self, node: str, now_s: float) -> Way:
        """The way to a peer, for a read that begins."""
        way = self._ways.pop(node, None) or Way(node, now_s, self._raw_bytes_per_s)
        self._ways[node] = way
        while len(self._ways) > MAX_WAYS:
            self._ways.popitem(last=False)
        return way

    def forget(self, node: str) -> None:
        """The peer is gone, or begins anew; idempotent."""
        self._ways.pop(node, None)
