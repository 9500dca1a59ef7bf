"""Episodes, ratings and an open store for the tests of the store. Every test works on a real database file."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from edged.records import Caller, Episode, NewFeedback
from edged.store.store import Store

T = TypeVar("T")

MakeEpisode = Callable[..., Episode]
MakeFeedback = Callable[..., NewFeedback]
InStore = Callable[[Callable[[Store], Awaitable[T]]], T]


@pytest.fixture(scope="session")
def make_episode() -> MakeEpisode:
    def make(completion_id: str, **changes: Any) -> Episode:
        values: dict[str, Any] = {
            "id": 0,
            "completion_id": completion_id,
            "choice": 0,
            "created_at": 100.0,
            "kind": "chat",
            "model": "smollm2",
            "base_sha256": "b" * 64,
            "version": 0,
            "messages": [{"role": "user", "content": "Why?"}],
            "prompt": None,
            "prompt_ids": (1, 2, 3),
            "completion_ids": (4, 5),
            "logprobs": (-0.5, -0.25),
            "raw_logprobs": (-0.75, -1.5),
            "text": "Because.",
            "finish_reason": "stop",
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 0,
            "seed": 7,
            "max_tokens": None,
            "user": None,
            "metadata": {},
            "caller": "uid:1000",
        }
        return Episode(**{**values, **changes})

    return make


@pytest.fixture(scope="session")
def make_feedback() -> MakeFeedback:
    def make(completion_id: str, rating: float | None, **changes: Any) -> NewFeedback:
        values: dict[str, Any] = {
            "completion_id": completion_id,
            "choice": 0,
            "rating": rating,
            "correction": None,
            "reason": None,
            "user": None,
            "tags": (),
            "source": "api",
            "caller": "uid:1000",
        }
        return NewFeedback(**{**values, **changes})

    return make


@pytest.fixture(scope="session")
def operator() -> Caller:
    return Caller(name="uid:0", scopes=frozenset({"admin"}))


@pytest.fixture
def in_store(tmp_path: Path) -> InStore[Any]:
    """Runs a coroutine function on an open store; each call opens the same file again. The clock ticks 1, 2, 3, ..."""
    ticks = itertools.count(1)

    def run(scenario: Callable[[Store], Awaitable[Any]]) -> Any:
        async def opened() -> Any:
            store = await Store.open(tmp_path / "edged.db", clock=lambda: float(next(ticks)))
            try:
                return await scenario(store)
            finally:
                await store.close()

        return asyncio.run(opened())

    return run
