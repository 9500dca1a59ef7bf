"""Sampling over HTTP, prefill included: 1, 4, 16 and 64 clients that stream, without and with an adapter.

Throughput is that of all answers together; time to the first token and between tokens is what each client sees.
`tests/bench/vs_servers.py` puts the same load on other servers.
"""

from __future__ import annotations

import itertools

from edged.bench.figures import Figure
from edged.bench.load import Loaded, chat_bodies, run_load
from edged.bench.processes import family, rss_bytes
from edged.bench.session import TEMPERATURE, Session, at_rest, promote, require_adapter

CLIENTS = (1, 4, 16, 64)
ANSWERS = {1: 6, 4: 12, 16: 32, 64: 64}  # clients -> answers asked for in one run
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
    """Figures of sampling."""
    version = await require_adapter(session)
    figures = []
    for with_adapter in (False, True):
        await promote(session, version if with_adapter else 0)
        for clients in CLIENTS:
            await at_rest(session)
            name = f"{clients} client{'s' if clients > 1 else ''}, {'with' if with_adapter else 'without'} adapter"
            loads = []
            for run in range(session.runs):
                session.show(f"sampling, {name}, {run + 1} of {session.runs}")
                loads.append(await load(session, clients, seed=1000 * (run + 1)))
            figures += figures_of(name, loads, TARGETS.get((clients, with_adapter)))
    resident_mb = sum(rss_bytes(pid) for pid in family(session.child.pid)) / 1e6
    return [*figures, Figure(part="serve", name="all processes, resident", unit="MB", samples=(resident_mb,))]


def figures_of(name: str, loads: list[Loaded], target: float | None) -> list[Figure]:
    """Throughput and latencies of the runs of one load."""
    throughput = Figure(
        part="serve",
        name=name,
        unit="tokens/s",
        samples=tuple(load.tokens_per_s for load in loads),
        target=target,
        better="higher",
    )
    latencies = {
        "first token": [load.first_ms() for load in loads],
        "between tokens": [load.between_ms() for load in loads],
    }
    return [
        throughput,
        *(
            Figure(part="serve", name=f"{name}, {what}, p{p}", unit="ms", samples=tuple(run[p] for run in runs))
            for what, runs in latencies.items()
            for p in runs[0]
        ),
    ]


async def load(session: Session, clients: int, *, seed: int) -> Loaded:
    """One run of the load of `clients`."""
    prompts = itertools.islice(itertools.cycle(PROMPTS), ANSWERS[clients])
    bodies = chat_bodies(prompts, max_tokens=TOKENS, seed=seed, temperature=TEMPERATURE)
    return await run_load(session.http, bodies, clients)
