"""Answers held to a grammar by llama.cpp, token by token, on a byte-level vocabulary."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generate import constraint as module
from engine.generate.constraint import Constraint, Constraints
from engine.generate.keywords import BadSchema
from engine.generate.llamacpp import Model
from engine.generate.patterns import PLACES_MAX
from engine.generate.sampling import ConstraintFailed
from engine.generate.schema import grammar_of
from tests.engine.generate.chatter import Chatter, write_chatter
from tests.engine.generate.json_schemas import RECURSIVE, Drawn, fits, schemas


@pytest.fixture(scope="module")
def chatter(tmp_path_factory: pytest.TempPathFactory) -> Chatter:
    return write_chatter(tmp_path_factory.mktemp("chatter"))


@pytest.fixture(scope="module")
def model(chatter: Chatter) -> Model:
    return Model(str(chatter.file), gpu_layers=0)


@pytest.fixture(scope="module")
def constraints(model: Model) -> Constraints:
    return Constraints(model)


def begin(constraints: Constraints, schema: Any) -> Constraint:
    (held,) = constraints.begin(grammar_of(json.dumps(schema)))
    return held


def takes(constraint: Constraint, model: Model, text: str) -> bool:
    """Whether all of `text` fits and may end there."""
    for token in model.tokenise(text, add_special=False, parse_special=False):
        if not constraint.allows(token):
            return False
        constraint.take(token)
    return all(constraint.allows(token) for token in model.eos_ids)


@pytest.mark.parametrize(
    ("schema", "fitting", "failing"),
    [
        ({"type": "object"}, ["{}", '{"a":[1, {"b":null}]}'], ["[]", '{"a"}', "{} ", ""]),
        ({"enum": ["red", "green", 'q"é']}, ['"red"', '"q\\"é"'], ['"re"', '"blue"', "red"]),
        (RECURSIVE, ['{"name":"é","children":[{"name":"b", "children":[]}]}'], ['{"name":"","children":[]}']),
        ({"type": "integer", "maximum": 12}, ["-7", "12", "0"], ["13", "007", "1.5"]),
        ({"properties": {"a": {}, "b": {}}}, ['{"b":1}', '{"a":1,"b":[]}', "{}"], ['{"b":1,"a":1}', '{"c":1}']),
        ({"type": "string", "pattern": r'^[a-c"]{2,3}(?:-x|\d+)?$'}, ['"ab"', '"b\\"c-x"', '"aa12"'], ['"a"', '"ab-"']),
        ({"type": "string"}, ['"\\u00e9 \\n"', '"😀"'], ['"\n"', '"\\ud800"', '"\\x"']),
        ({"prefixItems": [{"type": "integer"}], "items": {"type": "null"}}, ["[1]", "[1, null]"], ["[]", "[1,2]"]),
    ],
)
def test_a_text_that_fits_is_taken_and_no_other(
    constraints: Constraints, model: Model, schema: Any, fitting: list[str], failing: list[str]
) -> None:
    for text in fitting:
        assert takes(begin(constraints, schema), model, text), text
    for text in failing:
        assert not takes(begin(constraints, schema), model, text), text


@settings(max_examples=30)
@given(schemas, st.integers(0, 2**32))
def test_llama_cpp_takes_what_is_drawn_from_the_grammar(
    constraints: Constraints, model: Model, schema: Any, seed: int
) -> None:
    try:
        grammar = grammar_of(json.dumps(schema))
    except BadSchema:
        return
    (held,) = constraints.begin(grammar)
    assert takes(held, model, Drawn(grammar).text(random.Random(seed), steps=60))


@settings(max_examples=20)
@given(schemas, st.integers(0, 2**32))
def test_every_token_that_is_allowed_leads_to_valid_json(
    constraints: Constraints, model: Model, schema: Any, seed: int
) -> None:
    try:
        held = begin(constraints, schema)
    except BadSchema:
        return
    source, data = random.Random(seed), b""
    for _ in range(150):
        allowed = held.allowed().tolist()
        ends = [token for token in allowed if token in model.eos_ids]
        if ends and source.random() < 0.7:
            break
        # Whatever closes is preferred, or random bytes would never leave a text.
        closing = [token for token in allowed if model.piece(token) in (b'"', b"]", b"}", b"0")]
        token = source.choice(closing if closing and source.random() < 0.4 else allowed)
        if token in model.eos_ids:
            break
        assert held.allows(token)
        held.take(token)
        data += model.piece(token)
    else:
        return
    assert fits(json.loads(data.decode()), schema), data


def test_trying_first_bytes_finds_the_same_tokens_as_trying_all(constraints: Constraints, model: Model) -> None:
    for text in (b"", b"{", b'{"', b'{"a', b'{"\xc3', b'{"\xe0', b'{"a\\', b'{"a":', b'{"a":1', b'{"a":1}'):
        held = begin(constraints, {"type": "object"})
        for byte in text:
            held.take(byte_token(model, byte))
        assert sorted(held.allowed()) == [token for token in range(model.n_vocab) if held.allows(token)], text


def byte_token(model: Model, byte: int) -> int:
    return next(token for token in range(model.n_vocab) if model.piece(token) == bytes([byte]))


def test_a_character_in_two_tokens_is_whole_or_not_begun(constraints: Constraints, model: Model) -> None:
    held = begin(constraints, {"enum": ["é"]})
    held.take(byte_token(model, ord('"')))
    first, second = "é".encode()
    assert not held.allows(byte_token(model, 0xC2))
    held.take(byte_token(model, first))
    assert held.allowed().tolist() == [byte_token(model, second)]


def test_a_control_token_never_fits_and_an_end_only_where_the_answer_is_complete(
    constraints: Constraints, model: Model, chatter: Chatter
) -> None:
    held = begin(constraints, {"type": "string"})
    start = chatter.end - 1
    assert model.piece(start) == b""
    held.take(byte_token(model, ord('"')))
    assert not held.allows(start)
    assert not any(held.allows(token) for token in model.eos_ids)
    held.take(byte_token(model, ord('"')))
    assert sorted(held.allowed()) == sorted(model.eos_ids)
    held.take(chatter.end)


def test_a_token_that_does_not_fit_is_refused_before_llama_cpp_sees_it(constraints: Constraints, model: Model) -> None:
    held = begin(constraints, {"type": "null"})
    with pytest.raises(ConstraintFailed, match="does not fit"):
        held.take(byte_token(model, ord("x")))
    held.take(byte_token(model, ord("n")))


def test_constraints_of_the_same_grammar_go_their_own_ways(constraints: Constraints, model: Model) -> None:
    one, other = (begin(constraints, {"type": "boolean"}) for _ in range(2))
    one.take(byte_token(model, ord("t")))
    assert other.allows(byte_token(model, ord("f")))
    assert not one.allows(byte_token(model, ord("f")))


def test_an_answer_whose_grammar_takes_too_long_is_given_up(
    constraints: Constraints, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = begin(constraints, {"type": "string"})
    clock = iter((0.0, module.ALLOWANCE_S / 2, 0.0, module.ALLOWANCE_S))
    monkeypatch.setattr(module.time, "thread_time", lambda: next(clock))
    assert held.allows(byte_token(model, ord('"')))
    with pytest.raises(ConstraintFailed, match=r"took 1\.5 s for 0 tokens"):
        held.allows(byte_token(model, ord('"')))


def test_choices_that_take_too_long_to_begin_are_refused(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = grammar_of('{"type":"string"}')
    clock = iter((0.0, module.BEGIN_S / 2, module.BEGIN_S * 2))
    monkeypatch.setattr(module.time, "thread_time", lambda: next(clock))
    with pytest.raises(ConstraintFailed, match="2 of 9 choices took longer"):
        constraints.begin(grammar, 9)


def test_a_grammar_that_llama_cpp_does_not_take_is_refused(constraints: Constraints) -> None:
    with pytest.raises(ConstraintFailed, match="does not take"):
        constraints.begin('root ::= "a')


def test_a_grammar_outlives_the_requests_that_it_was_compiled_for(model: Model, tmp_path: Path) -> None:
    constraints = Constraints(model)
    held = begin(constraints, {"const": 0})
    for number in range(module.KEPT + 2):
        begin(constraints, {"const": number + 1})
    assert takes(held, model, "0")
    assert takes(begin(constraints, {"const": 0}), model, "0")


def most_ways(grammar: str, n_chars: int) -> int:
    """The most stacks that llama.cpp's way of matching has at once while it reads so many characters that fit all."""
    rules = Drawn(grammar).rules

    def opened(stacks: set[Any]) -> set[Any]:
        """Those that begin with characters; a stack is its first item and those behind it."""
        todo, seen, found = list(stacks), set(stacks), set()
        while todo:
            stack = todo.pop()
            if stack is None or stack[0][0] in '"[':
                found.add(stack)
                continue
            for choice in rules[stack[0]]:
                longer = stack[1]
                for item in reversed(choice):
                    longer = longer if item == '""' else (item, longer)
                if longer not in seen:
                    seen.add(longer)
                    todo.append(longer)
        return found

    (quote,) = opened({("root", None)})
    stacks, most = opened({quote[1]}), 0
    for _ in range(n_chars):
        stacks = opened({stack[1] for stack in stacks if stack is not None and stack[0][0] == "["})
        most = max(most, len(stacks))
    return most


@pytest.mark.parametrize("levels", [2, 3, 7])
def test_counts_inside_counts_leave_few_ways_open_or_do_not_reach_llama_cpp(
    constraints: Constraints, model: Model, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def schema(most: int) -> Any:
        pattern = f".{{1,{most}}}"
        for _ in range(levels - 1):
            pattern = f"(?:{pattern}){{1,{most}}}"
        return {"type": "string", "pattern": f"^{pattern}$"}

    most = max(n for n in range(2, 12) if n**levels <= PLACES_MAX)
    assert 16 < most_ways(grammar_of(json.dumps(schema(most))), 40) <= 4 * PLACES_MAX
    monkeypatch.setattr(module.time, "thread_time", lambda: 0.0)
    assert takes(begin(constraints, schema(most)), model, '"' + "a" * 40 + '"')
    with pytest.raises(BadSchema, match="#/pattern: counts inside counts"):
        begin(constraints, schema(most + 1))
