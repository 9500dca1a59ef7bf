"""Ratings, corrections and preferences: /v1/feedback, /v1/feedback/batch and /v1/preferences.

What is acknowledged is on disk. A batch is read line by line and stored in groups, so its size has no limit; a bad line
is reported by its number and does not stop the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema, model_validator

from edged.api.access import Access
from edged.api.asks import ChatMessage, User
from edged.api.bodies import Body, describe, json_body, mistake
from edged.api.errors import error_of
from edged.api.ports import Answers, FeedbackBook
from edged.records import Caller, Feedback, NewFeedback, Preference
from edged.refusal import Refused

BATCH_PATH = "/v1/feedback/batch"
GROUP_LINES = 256  # lines of a batch that share one commit
GROUP_BYTES = 2**20  # after which a group is stored, however few its lines are
LINE_MAX_BYTES = 2**20
BATCHES_MAX = 16  # at a time: each may hold a line and a group in memory for as long as it comes
REJECTED_SHOWN_MAX = 1000  # the answer lists so many bad lines and counts the others
IDEMPOTENCY_KEY_MAX = 255
LIST_MAX = 1000

_THUMBS = {"up": 1.0, "down": -1.0}


def rating_number(value: Any) -> float:
    """A rating as clients write it. Raises a mistake (`edged.api.bodies`)."""
    if isinstance(value, str) and value in _THUMBS:
        return _THUMBS[value]
    # NaN fails the comparison, and a bool is no number here.
    if isinstance(value, int | float) and not isinstance(value, bool) and -1.0 <= value <= 1.0:
        return float(value)
    raise mistake("a number from -1 to 1, 'up' or 'down'")


Rating = Annotated[
    float,
    BeforeValidator(rating_number),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": -1, "maximum": 1}, {"enum": list(_THUMBS)}]}),
]


def _has_words(value: str) -> str:
    if not value.strip():
        raise mistake("an answer that says something")
    return value


WrittenAnswer = Annotated[str, AfterValidator(_has_words)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=64)]
CompletionId = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class FeedbackRequest(Body):
    """A rating of one choice of a completion, a better answer in its place, or both."""

    completion_id: CompletionId
    choice: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    rating: Rating | None = None
    correction: WrittenAnswer | None = None
    reason: Annotated[str, StringConstraints(max_length=4096)] | None = None
    user: User | None = None
    tags: Annotated[list[Word], Field(max_length=32)] = Field(default_factory=list)
    source: Word = "user"

    @model_validator(mode="after")
    def _says_something(self) -> FeedbackRequest:
        if self.rating is None and self.correction is None:
            raise mistake("is required, unless there is a correction", param="rating")
        return self

    def new_feedback(self, caller: Caller) -> NewFeedback:
        return NewFeedback(
            completion_id=self.completion_id,
            choice=self.choice,
            rating=self.rating,
            correction=self.correction,
            reason=self.reason,
            user=self.user,
            tags=tuple(self.tags),
            source=self.source,
            caller=caller.name,
        )


class PreferenceRequest(Body):
    """Two answers to the same messages; `chosen` is the better one."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    chosen: WrittenAnswer
    rejected: WrittenAnswer
    user: User | None = None

    @model_validator(mode="after")
    def _compares_two_answers(self) -> PreferenceRequest:
        if self.messages[-1].role == "assistant":
            raise mistake("end with what is answered, not with an assistant's turn", param="messages")
        if self.chosen.strip() == self.rejected.strip():
            raise mistake("is the same as chosen, which says nothing", param="rejected")
        return self


def feedback_object(row: Feedback) -> dict[str, Any]:
    """A feedback row as the API shows it."""
    return {"object": "feedback", **dataclasses.asdict(row)}


def feedback_routes(book: FeedbackBook, answers: Answers, access: Access) -> APIRouter:
    """The routes of feedback and preferences."""
    router = APIRouter(tags=["feedback"])
    may_rate = Depends(access.require("feedback"))
    feedback_body = Depends(json_body(FeedbackRequest))
    preference_body = Depends(json_body(PreferenceRequest))
    batches = _Batches()

    @router.post("/v1/feedback", status_code=201, summary="Rate an answer", openapi_extra=describe(FeedbackRequest))
    async def add(
        request: Request, response: Response, caller: Caller = may_rate, body: FeedbackRequest = feedback_body
    ) -> dict[str, Any]:
        key = idempotency_key(request)
        refuse_while_running(answers, body.completion_id)
        row, is_new = await book.add(body.new_feedback(caller), idempotency_key=key)
        if not is_new:
            response.headers["idempotent-replayed"] = "true"
        return feedback_object(row)

    @router.get("/v1/feedback", summary="List ratings", dependencies=[may_rate])
    async def list_feedback(
        completion_id: Annotated[str | None, Query(max_length=128)] = None,
        after: Annotated[str | None, Query(max_length=128)] = None,
        limit: Annotated[int, Query(ge=1, le=LIST_MAX)] = 100,
    ) -> dict[str, Any]:
        rows, has_more = await book.list(completion_id=completion_id, after=after, limit=limit)
        return {"object": "list", "data": [feedback_object(row) for row in rows], "has_more": has_more}

    @router.get("/v1/feedback/{feedback_id}", summary="Show a rating", dependencies=[may_rate])
    async def get(feedback_id: str) -> dict[str, Any]:
        row = await book.get(feedback_id)
        if row is None:
            raise Refused(404, "feedback_not_found", f"there is no feedback {feedback_id[:200]!r}")
        return feedback_object(row)

    @router.post(BATCH_PATH, summary="Rate many answers, one JSON object a line", openapi_extra=_NDJSON)
    async def batch(request: Request, caller: Caller = may_rate) -> dict[str, Any]:
        batch = _Batch(book, answers, caller, idempotency_key(request))
        with batches.one_more():
            return await batch.run(request.stream())

    @router.post("/v1/preferences", status_code=201, summary="Prefer one answer over another",
                 openapi_extra=describe(PreferenceRequest))  # fmt: skip
    async def prefer(caller: Caller = may_rate, body: PreferenceRequest = preference_body) -> dict[str, Any]:
        preference = Preference(
            id=f"pref-{secrets.token_hex(12)}",
            messages=[message.plain() for message in body.messages],
            chosen=body.chosen,
            rejected=body.rejected,
            user=body.user,
            caller=caller.name,
            created_at=time.time(),
        )
        return {"object": "preference", **dataclasses.asdict(await book.prefer(preference))}

    return router


