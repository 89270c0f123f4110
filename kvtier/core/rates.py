"""How fast each peer and each tier below gives: measured by pulls and fetches, believed for the next ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvtier.core.config import CoreConfig
from kvtier.core.stats import PeerStats
from kvtier.types import Location, TierKind

FORGIVEN_AFTER_S: Final = 20.0
DOUBT_HALVES_S: Final = 3.0
"""A source that failed is doubted half as much after each such time: one that is well again is soon asked
again for what only just pays, and whoever does not answer at all is kept off by its breaker, not by doubt."""
MAX_FAILURES: Final = 3
MAX_SOURCES: Final = 4096
"""Tiers of peers that are remembered; beyond it one that was asked longest ago and gives nothing now goes."""
_WEIGHT: Final = 0.2
_MAX_CHANGE: Final = 4.0
_MEASURED_FROM_BYTES: Final = 1 << 20


class Source:
    """One tier of a peer, or a tier below, as a source of blocks.

    What lies in a lower tier of a peer it has to read first, so that is measured by itself.

    What a source gives is measured over all its pulls together, since they share its way: the bytes that
    arrived in a window during which at least one of them ran. A window begins with an arrival, so that the
    round trip before the first bytes is not in it; that is measured by pulls that had it for themselves.

    Attributes
    ----------
    s_per_byte, round_trip_s
        Moving averages; one measurement moves them as if it were at most `_MAX_CHANGE` times what is known.
    failures
        Pulls of this incarnation that failed of late, since the last that did not; each doubles the time by
        which it is judged.
    running, outstanding_bytes
        Its pulls, and what they have yet to bring.
    """

    __slots__ = (
        "_believed",
        "_ended_s",
        "_failed_s",
        "_window_bytes",
        "_window_from_s",
        "failed_pulls",
        "failures",
        "incarnation",
        "node",
        "outstanding_bytes",
        "pulled_blocks",
        "round_trip_s",
        "running",
        "s_per_byte",
        "tier",
    )

    def __init__(
        self, node: str, bytes_per_s: float, round_trip_s: float, tier: TierKind = TierKind.DRAM
    ) -> None:
        self.node = node
        self.tier = tier
        self.incarnation = 0
        self.s_per_byte = 1 / bytes_per_s
        self.round_trip_s = round_trip_s
        self.failures = 0
        self.running = 0
        self.outstanding_bytes = 0
        self.pulled_blocks = 0
        self.failed_pulls = 0
        self._believed = (self.s_per_byte, round_trip_s)
        self._ended_s = 0.0
        self._failed_s = 0.0
        self._window_from_s: float | None = None
        self._window_bytes = 0

    def seconds(self, more_bytes: int, now_s: float) -> float:
        """For choosing: until all that it has yet to bring would be here and `more_bytes` too, with doubt.

        What was measured long ago cannot show that it has become faster, since whoever is not chosen is not
        measured: then it is believed to be no slower than a new one.
        """
        expected_s = self.expected_s(more_bytes)
        if not self.running and now_s >= self._ended_s + FORGIVEN_AFTER_S:
            s_per_byte, round_trip_s = self._believed
            expected_s = min(expected_s, round_trip_s + more_bytes * s_per_byte)
        return expected_s * self._doubt(now_s)

    def expected_s(self, more_bytes: int = 0) -> float:
        """The same as measured: how long a pull may take does not grow because the last one failed."""
        return self.round_trip_s + self.transfer_s(more_bytes)

    def transfer_s(self, more_bytes: int = 0) -> float:
        """The same without the round trip: where the first bytes are here already."""
        return (self.outstanding_bytes + more_bytes) * self.s_per_byte

    def _doubt(self, now_s: float) -> int:
        """How many times longer it has to be worth since it failed."""
        return 1 << self._remembered(now_s)

    def _remembered(self, now_s: float) -> int:
        return max(0, self.failures - int((now_s - self._failed_s) / DOUBT_HALVES_S))

    # ---- what pulls tell

    def started(self, size_bytes: int) -> None:
        """A pull of so many bytes begins."""
        self.running += 1
        self.outstanding_bytes += size_bytes

    def first_arrived(self, size_bytes: int, took_s: float, now_s: float, *, alone: bool) -> None:
        """The first bytes of a pull, which had the peer for itself if `alone`."""
        expected_s = size_bytes * self.s_per_byte
        if alone:
            most_s = _MAX_CHANGE * max(self.round_trip_s, self._believed[1])
            seen_s = min(max(0.0, took_s - expected_s), most_s)
            self.round_trip_s += _WEIGHT * (seen_s - self.round_trip_s)
        if took_s < expected_s:
            self._learn(size_bytes, took_s)
        self._count(size_bytes, now_s)

    def arrived(self, size_bytes: int, now_s: float) -> None:
        """Further bytes of a pull."""
        self._count(size_bytes, now_s)

    def ended(
        self,
        missing_bytes: int,
        blocks: int,
        incarnation: int,
        now_s: float,
        *,
        failed: bool,
        told: bool = False,
    ) -> None:
        """A pull is over: it brought so many blocks, and `missing_bytes` will not come.

        `told`: that it fails has been told by `fail` already.
        """
        self.running -= 1
        self._ended_s = now_s
        self.outstanding_bytes -= missing_bytes
        self.pulled_blocks += blocks
        self.failed_pulls += failed or told
        if incarnation < self.incarnation:
            pass  # it says nothing of the present one
        elif told:
            pass
        elif failed or not blocks:
            self.fail(now_s)
        else:
            self.failures = 0
        if not self.running:
            self._close(now_s)
            self._window_from_s = None

    def fail(self, now_s: float) -> None:
        """It did not give what it was to give."""
        self.failures = min(self._remembered(now_s) + 1, MAX_FAILURES)
        self._failed_s = now_s

    def stats(self) -> PeerStats:
        """A copy of its figures."""
        return PeerStats(
            self.node,
            self.tier,
            1 / self.s_per_byte,
            self.round_trip_s,
            self.running,
            self.pulled_blocks,
            self.failed_pulls,
        )

    def _count(self, size_bytes: int, now_s: float) -> None:
        self.outstanding_bytes -= size_bytes
        if self._window_from_s is None:
            self._window_from_s = now_s
            self._window_bytes = 0
            return
        self._window_bytes += size_bytes
        self._close(now_s)

    def _close(self, now_s: float) -> None:
        if self._window_from_s is None or self._window_bytes < _MEASURED_FROM_BYTES:
            return
        self._learn(self._window_bytes, now_s - self._window_from_s)
        self._window_from_s = now_s
        self._window_bytes = 0

    def _learn(self, size_bytes: int, took_s: float) -> None:
        if size_bytes < _MEASURED_FROM_BYTES or took_s <= 0:
            return
        known = self.s_per_byte
        # One batch that waited in a queue, or two that were reported together, must not spoil the average.
        seen = min(max(took_s / size_bytes, known / _MAX_CHANGE), known * _MAX_CHANGE)
        self.s_per_byte = known + _WEIGHT * (seen - known)


class Sources:
    """Tiers of peers that this node has pulled from, bounded; and its own below, which `by_place` lacks."""

    def __init__(self, config: CoreConfig, tiers: Sequence[Source] = ()) -> None:
        self._config = config
        self._tiers = {source.node: source for source in tiers}
        self.by_place: OrderedDict[tuple[str, TierKind], Source] = OrderedDict()

    def known(self, place: Location) -> Source:
        """What gives from there; a new one, which is not remembered yet, is believed to be as configured."""
        source = self._tiers.get(place.node) or self.by_place.get((place.node, place.tier))
        if source is None:
            source = self._new(place)
        if source.incarnation < place.incarnation:
            source.incarnation = place.incarnation
            source.failures = 0
        return source

    def _new(self, place: Location) -> Source:
        config = self._config
        bytes_per_s, overhead_s = config.pull_bytes_per_s, config.pull_overhead_s
        if place.tier > TierKind.DRAM:  # read there while what was read before travels
            bytes_per_s = min(bytes_per_s, config.fetch_bytes_per_s)
            overhead_s += config.fetch_overhead_s
        return Source(place.node, bytes_per_s, overhead_s, place.tier)

    def use(self, source: Source) -> None:
        """A pull from it begins: remember it."""
        place = (source.node, source.tier)
        self.by_place[place] = source
        self.by_place.move_to_end(place)
        if len(self.by_place) > MAX_SOURCES:
            for place in [place for place, its in self.by_place.items() if not its.running][:1]:
                del self.by_place[place]
