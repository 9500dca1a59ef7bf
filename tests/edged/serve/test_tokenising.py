"""Tokenise as a call, against a worker whose answers the test writes."""

from __future__ import annotations

import asyncio

import pytest

from edged.failure import JobRefused, WorkerDown, WorkerLost
from edged.serve.tokenising import Tokeniser
from engine import protocol

MESSAGES = [{"role": "user", "content": "Why?"}]


class LightEngine:
    """Answers with what `says` makes of the message; with nothing if that is None."""

    def __init__(self) -> None:
        self.is_ready = True
        self.sent: list[protocol.Tokenise] = []
        self.code = ""
        self.tokeniser = Tokeniser(self)

    def send(self, message: protocol.Message) -> None:
        assert isinstance(message, protocol.Tokenise)
        self.sent.append(message)
        if self.code == "dies":
            asyncio.get_running_loop().call_soon(self.tokeniser.down)
            return
        said: protocol.Message = protocol.Tokenised(
            request_id=message.request_id, prompt_ids=(1,), completion_ids=(2, 3)
        )
        if self.code:
            said = protocol.RequestFailed(request_id=message.request_id, code=self.code, message="no")
        asyncio.get_running_loop().call_soon(self.tokeniser.received, said)


def test_an_answer_comes_back_as_tokens() -> None:
    engine = LightEngine()
    tokens = asyncio.run(engine.tokeniser.tokenise(MESSAGES, "Because."))
    assert (tokens.prompt_ids, tokens.completion_ids) == ((1,), (2, 3))
    assert engine.sent[0].messages == (protocol.ChatMessage(role="user", content="Why?"),)


def test_a_refusal_keeps_its_code() -> None:
    engine = LightEngine()
    engine.code = "bad_template"
    with pytest.raises(JobRefused, match="no") as refused:
        asyncio.run(engine.tokeniser.tokenise(None, "Because.", prompt_tokens=3))
    assert refused.value.code == "bad_template"
    assert (engine.sent[0].messages, engine.sent[0].prompt_tokens) == (None, 3)


def test_a_worker_that_dies_or_is_not_there_is_told_as_such() -> None:
    engine = LightEngine()
    engine.code = "dies"
    with pytest.raises(WorkerLost):
        asyncio.run(engine.tokeniser.tokenise(MESSAGES, "Because."))
    engine.is_ready = False
    with pytest.raises(WorkerDown):
        asyncio.run(engine.tokeniser.tokenise(MESSAGES, "Because."))


def test_a_failed_request_of_an_answer_is_left_to_others() -> None:
    failed = protocol.RequestFailed(request_id="chatcmpl-1", code="bad_prompt", message="no")
    assert not LightEngine().tokeniser.received(failed)
