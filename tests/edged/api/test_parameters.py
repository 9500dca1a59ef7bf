"""The table of parameters against the official client, the parser and the documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from edged.api.asks import ChatRequest, TextRequest
from edged.api.parameters import PARAMETERS, Parameter
from edged.records import Caller
from edged.refusal import Refused

CALLER = Caller(name="uid:1", scopes=frozenset())
DOCUMENT = Path(__file__).parents[3] / "docs" / "api.md"
DOCUMENTED = {
    "chat": {*chat_params.CompletionCreateParamsBase.__annotations__, "stream"},
    "text": {*text_params.CompletionCreateParamsBase.__annotations__, "stream"},
}
BARE: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
    "text": {"prompt": "Hello"},
}
# A value that asks for something, of a field that is taken only where it asks for nothing.
WANTED: dict[str, Any] = {
    "audio": {"voice": "ash", "format": "wav"},
    "best_of": 3,
    "echo": True,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "reasoning_effort": "high",
    "suffix": "the end",
    "verbosity": "low",
    "web_search_options": {},
}


def rows_of(route: str) -> dict[str, Parameter]:
    return {row.name: row for row in PARAMETERS if row.routes in (route, "both")}


def parse(route: str, **fields: Any) -> ChatRequest | TextRequest:
    model = ChatRequest if route == "chat" else TextRequest
    return model.of_json(json.dumps({**BARE[route], **fields}).encode())


def test_no_field_has_two_rows() -> None:
    assert len({row.name for row in PARAMETERS}) == len(PARAMETERS)


@pytest.mark.parametrize("route", ["chat", "text"])
def test_every_field_that_the_official_client_knows_is_decided(route: str) -> None:
    assert DOCUMENTED[route] - set(rows_of(route)) == set()


@pytest.mark.parametrize("route", ["chat", "text"])
def test_every_row_is_a_field_that_the_parser_knows(route: str) -> None:
    fields = (ChatRequest if route == "chat" else TextRequest).model_fields
    assert {row.name for row in rows_of(route).values() if row.decision != "idle"} - set(fields) == set()


@pytest.mark.parametrize("row", [row for row in PARAMETERS if row.decision == "without"], ids=lambda row: row.name)
def test_what_is_missing_here_is_refused_by_its_name(row: Parameter) -> None:
    with pytest.raises(Refused) as caught:
        parse("text" if row.routes == "text" else "chat", **{row.name: WANTED[row.name]})
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
    assert caught.value.param == row.name


@pytest.mark.parametrize("value", ["auto", True, {"mode": "explicit"}])
@pytest.mark.parametrize("row", [row for row in PARAMETERS if row.decision == "idle"], ids=lambda row: row.name)
def test_what_cannot_change_the_answer_has_no_effect(row: Parameter, value: Any) -> None:
    assert parse("chat", **{row.name: value}) == parse("chat")


def test_the_newer_name_of_a_user_stands_where_the_older_is_left_out() -> None:
    assert parse("chat", safety_identifier="ann").ask("x", CALLER).user == "ann"
    assert parse("chat", safety_identifier="ann", user="bob").ask("x", CALLER).user == "bob"


def test_as_many_answers_as_are_shown_may_be_made() -> None:
    assert parse("text", n=3, best_of=3).ask("x", CALLER).n == 3


def test_store_and_metadata_reach_the_answer() -> None:
    ask = parse("chat", store=True, metadata={"a": "b"}).ask("x", CALLER)

    assert (ask.store, ask.metadata) == (True, {"a": "b"})
    assert not parse("chat").ask("x", CALLER).store
    with pytest.raises(Refused) as caught:
        parse("text", store=True)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "store")


def test_an_answer_that_is_not_there_yet_cannot_be_rated() -> None:
    with pytest.raises(Refused) as caught:
        parse("chat", metadata={"edged.rating": "up"})
    assert (caught.value.status, caught.value.param) == (400, "metadata.edged.rating")


def test_the_document_shows_the_table() -> None:
    table = [
        f"| `{row.name}` | {row.routes} | {row.decision} | {row.note} |".replace("|  |", "| |") for row in PARAMETERS
    ]
    shown = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `") and line.count("|") == 5]
    assert shown == table, "\n".join(table)
