"""Events lead to keys by their tokens; what is not surely whole counts as absent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_vllm import residents as module
from kvtier_vllm.kv_events import Cleared, Hash, Removed, Stored
from kvtier_vllm.residents import MAX_PARTS, Residents

from kvtier.types import Key, chain_keys

ROOT = b"r" * 32
TOKENS = list(range(100, 124))


def hashes(tokens: Sequence[int], step: int) -> list[Hash]:
    """The engine's: of all tokens up to the end of each block."""
    return [
        hashlib.sha256(repr(tokens[: at + step]).encode()).digest()
        for at in range(0, len(tokens) - step + 1, step)
    ]


def stored(tokens: Sequence[int], step: int, first: int = 0, last: int | None = None) -> Stored:
    """Blocks first .. last of a prompt."""
    all_of_it = hashes(tokens, step)
    last = len(all_of_it) if last is None else last
    parent = all_of_it[first - 1] if first else None
    return Stored(all_of_it[first:last], parent, list(tokens[first * step : last * step]), step)


def residents(block_tokens: int, max_blocks: int = 1000) -> Residents:
    made = Residents(block_tokens, max_blocks)
    made.begin(ROOT)
    return made


def keys(tokens: Sequence[int], block_tokens: int) -> list[Key]:
    return chain_keys(ROOT, tokens, block_tokens)


