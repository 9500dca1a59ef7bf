"""Numbers within bounds: every one that is written is within them, and every integer within them can be written."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generate.gbnf import BadGrammar, Grammar
from engine.generate.numerals import Limits, integer, limits_of, number
from tests.engine.generate.json_schemas import Drawn

bounds = st.one_of(st.none(), st.integers(-1500, 1500))


def pattern(grammar: str) -> re.Pattern[str]:
    """The grammar as a regular expression; numbers have nothing that refers to itself."""
    rules = Drawn(grammar).rules

    def of(item: str) -> str:
        if item.startswith('"'):
            return re.escape(item[1:-1].replace("\\U0000002D", "-"))
        return item.replace("\\U0000002D", "-") if item.startswith("[") else choices(rules[item])

    def choices(all_of: list[list[str]]) -> str:
        return "(?:" + "|".join("".join(of(item) for item in choice) for choice in all_of) + ")"

    return re.compile(of("root"))


@settings(max_examples=40)
@given(bounds, bounds, st.booleans(), st.booleans(), st.lists(st.integers(-2000, 2000), min_size=20, max_size=20))
def test_an_integer_can_be_written_if_and_only_if_it_is_within_the_limits(
    least: int | None, most: int | None, least_open: bool, most_open: bool, values: list[int]
) -> None:
    limits = Limits(least, least_open, most, most_open)
    grammar = Grammar()
    rule = integer(grammar, limits)

    def within(value: int) -> bool:
        above = least is None or value > least or (value == least and not least_open)
        return above and (most is None or value < most or (value == most and not most_open))

    edges = [edge + step for edge in (least, most) if edge is not None for step in (-1, 0, 1)]
    try:
        written = pattern(grammar.text(rule))
    except BadGrammar:
        assert not any(within(value) for value in [*values, *edges])
        return
    for value in [*values, *edges]:
        assert (written.fullmatch(str(value)) is not None) == within(value), value


@settings(max_examples=40)
@given(bounds, bounds, st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_every_number_that_is_drawn_is_within_the_limits(
    least: int | None, most: int | None, least_open: bool, most_open: bool, seed: int
) -> None:
    grammar = Grammar()
    rule = number(grammar, Limits(least, least_open, most, most_open))
    try:
        drawn = Drawn(grammar.text(rule))
    except BadGrammar:
        assert least is not None
        assert most is not None
        assert least > most or (least == most and (least_open or most_open))
        return
    for step in range(20):
        value = float(drawn.text(random.Random(seed + step)))
        assert least is None or value > least or (value == least and not least_open)
        assert most is None or value < most or (value == most and not most_open)


@pytest.mark.parametrize(
    ("keywords", "limits"),
    [
        ({"minimum": 3.0}, Limits(3, False, None, False)),
        ({"minimum": 1, "exclusiveMinimum": 1}, Limits(1, True, None, False)),
        ({"minimum": 2, "exclusiveMinimum": 1}, Limits(2, False, None, False)),
        ({"maximum": 5, "exclusiveMaximum": 9}, Limits(None, False, 5, False)),
        ({"maximum": 2**63 - 1}, Limits(None, False, 2**63 - 1, False)),
    ],
)
def test_the_tighter_bound_counts(keywords: dict[str, Any], limits: Limits) -> None:
    assert limits_of(keywords) == limits


@pytest.mark.parametrize("keywords", [{"minimum": 0.5}, {"minimum": "1"}, {"maximum": True}, {"maximum": 10**30}])
def test_bounds_that_are_not_whole_or_too_long_are_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(keywords))):
        limits_of(keywords)
