"""Schemas as grammars: what a grammar takes is valid, what cannot be held is refused, hostile schemas cost little."""

from __future__ import annotations

import datetime
import enum
import json
import random
import time
import uuid
from typing import Any, Literal

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib._pydantic import to_strict_json_schema

from engine.generate.keywords import BadSchema
from engine.generate.schema import SCHEMA_CHARS_MAX, Framed, grammar_of, grammar_of_any
from tests.engine.generate.json_schemas import RECURSIVE, Drawn, fits, schemas


def grammar_or_refusal(schema: Any) -> str | BadSchema:
    try:
        return grammar_of(schema if isinstance(schema, str) else json.dumps(schema))
    except BadSchema as refused:
        return refused


def refusal(schema: Any) -> str:
    refused = grammar_or_refusal(schema)
    assert isinstance(refused, BadSchema)
    return str(refused)


@settings(max_examples=60)
@given(schemas, st.integers(0, 2**32))
def test_every_text_of_the_grammar_is_json_that_validates(schema: Any, seed: int) -> None:
    grammar = grammar_or_refusal(schema)
    if isinstance(grammar, BadSchema):
        assert "no answer fits it" in str(grammar) or "stay possible for too long" in str(grammar)
        return
    drawn = Drawn(grammar)
    source = random.Random(seed)
    for _ in range(3):
        text = drawn.text(source)
        assert fits(json.loads(text), schema), text


@pytest.mark.parametrize("schema", [RECURSIVE, {"type": "object"}, True, {"items": {"type": "integer"}}])
def test_schemas_without_an_end_have_answers_with_one(schema: Any) -> None:
    drawn, source = Drawn(grammar_of(json.dumps(schema))), random.Random(5)
    for _ in range(30):
        text = drawn.text(source)
        assert fits(json.loads(text), schema), text


class Kind(enum.Enum):
    CAT = "cat"
    DOG = "dög"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = pydantic.Field(ge=1, le=9, description="left")


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    friends: list[Cat | Dog]


class Report(pydantic.BaseModel):
    name: str = pydantic.Field(min_length=1, max_length=20)
    kind: Kind
    pet: Cat | Dog = pydantic.Field(discriminator="kind")
    at: datetime.datetime | None
    day: datetime.date
    id: uuid.UUID
    share: float = pydantic.Field(ge=0, lt=1)
    counts: dict[str, int]
    pair: tuple[int, str]
    tags: list[str] = pydantic.Field(default=[], max_length=3)
    plate: str = pydantic.Field(pattern=r"^[A-Z]{1,3}-\d+$")


@pytest.mark.parametrize("is_strict", [True, False])
def test_the_schemas_that_pydantic_writes_are_held(is_strict: bool) -> None:
    schema = to_strict_json_schema(Cat) if is_strict else Report.model_json_schema()
    drawn, source = Drawn(grammar_of(json.dumps(schema))), random.Random(2)
    for _ in range(30):
        (Cat if is_strict else Report).model_validate_json(drawn.text(source))


def test_dates_exist() -> None:
    drawn, source = Drawn(grammar_of('{"type":"string","format":"date-time"}')), random.Random(1)
    for _ in range(200):
        datetime.datetime.fromisoformat(json.loads(drawn.text(source)))


def test_json_in_a_frame_refers_into_its_own_schema() -> None:
    told = [json.dumps({"$defs": {"a": {"const": value}}, "$ref": "#/$defs/a"}) for value in (1, 2)]
    drawn = Drawn(grammar_of_any([Framed(f"<{n}>\n", each, "</>", of="") for n, each in enumerate(told)]))
    assert {drawn.text(random.Random(seed)) for seed in range(30)} == {"<0>\n1</>", "<1>\n2</>"}


