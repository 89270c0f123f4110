from __future__ import annotations

import pytest

from kvtier.demo import prompts


def words(text: str) -> list[int]:
    """A tokenizer that is coarser than any real one."""
    return [hash(word) for word in text.split()]


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize("count", [16, 64, 100, 4000, 4010])
def test_a_prompt_has_exactly_so_many_tokens(count: int) -> None:
    assert len(prompts.tokens(words, seed=1, count=count)) == count
    assert len(prompts.tokens(letters, seed=1, count=count)) == count


def test_prompts_of_two_seeds_differ_within_their_first_block() -> None:
    firsts = {tuple(prompts.tokens(letters, seed=seed, count=100)[:32]) for seed in range(-3, 3000)}
    assert len(firsts) == 3003


def test_the_same_seed_gives_the_same_prompt() -> None:
    assert prompts.report(5, 100) == prompts.report(5, 100)


def test_a_long_prompt_ends_in_a_notice_that_stands_in_it_before() -> None:
    prompt = prompts.tokens(letters, seed=1, count=8000)
    end = prompt[-len(prompts.ending()) :]
    assert "".join(map(chr, end)) == prompts.ending()
    assert "".join(map(chr, prompt)).count(prompts.ending()) > 3
