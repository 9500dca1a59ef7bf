"""Tokens of written answers from the serve worker: the client side of Tokenise."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from edged.failure import JobRefused, WorkerLost
from edged.serve import translation
from edged.serve.answers import Engine
from edged.underway import Underway
from engine import protocol

ID_PREFIX = "tokenise-"  # no completion has an id like this


class Tokeniser:
    """Tokenise as an awaitable call. Lives on the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._underway = Underway(engine, "serve")
        self._numbers = itertools.count(1)

    async def tokenise(
        self, messages: Sequence[Mapping[str, Any]] | None, answer: str, *, prompt_tokens: int = 0
    ) -> protocol.Tokenised:
        """The tokens of an answer to `messages`, or, without them, behind a prompt of `prompt_tokens` tokens.

        Raises:
            JobRefused: the model has no tokens for it, with the code of `engine.protocol.RequestFailed`.
            WorkerLost: the worker is not there, or died meanwhile.
        """
        request_id = f"{ID_PREFIX}{next(self._numbers)}"
        turns = None if messages is None else translation.turns(messages)
        said = await self._underway.call(
            request_id,
            protocol.Tokenise(request_id=request_id, messages=turns, answer=answer, prompt_tokens=prompt_tokens),
        )
        match said:
            case protocol.Tokenised():
                return said
            case protocol.RequestFailed():
                raise JobRefused(said.code, said.message)
            case _:
                raise WorkerLost(f"the serve worker answered Tokenise with {type(said).__name__}")

    def received(self, message: protocol.Message) -> bool:
        """Take a message of the serve worker; False if it is not an answer to Tokenise."""
        match message:
            case protocol.Tokenised():
                self._underway.answer(message.request_id, message)
                return True
            case protocol.RequestFailed() if message.request_id.startswith(ID_PREFIX):
                self._underway.answer(message.request_id, message)
                return True
            case _:
                return False

    def down(self) -> None:
        """The worker is gone."""
        self._underway.lose()
