"""The critic: a linear value head on the frozen base's hidden state, fitted apart from the actor.

Its features are the stream of the base, adapters off, at two thirds of the depth, normalised, and how long the answer
is already, which is most of what there is to know of an answer's end. They depend on the tokens only, so they are
computed once per episode and every step of the critic is a product with a [N, D + 2] matrix. It shares no
parameter with the actor; neither can disturb the other. float32 throughout, zero at the start (the first value of every
state is 0, the middle of the rewards' range).

Dimension letters: N states, R states of one answer, D width of the stream.
"""

from __future__ import annotations

import dataclasses

import torch

from adapters.shape import BaseShape
from engine.models import Base
from engine.train import adamw
from engine.train.objectives.ppo import value_loss

# Bring a usual answer's length to the size of the other features, about 1.
LINEAR_SCALE_TOKENS = 32.0
LOG_SCALE = 3.0


@dataclasses.dataclass(slots=True)
class Critic:
    """weight: float32[D + 2]. bias: float32[1]. adam: of both, in this order."""

    weight: torch.Tensor
    bias: torch.Tensor
    adam: adamw.AdamState

    def parameters(self) -> list[torch.Tensor]:
        return [self.weight, self.bias]


@dataclasses.dataclass(frozen=True, slots=True)
class CriticStep:
    """loss: mean over the step's tokens, before it. grad_norm: before clipping."""

    loss: float
    grad_norm: float


def feature_layer(shape: BaseShape) -> int:
    """The block whose input is the critic's feature: two thirds up, where an adapter on the top third begins."""
    return shape.n_layers - max(1, round(shape.n_layers / 3))


def new_critic(n_features: int, device: torch.device) -> Critic:
    """A critic that values every state at 0."""
    weight, bias = torch.zeros(n_features, device=device), torch.zeros(1, device=device)
    return Critic(weight, bias, adamw.new_adam_state([weight, bias]))


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


def predict_values(critic: Critic, features: torch.Tensor) -> torch.Tensor:
    """float32[N]: the value of each state."""
    return features @ critic.weight + critic.bias


@torch.no_grad()
def critic_step(
    critic: Critic,
    features: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    *,
    value_clip: float,
    value_coef: float,
    learning_rate: float,
    max_grad_norm: float,
) -> CriticStep:
    """One optimizer step on the mean clipped value loss of N states.

    Args:
        features: float32[N, D + 2]. old_values, returns: float32[N].
        value_clip: infinity in the warm-up, where there is no earlier value to stay near.
    """
    values = predict_values(critic, features).requires_grad_()
    with torch.enable_grad():
        loss = value_loss(values, old_values, returns, value_clip).mean()
        (slope,) = torch.autograd.grad(value_coef * loss, values)
    gradients = [slope @ features, slope.sum().reshape(1)]
    norm = adamw.clip_by_norm(gradients, max_grad_norm)
    adamw.adamw_step(critic.parameters(), gradients, critic.adam, learning_rate=learning_rate, weight_decay=0.0)
    return CriticStep(float(loss), norm)


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant; 0 for equal returns."""
    spread = float(returns.var(correction=0))
    return 1.0 - float((returns - values).var(correction=0)) / spread if spread > 1e-12 else 0.0
