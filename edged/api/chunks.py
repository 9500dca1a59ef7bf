"""The events of an answer as OpenAI's objects: chunks of a stream, or one whole object. Pure.

A `Shape` knows how one kind of completion (chat or text) looks. `Stream` turns events into chunks one by one; `Whole`
gathers them. In a stream, a choice's last chunk is made from its `Ended`, which comes when its episode is on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from edged.api.ports import AnswerEvent, Ended, Piece, Started, Usage
from edged.refusal import Refused


class Shape(Protocol):
    """How the choices of one kind of completion look."""

    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk choice before any text, if this kind has one."""

    def piece(self, piece: Piece, logprobs: dict[str, Any] | None, *, n_calls: int) -> dict[str, Any]:
        """n_calls: calls of the choice before this piece."""

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]: ...

    def choice(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        calls: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]: ...

    def logprobs(self, tokens: Sequence[dict[str, Any]], text_before: str) -> dict[str, Any]: ...


class ChatShape:
    """The objects of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        return _chunk_choice(index, {"role": "assistant", "content": "", "refusal": None}, None, None)

    def piece(self, piece: Piece, logprobs: dict[str, Any] | None, *, n_calls: int) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text or not piece.calls else {}
        if piece.calls:
            delta["tool_calls"] = [{"index": n_calls + index, **call} for index, call in enumerate(piece.calls)]
        return _chunk_choice(piece.choice, delta, logprobs, None)

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _chunk_choice(index, {}, None, finish_reason)

    def choice(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        calls: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if calls:
            message |= {"content": text or None, "tool_calls": list(calls)}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, tokens: Sequence[dict[str, Any]], text_before: str) -> dict[str, Any]:
        return {"content": list(tokens), "refusal": None}


class TextShape:
    """The objects of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, piece: Piece, logprobs: dict[str, Any] | None, *, n_calls: int) -> dict[str, Any]:
        return self.choice(piece.choice, piece.text, logprobs, None)

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        return self.choice(index, "", None, finish_reason)

    def choice(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        calls: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, tokens: Sequence[dict[str, Any]], text_before: str) -> dict[str, Any]:
        """The older parallel lists. Offsets count characters of the answer."""
        offsets, offset = [], len(text_before)
        for token in tokens:
            offsets.append(offset)
            offset += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens],
            "text_offset": offsets,
        }


def _chunk_choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`, in tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
    }


class Stream:
    """The chunks of one streamed answer."""

    def __init__(
        self, shape: Shape, completion_id: str, model: str, started: Started, *, n: int, logprobs: bool, usage: bool
    ) -> None:
        self._shape = shape
        self._n = n
        self._logprobs = logprobs
        self._usage = usage
        self._texts = [""] * n
        self._n_calls = [0] * n
        self._head = {
            "id": completion_id,
            "object": shape.chunk_object,
            "created": int(started.created_at),
            "model": model,
            "system_fingerprint": started.fingerprint,
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        """The chunks that go out before any text."""
        for index in range(self._n):
            if (choice := self._shape.opening(index)) is not None:
                yield self._chunk([choice])

    def chunk(self, event: AnswerEvent) -> dict[str, Any] | None:
        """The chunk that `event` makes, if any. Raises Refused 503 for a choice that the server cancelled."""
        match event:
            case Piece():
                logprobs = None
                if self._logprobs:
                    logprobs = self._shape.logprobs(event.tokens, self._texts[event.choice])
                self._texts[event.choice] += event.text
                n_calls = self._n_calls[event.choice]
                self._n_calls[event.choice] += len(event.calls)
                return self._chunk([self._shape.piece(event, logprobs, n_calls=n_calls)])
            case Ended():
                return self._chunk([self._shape.ending(event.choice, finish_reason_of(event))])
            case Usage():
                return {**self._chunk([]), "usage": usage_object(event)} if self._usage else None
            case Started():
                return None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        # Asked for usage, OpenAI has the field in every chunk, and null in all but the last.
        return {**chunk, "usage": None} if self._usage else chunk


class Whole:
    """One answer, gathered."""

    def __init__(self, shape: Shape, *, n: int, logprobs: bool) -> None:
        self._shape = shape
        self._logprobs = logprobs
        self._texts = [""] * n
        self._tokens: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        self._finish_reasons: list[str | None] = [None] * n
        self._usage: Usage | None = None
        self.started: Started | None = None

    def add(self, event: AnswerEvent) -> None:
        """Raises Refused 503 for a choice that the server cancelled."""
        match event:
            case Started():
                self.started = event
            case Piece():
                self._texts[event.choice] += event.text
                self._tokens[event.choice].extend(event.tokens)
                self._calls[event.choice].extend(event.calls)
            case Ended():
                self._finish_reasons[event.choice] = finish_reason_of(event)
            case Usage():
                self._usage = event

    def object(self, completion_id: str, model: str) -> dict[str, Any]:
        """The whole completion; every event must have been added."""
        if self.started is None or self._usage is None or None in self._finish_reasons:
            raise RuntimeError(f"the answer {completion_id} ended without all of its events")
        choices = [
            self._shape.choice(
                index,
                self._texts[index],
                self._shape.logprobs(self._tokens[index], "") if self._logprobs else None,
                reason,
                self._calls[index],
            )
            for index, reason in enumerate(self._finish_reasons)
        ]
        return {
            "id": completion_id,
            "object": self._shape.whole_object,
            "created": int(self.started.created_at),
            "model": model,
            "choices": choices,
            "usage": usage_object(self._usage),
            "system_fingerprint": self.started.fingerprint,
        }


def finish_reason_of(ended: Ended) -> str:
    """Why it ended, as OpenAI says it. Raises Refused 503: to a client that is still there "cancelled" is failure."""
    if ended.finish_reason == "cancelled":
        raise Refused(
            503, "answer_interrupted", "the server stopped this answer before its end; ask again", retry_after_s=1.0
        )
    return ended.finish_reason
