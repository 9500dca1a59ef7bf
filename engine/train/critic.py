"""What PPO asks of a critic, and what keeps it honest: a warm-up, its explained variance, a baseline in its place.

A critic values the state before each token of an answer; advantages are made of its values. There are two:
`engine.train.critic_head`, a linear head on features that are computed anyway, and `engine.train.critic_lora`, an
adapter of its own with a head on top. A critic has its own optimizer and shares no parameter with the actor.

Where the values explain less than nothing of the ratings for USELESS_UPDATES updates in a row, the running mean of the
ratings stands in their place until they do again; the critic goes on learning meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from engine.protocol import PpoSettings
from engine.train import adamw
from engine.train.objectives.objective import Rollout

if TYPE_CHECKING:
    from engine.train.scorer import Scorer

Tick = Callable[[], None]

USELESS_UPDATES = 3
BASELINE_DECAY = 0.9  # of the running mean, an update


@dataclasses.dataclass(frozen=True, slots=True)
class CriticStep:
    """loss: mean over the step's tokens, before it. grad_norm: before clipping."""

    loss: float
    grad_norm: float


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What the critic is fitted to on one answer: values, returns float32[R]; values are its own, before the update."""

    rollout: Rollout
    values: torch.Tensor
    returns: torch.Tensor


class Critic(Protocol):
    """`adam` is the state of the optimizer of `parameters()`; `names()` are theirs, for a checkpoint."""

    kind: str
    adam: adamw.AdamState

    def parameters(self) -> list[torch.Tensor]: ...

    def names(self) -> list[str]: ...

    def values(self, rollouts: Sequence[Rollout], scorer: Scorer, tick: Tick) -> list[torch.Tensor]:
        """float32[R] of each answer."""
        ...

    def step(
        self, targets: Sequence[Target], settings: PpoSettings, value_clip: float, scorer: Scorer, tick: Tick
    ) -> CriticStep:
        """One optimizer step on the mean clipped value loss of the targets' tokens.

        Args:
            value_clip: infinity in the warm-up, where there is no earlier value to stay near.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class CriticState:
    """What a critic's steps have made of it; lists in the order of `parameters()`."""

    parameters: list[torch.Tensor]
    steps: int
    means: list[torch.Tensor]
    squares: list[torch.Tensor]


def state_of(critic: Critic) -> CriticState:
    """The critic's own tensors, not copies."""
    return CriticState(critic.parameters(), critic.adam.steps, critic.adam.means, critic.adam.squares)


@torch.no_grad()
def take_over(critic: Critic, state: CriticState) -> None:
    """Bring `critic` to where another process has brought its copy."""
    critic.adam.steps = state.steps
    own = state_of(critic)
    for tensors, others in (
        (own.parameters, state.parameters),
        (own.means, state.means),
        (own.squares, state.squares),
    ):
        for tensor, other in zip(tensors, others, strict=True):
            tensor.copy_(other)


@dataclasses.dataclass(slots=True)
class Baseline:
    """mean: running mean of the ratings. useless: updates in a row in which the critic explained less than nothing."""

    mean: float = 0.0
    useless: int = 0

    @property
    def stands_in(self) -> bool:
        return self.useless >= USELESS_UPDATES

    def note(self, rewards: Sequence[float], explained: float, *, fresh: bool) -> None:
        """Take in an update's ratings and how much of them the critic had explained beforehand.

        Args:
            fresh: the critic was fitted to these very ratings just before, so that `explained` says nothing.
        """
        if rewards:
            mean = sum(rewards) / len(rewards)
            self.mean = mean if fresh else BASELINE_DECAY * self.mean + (1.0 - BASELINE_DECAY) * mean
        if not fresh:
            self.useless = self.useless + 1 if explained < 0.0 else 0


def warm_up(
    critic: Critic, settings: PpoSettings, rollouts: Sequence[Rollout], scorer: Scorer, tick: Tick
) -> dict[str, float]:
    """Fit a critic that has never stepped to the batch's returns: full-batch steps, no actor involved."""
    if critic.adam.steps > 0 or settings.critic_warmup_steps == 0 or not rollouts:
        return {"critic/warmup_steps": 0.0}
    # The target does not need the critic: with nothing bootstrapped it is the discounted reward still to come.
    targets = [
        Target(rollout, torch.zeros_like(rollout.parent), _discounted_rewards(rollout, settings.gamma))
        for rollout in rollouts
    ]
    for _ in range(settings.critic_warmup_steps):
        critic.step(targets, settings, float("inf"), scorer, tick)
    return {"critic/warmup_steps": float(settings.critic_warmup_steps)}


def take_step(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], adam: adamw.AdamState, settings: PpoSettings
) -> float:
    """Clip `gradients` and move `parameters` against them; the gradient's norm before clipping."""
    norm = adamw.clip_by_norm(gradients, settings.max_grad_norm)
    adamw.adamw_step(parameters, gradients, adam, learning_rate=settings.critic_learning_rate, weight_decay=0.0)
    return norm


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant; 0 for equal returns."""
    spread = float(returns.var(correction=0))
    return 1.0 - float((returns - values).var(correction=0)) / spread if spread > 1e-12 else 0.0


def _discounted_rewards(rollout: Rollout, gamma: float) -> torch.Tensor:
    remaining = torch.arange(rollout.tokens.shape[0] - 1, -1, -1, device=rollout.tokens.device)
    return rollout.reward * gamma ** remaining.float()
