"""What an update asks of an objective: items with their constants before the first step, and a loss at every step.

An objective is a module with two parts: pure tensor functions with the paper's formulas, and an `OBJECTIVE` that says
which answers they are applied to. It knows nothing of networks, optimizers, lanes or files: it is given
log-probabilities and gives back a scalar. Sums, not means: the caller divides by the count of an objective's items in
the whole optimizer step, so the gradient does not depend on how a step is cut into micro-batches.

Dimension letters: R tokens of one completion, D width of the stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from engine.protocol import TrainJob


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    """One usable answer with what is known before training. All float32; [R] a completion token, [T] any token."""

    prompt_ids: tuple[int, ...]
    tokens: torch.Tensor  # int64[R]
    temperature: float
    reward: float  # 0.0 where nobody rated it: members of pairs, corrections
    replay: bool
    group: str
    trunk: torch.Tensor  # [T, D]
    features: torch.Tensor  # [R, D + 2]
    on_policy: bool  # the parent itself sampled it
    behaviour: torch.Tensor | None  # [R], by the serving engine under whichever adapter sampled; None: not sampled
    parent: torch.Tensor  # [R], by the trainer: pi_old
    reference: torch.Tensor  # [R]
    entropy: torch.Tensor  # [R], of the parent


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """All that a job trains on. A reference log-probability is of the adapter that the job names as reference.

    values: of `rated`, by the critic before the update; empty if no objective of the job uses a critic.
    mismatched: log(pi_parent / pi_reference), summed over the completion, of each rated answer behind another prompt of
        the batch; what KTO's reference point is made of. Empty if no objective of the job asks for it, or all prompts
        are the same.
    """

    rated: tuple[Rollout, ...] = ()
    pairs: tuple[tuple[Rollout, Rollout], ...] = ()
    corrections: tuple[Rollout, ...] = ()
    values: tuple[torch.Tensor, ...] = ()
    mismatched: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """What is trained on as one: an answer, or the two answers of a pair (chosen first).

    constants: what the objective prepared, in an order of its own; no gradient.
    count: what the item adds to the denominator of its objective's mean: its tokens, or 1.
    """

    rollouts: tuple[Rollout, ...]
    constants: Mapping[str, torch.Tensor]
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """items: in the batch's order. skipped: reason -> answers (or pairs) that the objective cannot learn from."""

    items: tuple[Item, ...]
    skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ItemLoss:
    """loss: scalar, the item's sum, with gradient. figures: name -> detached scalar sum, to be divided by the count."""

    loss: torch.Tensor
    figures: Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenScores:
    """Of one answer under the policy that is being trained, with gradient, at the answer's temperature.

    logprobs: float32[R], log pi of each completion token. entropy: float32[R], of the distribution before each; None
    unless the job has an entropy_coef.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None


class Objective(Protocol):
    """One way to learn. `uses_critic`, `uses_mismatched`: whether its batch must carry `values`, `mismatched`."""

    uses_critic: bool
    uses_mismatched: bool

    def prepare(self, batch: Batch, job: TrainJob) -> Prepared:
        """Everything that stays constant over the update."""
        ...

    def loss(self, item: Item, scores: Sequence[TokenScores], job: TrainJob) -> ItemLoss:
        """The item's share of the loss to minimise; `scores` of each of its rollouts."""
        ...
