"""What the tests of grammars share: JSON schemas to draw, a validator of them, and texts drawn from a grammar."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from hypothesis import strategies as st

names = st.text(alphabet='abé"\\\n ', min_size=1, max_size=4)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(10**6), 10**6), st.text(max_size=5), st.just(0.25))


def bounded(low: str, high: str, least: int, most: int) -> st.SearchStrategy[dict[str, int]]:
    """Both, one or none of two bounds that agree."""
    pair = st.tuples(st.integers(least, most), st.integers(least, most)).map(sorted)
    whole = pair.map(lambda ends: {low: ends[0], high: ends[1]})
    only = st.tuples(whole, st.sampled_from([low, high])).map(lambda part: {part[1]: part[0][part[1]]})
    return st.one_of(st.just({}), whole, only)


def _typed(name: str, bounds: st.SearchStrategy[dict[str, int]]) -> st.SearchStrategy[dict[str, Any]]:
    return bounds.map(lambda more: {"type": name, **more})


leaves: st.SearchStrategy[Any] = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": ["boolean", "null"]}),
    _typed("string", bounded("minLength", "maxLength", 0, 6)),
    _typed("integer", bounded("minimum", "maximum", -1200, 1200)),
    _typed("integer", bounded("minimum", "exclusiveMaximum", -1, 8).filter(lambda b: len(set(b.values())) == len(b))),
    _typed("number", bounded("minimum", "maximum", -12, 12)),
    st.sampled_from(["date", "time", "date-time", "uuid"]).map(lambda form: {"type": "string", "format": form}),
    st.lists(scalars, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    scalars.map(lambda value: {"const": value}),
)


def _inner(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(names, inner, max_size=4)
    objects = properties.flatmap(
        lambda each: (
            st.lists(st.sampled_from(sorted(each)), unique=True).map(
                lambda required: {"type": "object", "properties": each, "required": required}
            )
            if each
            else st.just({"type": "object", "additionalProperties": False})
        )
    )
    arrays = st.tuples(inner, bounded("minItems", "maxItems", 0, 4)).map(
        lambda part: {"type": "array", "items": part[0], **part[1]}
    )
    maps = inner.map(lambda values: {"type": "object", "additionalProperties": values})
    tuples = st.lists(inner, min_size=1, max_size=3).map(lambda each: {"prefixItems": each, "items": False})
    unions = st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    return st.one_of(objects, arrays, maps, tuples, unions)


schemas: st.SearchStrategy[Any] = st.recursive(leaves, _inner, max_leaves=8)

RECURSIVE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 8},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
            },
            "required": ["name", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}

_TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "null": type(None), "boolean": bool}
_FORMATS = {
    "date": r"\d{4}-\d\d-\d\d",
    "time": r"\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)",
    "date-time": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}


def fits(value: Any, schema: Any, document: Any = None) -> bool:
    """Whether `value` is valid: JSON Schema's rules for the keywords that are taken."""
    document = schema if document is None else document
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = document
        for part in schema["$ref"].split("/")[1:]:
            target = target[part]
        return fits(value, target, document)
    if "const" in schema or "enum" in schema:
        allowed = [schema["const"]] if "const" in schema else schema["enum"]
        return any(json.dumps(value) == json.dumps(one) for one in allowed)
    if "anyOf" in schema:
        return any(fits(value, part, document) for part in schema["anyOf"])
    types = schema.get("type")
    if types is not None and not any(_is(value, name) for name in ([types] if isinstance(types, str) else types)):
        return False
    return (
        (not isinstance(value, dict) or _fits_object(value, schema, document))
        and (not isinstance(value, list) or _fits_array(value, schema, document))
        and (not isinstance(value, str) or _fits_string(value, schema))
        and (isinstance(value, bool) or not isinstance(value, int | float) or _fits_number(value, schema))
    )


def _is(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        return not isinstance(value, bool) and isinstance(value, int if name == "integer" else int | float)
    return isinstance(value, _TYPES[name])


def _fits_object(value: dict[str, Any], schema: Any, document: Any) -> bool:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return set(schema.get("required", [])) <= set(value) and all(
        fits(item, properties.get(name, others), document) for name, item in value.items()
    )


def _fits_array(value: list[Any], schema: Any, document: Any) -> bool:
    first, others = schema.get("prefixItems", []), schema.get("items", True)
    return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9) and all(
        fits(item, first[index] if index < len(first) else others, document) for index, item in enumerate(value)
    )


def _fits_string(value: str, schema: Any) -> bool:
    form = schema.get("format")
    return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9) and (
        form is None or re.fullmatch(_FORMATS[form], value) is not None
    )


def _fits_number(value: float, schema: Any) -> bool:
    above = "exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"]
    below = "exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"]
    return above and below and schema.get("minimum", value) <= value <= schema.get("maximum", value)


_TOKEN = re.compile(r'"(?:[^"])*"|\[[^\]]*\]|[a-z0-9]+|\||::=|\n')


class Drawn:
    """Texts drawn from a grammar in the form that `Grammar.text` writes: an independent reading of it."""

    def __init__(self, grammar: str) -> None:
        self.rules: dict[str, list[list[str]]] = {}
        for line in grammar.splitlines():
            name, _, body = line.partition(" ::= ")
            choices: list[list[str]] = [[]]
            for item in _TOKEN.findall(body):
                if item == "|":
                    choices.append([])
                else:
                    choices[-1].append(item)
            self.rules[name] = choices
        self._depth = self._depths()

    def text(self, random_: random.Random, *, steps: int = 400) -> str:
        """One text; after so many choices the shortest way out is taken."""
        out: list[str] = []
        todo = ["root"]
        while todo:
            item = todo.pop()
            if item.startswith('"'):
                out.append(_unescaped(item[1:-1]))
            elif item.startswith("["):
                out.append(_one_of(item[1:-1], random_))
            else:
                steps -= 1
                choices = self.rules[item]
                best = min(choices, key=self._of_choice)
                todo += reversed(random_.choice(choices) if steps > 0 else best)
        return "".join(out)

    def _of_choice(self, choice: list[str]) -> int:
        return max((self._depth.get(item, 10**9) for item in choice if item[0] not in '"['), default=0)

    def _depths(self) -> dict[str, int]:
        self._depth = {}
        grew = True
        while grew:
            grew = False
            for name, choices in self.rules.items():
                depth = 1 + min(self._of_choice(choice) for choice in choices)
                if depth < self._depth.get(name, 10**9):
                    self._depth[name], grew = depth, True
        return self._depth


def _unescaped(text: str) -> str:
    return re.sub(r"\\U([0-9A-F]{8})", lambda found: chr(int(found[1], 16)), text)


def _one_of(text: str, random_: random.Random) -> str:
    ends = re.findall(r"(\\U[0-9A-F]{8}|[^\\])(?:-(\\U[0-9A-F]{8}|[^\\]))?", text)
    low, high = random_.choice(ends)
    return chr(random_.randint(ord(_unescaped(low)), ord(_unescaped(high or low))))
