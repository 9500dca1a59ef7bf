"""Estimates of KL(pi || pi_ref) from sampled tokens, the penalty made of them, and the controller of its coefficient.

An estimate is one number a token, from the log-probabilities of the token that was sampled from pi. With d = log pi -
log pi_ref (John Schulman, "Approximating KL divergence"):

    k1 = d                    unbiased, of either sign, noisy
    k2 = d^2 / 2              biased, never negative; its expected gradient is that of KL(pi || pi_ref)
    k3 = exp(-d) - 1 + d      unbiased, never negative, and quiet; its expected gradient is that of KL(pi_ref || pi)

Whose samples they are decides which divergence is meant: it is that of the sampler from the other, so the sampler comes
first. How far an update has moved, over answers that the parent gave, is k3(parent, new) = r - 1 - log r with
r = new / parent, for KL(parent || new). The other way round it would be no divergence at all, and a single token that
the new policy has given up would outweigh all others.

Values and gradients are different matters: an unbiased estimate of a divergence need not have an unbiased gradient,
because the samples' own dependence on pi has none. The extreme case is k1, whose gradient, the score, is 0 in
expectation: as a penalty it would be noise and nothing else. `penalty` says what is descended instead. In a reward it
is the other way round: there k1 is the one that gives the gradient of KL(pi || pi_ref), and rewards use nothing else.

The coefficient can be steered towards a wanted distance (arXiv 1909.08593, section 2.2).

Pure tensor functions without padding. Dimension letter: N tokens.
"""

from __future__ import annotations

from typing import assert_never

import torch

from engine.protocol import KlEstimator

MAX_LOG_RATIO = 20.0  # exp(20) is beyond any penalty or clip that means something; larger values only make infinities

# A batch of this many answers moves the coefficient by a tenth of the error, the gain of the paper.
HORIZON_ANSWERS = 160.0
MAX_RELATIVE_ERROR = 0.2


def k1(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """float32[N]: d, the log-ratio.

    Args:
        logprobs: float32[N], log pi of each token, sampled from pi.
        reference: float32[N], log pi_ref of the same tokens.
    """
    return (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k2(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """float32[N]: d^2 / 2. Arguments as of `k1`."""
    return 0.5 * k1(logprobs, reference).square()


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """float32[N]: exp(-d) - 1 + d. Arguments as of `k1`."""
    difference = k1(logprobs, reference)
    return torch.expm1(-difference) + difference


def penalty(estimator: KlEstimator, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """float32[N]: the estimate as a term of a loss that is differentiated by `logprobs`.

    k1: the value of k1 and the gradient of k2, each of which is right in expectation for KL(pi || pi_ref).
    k2: k2 and its gradient.
    k3: k3 and its gradient, that of KL(pi_ref || pi): where pi has all but given up a token that the reference likes it
        pulls much harder than k2, and where pi is likelier it pulls with a force of at most 1. GRPO's choice.

    No gradient flows beyond MAX_LOG_RATIO, nor through `reference`.
    """
    reference = reference.detach()
    match estimator:
        case "k1":
            pull = k2(logprobs, reference)
            return k1(logprobs, reference).detach() + pull - pull.detach()
        case "k2":
            return k2(logprobs, reference)
        case "k3":
            return k3(logprobs, reference)
        case _:
            assert_never(estimator)


def adapt(coef: float, measured: float, target: float, n_answers: int) -> float:
    """The coefficient for the next update: larger if the policy is further from the reference than wanted.

    coef * (1 + gain * e) with e = (measured - target) / target, held within +-MAX_RELATIVE_ERROR, and a gain of
    n_answers / HORIZON_ANSWERS, at most 1: what counts is how many answers the figure was measured on.

    Args:
        coef: positive; 0 would stay 0.
        measured, target: mean KL per token, in nats; the target is positive.
    Raises:
        ValueError: the target is not positive.
    """
    if not target > 0.0:
        raise ValueError(f"the KL target is {target:g}; it must be positive (leave it out for a constant coefficient)")
    error = min(max((measured - target) / target, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coef * (1.0 + min(n_answers / HORIZON_ANSWERS, 1.0) * error)
