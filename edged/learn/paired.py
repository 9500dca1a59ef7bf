"""Two versions compared over the same prompts: is the one really worse, or is it luck? Pure.

Prompts are the unit: answers to one prompt are averaged before. A difference counts as real where the lower end of a
bootstrap interval of its mean says so (percentile bootstrap, Efron 1979; one-sided, CONFIDENCE), or for things that an
answer has or has not, where a sign test does (exact binomial over the prompts in which the two differ).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

CONFIDENCE = 0.995  # of one check; there are about ten, so that all of them together are wrong in 5 % at most
MIN_PROMPTS = 8  # fewer do not carry an interval
RESAMPLES = 2000
_SEED = 40_013  # the same interval whenever the same differences are looked at


def mean(values: Sequence[float]) -> float:
    """0 without values."""
    return math.fsum(values) / len(values) if values else 0.0


def surely_above(differences: Sequence[float]) -> float | None:
    """What the mean of the differences lies above, at CONFIDENCE; None if there are fewer than MIN_PROMPTS.

    Takes some ten milliseconds for 32 differences.
    """
    n = len(differences)
    if n < MIN_PROMPTS:
        return None
    if max(differences) == min(differences):
        return differences[0]
    chance = random.Random(_SEED)
    means = sorted(math.fsum(chance.choices(differences, k=n)) / n for _ in range(RESAMPLES))
    return means[int((1.0 - CONFIDENCE) * RESAMPLES)]


def sign_test(more: int, fewer: int) -> float:
    """Probability of at least `more` of `more + fewer` by tossing a coin; 1 without any."""
    n = more + fewer
    return float(sum(math.comb(n, k) for k in range(more, n + 1)) / 2**n)
