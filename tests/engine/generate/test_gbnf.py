"""Grammars: their text, and what is refused because llama.cpp could not bear it."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generate.gbnf import FORKS_MAX, ITEMS_MAX, BadGrammar, Grammar, Text, chars
from tests.engine.generate.json_schemas import Drawn


def drawn(grammar: Grammar, root: object, n: int = 60) -> set[str]:
    texts = Drawn(grammar.text(root))  # type: ignore[arg-type]
    return {texts.text(random.Random(seed)) for seed in range(n)}


def test_the_text_is_what_llama_cpp_reads() -> None:
    grammar = Grammar()
    root = grammar.sequence(Text('"\n'), grammar.any_of([[chars("az", "-")], []]))
    assert grammar.text(root) == 'root ::= "\\U00000022\\U0000000A" r0\nr0 ::= [a-z\\U0000002D] | ""\n'


@settings(max_examples=25)
@given(st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_repetition_has_every_length_within_its_bounds_and_no_other(least: int, more: int, characters: bool) -> None:
    grammar = Grammar()
    repeat = grammar.repeat_character if characters else grammar.repeat
    lengths = {len(text) for text in drawn(grammar, repeat(chars("az"), least, least + more), 100)}
    assert lengths <= set(range(least, least + more + 1))
    assert {least, least + more} <= lengths or more > 3


def test_a_long_repetition_of_characters_needs_few_rules() -> None:
    grammar = Grammar()
    text = grammar.text(grammar.repeat_character(chars("az"), 0, 100_000))
    assert len(text.splitlines()) < 80


@settings(max_examples=25)
@given(st.lists(st.text(alphabet="ab1", max_size=4), min_size=1, max_size=8))
def test_one_of_many_texts_is_each_of_them_and_begins_in_one_way_for_each_character(texts: list[str]) -> None:
    grammar = Grammar()
    root = grammar.one_of_texts(texts)
    assert drawn(grammar, root, 50) <= set(texts)
    for line in grammar.text(root).splitlines():
        firsts = re.findall(r'(?:::=|\|) "(.?)', line)
        assert len(firsts) == len(set(firsts))


def test_alternatives_that_lead_nowhere_are_left_out() -> None:
    grammar = Grammar()
    endless = grammar.promise()
    grammar.keep(endless, [[Text("a"), endless]])
    assert drawn(grammar, grammar.any_of([[endless], [Text("b")]])) == {"b"}
    with pytest.raises(BadGrammar, match="no end"):
        grammar.text(endless)


def test_a_rule_that_begins_with_itself_is_refused() -> None:
    grammar = Grammar()
    rule = grammar.promise()
    grammar.keep(rule, [[grammar.optional(Text(" ")), rule, Text("a")], [Text("b")]])
    with pytest.raises(BadGrammar, match="itself again"):
        grammar.text(rule)


def test_alternatives_of_alternatives_are_counted_and_not_followed() -> None:
    grammar = Grammar()
    rule = grammar.sequence(Text("x"))
    for name in range(60):
        rule = grammar.any_of([[rule], [rule, Text(str(name))]])
    with pytest.raises(BadGrammar, match="too many ways"):
        grammar.text(rule)


def test_forks_inside_each_other_multiply_and_a_fork_in_itself_is_refused() -> None:
    grammar = Grammar()
    rule = grammar.sequence(Text("x"))
    n_forks = FORKS_MAX.bit_length() - 1
    for name in range(n_forks):
        rule = grammar.fork(grammar.any_of([[Text("a"), rule], [Text("a"), rule, Text(str(name))]]), 2)
    grammar.text(rule)
    with pytest.raises(BadGrammar, match="stay possible"):
        grammar.text(grammar.fork(grammar.any_of([[Text("b"), rule], [Text("b"), rule, Text("c")]]), 2))
    again = grammar.promise()
    grammar.keep(again, [[Text("["), again], [Text("["), again, Text("]")], []])
    grammar.fork(again, 2)
    with pytest.raises(BadGrammar, match="stay possible"):
        grammar.text(again)


def test_a_grammar_that_is_too_large_is_refused_while_it_grows() -> None:
    grammar = Grammar()
    grammar.sequence(Text("x" * (ITEMS_MAX - 10)))
    with pytest.raises(BadGrammar, match="too large"):
        grammar.sequence(Text("y" * 10))


def test_equal_alternatives_are_one() -> None:
    grammar = Grammar()
    one, other = grammar.sequence(Text("a")), grammar.sequence(Text("a"))
    assert one == other
    assert grammar.text(grammar.any_of([[one], [other]])).count("|") == 0
