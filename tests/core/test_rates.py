"""What is believed of a peer, from what its pulls have shown."""

from __future__ import annotations

from kvtier.core.rates import DOUBT_HALVES_S, FORGIVEN_AFTER_S, Source

MIB = 1 << 20


def slow() -> Source:
    """Believed to give 1 GB/s after 3 ms; gave 10 MiB in 2 s again and again, until second 102."""
    source = Source("n", 1e9, 0.003)
    for end_s in range(90, 103, 2):
        give_slowly(source, end_s)
    return source


def give_slowly(source: Source, end_s: float) -> None:
    source.started(10 * MIB)
    source.first_arrived(5 * MIB, 1.0, end_s - 1.0, alone=True)
    source.arrived(5 * MIB, end_s)
    source.ended(0, 10, 0, end_s, failed=False)


def test_one_pull_that_stalled_does_not_spoil_what_is_believed() -> None:
    """As the first after a fault: a connection has to be made, and the peer is busy."""
    source = Source("n", 1e9, 0.003)
    before_s = source.expected_s(10 * MIB)
    give_slowly(source, 102.0)
    assert before_s < source.expected_s(10 * MIB) < 2 * before_s
    for _ in range(9):  # it costs nobody any time: what is instant once is not the rule either
        source.started(MIB)
        source.first_arrived(MIB, 0.0, 103.0, alone=True)
        source.ended(0, 1, 0, 103.0, failed=False)
    give_slowly(source, 110.0)
    assert source.round_trip_s > 0.002, "what is known is never too small to grow"


def test_what_was_measured_lately_counts() -> None:
    source = slow()
    assert source.seconds(10 * MIB, 103.0) > 5 * (0.003 + 10 * MIB / 1e9)
    assert source.seconds(10 * MIB, 103.0) == source.expected_s(10 * MIB)


def test_a_rate_of_long_ago_does_not_keep_a_peer_away_for_ever() -> None:
    source = slow()
    later_s = 102.0 + FORGIVEN_AFTER_S
    assert source.seconds(10 * MIB, later_s) == 0.003 + 10 * MIB / 1e9
    source.started(MIB)
    assert source.seconds(0, later_s) == source.expected_s(), "while one runs, it is being measured"


def test_what_was_overdue_has_failed_once() -> None:
    source = Source("n", 1e9, 0.003)
    source.started(MIB)
    source.fail(50.0)
    source.ended(MIB, 0, 0, 60.0, failed=True, told=True)
    assert source.failures == 1
    assert source.failed_pulls == 1
    assert source.seconds(MIB, 50.0 + FORGIVEN_AFTER_S) == source.expected_s(MIB)


def test_failures_weigh_in_the_choice_and_not_in_the_time_that_is_given() -> None:
    source = Source("n", 1e9, 0.003)
    before_s = source.expected_s(MIB)
    for _ in range(3):
        source.started(MIB)
        source.ended(MIB, 0, 0, 50.0, failed=True)
    assert source.seconds(MIB, 51.0) == 8 * before_s
    assert source.expected_s(MIB) == before_s
    assert source.seconds(MIB, 50.0 + FORGIVEN_AFTER_S) == before_s


def test_doubt_fades_step_by_step_so_that_what_only_just_pays_is_soon_asked_for_again() -> None:
    source = Source("n", 1e9, 0.003)
    for _ in range(3):
        source.fail(50.0)
    doubts = [source.seconds(MIB, 50.5 + step * DOUBT_HALVES_S) / source.expected_s(MIB) for step in range(5)]
    assert doubts == [8, 4, 2, 1, 1]
    source.fail(50.5 + 2 * DOUBT_HALVES_S)
    assert source.seconds(MIB, 50.5 + 2 * DOUBT_HALVES_S) == 4 * source.expected_s(MIB), "one is remembered"
