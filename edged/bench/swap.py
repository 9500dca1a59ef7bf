"""20 swaps under load: two versions promoted in turns while 8 clients stream.

A swap's cost is told by the daemon (`swap_ms`: no decode step ran because of it) and seen from outside (the longest
silence of any stream). An answer is mixed if its chunks name more than one adapter, or another than its episode, or if
its log-probabilities are not those of the adapter it names (`edged.bench.provenance`): answers are greedy for that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from edged.bench.figures import Figure
from edged.bench.provenance import TOP_LOGPROBS, Trace, bound, deviation, trace_of
from edged.bench.serve import PROMPTS
from edged.bench.session import Session, at_rest, promote, require_adapter
from edged.cli.connect import checked_json
from edged.demo.survey import version_of

SWAPS = 20
CLIENTS = 8
TOKENS = 48
BETWEEN_SWAPS_S = 0.5
SWAP_TARGET_MS = 50.0
PAGE_EPISODES = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A whole answer: the versions that its chunks named, and what it said to which prompt."""

    versions: set[int]
    prompt: str
    trace: Trace


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """What each version says to each prompt at rest, and by how much a crowd changes that, in nats."""

    traces: dict[int, dict[str, Trace]]
    bound_nats: float

    def n_telling(self) -> int:
        """Prompts to which every two versions say what the bound does not explain."""
        prompts = next(iter(self.traces.values()))
        return sum(
            all(deviation(a[p], b[p]) > self.bound_nats for a, b in itertools.permutations(self.traces.values(), 2))
            for p in prompts
        )


@dataclasses.dataclass(slots=True)
class Load:
    """What the streaming clients saw: each whole answer by its completion id."""

    answers: dict[str, Seen] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    longest_silence_s: float = 0.0


async def measure(session: Session) -> list[Figure]:
    """Figures of swaps under load."""
    version = await require_adapter(session)
    known = await _get_to_know(session, (version, 0))
    first_id = await _newest_episode(session)
    load, stop = Load(), asyncio.Event()
    swap_ms: list[float] = []
    reader = asyncio.create_task(_collect_swap_ms(session, swap_ms), name="swap-events")
    clients = [asyncio.create_task(_client(session, i, load, stop), name=f"client-{i}") for i in range(CLIENTS)]
    await asyncio.sleep(2.0)  # every client streams by now
    for swap in range(SWAPS):
        session.show(f"swapping under load, {swap + 1} of {SWAPS}")
        await promote(session, version if swap % 2 == 0 else 0)
        await asyncio.sleep(BETWEEN_SWAPS_S)
    stop.set()
    await asyncio.gather(*clients)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await at_rest(session)
    recorded = await _recorded_versions(session, first_id)
    return figures_of(load, swap_ms, recorded, known)


def figures_of(load: Load, swap_ms: list[float], recorded: dict[str, int], known: Known) -> list[Figure]:
    """The figures of what the clients saw and the episodes recorded (completion id -> adapter version)."""
    missing = sum(completion not in recorded for completion in load.answers)
    answered = f"of {len(load.answers) + len(load.failures)} answers"
    return [
        Figure(
            part="swap",
            name=f"swap under load, median of {len(swap_ms)}",
            unit="ms",
            samples=tuple(swap_ms),
            target=SWAP_TARGET_MS,
            note="" if swap_ms else "the daemon's events carry no swap_ms",
        ),
        Figure(
            part="swap",
            name="longest silence of a stream",
            unit="ms",
            samples=(load.longest_silence_s * 1000,),
            note=f"{CLIENTS} streams, {SWAPS} swaps",
        ),
        Figure(
            part="swap",
            name="failed answers",
            unit="",
            samples=(float(len(load.failures)),),
            target=0.0,
            note=load.failures[0] if load.failures else answered,
        ),
        Figure(
            part="swap", name="answers without episode", unit="", samples=(float(missing),), target=0.0, note=answered
        ),
        _mixed_figure(load, recorded, known),
    ]


