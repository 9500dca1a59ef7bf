"""What every part of the benchmark works on: a real daemon in its own folder, and the same few steps against it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from edged.cli.child import DaemonChild
from edged.cli.connect import checked_json
from edged.cli.exits import CommandError
from edged.demo.prompts import TRAINING
from edged.demo.survey import version_of

BURST = 16
BURST_TOKENS = 48
TEMPERATURE = 0.7
UPDATE_TIMEOUT_S = 600.0
IDLE_TIMEOUT_S = 120.0
POLL_S = 0.02
MAX_BURSTS_FOR_AN_ADAPTER = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """`show` is told what is being measured; `runs`: how often."""

    child: DaemonChild
    http: httpx.AsyncClient
    folder: Path
    runs: int
    show: Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """16 ratings and what followed. seconds: from the last rating on disk to the first answer of the new adapter, or
    to the verdict if the candidate was refused. stages: the daemon's own, in seconds."""

    seconds: float
    verdict: str
    version: int
    stages: dict[str, float]
    metrics: dict[str, float]


async def status(session: Session) -> dict[str, Any]:
    """The body of GET /v1/status."""
    body: dict[str, Any] = checked_json(await session.http.get("/v1/status"))
    return body


async def ask(
    session: Session, prompt: str, *, max_tokens: int, seed: int, temperature: float = TEMPERATURE
) -> dict[str, Any]:
    """One completion, whole."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": temperature,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    completion: dict[str, Any] = checked_json(await session.http.post("/v1/chat/completions", json=body))
    return completion


async def burst(session: Session, seed: int) -> Burst:
    """Sample 16 answers, let the box come to rest, rate them all at once, and wait for what follows."""
    completions = await sample_burst(session, seed)
    await at_rest(session)
    return await rate_burst(session, completions)


async def sample_burst(session: Session, seed: int) -> list[dict[str, Any]]:
    """16 completions, asked for at once."""
    prompts = [TRAINING[(seed + i) % len(TRAINING)] for i in range(BURST)]
    return await asyncio.gather(
        *(ask(session, prompt, max_tokens=BURST_TOKENS, seed=seed + i) for i, prompt in enumerate(prompts))
    )


async def rate_burst(session: Session, completions: Sequence[dict[str, Any]], *, spacing_s: float = 0.0) -> Burst:
    """Rate `completions` and wait for what follows.

    The shorter half gets +1 and the longer half -1, so that there is always contrast.

    Args:
        spacing_s: time from one rating to the next; 0 posts them all at once.
    """
    before = await status(session)
    by_length = sorted(completions, key=lambda c: len(c["choices"][0]["message"]["content"] or ""))
    ratings = [
        {"completion_id": c["id"], "rating": 1 if i < len(by_length) // 2 else -1} for i, c in enumerate(by_length)
    ]

    async def rate(position: int) -> httpx.Response:
        await asyncio.sleep(position * spacing_s)
        return await session.http.post("/v1/feedback", json=ratings[position])

    answers = await asyncio.gather(*(rate(position) for position in range(len(ratings))))
    started = time.monotonic()
    for answer in answers:
        checked_json(answer)
    return await _outcome(session, before, started)


async def _outcome(session: Session, before: dict[str, Any], started: float) -> Burst:
    old = before["adapter"]["version"]
    while time.monotonic() < started + UPDATE_TIMEOUT_S:
        now = await status(session)
        is_finished = now["learner"]["updates_total"] > before["learner"]["updates_total"]
        if is_finished and now["learner"]["last_update"]["verdict"] != "published":
            break
        if now["adapter"]["version"] != old:
            first = await ask(session, "Hello!", max_tokens=1, seed=1)
            if version_of(first["system_fingerprint"]) != old:
                break
        await asyncio.sleep(POLL_S)
    else:
        raise CommandError(f"no verdict {UPDATE_TIMEOUT_S:.0f} s after the last rating", hint="read the daemon's log")
    seconds = time.monotonic() - started
    await at_rest(session)
    last = (await status(session))["learner"]["last_update"]
    return Burst(
        seconds=seconds,
        verdict=last["verdict"],
        version=last["version"],
        stages=last["seconds"],
        metrics=last["metrics"],
    )


async def at_rest(session: Session) -> None:
    """Wait until nothing is answered and the learner neither trains nor judges.

    Raises CommandError if that does not come within `IDLE_TIMEOUT_S`.
    """
    give_up_at = time.monotonic() + IDLE_TIMEOUT_S
    while time.monotonic() < give_up_at:
        now = await status(session)
        is_learning = now["learner"]["state"] in ("training", "gating")
        is_working = any(worker.get("busy") for worker in now["workers"])
        if not (is_learning or is_working or now["serve"]["active"] or now["serve"]["queued"]):
            return
        await asyncio.sleep(POLL_S)
    raise CommandError(f"the daemon is not at rest after {IDLE_TIMEOUT_S:.0f} s", hint="`edged status` shows why")


async def require_adapter(session: Session) -> int:
    """A published version that is not the base, from a few bursts of ratings if there is none yet.

    Raises CommandError if every candidate was refused.
    """
    for attempt in range(MAX_BURSTS_FOR_AN_ADAPTER + 1):
        adapters = checked_json(await session.http.get("/v1/adapters"))["data"]
        published = [a["version"] for a in adapters if a["version"] and a["state"] == "published"]
        if published:
            return int(published[-1])
        if attempt < MAX_BURSTS_FOR_AN_ADAPTER:
            session.show("training an adapter")
            await burst(session, seed=7000 + BURST * attempt)
    raise CommandError("no adapter was published: every candidate was refused", hint="`edged adapters list` says why")


async def promote(session: Session, version: int) -> None:
    """Make `version` live, and return once new answers name it."""
    checked_json(await session.http.post(f"/v1/adapters/{version}/promote", json={}))
