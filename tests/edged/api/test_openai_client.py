"""The official client, unchanged, over both kinds of socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import openai
import pydantic
import pytest

from edged.records import Caller
from edged.refusal import Refused
from tests.edged.api.light_server import HANG_S, Light, serving_in_thread

USER: openai.types.chat.ChatCompletionUserMessageParam = {"role": "user", "content": "Hello"}


@contextmanager
def client_of(light: Light, kind: str, key: str = "any") -> Iterator[openai.OpenAI]:
    transport = httpx2.HTTPTransport(uds=str(light.socket) if kind == "unix" else None)
    base_url = "http://edged/v1" if kind == "unix" else f"{light.url}/v1"
    with (
        httpx2.Client(transport=transport, timeout=HANG_S) as http,
        openai.OpenAI(base_url=base_url, api_key=key, http_client=http, max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_it_chats_and_streams(tmp_path: Path, kind: str) -> None:
    with serving_in_thread(tmp_path) as light, client_of(light, kind) as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(model=model, messages=[USER], store=True, metadata={"a": "b"})
        with client.chat.completions.create(
            model="default", messages=[USER], stream=True, stream_options={"include_usage": True}, logprobs=True
        ) as stream:
            chunks = list(stream)

    assert whole.choices[0].message.content == "Hello there."
    assert whole.usage is not None
    assert whole.usage.total_tokens == 10
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "Hello there."
    assert chunks[-1].usage is not None


class Point(pydantic.BaseModel):
    x: int
    label: str


def test_it_parses_an_answer_in_a_form_and_calls_tools(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as light, client_of(light, "unix") as client:
        light.answers.words = ['{"x":', ' 3,"label":"é"}']
        parsed = client.chat.completions.parse(model="default", messages=[USER], response_format=Point)

        call = {"id": "call_1", "type": "function", "function": {"name": "Point", "arguments": '{"x":1,"label":""}'}}
        light.answers.words, light.answers.calls, light.answers.finish_reason = [], [call], "tool_calls"
        tools = [openai.pydantic_function_tool(Point)]
        with client.chat.completions.stream(
            model="default", messages=[USER], tools=tools, tool_choice="required"
        ) as stream:
            streamed = stream.get_final_completion()

    assert parsed.choices[0].message.parsed == Point(x=3, label="é")
    schema, tools_text = light.answers.asked[0].schema, light.answers.asked[1].tools
    assert schema is not None
    assert tools_text is not None
    assert json.loads(schema)["required"] == ["x", "label"]
    assert json.loads(tools_text)[0]["function"]["parameters"]["required"] == ["x", "label"]
    assert light.answers.asked[1].must_call == ("Point",)
    (called,) = streamed.choices[0].message.tool_calls or ()
    assert called.function.parsed_arguments == Point(x=1, label="")


def test_it_completes_text(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as light, client_of(light, "unix") as client:
        whole = client.completions.create(model="default", prompt="Say", logprobs=1)

    assert whole.choices[0].text == "Hello there."
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens == ["Hello", " there", "."]


def test_extra_body_carries_top_k(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as light, client_of(light, "unix") as client:
        client.chat.completions.create(model="default", messages=[USER], extra_body={"top_k": 40})

    assert light.answers.asked[0].top_k == 40


def test_it_sends_penalties_and_biases(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as light, client_of(light, "unix") as client:
        client.chat.completions.create(
            model="default", messages=[USER], frequency_penalty=0.5, presence_penalty=0.25, logit_bias={"7": -100}
        )

    asked = light.answers.asked[0]
    assert (asked.frequency_penalty, asked.presence_penalty, asked.logit_bias) == (0.5, 0.25, ((7, -100.0),))


def test_its_errors_are_of_the_right_class(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as light, client_of(light, "unix") as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="gpt-4o", messages=[USER])
        with pytest.raises(openai.BadRequestError) as unsupported:
            client.chat.completions.create(model="default", messages=[USER], reasoning_effort="high")
        light.answers.refuses = Refused(429, "too_many_requests", "full", retry_after_s=1)
        with pytest.raises(openai.RateLimitError) as full:
            client.chat.completions.create(model="default", messages=[USER])
        light.answers.refuses, light.answers.fails_after = None, 1
        stream = client.chat.completions.create(model="default", messages=[USER], stream=True)
        with pytest.raises(openai.APIError) as interrupted:
            list(stream)

    assert unknown.value.code == "model_not_found"
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", "reasoning_effort")
    assert full.value.response.headers["retry-after"] == "1"
    assert "the engine died" in str(interrupted.value)


def test_its_key_is_checked_once_there_are_keys(tmp_path: Path) -> None:
    async def make(light: Light) -> str:
        root = Caller(name="uid:0", scopes=frozenset())
        return (await light.keys.create("app", frozenset({"infer"}), caller=root))[1]

    with serving_in_thread(tmp_path) as light:
        secret = asyncio.run(make(light))
        with client_of(light, "tcp", secret) as client:
            assert client.models.list().data
        with client_of(light, "tcp", "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
