"""Generalised advantage estimation over the tokens of one answer, and the scaling of a batch's advantages.

An answer is one episode of a token-level decision process: states are the positions before each completion token,
actions are the completion tokens (a sampled end-of-sequence token is one), the person's reward falls on the last
action, and after it nothing follows (the state behind the end is worth 0, also when the length limit ended the answer:
the person judged what was there).

Equation references: GAE is arXiv 1506.02438, eq. 16. Dimension letter: R tokens of one answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Added to the standard deviation: a batch of nearly equal advantages must not be blown up to unit variance.
SPREAD_FLOOR = 0.1
# Below this many answers mean and deviation say more about the sample than about the policy.
MIN_EPISODES_TO_WHITEN = 8


def terminal_rewards(n_tokens: int, reward: float) -> torch.Tensor:
    """float32[R]: `reward` at the last token, 0 elsewhere."""
    rewards = torch.zeros(n_tokens)
    rewards[-1] = reward
    return rewards


def estimate_advantages(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of one answer, float32[R] each; returns are advantages (not whitened) plus values.

    Args:
        rewards: float32[R].
        values: float32[R], of the state before each token.
    """
    following = torch.cat((values[1:], values.new_zeros(1)))
    deltas = (rewards + gamma * following - values).tolist()
    advantages, running = [0.0] * len(deltas), 0.0
    for t in reversed(range(len(deltas))):
        running = deltas[t] + gamma * gae_lambda * running
        advantages[t] = running
    result = torch.tensor(advantages)
    return result, result + values


def whiten(advantages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Centre and scale the advantages of a batch of answers, softly: (A - mean) / (std + SPREAD_FLOOR).

    Mean and deviation are over tokens. What is disliked is often long, so most tokens of a batch are of disliked
    answers; centred over answers their push down would outweigh all else, centred over tokens the liked ones are pulled
    up as much. Fewer than MIN_EPISODES_TO_WHITEN answers are returned unchanged.
    """
    if len(advantages) < MIN_EPISODES_TO_WHITEN:
        return list(advantages)
    together = torch.cat(list(advantages))
    mean, deviation = together.mean(), together.std(correction=0)
    return [(one - mean) / (deviation + SPREAD_FLOOR) for one in advantages]
