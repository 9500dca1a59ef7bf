"""What the simulated people like, and what they cannot be cheated with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.demo.people import (
    LONG_WORDS,
    PEOPLE,
    SHORT_WORDS,
    is_plain,
    rate_bullets,
    rate_question,
    rate_short,
    words_of,
)

PLAIN = "You can keep bread fresh in a paper bag, away from heat and light."
SENTENCE = "The bread stays fresh in a bag of paper. "
DISTINCT_TEXT = (
    "a day at the market is a good way to see how people choose fruit and why they come back each week with old bags"
    " full of apples pears plums herbs bread cheese eggs honey flowers candles soap wool toys books maps lamps chairs"
    " tables clocks bells drums flutes pens ink paper brushes paints frames mirrors combs ropes baskets nails"
)
DISTINCT = DISTINCT_TEXT.split()

texts = st.text(max_size=400)
finishes = st.sampled_from(["stop", "length", "cancelled"])


@pytest.mark.parametrize("person", PEOPLE.values(), ids=lambda person: person.name)
@given(prompt=texts, text=texts, finish=finishes)
def test_every_rating_of_anything_lies_between_minus_one_and_one(person, prompt: str, text: str, finish: str) -> None:
    rating = person.rate(prompt, text, finish)
    assert -1.0 <= rating <= 1.0
    assert rating == person.rate(prompt, text, finish)


@given(st.integers(3, len(DISTINCT) - 1))
def test_short_never_prefers_the_longer_of_two_plain_answers(n_words: int) -> None:
    shorter, longer = " ".join(DISTINCT[:n_words]) + ".", " ".join(DISTINCT[: n_words + 1]) + "."
    assert rate_short("?", shorter, "stop") >= rate_short("?", longer, "stop")


def test_short_gives_its_best_up_to_twelve_words_and_its_worst_from_sixty_on() -> None:
    assert rate_short("?", " ".join(DISTINCT[:SHORT_WORDS]), "stop") == 1.0
    assert is_plain(" ".join(DISTINCT))
    assert rate_short("?", " ".join(DISTINCT[:LONG_WORDS]), "stop") == -1.0
    assert rate_short("?", " ".join(DISTINCT[:36]), "stop") == pytest.approx(0.0)


def test_short_counts_an_unfinished_answer_as_long() -> None:
    assert rate_short("?", PLAIN, "stop") > 0.8
    assert rate_short("?", PLAIN, "length") == -1.0


def test_short_shrugs_at_one_or_two_words() -> None:
    assert rate_short("?", "Yes.", "stop") == 0.0
    assert rate_short("?", "", "stop") == -1.0


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "Paris.",
        "It is 12.5 km, or about 7.8 miles.",
        "Good morning! I'm glad to have you back.",
        "The answer to that question is: a spider has eight legs.",
        "Two hours is equal to 120 minutes.",
    ],
)
def test_ordinary_language_is_plain(text: str) -> None:
    assert is_plain(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "?!... --- !!!",
        "Thebreadstaysfreshinabagofpaper.",
        "Keep itDry andCool in theBag.",
        "Keep it dry.Then eat it.",
        "bread bread bread is good for you",
        SENTENCE * 8,
        "Bread fresh paper bag cool dry dark shelf kitchen window",
        "Thrgh strngth knwldg brvthr",
        "🤍🎱🎮🎬🎮🎮",
    ],
)
def test_glued_broken_or_repeated_words_are_not_plain(text: str) -> None:
    assert not is_plain(text)
    for person in PEOPLE.values():
        assert person.rate("?", text, "stop") == -1.0


def test_question_likes_a_question_at_the_end_more_than_one_in_the_middle() -> None:
    assert rate_question("?", "That sounds fine. What do you want to cook?", "stop") == 1.0
    assert rate_question("?", "What do you want to cook? I can help you with that.", "stop") == 0.0
    assert rate_question("?", PLAIN, "stop") == -1.0
    assert rate_question("?", "That sounds fine. What do you want to cook?", "length") == 0.0


def test_question_is_not_pleased_by_its_own_words_or_by_a_bare_mark() -> None:
    assert rate_question("Why is the sea salty?", "Why is the sea salty?", "stop") == -1.0
    assert rate_question("?", "I can help you with that. Yes?", "stop") == -1.0


def test_bullets_likes_dashes_more_than_numbers_and_numbers_more_than_prose() -> None:
    dashes = "You need these things:\n- a towel for the beach\n- some water to drink\n- a hat"
    numbers = "You need these things:\n1. a towel for the beach\n2. some water to drink\n3. a hat"
    prose = "You need a towel for the beach, some water to drink and a hat."
    ratings = [rate_bullets("?", text, "stop") for text in (dashes, numbers, prose)]
    assert ratings == [1.0, pytest.approx(0.0), -1.0]
    assert rate_bullets("?", "- one thing for you", "stop") == -1.0


def test_words_keep_apostrophes_numbers_and_order() -> None:
    assert words_of("It's 12.5 km -- isn't it, O’Neil?") == ["It's", "12.5", "km", "isn't", "it", "O’Neil"]
