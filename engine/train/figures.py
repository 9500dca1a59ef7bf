"""The figures of an update, by the field's names; every one a finite float or left out.

reward/ episodes/ tokens/   the batch as it is trained on
is/                         whose answers they are, and what truncated weights leave of them
lora/                       the adapter and how far it moved
entropy/                    of the parent
critic/                     how much of the ratings the critic foresaw
policy/                     the steps: how far the policy moved; and each objective's own under its name
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from engine.protocol import TrainJob
from engine.train.batch import Selection
from engine.train.critic import Critic, Target, explained_variance
from engine.train.objectives.objective import Rollout
from engine.train.objectives.ppo import effective_sample_share, importance_weights
from engine.train.scorer import Scorer
from engine.train.sequence_filter import log_geometric_ratio


def batch_figures(answers: Sequence[Rollout], eos_ids: frozenset[int]) -> dict[str, float]:
    """Of the rated answers that are trained on; {} if there are none.

    `episodes/cut_share`: of the new ones, how many did not come to an end of their own (`eos_ids`).
    """
    if not answers:
        return {}
    cut = [float(int(one.tokens[-1]) not in eos_ids) for one in answers if not one.replay]
    # Of the new ratings only: what people think of the answers now, not of those that are replayed.
    rewards = torch.tensor([one.reward for one in answers if not one.replay] or [0.0])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "episodes": float(len(answers)),
        "episodes/replayed": float(sum(one.replay for one in answers)),
        **({"episodes/cut_share": sum(cut) / len(cut)} if cut else {}),
        "tokens": float(sum(one.tokens.shape[0] for one in answers)),
        "tokens/prompt": float(sum(len(one.prompt_ids) for one in answers)),
        "entropy/parent": float(torch.cat([one.entropy for one in answers]).mean()),
    }


def sampler_figures(sampled: Sequence[Rollout], importance_cap: float) -> dict[str, float]:
    """Of the answers with their sampler's log-probabilities; {} if there are none."""
    known = [(one, one.behaviour) for one in sampled if one.behaviour is not None]
    if not known:
        return {}
    weights = torch.cat([importance_weights(one.parent, behaviour, importance_cap) for one, behaviour in known])
    # What is left between two logprobs of one adapter is the engines' rounding; of two adapters, also their distance.
    gaps = [one.parent - behaviour for one, behaviour in known if one.on_policy]
    ratios = [math.exp(log_geometric_ratio(one)) for one, _ in known]
    return {
        "is/weight_mean": float(weights.mean()),
        "is/sequence_min": min(ratios),
        "is/sequence_max": max(ratios),
        "is/ess": effective_sample_share(weights),
        "is/on_policy": len(gaps) / len(known),
        **({"is/engine_gap": float(torch.cat(gaps).abs().mean())} if gaps else {}),
    }


def age_figures(job: TrainJob, selection: Selection) -> dict[str, float]:
    """How many versions the sampled answers lie behind what the update starts from; {} if there are none."""
    ages = [float(max(0, job.parent.version - one.episode.adapter.version)) for one in selection.sampled]
    return {"is/age_mean": sum(ages) / len(ages), "is/age_max": max(ages)} if ages else {}


def move_share(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """|after - before| / |after| over all tensors: how much of an adapter the update is. 0 for an adapter of zeros."""
    moved = sum(float((new - old).square().sum()) for old, new in zip(before, after, strict=True))
    size = sum(float(new.square().sum()) for new in after)
    return math.sqrt(moved / size) if size > 0.0 else 0.0


def foresight(targets: Sequence[Target]) -> dict[str, float]:
    """Of the critic before the update."""
    values = torch.cat([one.values for one in targets])
    returns = torch.cat([one.returns for one in targets])
    return {
        "critic/value_mean": float(values.mean()),
        "critic/explained_variance": explained_variance(values, returns),
    }


def hindsight(critic: Critic, targets: Sequence[Target], scorer: Scorer, tick: Callable[[], None]) -> dict[str, float]:
    """Of the critic after the update, on the same answers."""
    fitted = torch.cat(critic.values([one.rollout for one in targets], scorer, tick))
    returns = torch.cat([one.returns for one in targets])
    return {"critic/explained_variance_after": explained_variance(fitted, returns)}


def summarise(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the steps that have the figure; the largest ratio; the KL of the last step, which saw the policy
    furthest away; ratio and KL of the first, where the policy is the parent still."""
    if not steps:
        return {}
    summary = {}
    for name in sorted({name for step in steps for name in step}):
        values = [step[name] for step in steps if name in step]
        summary[name] = sum(values) / len(values)
    moved = [step for step in steps if "policy/approx_kl" in step]
    if moved:
        summary["policy/ratio_max"] = max(step["policy/ratio_max"] for step in moved)
        summary["policy/approx_kl"] = moved[-1]["policy/approx_kl"]
        summary["policy/first_ratio_max"] = moved[0]["policy/ratio_max"]
        summary["policy/first_kl"] = moved[0]["policy/approx_kl"]
    return summary
