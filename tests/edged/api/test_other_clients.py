"""What Open WebUI and LangChain send to a server that speaks like OpenAI's, replayed.

The bodies are written by hand after the clients' sources, which are named beside them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.edged.api.light_server import Light, serving

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "How do I peel garlic quickly?"}
HISTORY = [
    {"role": "system", "content": "You are a cook."},
    USER,
    {"role": "assistant", "content": "Crush it first."},
    {"role": "user", "content": "And ten of them?"},
]

# open-webui/open-webui, backend/open_webui/routers/openai.py: `generate_chat_completion` takes `metadata` (chat_id,
# session_id, features) out of the body, puts the model's parameters in (utils/payload.py) and asks for the usage of
# streams. tasks.py in the same folder makes the bodies of titles, tags and further questions: one message, no stream,
# and max_completion_tokens for titles.
OPEN_WEBUI_HEADERS = {
    "Content-Type": "application/json",
    "Authorization": "Bearer sk-none",
    "X-OpenWebUI-User-Name": "Ann",
    "X-OpenWebUI-User-Id": "7",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "c1",
}
OPEN_WEBUI: dict[str, dict[str, Any]] = {
    "chat": {
        "stream": True,
        "model": "smollm2-135m",
        "messages": HISTORY,
        "stream_options": {"include_usage": True},
    },
    "chat with the model's parameters": {
        "stream": True,
        "model": "smollm2-135m",
        "messages": HISTORY,
        "temperature": 0.8,
        "top_p": 0.9,
        "min_p": 0.05,
        "max_tokens": 128,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.0,
        "seed": 42,
        "stop": ["User:"],
        "logit_bias": {"15": -100},
        "stream_options": {"include_usage": True},
    },
    # A text beside an image comes as parts; of a chat without images some versions send them too.
    "chat in parts": {
        "stream": True,
        "model": "smollm2-135m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]}
        ],
        "stream_options": {"include_usage": True},
    },
    "title": {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "### Task:\nGenerate a concise title with an emoji."}],
        "stream": False,
        "max_completion_tokens": 1000,
    },
    "tags": {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "### Task:\nGenerate 1-3 broad tags."}],
        "stream": False,
    },
    "autocompletion": {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "### Task:\nComplete the text."}],
        "stream": False,
    },
    # Filter functions of users put these beside the body (README of gangai-labs/openwebui-chat-id-pipe).
    "a filter that names the conversation": {
        "stream": True,
        "model": "smollm2-135m",
        "messages": HISTORY,
        "chat_id": "0a1b",
        "session_id": "2c3d",
        "stream_options": {"include_usage": True},
    },
}

# langchain-ai/langchain, libs/partners/openai/langchain_openai/chat_models/base.py: `_default_params` (model, stream
# and what the caller has set; ChatOpenAI writes max_tokens as max_completion_tokens), `_convert_message_to_dict` and
# `_stream`.
LANGCHAIN: dict[str, dict[str, Any]] = {
    "invoke": {
        "messages": [{"content": "You are a cook.", "role": "system"}, {"content": "Hello", "role": "user"}],
        "model": "smollm2-135m",
        "stream": False,
    },
    "invoke with everything set": {
        "messages": [{"content": "Hello", "role": "user", "name": "ann"}],
        "model": "smollm2-135m",
        "stream": False,
        "n": 2,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 3,
        "max_completion_tokens": 16,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["\n"],
        "store": True,
        "metadata": {"run": "1"},
        "service_tier": "auto",
        "user": "ann",
    },
    "stream": {
        "messages": [{"content": "Hello", "role": "user"}],
        "model": "smollm2-135m",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "an answer sent back": {
        "messages": [
            {"content": "Hello", "role": "user"},
            {"content": "Hi.", "role": "assistant"},
            {"content": [{"type": "text", "text": "And now?"}], "role": "user"},
        ],
        "model": "smollm2-135m",
        "stream": False,
        "parallel_tool_calls": False,
    },
}


def with_light(folder: Path, scenario: Callable[[Light], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving(folder) as light:
            await scenario(light)

    asyncio.run(run())


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The objects of a stream, which must have come to its end."""
    *frames, done = [frame.removeprefix("data: ") for frame in text.strip().split("\n\n")]
    assert done == "[DONE]"
    return [json.loads(frame) for frame in frames]


@pytest.mark.parametrize(
    "body",
    [pytest.param(body, id=f"{client}: {name}")
     for client, bodies in (("Open WebUI", OPEN_WEBUI), ("LangChain", LANGCHAIN)) for name, body in bodies.items()],
)  # fmt: skip
def test_a_documented_call_is_answered(tmp_path: Path, body: dict[str, Any]) -> None:
    async def scenario(light: Light) -> None:
        answer = await light.tcp.post(PATH, json=body, headers=OPEN_WEBUI_HEADERS)
        assert answer.status_code == 200, answer.text
        if not body["stream"]:
            whole = answer.json()
            assert [choice["message"]["content"] for choice in whole["choices"]] == ["Hello there."] * body.get("n", 1)
            assert whole["usage"]["completion_tokens"] > 0
            return
        chunks = chunks_of(answer.text)
        texts = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        assert "".join(texts) == "Hello there."
        # Open WebUI and LangChain take the usage from a last chunk without choices.
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] > 0

    with_light(tmp_path, scenario)


def test_open_webui_finds_the_models(tmp_path: Path) -> None:
    # openai.py: `verify_connection` and `get_models` ask for /models and read `data[].id`.
    async def scenario(light: Light) -> None:
        listed = await light.tcp.get("/v1/models", headers=OPEN_WEBUI_HEADERS)
        assert listed.status_code == 200
        ids = [model["id"] for model in listed.json()["data"]]
        assert ids == ["smollm2-135m"]
        assert (await light.tcp.get(f"/v1/models/{ids[0]}")).json()["id"] == ids[0]

    with_light(tmp_path, scenario)


def test_what_open_webui_leaves_aside_does_not_reach_the_sampler(tmp_path: Path) -> None:
    async def scenario(light: Light) -> None:
        await light.tcp.post(PATH, json=OPEN_WEBUI["a filter that names the conversation"])
        await light.tcp.post(PATH, json=OPEN_WEBUI["chat"])
        with_names, without = light.answers.asked
        assert (with_names.messages, with_names.metadata) == (without.messages, without.metadata)

    with_light(tmp_path, scenario)


def test_a_pipelines_user_object_is_refused_by_its_name(tmp_path: Path) -> None:
    # openai.py sends the user as an object to servers that call themselves pipelines, which this one does not.
    async def scenario(light: Light) -> None:
        user = {"name": "Ann", "id": "7", "email": "ann@example.com", "role": "user"}
        refused = await light.tcp.post(PATH, json={**OPEN_WEBUI["chat"], "user": user})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "user")

    with_light(tmp_path, scenario)
