"""Requests as they come: their tokens, how long an answer may be, and why one cannot be done. Knows no context."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from engine.fault import EngineFault
from engine.generate.backend import DecodeFailed, Vocabulary
from engine.generate.calls import CallStream, Syntax, grammar_of_call, tools_of
from engine.generate.keywords import BadSchema
from engine.generate.length import excess
from engine.generate.prompt import Prompts
from engine.generate.sampling import Constraint, ConstraintFailed
from engine.generate.schema import grammar_of
from engine.generate.template import BadTemplate
from engine.protocol import ChatMessage, Generate, RequestFailed, Sampling, Tokenise, Tokenised

log = logging.getLogger(__name__)


class Refused(Exception):
    """Raised when a request cannot be done; becomes RequestFailed. `code`: as there."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def as_message(self, request_id: str) -> RequestFailed:
        return RequestFailed(request_id=request_id, code=self.code, message=str(self))


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """A request that can be done. room: the most tokens that each choice may have. held_to and calls: of each choice;
    None where it may say anything, and where no tools are offered."""

    prompt_ids: tuple[int, ...]
    room: int
    sampling: Sampling
    held_to: tuple[Constraint | None, ...]
    calls: tuple[CallStream | None, ...]


class Grammars(Protocol):
    """What can hold an answer to a grammar."""

    def begin(self, grammar: str, n: int) -> Sequence[Constraint]:
        """`n` constraints at the beginning of `grammar`, in llama.cpp's language. Raises ConstraintFailed."""
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

    def check(self, message: Generate) -> Accepted:
        """What its choices are made of. Raises Refused."""
        with _its_own_failure(message.request_id):
            return self._check(message)

    def _check(self, message: Generate) -> Accepted:
        syntax = self._syntax(message)
        offered = [] if message.tools is None else json.loads(message.tools)
        prompt_ids = self._prompt_ids(message, offered)
        room = self._room(message, prompt_ids)
        self._check_bias(message.sampling)
        sampling = message.sampling
        calls: tuple[CallStream | None, ...] = (None,) * message.n
        if syntax is not None and offered:
            tools = tools_of(offered)
            calls = tuple(CallStream(syntax, [tool.name for tool in tools]) for _ in range(message.n))
            if message.one_call and syntax.closing:
                sampling = dataclasses.replace(sampling, stop=(*sampling.stop, syntax.closing))
        return Accepted(prompt_ids, room, sampling, self._constraints(message, syntax, offered), calls)

    def _syntax(self, message: Generate) -> Syntax | None:
        """How calls are written, if the request is about any."""
        turns = message.messages or ()
        if message.tools is None and not any(turn.tool_calls or turn.role == "tool" for turn in turns):
            return None
        syntax = self._prompts.call_syntax
        if syntax is None:
            raise Refused(
                "tools_not_supported",
                "the chat template of this model shows no tools, or writes calls in a form that this server does not "
                "read; leave tools out, or set tool_choice to 'none'",
            )
        return syntax

    def _constraints(
        self, message: Generate, syntax: Syntax | None, offered: Sequence[Mapping[str, Any]]
    ) -> tuple[Constraint | None, ...]:
        """What each choice is held to; None where it may say anything."""
        if message.schema is None and not message.must_call:
            return (None,) * message.n
        code = "bad_response_format" if message.schema is not None else "bad_tools"
        if self._grammars is None:
            raise Refused(code, "this engine holds no answers to a grammar; serve a GGUF file for that")
        try:
            if message.schema is not None:
                grammar = grammar_of(message.schema)
            else:
                if syntax is None:
                    raise BadSchema("there is no tool to call")
                grammar = grammar_of_call(syntax, [t for t in tools_of(offered) if t.name in message.must_call])
            return tuple(self._grammars.begin(grammar, message.n))
        except (BadSchema, ConstraintFailed) as error:
            raise Refused(code, str(error)) from None

    def tokenise(self, message: Tokenise) -> Tokenised:
        """The tokens of a written answer. Raises Refused."""
        with _its_own_failure(message.request_id):
            return self._tokenise(message)

    def _tokenise(self, message: Tokenise) -> Tokenised:
        turns = message.messages or ()
        self._check_length([*(turn.content for turn in turns), message.answer], len(turns))
        prompt_ids = self._chat(message.messages) if message.messages is not None else ()
        completion_ids = self._prompts.answer(message.answer)
        n_prompt = len(prompt_ids) if message.messages is not None else message.prompt_tokens
        room = min(self._context_tokens, self._trained_tokens)
        if n_prompt + len(completion_ids) > room:
            n_tokens = n_prompt + len(completion_ids)
            reason = f"prompt and answer have {n_tokens} tokens together, the context holds {room}"
            raise Refused("context_length_exceeded", reason)
        return Tokenised(request_id=message.request_id, prompt_ids=prompt_ids, completion_ids=completion_ids)

    def _prompt_ids(self, message: Generate, offered: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        if (message.messages is None) == (message.prompt is None):
            raise Refused("bad_prompt", "exactly one of messages and prompt must be set")
        if message.n < 1:
            raise Refused("bad_prompt", f"n: {message.n} choices asked, at least 1 is needed")
        turns = message.messages or ()
        self._check_length([message.prompt or "", *(turn.content for turn in turns)], len(turns))
        if message.messages is not None:
            prompt_ids = self._chat(message.messages, offered)
        else:
            assert message.prompt is not None
            prompt_ids = self._prompts.text(message.prompt)
        if not prompt_ids:
            raise Refused("bad_prompt", "prompt: it has no tokens; the model needs at least one")
        return prompt_ids

    def _check_length(self, texts: Sequence[str], n_turns: int = 0) -> None:
        """n_turns: turns that the texts are said in, each of which a template marks with a token at least."""
        room = min(self._context_tokens, self._trained_tokens)
        told = f"has {n_turns} messages" if n_turns > room else excess(self._vocabulary, texts, room)
        if told is not None:
            reason = too_long(told, self._context_tokens, self._trained_tokens)
            raise Refused("context_length_exceeded", reason)

    def _chat(self, messages: Sequence[ChatMessage], offered: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        try:
            text = self._prompts.laid_out(messages, offered)
        except BadTemplate as error:
            raise Refused("bad_template", str(error)) from error
        if not _is_text(text):
            raise Refused(
                "bad_prompt",
                f"{_part_that_is_no_text(messages)}: it holds half of a surrogate pair, which is no character; send "
                "the whole pair, or leave it out",
            )
        self._check_length([text])  # with the template's own text, tools and calls
        return self._prompts.tokens_of(text)

    def _check_bias(self, sampling: Sampling) -> None:
        unknown = [token for token, _ in sampling.logit_bias if token >= self._vocabulary.n_vocab]
        if unknown:
            reason = f"the model has no token {unknown[0]}: its tokens are 0 to {self._vocabulary.n_vocab - 1}"
            raise Refused("bad_logit_bias", reason)

    def _room(self, message: Generate, prompt_ids: tuple[int, ...]) -> int:
        left = min(self._context_tokens, self._trained_tokens) - len(prompt_ids)
        if left < 1:
            reason = too_long(f"has {len(prompt_ids)} tokens", self._context_tokens, self._trained_tokens)
            raise Refused("context_length_exceeded", reason)
        asked = message.sampling.max_tokens
        if asked is not None and asked < 1:
            raise Refused("bad_prompt", f"max_tokens: {asked}, at least 1 is needed")
        return left if asked is None else min(asked, left)


@contextlib.contextmanager
def _its_own_failure(request_id: str) -> Iterator[None]:
    """What fails in here is the request's own failure and nobody else's. Faults of the engine go on."""
    try:
        yield
    except (Refused, EngineFault, DecodeFailed, MemoryError):
        raise
    except Exception as error:
        log.exception("request %s could not be prepared", request_id)
        reason = f"the request could not be prepared: {type(error).__name__}: {error}"
        raise Refused("engine_error", reason.encode(errors="backslashreplace").decode()) from error


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _part_that_is_no_text(messages: Sequence[ChatMessage]) -> str:
    """Its name in the request. Half of a pair hides in the arguments of calls, which are JSON inside of JSON."""
    for number, message in enumerate(messages):
        for place, call in enumerate(message.tool_calls):
            with contextlib.suppress(ValueError, RecursionError):
                if not _is_text(json.dumps(json.loads(call.arguments), ensure_ascii=False)):
                    return f"messages[{number}].tool_calls[{place}].function.arguments"
    return "messages"


def too_long(what: str, context_tokens: int, trained_tokens: int) -> str:
    """Why a prompt leaves no room for an answer, and what helps.

    Args:
        what: what the prompt has, as "has 9000 tokens".
        context_tokens: `serve.context_tokens`.
        trained_tokens: the longest sequence that the model was trained for.
    """
    told = f"the prompt {what}"
    if context_tokens < trained_tokens:
        return (
            f"{told}, the context holds {context_tokens} for prompt and answer together; shorten it or raise "
            "serve.context_tokens"
        )
    return f"{told}, the model takes {trained_tokens} for prompt and answer together; shorten it"
