"""Streamed chat answers at a server that speaks OpenAI's API, any such server: how fast they come, and how evenly.

A load is closed: each of so many clients asks again as soon as its answer is whole, until all questions are asked.
Tokens are counted as the server reports them (`stream_options.include_usage`), or by chunks where it does not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import httpx

PERCENTILES = (50, 95, 99)


class NotAnswered(Exception):
    """Raised when a stream ended with an error, early, or without a token."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """One whole answer. first_s: from the request to the first text. gaps_s: from each text to the next."""

    first_s: float
    gaps_s: tuple[float, ...]
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load gave. seconds: from the first request to the last answer's end."""

    seconds: float
    answers: tuple[Streamed, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def first_ms(self) -> dict[int, float]:
        """Percentile -> time to the first token."""
        return percentiles_ms([answer.first_s for answer in self.answers])

    def between_ms(self) -> dict[int, float]:
        """Percentile -> time between tokens, over all answers together."""
        return percentiles_ms([gap_s for answer in self.answers for gap_s in answer.gaps_s])


def percentiles_ms(seconds: Sequence[float]) -> dict[int, float]:
    """PERCENTILES of `seconds`, by the nearest rank, in milliseconds; 0 where there are none."""
    ordered = sorted(seconds)
    if not ordered:
        return dict.fromkeys(PERCENTILES, 0.0)
    return {p: ordered[max(0, -(-len(ordered) * p // 100) - 1)] * 1000 for p in PERCENTILES}


async def run_load(http: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], clients: int) -> Loaded:
    """Ask every one of `bodies` (of POST /v1/chat/completions), `clients` at a time.

    Raises NotAnswered and httpx.HTTPError: a load in which one request fails is no measurement.
    """
    waiting = iter(bodies)
    began = time.monotonic()
    found = await asyncio.gather(*(_client(http, waiting) for _ in range(clients)))
    return Loaded(seconds=time.monotonic() - began, answers=tuple(answer for of_one in found for answer in of_one))


async def _client(http: httpx.AsyncClient, waiting: Iterator[dict[str, Any]]) -> list[Streamed]:
    return [await stream(http, body) for body in waiting]


async def stream(http: httpx.AsyncClient, body: dict[str, Any]) -> Streamed:
    """One answer to the end of its stream. Raises NotAnswered and httpx.HTTPError."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    began = time.monotonic()
    times_s: list[float] = []
    tokens: int | None = None
    async with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        answer.raise_for_status()
        async for event in events(answer):
            if "error" in event:
                raise NotAnswered(f"the stream ended with an error: {event['error']}")
            if any(choice["delta"].get("content") for choice in event["choices"]):
                times_s.append(time.monotonic())
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not times_s:
        raise NotAnswered("the stream ended without a token")
    gaps_s = tuple(later - earlier for earlier, later in itertools.pairwise(times_s))
    return Streamed(first_s=times_s[0] - began, gaps_s=gaps_s, tokens=len(times_s) if tokens is None else tokens)


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The objects of a server-sent stream. Raises NotAnswered if it ends before [DONE]."""
    async for line in answer.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if data == "[DONE]":
            return
        yield json.loads(data)
    raise NotAnswered("the stream ended before [DONE]")


def chat_bodies(prompts: Iterable[str], *, max_tokens: int, seed: int, temperature: float) -> list[dict[str, Any]]:
    """A request for each of `prompts`, each with a seed of its own."""
    return [
        {
            "model": "default",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed + index,
        }
        for index, prompt in enumerate(prompts)
    ]
