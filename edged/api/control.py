"""The operator's routes: status, learning, episodes, users, events, keys, audit, and the probes of a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field, StringConstraints

from edged.api.access import Access
from edged.api.bodies import Body, describe, json_body, optional_json_body
from edged.api.feedback import feedback_object
from edged.api.peer import shutdown_of
from edged.api.ports import Control, EpisodeBook, KeyRing
from edged.api.streaming import EventStream, sse_event
from edged.records import ApiKey, Caller, Episode, EpisodeOrigin, EpisodeScore, Feedback, Scope, Update

HEARTBEAT_S = 15.0  # proxies close a stream that is silent for a minute or so
LIST_MAX = 1000
INT64_MAX = 2**63 - 1

Limit = Annotated[int, Query(ge=1, le=LIST_MAX)]


class KeyRequest(Body):
    """A new API key."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._@-]+$")]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=3)]


class EmptyRequest(Body):
    """Nothing is asked for; a body may be left out."""


def control_routes(control: Control, access: Access) -> APIRouter:
    """What the daemon does, and the learner's switches."""
    router = APIRouter(tags=["control"])
    any_caller = Depends(access.require(None))
    operator = Depends(access.require("admin"))
    empty_body = Depends(optional_json_body(EmptyRequest))

    @router.get("/v1/status", summary="Everything at a glance", dependencies=[any_caller])
    async def status() -> dict[str, Any]:
        return control.status()

    @router.get("/v1/updates", summary="List updates, newest first", dependencies=[any_caller])
    async def updates(limit: Limit = 50) -> dict[str, Any]:
        return {"object": "list", "data": [update_object(update) for update in await control.updates(limit=limit)]}

    @router.get("/v1/events", summary="What happens, as it happens (server-sent events)")
    async def events(request: Request, caller: Caller = any_caller) -> Response:
        # Ratings carry people's words: who may not list them does not hear them either.
        unheard = frozenset() if "feedback" in caller.scopes else frozenset({"feedback"})
        return EventStream(_event_frames(control, unheard, shutdown_of(request.scope).closing))

    @router.post("/v1/train", summary="Make an update of the ratings that there are", dependencies=[empty_body])
    async def train(caller: Caller = operator) -> dict[str, Any]:
        return await control.train(caller=caller)

    @router.post("/v1/pause", summary="Stop learning; ratings are still kept", dependencies=[empty_body])
    async def pause(caller: Caller = operator) -> dict[str, Any]:
        await control.pause(caller=caller)
        return {"paused": True}

    @router.post("/v1/resume", summary="Learn again", dependencies=[empty_body])
    async def resume(caller: Caller = operator) -> dict[str, Any]:
        await control.resume(caller=caller)
        return {"paused": False}

    @router.get("/v1/audit", summary="List who did what, newest first", dependencies=[operator])
    async def audit(limit: Limit = 100) -> dict[str, Any]:
        return {"object": "list", "data": [dataclasses.asdict(e) for e in await control.audit(limit=limit)]}

    return router


