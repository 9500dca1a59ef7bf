"""The figures of an update, by the field's names; every one a finite float or left out.

reward/ episodes/ tokens/   the batch as it came
is/                         whose answers they are, and what truncated weights leave of them
entropy/                    of the parent
critic/                     how much of the ratings the critic foresaw
policy/                     the steps: how far the policy moved; and each objective's own under its name
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.train.critic import Critic, Target, explained_variance
from engine.train.objectives.objective import Rollout
from engine.train.objectives.ppo import effective_sample_share, importance_weights
from engine.train.scorer import Scorer


def batch_figures(answers: Sequence[Rollout]) -> dict[str, float]:
    """Of the rated answers as they came; {} if there are none."""
    if not answers:
        return {}
    # Of the new ratings only: what people think of the answers now, not of those that are replayed.
    rewards = torch.tensor([one.reward for one in answers if not one.replay] or [0.0])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "episodes": float(len(answers)),
        "episodes/replayed": float(sum(one.replay for one in answers)),
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
    return {
        "is/weight_mean": float(weights.mean()),
        "is/ess": effective_sample_share(weights),
        "is/on_policy": len(gaps) / len(known),
        **({"is/engine_gap": float(torch.cat(gaps).abs().mean())} if gaps else {}),
    }


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
