"""How JSON schemas that are alternatives to each other differ: whether a value may fit both, and how soon it shows.

Says less than is true where a schema is not plain. A schema that alternatives share is read once, and what is compared
is counted, so that a short text with many references does not take long. Pure.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
COMPARED_MAX = 200_000  # values, properties and pairs in all; some tenths of a second
_WITH_INSIDE = {"object", "array"}


def is_of_type(value: Any, name: str) -> bool:
    """Whether a JSON value is of the type that a schema calls `name`."""
    match name:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return type(value) is int or (type(value) is float and value.is_integer())
        case _:
            return type(value) in (int, float)


class TooMuchToCompare(ValueError):
    """Raised when the alternatives of a schema have more in them than is compared."""


class Alternatives:
    """Compares the schemas of one document, each of which is read once. Raises TooMuchToCompare."""

    def __init__(self, followed: Callable[[Any], Any]) -> None:
        """followed: the schema that a schema with a `$ref` means."""
        self._followed = followed
        self._known: dict[int, _Read] = {}
        self.n_compared = 0  # values, properties and pairs

    def are_apart(self, one: Any, other: Any) -> bool:
        """Whether it is plain that no value fits both schemas."""
        self._count(1)
        mine, yours = self._read(one), self._read(other)
        if mine.kinds.isdisjoint(yours.kinds):
            return True
        if mine.kinds != {"object"} or yours.kinds != {"object"}:
            return False
        self._count(min(len(mine.required), len(yours.required)))
        both = mine.required & yours.required
        return any(self._differ(mine.properties.get(name), yours.properties.get(name)) for name in both)

    def part_early(self, one: Any, other: Any) -> bool:
        """Whether the texts of two schemas' values differ before one of them has got to an object or a list inside."""
        self._count(1)
        mine, yours = self._read(one), self._read(other)
        common = mine.kinds & yours.kinds & _WITH_INSIDE
        if not common or mine.is_listed or yours.is_listed:
            return True
        if common != {"object"} or mine.in_order is None or yours.in_order is None:
            return False
        for (name, value), (other_name, other_value) in zip(mine.in_order, yours.in_order, strict=False):
            self._count(1)
            if name != other_name or self._differ(value, other_value):
                return True
            if self._has_inside(value) or self._has_inside(other_value):
                return False
        return len(mine.in_order) != len(yours.in_order)

    def _differ(self, one: Any, other: Any) -> bool:
        """Whether both schemas list their values, and none is in both lists."""
        mine, yours = self._read(one).values, self._read(other).values
        if mine is None or yours is None:
            return False
        self._count(min(len(mine), len(yours)))
        return mine.isdisjoint(yours)

    def _has_inside(self, schema: Any) -> bool:
        read = self._read(schema)
        if read.has_inside is None:
            meant = self._read(self._followed(schema))
            read.has_inside = not read.is_listed and not _WITH_INSIDE.isdisjoint(meant.kinds)
        return read.has_inside

    def _read(self, schema: Any) -> _Read:
        if id(schema) not in self._known:
            self._known[id(schema)] = _Read(schema)
        return self._known[id(schema)]

    def _count(self, n: int) -> None:
        self.n_compared += n
        if self.n_compared > COMPARED_MAX:
            raise TooMuchToCompare("its schemas have too much to compare with each other")


class _Read:
    """What one schema says, kept. The schema is kept too, so that its id stays its own."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self.is_listed = _is_listed(schema)
        self.has_inside: bool | None = None  # not looked at yet

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        return frozenset(_kinds(self._schema))

    @functools.cached_property
    def values(self) -> frozenset[str] | None:
        """The values that are listed, as JSON; None if there is no list."""
        if not self.is_listed:
            return None
        values = [self._schema["const"]] if "const" in self._schema else self._schema["enum"]
        return frozenset(json.dumps(value, sort_keys=True) for value in values) if isinstance(values, list) else None

    @functools.cached_property
    def required(self) -> frozenset[str]:
        names = self._schema.get("required")
        return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()

    @functools.cached_property
    def properties(self) -> Mapping[str, Any]:
        properties = self._schema.get("properties") if isinstance(self._schema, dict) else None
        return properties if isinstance(properties, dict) else {}

    @functools.cached_property
    def in_order(self) -> list[tuple[str, Any]] | None:
        """The properties as they are written one behind the other; None if one may be left out, or has any name."""
        if not isinstance(self._schema, dict) or not isinstance(self._schema.get("properties"), dict):
            return None
        return list(self.properties.items()) if self.required == set(self.properties) else None


def _kinds(schema: Any) -> set[str]:
    """The types that a value of this schema may have; all of them where that is not plain. An integer is a number."""
    if not isinstance(schema, dict):
        return set(TYPES)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found = {name for name in TYPES for value in values if is_of_type(value, name)}
    else:
        named = schema.get("type")
        found = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    if not found:
        return set(TYPES)
    return found | {"number", "integer"} if found & {"number", "integer"} else found


def _is_listed(schema: Any) -> bool:
    return isinstance(schema, dict) and ("const" in schema or "enum" in schema)
