"""Alternatives in schemas: what cannot fit both, and what is told apart before anything is inside it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.generate.alternatives import are_apart, is_of_type, part_early


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
    assert are_apart(one, other) == are_apart(other, one) == apart


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

    assert part_early(one, other, followed) == part_early(other, one, followed) == early


def test_true_is_no_number_and_a_whole_float_is_an_integer() -> None:
    assert not is_of_type(True, "integer")
    assert not is_of_type(True, "number")
    assert is_of_type(2.0, "integer")
    assert not is_of_type(2.5, "integer")
