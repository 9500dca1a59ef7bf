"""Stored completions: answers that were asked for with `store`, to be found again, marked and removed.

A caller finds its own ones, an operator all. Every answer is recorded and can be rated, whether it is stored or not;
one that is not is 404 here. `edged.rating` in the metadata of an update is a rating of the answer: it takes the way of
POST /v1/feedback, and is on disk before the metadata is. Said again unchanged it is no new rating.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import model_validator
from pydantic_core import PydanticCustomError

from edged.answer import fingerprint_of, shown_reason
from edged.api.access import Access, check_scope
from edged.api.asks import OUR_METADATA, Metadata
from edged.api.bodies import Body, describe, json_body, mistake
from edged.api.chunks import ChatShape
from edged.api.feedback import idempotency_key, rating_number, refuse_while_running
from edged.api.ports import Answers, CompletionBook, Control, FeedbackBook
from edged.records import Caller, Episode, NewFeedback, StoredChoice
from edged.refusal import Refused

PATH = "/v1/chat/completions"
RATING_KEY = OUR_METADATA + "rating"
SOURCE = "metadata"  # of feedback that came this way
PAGE_MAX = 100
_METADATA_FILTER = re.compile(r"metadata\[(.*)\]", re.DOTALL)

Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=PAGE_MAX)]
After = Annotated[str | None, Query(max_length=256)]


class MetadataRequest(Body):
    """Takes the place of all metadata; null: of none. `edged.rating`: -1 to 1, `up` or `down`, as text."""

    metadata: Metadata

    @model_validator(mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        if isinstance(value, dict) and "metadata" in value and value["metadata"] is None:
            return {**value, "metadata": {}}
        return value

    @model_validator(mode="after")
    def _says_what_is_known(self) -> MetadataRequest:
        for key, text in self.metadata.items():
            if key == RATING_KEY:
                _rating_of(text)
            elif key.startswith(OUR_METADATA):
                raise mistake(f"of what begins with {OUR_METADATA!r} only {RATING_KEY!r} is known", param=_param(key))
        return self

    @property
    def rating_text(self) -> str | None:
        return self.metadata.get(RATING_KEY)

    def rating(self, choices: Sequence[StoredChoice], caller: Caller) -> NewFeedback | None:
        """The rating that this says of a completion, if it says a new one. Raises Refused 400 where it is not clear
        which answer is meant."""
        text, first = self.rating_text, choices[0].episode
        if text is None or text == first.metadata.get(RATING_KEY):
            return None
        if len(choices) > 1:
            raise Refused(
                400,
                "invalid_value",
                f"this completion has {len(choices)} choices; rate one of them by POST /v1/feedback",
                param=_param(RATING_KEY),
            )
        return NewFeedback(
            completion_id=first.completion_id,
            choice=first.choice,
            rating=_rating_of(text),
            correction=None,
            reason=None,
            user=None,
            tags=(),
            source=SOURCE,
            caller=caller.name,
        )


def stored_routes(
    book: CompletionBook, feedback: FeedbackBook, answers: Answers, control: Control, access: Access
) -> APIRouter:
    """The routes of stored completions."""
    router = APIRouter(tags=["OpenAI"])
    may_infer = Depends(access.require("infer"))
    metadata_body = Depends(json_body(MetadataRequest))

    async def find(completion_id: str, caller: Caller) -> list[StoredChoice]:
        refuse_while_running(answers, completion_id)
        choices = await book.get(completion_id, caller=_sees(caller))
        if not choices:
            raise _not_found(completion_id)
        return choices

    @router.get(PATH, summary="List stored completions", openapi_extra=_FILTERS)
    async def list_completions(
        request: Request,
        caller: Caller = may_infer,
        after: After = None,
        limit: Limit = 20,
        order: Order = "asc",
        model: Annotated[str | None, Query(max_length=256)] = None,
    ) -> dict[str, Any]:
        found, has_more = await book.page(
            caller=_sees(caller),
            after=after,
            limit=limit,
            newest_first=order == "desc",
            model=control.model_id() if model == "default" else model,
            metadata=metadata_asked(request.query_params.multi_items()),
        )
        whole = [choices for choices in found if not answers.is_running(choices[0].episode.completion_id)]
        return _page([completion_object(choices) for choices in whole], has_more)

    @router.get(PATH + "/{completion_id}", summary="Show a stored completion")
    async def get(completion_id: str, caller: Caller = may_infer) -> dict[str, Any]:
        return completion_object(await find(completion_id, caller))

    @router.get(PATH + "/{completion_id}/messages", summary="List the messages that it answers")
    async def messages(
        completion_id: str, caller: Caller = may_infer, after: After = None, limit: Limit = 20, order: Order = "asc"
    ) -> dict[str, Any]:
        asked = message_objects((await find(completion_id, caller))[0].episode)
        return _page(*page_of(asked if order == "asc" else asked[::-1], after, limit))

    @router.post(PATH + "/{completion_id}", summary="Change its metadata, and rate it thereby",
                 openapi_extra=describe(MetadataRequest))  # fmt: skip
    async def update(
        request: Request, completion_id: str, caller: Caller = may_infer, body: MetadataRequest = metadata_body
    ) -> dict[str, Any]:
        key = idempotency_key(request)
        choices = await find(completion_id, caller)
        if (rating := body.rating(choices, caller)) is not None:
            check_scope(caller, "feedback")
            await feedback.add(rating, idempotency_key=key)
        await book.set_metadata(completion_id, body.metadata)
        return completion_object(choices) | {"metadata": body.metadata}

    @router.delete(PATH + "/{completion_id}", summary="Remove it, and everything that was said of it")
    async def delete(completion_id: str, caller: Caller = may_infer) -> dict[str, Any]:
        await find(completion_id, caller)
        await book.delete(completion_id, caller=caller)
        return {"object": "chat.completion.deleted", "id": completion_id, "deleted": True}

    return router


_FILTERS: dict[str, Any] = {
    "parameters": [
        {
            "name": "metadata",
            "in": "query",
            "style": "deepObject",
            "explode": True,
            "description": "Only those with all of these pairs: `metadata[key]=value`.",
            "schema": {"type": "object", "additionalProperties": {"type": "string"}},
        }
    ]
}


def metadata_asked(query: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The pairs of `metadata[key]=value` in a query."""
    found = ((_METADATA_FILTER.fullmatch(name), value) for name, value in query)
    return {match[1]: value for match, value in found if match is not None}


