"""Likelihood of corrections: answers that a person wrote become likelier, token by token.

    L = -sum_t log pi(y_t)

averaged over all tokens of a step, so that a long correction counts for more than a short one.

No ratio, no clip and no advantage: a correction was sampled by no policy, and nothing that compares policies on samples
may be applied to it. The update's bound on the distance from the live adapter holds for it as for any other objective.

Dimension letter: R tokens of one correction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.protocol import TrainJob
from engine.train.objectives.objective import Batch, Item, ItemLoss, Prepared, TokenScores


def negative_log_likelihood(logprobs: torch.Tensor) -> torch.Tensor:
    """float32[]: -sum log pi.

    Args:
        logprobs: float32[R], with gradient.
    """
    return -logprobs.sum()


class Sft:
    """Corrections; every token counts as one."""

    uses_critic = False
    uses_mismatched = False

    def prepare(self, batch: Batch, job: TrainJob) -> Prepared:
        return Prepared(tuple(Item((one,), {}, one.tokens.shape[0]) for one in batch.corrections))

    def loss(self, item: Item, scores: Sequence[TokenScores], job: TrainJob) -> ItemLoss:
        loss = negative_log_likelihood(scores[0].logprobs)
        return ItemLoss(loss, {"loss": loss.detach()})


OBJECTIVE = Sft()
