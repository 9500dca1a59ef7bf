"""PPO: clipped policy loss, clipped value loss, and the weight for another sampler, with a critic's advantages.

Pure tensor functions on flat tensors, one entry a token; every entry counts (there is no padding, so there is no mask).

Sources: PPO arXiv 1707.06347 eq. 7; separate bounds arXiv 2503.14476; bound for negative advantages ("dual clip")
arXiv 1912.09729; proximal policy apart from the behaviour policy arXiv 2110.00641.

Notation: pi is the policy being trained, pi_old the one whose neighbourhood it may not leave, pi_behaviour the one that
sampled, as the serving engine computed it. Dimension letter: N tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from engine.protocol import TrainJob
from engine.train.advantages import estimate_advantages, terminal_rewards, whiten
from engine.train.objectives import kl
from engine.train.objectives.objective import Batch, Item, ItemLoss, Prepared, Rollout, TokenScores


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyLoss:
    """loss: float32[N], to be summed. ratio: float32[N], pi / pi_old, detached. clipped: bool[N], where the clip cut
    the gradient."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def importance_weights(old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """float32[N]: min(pi_old / pi_behaviour, cap), a constant weight that corrects for who really sampled."""
    log_weight = (old_logprobs - behaviour_logprobs).clamp(-kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO)
    return log_weight.exp().clamp(max=cap).detach()


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> PolicyLoss:
    """-w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), and for negative A at most dual_clip * |A|.

    Args:
        logprobs: float32[N], log pi, with gradient.
        old_logprobs, advantages, weights: float32[N], constants.
        dual_clip: with a negative advantage and a large ratio the clipped objective has no bound of its own.
    """
    ratio = (logprobs - old_logprobs).clamp(-kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    objective = torch.minimum(plain, bounded)
    floor = dual_clip * advantages
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


def effective_sample_share(weights: torch.Tensor) -> float:
    """(sum w)^2 / (N sum w^2): the share of the tokens that the weighted batch is worth; 1 if all weights are equal."""
    total, squares = float(weights.sum()), float(weights.square().sum())
    return total * total / (weights.numel() * squares) if squares > 0.0 else 0.0


def clipped_surrogate(
    rollout: Rollout, advantages: torch.Tensor, weights: torch.Tensor, scores: TokenScores, job: TrainJob
) -> ItemLoss:
    """The clipped policy loss of one answer with the penalty and bonus of the job's settings; its figures.

    Args:
        advantages, weights: float32[R].
    """
    settings = job.ppo
    policy = policy_loss(
        scores.logprobs, rollout.parent, advantages, weights, settings.clip_low, settings.clip_high, settings.dual_clip
    )
    loss = policy.loss.sum()
    figures = {"policy_loss": loss.detach(), "clip_frac": policy.clipped.float().sum()}
    if settings.kl_in == "loss" and settings.kl_coef > 0.0:
        distance = kl.penalty(settings.kl_estimator, scores.logprobs, rollout.reference).sum()
        loss = loss + settings.kl_coef * distance
        figures["kl_loss"] = settings.kl_coef * distance.detach()
    if scores.entropy is not None:
        loss = loss - settings.entropy_coef * scores.entropy.sum()
    return ItemLoss(loss, figures)


def token_rewards(rollout: Rollout, job: TrainJob) -> torch.Tensor:
    """float32[R]: the rating on the last token, and everywhere the penalty for what the parent already is away from
    the reference, where settings put it into the reward (k1, as in arXiv 1909.08593)."""
    rewards = terminal_rewards(rollout.tokens.shape[0], rollout.reward).to(rollout.parent.device)
    if job.ppo.kl_in == "reward":
        rewards -= job.ppo.kl_coef * (rollout.parent - rollout.reference)
    return rewards


class PolicyGradient:
    """What all objectives share that weigh the clipped surrogate by advantages: items have `advantages` and `weights`
    among their constants, and one answer."""

    uses_critic = False
    uses_mismatched = False

    def loss(self, item: Item, scores: Sequence[TokenScores], job: TrainJob) -> ItemLoss:
        constants = item.constants
        return clipped_surrogate(item.rollouts[0], constants["advantages"], constants["weights"], scores[0], job)


class Ppo(PolicyGradient):
    """Advantages by GAE from a critic's values, whitened over the batch."""

    uses_critic = True

    def prepare(self, batch: Batch, job: TrainJob) -> Prepared:
        settings = job.ppo
        estimated = [
            estimate_advantages(token_rewards(rollout, job).cpu(), values.cpu(), settings.gamma, settings.gae_lambda)
            for rollout, values in zip(batch.rated, batch.values, strict=True)
        ]
        whitened = whiten([advantages for advantages, _ in estimated])
        items = []
        for rollout, values, (_, returns), advantages in zip(
            batch.rated, batch.values, estimated, whitened, strict=True
        ):
            constants = {
                "advantages": advantages.to(values.device),
                "weights": sampler_weights(rollout, job),
                "returns": returns.to(values.device),
            }
            items.append(Item((rollout,), constants, rollout.tokens.shape[0]))
        return Prepared(tuple(items))


def sampler_weights(rollout: Rollout, job: TrainJob) -> torch.Tensor:
    """float32[R]: `importance_weights` of an answer; a ValueError if nobody sampled it."""
    if rollout.behaviour is None:
        raise ValueError("an answer without its sampler's log-probabilities has no importance weight")
    return importance_weights(rollout.parent, rollout.behaviour, job.ppo.importance_cap)


OBJECTIVE = Ppo()
