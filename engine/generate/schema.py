"""JSON schemas as grammars: what the grammar takes is JSON that validates, and as much of that as can be told so.

The answer is compact JSON (at most one space behind a colon or comma) whose properties come in the order of the schema.
Where a schema leaves something open that a grammar cannot keep track of, the grammar takes less than the schema, never
more: beside named properties no others appear, a number has at most 15 digits before and behind its point, a list with
a bound ends after a thousand items. A keyword that constrains and that a grammar cannot hold is refused by its name.
Nothing is fetched: a `$ref` points into the schema itself.

Pure. Time and memory are bounded by the length of the schema's text, its depth, and the size of the grammar
(`engine.generate.gbnf`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.generate import formats, numerals, patterns
from engine.generate.alternatives import Alternatives, TooMuchToCompare, is_of_type
from engine.generate.gbnf import BadGrammar, Chars, Grammar, Item, Rule, Text, chars
from engine.generate.keywords import (
    COMBINED,
    OF_TYPE,
    BadSchema,
    bounds_of,
    is_finite,
    only,
    schemas_of,
    to_json,
    types_of,
)

SCHEMA_CHARS_MAX = 65_536
DEPTH_MAX = 32  # schemas inside schemas, as written; what a $ref points to begins anew
PAIRS_MAX = 20_000  # alternatives that are compared with each other, in all
PROPERTIES_MAX = 1_000  # in all
_NAME_SHOWN = 40


_HEX = chars("09", "af", "AF")
_HEX_BUT_D = chars("09", "ac", "ef", "AC", "EF")
_SPACE = Text(" ")
_SURROGATE = re.compile(r"\\U0000D[89A-F]")  # as the grammar's text writes it


@dataclasses.dataclass(frozen=True, slots=True)
class Framed:
    """Texts that are `before`, JSON that fits `schema` (as JSON), and `after`. of: what it is, for errors."""

    before: str
    schema: str
    after: str
    of: str


def grammar_of(schema: str) -> str:
    """The GBNF of JSON that fits `schema`, which is JSON too. Raises BadSchema, with the part and what to do."""
    return grammar_of_any([Framed("", schema, "", of="")])


def grammar_of_any(frames: Sequence[Framed]) -> str:
    """The GBNF of the texts of any of `frames`, each of which has references into its own schema. Raises BadSchema."""
    n_chars = sum(len(frame.schema) for frame in frames)
    if n_chars > SCHEMA_CHARS_MAX:
        raise BadSchema(f"the schema has {n_chars} characters, {SCHEMA_CHARS_MAX} at most are taken")
    grammar = Grammar()
    try:
        root = grammar.any_of([_framed(grammar, frame) for frame in frames])
        text = grammar.text(root)
    except BadGrammar as error:
        raise BadSchema(f"the schema cannot be used: {error}") from None
    except RecursionError:
        raise BadSchema("the schema is nested too deep") from None
    if _SURROGATE.search(text):
        raise BadSchema("the schema holds half of a surrogate pair")
    return text


def _framed(grammar: Grammar, frame: Framed) -> tuple[Item, ...]:
    where = f"{frame.of}: " if frame.of else ""
    try:
        parsed = json.loads(frame.schema)
    except (ValueError, RecursionError) as error:
        raise BadSchema(f"{where}the schema is not JSON: {error}") from None
    try:
        answer = _Converter(grammar, parsed).whole()
    except BadSchema as error:
        raise BadSchema(f"{where}{error}") from None
    return (Text(frame.before), answer, Text(frame.after))


class _Converter:
    def __init__(self, grammar: Grammar, document: Any) -> None:
        self.grammar = grammar
        self._document = document
        self._targets: dict[str, Any] = {}
        self._compared = Alternatives(self._followed)
        self._promised: dict[str, Rule] = {}
        self._to_keep: list[tuple[str, Rule]] = []
        self._strings: dict[tuple[int, int | None], Rule] = {}
        self._any: Rule | None = None
        self._formats_known: dict[str, tuple[Item, ...]] = {}
        self._n_pairs = 0
        self._n_properties = 0
        self._by_type: dict[str, Callable[[Mapping[str, Any], str, int], Rule]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda *_: self.grammar.any_of([[Text("true")], [Text("false")]]),
            "null": lambda *_: self.grammar.sequence(Text("null")),
        }

    def whole(self) -> Rule:
        root = self._rule(self._document, "#", 0)
        while self._to_keep:
            pointer, promised = self._to_keep.pop()
            self.grammar.keep(promised, [[self._rule(self._resolve(pointer), pointer, 0)]])
        return root

    def _rule(self, schema: Any, path: str, depth: int) -> Rule:
        """path: where it stands, as a JSON pointer."""
        if depth > DEPTH_MAX:
            raise BadSchema(f"{path}: schemas are nested deeper than {DEPTH_MAX}; use $defs and $ref")
        if schema is True:
            return self._anything()
        if schema is False:
            return self.grammar.any_of([])
        if not isinstance(schema, dict):
            raise BadSchema(f"{path}: a schema is an object, true or false")
        for keyword in COMBINED:
            if keyword in schema:
                return self._combined(keyword, schema, path, depth)
        return self._typed(schema, path, depth)

    def _typed(self, schema: Mapping[str, Any], path: str, depth: int) -> Rule:
        only(schema, {"type", *(word for words in OF_TYPE.values() for word in words)}, path)
        types = types_of(schema, path)
        if not types:
            return self._anything()
        return self.grammar.any_of([[self._by_type[name](schema, path, depth)] for name in types])

    def _combined(self, keyword: str, schema: Mapping[str, Any], path: str, depth: int) -> Rule:
        match keyword:
            case "$ref":
                only(schema, {"$ref"}, path)
                return self._reference(schema["$ref"], path)
            case "const" | "enum":
                only(schema, {"type", "const", "enum"}, path)
                return self._listed(schema, path)
            case "allOf":
                only(schema, {"allOf"}, path)
                parts = schemas_of(schema, keyword, path)
                if len(parts) != 1:
                    raise BadSchema(f"{path}/allOf: only one schema can be in it here; merge them into one")
                return self._rule(parts[0], f"{path}/allOf/0", depth + 1)
            case _:
                only(schema, {keyword}, path)
                return self._alternatives(keyword, schemas_of(schema, keyword, path), path, depth)

    def _alternatives(self, keyword: str, parts: Sequence[Any], path: str, depth: int) -> Rule:
        self._n_pairs += len(parts) ** 2
        if self._n_pairs > PAIRS_MAX:
            raise BadSchema(f"{path}/{keyword}: too many alternatives; use fewer")
        told = [self._followed(part) for part in parts]
        try:
            n_open = self._n_open(told)
            is_exclusive = keyword != "oneOf" or self._exclude_each_other(told)
        except TooMuchToCompare as error:
            raise BadSchema(f"{path}/{keyword}: {error}; use fewer or shorter ones") from None
        if not is_exclusive:
            raise BadSchema(
                f"{path}/oneOf: its schemas may overlap; use anyOf, or give each another type, or a required property "
                "with another const"
            )
        rule = self.grammar.any_of(
            [[self._rule(part, f"{path}/{keyword}/{index}", depth + 1)] for index, part in enumerate(parts)]
        )
        return self.grammar.fork(rule, n_open)

    def _exclude_each_other(self, schemas: Sequence[Any]) -> bool:
        return all(self._compared.are_apart(one, two) for one, two in itertools.combinations(schemas, 2))

    def _n_open(self, schemas: Sequence[Any]) -> int:
        """How many of them stay possible when a text has got to what is inside one."""
        late = [sum(one is not two and not self._compared.part_early(one, two) for two in schemas) for one in schemas]
        return 1 + max(late)

    def _reference(self, pointer: Any, path: str) -> Rule:
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            raise BadSchema(
                f"{path}/$ref: only references into the schema itself (#/...) are followed, nothing is fetched"
            )
        if pointer not in self._promised:
            self._resolve(pointer)
            self._promised[pointer] = self.grammar.promise()
            self._to_keep.append((pointer, self._promised[pointer]))
        return self._promised[pointer]

    def _resolve(self, pointer: str) -> Any:
        if pointer not in self._targets:
            self._targets[pointer] = self._pointed_to(pointer)
        return self._targets[pointer]

    def _pointed_to(self, pointer: str) -> Any:
        target = self._document
        for part in pointer.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isascii() and key.isdigit() and len(key) < 6 and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise BadSchema(f"$ref {pointer[:100]!r} points to nothing in the schema")
        if pointer.removeprefix("#")[:1] not in ("", "/"):
            raise BadSchema(f"$ref {pointer[:100]!r}: only paths (#/...) are followed, no anchors")
        return target

    def _listed(self, schema: Mapping[str, Any], path: str) -> Rule:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list) or not values:
            raise BadSchema(f"{path}/enum: a list of values is needed")
        if "const" in schema and "enum" in schema:
            raise BadSchema(f"{path}: const and enum beside each other; use one")
        types = types_of(schema, path)
        fitting = [value for value in values if not types or any(is_of_type(value, name) for name in types)]
        if not all(is_finite(value) for value in fitting):
            raise BadSchema(f"{path}: a number in it is too large")
        return self.grammar.one_of_texts(to_json(value) for value in fitting)

    def _followed(self, schema: Any) -> Any:
        for _ in range(DEPTH_MAX):
            if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
                break
            schema = self._resolve(schema["$ref"])
        return schema

    # ------------------------------------------------------------------------------------------------ the types

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> Rule:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, dict):
            raise BadSchema(f"{path}/properties: an object of schemas is needed")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise BadSchema(f"{path}/required: a list of names is needed")
        if not properties and not required:
            return self._map(others, f"{path}/additionalProperties", depth)
        named = {name: (each, f"{path}/properties/{name[:_NAME_SHOWN]}") for name, each in properties.items()}
        for name in required:
            named.setdefault(name, (others, f"{path}/additionalProperties"))
        self._n_properties += len(named)
        if self._n_properties > PROPERTIES_MAX:
            raise BadSchema(f"the schema has more than {PROPERTIES_MAX} properties in all; use fewer")
        needed, parts = set(required), []
        for name, (each, at) in named.items():
            if name in needed or each is not False:
                value = self._rule(each, at, depth + 1)
                parts.append((self.grammar.sequence(Text(to_json(name) + ":"), self._gap(), value), name in needed))
        return self.grammar.sequence(Text("{"), self._in_order(parts), Text("}"))

    def _in_order(self, parts: Sequence[tuple[Rule, bool]]) -> Rule:
        """The properties in their order, with commas between those that are there. parts: and whether it has to be."""
        behind, first = self.grammar.sequence(), self.grammar.sequence()
        for part, is_required in reversed(parts):
            choices: list[tuple[Item, ...]] = [(part, behind)]
            later: list[tuple[Item, ...]] = [(Text(","), self._gap(), part, behind)]
            if not is_required:
                choices.append((first,))
                later.append((behind,))
            first, behind = self.grammar.any_of(choices), self.grammar.any_of(later)
        return first

    def _map(self, values: Any, path: str, depth: int) -> Rule:
        if values is False:
            return self.grammar.sequence(Text("{}"))
        value = self._anything() if values is True else self._rule(values, path, depth + 1)
        pair = self.grammar.sequence(self._text(0, None), Text(":"), self._gap(), value)
        return self.grammar.sequence(Text("{"), self._list(pair, 0, None), Text("}"))

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> Rule:
        least, most = bounds_of(schema, "minItems", "maxItems", path)
        first = schema.get("prefixItems", [])
        items = schema.get("items", True)
        if not isinstance(first, list):
            raise BadSchema(f"{path}/prefixItems: a list of schemas is needed")
        if isinstance(items, list):
            raise BadSchema(f"{path}/items: a list of schemas is called prefixItems")
        if not first:
            if items is False:
                most = 0
            item = self._anything() if items is True or most == 0 else self._rule(items, f"{path}/items", depth + 1)
            return self.grammar.sequence(Text("["), self._list(item, least, most), Text("]"))
        n_first = len(first) if most is None else min(len(first), most)
        fixed = [self._rule(each, f"{path}/prefixItems/{i}", depth + 1) for i, each in enumerate(first[:n_first])]
        n_more = max(0, least - n_first)
        if n_more and items is False:
            raise BadSchema(f"{path}/minItems: more than prefixItems, and items allows no others")
        sequence: list[Item] = []
        for rule in fixed:
            sequence += [Text(","), self._gap(), rule] if sequence else [rule]
        if n_more or ("items" in schema and items is not False):
            item = self._rule(items, f"{path}/items", depth + 1)
            after = self.grammar.sequence(Text(","), self._gap(), item)
            if sequence:
                sequence.append(self.grammar.repeat(after, n_more, None if most is None else most - n_first))
        return self.grammar.sequence(Text("["), *sequence, Text("]"))

    def _list(self, item: Rule, least: int, most: int | None) -> Rule:
        """Items with commas between them."""
        if most == 0:
            return self.grammar.sequence() if least == 0 else self.grammar.any_of([])
        after = self.grammar.sequence(Text(","), self._gap(), item)
        rest = self.grammar.repeat(after, max(0, least - 1), None if most is None else most - 1)
        return self.grammar.sequence(item, rest) if least else self.grammar.optional(item, rest)

    def _string(self, schema: Mapping[str, Any], path: str, depth: int) -> Rule:
        least, most = bounds_of(schema, "minLength", "maxLength", path)
        ruled = [name for name in ("format", "pattern") if name in schema]
        if not ruled:
            return self._text(least, most)
        if len(ruled) > 1 or "minLength" in schema or "maxLength" in schema:
            raise BadSchema(f"{path}: {ruled[0]!r} beside others for the same text is not supported; use one")
        if "pattern" in schema:
            return self._pattern(schema["pattern"], path)
        form = schema["format"]
        self._formats_known = self._formats_known or formats.all_of(self.grammar)
        sequence = self._formats_known.get(form) if isinstance(form, str) else None
        if sequence is None:
            known = ", ".join(self._formats_known)
            raise BadSchema(f"{path}/format: {str(form)[:60]!r} is not supported; {known} are")
        return self.grammar.sequence(Text('"'), *sequence, Text('"'))

    def _pattern(self, pattern: Any, path: str) -> Rule:
        if not isinstance(pattern, str):
            raise BadSchema(f"{path}/pattern: a regular expression is needed")
        try:
            inside = patterns.text_of(self.grammar, pattern)
        except patterns.BadPattern as error:
            raise BadSchema(f"{path}/pattern: {error}") from None
        return self.grammar.sequence(Text('"'), inside, Text('"'))

    def _text(self, least: int, most: int | None) -> Rule:
        """A JSON string of so many characters: as themselves or escaped, no half of a surrogate pair."""
        if (least, most) not in self._strings:
            plain = chars(" !", "#[", "]\ud7ff", "\ue000\U0010ffff")
            short = Chars(tuple((char, char) for char in '"\\/bfnrt'))
            escaped = self.grammar.any_of([[_HEX_BUT_D, _HEX, _HEX, _HEX], [chars("d", "D"), chars("07"), _HEX, _HEX]])
            char = self.grammar.any_of([[plain], [Text("\\"), short], [Text("\\u"), escaped]])
            rule = self.grammar.sequence(Text('"'), self.grammar.repeat_character(char, least, most), Text('"'))
            self._strings[least, most] = rule
        return self._strings[least, most]

    def _integer(self, schema: Mapping[str, Any], path: str, depth: int) -> Rule:
        return self._numeral(schema, path, whole=True)

    def _number(self, schema: Mapping[str, Any], path: str, depth: int) -> Rule:
        return self._numeral(schema, path, whole=False)

    def _numeral(self, schema: Mapping[str, Any], path: str, *, whole: bool) -> Rule:
        try:
            limits = numerals.limits_of({word: schema[word] for word in OF_TYPE["number"] if word in schema})
        except ValueError as error:
            raise BadSchema(f"{path}: {error}") from None
        return numerals.integer(self.grammar, limits) if whole else numerals.number(self.grammar, limits)

    def _anything(self) -> Rule:
        """Any JSON value."""
        if self._any is None:
            self._any = self.grammar.promise()
            choices = [self._map(True, "", 0), self._by_type["array"]({}, "", 0), self._text(0, None)]
            choices += [self._by_type[name]({}, "", 0) for name in ("number", "boolean", "null")]
            self.grammar.keep(self._any, [[choice] for choice in choices])
        return self._any

    def _gap(self) -> Rule:
        return self.grammar.optional(_SPACE)
