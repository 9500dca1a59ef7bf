"""The keywords of a JSON schema: which are handled, and reading their values, each mistake named with its place.

Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from engine.generate.alternatives import TYPES

REPEAT_MAX = 1_000_000
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions", "discriminator", "strict"),
    }
)
OF_TYPE = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "format", "pattern"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
}
COMBINED = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")


class BadSchema(ValueError):
    """Raised for a schema that is none, that nothing fits, or that this server cannot hold an answer to."""


def only(schema: Mapping[str, Any], handled: set[str], path: str) -> None:
    """Raise BadSchema for a keyword beside the handled ones that may constrain."""
    for keyword in schema:
        if keyword not in handled and keyword not in _ANNOTATIONS and not keyword.startswith("x-"):
            if keyword == "uniqueItems" and schema[keyword] is False:
                continue
            beside = " ".join(word for word in COMBINED if word in handled and word in schema)
            where = f" beside {beside}" if beside else ""
            raise BadSchema(f"{path}: {keyword[:60]!r}{where} is not supported; leave it out")


def types_of(schema: Mapping[str, Any], path: str) -> list[str]:
    """The types that are named, or else those that a keyword is about; [] for all."""
    named = schema.get("type")
    if named is None:
        return [name for name, keywords in OF_TYPE.items() if not keywords.isdisjoint(schema)]
    types = named if isinstance(named, list) else [named]
    for name in types:
        if name not in TYPES:
            raise BadSchema(f"{path}/type: {str(name)[:60]!r} is no type; {', '.join(TYPES)} are")
    if not types:
        raise BadSchema(f"{path}/type: the list is empty")
    return types


def schemas_of(schema: Mapping[str, Any], keyword: str, path: str) -> list[Any]:
    """The alternatives or parts that a keyword lists. Raises BadSchema."""
    parts = schema[keyword]
    if not isinstance(parts, list) or not parts:
        raise BadSchema(f"{path}/{keyword}: a list of schemas is needed")
    return parts


def bounds_of(schema: Mapping[str, Any], least_name: str, most_name: str, path: str) -> tuple[int, int | None]:
    """How many or how long; None for no upper bound. Raises BadSchema."""
    least, most = schema.get(least_name, 0), schema.get(most_name)
    for name, value in ((least_name, least), (most_name, most)):
        if value is not None and (type(value) is not int or value < 0):
            raise BadSchema(f"{path}/{name}: a whole number of at least 0 is needed")
    if least > REPEAT_MAX:
        raise BadSchema(f"{path}/{least_name}: {REPEAT_MAX} is the most that can be asked")
    if most is not None and most < least:
        raise BadSchema(f"{path}/{most_name}: less than {least_name}")
    # No answer comes near it: the same as no bound.
    return least, None if most is None or most > REPEAT_MAX else most


def is_finite(value: Any) -> bool:
    """Whether no number in a JSON value is beyond what JSON can say."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(is_finite(item) for item in value.values())
    return not isinstance(value, list) or all(is_finite(item) for item in value)


def to_json(value: Any) -> str:
    """Compact JSON, as answers have it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
