"""What people wrote gets its tokens while the serve worker is there, oldest first.

It waits on disk until then, however long that takes; what the engine cannot make an answer of is dropped with the
engine's reason. Sampled answers are never tokenised: they have the engine's own ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from edged.failure import JobRefused, WorkerLost
from edged.learn.ports import Tokeniser, WrittenBook
from edged.records import WrittenText
from engine import protocol

log = logging.getLogger(__name__)

GROUP = 32  # rows that are read at once
NOT_THEIRS = "engine_error"  # a refusal that says nothing against what was written
RETRY_S = 30.0


class Tokenising:
    """`wake` after something was written, and when the serve worker got ready."""

    def __init__(
        self, book: WrittenBook, tokeniser: Tokeniser, *, base_sha256: str, on_tokenised: Callable[[], None]
    ) -> None:
        self._book = book
        self._tokeniser = tokeniser
        self._base_sha256 = base_sha256
        self._on_tokenised = on_tokenised
        self._awake = asyncio.Event()

    def wake(self) -> None:
        self._awake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._awake.clear()
            waits_s = None
            try:
                while group := await self._book.untokenised(GROUP, self._base_sha256):
                    for text in group:
                        await self._tokenise(text)
                    self._on_tokenised()
            except WorkerLost:
                pass  # its successor says when it is ready
            except JobRefused as refused:
                log.warning("what was written cannot be tokenised now, next try in %.0f s: %s", RETRY_S, refused)
                waits_s = RETRY_S
            await self._sleep(waits_s)

    async def _sleep(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._awake.wait()
        except TimeoutError:
            return

    async def _tokenise(self, text: WrittenText) -> None:
        """Give one its tokens, or drop it. Raises WorkerLost, and JobRefused if that is the engine's own fault."""
        if not text.chosen:
            await self._book.drop_written([(text.id, "empty")])
            return
        try:
            chosen = await self._tokeniser.tokenise(text.messages, text.chosen, prompt_tokens=text.prompt_tokens)
            rejected: protocol.Tokenised | None = None
            if text.rejected is not None:
                rejected = await self._tokeniser.tokenise(text.messages, text.rejected)
        except JobRefused as refused:
            if refused.code == NOT_THEIRS:
                raise
            log.warning("a %s (row %d) will not be trained on: %s", text.kind, text.id, refused)
            await self._book.drop_written([(text.id, refused.code)])
            return
        await self._book.set_tokens(
            text.id,
            base_sha256=self._base_sha256,
            prompt_ids=chosen.prompt_ids,
            chosen_ids=chosen.completion_ids,
            rejected_ids=() if rejected is None else rejected.completion_ids,
        )
