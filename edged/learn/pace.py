"""How much of the time training may take while answers run. Pure: measured gaps in, a share out.

On a CPU the trainer runs in the idle class, on a GPU it shares the card; either can leave the answers too slow (memory
bandwidth, caches and a kernel that has begun are not given back at once). What shows it is the gap between two tokens
of a running answer: its length while training, against its length while nothing trains, for as many answers at once.
Where gaps are more than SLOWDOWN_MAX times as long, the share is halved, down to `min_share`, which learning keeps on a
box that is never quiet; where they are far below that, it grows again. While nobody asks, the share is 1.

The trainer rests between pieces of work so as to keep its share (`engine.train.pauses`); who tells it is
`edged.learn.pacing`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from engine.protocol import Gap

SLOWDOWN_MAX = 2.0
SLOWDOWN_SMALL = math.sqrt(SLOWDOWN_MAX)
STEPS_MIN = 8  # with training, before anything is concluded from them
GROWTH = 1.5
GAP_MIN_S = 1e-6  # a shorter one was not measured
MEMORY = 0.8  # of the running mean of quiet gaps, a report


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """quiet_s: mean seconds of a gap while nothing trains, by how many answers ran. share: what training may take while
    answers run, in (0, 1]."""

    quiet_s: Mapping[int, float] = dataclasses.field(default_factory=dict)
    share: float = 1.0


def observe(pace: Pace, gaps: Sequence[Gap], *, is_training: bool, min_share: float) -> Pace:
    """What follows from gaps that were all measured with training, or all without it."""
    if not is_training:
        return dataclasses.replace(pace, quiet_s={**pace.quiet_s, **_learned(pace.quiet_s, gaps)})
    slowdown = slowdown_of(pace.quiet_s, gaps)
    if slowdown is None:
        return pace
    if slowdown > SLOWDOWN_MAX:
        return dataclasses.replace(pace, share=max(min_share, pace.share / 2))
    if slowdown < SLOWDOWN_SMALL:
        return dataclasses.replace(pace, share=max(min_share, min(1.0, pace.share * GROWTH)))
    return dataclasses.replace(pace, share=max(min_share, pace.share))


def slowdown_of(quiet_s: Mapping[int, float], gaps: Sequence[Gap]) -> float | None:
    """How many times as long the gaps are as quiet ones; None if too few of them can be compared."""
    known = [gap for gap in gaps if gap.answers in quiet_s]
    if sum(gap.steps for gap in known) < STEPS_MIN:
        return None
    return sum(gap.seconds for gap in known) / sum(gap.steps * quiet_s[gap.answers] for gap in known)


def _learned(quiet_s: Mapping[int, float], gaps: Sequence[Gap]) -> dict[int, float]:
    means = {gap.answers: gap.seconds / gap.steps for gap in gaps if gap.steps and gap.seconds >= GAP_MIN_S * gap.steps}
    return {n: MEMORY * quiet_s.get(n, mean) + (1.0 - MEMORY) * mean for n, mean in means.items()}