_NDJSON = {
    "requestBody": {
        "required": True,
        "content": {"application/x-ndjson": {"schema": describe(FeedbackRequest)["requestBody"]["content"]
                                             ["application/json"]["schema"]}},
    }
}  # fmt: skip


def idempotency_key(request: Request) -> str | None:
    """The `Idempotency-Key` header. Raises Refused 400 for one that cannot be a key."""
    key = request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= IDEMPOTENCY_KEY_MAX and key.isascii() and key.isprintable()):
        raise Refused(
            400, "invalid_value", f"Idempotency-Key: 1 to {IDEMPOTENCY_KEY_MAX} printable characters",
            param="Idempotency-Key",
        )  # fmt: skip
    return key


def refuse_while_running(answers: Answers, completion_id: str) -> None:
    """Raises Refused 409: an answer can be rated once it is complete."""
    if answers.is_running(completion_id):
        raise Refused(
            409, "completion_running", f"{completion_id} is still being answered; rate it when it is complete",
            param="completion_id",
        )  # fmt: skip


class _Batches:
    """How many batches come in at this moment."""

    def __init__(self) -> None:
        self._n = 0

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Raises Refused 429 beyond BATCHES_MAX."""
        if self._n == BATCHES_MAX:
            raise Refused(
                429, "too_many_batches", f"{BATCHES_MAX} batches are coming in; send this one later", retry_after_s=1.0
            )
        self._n += 1
        try:
            yield
        finally:
            self._n -= 1


class _Batch:
    """One batch: bytes in, groups of lines to the book, a report out."""

    def __init__(self, book: FeedbackBook, answers: Answers, caller: Caller, key: str | None) -> None:
        self._book = book
        self._answers = answers
        self._caller = caller
        self._key = key
        self._group: list[tuple[int, NewFeedback]] = []
        self._group_bytes = 0
        self._accepted = 0
        self._rejected: list[dict[str, Any]] = []
        self._n_rejected = 0

    async def run(self, pieces: AsyncIterator[bytes]) -> dict[str, Any]:
        """Store the batch. Raises Refused if it stops coming; what is accepted until then stays stored."""
        number = 0
        try:
            async for line in lines_of(pieces, LINE_MAX_BYTES):
                number += 1
                await self._take(number, line)
        except Refused as refused:
            await self._commit()
            stored = f"{self._accepted} ratings of the lines before it are stored"
            raise Refused(refused.status, refused.code, f"{refused.message} ({stored})") from None
        await self._commit()
        self._rejected.sort(key=lambda entry: entry["line"])
        return {"accepted": self._accepted, "rejected": self._rejected, "rejected_total": self._n_rejected}

    async def _take(self, number: int, line: bytes | None) -> None:
        try:
            if line is None:
                raise Refused(413, "line_too_large", f"the line is larger than {LINE_MAX_BYTES} bytes")
            if not line.strip():
                return
            body = FeedbackRequest.of_json(line)
            refuse_while_running(self._answers, body.completion_id)
        except Refused as refused:
            self._reject(number, refused)
            return
        self._group.append((number, body.new_feedback(self._caller)))
        self._group_bytes += len(line)
        if len(self._group) == GROUP_LINES or self._group_bytes >= GROUP_BYTES:
            await self._commit()

    async def _commit(self) -> None:
        if not self._group:
            return
        group, self._group, self._group_bytes = self._group, [], 0
        # One key covers the batch: a line's own key is made of it and the line's number.
        keys = [f"{self._key}:{number}" for number, _ in group] if self._key is not None else []
        results = await self._book.add_many([item for _, item in group], idempotency_keys=keys)
        for (number, _), result in zip(group, results, strict=True):
            if isinstance(result, Refused):
                self._reject(number, result)
            else:
                self._accepted += 1

    def _reject(self, number: int, refused: Refused) -> None:
        self._n_rejected += 1
        if len(self._rejected) < REJECTED_SHOWN_MAX:
            self._rejected.append({"line": number, "error": error_of(refused)})


async def lines_of(pieces: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes | None]:
    """The lines of a stream of bytes, without their ends; None in place of one that is larger than `max_bytes`."""
    buffer = bytearray()
    skipping = False
    async for piece in pieces:
        buffer += piece
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            yield None if skipping or len(line) > max_bytes else line
            skipping = False
        if len(buffer) > max_bytes:
            skipping = True
            buffer.clear()
    if skipping or buffer:
        yield None if skipping else bytes(buffer)
