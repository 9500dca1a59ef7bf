"""Requests are checked each for itself: what is said of a prompt that leaves no room, and what a failure ends."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import cast

import pytest

from engine.fault import EngineFault
from engine.generate.asking import Asking, Refused, too_long
from engine.generate.backend import DecodeFailed, Vocabulary
from engine.generate.prompt import Prompts
from engine.protocol import ChatMessage, Generate, Tokenise, ToolCall
from tests.engine.generate.desk import chat
from tests.engine.generate.tool_templates import HERMES


def test_where_the_setting_is_the_limit_raising_it_is_the_advice() -> None:
    assert too_long("has 5000 tokens", 4096, 8192) == (
        "the prompt has 5000 tokens, the context holds 4096 for prompt and answer together; shorten it or raise "
        "serve.context_tokens"
    )


@pytest.mark.parametrize("context_tokens", [8192, 10240])
def test_where_the_model_is_the_limit_nothing_but_a_shorter_prompt_helps(context_tokens: int) -> None:
    assert too_long("has 9000 tokens", context_tokens, 8192) == (
        "the prompt has 9000 tokens, the model takes 8192 for prompt and answer together; shorten it"
    )


class Characters:
    """A vocabulary of characters, which fails at what a test says."""

    n_vocab = 256
    eos_ids = frozenset({0})
    chat_template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"

    def __init__(self) -> None:
        self.fails_at: tuple[str, Exception] | None = None
        self.n_tokenised = 0

    def special_text(self, kind: str) -> str:
        return ""

    def end_token(self) -> int:
        return 0

    def tokenise(self, text: str, *, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        if self.fails_at is not None and self.fails_at[0] in text:
            raise self.fails_at[1]
        self.n_tokenised += len(text)
        return tuple(ord(char) % self.n_vocab for char in text)


def asking(vocabulary: Characters, room_tokens: int = 100) -> Asking:
    known = cast(Vocabulary, vocabulary)
    return Asking(known, Prompts(known), context_tokens=room_tokens, trained_tokens=room_tokens)


def asked(*contents: str) -> Generate:
    messages = tuple(ChatMessage(role="user", content=content) for content in contents)
    return Generate(request_id="r", messages=messages, prompt=None, n=1, sampling=chat().sampling)


def written(answer: str) -> Tokenise:
    return Tokenise(request_id="t", answer=answer, messages=(ChatMessage(role="user", content="Hi"),))


def test_what_fails_while_a_request_is_prepared_is_the_failure_of_that_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The half of a character in it cannot be passed on to a terminal, or from one process of the tests to another.
    monkeypatch.setattr(logging.getLogger("engine.generate.asking"), "disabled", True)
    vocabulary = Characters()
    desk = asking(vocabulary)
    vocabulary.fails_at = ("boom", ValueError("half: \ud83d"))
    for failing in (lambda: desk.check(asked("boom")), lambda: desk.tokenise(written("boom"))):
        with pytest.raises(Refused) as refused:
            failing()
        assert refused.value.code == "engine_error"
        assert str(refused.value) == "the request could not be prepared: ValueError: half: \\ud83d"
    assert desk.check(asked("Hi")).prompt_ids == tuple(map(ord, "<Hi>"))


@pytest.mark.parametrize("fault", [EngineFault("out_of_memory", "no room"), MemoryError(), DecodeFailed("no batch")])
def test_a_fault_of_the_engine_stays_one(fault: Exception) -> None:
    vocabulary = Characters()
    vocabulary.fails_at = ("boom", fault)
    with pytest.raises(type(fault)):
        asking(vocabulary).check(asked("boom"))


def test_more_messages_than_the_context_has_tokens_are_refused_before_they_are_laid_out() -> None:
    vocabulary = Characters()
    desk = asking(vocabulary)
    vocabulary.fails_at = ("", AssertionError("nothing is to be tokenised"))
    for failing in (
        lambda: desk.check(asked(*[""] * 101)),
        lambda: desk.tokenise(Tokenise(request_id="t", answer="", messages=asked(*[""] * 101).messages)),
    ):
        with pytest.raises(Refused, match="the prompt has 101 messages, the model takes 100 ") as refused:
            failing()
        assert refused.value.code == "context_length_exceeded"


CALL = ToolCall(id="c", name="f", arguments=json.dumps({"x": "y" * 5_000}))
TOOL = {"type": "function", "function": {"name": "f", "description": "d" * 5_000}}
BESIDE_WHAT_IS_SAID = {
    "marks of turns": ("{% for message in messages %}<|im_start|><|im_end|>{% endfor %}", asked(*[""] * 99)),
    "tools": (HERMES, dataclasses.replace(asked("Hi"), tools=json.dumps([TOOL]))),
    "calls": (
        HERMES,
        dataclasses.replace(asked(), messages=(ChatMessage(role="assistant", content="", tool_calls=(CALL,)),)),
    ),
}


@pytest.mark.parametrize("kind", BESIDE_WHAT_IS_SAID)
def test_what_stands_beside_what_is_said_counts_before_it_is_tokenised(kind: str) -> None:
    vocabulary = Characters()
    vocabulary.chat_template, message = BESIDE_WHAT_IS_SAID[kind]
    desk = asking(vocabulary)
    before = vocabulary.n_tokenised
    with pytest.raises(Refused, match=r"the prompt has \d+ bytes") as refused:
        desk.check(message)
    assert refused.value.code == "context_length_exceeded"
    assert vocabulary.n_tokenised == before
