"""From the last of 16 ratings to an answer of the new adapter: the first time with a cold trainer, then warm."""

from __future__ import annotations

import statistics

from edged.bench.figures import Figure
from edged.bench.session import BURST, Burst, Session, burst

TARGET_S = 10.0


async def measure(session: Session) -> list[Figure]:
    """Figures of the loop from rating to live adapter."""
    session.show("ratings -> new adapter, cold trainer")
    cold = await burst(session, seed=100)
    warm = []
    for run in range(session.runs):
        session.show(f"ratings -> new adapter, warm trainer, {run + 1} of {session.runs}")
        warm.append(await burst(session, seed=200 + run * BURST))
    published = [b for b in warm if b.verdict == "published"]
    refused = len(warm) - len(published)
    return [
        Figure(
            part="loop",
            name="16 ratings -> new adapter answers, cold trainer",
            unit="s",
            samples=(cold.seconds,),
            note="" if cold.verdict == "published" else f"up to the verdict: {cold.verdict}",
            detail=cold.stages,
        ),
        Figure(
            part="loop",
            name="16 ratings -> new adapter answers",
            unit="s",
            samples=tuple(b.seconds for b in published),
            target=TARGET_S,
            note=f"{refused} of {len(warm)} candidates refused" if refused else "",
            detail=median_stages(published),
        ),
        Figure(
            part="loop",
            name="swap after an update, idle box",
            unit="ms",
            samples=tuple(b.metrics["swap_ms"] for b in [cold, *published] if "swap_ms" in b.metrics),
        ),
    ]


def median_stages(bursts: list[Burst]) -> dict[str, float]:
    """Median seconds of each stage that every burst reports."""
    if not bursts:
        return {}
    common = set.intersection(*(set(b.stages) for b in bursts))
    return {stage: statistics.median(b.stages[stage] for b in bursts) for stage in sorted(common)}
