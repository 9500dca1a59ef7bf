"""RLOO (arXiv 2402.14740): REINFORCE with the mean reward of the other answers to the same prompt as baseline.

    A_i = R_i - 1/(K - 1) sum_{j != i} R_j

A baseline that does not depend on the answer it is subtracted from leaves the gradient as it is in expectation; a mean
that includes the answer's own reward shrinks it. R is the rating, with settings `kl_in = "reward"` less kl_coef *
log(pi_parent / pi_ref) of the answer, as in the paper; otherwise the KL stands in the loss. At the first step the
gradient is that of REINFORCE, -A_i grad log pi(y_i); later ones are held near the parent by PPO's clip, token by token.

Dimension letter: K answers of one group.
"""

from __future__ import annotations

import torch

from engine.protocol import TrainJob
from engine.train.objectives.groups import judge_groups
from engine.train.objectives.objective import Batch, Prepared
from engine.train.objectives.ppo import PolicyGradient


def leave_one_out_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """float[K]: each reward less the mean of the others; their sum is 0.

    Args:
        rewards: float[K] of one group, K >= 2.
    Raises:
        ValueError: a group of one.
    """
    n = rewards.shape[0]
    if n < 2:
        raise ValueError("a group of one answer has no others to be compared with; it has to be left out")
    return rewards - (rewards.sum() - rewards) / (n - 1)


class Rloo(PolicyGradient):
    """Answers of groups, each judged against the others of its group."""

    def prepare(self, batch: Batch, job: TrainJob) -> Prepared:
        return judge_groups(batch.rated, job, leave_one_out_advantages)


OBJECTIVE = Rloo()
