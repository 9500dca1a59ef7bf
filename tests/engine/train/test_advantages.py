"""GAE against a naive double loop, its known special cases, and whitening."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.train.advantages import SPREAD_FLOOR, estimate_advantages, terminal_rewards, whiten

FLOATS = st.floats(-2, 2, width=32)


def naive_advantages(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition: a discounted sum of the one-step errors that follow, each written out."""
    n = len(rewards)
    following = [*values[1:], 0.0]
    result = []
    for t in range(n):
        total = 0.0
        for k in range(t, n):
            total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * following[k] - values[k])
        result.append(total)
    return result


@settings(deadline=None)
@given(steps=st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=30), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_equals_a_naive_loop(steps: list[tuple[float, float]], gamma: float, lam: float) -> None:
    rewards, values = (list(column) for column in zip(*steps, strict=True))
    advantages, returns = estimate_advantages(torch.tensor(rewards), torch.tensor(values), gamma, lam)
    expected = naive_advantages(rewards, values, gamma, lam)
    torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(returns, advantages + torch.tensor(values), rtol=0, atol=0)


def test_t_gae_1_without_discount_a_terminal_reward_is_every_tokens_return() -> None:
    values = torch.tensor([0.1, -0.4, 0.3])
    advantages, returns = estimate_advantages(terminal_rewards(3, 0.8), values, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.full((3,), 0.8))
    torch.testing.assert_close(advantages, 0.8 - values)


def test_t_gae_1_with_lambda_zero_each_advantage_is_the_one_step_error() -> None:
    values = torch.tensor([0.1, -0.4, 0.3])
    advantages, _ = estimate_advantages(terminal_rewards(3, 0.8), values, 1.0, 0.0)
    torch.testing.assert_close(advantages, torch.tensor([-0.4 - 0.1, 0.3 + 0.4, 0.8 - 0.3]))


def test_t_rw_1_the_reward_falls_once_on_the_last_token() -> None:
    assert terminal_rewards(4, -0.5).tolist() == [0.0, 0.0, 0.0, -0.5]


def test_t_gae_2_whitening_centres_tokens_and_scales_softly() -> None:
    batch = [torch.full((n,), value) for n, value in [(10, 1.0), (30, -1.0)] * 4]
    whitened = torch.cat(whiten(batch))
    assert float(whitened.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(whitened[0]) == pytest.approx(1.5 / (0.75**0.5 + SPREAD_FLOOR))


def test_whitening_gives_zero_for_equal_advantages_of_equal_answers() -> None:
    assert all(bool((one == 0).all()) for one in whiten([torch.full((5,), 0.25)] * 8))


def test_t_gae_4_fewer_than_eight_answers_are_left_alone() -> None:
    batch = [torch.tensor([0.3, -0.7])] * 7
    assert all(torch.equal(a, b) for a, b in zip(whiten(batch), batch, strict=True))
