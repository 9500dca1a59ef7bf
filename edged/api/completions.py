"""POST /v1/chat/completions and /v1/completions, and the list of the one model.

The headers of a stream go out with the first event of its answer, so whatever is refused before that has its proper
status. A client that leaves cancels its answer.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any, cast

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from edged.api.access import Access
from edged.api.asks import ChatRequest, SamplingRequest, TextRequest
from edged.api.bodies import describe, json_body
from edged.api.chunks import ChatShape, Shape, Stream, TextShape, Whole
from edged.api.ports import AnswerEvent, Answers, Ask, Control, Started
from edged.api.streaming import EventStream, sse_data, while_connected
from edged.records import Caller
from edged.refusal import Refused

VERSION_HEADER = "x-edged-adapter-version"
DONE = b"data: [DONE]\n\n"


def completion_routes(answers: Answers, control: Control, access: Access) -> APIRouter:
    """The routes of OpenAI's completion API."""
    router = APIRouter(tags=["OpenAI"])
    may_infer = Depends(access.require("infer"))
    chat_body = Depends(json_body(ChatRequest))
    text_body = Depends(json_body(TextRequest))
    any_caller = Depends(access.require(None))
    started_at = int(time.time())

    @router.post("/v1/chat/completions", summary="Answer a chat", openapi_extra=describe(ChatRequest))
    async def chat(request: Request, caller: Caller = may_infer, body: ChatRequest = chat_body) -> Response:
        ask = body.ask(f"chatcmpl-{secrets.token_hex(12)}", caller)
        return await _answer(answers, control.model_id(), request, body, ask, ChatShape())

    @router.post("/v1/completions", summary="Continue a text", openapi_extra=describe(TextRequest))
    async def text(request: Request, caller: Caller = may_infer, body: TextRequest = text_body) -> Response:
        ask = body.ask(f"cmpl-{secrets.token_hex(12)}", caller)
        return await _answer(answers, control.model_id(), request, body, ask, TextShape())

    @router.get("/v1/models", summary="List the models", dependencies=[any_caller])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_object(control.model_id(), started_at)]}

    @router.get("/v1/models/{model:path}", summary="Describe a model", dependencies=[any_caller])
    async def model(model: str) -> dict[str, Any]:
        check_model(model, control.model_id())
        return _model_object(control.model_id(), started_at)

    return router


def check_model(asked: str, served: str) -> None:
    """Raises Refused 404 unless `asked` names the model that is served."""
    if asked not in (served, "default"):
        raise Refused(
            404, "model_not_found", f"the model {asked[:200]!r} is not served here; ask for {served!r}", param="model"
        )


def _model_object(model: str, created: int) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": created, "owned_by": "edged"}


async def _answer(
    answers: Answers, model: str, request: Request, body: SamplingRequest, ask: Ask, shape: Shape
) -> Response:
    check_model(body.model, model)
    # The port promises an iterator that can be closed early, which is what a generator is.
    events = cast(AsyncGenerator[AnswerEvent], answers.ask(ask))
    if not body.stream:
        work = _whole_answer(events, Whole(shape, n=ask.n, logprobs=ask.logprobs), ask, model)
        return await while_connected(request.scope, request.receive, work)
    try:
        started = await while_connected(request.scope, request.receive, _first(events))
    except BaseException:
        await events.aclose()
        raise
    stream = Stream(
        shape, ask.completion_id, model, started, n=ask.n, logprobs=ask.logprobs, usage=body.wants_usage_chunk
    )
    return EventStream(_frames(events, stream), {VERSION_HEADER: str(started.version)})


async def _first(events: AsyncGenerator[AnswerEvent]) -> Started:
    first = await anext(events)
    if not isinstance(first, Started):
        raise RuntimeError(f"an answer began with {first!r}")
    return first


async def _whole_answer(events: AsyncGenerator[AnswerEvent], whole: Whole, ask: Ask, model: str) -> Response:
    async with contextlib.aclosing(events):
        async for event in events:
            whole.add(event)
    content = whole.object(ask.completion_id, model)
    version = whole.started.version if whole.started is not None else 0
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return Response(data, media_type="application/json", headers={VERSION_HEADER: str(version)})


async def _frames(events: AsyncGenerator[AnswerEvent], stream: Stream) -> AsyncGenerator[bytes]:
    async with contextlib.aclosing(events):
        for opening in stream.opening():
            yield sse_data(opening)
        async for event in events:
            if (chunk := stream.chunk(event)) is not None:
                yield sse_data(chunk)
    yield DONE
