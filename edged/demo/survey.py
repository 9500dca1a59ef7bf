"""The simulated person at the daemon's door: asks, rates, and waits for what comes of it, all over HTTP.

Everything here is what any app could do; nothing looks into the daemon's files. Failures are `CommandError`s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx

from edged.cli.connect import checked_json
from edged.cli.exits import CommandError
from edged.cli.show import learner_text
from edged.demo.outcome import Answer, Score
from edged.demo.people import Person
from edged.demo.progress import Show

TEMPERATURE = 0.7  # at 1.0 a 135M model rambles; the recorded log-probabilities are of this distribution
MAX_TOKENS = 96
UPDATE_TIMEOUT_S = 600.0
SETTLED_S = 3.0  # a learner that still wants ratings after this long is not about to start
SCORES_TIMEOUT_S = 120.0
POLL_S = 0.1
BUSY = ("training", "gating")
PAGE_EPISODES = 500


async def ask(
    http: httpx.AsyncClient, person: Person, prompts: Sequence[str], *, seed: int, tag: str, show: Show
) -> list[Answer]:
    """One answer to each of `prompts`, all asked at once, each with its own seed; `person` rates them in private."""
    n_done = 0

    async def one(prompt: str, seed: int) -> Answer:
        nonlocal n_done
        answer = await _ask_one(http, person, prompt, seed=seed, tag=tag)
        n_done += 1
        show(f"{tag}: {n_done} of {len(prompts)} questions answered")
        return answer

    show(f"{tag}: asking {len(prompts)} questions")
    return list(await asyncio.gather(*(one(prompt, seed + i) for i, prompt in enumerate(prompts))))


async def _ask_one(http: httpx.AsyncClient, person: Person, prompt: str, *, seed: int, tag: str) -> Answer:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": TEMPERATURE,
        "max_tokens": MAX_TOKENS,
        "seed": seed,
        "metadata": {"demo": tag},
    }
    response = await http.post("/v1/chat/completions", json=body)
    completion = checked_json(response)
    choice = completion["choices"][0]
    text = choice["message"]["content"] or ""
    return Answer(
        prompt=prompt,
        completion_id=completion["id"],
        text=text,
        finish_reason=choice["finish_reason"],
        version=version_of(completion["system_fingerprint"]),
        rating=person.rate(prompt, text, choice["finish_reason"]),
    )


def version_of(fingerprint: str) -> int:
    """The adapter version in a `system_fingerprint`, "edged-<base sha8>-v<version>". Raises CommandError."""
    _, separator, version = fingerprint.rpartition("-v")
    if not separator or not version.isdigit():
        raise CommandError(f"system_fingerprint {fingerprint!r} names no adapter version; is the peer edged?")
    return int(version)


async def rate(http: httpx.AsyncClient, answers: Sequence[Answer]) -> None:
    """Post every rating, all at once. On return each is on the daemon's disk."""

    async def one(answer: Answer) -> None:
        body = {"completion_id": answer.completion_id, "rating": round(answer.rating, 3), "source": "demo"}
        checked_json(await http.post("/v1/feedback", json=body))

    await asyncio.gather(*(one(answer) for answer in answers))


async def status(http: httpx.AsyncClient) -> dict[str, Any]:
    """The body of GET /v1/status."""
    body: dict[str, Any] = checked_json(await http.get("/v1/status"))
    return body


async def await_update(http: httpx.AsyncClient, updates_before: int, *, show: Show) -> dict[str, Any] | None:
    """The update that follows the ratings just given, or None if the learner waits for more of them.

    Args:
        updates_before: `learner.updates_total` before the ratings were given.
    Raises:
        CommandError: no verdict within `UPDATE_TIMEOUT_S`.
    """
    started = time.monotonic()
    waiting_since = started
    while time.monotonic() < started + UPDATE_TIMEOUT_S:
        learner = (await status(http))["learner"]
        state = learner["state"]
        show(learner_text(learner))
        if state in BUSY:
            waiting_since = time.monotonic()
        elif learner["updates_total"] > updates_before:
            return dict(learner["last_update"])
        elif time.monotonic() > waiting_since + SETTLED_S and (
            state == "waiting_for_contrast" or learner["ratings_until_update"] > 0
        ):
            return None
        await asyncio.sleep(POLL_S)
    raise CommandError(f"the update has no verdict after {UPDATE_TIMEOUT_S:.0f} s", hint="read the daemon's log")


async def await_scores(http: httpx.AsyncClient, answers: Sequence[Answer], *, show: Show) -> dict[str, Score]:
    """The trainer's scores of `answers` by completion id; those that it has not scored in time are missing."""
    wanted = {answer.completion_id for answer in answers}
    scores: dict[str, Score] = {}
    give_up_at = time.monotonic() + SCORES_TIMEOUT_S
    while True:
        for episode in await _episodes(http):
            if episode["completion_id"] in wanted and (score := episode.get("score")) is not None:
                scores[episode["completion_id"]] = Score(logprob=score["reference_logprob"], kl=score["kl"])
        show(f"scoring answers, {len(scores)} of {len(wanted)}")
        if len(scores) == len(wanted) or time.monotonic() > give_up_at:
            return scores
        await asyncio.sleep(1.0)


async def _episodes(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    episodes: list[dict[str, Any]] = []
    more = True
    while more:
        after = episodes[-1]["id"] if episodes else 0
        params: dict[str, int] = {"after": after, "limit": PAGE_EPISODES}
        page = checked_json(await http.get("/v1/episodes", params=params))
        episodes += page["data"]
        more = page["has_more"] and bool(page["data"])
    return episodes
