"""Requests drawn from an OpenAPI document: mostly what it allows, often a little wrong, sometimes nonsense.

`operations` lists what the document has; `requests` is the strategy for one of them. Texts may be `$completion`,
`$feedback` or `$user`, which the sender puts something real in the place of.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from urllib.parse import quote, urlencode

from hypothesis import strategies as st

MAX_TOKENS = 4  # of an answer
TOKEN_FIELDS = ("max_tokens", "max_completion_tokens")
DEPTH_MAX = 4
INT64 = 2**63 - 1

REAL = ("$completion", "$feedback", "$user", "default", "up")
# A control character cannot be in a URL or a header, and httpx refuses it before we could.
plain_text = st.text(st.characters(min_codepoint=32, max_codepoint=0xD7FF), max_size=12)
texts = st.one_of(st.sampled_from(REAL), plain_text)
wild = st.recursive(
    st.none() | st.booleans() | st.integers(-INT64 - 1, INT64 + 1) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
header_names = st.sampled_from(["idempotency-key", "content-type", "accept", "authorization", "x-request-id"])
header_values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(str.strip)


@dataclasses.dataclass(frozen=True)
class Operation:
    """A method on a path, with the schemas of its parameters and of its body (None: it has none)."""

    method: str
    path: str
    parameters: tuple[dict[str, Any], ...]
    body: dict[str, Any] | None
    media_type: str
    definitions: dict[str, Any] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A request to be sent; `url` and `content` may hold the names of REAL."""

    method: str
    url: str
    headers: dict[str, str]
    content: bytes | None


def operations(document: dict[str, Any]) -> list[Operation]:
    """Everything that the document says can be done."""
    found = []
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            media = described.get("requestBody", {}).get("content", {})
            media_type, body = next(((name, value["schema"]) for name, value in media.items()), ("", None))
            parameters = tuple(described.get("parameters", ()))
            definitions = document.get("components", {}).get("schemas", {})
            found.append(Operation(method.upper(), path, parameters, body, media_type, definitions))
    return found


def values(schema: dict[str, Any], definitions: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """What the schema allows, or nearly: formats and rare keywords are not looked at."""
    if "$ref" in schema:
        return values(definitions[schema["$ref"].rpartition("/")[2]], definitions, depth)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if kinds := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of([values(kind, definitions, depth) for kind in kinds])
    match schema.get("type"):
        case "string":
            if "pattern" in schema:
                return st.from_regex(schema["pattern"], fullmatch=True)
            return texts.filter(lambda text: len(text) >= schema.get("minLength", 0))
        case "integer":
            low, high = schema.get("minimum", -INT64), min(schema.get("maximum", INT64), INT64)
            return st.integers(max(low, 0), min(high, max(low, 0) + 3)) | st.integers(low, high)
        case "number":
            low, high = schema.get("minimum"), schema.get("maximum")
            above = schema.get("exclusiveMinimum")
            return st.floats(
                low if above is None else above,
                high,
                exclude_min=above is not None,
                allow_nan=False,
                allow_infinity=False,
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            items = values(schema.get("items", {}), definitions, depth + 1)
            return st.lists(items, min_size=min(schema.get("minItems", 0), 3), max_size=3)
        case "object":
            return _objects(schema, definitions, depth)
    # Anything, says the schema; what is meant is mostly that it should be left out.
    return st.one_of(st.none(), st.none(), st.none(), st.none(), st.none(), wild)


def _objects(schema: dict[str, Any], definitions: dict[str, Any], depth: int) -> st.SearchStrategy[dict[str, Any]]:
    properties = schema.get("properties", {}) if depth < DEPTH_MAX else {}
    required = {name for name in schema.get("required", ()) if name in properties}
    drawn = {name: values(value, definitions, depth + 1) for name, value in properties.items()}
    named = st.fixed_dictionaries(
        {name: drawn[name] for name in required}, optional={name: drawn[name] for name in drawn.keys() - required}
    )
    more = schema.get("additionalProperties")
    if not isinstance(more, dict):
        return named
    extra = st.dictionaries(texts, values(more, definitions, depth + 1), max_size=3)
    return st.builds(lambda mine, others: {**others, **mine}, named, extra)


@st.composite
def _bodies(draw: st.DrawFn, operation: Operation) -> bytes | None:
    if operation.body is None or draw(st.integers(0, 19)) == 0:
        return draw(st.one_of(st.none(), st.binary(max_size=40), wild.map(_json)))
    body = draw(values(operation.body, operation.definitions))
    if isinstance(body, dict):
        for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
            name = draw(st.sampled_from([*body, "other"]))
            if draw(st.booleans()):
                body.pop(name, None)
            else:
                body[name] = draw(wild)
        if operation.path.endswith("/completions"):
            _shorten(body)
    lines = 3 if operation.media_type == "application/x-ndjson" else 1
    return b"\n".join([_json(body)] * lines)


def _shorten(body: dict[str, Any]) -> None:
    """Have answers end soon; what is no number stays as it is."""
    for name in TOKEN_FIELDS:
        if isinstance(body.get(name), int) and body[name] > MAX_TOKENS:
            body[name] = MAX_TOKENS
    if not any(name in body for name in TOKEN_FIELDS):
        body["max_tokens"] = MAX_TOKENS


def _json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


@st.composite
def requests(draw: st.DrawFn, operation: Operation) -> Drawn:
    """One request for the operation."""
    path, query = operation.path, []
    for parameter in operation.parameters:
        allowed = values(parameter["schema"], operation.definitions)
        value = draw(st.one_of(allowed, allowed, texts))
        if parameter["in"] == "path":
            path = path.replace("{" + parameter["name"] + "}", quote(str(value) or "x", safe="$"))
        elif draw(st.booleans()):
            pairs = value.items() if isinstance(value, dict) else [(None, value)]
            query += [(parameter["name"] + (f"[{key}]" if key is not None else ""), str(text)) for key, text in pairs]
    headers = draw(st.dictionaries(header_names, header_values, max_size=2))
    content = draw(_bodies(operation)) if operation.method in ("POST", "PUT", "DELETE") else None
    return Drawn(operation.method, path + ("?" + urlencode(query, safe="$[]") if query else ""), headers, content)
