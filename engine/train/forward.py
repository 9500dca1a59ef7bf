"""The adapted blocks over the cached trunks of a few answers, packed: what actor and critic have in common.

Dimension letters: N tokens of all completions, D width of the stream.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.lora import Lora
from engine.models import Base
from engine.train import decoder
from engine.train.objectives.objective import Rollout

if TYPE_CHECKING:
    from engine.train.scorer import Scorer


def completion_states(rollouts: Sequence[Rollout], lora: Lora, scorer: Scorer) -> torch.Tensor:
    """[N, D] in the base's dtype, normed: the state before each completion token, differentiable by the adapter."""
    trunks, prompts = [rollout.trunk for rollout in rollouts], [rollout.prompt_ids for rollout in rollouts]
    return packed_states(scorer.base, scorer.first_layer(lora), trunks, prompts, lora)


def packed_states(
    base: Base,
    first: int,
    trunks: Sequence[torch.Tensor],
    prompts: Sequence[tuple[int, ...]],
    lora: Lora | None,
) -> torch.Tensor:
    """[N, D] in the base's dtype, normed: the state before each completion token of answers that lie packed.

    What all prompts begin with goes through the blocks once, and the last token of an answer, which predicts nothing
    that was sampled, not at all.

    Args:
        first: the block that the trunks are the input of.
        trunks: float32[T, D] of each answer, prompt included.
    """
    shared = _n_shared(prompts)
    own = [trunk[shared:-1] for trunk in trunks]
    lengths = [trunk.shape[0] for trunk in own]
    stream = decoder.run_blocks(
        base,
        torch.cat([trunks[0][:shared], *own]),
        decoder.pack(base, lengths, shared=shared),
        lora,
        first,
        base.config.shape.n_layers,
    )
    pieces = zip(prompts, stream[shared:].split(lengths), strict=True)
    return decoder.final_norm(base, torch.cat([one[len(prompt) - 1 - shared :] for prompt, one in pieces]))


def _n_shared(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all prompts begin with, their last ones left out: from there on each answer has its own states.

    0 for a single answer.
    """
    if len(prompts) == 1:
        return 0
    # The first and the last in order differ first: what they have in common, all have.
    agreeing = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(prompts), max(prompts), strict=False))
    return min(min(map(len, prompts)) - 1, sum(1 for _ in agreeing))


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
