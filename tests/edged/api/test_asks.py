from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.api.asks import ChatRequest, TextRequest
from edged.records import Caller
from edged.refusal import Refused
from edged.serve import translation
from engine import protocol

CALLER = Caller(name="uid:1", scopes=frozenset())
USER: dict[str, Any] = {"role": "user", "content": "Hello"}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.of_json(json.dumps({"messages": [USER], **fields}).encode())


def refusal(**fields: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value


def test_a_bare_chat_has_openais_defaults() -> None:
    ask = chat().ask("chatcmpl-1", CALLER)

    assert (ask.n, ask.temperature, ask.top_p, ask.top_k) == (1, 1.0, 1.0, 0)
    assert (ask.seed, ask.max_tokens, ask.stop, ask.logprobs, ask.top_logprobs) == (None, None, (), False, 0)
    assert ask.messages == [USER]
    assert ask.prompt is None


def test_a_request_may_say_how_long_it_waits_for_a_slot() -> None:
    assert chat().ask("chatcmpl-1", CALLER).queue_timeout_s is None
    assert chat(queue_timeout_s=2.5).ask("chatcmpl-1", CALLER).queue_timeout_s == 2.5
    text = TextRequest.of_json(b'{"prompt": "a", "queue_timeout_s": 3}')
    assert text.ask("cmpl-1", CALLER).queue_timeout_s == 3
    assert refusal(queue_timeout_s=0).param == "queue_timeout_s"


def test_null_means_the_field_is_left_out() -> None:
    assert chat(temperature=None, stop=None, n=None, stream_options=None, tools=None, metadata=None) == chat()


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]

    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "Hello"


def test_an_answer_can_be_sent_back_as_the_client_got_it() -> None:
    earlier: dict[str, Any] = {
        "role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None,
    }  # fmt: skip

    assert chat(messages=[USER, earlier, USER]).messages[1].plain() == {"role": "assistant", "content": "Hi"}


def test_a_developer_speaks_as_the_system() -> None:
    assert chat(messages=[{"role": "developer", "content": "Be brief"}]).messages[0].plain()["role"] == "system"


def test_max_completion_tokens_is_the_newer_name_of_max_tokens() -> None:
    assert chat(max_completion_tokens=5).ask("x", CALLER).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).ask("x", CALLER).max_tokens == 5
    assert refusal(max_tokens=4, max_completion_tokens=5).param == "max_tokens"


def test_stop_is_one_string_or_up_to_four() -> None:
    assert chat(stop="\n").ask("x", CALLER).stop == ("\n",)
    assert chat(stop=["a", "b"]).ask("x", CALLER).stop == ("a", "b")
    assert refusal(stop=list("abcde")).param == "stop"
    assert refusal(stop=[""]).param == "stop[0]"


@pytest.mark.parametrize(
    ("field", "neutral", "wanted"),
    [
        ("modalities", ["text"], ["text", "audio"]),
        ("reasoning_effort", "none", "high"),
    ],
)
def test_what_is_missing_here_is_taken_only_with_the_value_that_means_without(
    field: str, neutral: Any, wanted: Any
) -> None:
    assert chat(**{field: neutral}).ask("x", CALLER) == chat().ask("x", CALLER)
    refused = refusal(**{field: wanted})
    assert (refused.code, refused.param) == ("unsupported_parameter", field)


POINT = {"type": "object", "properties": {"b": {"const": None}, "a": {"minimum": 10**30}}, "title": "é"}


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}, POINT),
        ({"type": "json_schema", "json_schema": {"name": "anything"}}, {}),
    ],
)
def test_a_response_format_is_the_schema_that_the_answer_is_held_to(response_format: Any, schema: Any) -> None:
    ask = chat(response_format=response_format).ask("x", CALLER)
    assert (None if ask.schema is None else json.loads(ask.schema)) == schema
    assert ask.shaped_by == ("" if schema is None else "response_format")
    if isinstance(schema, dict) and ask.schema is not None:
        assert list(json.loads(ask.schema)) == list(schema)  # properties come in the order of the schema


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ({"type": "image"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format"),
        ({"type": "text", "json_schema": {"name": "a", "schema": {}}}, "response_format"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": []}}, "response_format.json_schema.schema"),
        ("json", "response_format"),
    ],
)
def test_a_response_format_that_is_none_is_refused_with_its_place(response_format: Any, param: str) -> None:
    assert refusal(response_format=response_format).param == param


LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
GO: dict[str, Any] = {"type": "function", "function": {"name": "go", "description": "Go.", "strict": True}}
CHOSEN = {"type": "function", "function": {"name": "go"}}
SENT_BACK = {"id": "a", "function": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    ("fields", "tools", "must_call"),
    [
        ({"tools": []}, None, ()),
        ({"tools": [LOOK, GO]}, ["look", "go"], ()),
        ({"tools": [LOOK, GO], "tool_choice": "auto"}, ["look", "go"], ()),
        ({"tools": [LOOK, GO], "tool_choice": "none"}, None, ()),
        ({"tools": [LOOK, GO], "tool_choice": "required"}, ["look", "go"], ("look", "go")),
        (
            {"tools": [LOOK, GO], "tool_choice": {"type": "function", "function": {"name": "go"}}},
            ["look", "go"],
            ("go",),
        ),
    ],
)
def test_tools_are_offered_and_calls_are_asked_for(
    fields: Any, tools: list[str] | None, must_call: tuple[str, ...]
) -> None:
    ask = chat(**fields).ask("x", CALLER)
    offered = None if ask.tools is None else json.loads(ask.tools)
    assert (None if offered is None else [tool["function"]["name"] for tool in offered]) == tools
    assert ask.must_call == must_call
    assert ask.shaped_by == ("tool_choice" if must_call else "")
    if offered is not None:
        assert offered[0] == LOOK
        assert offered[1]["function"] == {"name": "go", "description": "Go."}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [LOOK, LOOK]}, "tools"),
        ({"tools": [LOOK] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": CHOSEN}, "tool_choice"),
        ({"tools": [LOOK], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": ""}}]}]},
            "messages[0]",
        ),
    ],
)
def test_mistakes_about_tools_are_refused_with_their_place(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


def test_calls_and_their_results_are_sent_back_as_they_came() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    ask = chat(
        messages=[
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "content": [{"type": "text", "text": "blue"}], "tool_call_id": "call_1"},
        ]
    ).ask("x", CALLER)
    assert ask.messages == [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "blue", "tool_call_id": "call_1"},
    ]
    turns = translation.generate(ask, 10).messages
    assert turns is not None
    assert turns[1].tool_calls == (protocol.ToolCall(id="call_1", name="look", arguments='{"at": "x"}'),)
    assert turns[2].tool_call_id == "call_1"


