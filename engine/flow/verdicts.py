"""What a reward function says of answers, as an update takes it: plain numbers in [-1, 1], or no opinion. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import SupportsFloat

LIMIT = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Verdicts:
    """rewards: of each answer; None: no opinion; what is not finite stays so, and the update counts it. clipped: how
    many lay beyond [-1, 1] and were brought to its end, as the daemon does with ratings."""

    rewards: tuple[float | None, ...]
    clipped: int

    @property
    def mean(self) -> float:
        """Of the finite rewards; NaN without one."""
        known = [reward for reward in self.rewards if reward is not None and math.isfinite(reward)]
        return sum(known) / len(known) if known else math.nan


def verdicts(given: Iterable[SupportsFloat | None], n_answers: int) -> Verdicts:
    """What was `given` to `n_answers` answers. Numbers of numpy and torch are as good as Python's.

    Raises:
        ValueError: there are not as many as answers. TypeError: one is neither a number nor None.
    """
    rewards: list[float | None] = []
    clipped = 0
    for number, one in enumerate(given):
        if one is not None and not isinstance(one, SupportsFloat):
            raise TypeError(f"the reward function gave {one!r} for answer {number}, expected a number or None")
        reward = None if one is None else float(one)
        if reward is not None and math.isfinite(reward) and abs(reward) > LIMIT:
            reward, clipped = math.copysign(LIMIT, reward), clipped + 1
        rewards.append(reward)
    if len(rewards) != n_answers:
        raise ValueError(f"the reward function gave {len(rewards)} rewards for {n_answers} answers")
    return Verdicts(tuple(rewards), clipped)
