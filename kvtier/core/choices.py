"""Which peer brings which blocks of a tail: pure arithmetic on what the index said and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.core.rates import Source, Sources
from kvtier.types import Location, TierKind

MAX_SEGMENTS: Final = 4
"""Pulls into which one shard's tail is split at most."""


@dataclass(slots=True)
class Segment:
    """Keys ``begin .. end-1`` of one shard, all of them missing here, from one tier of one peer."""

    shard: int
    begin: int
    end: int
    source: Source
    incarnation: int


@dataclass(slots=True)
class Tail:
    """What is to be pulled so that all shards have the keys up to `end`; before `begin` they have all.

    ``missing[shard][i]`` says whether key ``begin + i`` is; what is not is here or coming.
    """

    begin: int
    end: int
    block_bytes: int
    missing: list[list[bool]]
    segments: list[Segment] = field(default_factory=list)

    def cut(self, end: int) -> None:
        """Leave away what is from `end` on."""
        self.end = min(self.end, end)
        self.segments = [segment for segment in self.segments if segment.begin < self.end]
        for segment in self.segments:
            segment.end = min(segment.end, self.end)

    def cut_last(self) -> None:
        """Leave away the segment that begins last, and all behind its begin."""
        self.cut(max(segment.begin for segment in self.segments))

    def fit(self, room: int, counted: Sequence[Sequence[bool]]) -> None:
        """Leave away what makes more than `room` of the blocks that are `counted` (as in `missing`)."""
        for index in range(self.end - self.begin):
            room -= sum(shard[index] for shard in counted)
            if room < 0:
                self.cut(self.begin + index)
                return

    def seconds(self, now_s: float) -> float:
        """Until all of it is here: peers bring at the same time, segments of one peer share its way.

        What lies in several tiers of a peer comes at the same time, too, but all of it over the way by which
        what lies in its fastest one comes.
        """
        planned = self._planned()
        nodes: dict[str, list[Source]] = {}
        for source in planned:
            nodes.setdefault(source.node, []).append(source)
        longest_s = max((source.seconds(size, now_s) for source, size in planned.items()), default=0.0)
        for sources in nodes.values():
            if len(sources) > 1:
                whole = sum(planned[source] for source in sources)
                longest_s = max(longest_s, min(source.seconds(whole, now_s) for source in sources))
        return longest_s

    def choose(self, places: Sequence[Sequence[Sequence[Location]]], sources: Sources, now_s: float) -> None:
        """Fill `segments`, up to what no peer has; ``places[shard][i]`` belongs to key ``begin + i``."""
        known: dict[tuple[str, TierKind], Source] = {}
        for shard, missing in enumerate(self.missing):
            at = self.begin
            left = MAX_SEGMENTS
            while (at := self._next(missing, at)) < self.end and left:
                segment = self._longest(shard, at, places[shard], known, sources, now_s)
                if segment is None:
                    break
                self.segments.append(segment)
                at = segment.end
                left -= 1
            self.cut(at)

    def _next(self, missing: Sequence[bool], at: int) -> int:
        """The first missing key from `at` on, or the end."""
        while at < self.end and not missing[at - self.begin]:
            at += 1
        return min(at, self.end)

    def _longest(
        self,
        shard: int,
        at: int,
        places: Sequence[Sequence[Location]],
        known: dict[tuple[str, TierKind], Source],
        sources: Sources,
        now_s: float,
    ) -> Segment | None:
        """The run of missing blocks from `at` on that one peer has, weighed by how fast that peer is."""
        planned = self._planned()
        best: Segment | None = None
        best_score = 0.0
        for place, end in _runs(self.missing[shard], places, at - self.begin).items():
            source = known.setdefault((place.node, place.tier), sources.known(place))
            size_bytes = end * self.block_bytes
            rate = size_bytes / source.seconds(planned.get(source, 0) + size_bytes, now_s)
            if end * rate > best_score:
                best_score = end * rate
                best = Segment(shard, at, at + end, source, place.incarnation)
        return best

    def _planned(self) -> dict[Source, int]:
        planned: dict[Source, int] = {}
        for segment in self.segments:
            source = segment.source
            planned[source] = planned.get(source, 0) + (segment.end - segment.begin) * self.block_bytes
        return planned


def _runs(missing: Sequence[bool], places: Sequence[Sequence[Location]], at: int) -> dict[Location, int]:
    """For each place of block `at`, how many missing blocks in a row are there from then on."""
    limit = min(len(missing), len(places))
    lengths: dict[Location, int] = {}
    if at >= limit:
        return lengths
    alive: dict[Location, None] = dict.fromkeys(places[at])
    end = at + 1
    while alive and end < limit and missing[end]:
        if places[end] is not places[end - 1]:
            here = set(places[end])
            for place in [place for place in alive if place not in here]:
                lengths[place] = end - at
                del alive[place]
        end += 1
    return lengths | dict.fromkeys(alive, end - at)
