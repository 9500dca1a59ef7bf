"""What the steps of an update work on: the items that the objectives made of its answers, and the critic's targets.

Dimension letters: R tokens of one completion.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from engine.protocol import OBJECTIVES, TrainJob
from engine.train.critic import Critic, Target, warm_up
from engine.train.figures import foresight
from engine.train.learner import Learner, NothingToLearn
from engine.train.objectives.objective import Batch, Item, Objective
from engine.train.rollout import Gathered
from engine.train.scorer import Scorer


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """items: by objective. targets: the critic's, in the order of the items of the objective that uses one."""

    items: Mapping[str, Sequence[Item]]
    targets: Sequence[Target]
    skipped: Mapping[str, int]


@functools.cache
def objective_of(name: str) -> Objective:
    """The objective that a job calls `name`: `OBJECTIVE` of the module of that name."""
    return cast(Objective, importlib.import_module(f"engine.train.objectives.{name}").OBJECTIVE)


def uses_critic(job: TrainJob) -> bool:
    """Whether an objective of the job does."""
    return any(objective_of(name).uses_critic for name in job.objectives)


def prepare(
    job: TrainJob, gathered: Gathered, learner: Learner, scorer: Scorer, tick: Callable[[], None]
) -> tuple[Course, dict[str, float]]:
    """The course and its figures. A fresh critic is fitted to the batch first; the actor does not move.

    Raises:
        NothingToLearn: no objective has an item.
    """
    sampled = gathered.sampled
    metrics: dict[str, float] = {}
    values: list[torch.Tensor] = []
    fresh = learner.critic.adam.steps == 0
    if uses_critic(job):
        metrics, values = scorer.lanes.on("critic", lambda: _valued(job, sampled, learner.critic, scorer, tick))()
        metrics["critic/stands_in"] = float(learner.baseline.stands_in)
        sampled = dataclasses.replace(sampled, values=_trusted(values, learner))
    items: dict[str, Sequence[Item]] = {}
    skipped = dict(gathered.left_out)
    for name in sorted(job.objectives):
        batch = gathered.thumbs if OBJECTIVES[name] == "thumbs" else sampled
        prepared = objective_of(name).prepare(batch, job)
        items[name] = prepared.items
        skipped |= {f"{name}_{reason}": n for reason, n in prepared.skipped.items()}
        if OBJECTIVES[name] == "thumbs" and not prepared.items and sampled.rated:
            skipped[f"{name}_left_to_policy"] = len(sampled.rated)  # a policy gradient learns from them
    if not any(items.values()):
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items())) or "none came"
        raise NothingToLearn(f"no objective can learn from the batch ({reasons})", skipped)
    targets = _targets(items, sampled, values)
    if targets:
        metrics |= foresight(targets)
        new = [one.rollout.reward for one in targets if not one.rollout.replay]
        learner.baseline.note(new, metrics["critic/explained_variance"], fresh=fresh)
    return Course(items, targets, skipped), metrics


def _valued(
    job: TrainJob, sampled: Batch, critic: Critic, scorer: Scorer, tick: Callable[[], None]
) -> tuple[dict[str, float], list[torch.Tensor]]:
    figures = warm_up(critic, job.ppo, sampled.rated, scorer, tick)
    return figures, critic.values(sampled.rated, scorer, tick)


def _trusted(values: Sequence[torch.Tensor], learner: Learner) -> tuple[torch.Tensor, ...]:
    """The critic's values, or the running mean of the ratings where the critic has been useless."""
    if not learner.baseline.stands_in:
        return tuple(values)
    return tuple(torch.full_like(one, learner.baseline.mean) for one in values)


def _targets(items: Mapping[str, Sequence[Item]], sampled: Batch, values: Sequence[torch.Tensor]) -> list[Target]:
    own = {id(rollout): value for rollout, value in zip(sampled.rated, values, strict=True)} if values else {}
    return [
        Target(item.rollouts[0], own[id(item.rollouts[0])], item.constants["returns"])
        for name, of_objective in items.items()
        if objective_of(name).uses_critic
        for item in of_objective
    ]
