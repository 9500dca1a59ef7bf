"""Answers in groups to one prompt, judged against one another: what GRPO and RLOO share.

A group is the answers that one version gave to one prompt (`RatedEpisode.group`). It is used whole or not at all: a
group of one has nothing to be compared with, and one whose ratings are all equal says nothing. Answers that are left
out are no items, so they count in no denominator.

Dimension letter: K answers of one group.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import torch

from engine.protocol import TrainJob
from engine.train.objectives.objective import Item, Prepared, Rollout
from engine.train.objectives.ppo import sampler_weights, token_rewards

# float64[K] rewards of one group, not all equal, K >= 2 -> float64[K] advantages
JudgeGroup = Callable[[torch.Tensor], torch.Tensor]


def judge_groups(rollouts: Sequence[Rollout], job: TrainJob, judge: JudgeGroup) -> Prepared:
    """An item for each answer of a group that can be judged; every token of an answer has the answer's advantage.

    The reward of an answer is its rating, less what token_rewards charges for the distance of the parent from the
    reference where settings put it there; whether a group is equal is a matter of its ratings alone.
    """
    groups: dict[str | int, list[int]] = {}
    for i, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group or i, []).append(i)
    advantages: dict[int, float] = {}
    skipped: collections.Counter[str] = collections.Counter()
    for members in groups.values():
        ratings = {rollouts[i].reward for i in members}
        if len(members) == 1:
            skipped["group_of_one"] += 1
        elif len(ratings) == 1:
            skipped["equal_rewards"] += len(members)
        else:
            rewards = [float(token_rewards(rollouts[i], job).sum()) for i in members]
            advantages |= zip(members, judge(torch.tensor(rewards, dtype=torch.float64)).tolist(), strict=True)
    items = tuple(_item(rollouts[i], advantages[i], job) for i in sorted(advantages))
    return Prepared(items, dict(skipped))


def _item(rollout: Rollout, advantage: float, job: TrainJob) -> Item:
    constants = {
        "advantages": torch.full_like(rollout.parent, advantage),
        "weights": sampler_weights(rollout, job),
    }
    return Item((rollout,), constants, rollout.tokens.shape[0])