def _mixed_figure(load: Load, recorded: dict[str, int], known: Known) -> Figure:
    """It could not be measured if the versions say the same, or if one of them never answered."""
    mixed = 0
    answers: dict[int, int] = dict.fromkeys(known.traces, 0)
    for completion, seen in load.answers.items():
        if completion not in recorded:
            continue
        named = recorded[completion]
        answers[named] = answers.get(named, 0) + 1
        reference = known.traces.get(named, {}).get(seen.prompt)
        mixed += seen.versions != {named} or reference is None or deviation(seen.trace, reference) > known.bound_nats
    telling = known.n_telling()
    by_version = ", ".join(f"{count} of v{version}" for version, count in sorted(answers.items()))
    return Figure(
        part="swap",
        name="answers mixing adapters",
        unit="",
        samples=(float(mixed),) if telling and all(answers.values()) else (),
        target=0.0,
        note=f"{by_version}; {telling} prompts tell them apart by more than {known.bound_nats:.2f} nats",
    )


async def _get_to_know(session: Session, versions: Sequence[int]) -> Known:
    """Ask every prompt of every version, alone and then all at once; the last of `versions` stays live."""
    traces: dict[int, dict[str, Trace]] = {}
    bounds = []
    for version in versions:
        await promote(session, version)
        await at_rest(session)
        session.show(f"what v{version} says")
        alone = {prompt: (await _stream(session, prompt, Load())).trace for prompt in PROMPTS}
        crowd = await asyncio.gather(*(_stream(session, prompt, Load()) for prompt in PROMPTS))
        traces[version] = alone
        bounds.append(bound(alone, {seen.prompt: seen.trace for seen in crowd}))
    return Known(traces, max(bounds))


async def _client(session: Session, number: int, load: Load, stop: asyncio.Event) -> None:
    turn = 0
    while not stop.is_set():
        prompt = PROMPTS[(number + turn) % len(PROMPTS)]
        try:
            await _stream(session, prompt, load)
        except (httpx.HTTPError, ValueError) as error:
            load.failures.append(f"{type(error).__name__}: {error}")
        turn += 1


async def _stream(session: Session, prompt: str, load: Load) -> Seen:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
        "stream": True,
    }
    completion, versions, is_whole = "", set[int](), False
    content: list[dict[str, Any]] = []
    last_at: float | None = None
    async with session.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for data in _data_lines(answer):
            now = time.monotonic()
            if last_at is not None:  # before the first chunk it waits for a slot, not for a swap
                load.longest_silence_s = max(load.longest_silence_s, now - last_at)
            last_at = now
            if data == "[DONE]":
                is_whole = True
                break
            event = json.loads(data)
            if "error" in event:
                raise ValueError(event["error"].get("message", "the stream ended with an error"))
            completion = event["id"]
            versions.add(version_of(event["system_fingerprint"]))
            for choice in event["choices"]:
                content += (choice.get("logprobs") or {}).get("content") or []
    if not is_whole:
        raise ValueError("the stream ended before [DONE]")
    load.answers[completion] = Seen(versions, prompt, trace_of(content))
    return load.answers[completion]


async def _data_lines(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


async def _collect_swap_ms(session: Session, swap_ms: list[float]) -> None:
    async with session.http.stream("GET", "/v1/events", timeout=None) as answer:
        async for data in _data_lines(answer):
            event: dict[str, Any] = json.loads(data)
            if isinstance(event.get("swap_ms"), int | float):
                swap_ms.append(float(event["swap_ms"]))


async def _newest_episode(session: Session) -> int:
    """An id below which every episode is older than now."""
    last = 0
    while data := checked_json(await session.http.get("/v1/episodes", params={"after": last, "limit": PAGE_EPISODES}))[
        "data"
    ]:
        last = int(data[-1]["id"])
    return last


async def _recorded_versions(session: Session, after: int) -> dict[str, int]:
    """Completion id -> adapter version of every episode after id `after`."""
    found: dict[str, int] = {}
    while data := checked_json(await session.http.get("/v1/episodes", params={"after": after, "limit": PAGE_EPISODES}))[
        "data"
    ]:
        found |= {episode["completion_id"]: int(episode["adapter_version"]) for episode in data}
        after = int(data[-1]["id"])
    return found
