from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from edged.refusal import Refused
from tests.edged.api.light_server import HANG_S, HELLO, Light, serving


async def frames(light: Light, **body: Any) -> list[Any]:
    """The data of every server-sent event of a streamed answer."""
    path = body.pop("path", "/v1/chat/completions")
    async with light.unix.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = (await answer.aread()).decode()
    parts = text.split("\n\n")
    assert parts.pop() == ""
    return [part if part == "data: [DONE]" else json.loads(part.removeprefix("data: ")) for part in parts]


async def until(condition: Any) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_an_answer_has_openais_shape(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            answer = await light.unix.post("/v1/chat/completions", json=HELLO)

        body = answer.json()
        assert answer.headers["x-edged-adapter-version"] == "0"
        assert body["id"].startswith("chatcmpl-")
        assert len(body["id"]) == len("chatcmpl-") + 24
        assert body | {"id": ""} == {
            "id": "",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": "smollm2-135m",
            "system_fingerprint": "edged-0badcafe-v0",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello there.", "refusal": None, "annotations": []},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": 7,
                "completion_tokens": 3,
                "total_tokens": 10,
                "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 0},
            },
        }

    asyncio.run(run())


def test_a_stream_is_role_then_text_then_reason_then_done(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            *chunks, done = await frames(light, **HELLO)

        assert done == "data: [DONE]"
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
        assert [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks] == [
            ({"role": "assistant", "content": "", "refusal": None}, None),
            ({"content": "Hello"}, None),
            ({"content": " there"}, None),
            ({"content": "."}, None),
            ({}, "stop"),
        ]

    asyncio.run(run())


def test_usage_comes_last_and_is_null_before(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            *chunks, usage, _ = await frames(light, **HELLO, stream_options={"include_usage": True})

        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == 10

    asyncio.run(run())


def test_every_choice_has_its_own_role_and_reason(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            *chunks, _ = await frames(light, **HELLO, n=2)
            whole = await light.ask(n=2)

        choices = [chunk["choices"][0] for chunk in chunks]
        for index in (0, 1):
            mine = [choice for choice in choices if choice["index"] == index]
            assert mine[0]["delta"]["role"] == "assistant"
            assert mine[-1]["finish_reason"] == "stop"
        assert [choice["index"] for choice in whole["choices"]] == [0, 1]

    asyncio.run(run())


def test_logprobs_of_a_chat_are_shown_token_by_token(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            whole = await light.ask(logprobs=True, top_logprobs=1)
            chunks = await frames(light, **HELLO, logprobs=True)

        tokens = whole["choices"][0]["logprobs"]["content"]
        assert [token["token"] for token in tokens] == ["Hello", " there", "."]
        assert tokens[0]["top_logprobs"][0]["bytes"] == list(b"Hello")
        assert chunks[1]["choices"][0]["logprobs"]["content"][0]["token"] == "Hello"

    asyncio.run(run())


CALLS = [
    {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    for number in range(2)
]


@pytest.mark.parametrize("words", [[], ["I look."]])
def test_calls_of_tools_are_part_of_the_message(tmp_path: Path, words: list[str]) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.answers.words, light.answers.calls, light.answers.finish_reason = words, CALLS, "tool_calls"
            (choice,) = (await light.ask())["choices"]
            assert choice["message"]["content"] == ("".join(words) or None)
            assert choice["message"]["tool_calls"] == CALLS
            assert choice["finish_reason"] == "tool_calls"

            chunks = (await frames(light, **HELLO, n=2))[:-1]
            for index in range(2):
                own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
                assert "".join(each["delta"].get("content") or "" for each in own) == "".join(words)
                called = [call for each in own for call in each["delta"].get("tool_calls", ())]
                assert called == [{"index": number, **call} for number, call in enumerate(CALLS)]
                assert own[-1]["finish_reason"] == "tool_calls"

    asyncio.run(run())


def test_a_text_completion_has_its_older_shape(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            answer = await light.unix.post("/v1/completions", json={"prompt": "Say", "logprobs": 1})
            *chunks, done = await frames(light, path="/v1/completions", prompt="Say", logprobs=1)

        body = answer.json()
        assert body["id"].startswith("cmpl-")
        assert body["object"] == "text_completion"
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("Hello there.", "stop")
        assert choice["logprobs"]["tokens"] == ["Hello", " there", "."]
        assert choice["logprobs"]["text_offset"] == [0, 5, 11]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello there."
        assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:-1]] == [[0], [5], [11]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert done == "data: [DONE]"

    asyncio.run(run())


def test_the_model_is_the_one_that_is_listed_or_default(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            listed = (await light.unix.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["smollm2-135m"]
            assert (await light.unix.get("/v1/models/smollm2-135m")).status_code == 200
            assert (await light.ask(model="smollm2-135m"))["model"] == "smollm2-135m"
            for answer in (
                await light.unix.post("/v1/chat/completions", json={**HELLO, "model": "gpt-4o"}),
                await light.unix.get("/v1/models/org/other"),
            ):
                assert answer.status_code == 404
                assert answer.json()["error"]["code"] == "model_not_found"
            assert [ask.messages for ask in light.answers.asked] == [HELLO["messages"]]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_before_the_first_byte_has_its_own_status(tmp_path: Path, stream: bool) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.answers.refuses = Refused(429, "too_many_requests", "17 sequences wait", retry_after_s=2.2)
            answer = await light.unix.post("/v1/chat/completions", json={**HELLO, "stream": stream})

        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"] == {
            "message": "17 sequences wait",
            "type": "rate_limit_error",
            "param": None,
            "code": "too_many_requests",
        }

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_a_500_without_details(tmp_path: Path, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.answers.breaks_with = ZeroDivisionError("the secret of row 17")
            answer = await light.unix.post("/v1/chat/completions", json={**HELLO, "stream": stream})

        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "secret" not in answer.text
        assert "the secret of row 17" in caplog.text

    asyncio.run(run())


def test_a_failure_after_the_first_byte_is_the_streams_last_event(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.answers.fails_after = 2
            *_, last = await frames(light, **HELLO)

        assert last["error"]["code"] == "answer_interrupted"

    asyncio.run(run())


def test_an_answer_that_the_server_cancelled_is_not_shown_as_finished(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.answers.finish_reason = "cancelled"
            *_, last = await frames(light, **HELLO)
            whole = await light.unix.post("/v1/chat/completions", json=HELLO)

        assert last["error"]["code"] == "answer_interrupted"
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "answer_interrupted")

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_answer(tmp_path: Path, stream: bool) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.answers.words = ["word"] * 10_000
            light.answers.pause_s = 0.01
            request = asyncio.create_task(light.unix.post("/v1/chat/completions", json={**HELLO, "stream": stream}))
            await until(lambda: light.answers.running)
            request.cancel()
            await until(lambda: light.answers.cancelled)

            assert light.answers.cancelled == [light.answers.asked[0].completion_id]
            assert not light.answers.running

    asyncio.run(run())


def test_text_outside_ascii_arrives_as_it_is(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.answers.words = ["Grüße", " 🙂", "\n\ndata: no"]
            whole = await light.ask()
            chunks = await frames(light, **HELLO)

        assert whole["choices"][0]["message"]["content"] == "Grüße 🙂\n\ndata: no"
        assert chunks[3]["choices"][0]["delta"]["content"] == "\n\ndata: no"

    asyncio.run(run())


def test_the_stream_ends_only_after_the_episode_is_recorded(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            serving(tmp_path) as light,
            light.unix.stream("POST", "/v1/chat/completions", json={**HELLO, "stream": True}) as answer,
        ):
            async for line in answer.aiter_lines():
                if '"finish_reason":"stop"' in line:
                    assert len(light.book.episodes) == 1

    asyncio.run(run())


def test_a_dropped_connection_in_the_middle_of_a_body_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            _, writer = await asyncio.open_unix_connection(str(light.socket))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: 100\r\n\r\n{")
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            await writer.wait_closed()
            assert (await light.unix.get("/healthz")).status_code == 200
        assert not [record for record in caplog.records if record.levelname == "ERROR"]

    asyncio.run(run())
