"""Which answers a policy gradient may learn from, judged by the whole answer: the geometric sequence filter.

    g = (pi_parent(y) / pi_behaviour(y)) ^ (1 / R) = exp(mean of log(parent / behaviour) over the R tokens)

A mean, not a product: a product would judge long answers by their length. An answer with log g outside its band is left
out; the weights of those that stay are truncated token by token (`objectives.ppo`).

    sampled by the parent    both are one policy, computed by two engines. What is left between them is the rounding of
                             their kernels, measured once for every base (`EngineNoise`). More than that means that the
                             server does not serve what is trained: another adapter, temperature or template
    by an older version      the policy has moved since, within `drift_max` nats a token; beyond it, truncated weights
                             are no correction any more

The band of the rounding is bias +- Z * spread / sqrt(tokens), the spread of a mean: short answers have a wider one. It
gets no narrower than that of the answers it was measured on, because nothing is known of longer ones. Below the
temperature of the measurement it widens as logits do, by the quotient. A base that was not measured has no such band:
nothing is held against what the parent itself sampled.

Pure. Dimension letter: R tokens of one answer.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence

from engine.protocol import EngineNoise
from engine.train.objectives.objective import Rollout

Z = 4.0  # standard deviations; rounding has heavier tails than a normal distribution


def log_geometric_ratio(rollout: Rollout) -> float:
    """log g of an answer with its sampler's log-probabilities; a ValueError without."""
    if rollout.behaviour is None:
        raise ValueError("an answer without its sampler's log-probabilities has no ratio to them")
    return float((rollout.parent - rollout.behaviour).mean())


def rounding_band(noise: EngineNoise, n_tokens: int, temperature: float) -> tuple[float, float]:
    """Lowest and highest log g that rounding explains.

    Args:
        n_tokens: of the answer, 1 or more. temperature: that it was sampled at, above 0.
    """
    scale = max(1.0, noise.temperature / temperature)
    width = Z * noise.spread / math.sqrt(max(1.0, min(float(n_tokens), noise.tokens)))
    return (noise.bias - width) * scale, (noise.bias + width) * scale


def complaint(rollout: Rollout, noise: EngineNoise | None, drift_max: float) -> str | None:
    """Why an answer is left out, or None. Reasons are stable words, for counters."""
    found = log_geometric_ratio(rollout)
    if not math.isfinite(found):
        return "ratio_not_finite"
    low, high = (0.0, 0.0) if noise is None else rounding_band(noise, rollout.tokens.shape[0], rollout.temperature)
    if rollout.on_policy:
        return "engine_mismatch" if noise is not None and not low <= found <= high else None
    return None if low - drift_max <= found <= high + drift_max else "drifted"


def sort_out(
    rollouts: Sequence[Rollout], noise: EngineNoise | None, drift_max: float
) -> tuple[tuple[Rollout, ...], Mapping[str, int]]:
    """The answers that stay, in their order, and reason -> how many do not."""
    reasons = [complaint(rollout, noise, drift_max) for rollout in rollouts]
    kept = tuple(rollout for rollout, reason in zip(rollouts, reasons, strict=True) if reason is None)
    return kept, dict(collections.Counter(reason for reason in reasons if reason is not None))