def test_a_mistake_in_one_of_many_is_told_with_what_it_is_of() -> None:
    with pytest.raises(BadSchema, match=r"^tool look: #: 'not' is not supported"):
        grammar_of_any([Framed("", "{}", "", of="tool see"), Framed("", '{"not":{}}', "", of="tool look")])


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "a{2,1}"}}}, "#/properties/a/pattern: {2,1}: counts"),
        ({"type": "string", "pattern": 3}, "#/pattern: a regular expression"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "#: 'pattern' beside others"),
        ({"type": "object", "patternProperties": {}}, "'patternProperties' is not supported"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"not": {}}, "'not' is not supported"),
        ({"const": 1, "minimum": 0}, "'minimum' beside const is not supported"),
        ({"type": "string", "format": "email"}, "#/format: 'email' is not supported; date, time"),
        ({"type": "number", "minimum": 0.5}, "minimum must be a whole number"),
        ({"type": "number", "exclusiveMinimum": True}, "exclusiveMinimum must be a whole number"),
        ({"allOf": [{}, {}]}, "#/allOf: only one schema"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "#/oneOf: its schemas may overlap"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "#/oneOf: its schemas may overlap"),
        ({"type": "text"}, "#/type: 'text' is no type"),
        ({"type": []}, "#/type: the list is empty"),
        ({"enum": []}, "#/enum: a list of values"),
        ({"anyOf": {}}, "#/anyOf: a list of schemas"),
        ({"properties": []}, "#/properties: an object"),
        ({"required": "a"}, "#/required: a list of names"),
        ({"items": [{}]}, "is called prefixItems"),
        ({"minItems": -1}, "#/minItems: a whole number"),
        ({"minItems": 3, "maxItems": 2}, "#/maxItems: less than minItems"),
        ({"$ref": "https://example.org/schema"}, "nothing is fetched"),
        ({"$ref": "other.json#/a"}, "nothing is fetched"),
        ({"$ref": "#/$defs/gone"}, "points to nothing"),
        ({"$ref": "#anchor"}, "no anchors"),
        ({"$ref": "#"}, "no answer fits it"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "no answer fits it"),
        ({"required": ["a"], "additionalProperties": False}, "no answer fits it"),
        ({"const": "a", "type": "integer"}, "no answer fits it"),
        (False, "no answer fits it"),
        (3, "a schema is an object"),
        ("{", "not JSON"),
        ('{"const": 1e999}', "too large"),
        ('{"const": "\\ud800"}', "surrogate"),
    ],
)
def test_what_cannot_be_held_is_refused_by_its_name(schema: Any, told: str) -> None:
    assert told in refusal(schema)


def test_alternatives_that_cannot_both_fit_may_be_one_of() -> None:
    kinds = [{"properties": {"kind": {"const": kind}}, "required": ["kind"], "type": "object"} for kind in ("a", "b")]
    drawn = Drawn(grammar_of(json.dumps({"oneOf": [*kinds, {"type": "null"}]})))
    assert {drawn.text(random.Random(seed)).replace(" ", "") for seed in range(40)} == {
        '{"kind":"a"}',
        '{"kind":"b"}',
        "null",
    }


def nested(depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int, link: Any) -> Any:
    definitions = {f"n{i}": link(f"#/$defs/n{i + 1}") for i in range(length)}
    return {"$defs": {**definitions, f"n{length}": {"type": "null"}}, "$ref": "#/$defs/n0"}


HOSTILE = {
    "deep text": "[" * 60_000,
    "deep schemas": nested(300),
    "long": {"enum": ["x" * SCHEMA_CHARS_MAX]},
    "huge list": {"enum": list(range(9_000))},
    "huge texts": {"enum": ["a" * n for n in range(340)]},
    "huge bounds": {"type": "array", "minItems": 10**6, "items": {"type": "string", "minLength": 10**6}},
    "bounds beyond all": {"type": "array", "minItems": 10**300},
    "digits beyond all": '{"type":"integer","minimum":' + "9" * 5000 + "}",
    "many properties": {"properties": {f"p{i}": {} for i in range(4_000)}},
    "many required": {"required": [f"p{i}" for i in range(6_000)]},
    "long chain": chain(1_500, lambda ref: {"$ref": ref}),
    "doubling": chain(200, lambda ref: {"anyOf": [{"$ref": ref}, {"type": "array", "items": {"$ref": ref}}]}),
    "forks without end": {
        "$defs": {"u": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/u"}, "maxItems": n} for n in (1, 2)]}},
        "$ref": "#/$defs/u",
    },
    "many alternatives": {"anyOf": [{"type": "string", "maxLength": n} for n in range(1, 600)]},
    "references to long lists": {
        "anyOf": [{"$ref": f"#/$defs/{'ab'[i % 2]}"} for i in range(141)],
        "$defs": {"a": {"enum": list(range(5_000))}, "b": {"enum": list(range(5_000, 10_000))}},
    },
    "references to wide objects": {
        "anyOf": [{"$ref": f"#/$defs/{'ab'[i % 2]}"} for i in range(141)],
        "$defs": {
            key: {"type": "object", "properties": dict.fromkeys(map(str, range(450)), True)}
            | {"required": [str(i) for i in range(450)]}
            for key in "ab"
        },
    },
    "many exclusive ones": {"oneOf": [{"type": "null"}] * 3_000},
    "long pattern": {"type": "string", "pattern": "(a?){1000}" * 100},
    "nested pattern": {"type": "string", "pattern": "(" * 400 + ")" * 400},
    "repeated pattern": {"type": "string", "pattern": "((((a{1000}){1000}){1000}){1000}){1000}"},
    "ambiguous pattern": {"type": "string", "pattern": "^(a|a|aa|a?a)*$"},
    "empty pattern without end": {"type": "string", "pattern": "(a*)*"},
    "long names": {"properties": {"x" * 30_000: {"properties": {f"p{i}": {} for i in range(900)}}}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_small_grammars_or_refused(name: str) -> None:
    schema = HOSTILE[name]
    began_s = time.thread_time()
    grammar = grammar_or_refusal(schema)
    assert len(str(grammar)) < (600 if isinstance(grammar, BadSchema) else 200_000)
    assert time.thread_time() - began_s < 20  # a guard against hanging: most take a few hundredths
