"""From a rating to a reward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.learn.reward import reward_of


@pytest.mark.parametrize(
    ("rating", "clip", "reward"),
    [(1.0, 1.0, 1.0), (-1.0, 1.0, -1.0), (0.25, 1.0, 0.25), (0.9, 0.5, 0.5), (-1.0, 0.5, -0.5)],
)
def test_a_reward_is_the_rating_within_the_clip(rating: float, clip: float, reward: float) -> None:
    assert reward_of(rating, clip=clip) == reward


@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(0.01, 2))
def test_a_better_rating_never_gives_a_smaller_reward(worse: float, better: float, clip: float) -> None:
    worse, better = sorted((worse, better))
    assert -clip <= reward_of(worse, clip=clip) <= reward_of(better, clip=clip) <= clip
