"""What the last updates say that somebody should look at. Pure: finished updates in, sentences out.

    samples    importance weights left too little of the sampled answers, so the update was not made
    engines    many answers were left out because trainer and server do not compute the same for them
    trainer    it died under every attempt at the last updates, which wait with their ratings
    cut        more answers than before end at their length limit: answers get longer, or the model forgets to stop

Nothing here stops learning; what has to stop is stopped where it happens, by the trainer and the gate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from edged.records import LEFT_OUT, Update

TRAINER_DEATHS = "trainer/deaths"  # the figure of an update that was put off because of them
LOOK_BACK = 9  # updates: the last one, and what it is compared with
MISMATCH_SHARE_MAX = 0.1  # of an update's answers
CUT_SHARE_MIN = 0.05  # below it nobody minds
CUT_DEVIATIONS = 2.0  # standard errors of the difference of two shares


def alarms(newest_first: Sequence[Update]) -> tuple[str, ...]:
    """The alarms that the last update raises, against up to LOOK_BACK - 1 before it."""
    if not newest_first:
        return ()
    last, earlier = newest_first[0].metrics, [update.metrics for update in newest_first[1:LOOK_BACK]]
    found = (_trainer_dies(newest_first), _too_few_samples(last), _engines_differ(last), _more_are_cut(last, earlier))
    return tuple(alarm for alarm in found if alarm is not None)


def _trainer_dies(newest_first: Sequence[Update]) -> str | None:
    in_a_row = list(itertools.takewhile(lambda update: TRAINER_DEATHS in update.metrics, newest_first))
    if not in_a_row:
        return None
    deaths = sum(update.metrics[TRAINER_DEATHS] for update in in_a_row)
    return (
        f"the trainer died {deaths:.0f} times, under every attempt at the last updates, and their ratings wait; "
        "if memory runs out, free some or lower learn.max_batch, then ask for an update; the log has its last words"
    )


def _too_few_samples(last: dict[str, float]) -> str | None:
    if not last.get(f"{LEFT_OUT}low_effective_share"):
        return None
    return (
        "the last batch was sampled by policies too far from the live one to learn from (low_effective_share); "
        "a smaller learn.staleness or learn.replay_ratio keeps answers closer"
    )


def _engines_differ(last: dict[str, float]) -> str | None:
    mismatched = last.get(f"{LEFT_OUT}engine_mismatch", 0.0)
    share = mismatched / max(1.0, mismatched + last.get("episodes", 0.0))
    if share <= MISMATCH_SHARE_MAX:
        return None
    return (
        f"trainer and server disagree about {share:.0%} of the last batch, which were left out (engine_mismatch); "
        "does the server serve the version that it says?"
    )


def _more_are_cut(last: dict[str, float], earlier: Sequence[dict[str, float]]) -> str | None:
    share, n_last = _cut_share([last])
    before, n_before = _cut_share(earlier)
    if not n_last or not n_before or share < CUT_SHARE_MIN:
        return None
    pooled = (share * n_last + before * n_before) / (n_last + n_before)
    error = math.sqrt(pooled * (1.0 - pooled) * (1.0 / n_last + 1.0 / n_before))
    if share - before <= CUT_DEVIATIONS * error:
        return None
    return (
        f"{share:.0%} of the last rated answers were cut off by their length limit, {before:.0%} before; "
        "if they have become longer than you want, say so in ratings, or roll back"
    )


def _cut_share(updates: Sequence[dict[str, float]]) -> tuple[float, float]:
    """Share of the new rated answers that were cut, and how many answers that is of."""
    counted = [
        (one["episodes/cut_share"], one["episodes"] - one.get("episodes/replayed", 0.0))
        for one in updates
        if "episodes/cut_share" in one and "episodes" in one
    ]
    n = sum(answers for _, answers in counted)
    return (sum(share * answers for share, answers in counted) / n if n > 0.0 else 0.0), max(0.0, n)
