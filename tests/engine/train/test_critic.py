"""What keeps a critic honest: its explained variance, and the baseline that stands in for a useless one."""

from __future__ import annotations

import pytest
import torch

from engine.train.critic import USELESS_UPDATES, Baseline, explained_variance


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
