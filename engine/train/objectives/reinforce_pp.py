"""REINFORCE++ (arXiv 2501.03262): PPO without a critic, its baseline the mean of the whole batch.

    r_t = 1[t last] * rating - kl_coef * log(pi_parent / pi_ref)_t             token-level KL in the reward
    G_t = sum_{i >= t} gamma^(i - t) r_i                                       what is still to come
    A_t = (G_t - mean G) / std G                                               over all tokens of the batch

and PPO's clipped surrogate. The KL stands in the reward whatever `kl_in` says: that is what the objective is. Of fewer
answers than MIN_EPISODES_TO_WHITEN mean and deviation say little, so A_t = G_t: ratings are centred as they are. A
batch of equal ratings has no contrast; normalising would blow the differences of the KL up in its place, so it is left
out.

Dimension letters: R tokens of one answer, N tokens of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from engine.protocol import TrainJob
from engine.train.advantages import MIN_EPISODES_TO_WHITEN
from engine.train.objectives.objective import Batch, Item, ItemLoss, Prepared, TokenScores
from engine.train.objectives.ppo import PolicyGradient, sampler_weights, token_rewards

VARIANCE_FLOOR = 1e-8


def discounted_returns(rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """float32[R]: G_t, the discounted sum of the rewards from each token on.

    Args:
        rewards: float32[R]. gamma: per token, in [0, 1].
    """
    returns, following = [0.0] * rewards.shape[0], 0.0
    steps = rewards.tolist()
    for t in reversed(range(len(steps))):
        following = steps[t] + gamma * following
        returns[t] = following
    return torch.tensor(returns, dtype=rewards.dtype, device=rewards.device)


def normalise(returns: torch.Tensor) -> torch.Tensor:
    """float32[N]: (G - mean) / std over the batch's tokens; 0 where all are equal."""
    centred = returns - returns.mean()
    return centred * centred.square().mean().clamp(min=VARIANCE_FLOOR).rsqrt()


class ReinforcePp(PolicyGradient):
    """Single rated answers, judged against the batch."""

    def prepare(self, batch: Batch, job: TrainJob) -> Prepared:
        if len({rollout.reward for rollout in batch.rated}) == 1:
            return Prepared((), {"equal_rewards": len(batch.rated)})
        job = _with_kl_in_reward(job)
        returns = [discounted_returns(token_rewards(rollout, job), job.ppo.gamma) for rollout in batch.rated]
        if len(returns) >= MIN_EPISODES_TO_WHITEN:
            lengths = [one.shape[0] for one in returns]
            returns = list(normalise(torch.cat(returns)).split(lengths))
        items = [
            Item(
                (rollout,),
                {"advantages": advantages, "weights": sampler_weights(rollout, job)},
                rollout.tokens.shape[0],
            )
            for rollout, advantages in zip(batch.rated, returns, strict=True)
        ]
        return Prepared(tuple(items))

    def loss(self, item: Item, scores: Sequence[TokenScores], job: TrainJob) -> ItemLoss:
        return super().loss(item, scores, _with_kl_in_reward(job))


def _with_kl_in_reward(job: TrainJob) -> TrainJob:
    return dataclasses.replace(job, ppo=dataclasses.replace(job.ppo, kl_in="reward"))


OBJECTIVE = ReinforcePp()
