"""How much of the time training may take while people are served. Pure: measured gaps and waits in, shares out.

On a CPU the trainer runs in the idle class, on a GPU it shares the card; either can leave the answers too slow (memory
bandwidth, caches and a kernel that has begun are not given back at once). Two things show it, each against what it is
while nothing trains.

The wait for the first token (`edged.learn.first_tokens`): where it is more than `ttft_inflation` times as long,
training has a smaller part of the time while somebody waits for a first token, a quarter of what it had at each step;
where it is far below that, the part grows again. Waits are short on a box that is not full, so this costs training
little; on a full one somebody always waits.

The gap between two tokens of a running answer, for as many answers at once: where gaps are more than SLOWDOWN_MAX times
as long, or first tokens are late although training rests for them as much as it can, the share while answers run at
all is halved; where gaps are far below that and first tokens are in time, it grows again.

Both have `min_share` as their floor, which learning keeps on a box that is never quiet. While nobody asks, the share
is 1.

The trainer rests between pieces of work so as to keep its share (`engine.train.pauses`); who tells it is
`edged.learn.pacing`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from edged.learn import first_tokens
from edged.learn.first_tokens import Waits
from engine.protocol import FirstToken, Gap

SLOWDOWN_MAX = 2.0
SLOWDOWN_SMALL = math.sqrt(SLOWDOWN_MAX)
STEPS_MIN = 8  # with training, before anything is concluded from them
GROWTH = 1.5
FIRST_DROP = 4.0  # waits come one a request, so there are few steps down to the floor
GAP_MIN_S = 1e-6  # a shorter one was not measured
MEMORY = 0.8  # of the running mean of quiet gaps, a report


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """min_share: the least of the time that training keeps, in (0, 1]. ttft_inflation: how many times as long a first
    token may take while training, above 1."""

    min_share: float
    ttft_inflation: float


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """What training may take, in (0, 1], and what that was concluded from.

    quiet_s: mean seconds of a gap while nothing trains, by how many answers ran. share: while answers run.
    first_share: while somebody waits for a first token. inflation: of first tokens while training, as measured last.
    """

    quiet_s: Mapping[int, float] = dataclasses.field(default_factory=dict)
    share: float = 1.0
    waits: Waits = dataclasses.field(default_factory=Waits)
    first_share: float = 1.0
    inflation: float | None = None


def observe(
    pace: Pace, gaps: Sequence[Gap], firsts: Sequence[FirstToken] = (), *, is_training: bool, targets: Targets
) -> Pace:
    """What follows from gaps and first tokens that were all measured with training, or all without it."""
    if not is_training:
        return dataclasses.replace(
            pace,
            quiet_s={**pace.quiet_s, **_learned(pace.quiet_s, gaps)},
            waits=first_tokens.without_training(pace.waits, firsts),
        )
    return _paced_by_gaps(_paced_by_firsts(pace, firsts, targets), gaps, targets)


def allowed(pace: Pace, *, answers_run: bool, somebody_waits: bool) -> float:
    """The share that training may take now. somebody_waits: for the first token of an answer."""
    share = pace.share if answers_run else 1.0
    return min(share, pace.first_share) if somebody_waits else share


def slowdown_of(quiet_s: Mapping[int, float], gaps: Sequence[Gap]) -> float | None:
    """How many times as long the gaps are as quiet ones; None if too few of them can be compared."""
    known = [gap for gap in gaps if gap.answers in quiet_s]
    if sum(gap.steps for gap in known) < STEPS_MIN:
        return None
    return sum(gap.seconds for gap in known) / sum(gap.steps * quiet_s[gap.answers] for gap in known)


def _paced_by_firsts(pace: Pace, firsts: Sequence[FirstToken], targets: Targets) -> Pace:
    if not firsts:
        return pace
    waits = first_tokens.with_training(pace.waits, firsts)
    inflation = first_tokens.inflation(waits)
    if inflation is None:
        return dataclasses.replace(pace, waits=waits)
    pace = dataclasses.replace(pace, waits=waits, inflation=inflation)
    # What was waited under another share says nothing of the new one.
    anew = dataclasses.replace(waits, training=())
    if inflation > targets.ttft_inflation:
        if pace.first_share > targets.min_share:
            return dataclasses.replace(pace, waits=anew, first_share=_held(pace.first_share / FIRST_DROP, targets))
        return dataclasses.replace(pace, waits=anew, share=_held(pace.share / 2, targets))
    if inflation < math.sqrt(targets.ttft_inflation) and pace.first_share < 1.0:
        return dataclasses.replace(pace, waits=anew, first_share=_held(pace.first_share * GROWTH, targets))
    return pace


def _paced_by_gaps(pace: Pace, gaps: Sequence[Gap], targets: Targets) -> Pace:
    share, slowdown = pace.share, slowdown_of(pace.quiet_s, gaps)
    if slowdown is not None and slowdown > SLOWDOWN_MAX:
        share /= 2
    elif slowdown is not None and slowdown < SLOWDOWN_SMALL and _is_in_time(pace, targets):
        share *= GROWTH
    return dataclasses.replace(pace, share=_held(share, targets), first_share=_held(pace.first_share, targets))


def _is_in_time(pace: Pace, targets: Targets) -> bool:
    return pace.inflation is None or pace.inflation <= targets.ttft_inflation


def _held(share: float, targets: Targets) -> float:
    return max(targets.min_share, min(1.0, share))


def _learned(quiet_s: Mapping[int, float], gaps: Sequence[Gap]) -> dict[int, float]:
    means = {gap.answers: gap.seconds / gap.steps for gap in gaps if gap.steps and gap.seconds >= GAP_MIN_S * gap.steps}
    return {n: MEMORY * quiet_s.get(n, mean) + (1.0 - MEMORY) * mean for n, mean in means.items()}
