"""GRPO (arXiv 2402.03300, section 4.1): an answer is judged by how it did among the answers to the same prompt.

    A_i = (r_i - mean(r)) / (std(r) + 1e-4)             the same at every token (outcome supervision, section 4.1.2)
    L = -sum_t min(ratio_t A, clip(ratio_t) A) + kl_coef * kl_t                                              (eq. 3, 4)

with the KL in the loss by default, as in the paper, and the clip between parent and new policy (`ppo`). Departures:
kl_t is what `kl_estimator` names, by default k2, whose gradient is that of KL(pi || pi_ref), where the paper has k3
(see `kl`); the mean is over the tokens of the whole step, not first over each answer, which would make the tokens of
long answers count less; groups of equal rewards are left out; pairs are judged cautiously (below).

Dimension letter: K answers of one group.
"""

from __future__ import annotations

import torch

from engine.protocol import TrainJob
from engine.train.objectives.groups import judge_groups
from engine.train.objectives.objective import Batch, Prepared
from engine.train.objectives.ppo import PolicyGradient

SPREAD_FLOOR = 1e-4  # as in TRL


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """float[K]: (r - mean) / (std + SPREAD_FLOOR), std with K - 1; exactly 0 where all rewards are equal.

    In a group of two, the deviation is the difference itself: however little the two rewards differ, the quotient is
    the same. There |A| is at most |r - mean|, so that two nearly equal answers are hardly moved apart.

    Args:
        rewards: float[K] of one group, K >= 2.
    Raises:
        ValueError: a group of one.
    """
    if rewards.shape[0] < 2:
        raise ValueError("a group of one answer cannot be normalised; it has to be left out")
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    advantages = centred / (rewards.std(correction=1) + SPREAD_FLOOR)
    if rewards.shape[0] == 2:
        advantages = advantages.clamp(-centred.abs(), centred.abs())
    return advantages


class Grpo(PolicyGradient):
    """Answers of groups, with advantages normalised within each."""

    def prepare(self, batch: Batch, job: TrainJob) -> Prepared:
        return judge_groups(batch.rated, job, group_advantages)


OBJECTIVE = Grpo()
