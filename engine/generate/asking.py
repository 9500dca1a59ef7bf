"""Requests as they come: their tokens, how long an answer may be, and why one cannot be done. Knows no context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.generate.backend import Vocabulary
from engine.generate.prompt import Prompts
from engine.generate.sampling import Constraint, ConstraintFailed
from engine.generate.schema import BadSchema, grammar_of
from engine.generate.template import BadTemplate
from engine.protocol import ChatMessage, Generate, RequestFailed, Sampling, Tokenise, Tokenised


class Refused(Exception):
    """Raised when a request cannot be done; becomes RequestFailed. `code`: as there."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def as_message(self, request_id: str) -> RequestFailed:
        return RequestFailed(request_id=request_id, code=self.code, message=str(self))


class Grammars(Protocol):
    """What can hold an answer to a grammar."""

    def begin(self, grammar: str) -> Constraint:
        """At the beginning of `grammar`, in llama.cpp's language. Raises ConstraintFailed."""
        ...


class Asking:
    """Checks requests to one model."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompts: Prompts,
        *,
        context_tokens: int,
        trained_tokens: int,
        grammars: Grammars | None = None,
    ) -> None:
        """A sequence has no more tokens than the context holds, nor more than the model was trained for. grammars: None
        where the engine cannot hold answers to one."""
        self._grammars = grammars
        self._vocabulary = vocabulary
        self._prompts = prompts
        self._context_tokens = context_tokens
        self._trained_tokens = trained_tokens

    def check(self, message: Generate) -> tuple[tuple[int, ...], int]:
        """The prompt's tokens, and the most tokens that each choice may have. Raises Refused."""
        prompt_ids = self._prompt_ids(message)
        room = self._room(message, prompt_ids)
        self._check_bias(message.sampling)
        return prompt_ids, room

    def constraints(self, message: Generate) -> list[Constraint]:
        """What each choice is held to; [] if they may say anything. Raises Refused."""
        if message.schema is None:
            return []
        if self._grammars is None:
            raise Refused("bad_response_format", "this engine holds no answers to a schema; serve a GGUF file for that")
        try:
            grammar = grammar_of(message.schema)
            return [self._grammars.begin(grammar) for _ in range(message.n)]
        except (BadSchema, ConstraintFailed) as error:
            raise Refused("bad_response_format", str(error)) from None

    def tokenise(self, message: Tokenise) -> Tokenised:
        """The tokens of a written answer. Raises Refused."""
        prompt_ids = self._chat(message.messages) if message.messages is not None else ()
        completion_ids = self._prompts.answer(message.answer)
        n_prompt = len(prompt_ids) if message.messages is not None else message.prompt_tokens
        room = min(self._context_tokens, self._trained_tokens)
        if n_prompt + len(completion_ids) > room:
            n_tokens = n_prompt + len(completion_ids)
            reason = f"prompt and answer have {n_tokens} tokens together, the context holds {room}"
            raise Refused("context_length_exceeded", reason)
        return Tokenised(request_id=message.request_id, prompt_ids=prompt_ids, completion_ids=completion_ids)

    def _prompt_ids(self, message: Generate) -> tuple[int, ...]:
        if (message.messages is None) == (message.prompt is None):
            raise Refused("bad_prompt", "exactly one of messages and prompt must be set")
        if message.n < 1:
            raise Refused("bad_prompt", f"n: {message.n} choices asked, at least 1 is needed")
        if message.messages is not None:
            prompt_ids = self._chat(message.messages)
        else:
            assert message.prompt is not None
            prompt_ids = self._prompts.text(message.prompt)
        if not prompt_ids:
            raise Refused("bad_prompt", "prompt: it has no tokens; the model needs at least one")
        return prompt_ids

    def _chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        try:
            return self._prompts.chat(messages)
        except BadTemplate as error:
            raise Refused("bad_template", str(error)) from error

    def _check_bias(self, sampling: Sampling) -> None:
        unknown = [token for token, _ in sampling.logit_bias if token >= self._vocabulary.n_vocab]
        if unknown:
            reason = f"the model has no token {unknown[0]}: its tokens are 0 to {self._vocabulary.n_vocab - 1}"
            raise Refused("bad_logit_bias", reason)

    def _room(self, message: Generate, prompt_ids: tuple[int, ...]) -> int:
        left = min(self._context_tokens, self._trained_tokens) - len(prompt_ids)
        if left < 1:
            reason = too_long(len(prompt_ids), self._context_tokens, self._trained_tokens)
            raise Refused("context_length_exceeded", reason)
        asked = message.sampling.max_tokens
        if asked is not None and asked < 1:
            raise Refused("bad_prompt", f"max_tokens: {asked}, at least 1 is needed")
        return left if asked is None else min(asked, left)


def too_long(prompt_tokens: int, context_tokens: int, trained_tokens: int) -> str:
    """Why a prompt leaves no room for an answer, and what helps.

    Args:
        context_tokens: `serve.context_tokens`.
        trained_tokens: the longest sequence that the model was trained for.
    """
    told = f"the prompt has {prompt_tokens} tokens"
    if context_tokens < trained_tokens:
        return (
            f"{told}, the context holds {context_tokens} for prompt and answer together; shorten it or raise "
            "serve.context_tokens"
        )
    return f"{told}, the model takes {trained_tokens} for prompt and answer together; shorten it"
