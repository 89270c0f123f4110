"""When a peer is asked for a codec: what was measured decides, with time between changes of mind."""

from __future__ import annotations

import pytest

from kvtier.transfer import ways
from kvtier.transfer.ways import (
    CODED_AGAIN_S,
    CODED_BYTES_PER_S,
    GAIN,
    RAW_AGAIN_S,
    SPOILT_S,
    Way,
    Ways,
)

MIB = 1 << 20


class Link:
    """A way that gives so much as it is, and so much through codecs; reads take the time that they take."""

    def __init__(self, raw: float, coded: float, pays: bool = True) -> None:
        self.way = Way(0.0)
        self.raw, self.coded, self.pays = raw, coded, pays
        self.now_s = 0.0

    def read(self, mib: int = 16) -> bool:
        """One read as `StreamTransfer` makes it; whether a codec was asked for."""
        asks = self.way.wants_codec(self.now_s)
        is_coded = asks and self.pays
        self.way.began()
        for _ in range(mib):
            self.now_s += MIB / (self.coded if is_coded else self.raw)
            self.way.came(MIB, self.now_s, is_coded=is_coded)
        self.way.ended()
        return asks

    def reads(self, count: int) -> list[bool]:
        return [self.read() for _ in range(count)]


def test_nothing_is_asked_for_before_the_way_is_known_to_be_slow() -> None:
    link = Link(1e8, 1.4e8)
    assert not link.read()
    assert link.read(), "16 MiB show that 100 MB/s are less than codecs make"
    assert all(link.reads(20))
    assert 0.9e8 < link.way.raw_bytes_per_s < 1.2e8
    assert 1.3e8 < link.way.coded_bytes_per_s < 1.6e8


def test_a_fast_way_is_never_asked_for_a_codec() -> None:
    link = Link(CODED_BYTES_PER_S / GAIN * 1.01, 1e12)
    assert not any(link.reads(4000)), "also when minutes have passed"
    assert link.now_s > 2 * CODED_AGAIN_S


def test_codecs_that_turn_out_slower_are_given_up_and_tried_again_later() -> None:
    """Two busy processors make less than they were believed to."""
    link = Link(3e8, 2e8)
    asked = link.reads(40)
    assert any(asked)
    assert not any(asked[-30:]), "and stays given up"
    before_s = link.now_s
    while not link.read():
        pass
    assert link.now_s - before_s > CODED_AGAIN_S / 2
    assert not any(link.reads(20)), "one try has shown that it is still so"
    link.coded = 4e8
    link.now_s += CODED_AGAIN_S
    asked = link.reads(20)
    assert asked[0]
    assert all(asked[2:]), "the processors are idle again; the way as it is was measured once more"


def test_a_way_that_has_become_fast_is_found_out() -> None:
    link = Link(1e8, 1.4e8)
    link.reads(20)
    link.raw = 2e9
    link.now_s += RAW_AGAIN_S
    asked = link.reads(10)
    assert not asked[0], "tried as it is"
    assert not any(asked[1:])


def test_a_way_that_stays_slow_is_tried_as_it_is_now_and_then() -> None:
    link = Link(1e8, 1.4e8)
    link.reads(20)
    since_s = link.now_s
    asked = []
    while link.now_s < since_s + 10 * RAW_AGAIN_S:
        asked.append(link.read())
    assert 5 <= asked.count(False) <= 12


def test_what_is_nearly_equal_does_not_go_back_and_forth() -> None:
    """Once on it stays on while it is hardly slower, once off it has to gain."""
    link = Link(1e8, 2e8)
    assert link.reads(4)[-1]
    link.coded = 0.95e8
    assert all(link.reads(10))
    link.coded = 0.7e8
    assert not link.reads(10)[-1]
    off = Link(1e8, 0.8e8)
    assert not off.reads(4)[-1]
    off.raw = 0.75e8
    assert not any(off.reads(10))
    off.raw = 0.6e8
    assert off.reads(10)[-1]


def test_where_the_peer_sees_no_gain_its_raw_answers_keep_measuring_the_way() -> None:
    link = Link(1e8, 0.0, pays=False)
    assert any(link.reads(30))
    assert 0.9e8 < link.way.raw_bytes_per_s < 1.2e8
    assert link.way.coded_bytes_per_s == CODED_BYTES_PER_S, "still only believed"
    link.raw = 2e9
    assert not link.reads(10)[-1]


def test_payloads_that_are_none_stop_it_for_long() -> None:
    link = Link(1e8, 1.4e8)
    link.reads(10)
    link.way.spoilt(link.now_s)
    since_s = link.now_s
    assert not link.read()
    link.now_s = since_s + SPOILT_S
    assert any(link.reads(3))


def test_pieces_that_stayed_as_they_are_belong_to_what_codecs_make() -> None:
    way = Way(0.0)
    way.began()
    for number in range(20):  # each second one is a payload, in a window of both
        way.came(MIB // 2, number * 0.01, is_coded=number % 2 == 0)
    way.ended()
    assert way.coded_bytes_per_s == pytest.approx(MIB / 0.02, rel=0.01)
    assert way.raw_bytes_per_s == ways.RAW_BYTES_PER_S


def test_reads_beside_each_other_are_measured_together_and_pauses_are_not() -> None:
    """Small ones too, of one message each, as long as another one runs."""
    way, now_s = Way(0.0), 0.0
    way.began()
    for _ in range(60):
        way.began()
        now_s += 0.01
        way.came(MIB, now_s, is_coded=False)
        way.ended()
    way.ended()
    assert way.raw_bytes_per_s == pytest.approx(MIB / 0.01, rel=0.01)
    for _ in range(60):
        now_s += 10.0
        way.began()
        way.came(MIB, now_s, is_coded=False)
        way.ended()
    assert way.raw_bytes_per_s == pytest.approx(MIB / 0.01, rel=0.01)


def test_small_pulls_count_too() -> None:
    link = Link(1e8, 1.4e8)
    asked = [link.read(mib=3) for _ in range(20)]
    assert not any(asked[:2])
    assert all(asked[2:])
    assert link.way.raw_bytes_per_s == pytest.approx(1e8, rel=0.01)
    assert link.way.coded_bytes_per_s == pytest.approx(1.4e8, rel=0.01)


def test_one_message_that_waited_does_not_spoil_what_is_known() -> None:
    link = Link(4e8, 0.0, pays=False)
    link.reads(5)
    before = link.way.raw_bytes_per_s
    link.way.began()
    link.way.came(MIB, link.now_s, is_coded=False)
    link.way.came(4 * MIB, link.now_s + 60.0, is_coded=False)
    link.way.ended()
    assert before / 2 < link.way.raw_bytes_per_s < before


def test_a_way_on_which_a_message_takes_half_a_minute_is_measured_all_the_same() -> None:
    link = Link(MIB / 30.0, MIB / 20.0)
    assert link.reads(10) == [False] + [True] * 9, "trying it as it is would take minutes"


def test_what_is_remembered_is_bounded() -> None:
    known = Ways()
    for number in range(ways.MAX_WAYS + 10):
        known.to(str(number), 0.0)
        keeper = known.to("keeper", 0.0)
    assert len(known) == ways.MAX_WAYS
    assert known.to("keeper", 0.0) is keeper
    known.forget("keeper")
    known.forget("keeper")
    assert known.to("keeper", 0.0) is not keeper
