"""Patterns as grammars: the texts that are drawn are found by Python's own regular expressions."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generate.gbnf import BadGrammar, Grammar, Text
from engine.generate.patterns import PLACES_MAX, BadPattern, text_of
from tests.engine.generate.json_schemas import Drawn

PATTERNS = (
    "", "a", "^$", "^a$", "^a|b$", "a|^b$|c", r"^\d{3}-\w+$", r"^[^a-z]{2}$", r"^[\w.-]+@[\w-]+\.[a-z]{2,3}$",
    r"^\S+\s\D\W$", r"^(?:ab|c)*d?$", r"^(a(b(c)?)?)+$", r"^.{2,4}$", r"^[\"\\]+$", r"^\u00e9\x41\n\t$",
    r"^[\]\-x]{2}$", r"^[a-]$", r"^[^\d]$", r"^a{3}b{2,}c{0,1}$",
    r"^(x|y){2,3}?z+?$", r"^\/\.\*$", "^[é😀]+$", r"^(a|aa)*$", "^[^ -~]$",
)  # fmt: skip


def drawn(pattern: str, seed: int) -> str:
    grammar = Grammar()
    text = grammar.text(grammar.sequence(Text('"'), text_of(grammar, pattern), Text('"')))
    return str(json.loads(Drawn(text).text(random.Random(seed))))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_text_that_is_drawn_is_found_by_the_pattern(pattern: str) -> None:
    for seed in range(60):
        value = drawn(pattern, seed)
        # Python's $ is also before a line break at the end, JavaScript's is not.
        assert re.search(re.sub(r"\$$", r"\\Z", pattern), value, re.ASCII) is not None, value


quantifiers = st.sampled_from(["?", "+", "{2}", "{1,3}", "{0,2}"])
pieces = st.recursive(
    st.sampled_from(["a", "b", ".", r"\d", r"\W", "[a-c]", '[^"]', "é", r"\\\\"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda parts: f"(?:{parts[0]}|{parts[1]})"),
        st.tuples(inner, st.sampled_from(["?", "+", "{2}", "{1,3}", "{0,2}"])).map(
            lambda parts: f"({parts[0]}){parts[1]}"
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(pieces, st.booleans(), st.integers(0, 2**32))
def test_patterns_of_all_parts_are_held(inner: str, is_anchored: bool, seed: int) -> None:
    try:
        value = drawn(f"^(?:{inner})$" if is_anchored else inner, seed)
    except BadGrammar:
        assert re.search(r"[?2}]\)\+", inner) is not None  # what may be empty, again and again
        return
    except BadPattern:
        assert len(re.findall(r"[{+]", inner)) > 3  # counts inside counts
        return
    found = re.fullmatch(inner, value, re.ASCII) if is_anchored else re.search(inner, value, re.ASCII)
    assert found is not None, value


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(?=a)", "begin with (?"),
        ("(?P<n>a)", "begin with (?"),
        (r"(a)\1", r"\1 is not supported"),
        (r"\bword", r"\b is not supported"),
        (r"\p{L}", r"\p is not supported"),
        ("a\\", "is not supported"),
        ("(a", "without a )"),
        ("a)", "without a ("),
        ("[a", "without a ]"),
        ("[z-a]", "a range"),
        (r"[a-\d]", "a range"),
        ("*a", "* with nothing before it"),
        ("a{3,2}", "counts"),
        ("a{1001}", "counts"),
        ("a^b", "^ is taken at the start"),
        ("(^a)", "^ is taken at the start"),
        ("a$b", "$ is taken at the end"),
        ("(" * 30 + ")" * 30, "nested too deep"),
        ("a" * 1001, "1001 characters"),
    ],
)
def test_what_is_not_regular_or_no_pattern_is_refused(pattern: str, told: str) -> None:
    with pytest.raises(BadPattern) as caught:
        text_of(Grammar(), pattern)
    assert told in str(caught.value)


def test_a_repetition_of_what_may_be_empty_is_refused_before_llama_cpp_sees_it() -> None:
    grammar = Grammar()
    with pytest.raises(BadGrammar, match="itself again"):
        grammar.text(text_of(grammar, "^(a*)*$"))


def counted(levels: int, most: int) -> str:
    """Counts inside counts, of which nothing tells where one ends."""
    pattern = f".{{1,{most}}}"
    for _ in range(levels - 1):
        pattern = f"(?:{pattern}){{1,{most}}}"
    return f"^{pattern}$"


@pytest.mark.parametrize(("levels", "most"), [(2, 1000), (3, 30), (4, 30), (6, 9), (7, 2), (19, 9)])
def test_counts_inside_counts_are_multiplied_and_refused_by_their_product(levels: int, most: int) -> None:
    held = most**levels <= PLACES_MAX
    assert held == ((levels, most) == (7, 2))
    if held:
        text_of(Grammar(), counted(levels, most))
        return
    with pytest.raises(BadPattern, match=rf"^counts inside counts: .* {most**levels} places"):
        text_of(Grammar(), counted(levels, most))


@pytest.mark.parametrize(
    ("pattern", "is_held"),
    [
        (r"^(?:[\w-]{1,63}\.){1,100}[a-z]{2,63}$", True),  # the point ends each
        (r"^(?:-[a-z]{1,500}){1,500}$", True),  # the line begins each
        (r"^((\w{1,500}:){1,500};)*$", True),
        (r"^(?:\d{3},(?:ab|cd)){1,1000}$", True),  # of one length
        (r"^(?:(?:ab){40}){1,9}$", True),
        (r"^\w{1,500} \w{1,500}$", True),
        (r"^(?:.{1,500})?$", True),
        (r"^(?:[\w.-]{1,63}\.){1,100}$", False),  # the point is inside too
        (r"^(?:(?:ab){1,40}){1,9}$", False),
        (r"^(?:a|aa){1,100}$", False),
        (r"^(?:\w{1,500} ?){1,9}$", False),
        (r"^(?:.{0,40}.{0,40}){2,}$", False),
    ],
)
def test_only_places_that_a_text_may_have_come_to_at_once_are_counted(pattern: str, is_held: bool) -> None:
    if is_held:
        text_of(Grammar(), pattern)
        return
    with pytest.raises(BadPattern, match="counts inside counts"):
        text_of(Grammar(), pattern)


def test_the_places_of_all_patterns_are_counted_together_and_equal_ones_once() -> None:
    grammar = Grammar()
    pattern = counted(2, 9)
    assert text_of(grammar, pattern) == text_of(grammar, pattern)
    with pytest.raises(BadPattern, match="in all patterns together"):
        text_of(grammar, "x" + counted(2, 9)[1:])
