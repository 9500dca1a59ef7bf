"""A critic that is a second adapter on the frozen base, with a linear value head on the last state.

It sees what the head on frozen features cannot (its own reading of the text), at the price of a backward pass of its
own. The base is shared with the actor: which adapter is applied is an argument of each pass, so there is nothing to
switch back. Adapter and head are float32 masters; the head is zero at first, and so is every value.

Dimension letters: N tokens of completions, D width of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.shape import BaseShape
from engine.lora import Lora, new_lora
from engine.protocol import LoraSettings, PpoSettings
from engine.train import adamw
from engine.train.batch import split_micro_batches
from engine.train.critic import CriticStep, Target, Tick, take_step
from engine.train.forward import add_gradients, completion_states, n_tokens_of, with_leaves
from engine.train.objectives.objective import Rollout
from engine.train.objectives.ppo import value_loss
from engine.train.scorer import Scorer


def new_lora_critic(shape: BaseShape, settings: LoraSettings, seed: int, device: torch.device) -> LoraCritic:
    """A critic that values every state at 0, on an adapter of the actor's size."""
    lora = new_lora(shape, settings, seed, device)
    return LoraCritic(lora, torch.zeros(shape.n_embd, device=device), torch.zeros(1, device=device))


class LoraCritic:
    """weight: float32[D]. bias: float32[1]."""

    kind = "lora"

    def __init__(self, lora: Lora, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.lora = lora
        self.weight = weight
        self.bias = bias
        self.adam = adamw.new_adam_state(self.parameters())

    def parameters(self) -> list[torch.Tensor]:
        return [*self.lora.parameters(), self.weight, self.bias]

    def names(self) -> list[str]:
        return [*(f"{module}.{factor}" for module in self.lora.matrices for factor in "AB"), "weight", "bias"]

    def values(self, rollouts: Sequence[Rollout], scorer: Scorer, tick: Tick) -> list[torch.Tensor]:
        micro_batches = split_micro_batches([rollout.trunk.shape[0] for rollout in rollouts], scorer.micro_batch_tokens)

        def work(members: list[int]) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                chosen = [rollouts[i] for i in members]
                states = completion_states(chosen, self.lora, scorer).float()
                return tuple((states @ self.weight + self.bias).split(n_tokens_of(chosen)))

        found: dict[int, torch.Tensor] = {}
        for members, values in zip(micro_batches, scorer.lanes.map(work, micro_batches, tick), strict=True):
            found.update(zip(members, values, strict=True))
        return [found[i] for i in range(len(rollouts))]

    def step(
        self, targets: Sequence[Target], settings: PpoSettings, value_clip: float, scorer: Scorer, tick: Tick
    ) -> CriticStep:
        n_tokens = sum(n_tokens_of([one.rollout for one in targets]))
        micro_batches = split_micro_batches([one.rollout.trunk.shape[0] for one in targets], scorer.micro_batch_tokens)

        def work(members: list[int]) -> tuple[list[torch.Tensor], float]:
            return self._gradients([targets[i] for i in members], settings, value_clip, scorer, n_tokens)

        results = scorer.lanes.map(work, micro_batches, tick)
        gradients, loss = results[0]
        for more, its_loss in results[1:]:
            add_gradients(gradients, more)
            loss += its_loss
        return CriticStep(loss, take_step(self.parameters(), gradients, self.adam, settings))

    def _gradients(
        self, targets: Sequence[Target], settings: PpoSettings, value_clip: float, scorer: Scorer, n_tokens: int
    ) -> tuple[list[torch.Tensor], float]:
        """Of the targets' share of the mean loss, in the order of `parameters()`; and the share."""
        own, leaves = with_leaves(self.lora)
        weight, bias = self.weight.detach().requires_grad_(), self.bias.detach().requires_grad_()
        with torch.enable_grad():
            values = completion_states([one.rollout for one in targets], own, scorer).float() @ weight + bias
            old, returns = torch.cat([one.values for one in targets]), torch.cat([one.returns for one in targets])
            loss = value_loss(values, old, returns, value_clip).sum() / n_tokens
            gradients = torch.autograd.grad(settings.value_coef * loss, [*leaves, weight, bias])
        return list(gradients), float(loss.detach())
