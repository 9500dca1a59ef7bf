"""DPO (arXiv 2305.18290, eq. 7): of two answers to one prompt, the preferred one becomes relatively likelier.

    L = -log sigmoid(beta * [log(pi / pi_ref)(chosen) - log(pi / pi_ref)(rejected)])

beta * log(pi / pi_ref) of an answer is its implicit reward; the bracket times beta is the margin. Log-probabilities are
of whole answers, prompts excluded. Off-policy by nature: neither answer has to be sampled by anybody, an edit that a
person wrote may be the chosen one.

Dimension letter: P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.protocol import TrainJob
from engine.train.objectives.objective import Batch, Item, ItemLoss, Prepared, TokenScores


def margins(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """float32[P]: by how much the implicit reward of the chosen answer is above that of the rejected one.

    Args:
        chosen, rejected: float32[P], log pi of whole answers, with gradient.
        reference_chosen, reference_rejected: float32[P], log pi_ref of the same, constants.
        beta: strength of the tie to the reference; larger ties tighter.
    """
    return beta * ((chosen - reference_chosen) - (rejected - reference_rejected))


def preference_loss(margin: torch.Tensor) -> torch.Tensor:
    """float32[P]: -log sigmoid(margin); ln 2 where policy and reference agree."""
    return -F.logsigmoid(margin)


class Dpo:
    """Pairs of a preferred and another answer; a pair counts as one, however long its answers are."""

    uses_critic = False
    uses_mismatched = False

    def prepare(self, batch: Batch, job: TrainJob) -> Prepared:
        items = [
            Item(
                (chosen, rejected),
                {
                    "reference_chosen": chosen.reference.sum(),
                    "reference_rejected": rejected.reference.sum(),
                },
                1,
            )
            for chosen, rejected in batch.pairs
        ]
        return Prepared(tuple(items))

    def loss(self, item: Item, scores: Sequence[TokenScores], job: TrainJob) -> ItemLoss:
        beta = job.preference.dpo_beta
        chosen, rejected = (one.logprobs.sum() for one in scores)
        reference_chosen, reference_rejected = item.constants["reference_chosen"], item.constants["reference_rejected"]
        margin = margins(chosen, rejected, reference_chosen, reference_rejected, beta)
        loss = preference_loss(margin)
        figures = {
            "loss": loss.detach(),
            "margin": margin.detach(),
            "accuracy": (margin > 0).float(),
            "chosen_reward": beta * (chosen.detach() - reference_chosen),
            "rejected_reward": beta * (rejected.detach() - reference_rejected),
        }
        return ItemLoss(loss, figures)


OBJECTIVE = Dpo()
