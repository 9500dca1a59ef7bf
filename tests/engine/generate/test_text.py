"""Text streams: whole characters, and no part of a stop string."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.generate.text import TextStream


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_any_split_into_tokens_gives_the_text_back_in_whole_characters(text: str, cuts: list[int]) -> None:
    stream = TextStream()
    sent = [stream.push(data) for data in split(text.encode(), cuts)]
    assert "".join(sent) + stream.end() == text == stream.sent
    assert "\ufffd" not in "".join(sent) or "\ufffd" in text


# Few letters: stop strings and their beginnings are frequent.
@given(
    st.text(alphabet="abé", max_size=30),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 1000)),
)
def test_sent_text_ends_where_a_stop_string_begins(text: str, stops: list[str], cuts: list[int]) -> None:
    stream = TextStream(stops)
    for data in split(text.encode(), cuts):
        stream.push(data)
        assert not any(stop in stream.sent for stop in stops)
        if stream.stopped:
            break
    if not stream.stopped:
        stream.end()
    assert stream.stopped == any(stop in text for stop in stops)
    assert text.startswith(stream.sent)
    if stream.stopped:
        assert any(text[stream.n_sent :].startswith(stop) for stop in stops)
    else:
        assert stream.sent == text


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_is_clear() -> None:
    stream = TextStream(("\nUser:",))
    assert stream.push(b"Yes.\nUs") == "Yes."
    assert stream.push(b"ually") == "\nUsually"
    assert stream.push(b"\nUser") == ""
    assert stream.push(b": hi") == ""
    assert stream.stopped
    assert stream.sent == "Yes.\nUsually"


def test_the_held_text_is_sent_when_the_answer_ends_without_the_stop_string() -> None:
    stream = TextStream(("END",))
    assert stream.push(b"the EN") == "the "
    assert stream.end() == "EN"


def test_half_a_character_waits_and_is_left_out_if_the_rest_never_comes() -> None:
    stream = TextStream()
    assert stream.push("é".encode()[:1]) == ""
    assert stream.end() == ""
    assert stream.sent == ""


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    stream = TextStream()
    assert stream.push(b"a\xff") + stream.push(b"b") == "a\ufffdb"


def test_nothing_is_taken_after_the_stop() -> None:
    stream = TextStream(("x",))
    stream.push(b"x")
    with pytest.raises(ValueError, match="stopped"):
        stream.push(b"y")
