"""One request and its choices, from the first token to the records that are sent: pure bookkeeping.

Turns sampled tokens into `Chunk`s and `ChoiceDone`s. Knows no context, no scheduler and no clock (times come as
arguments).

Invariants: completion ids, logprobs and raw logprobs have the same length at any time; the texts of the chunks of a
choice without calls of tools concatenate to the text of its ChoiceDone; token entries of a chunk never speak of text
that was cut away.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from engine.generate.calls import CallStream
from engine.generate.sampling import Constraint, Sampled, Sampler
from engine.generate.shaping import Shape
from engine.generate.text import TextStream
from engine.protocol import (
    Called,
    ChoiceDone,
    Chunk,
    FinishReason,
    FirstToken,
    Message,
    RequestDone,
    Sampling,
    TokenLogprob,
    ToolCall,
    TopLogprob,
)

PieceOf = Callable[[int], bytes]  # token id -> its bytes, b"" for control tokens


class Choice:
    """One answer being sampled. `finish_reason` is None while it runs."""

    def __init__(
        self,
        sampling: Sampling,
        *,
        seed: int,
        index: int,
        room: int,
        prompt_ids: Sequence[int] = (),
        constraint: Constraint | None = None,
        calls: CallStream | None = None,
    ) -> None:
        """room: the most tokens it may have. prompt_ids: what a repetition penalty is on from the start. constraint,
        calls: what it is held to, and what finds calls in its text; neither is shared with another choice."""
        self.index = index
        self.calls = calls
        self.sampler = Sampler(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            shape=Shape(
                bias=sampling.logit_bias,
                repetition_penalty=sampling.repetition_penalty,
                frequency_penalty=sampling.frequency_penalty,
                presence_penalty=sampling.presence_penalty,
            ),
            prompt_ids=prompt_ids,
            constraint=constraint,
            seed=seed,
            choice=index,
            top_logprobs=sampling.top_logprobs if sampling.logprobs else 0,
        )
        self.completion_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._seed = seed
        self._room = room
        self._wants_tokens = sampling.logprobs
        self._logprobs: list[float | None] = []
        self._raw_logprobs: list[float | None] = []
        self._stream = TextStream(sampling.stop)
        self._entries: collections.deque[tuple[int, TokenLogprob]] = collections.deque()  # (where its text begins, it)

    @property
    def text(self) -> str:
        """The text sent so far."""
        return self._stream.sent

    @property
    def logprobs(self) -> tuple[float | None, ...]:
        """Of the tokens so far, under the distribution they were drawn from."""
        return tuple(self._logprobs)

    def take(self, sampled: Sampled, piece_of: PieceOf, *, is_eos: bool) -> tuple[str, tuple[TokenLogprob, ...]]:
        """Record one sampled token; the text and token entries that can be sent now. May set `finish_reason`."""
        self.completion_ids.append(sampled.id)
        self._logprobs.append(sampled.logprob)
        self._raw_logprobs.append(sampled.raw_logprob)
        if is_eos:
            return self._finish("stop")
        if self._wants_tokens:
            self._entries.append((self._stream.n_known, _entry(sampled, piece_of)))
        text = self._stream.push(piece_of(sampled.id))
        if self._stream.stopped:
            self.finish_reason = "stop"
            return text, self._entries_before(self._stream.n_sent)
        if len(self.completion_ids) == self._room:
            rest, entries = self._finish("length")
            return text + rest, entries
        return text, self._entries_before(self._stream.n_sent if self._stream.n_known > self._stream.n_sent else None)

    def cancel(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        """End it where it is; the text that was held back."""
        return self._finish("cancelled")

    def end(self, reason: FinishReason) -> tuple[str, tuple[TokenLogprob, ...]]:
        """Whoever samples it has ended it behind its last token; the text that was held back."""
        return self._finish(reason)

    def done(self, request_id: str) -> ChoiceDone:
        """The record of the finished choice."""
        if self.finish_reason is None:
            raise ValueError(f"choice {self.index} of {request_id} still runs")
        return ChoiceDone(
            request_id=request_id,
            choice=self.index,
            finish_reason=self.finish_reason,
            completion_ids=tuple(self.completion_ids),
            logprobs=tuple(self._logprobs),
            raw_logprobs=tuple(self._raw_logprobs),
            text=self._stream.sent,
            seed=self._seed,
            calls=0 if self.calls is None else self.calls.n_calls,
        )

    def _finish(self, reason: FinishReason) -> tuple[str, tuple[TokenLogprob, ...]]:
        self.finish_reason = reason
        return self._stream.end(), self._entries_before(None)

    def _entries_before(self, end: int | None) -> tuple[TokenLogprob, ...]:
        """Entries of tokens whose text begins before character `end`; all of them if None."""
        ready: list[TokenLogprob] = []
        while self._entries and (end is None or self._entries[0][0] < end):
            ready.append(self._entries.popleft()[1])
        return tuple(ready)


class Answer:
    """One request. `context` is None until its first choice has a slot."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        choices: tuple[Choice, ...],
        *,
        arrived_at: float,
        beside: int = 0,
    ) -> None:
        """beside: requests that were there when it came."""
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.choices = choices
        self.context: int | None = None
        self.cached_tokens = 0
        self._arrived_at = arrived_at
        self._beside = beside
        self._begun_at: float | None = None
        self._first_token_at: float | None = None

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def begin(self, context: int, *, cached_tokens: int, now: float) -> None:
        self.context = context
        self.cached_tokens = cached_tokens
        self._begun_at = now

    def messages(self, choice: Choice, text: str, tokens: tuple[TokenLogprob, ...]) -> list[Message]:
        """What is to be said of the text and tokens that a choice has just given."""
        calls: tuple[ToolCall, ...] = ()
        if choice.calls is not None:
            text, calls = choice.calls.push(text, is_over=choice.finish_reason is not None)
        said: list[Message] = [Called(request_id=self.request_id, choice=choice.index, call=call) for call in calls]
        if text or tokens:
            said.insert(0, Chunk(request_id=self.request_id, choice=choice.index, text=text, tokens=tokens))
        return said

    def note_token(self, now: float) -> FirstToken | None:
        """A token of some choice was sampled; what was waited for it, if it is the first of all choices."""
        if self._first_token_at is not None or self._begun_at is None:
            return None
        self._first_token_at = now
        return FirstToken(
            queue_s=self._begun_at - self._arrived_at,
            prefill_s=now - self._begun_at,
            beside=self._beside,
            evaluated_tokens=len(self.prompt_ids) - self.cached_tokens,
        )

    def done(self, now: float) -> RequestDone:
        begun_at = now if self._begun_at is None else self._begun_at
        first_token_at = now if self._first_token_at is None else self._first_token_at
        return RequestDone(
            request_id=self.request_id,
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.cached_tokens,
            completion_tokens=sum(len(choice.completion_ids) for choice in self.choices),
            queue_s=begun_at - self._arrived_at,
            prefill_s=first_token_at - begun_at,
            decode_s=now - first_token_at,
        )


def _entry(sampled: Sampled, piece_of: PieceOf) -> TokenLogprob:
    data = piece_of(sampled.id)
    return TokenLogprob(
        id=sampled.id,
        text=data.decode(errors="replace"),
        bytes=tuple(data),
        logprob=sampled.shown,
        top=tuple(_alternative(token, logprob, piece_of(token)) for token, logprob in sampled.top),
    )


def _alternative(token: int, logprob: float, data: bytes) -> TopLogprob:
    return TopLogprob(id=token, text=data.decode(errors="replace"), bytes=tuple(data), logprob=logprob)
