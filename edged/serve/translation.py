"""Between the API's words and the serve worker's: requests, refusals, tokens and episodes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from edged.answer import Ask
from edged.records import Episode
from edged.refusal import Refused
from engine import protocol

# What the worker refuses -> the field of the request that it is about, where that is not the prompt.
_PARAMS = {
    "bad_logit_bias": "logit_bias",
    "bad_response_format": "response_format",
    "bad_tools": "tools",
    "tools_not_supported": "tools",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What every answer of this daemon has in common. `wait_s`: the longest wait for a worker."""

    model: str
    base_sha256: str
    wait_s: float


def generate(ask: Ask, default_max_tokens: int, queue_timeout_s: float | None = None) -> protocol.Generate:
    """What the worker is asked for.

    Args:
        default_max_tokens: of an answer whose request does not say.
        queue_timeout_s: how much longer it may wait for a slot; None: as long as it takes.
    """
    messages = None if ask.messages is None else turns(ask.messages)
    return protocol.Generate(
        request_id=ask.completion_id,
        messages=messages,
        prompt=ask.prompt,
        n=ask.n,
        schema=ask.schema,
        tools=ask.tools,
        must_call=ask.must_call,
        one_call=ask.one_call,
        sampling=protocol.Sampling(
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            min_p=ask.min_p,
            repetition_penalty=ask.repetition_penalty,
            frequency_penalty=ask.frequency_penalty,
            presence_penalty=ask.presence_penalty,
            logit_bias=ask.logit_bias,
            seed=ask.seed,
            max_tokens=default_max_tokens if ask.max_tokens is None else ask.max_tokens,
            stop=ask.stop,
            top_logprobs=ask.top_logprobs,
            logprobs=ask.logprobs,
        ),
        user=ask.payer,
        queue_timeout_s=queue_timeout_s,
    )


def turns(messages: Sequence[Mapping[str, Any]]) -> tuple[protocol.ChatMessage, ...]:
    """Messages in OpenAI's shape as the worker knows them."""
    return tuple(
        protocol.ChatMessage(
            role=message["role"],
            content=message["content"],
            tool_calls=tuple(
                protocol.ToolCall(id=call["id"], **call["function"]) for call in message.get("tool_calls", ())
            ),
            tool_call_id=message.get("tool_call_id"),
        )
        for message in messages
    )


def call_entry(call: protocol.ToolCall) -> dict[str, Any]:
    """A call as OpenAI's messages have it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def refusal(ask: Ask, failed: protocol.RequestFailed, *, free_in_s: float) -> Refused:
    """What a client is told of a request that the worker refused. free_in_s: when a slot is expected to be free."""
    if failed.code == "queue_timeout":
        return too_late(free_in_s)
    if failed.code == "engine_error":
        return Refused(503, failed.code, failed.message, retry_after_s=1.0)
    param = _PARAMS.get(failed.code, "prompt" if ask.messages is None else "messages")
    return Refused(400, failed.code, failed.message, param=param)


def too_late(free_in_s: float) -> Refused:
    """What a client is told of a request that could not begin in time."""
    what = "the request waited for a slot as long as it may, and was not begun"
    return Refused(429, "queue_timeout", f"{what}; try again in {free_in_s:.0f} s", retry_after_s=free_in_s)


def token_entry(token: protocol.TokenLogprob) -> dict[str, Any]:
    """A token as OpenAI's `logprobs.content` shows it."""
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.bytes),
        "top_logprobs": [{"token": t.text, "logprob": t.logprob, "bytes": list(t.bytes)} for t in token.top],
    }


def episode(
    ask: Ask,
    done: protocol.ChoiceDone,
    *,
    serving: Serving,
    version: int,
    prompt_ids: tuple[int, ...],
    created_at: float,
) -> Episode:
    """The record of a finished choice. version: adapter that made it. created_at: of its answer, in Unix seconds."""
    return Episode(
        id=0,
        completion_id=ask.completion_id,
        choice=done.choice,
        created_at=created_at,
        kind="chat" if ask.messages is not None else "text",
        model=serving.model,
        base_sha256=serving.base_sha256,
        version=version,
        messages=ask.messages,
        prompt=ask.prompt,
        prompt_ids=prompt_ids,
        completion_ids=done.completion_ids,
        logprobs=done.logprobs,
        raw_logprobs=done.raw_logprobs,
        text=done.text,
        finish_reason=done.finish_reason,
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        seed=done.seed,
        max_tokens=ask.max_tokens,
        user=ask.user,
        metadata=ask.metadata,
        caller=ask.caller.name,
        shaped_by=ask.shaped_by,
    )
