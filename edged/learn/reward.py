"""From a rating to the reward that the trainer sees. Pure."""

from __future__ import annotations


def reward_of(rating: float, *, clip: float) -> float:
    """The reward of an episode whose newest rating is `rating` (in [-1, 1]), limited to [-clip, clip]."""
    return max(-clip, min(clip, rating))
