"""How far the two engines round apart: the figures of `engine.protocol.EngineNoise` from measured answers. Pure.

The server samples answers of the base and says how likely each token was; the trainer computes the same. Both hold the
same weights, so the difference is the rounding of their kernels: small, a little biased, and different for every model
file and machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.protocol import EngineNoise, EpisodeScore

TOKENS_MIN = 32  # of all answers together; fewer say nothing of a spread
SPREAD_MIN = 0.02  # nats; engines that agree to the last bit on the probes need not do so everywhere
MEAN_TO_DEVIATION = math.sqrt(math.pi / 2)  # of a normal distribution: standard deviation / mean absolute value


def noise_of(scores: Sequence[EpisodeScore], temperature: float) -> EngineNoise | None:
    """The noise that `scores` of answers of the base show; None if they are too few tokens to tell.

    The spread is the larger of two estimates: by the answers' means, which sees tokens of one answer err together, and
    by the tokens' gaps, which are many more.
    """
    known = [(one.n_tokens, one.engine_bias, one.engine_gap) for one in scores]
    measured = [(n, bias, gap) for n, bias, gap in known if n and bias is not None and gap is not None]
    n_tokens = sum(n for n, _, _ in measured)
    if n_tokens < TOKENS_MIN:
        return None
    bias = sum(n * one for n, one, _ in measured) / n_tokens
    of_means = math.sqrt(sum(n * (one - bias) ** 2 for n, one, _ in measured) / len(measured))
    of_tokens = MEAN_TO_DEVIATION * sum(n * gap for n, _, gap in measured) / n_tokens
    spread = max(SPREAD_MIN, of_means, of_tokens)
    if not (math.isfinite(bias) and math.isfinite(spread)):
        return None
    return EngineNoise(bias=bias, spread=spread, tokens=n_tokens / len(measured), temperature=temperature)