@pytest.mark.parametrize("step", [4, 2, 1])
def test_the_key_is_that_of_the_prompt(step: int) -> None:
    """In one event or in many; a kvtier block may consist of several of the engine's."""
    for portion in (1, 2, 3, 24):
        its = residents(4)
        for first in range(0, len(TOKENS) // step, portion):
            its.apply([stored(TOKENS, step, first, min(first + portion, len(TOKENS) // step))])
        assert its.keys() == keys(TOKENS, 4)
        changes = its.take()
        assert (list(changes.added), list(changes.removed), changes.clear) == (keys(TOKENS, 4), [], True)
        assert not its.unknown


def test_a_block_without_a_known_parent_counts_as_absent() -> None:
    its = residents(4)
    its.apply([stored(TOKENS, 4, 2)])
    assert its.keys() == []
    assert its.unknown == 4
    its.apply([stored(TOKENS, 4)])
    assert its.keys() == keys(TOKENS, 4)


@pytest.mark.parametrize("step", [3, 8])
def test_blocks_that_make_no_whole_one_count_as_absent(step: int) -> None:
    its = residents(4)
    its.apply([stored(TOKENS, step)])
    assert len(its) == 0
    assert its.unknown == len(TOKENS) // step


def test_too_many_parts() -> None:
    its = residents(2 * MAX_PARTS)
    its.apply([stored(range(4 * MAX_PARTS), 1)])
    assert len(its) == 0
    its.apply([stored(range(4 * MAX_PARTS), 2)])
    assert len(its) == 2


def test_a_token_that_is_none() -> None:
    its = residents(1)
    its.apply([Stored([1, 2], None, [3, 2**32], 1)])
    assert (len(its), its.unknown) == (0, 2)


def test_what_is_removed() -> None:
    its = residents(4)
    its.apply([stored(TOKENS, 4)])
    its.take()
    last = hashes(TOKENS, 4)[-1]
    its.apply([Removed([last, b"unknown", last])])
    assert its.keys() == keys(TOKENS, 4)[:-1]
    its.apply([stored(TOKENS, 4, 5)])
    changes = its.take()
    assert (changes.added, changes.removed, changes.clear) == ({}, {}, False), "it never was away for others"
    its.apply([Removed([hashes(TOKENS, 4)[0]])])
    assert list(its.take().removed) == keys(TOKENS, 4)[:1]


@pytest.mark.parametrize("part", range(4))
def test_a_block_is_whole_with_all_its_parts(part: int) -> None:
    its = residents(4)
    its.apply([stored(TOKENS, 1)])
    its.take()
    its.apply([Removed([hashes(TOKENS, 1)[4 + part]])])
    assert list(its.take().removed) == [keys(TOKENS, 4)[1]]
    its.apply([stored(TOKENS, 1, 4 + part, 8)])
    assert list(its.take().added) == [keys(TOKENS, 4)[1]]
    assert sorted(its.keys()) == sorted(keys(TOKENS, 4))


def test_a_part_that_is_gone_before_the_block_is_whole() -> None:
    its = residents(4)
    its.apply([stored(TOKENS, 1, 0, 2), Removed([hashes(TOKENS, 1)[0]]), stored(TOKENS, 1, 2)])
    assert (its.keys(), its.unknown) == (keys(TOKENS, 4)[1:], 2)
    its.apply([stored(TOKENS, 1)])
    assert sorted(its.keys()) == sorted(keys(TOKENS, 4))


def test_all_goes() -> None:
    its = residents(2)
    its.apply([stored(TOKENS, 2)])
    its.take()
    its.apply([Cleared(), stored(TOKENS, 2, 0, 1)])
    changes = its.take()
    assert (list(changes.added), changes.removed, changes.clear) == (keys(TOKENS, 2)[:1], {}, True)
    assert its.keys() == keys(TOKENS, 2)[:1]


def test_another_root_begins_anew_and_none_follows_nothing() -> None:
    its = residents(2)
    its.apply([stored(TOKENS, 2)])
    its.begin(None)
    its.apply([stored(TOKENS, 2)])
    assert its.keys() == []
    assert its.take().clear
    its.begin(b"s" * 32)
    its.apply([stored(TOKENS, 2)])
    assert its.keys() == chain_keys(b"s" * 32, TOKENS, 2)


@pytest.mark.parametrize("step", [1, 2])
def test_what_is_remembered_has_a_bound(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    its = residents(2, 8)
    for seed in range(50):
        its.apply([stored([seed, *TOKENS], step)])
        assert len(its._links) <= 8
        assert set(its._wholes) <= set(its._links)
        assert sum(map(len, its._wholes.values())) <= 8
    assert 0 < len(its) <= 8
    assert set(its.keys()) <= set(keys([49, *TOKENS], 2))
    monkeypatch.setattr(module, "MAX_BLOCKS", 3)
    assert residents(2, 10**9)._max_blocks == 3


def test_one_hash_for_different_blocks() -> None:
    """Sixty-four bits may meet, or somebody lies: the block told last counts."""
    its = residents(1)
    its.apply([Stored([1, 1, 1], None, [7, 8, 9], 1)])
    assert its.keys() == chain_keys(ROOT, [7, 8, 9], 1)[2:]
    its = residents(2)
    its.apply([Stored([1, 1, 2, 1], None, [7, 8, 9, 10], 1), Removed([1]), Removed([2])])
    assert its.keys() == []
    assert (its._links, its._wholes, its._keys) == ({}, {}, {})


CHAINS = [[a, a, b, b, c, c, d, d] for a in (1, 2) for b in (3, 4) for c in (5, 6) for d in (7, 8)]


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(-1, 7)), max_size=40), st.sampled_from([1, 2]))
def test_as_an_engine_does_it(moves: list[tuple[int, int]], block_tokens: int) -> None:
    """An engine that stores what it lacks of a prompt, and drops any block.

    What counts is there, and with blocks of one size all that is there counts.
    """
    its = residents(block_tokens)
    there: set[Hash] = set()
    told: set[Key] = set()
    for number, at in moves:
        tokens = CHAINS[number]
        own = hashes(tokens, 1)
        if at < 0:
            first = next((i for i, one in enumerate(own) if one not in there), len(own))
            its.apply([stored(tokens, 1, first)] if first < len(own) else [])
            there.update(own)
        else:
            its.apply([Removed([own[at]])])
            there.discard(own[at])
        changes = its.take()
        told = (set() if changes.clear else told - set(changes.removed)) | set(changes.added)
        assert told == set(its.keys())
    whole: set[Key] = set()
    for tokens in CHAINS:
        own = hashes(tokens, 1)
        for index, key in enumerate(keys(tokens, block_tokens)):
            if set(own[index * block_tokens : (index + 1) * block_tokens]) <= there:
                whole.add(key)
    assert told <= whole
    if block_tokens == 1:
        assert told == whole
    assert set(its._wholes) <= set(its._links)
