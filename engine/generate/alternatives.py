"""How JSON schemas that are alternatives to each other differ: whether a value may fit both, and how soon it shows.

Says less than is true where a schema is not plain. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
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


def are_apart(one: Any, other: Any) -> bool:
    """Whether it is plain that no value fits both schemas."""
    if kinds(one).isdisjoint(kinds(other)):
        return True
    if kinds(one) != {"object"} or kinds(other) != {"object"}:
        return False
    both = set(_required(one)) & set(_required(other))
    told = ((_told(one, name), _told(other, name)) for name in both)
    return any(mine is not None and yours is not None and mine.isdisjoint(yours) for mine, yours in told)


def part_early(one: Any, other: Any, followed: Callable[[Any], Any]) -> bool:
    """Whether the texts of two schemas' values differ before one of them has got to an object or a list inside.

    followed: the schema that a schema with a `$ref` means.
    """
    common = kinds(one) & kinds(other) & _WITH_INSIDE
    if not common or _is_listed(one) or _is_listed(other):
        return True
    mine, yours = _in_order(one), _in_order(other)
    if common != {"object"} or mine is None or yours is None:
        return False
    for (name, value), (other_name, other_value) in zip(mine, yours, strict=False):
        if name != other_name:
            return True
        told, other_told = _values(value), _values(other_value)
        if told is not None and other_told is not None and told.isdisjoint(other_told):
            return True
        if any(kinds(followed(each)) & _WITH_INSIDE and not _is_listed(each) for each in (value, other_value)):
            return False
    return len(mine) != len(yours)


def kinds(schema: Any) -> set[str]:
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


def _required(schema: Mapping[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _in_order(schema: Any) -> list[tuple[str, Any]] | None:
    """The properties as they are written one behind the other; None if one may be left out, or has any name."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or set(_required(schema)) != set(properties):
        return None
    return list(properties.items())


def _told(schema: Mapping[str, Any], name: str) -> set[str] | None:
    properties = schema.get("properties")
    return _values(properties.get(name)) if isinstance(properties, dict) else None


def _values(schema: Any) -> set[str] | None:
    """The values that are listed, as JSON; None if there is no list."""
    if not isinstance(schema, dict) or not _is_listed(schema):
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else None
