"""Alternatives in schemas: what cannot fit both, and what is told apart before anything is inside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.generate.alternatives import COMPARED_MAX, Alternatives, TooMuchToCompare, is_of_type


def tagged(kind: Any, **more: Any) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, **more}
    return {"type": "object", "properties": properties, "required": list(properties)}


ANY = {"type": "array", "items": {}}


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ({"type": "string"}, {"type": "null"}, True),
        ({"type": "integer"}, {"type": "number"}, False),
        ({"const": 1}, {"type": "number"}, False),
        ({"enum": ["a"]}, {"type": "integer"}, True),
        (tagged("a"), tagged("b"), True),
        (tagged("a"), tagged("a"), False),
        (tagged("a"), {"type": "object"}, False),
        ({}, {"type": "null"}, False),
    ],
)
def test_alternatives_are_apart_where_that_is_plain(one: Any, other: Any, apart: bool) -> None:
    compared = Alternatives(lambda schema: schema)
    assert compared.are_apart(one, other) == compared.are_apart(other, one) == apart


@pytest.mark.parametrize(
    ("one", "other", "early"),
    [
        ({"type": "string"}, {"type": "string", "maxLength": 3}, True),
        ({"type": "array"}, {"type": "object"}, True),
        ({"type": "array"}, {"type": "array"}, False),
        (tagged("a", x=ANY), tagged("b", x=ANY), True),
        (tagged("a", x=ANY), tagged("a", x=ANY), False),
        (tagged("a", x=ANY), tagged("a", y=ANY), True),
        (tagged("a"), tagged("a", x=ANY), True),
        (tagged("a", x=ANY), {**tagged("b", x=ANY), "required": []}, False),
        ({"const": {"a": []}}, {"type": "object"}, True),
        (tagged("a", x={"$ref": "#"}), tagged("a", x={"$ref": "#"}), False),
    ],
)
def test_alternatives_part_early_if_nothing_is_inside_before_they_differ(one: Any, other: Any, early: bool) -> None:
    def followed(schema: Any) -> Any:
        return ANY if "$ref" in schema else schema

    compared = Alternatives(followed)
    assert compared.part_early(one, other) == compared.part_early(other, one) == early


def test_true_is_no_number_and_a_whole_float_is_an_integer() -> None:
    assert not is_of_type(True, "integer")
    assert not is_of_type(True, "number")
    assert is_of_type(2.0, "integer")
    assert not is_of_type(2.5, "integer")


class Counted(list[int]):
    """Values that count how often they are read."""

    n_read = 0

    def __iter__(self) -> Iterator[int]:
        self.n_read += 1
        return super().__iter__()


def test_the_values_of_a_schema_are_read_as_often_for_a_hundred_comparisons_as_for_one() -> None:
    values = Counted(range(6_000))
    one, other = {"enum": values}, {"enum": ["a"]}
    compared = Alternatives(lambda schema: schema)
    assert compared.are_apart(one, other)
    n_read = values.n_read
    assert n_read > 0
    for _ in range(100):
        assert compared.are_apart(one, other)
        assert compared.part_early(one, other)
    assert values.n_read == n_read


@pytest.mark.parametrize("kind", ["values", "properties", "names"])
def test_what_is_compared_is_counted_and_bounded(kind: str) -> None:
    names = [f"p{i}" for i in range(500)]
    wide = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": names}
    one, other = {
        "values": (tagged("a"), tagged("a")),
        "properties": (wide, dict(wide)),
        "names": ({**wide, "properties": {}}, {**wide, "properties": {}}),
    }[kind]
    if kind == "values":
        one["properties"]["kind"] = {"enum": list(range(500))}
        other["properties"]["kind"] = {"enum": list(range(499, 999))}
    compared = Alternatives(lambda schema: schema)
    compare = compared.part_early if kind == "properties" else compared.are_apart
    assert not compare(one, other)
    n_at_once = compared.n_compared
    assert 500 < n_at_once < 1_100
    for _ in range(COMPARED_MAX // n_at_once - 1):
        assert not compare(one, other)
    with pytest.raises(TooMuchToCompare):
        compare(one, other)
