"""Patterns as grammars: the texts that are drawn are found by Python's own regular expressions."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generate.gbnf import BadGrammar, Grammar, Text
from engine.generate.patterns import BadPattern, text_of
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