def probe_routes(control: Control, access: Access) -> APIRouter:
    """What supervisors and Prometheus ask for."""
    router = APIRouter(tags=["probes"])
    any_caller = Depends(access.require(None))

    @router.head("/healthz", include_in_schema=False)
    @router.get("/healthz", summary="Is the daemon alive?")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz", summary="Are requests accepted?")
    async def readyz(response: Response) -> dict[str, str]:
        ready, reason = control.ready()
        if ready:
            return {"status": "ready"}
        response.status_code = 503
        response.headers["retry-after"] = "1"
        return {"status": "not_ready", "reason": reason}

    @router.get("/metrics", summary="Prometheus metrics", dependencies=[any_caller])
    async def metrics() -> Response:
        return Response(control.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def record_routes(episodes: EpisodeBook, access: Access) -> APIRouter:
    """What is kept of people's conversations: for the operator only."""
    router = APIRouter(tags=["records"])
    operator = Depends(access.require("admin"))

    @router.get("/v1/episodes", summary="List recorded answers, oldest first", dependencies=[operator])
    async def list_episodes(
        after: Annotated[int, Query(ge=0, le=INT64_MAX)] = 0,
        limit: Limit = 100,
        version: Annotated[int | None, Query(ge=0, le=INT64_MAX)] = None,
        rated: bool | None = None,
        origin: EpisodeOrigin = "user",
    ) -> dict[str, Any]:
        rows = await episodes.list(after=after, limit=limit + 1, version=version, rated=rated, origin=origin)
        data = [episode_object(*row) for row in rows[:limit]]
        return {"object": "list", "data": data, "has_more": len(rows) > limit}

    @router.delete("/v1/users/{user:path}", summary="Forget a user: episodes, ratings and preferences")
    async def delete_user(user: str, caller: Caller = operator) -> dict[str, Any]:
        return {"user": user, "deleted": True, "episodes": await episodes.delete_user(user, caller=caller)}

    return router


def key_routes(keys: KeyRing, access: Access) -> APIRouter:
    """The API keys."""
    router = APIRouter(tags=["keys"])
    operator = Depends(access.require("admin"))
    key_body = Depends(json_body(KeyRequest))

    @router.get("/v1/keys", summary="List API keys", dependencies=[operator])
    async def list_keys() -> dict[str, Any]:
        return {"object": "list", "data": [key_object(key) for key in await keys.list()]}

    @router.post("/v1/keys", status_code=201, summary="Make an API key", openapi_extra=describe(KeyRequest))
    async def create_key(caller: Caller = operator, body: KeyRequest = key_body) -> dict[str, Any]:
        key, secret = await keys.create(body.name, frozenset(body.scopes), caller=caller)
        return {**key_object(key), "secret": secret}

    @router.delete("/v1/keys/{key_id}", summary="Revoke an API key")
    async def revoke_key(key_id: str, caller: Caller = operator) -> dict[str, Any]:
        return key_object(await keys.revoke(key_id, caller=caller))

    return router


async def _event_frames(control: Control, unheard: frozenset[str], closing: asyncio.Event) -> AsyncGenerator[bytes]:
    """Events but for the `unheard` ones until the server stops, and a comment whenever nothing comes for a while."""
    events = cast(AsyncGenerator[tuple[str, dict[str, Any]]], control.events())
    stopping = asyncio.create_task(closing.wait())
    coming = asyncio.ensure_future(anext(events))
    try:
        yield b": connected\n\n"
        while not stopping.done():
            await asyncio.wait({coming, stopping}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                try:
                    name, data = coming.result()
                except StopAsyncIteration:
                    return
                coming = asyncio.ensure_future(anext(events))
                if name not in unheard:
                    yield sse_event(name, data)
            elif not stopping.done():
                yield b": still here\n\n"
    finally:
        for task in (stopping, coming):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await coming
        await events.aclose()


def update_object(update: Update) -> dict[str, Any]:
    """An update without its lists of episodes, which it counts: new `ratings` or `judged` answers of practice, and
    `replayed` older ratings."""
    fields = dataclasses.asdict(update)
    new, replayed = fields.pop("new_episode_ids"), fields.pop("replay_episode_ids")
    by_people = update.origin == "ratings"
    counts = {"ratings": len(new) if by_people else 0, "judged": 0 if by_people else len(new)}
    return {"object": "update", **fields, **counts, "replayed": len(replayed)}


def episode_object(episode: Episode, feedback: Feedback | None, score: EpisodeScore | None) -> dict[str, Any]:
    """An episode as people read it; token ids and log-probabilities stay in the store."""
    return {
        "object": "episode",
        "id": episode.id,
        "completion_id": episode.completion_id,
        "choice": episode.choice,
        "created_at": episode.created_at,
        "adapter_version": episode.version,
        "prompt_tokens": len(episode.prompt_ids),
        "completion_tokens": len(episode.completion_ids),
        "messages": episode.messages,
        "prompt": episode.prompt,
        "text": episode.text,
        "finish_reason": episode.finish_reason,
        "temperature": episode.temperature,
        "top_p": episode.top_p,
        "top_k": episode.top_k,
        "shaped_by": episode.shaped_by.split(),
        "user": episode.user,
        "origin": episode.origin,
        "metadata": episode.metadata,
        "feedback": None if feedback is None else feedback_object(feedback),
        "score": None
        if score is None
        else {
            "reference_version": score.reference_version,
            "reference_logprob": score.reference_logprob,
            "kl": score.kl,
            "engine_gap": score.engine_gap,
        },
    }


def key_object(key: ApiKey) -> dict[str, Any]:
    """An API key as lists show it: never its secret."""
    return {
        "object": "api_key",
        "id": key.id,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
    }
