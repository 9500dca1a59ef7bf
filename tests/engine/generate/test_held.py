"""Answers of a serve worker that are held to a schema: a random model says what fits, or is cut, or is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine import protocol
from engine.generate import worker
from tests.engine.generate.chatter import Chatter, write_chatter
from tests.engine.generate.desk import Desk, chat, of, start_serve
from tests.engine.generate.json_schemas import fits

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -9, "maximum": 99},
        "label": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["é", "b"]},
    },
    "required": ["x", "label", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def chatter(tmp_path_factory: pytest.TempPathFactory) -> Chatter:
    return write_chatter(tmp_path_factory.mktemp("chatter"))


@pytest.fixture(scope="module")
def desk(chatter: Chatter) -> Iterator[Desk]:
    opened = Desk(worker.run, start_serve(str(chatter.file)))
    yield opened
    opened.stop()


def held(schema: Any, **sampling: Any) -> protocol.Generate:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return dataclasses.replace(chat(**{"max_tokens": 100, **sampling}), schema=text)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.7, "top_p": 0.5},
        {"temperature": 1.0, "top_k": 2, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.5, "logit_bias": ((ord("{") - 33, -50.0),)},
    ],
)
def test_whatever_the_settings_the_answer_validates(desk: Desk, sampling: dict[str, Any]) -> None:
    said = desk.ask(held(POINT, n=4, **sampling))
    done = of(said, protocol.ChoiceDone)
    assert len(done) == 4
    for choice in done:
        assert choice.finish_reason == "stop"
        assert fits(json.loads(choice.text), POINT), choice.text
        assert "".join(chunk.text for chunk in of(said, protocol.Chunk) if chunk.choice == choice.choice) == choice.text
    if sampling["temperature"] == 0.0:
        assert len({choice.completion_ids for choice in done}) == 1
    else:
        assert len({choice.text for choice in done}) > 1


def test_what_a_token_would_have_weighed_among_those_that_fit_is_unknown(desk: Desk) -> None:
    done = desk.answer(held(POINT))
    assert set(done.logprobs) == {None}
    assert all(isinstance(value, float) for value in done.raw_logprobs)
    assert len(done.logprobs) == len(done.raw_logprobs) == len(done.completion_ids)


def test_the_same_seed_gives_the_same_answer(desk: Desk) -> None:
    assert desk.answer(held(POINT, seed=8)).completion_ids == desk.answer(held(POINT, seed=8)).completion_ids


def test_an_answer_that_does_not_come_to_its_end_is_cut(desk: Desk) -> None:
    done = desk.answer(held({"type": "array", "minItems": 50}, max_tokens=9))
    assert (done.finish_reason, len(done.completion_ids)) == ("length", 9)
    assert done.text.startswith("[")


def test_a_stop_string_ends_the_answer_before_its_schema_does(desk: Desk) -> None:
    done = desk.answer(held({"const": {"a": "stop here"}}, stop=(" here",)))
    assert (done.finish_reason, done.text) == ("stop", '{"a":"stop')


def test_token_texts_are_reported_as_without_a_schema(desk: Desk) -> None:
    said = desk.ask(held({"const": "é"}, logprobs=True, top_logprobs=2))
    tokens = [token for chunk in of(said, protocol.Chunk) for token in chunk.tokens]
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == '"é"'
    assert all(len(token.top) == 2 for token in tokens)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "string", "pattern": "(?=a)"}, "#/pattern: groups that begin with (?"),
        ("[" * 40_000, "not JSON"),
        ({"$ref": "https://example.org/"}, "nothing is fetched"),
        ({"anyOf": [{"type": "array", "items": {"$ref": "#"}, "maxItems": n} for n in range(2, 40)]}, "stay possible"),
    ],
)
def test_what_cannot_be_held_is_refused_and_others_are_answered(desk: Desk, schema: Any, told: str) -> None:
    other = chat(max_tokens=5)
    desk.send(other)
    refused = held(schema)
    desk.send(refused)
    said = desk.collect(other.request_id, refused.request_id)
    (failed,) = said[refused.request_id]
    assert isinstance(failed, protocol.RequestFailed)
    assert failed.code == "bad_response_format"
    assert told in failed.message
    assert isinstance(said[other.request_id][-1], protocol.RequestDone)


def test_answers_with_and_without_a_schema_run_side_by_side(desk: Desk) -> None:
    alone = desk.answer(chat(max_tokens=20, seed=3)).completion_ids
    free, bound = chat(max_tokens=20, seed=3), held(POINT)
    desk.send(bound)
    desk.send(free)
    said = desk.collect(free.request_id, bound.request_id)
    assert of(said[free.request_id], protocol.ChoiceDone)[0].completion_ids == alone
    assert fits(json.loads(of(said[bound.request_id], protocol.ChoiceDone)[0].text), POINT)


def test_a_cancelled_answer_leaves_its_beginning(desk: Desk) -> None:
    request = held({"type": "string", "minLength": 5000}, max_tokens=400)
    desk.send(request)
    desk.expect(protocol.Chunk, protocol.Begun)
    desk.send(protocol.Cancel(request_id=request.request_id))
    done = of(desk.collect(request.request_id)[request.request_id], protocol.ChoiceDone)
    assert [choice.finish_reason for choice in done] == ["cancelled"]
