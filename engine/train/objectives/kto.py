"""KTO (arXiv 2402.01306, section 4.1): liked answers become likelier and disliked ones less likely, with no pairs.

    r = log(pi / pi_ref)(y)                    of the whole answer
    z0 = max(0, mean of log(pi / pi_ref)(y'))  y' an answer of the batch behind another prompt of the batch
    L = w_liked    * (1 - sigmoid(beta * (r - z0)))       for a liked answer
        w_disliked * (1 - sigmoid(beta * (z0 - r)))       for a disliked one

z0 is the reference point that gains and losses are felt from, an estimate of KL(pi || pi_ref). It carries no gradient.
Departure: it is taken once, with the parent as pi, not anew at every step; within an update the two are held close.

Liked and disliked answers are weighed by their counts, so that the rarer kind is not drowned: n_liked * w_liked :
n_disliked * w_disliked lies in [1, 4/3], as the paper advises. A batch with one kind only teaches nothing but "more" or
"less" and is left out, as are answers that all have one prompt, so that none is mismatched, and a rating of 0, which is
no opinion.

Only the sign of a rating counts. Dimension letter: N answers.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import torch

from engine.protocol import TrainJob
from engine.train.objectives.objective import Batch, Item, ItemLoss, Prepared, TokenScores

MAX_LIKED_SHARE = 4.0 / 3.0  # of the weights' sums, liked to disliked; 1 is the least


def reference_point(mismatched: torch.Tensor) -> torch.Tensor:
    """float32[]: z0, detached.

    Args:
        mismatched: float32[N], log(pi / pi_ref) of whole answers behind other prompts, N >= 1.
    """
    return mismatched.detach().mean().clamp(min=0.0)


def balanced_weights(n_liked: int, n_disliked: int, liked_weight: float, disliked_weight: float) -> tuple[float, float]:
    """w_liked and w_disliked of each answer, lambda_D and lambda_U of the paper.

    n_liked * w_liked : n_disliked * w_disliked is liked_weight : disliked_weight, held within [1, MAX_LIKED_SHARE].
    Of as many of each and a ratio within these bounds the weights are the settings themselves.

    Args:
        n_liked, n_disliked: at least 1 each. liked_weight, disliked_weight: positive.
    """
    ratio = min(max(liked_weight / disliked_weight, 1.0), MAX_LIKED_SHARE)
    total = (n_liked + n_disliked) * (liked_weight + disliked_weight) / 2
    return total * ratio / (1 + ratio) / n_liked, total / (1 + ratio) / n_disliked


def prospect_loss(
    log_ratios: torch.Tensor, z0: torch.Tensor, is_liked: torch.Tensor, weights: torch.Tensor, beta: float
) -> torch.Tensor:
    """float32[N]: w * (1 - sigmoid(+-beta * (r - z0))), plus for the liked.

    Args:
        log_ratios: float32[N], log(pi / pi_ref) of whole answers, with gradient.
        z0: float32[]. is_liked: bool[N]. weights: float32[N].
    """
    gain = beta * (log_ratios - z0)
    return weights * torch.sigmoid(torch.where(is_liked, -gain, gain))


class Kto:
    """Answers that are merely liked or disliked, whoever wrote them; an answer counts as one."""

    uses_critic = False
    uses_mismatched = True

    def prepare(self, batch: Batch, job: TrainJob) -> Prepared:
        opinions = [rollout for rollout in batch.rated if rollout.reward != 0.0]
        skipped = collections.Counter({"no_opinion": len(batch.rated) - len(opinions)})
        n_liked = sum(rollout.reward > 0.0 for rollout in opinions)
        n_disliked = len(opinions) - n_liked
        if not batch.mismatched:
            skipped["no_mismatched"] = len(opinions)
        elif 0 in (n_liked, n_disliked):
            skipped["one_class"] = len(opinions)
        if skipped["no_mismatched"] or skipped["one_class"] or not opinions:
            return Prepared((), dict(+skipped))
        settings = job.preference
        weights = balanced_weights(n_liked, n_disliked, settings.liked_weight, settings.disliked_weight)
        z0 = reference_point(torch.tensor(batch.mismatched))
        items = []
        for rollout in opinions:
            is_liked = rollout.reward > 0.0
            reference = rollout.reference.sum()
            constants = {
                "reference": reference,
                "z0": z0.to(reference),
                "is_liked": torch.tensor(is_liked, device=reference.device),
                "weight": torch.tensor(weights[0] if is_liked else weights[1]).to(reference),
            }
            items.append(Item((rollout,), constants, 1))
        return Prepared(tuple(items), dict(+skipped))

    def loss(self, item: Item, scores: Sequence[TokenScores], job: TrainJob) -> ItemLoss:
        constants, beta = item.constants, job.preference.kto_beta
        log_ratio = scores[0].logprobs.sum() - constants["reference"]
        is_liked, z0 = constants["is_liked"], constants["z0"]
        loss = prospect_loss(log_ratio, z0, is_liked, constants["weight"], beta)
        # How far the answer is on the side of z0 that its rating asks for, in implicit reward.
        margin = beta * torch.where(is_liked, log_ratio - z0, z0 - log_ratio).detach()
        figures = {"loss": loss.detach(), "margin": margin, "accuracy": (margin > 0).float(), "z0": z0}
        return ItemLoss(loss, figures)


OBJECTIVE = Kto()
