from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.generate.length import PIECE_CHARS, TOKEN_BYTES_LIKELY, TOKEN_BYTES_MAX, excess

ROOM = 4096


class Words:
    """Takes every word, with the space before it, for a token, and counts the characters that it was given."""

    def __init__(self) -> None:
        self.seen_chars = 0

    def tokenise(self, text: str, *, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        self.seen_chars += len(text)
        return tuple(range(len(text.split())))


def test_a_text_that_may_well_fit_is_not_looked_at() -> None:
    words = Words()
    assert excess(words, ["a " * ROOM, "a " * (ROOM - 1)], ROOM) is None
    assert words.seen_chars == 0


def test_a_text_that_could_never_fit_is_not_looked_at_either() -> None:
    words = Words()
    told = excess(words, ["x" * (TOKEN_BYTES_MAX * ROOM), "x"], ROOM)
    assert told == f"has {TOKEN_BYTES_MAX * ROOM + 1} bytes, more than {TOKEN_BYTES_MAX} for each token of the context"
    assert words.seen_chars == 0


def test_a_text_is_looked_at_up_to_where_it_is_clear() -> None:
    words = Words()
    text = "ab " * (3 * ROOM)
    assert len(text) > TOKEN_BYTES_LIKELY * ROOM
    assert excess(words, [text], ROOM) == f"has more than {ROOM} tokens"
    assert words.seen_chars < 3 * ROOM + 2 * PIECE_CHARS


def test_a_text_of_long_words_is_let_through() -> None:
    assert excess(Words(), ["abcdefgh " * (ROOM - 100)], ROOM) is None


@given(st.lists(st.integers(1, 30), max_size=3000), st.integers(64, 2000))
def test_what_fits_is_never_refused(lengths: list[int], room: int) -> None:
    text = " ".join("x" * length for length in lengths)
    n_tokens = len(text.split())
    if n_tokens <= room and len(text) <= TOKEN_BYTES_MAX * room:
        assert excess(Words(), [text], room) is None
