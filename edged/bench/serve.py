"""Sampling speed over HTTP, prefill included: 1, 4 and 16 clients at once, without and with an adapter."""

from __future__ import annotations

import asyncio
import time

from edged.bench.figures import Figure
from edged.bench.session import Session, ask, at_rest, promote, require_adapter

CLIENTS = (1, 4, 16)
TOKENS = 64
TARGETS = {(1, False): 100.0, (16, False): 150.0, (16, True): 120.0}  # tokens/s on two cores
# Questions that a small model answers at length, so that nearly every answer takes all its tokens.
PROMPTS = (
    "Why do leaves change colour in autumn?",
    "How do I keep bread fresh?",
    "Why is the sea salty?",
    "How do I clean a wooden table?",
    "Why does ice float on water?",
    "How can I fall asleep faster?",
    "Why do onions make me cry?",
    "How do I stop my glasses from fogging up?",
)


async def measure(session: Session) -> list[Figure]:
    """Figures of sampling, in tokens a second."""
    version = await require_adapter(session)
    figures = []
    for with_adapter in (False, True):
        await promote(session, version if with_adapter else 0)
        for clients in CLIENTS:
            await at_rest(session)
            name = f"{clients} client{'s' if clients > 1 else ''}, {'with' if with_adapter else 'without'} adapter"
            samples = []
            for run in range(session.runs):
                session.show(f"sampling, {name}, {run + 1} of {session.runs}")
                samples.append(await tokens_per_second(session, clients, seed=1000 * (run + 1)))
            figures.append(
                Figure(
                    part="serve",
                    name=name,
                    unit="tokens/s",
                    samples=tuple(samples),
                    target=TARGETS.get((clients, with_adapter)),
                    better="higher",
                )
            )
    return figures


async def tokens_per_second(session: Session, clients: int, *, seed: int) -> float:
    """All tokens of `clients` answers asked at once, over the time until the last is complete."""
    started = time.monotonic()
    completions = await asyncio.gather(
        *(ask(session, PROMPTS[i % len(PROMPTS)], max_tokens=TOKENS, seed=seed + i) for i in range(clients))
    )
    elapsed_s = time.monotonic() - started
    return float(sum(c["usage"]["completion_tokens"] for c in completions)) / elapsed_s
