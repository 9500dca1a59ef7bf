"""Streams are timed by their texts, counted by what the server reports, and never taken for whole if they are not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from edged.bench.load import Loaded, NotAnswered, Streamed, chat_bodies, percentiles_ms, run_load


def text(content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


def answered(events: Sequence[dict[str, Any] | str], clients: int = 1, questions: int = 1) -> Loaded:
    """The load against a server that sends `events`."""

    def serve(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["stream_options"] == {"include_usage": True}
        lines = [event if isinstance(event, str) else f"data: {json.dumps(event)}" for event in events]
        return httpx.Response(200, content="\n\n".join(lines).encode())

    async def load() -> Loaded:
        async with httpx.AsyncClient(base_url="http://box", transport=httpx.MockTransport(serve)) as http:
            bodies = chat_bodies(["Hello!"] * questions, max_tokens=4, seed=1, temperature=0.7)
            return await run_load(http, bodies, clients)

    return asyncio.run(load())


def test_tokens_are_those_that_the_server_reports() -> None:
    (answer,) = answered([text(""), text("Hel"), text("lo"), usage(7), "data: [DONE]"]).answers
    assert answer.tokens == 7
    assert len(answer.gaps_s) == 1


def test_texts_are_counted_where_nothing_is_reported() -> None:
    (answer,) = answered([text("a"), text("b"), text("c"), "data: [DONE]"]).answers
    assert (answer.tokens, len(answer.gaps_s)) == (3, 2)


def test_every_question_is_asked_once_whatever_the_number_of_clients() -> None:
    assert len(answered([text("a"), "data: [DONE]"], clients=4, questions=10).answers) == 10
    assert len(answered([text("a"), "data: [DONE]"], clients=8, questions=3).answers) == 3


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ([text("a")], "before"),
        ([text("a"), {"error": {"message": "broken"}}, "data: [DONE]"], "broken"),
        ([usage(0), "data: [DONE]"], "without a token"),
    ],
)
def test_an_answer_that_is_not_whole_ends_the_load(events: list[dict[str, Any] | str], what: str) -> None:
    with pytest.raises(NotAnswered, match=what):
        answered(events)


def test_percentiles_are_by_the_nearest_rank() -> None:
    assert percentiles_ms([n / 1000 for n in range(1, 101)]) == {50: 50.0, 95: 95.0, 99: 99.0}
    assert percentiles_ms([0.002]) == {50: 2.0, 95: 2.0, 99: 2.0}
    assert percentiles_ms([]) == {50: 0.0, 95: 0.0, 99: 0.0}


def test_gaps_of_all_answers_are_looked_at_together() -> None:
    answers = (
        Streamed(first_s=0.1, gaps_s=(0.01, 0.01), tokens=3),
        Streamed(first_s=0.3, gaps_s=(0.05,), tokens=2),
    )
    loaded = Loaded(seconds=2.0, answers=answers)
    assert loaded.tokens_per_s == 2.5
    assert loaded.between_ms()[50] == 10.0
    assert loaded.first_ms()[99] == 300.0
