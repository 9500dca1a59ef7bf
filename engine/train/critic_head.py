"""A critic that is a linear value head on the frozen base's hidden state, fitted apart from the actor.

Its features are the stream of the base, adapters off, at two thirds of the depth, normalised, and how long the answer
is already, which is most of what there is to know of an answer's end. They depend on the tokens only, so they are
computed once per episode and every step of the critic is a product with a [N, D + 2] matrix. It shares no
parameter with the actor; neither can disturb the other. float32 throughout, zero at the start (the first value of every
state is 0, the middle of the rewards' range).

Dimension letters: N states, R states of one answer, D width of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from adapters.shape import BaseShape
from engine.models import Base
from engine.protocol import PpoSettings
from engine.train import adamw
from engine.train.critic import CriticStep, Target, Tick, take_step
from engine.train.objectives.objective import Rollout
from engine.train.objectives.ppo import value_loss

if TYPE_CHECKING:
    from engine.train.scorer import Scorer

# Bring a usual answer's length to the size of the other features, about 1.
LINEAR_SCALE_TOKENS = 32.0
LOG_SCALE = 3.0


def feature_layer(shape: BaseShape) -> int:
    """The block whose input is the critic's feature: two thirds up, where an adapter on the top third begins."""
    return shape.n_layers - max(1, round(shape.n_layers / 3))


def new_head_critic(shape: BaseShape, device: torch.device) -> HeadCritic:
    """A critic that values every state at 0."""
    return HeadCritic(torch.zeros(n_features(shape), device=device), torch.zeros(1, device=device))


def n_features(shape: BaseShape) -> int:
    """Width of a state's features."""
    return shape.n_embd + 2


def state_features(base: Base, layer: int, stream: torch.Tensor) -> torch.Tensor:
    """float32[R, D + 2]: features of the states before each token of one answer, first to last.

    The stream that enters block `layer`, through that block's own input norm (its learned weights bring the base's few
    huge channels, which plain normalising would let drown the others, down to size), and the answer's length so far on
    a linear and on a logarithmic scale.

    Args:
        stream: float32[R, D].
    """
    unit = stream * stream.square().mean(dim=-1, keepdim=True).add(base.config.norm_eps).rsqrt()
    written = torch.arange(stream.shape[0], device=stream.device, dtype=torch.float32)[:, None]
    lengths = torch.cat((written / LINEAR_SCALE_TOKENS, torch.log1p(written) / LOG_SCALE), dim=1)
    return torch.cat((unit * base.blocks[layer].attention_norm.float(), lengths), dim=1)


class HeadCritic:
    """weight: float32[D + 2]. bias: float32[1]. adam: of both, in this order."""

    kind = "head"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.weight = weight
        self.bias = bias
        self.adam = adamw.new_adam_state(self.parameters())

    def parameters(self) -> list[torch.Tensor]:
        return [self.weight, self.bias]

    def names(self) -> list[str]:
        return ["weight", "bias"]

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """float32[N]: the value of each state."""
        return features @ self.weight + self.bias

    def values(self, rollouts: Sequence[Rollout], scorer: Scorer, tick: Tick) -> list[torch.Tensor]:
        return [self.predict(rollout.features) for rollout in rollouts]

    def step(
        self, targets: Sequence[Target], settings: PpoSettings, value_clip: float, scorer: Scorer, tick: Tick
    ) -> CriticStep:
        return self.fit(
            torch.cat([one.rollout.features for one in targets]),
            torch.cat([one.values for one in targets]),
            torch.cat([one.returns for one in targets]),
            settings,
            value_clip,
        )

    @torch.no_grad()
    def fit(
        self,
        features: torch.Tensor,
        old_values: torch.Tensor,
        returns: torch.Tensor,
        settings: PpoSettings,
        value_clip: float,
    ) -> CriticStep:
        """One optimizer step on the mean clipped value loss of N states.

        Args:
            features: float32[N, D + 2]. old_values, returns: float32[N].
        """
        values = self.predict(features).requires_grad_()
        with torch.enable_grad():
            loss = value_loss(values, old_values, returns, value_clip).mean()
            (slope,) = torch.autograd.grad(settings.value_coef * loss, values)
        gradients = [slope @ features, slope.sum().reshape(1)]
        return CriticStep(float(loss), take_step(self.parameters(), gradients, self.adam, settings))
