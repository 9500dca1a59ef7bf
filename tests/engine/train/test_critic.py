"""What keeps a critic honest: its explained variance, and the baseline that stands in for a useless one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.protocol import PpoSettings
from engine.train.adamw import AdamState
from engine.train.critic import USELESS_UPDATES, Baseline, CriticStep, Target, explained_variance, warm_up
from tests.engine.train.objectives.answers import answer


def test_explained_variance_of_a_constant_is_zero_and_of_equal_returns_defined() -> None:
    returns = torch.tensor([1.0, -1.0, 1.0])
    assert explained_variance(torch.zeros(3), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) < 0
    assert explained_variance(torch.zeros(3), torch.ones(3)) == 0.0


def test_t_cr_4_a_critic_that_explains_less_than_nothing_for_some_updates_is_stood_in_for() -> None:
    baseline = Baseline()
    baseline.note([1.0, 0.0], -5.0, fresh=True)
    assert (baseline.mean, baseline.useless) == (0.5, 0), "fitted to these ratings just now: no news of the critic"
    for _ in range(USELESS_UPDATES - 1):
        baseline.note([1.0], -0.1, fresh=False)
    assert not baseline.stands_in
    baseline.note([1.0], -0.1, fresh=False)
    assert baseline.stands_in
    assert 0.5 < baseline.mean < 1.0
    baseline.note([], 0.1, fresh=False)
    assert not baseline.stands_in


class Recorder:
    """A critic that keeps what its steps are fitted to."""

    kind = "head"

    def __init__(self) -> None:
        self.adam = AdamState(0, [], [])
        self.returns: list[list[torch.Tensor]] = []

    def step(self, targets: Sequence[Target], *_: object) -> CriticStep:
        self.returns.append([one.returns for one in targets])
        return CriticStep(0.0, 0.0)


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [0.8, 0.8, 0.8]), (0.5, [0.2, 0.4, 0.8]), (0.0, [0, 0, 0.8])])
def test_t_cr_2_the_warm_up_fits_a_critic_to_the_discounted_rating_still_to_come(
    gamma: float, expected: list[float]
) -> None:
    critic = Recorder()
    settings = PpoSettings(gamma=gamma, critic_warmup_steps=2)
    rated = answer([-1.0, -0.5, -2.0], reward=0.8)
    figures = warm_up(critic, settings, [rated], None, lambda: None)  # type: ignore[arg-type]
    assert figures == {"critic/warmup_steps": 2.0}
    assert [[one.tolist() for one in returns] for returns in critic.returns] == [[pytest.approx(expected)]] * 2