def completion_object(choices: Sequence[StoredChoice]) -> dict[str, Any]:
    """A recorded completion as it was answered, with what was asked of it. Its logprobs stay in the store."""
    first = choices[0].episode
    n_prompt, n_answered = len(first.prompt_ids), sum(len(choice.episode.completion_ids) for choice in choices)
    return {
        "id": first.completion_id,
        "object": ChatShape.whole_object,
        "created": int(first.created_at),
        "model": first.model,
        "choices": [choice_object(choice) for choice in choices],
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_answered,
            "total_tokens": n_prompt + n_answered,
        },
        "system_fingerprint": fingerprint_of(first.base_sha256, first.version),
        "metadata": first.metadata,
        "temperature": first.temperature,
        "top_p": first.top_p,
        "seed": first.seed,
        "input_user": first.user,
    }


def choice_object(choice: StoredChoice) -> dict[str, Any]:
    """A choice as it was answered."""
    episode, shown = choice.episode, choice.shown
    if shown is None:
        return ChatShape().choice(episode.choice, episode.text, None, episode.finish_reason)
    reason = shown_reason(episode.finish_reason, n_calls=len(shown.calls))
    return ChatShape().choice(episode.choice, shown.text, None, reason, shown.calls)


def message_objects(answer: Episode) -> list[dict[str, Any]]:
    """The messages that were answered, as OpenAI lists them."""
    return [
        {"id": f"{answer.completion_id}-{index}", "name": None, "content_parts": None, **message}
        for index, message in enumerate(answer.messages or [])
    ]


def page_of(items: Sequence[dict[str, Any]], after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """The `limit` items behind the one whose id is `after`, and whether there are more. Raises Refused 404."""
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise Refused(404, "message_not_found", f"no message has the id {after!r}", param="after")
    rest = items[0 if after is None else ids.index(after) + 1 :]
    return [*rest[:limit]], len(rest) > limit


def _page(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    ids = [item["id"] for item in data]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


def _sees(caller: Caller) -> str | None:
    """Whose completions the caller may find; None: everybody's."""
    return None if "admin" in caller.scopes else caller.name


def _rating_of(text: str) -> float:
    value: float | str = text
    with contextlib.suppress(ValueError):
        value = float(text)
    try:
        return rating_number(value)
    except PydanticCustomError:
        raise mistake("a number from -1 to 1, 'up' or 'down', as text", param=_param(RATING_KEY)) from None


def _param(key: str) -> str:
    return f"metadata.{key}"


def _not_found(completion_id: str) -> Refused:
    return Refused(
        404, "completion_not_found", f"no stored completion has the id {completion_id[:200]!r}; ask with store = true"
    )
