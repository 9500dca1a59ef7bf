"""The adapted blocks over the cached trunks of a few answers, packed: what actor and critic have in common.

Dimension letters: N tokens of all completions, D width of the stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from engine.lora import Lora
from engine.train import decoder
from engine.train.objectives.objective import Rollout
from engine.train.scorer import Scorer


def completion_states(rollouts: Sequence[Rollout], lora: Lora, scorer: Scorer) -> torch.Tensor:
    """[N, D] in the base's dtype, normed: the state before each completion token, differentiable by the adapter."""
    base = scorer.base
    lengths = [rollout.trunk.shape[0] for rollout in rollouts]
    stream = decoder.run_blocks(
        base,
        torch.cat([rollout.trunk for rollout in rollouts]),
        decoder.pack(base, lengths),
        lora,
        scorer.first_layer(lora),
        base.config.shape.n_layers,
    )
    pieces = zip(rollouts, stream.split(lengths), strict=True)
    return decoder.final_norm(base, torch.cat([one[r.prompt_tokens - 1 : -1] for r, one in pieces]))


def tokens_of(rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[N] completion tokens and float32[N] their temperatures."""
    tokens = torch.cat([rollout.tokens for rollout in rollouts])
    return tokens, torch.cat([torch.full_like(r.parent, r.temperature) for r in rollouts])


def n_tokens_of(rollouts: Sequence[Rollout]) -> list[int]:
    """Completion tokens of each."""
    return [rollout.tokens.shape[0] for rollout in rollouts]


def with_leaves(lora: Lora) -> tuple[Lora, list[torch.Tensor]]:
    """The adapter on leaves of the caller's own, and these: gradients of one graph must not meet another lane's."""
    leaves = [parameter.detach().requires_grad_() for parameter in lora.parameters()]
    pairs = zip(leaves[0::2], leaves[1::2], strict=True)
    return dataclasses.replace(lora, matrices=dict(zip(lora.matrices, pairs, strict=True))), leaves


def add_gradients(totals: Sequence[torch.Tensor], more: Sequence[torch.Tensor]) -> None:
    """Add `more` to `totals` in place."""
    for total, gradient in zip(totals, more, strict=True):
        total.add_(gradient)
