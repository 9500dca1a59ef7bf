"""Where an update's time goes, from the last of 16 ratings to the live adapter, as the daemon itself reports it.

Once with a trainer that has to be started for it; then ratings in one burst, and a second apart, when the trainer can
score ahead between them. The stages are those of the update's record (`edged.learn.laps`), which add up to the time
from rating to live; only published updates count, for the others stop half way.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from edged.bench.figures import Figure
from edged.bench.processes import cpu_s, family, peak_rss_bytes
from edged.bench.session import BURST, Burst, Session, at_rest, burst, rate_burst, require_adapter, sample_burst, status
from edged.learn.laps import parts_of

BURST_TARGET_S = 6.0
SPACED_TARGET_S = 3.0
SPACING_S = 1.0
TRAINER_TARGET_MB = 1600.0
TRAINER = "train"
COLD_SEED = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One update. cpu_s: of all the daemon's processes, from the last rating until the new adapter answered.
    trainer_peak_bytes: the most memory that the train worker has had resident so far; 0 if it is gone."""

    burst: Burst
    cpu_s: float
    trainer_peak_bytes: int


async def measure(session: Session) -> list[Figure]:
    """Figures of updates, the first with a cold trainer if no part before this one has warmed it up."""
    session.show("update, cold trainer")
    cold = await burst(session, COLD_SEED)
    await require_adapter(session)
    at_once = await _updates(session, "ratings in a burst", first_seed=5000, spacing_s=0.0)
    spaced = await _updates(session, "ratings a second apart", first_seed=6000, spacing_s=SPACING_S)
    return [cold_figure(cold), *figures_of(at_once, spaced, len(os.sched_getaffinity(0)))]


def cold_figure(cold: Burst) -> Figure:
    """From 16 ratings to live, with the start of the trainer in it."""
    note = "" if cold.verdict == "published" else f"up to the verdict: {cold.verdict}"
    return _figure("16 ratings in a burst -> live, cold trainer", "s", [cold.seconds], note=note)


async def _updates(session: Session, name: str, *, first_seed: int, spacing_s: float) -> list[Observed]:
    observed = []
    for run in range(session.runs):
        session.show(f"update, {name}, {run + 1} of {session.runs}")
        completions = await sample_burst(session, first_seed + run * BURST)
        await at_rest(session)
        # A rated answer is on disk at once, so nearly all CPU time between here and the verdict is the update's.
        before = {pid: cpu_s(pid) for pid in family(session.child.pid)}
        rated = await rate_burst(session, completions, spacing_s=spacing_s)
        used_s = sum(cpu_s(pid) - before.get(pid, 0.0) for pid in family(session.child.pid))
        workers = {worker["name"]: worker["pid"] for worker in (await status(session))["workers"]}
        pid = workers.get(TRAINER)
        observed.append(
            Observed(burst=rated, cpu_s=used_s, trainer_peak_bytes=0 if pid is None else peak_rss_bytes(pid))
        )
    return observed


def figures_of(at_once: Sequence[Observed], spaced: Sequence[Observed], n_cores: int) -> list[Figure]:
    """The table: rating to live both ways, each stage, and what the update was worth."""
    published = [one for one in at_once if one.burst.verdict == "published"]
    spaced_published = [one for one in spaced if one.burst.verdict == "published"]
    stages = [parts_of(one.burst.stages) for one in published]
    names = sorted({name for one in stages for name in one})
    tokens = [one.burst.metrics["tokens/all"] for one in published]
    trained_s = [one.burst.stages["train"] for one in published]
    return [
        _figure(
            "16 ratings in a burst -> live",
            "s",
            [one.burst.seconds for one in published],
            target=BURST_TARGET_S,
            note=_refused(at_once),
        ),
        _figure(
            f"16 ratings {SPACING_S:g} s apart -> live",
            "s",
            [one.burst.seconds for one in spaced_published],
            target=SPACED_TARGET_S,
            note=_refused(spaced),
        ),
        *(_figure(f"of it: {name}", "s", [one.get(name, 0.0) for one in stages]) for name in names),
        _figure("tokens of the batch, prompts included", "", tokens),
        _figure("optimizer steps", "", [one.burst.metrics["policy/steps"] for one in published]),
        _figure(
            "batch tokens a second of training", "tokens/s", [n / s for n, s in zip(tokens, trained_s, strict=True)]
        ),
        _figure("cores that the trainer kept busy", "%", [100 * one.burst.metrics["busy/cores"] for one in published]),
        _figure("lanes at work in it", "%", [100 * one.burst.metrics["busy/lanes"] for one in published]),
        _figure(
            "moved between its processes", "MB", [one.burst.metrics["bytes/between_ranks"] / 1e6 for one in published]
        ),
        _figure("scoring its answers ahead took", "s", [one.burst.metrics["ahead/score_s"] for one in published]),
        _figure(
            "cores busy from rating to live", "%", [100 * one.cpu_s / one.burst.seconds / n_cores for one in published]
        ),
        _figure(
            "trainer, peak resident",
            "MB",
            [one.trainer_peak_bytes / 1e6 for one in published if one.trainer_peak_bytes],
            target=TRAINER_TARGET_MB,
        ),
        _figure(
            "swap after an update, idle box",
            "ms",
            [one.burst.metrics["swap_ms"] for one in published if "swap_ms" in one.burst.metrics],
        ),
        _figure("written to disk", "MB", [one.burst.metrics["bytes/written"] / 1e6 for one in published]),
    ]


def _refused(observed: Sequence[Observed]) -> str:
    reasons = [one.burst.verdict for one in observed if one.burst.verdict != "published"]
    return f"{len(reasons)} of {len(observed)} were not published: {', '.join(sorted(set(reasons)))}" if reasons else ""


def _figure(name: str, unit: str, samples: Sequence[float], *, target: float | None = None, note: str = "") -> Figure:
    return Figure(part="update", name=name, unit=unit, samples=tuple(samples), target=target, note=note)
