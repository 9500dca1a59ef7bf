"""Answers in a form and calls of tools, from the official client down to llama.cpp: a whole daemon on a tiny random
model, whose answers fit because they have to, and one short answer of the real one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest

from tests.engine.generate.chatter import write_chatter
from tests.engine.generate.tool_templates import HERMES

HANG_S = 300.0
USER: openai.types.chat.ChatCompletionUserMessageParam = {"role": "user", "content": "Go on."}


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dög"]
    lives: int = pydantic.Field(ge=0, le=9)
    name: str = pydantic.Field(max_length=5)


class Keep(pydantic.BaseModel):
    n: int


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, daemon_class: Any) -> Iterator[Callable[[Path], Any]]:
    """A daemon on a model file, which does not learn."""
    running: list[Any] = []

    def start_on(model: Path) -> Any:
        folder = tmp_path_factory.mktemp("state")
        settings = folder.parent / f"{folder.name}.toml"
        settings.write_text(
            f'[model]\npath = "{model}"\n[serve]\ncontext_tokens = 512\nslots = 4\n[learn]\nenabled = false\n'
        )
        command = [sys.executable, "-m", "edged", "run", "--config", str(settings), "--state-dir", str(folder)]
        daemon = daemon_class(command, folder, {}, ())
        running.append(daemon)
        return daemon.until_ready()

    yield start_on
    for daemon in running:
        daemon.end()


@pytest.fixture(scope="module")
def tiny(start: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start(write_chatter(tmp_path_factory.mktemp("chatter"), HERMES).file)


@pytest.fixture
def client(tiny: Any) -> Iterator[openai.OpenAI]:
    with (
        httpx2.Client(transport=httpx2.HTTPTransport(uds=str(tiny.state / "edged.sock")), timeout=HANG_S) as http,
        openai.OpenAI(base_url="http://edged/v1", api_key="unused", http_client=http, max_retries=0) as opened,
    ):
        yield opened


def test_an_answer_parses_and_its_rating_is_no_sample_of_the_policy(client: openai.OpenAI, tiny: Any) -> None:
    answer = client.chat.completions.parse(
        model="default", messages=[USER], response_format=Pet, max_tokens=100, n=3, temperature=1.3
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Pet)
    tiny.rate(answer.id, 1.0)
    episodes = tiny.client.get("/v1/episodes").json()["data"]
    assert [each["shaped_by"] for each in episodes if each["completion_id"] == answer.id] == [["response_format"]] * 3


def test_a_call_is_streamed_and_sent_back_with_its_result(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="default",
        messages=[USER],
        tools=[openai.pydantic_function_tool(Keep)],
        tool_choice="required",
        max_tokens=100,
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Keep)
    again = client.chat.completions.create(
        model="default",
        messages=[
            USER,
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": call.function.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "kept"},
        ],
        max_tokens=3,
    )
    assert again.choices[0].finish_reason in ("length", "stop")


UNHELD = {"not": {}}
UNHELD_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": UNHELD}}
UNHELD_TOOL = {"type": "function", "function": {"name": "f", "parameters": UNHELD}}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"response_format": UNHELD_FORM}, "bad_response_format"),
        ({"tool_choice": "required", "tools": [UNHELD_TOOL]}, "bad_tools"),
    ],
)
def test_what_cannot_be_held_is_a_bad_request(client: openai.OpenAI, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="default", messages=[USER], **fields)
    assert refused.value.code == code
    assert "'not' is not supported" in str(refused.value)


@pytest.mark.real_model
def test_the_real_model_answers_in_a_form_and_is_shown_no_tools(
    start: Callable[[Path], Any], packaged_model: Path
) -> None:
    daemon = start(packaged_model)
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = daemon.chat("What is the capital of France?", response_format=form, temperature=0, max_tokens=30)
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"city"}
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"model": "default", "messages": [USER], "tools": tools, "max_tokens": 4}
    refused = daemon.client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "tools_not_supported")
    assert daemon.client.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).status_code == 200
