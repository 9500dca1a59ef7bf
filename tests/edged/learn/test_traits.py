"""Traits tell repeated, glued and foreign text from text that is none of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.learn import traits

tokens = st.lists(st.integers(0, 3), max_size=14)


@given(tokens)
@settings(deadline=None)
def test_the_longest_run_is_the_longest_sequence_that_stands_there_twice(ids: list[int]) -> None:
    if len(ids) < 2:
        assert traits.longest_run_share(ids) is None
        return
    twice = [
        stop - start
        for start, stop in itertools.combinations(range(len(ids) + 1), 2)
        if any(ids[at : at + stop - start] == ids[start:stop] for at in range(start + 1, len(ids) - (stop - start) + 1))
    ]
    assert traits.longest_run_share(ids) == max(twice, default=0) / len(ids)


@given(tokens)
@settings(deadline=None)
def test_repeated_triples_are_counted_each_time_but_the_first(ids: list[int]) -> None:
    triples = [tuple(ids[start : start + 3]) for start in range(len(ids) - 2)]
    if len(triples) < 2:
        assert traits.repeated_share(ids) is None
    else:
        again = sum(triple in triples[:at] for at, triple in enumerate(triples))
        assert traits.repeated_share(ids) == pytest.approx(again / len(triples))


def test_a_word_over_and_over_is_all_repetition_and_a_sentence_is_none() -> None:
    assert traits.repeated_share([7] * 20) == pytest.approx(17 / 18)
    assert traits.longest_run_share([7] * 20) == pytest.approx(19 / 20)
    assert traits.repeated_share(range(20)) == traits.longest_run_share(range(20)) == 0.0


def test_regular_text_is_compressed_further_than_prose() -> None:
    prose = "The sky looks blue because air scatters short waves more than long ones."
    regular, plain = traits.compressed_share("the the " * 9), traits.compressed_share(prose)
    assert regular is not None
    assert plain is not None
    assert regular < 0.4 < 0.7 < plain
    assert traits.compressed_share("") is None


def test_words_are_told_with_and_without_spaces_between_them() -> None:
    assert traits.word_chars("a cat sat") == pytest.approx(7 / 3)
    assert traits.word_chars("acatsat") == 7.0
    assert traits.word_chars("  ") is None
    assert traits.words_of("It's 2 Cats, café-owned.") == ["it", "s", "cats", "café", "owned"]
    assert traits.known_share("The cat", {"the"}) == 0.5
    assert traits.known_share("42!", {"the"}) is None


def test_letters_are_counted_by_script_and_nothing_else_is() -> None:
    assert traits.scripts_of("Dúo 12 да?! 猫") == {"LATIN": 3, "CYRILLIC": 2, "CJK": 1}
    assert traits.scripts_of("12 ?!") == {}


@given(st.text(max_size=30))
@settings(max_examples=40, deadline=None)
def test_any_text_has_traits_within_their_bounds(text: str) -> None:
    text = text.encode(errors="replace").decode()
    assert sum(traits.scripts_of(text).values()) <= len(text)
    share = traits.known_share(text, set(traits.words_of(text)))
    assert share in (None, 1.0)
    chars = traits.word_chars(text)
    assert chars is None or 1.0 <= chars <= len(text)