def test_what_shapes_the_distribution_reaches_the_engine_and_is_named_in_the_record() -> None:
    shaped = chat(
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=-1,
        logit_bias={"7": -100, "2": 3, "5": 0},
    ).ask("x", CALLER)
    assert (shaped.min_p, shaped.repetition_penalty) == (0.1, 1.1)
    assert (shaped.frequency_penalty, shaped.presence_penalty) == (0.5, -1.0)
    assert shaped.logit_bias == ((2, 3.0), (7, -100.0))
    assert shaped.shaped_by == "min_p repetition_penalty frequency_penalty presence_penalty logit_bias"


@pytest.mark.parametrize(
    "neutral",
    [
        {"frequency_penalty": 0},
        {"presence_penalty": 0.0},
        {"logit_bias": {}},
        {"logit_bias": {"7": 0}},
        {"min_p": 0},
        {"repetition_penalty": 1.0},
    ],
)
def test_values_that_shape_nothing_leave_a_plain_sample(neutral: dict[str, Any]) -> None:
    assert chat(**neutral).ask("x", CALLER) == chat().ask("x", CALLER)
    assert chat(**neutral).ask("x", CALLER).shaped_by == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7"),
        ({"logit_bias": {"cat": 1}}, "logit_bias.cat"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ],
)
def test_shapes_beyond_their_bounds_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temprature": 1}, "unknown_parameter", "temprature"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": True}, "invalid_type", "temperature"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 1.5}, "invalid_type", "n"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "invalid_value", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "unsupported_parameter",
            "messages[0].content",
        ),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"metadata": {"k" * 65: "v"}}, "invalid_value", "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "invalid_value", "metadata"),
        ({"metadata": {"k": "v" * 513}}, "invalid_value", "metadata.k"),
    ],
)
def test_a_mistake_is_named_by_its_field(fields: dict[str, Any], code: str, param: str) -> None:
    refused = refusal(**fields)

    assert refused.code == code
    assert refused.param is not None
    assert refused.param.startswith(param)
    assert len(refused.message) < 300


def test_a_prompt_is_one_text() -> None:
    def text(prompt: Any) -> TextRequest:
        return TextRequest.of_json(json.dumps({"prompt": prompt}).encode())

    assert text("Once").ask("cmpl-1", CALLER).prompt == "Once"
    assert text(["Once"]).ask("cmpl-1", CALLER).prompt == "Once"
    for several in (["a", "b"], [1, 2, 3], [[1, 2]], []):
        with pytest.raises(Refused) as caught:
            text(several)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "prompt")


def test_the_older_logprobs_counts_alternatives() -> None:
    ask = TextRequest.of_json(b'{"prompt": "Once", "logprobs": 0}').ask("cmpl-1", CALLER)

    assert (ask.logprobs, ask.top_logprobs) == (True, 0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*ChatRequest.model_fields, "other"]), json_values, max_size=6))
def test_any_json_object_is_parsed_or_refused_with_400(fields: dict[str, Any]) -> None:
    data = json.dumps({"messages": [USER], **fields}).encode("utf-8", "surrogatepass")
    try:
        ChatRequest.of_json(data).ask("x", CALLER)
        status = 400
    except Refused as refused:
        status = refused.status

    assert status == 400


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused_with_400(data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        ChatRequest.of_json(data)
    assert caught.value.status == 400
