"""Removing a user: copies outside the store are gone before anybody is told."""

from __future__ import annotations

import asyncio
from typing import Any

from edged.records import Caller
from edged.removal import RecordedAnswers

OPERATOR = Caller(name="uid:0", scopes=frozenset({"admin"}))


class LightBook:
    """A book that notes what is asked of it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    async def list(self, **_: Any) -> list[Any]:
        return []

    async def delete_user(self, user: str, *, caller: Caller) -> int:
        await asyncio.sleep(0)
        self._log.append(f"store: {user} by {caller.name}")
        return 3


def test_copies_are_forgotten_after_the_rows_and_before_the_answer() -> None:
    log: list[str] = []

    async def forget() -> None:
        await asyncio.sleep(0)
        log.append("copies")

    async def scenario() -> None:
        answers = RecordedAnswers(LightBook(log), forget)
        assert await answers.delete_user("ann", caller=OPERATOR) == 3
        assert log == ["store: ann by uid:0", "copies"]

    asyncio.run(scenario())
