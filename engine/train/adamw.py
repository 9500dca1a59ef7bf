"""AdamW over a list of tensors, with its state in the open.

The same arithmetic as torch.optim.AdamW (a test compares them). Written out because torch.optim pulls in torch's
compiler, a second of start time and 100 MB that nothing here uses, and because the state has to be saved, restored and
compared byte for byte.

Paper: arXiv 1711.05101, algorithm 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

BETA1, BETA2 = 0.9, 0.999
# The usual 1e-8 makes the first steps of a policy aggressive (The 37 implementation details of PPO, item 3).
EPS = 1e-5


@dataclasses.dataclass(slots=True)
class AdamState:
    """steps taken, and the running means of gradient and squared gradient of each tensor."""

    steps: int
    means: list[torch.Tensor]
    squares: list[torch.Tensor]


def new_adam_state(parameters: Sequence[torch.Tensor]) -> AdamState:
    """The state before the first step."""
    return AdamState(
        steps=0,
        means=[torch.zeros_like(p, requires_grad=False) for p in parameters],
        squares=[torch.zeros_like(p, requires_grad=False) for p in parameters],
    )


@torch.no_grad()
def adamw_step(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    state: AdamState,
    *,
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Move `parameters` in place against `gradients`, and advance `state`."""
    state.steps += 1
    correction1, correction2 = 1.0 - BETA1**state.steps, 1.0 - BETA2**state.steps
    for parameter, gradient, mean, square in zip(parameters, gradients, state.means, state.squares, strict=True):
        parameter.mul_(1.0 - learning_rate * weight_decay)
        mean.lerp_(gradient, 1.0 - BETA1)
        square.mul_(BETA2).addcmul_(gradient, gradient, value=1.0 - BETA2)
        denominator = square.sqrt().div_(correction2**0.5).add_(EPS)
        parameter.addcdiv_(mean, denominator, value=-learning_rate / correction1)


def clip_by_norm(gradients: Sequence[torch.Tensor], max_norm: float) -> float:
    """Scale `gradients` in place so that their norm, taken together, is at most `max_norm`; the norm before.

    A norm that is not finite is returned and nothing is scaled.
    """
    if not gradients:
        return 0.0
    norm = float(torch.stack([torch.linalg.vector_norm(g) for g in gradients]).square().sum().sqrt())
    if max_norm < norm < float("inf"):
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm
