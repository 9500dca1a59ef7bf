"""The losses of PPO on tokens: clipped policy, clipped value, KL penalty, and the weight for another sampler.

Pure tensor functions on flat tensors, one entry a token; every entry counts (there is no padding, so there is no mask).
Sums, not means: the caller divides by the token count of the whole optimizer step, which makes the gradient independent
of how a step is cut into micro-batches.

Sources: PPO arXiv 1707.06347 eq. 7; separate bounds arXiv 2503.14476; bound for negative advantages ("dual clip")
arXiv 1912.09729; proximal policy apart from the behaviour policy arXiv 2110.00641; k3 is John Schulman's low-variance
estimate of KL.

Notation: pi is the policy being trained, pi_old the one whose neighbourhood it may not leave, pi_behaviour the one that
sampled, as the serving engine computed it. Dimension letter: N tokens.
"""

from __future__ import annotations

import dataclasses

import torch

MAX_LOG_RATIO = 20.0  # exp(20) is beyond any clip; larger values only make infinities
# With a negative advantage and a large ratio the clipped objective has no bound: |loss| <= this * |advantage|.
NEGATIVE_ADVANTAGE_BOUND = 3.0


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyLoss:
    """loss: float32[N], to be summed. ratio: float32[N], pi / pi_old, detached. clipped: bool[N], where the clip cut
    the gradient."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def importance_weights(old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """float32[N]: min(pi_old / pi_behaviour, cap), a constant weight that corrects for who really sampled."""
    log_weight = (old_logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_weight.exp().clamp(max=cap).detach()


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), bounded for negative A.

    Args:
        logprobs: float32[N], log pi, with gradient.
        old_logprobs, advantages, weights: float32[N], constants.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    objective = torch.minimum(plain, bounded)
    floor = NEGATIVE_ADVANTAGE_BOUND * advantages
    objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    clipped = (bounded < plain) | ((advantages < 0) & (plain < floor))
    return PolicyLoss(-weights * objective, ratio.detach(), clipped.detach())


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> torch.Tensor:
    """float32[N]: 0.5 * max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2).

    Args:
        values: float32[N], with gradient.
        old_values: float32[N], the values that the advantages were computed from.
    """
    bounded = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((values - returns).square(), (bounded - returns).square())


def kl_k3(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """float32[N]: exp(d) - d - 1 with d = log other - log pi: never negative, and on samples of pi its mean is
    KL(pi || other). Its gradient pulls pi towards `other`."""
    difference = (other_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def effective_sample_share(weights: torch.Tensor) -> float:
    """(sum w)^2 / (N sum w^2): the share of the tokens that the weighted batch is worth; 1 if all weights are equal."""
    total, squares = float(weights.sum()), float(weights.square().sum())
    return total * total / (weights.numel() * squares) if squares > 0.0 else 0.0
