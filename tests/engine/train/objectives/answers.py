"""Answers with given log-probabilities for tests of objectives, and what training on them gives.

No network: what an objective sees of one are the log-probabilities of an answer's tokens, so a tensor of them takes its
place. float64 throughout, so that agreement means agreement of formulas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.protocol import PpoSettings, PreferenceSettings, TrainJob
from engine.train.objectives.objective import Item, ItemLoss, Objective, Rollout, TokenScores
from tests.engine.train.tiny import PPO, make_job

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def answer(
    parent: Sequence[float] | Floats,
    *,
    reference: Sequence[float] | Floats | None = None,
    behaviour: Sequence[float] | Floats | None = None,
    reward: float = 0.0,
    group: str = "",
    sampled: bool = True,
) -> Rollout:
    """An answer by its log-probabilities; where one kind is left out it is the parent's."""
    given = {"parent": parent, "reference": parent if reference is None else reference}
    if sampled:
        given["behaviour"] = parent if behaviour is None else behaviour
    tensors = {name: torch.tensor(np.asarray(values), dtype=torch.float64) for name, values in given.items()}
    n_tokens = tensors["parent"].shape[0]
    return Rollout(
        prompt_ids=(1, 2, 3),
        tokens=torch.arange(n_tokens),
        temperature=1.0,
        reward=reward,
        replay=False,
        group=group,
        trunk=torch.empty(0, 0),
        features=torch.empty(0, 0),
        on_policy=True,
        behaviour=tensors.get("behaviour"),
        parent=tensors["parent"],
        reference=tensors["reference"],
        entropy=torch.zeros(n_tokens),
    )


def random_answer(generator: np.random.Generator, n_tokens: int, **fields: Any) -> Rollout:
    """An answer whose parent, reference and sampler differ."""
    parent = -generator.exponential(1.5, n_tokens)
    near = {name: parent + generator.normal(0, 0.4, n_tokens) for name in ("reference", "behaviour")}
    return answer(parent, **near, **fields)


def settings_job(ppo: dict[str, Any] | None = None, preference: dict[str, Any] | None = None) -> TrainJob:
    """A job with some settings changed; its batch is not looked at."""
    settings: PpoSettings = dataclasses.replace(PPO, **(ppo or {}))
    return make_job([], ppo=settings, preference=PreferenceSettings(**(preference or {})))


def scored(item: Item, new: Sequence[Floats | torch.Tensor] | None = None) -> list[TokenScores]:
    """The item's answers under a policy with the log-probabilities `new`, or under the parent; with gradient."""
    given = [rollout.parent for rollout in item.rollouts] if new is None else new
    return [TokenScores(torch.as_tensor(one).detach().clone().requires_grad_()) for one in given]


def losses(
    objective: Objective, items: Sequence[Item], new: Sequence[Sequence[Floats]] | None, job: TrainJob
) -> tuple[list[ItemLoss], list[list[Floats]]]:
    """Each item's loss, and its gradient by the log-probabilities of each of its answers."""
    found, gradients = [], []
    for i, item in enumerate(items):
        scores = scored(item, None if new is None else new[i])
        loss = objective.loss(item, scores, job)
        leaves = [one.logprobs for one in scores]
        gradients.append([gradient.numpy() for gradient in torch.autograd.grad(loss.loss, leaves)])
        found.append(dataclasses.replace(loss, loss=loss.loss.detach()))
    return found, gradients
