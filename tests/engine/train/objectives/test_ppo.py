"""The PPO losses against an independent float64 implementation in numpy, and the side each rule acts on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.train.objectives import ppo
from engine.train.objectives.objective import TokenScores
from tests.engine.train.objectives.answers import answer, settings_job

LOW, HIGH, DUAL = 0.2, 0.28, 3.0


def numpy_policy_loss(new, old, advantages, weights, low, high):
    """One token at a time, in the words of the papers."""
    losses = []
    for n, o, a, w in zip(new, old, advantages, weights, strict=True):
        ratio = math.exp(min(max(n - o, -20.0), 20.0))
        surrogate = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        if a < 0:
            surrogate = max(surrogate, 3.0 * a)
        losses.append(-w * surrogate)
    return np.array(losses)


def random_tokens(seed: int, n: int = 400) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    old = -generator.exponential(1.5, n)
    return [old + generator.normal(0, 0.5, n), old, generator.normal(0, 1, n), generator.uniform(0.1, 2.0, n)]


def test_policy_loss_equals_an_independent_numpy_implementation() -> None:
    arrays = random_tokens(1)
    found = ppo.policy_loss(*(torch.tensor(a) for a in arrays), LOW, HIGH, DUAL)
    np.testing.assert_allclose(found.loss.numpy(), numpy_policy_loss(*arrays, LOW, HIGH), rtol=1e-12)
    np.testing.assert_allclose(found.ratio.numpy(), np.exp(arrays[0] - arrays[1]), rtol=1e-12)


def test_policy_gradient_equals_numerical_differences_of_the_numpy_implementation() -> None:
    new, old, advantages, weights = random_tokens(2, 60)
    logprobs = torch.tensor(new, requires_grad=True)
    loss = ppo.policy_loss(
        logprobs, torch.tensor(old), torch.tensor(advantages), torch.tensor(weights), LOW, HIGH, DUAL
    )
    loss.loss.sum().backward()
    step = 1e-6
    up = numpy_policy_loss(new + step, old, advantages, weights, LOW, HIGH)
    down = numpy_policy_loss(new - step, old, advantages, weights, LOW, HIGH)
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), (up - down) / (2 * step), atol=1e-7)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "has_gradient"),
    [
        (1.0, math.log(1 + HIGH) + 0.01, False),  # good token, already likely enough
        (1.0, math.log(1 - LOW) - 0.01, True),  # good token, made unlikely: pull it back
        (-1.0, math.log(1 - LOW) - 0.01, False),  # bad token, already unlikely enough
        (-1.0, math.log(1 + HIGH) + 0.01, True),  # bad token, made likely: push it down
        (-1.0, math.log(3.0) + 0.01, False),  # ... unless it is beyond the bound for negative advantages
        (1.0, 0.0, True),
        (-1.0, 0.0, True),
    ],
)
def test_t_ppo_1_gradient_stops_on_the_right_side_of_each_clip(
    advantage: float, log_ratio: float, has_gradient: bool
) -> None:
    logprobs = torch.tensor([log_ratio - 1.0], requires_grad=True)
    loss = ppo.policy_loss(logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), torch.ones(1), LOW, HIGH, DUAL)
    loss.loss.sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad.item() != 0.0) == has_gradient
    assert bool(loss.clipped.item()) != has_gradient
    if has_gradient:  # descending the loss makes good tokens likelier and bad ones less likely
        assert math.copysign(1.0, -logprobs.grad.item()) == math.copysign(1.0, advantage)


@settings(deadline=None)
@given(log_ratio=st.floats(-30, 30), advantage=st.floats(-5, -0.01))
def test_t_ppo_2_loss_of_a_bad_token_is_bounded(log_ratio: float, advantage: float) -> None:
    loss = ppo.policy_loss(
        torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([advantage]), torch.ones(1), LOW, HIGH, DUAL
    ).loss
    assert float(loss) <= 3.0 * -advantage + 1e-4


def test_t_ppo_3_value_loss_equals_the_formula() -> None:
    generator = np.random.default_rng(3)
    values, old, returns = generator.normal(0, 1, (3, 200))
    clipped = old + np.clip(values - old, -0.2, 0.2)
    expected = 0.5 * np.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    found = ppo.value_loss(torch.tensor(values), torch.tensor(old), torch.tensor(returns), 0.2)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_value_loss_has_no_gradient_where_a_value_left_its_bounds_towards_the_return() -> None:
    values = torch.tensor([0.5, -0.5], requires_grad=True)  # moved by 0.5, towards and away from the return
    ppo.value_loss(values, torch.zeros(2), torch.ones(2), 0.2).sum().backward()
    assert values.grad is not None
    assert values.grad[0] == 0.0
    assert values.grad[1] != 0.0


def test_t_is_1_weight_is_truncated_constant_and_multiplies_the_loss() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.0, -1.5, -5.0])
    weights = ppo.importance_weights(old, behaviour, 2.0)
    assert not weights.requires_grad
    np.testing.assert_allclose(weights.numpy(), [1.0, math.exp(0.5), 2.0], rtol=1e-6)
    plain = ppo.policy_loss(old.detach(), old.detach(), torch.ones(3), torch.ones(3), LOW, HIGH, DUAL).loss
    weighted = ppo.policy_loss(old.detach(), old.detach(), torch.ones(3), weights, LOW, HIGH, DUAL).loss
    torch.testing.assert_close(weighted, plain * weights)


def test_t_is_3_effective_sample_share_of_equal_weights_is_one_and_of_one_dominant_weight_is_small() -> None:
    assert ppo.effective_sample_share(torch.full((50,), 0.7)) == pytest.approx(1.0)
    assert ppo.effective_sample_share(torch.tensor([100.0] + [0.001] * 99)) == pytest.approx(0.01, rel=0.01)


def test_t_lp_6_extreme_log_ratios_stay_finite() -> None:
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    loss = ppo.policy_loss(
        logprobs, torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, 1.0]), torch.ones(2), LOW, HIGH, DUAL
    ).loss.sum()
    loss.backward()
    assert logprobs.grad is not None
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(logprobs.grad).all())


def test_descending_with_a_bonus_makes_the_policy_less_certain() -> None:
    item = answer([-1.0, -2.0], reward=1.0)
    scores = TokenScores(item.parent.clone(), torch.tensor([0.5, 0.75], dtype=torch.float64, requires_grad=True))
    flat = torch.zeros(2, dtype=torch.float64)
    loss = ppo.clipped_surrogate(item, flat, flat + 1.0, scores, settings_job({"entropy_coef": 0.2, "kl_coef": 0.0}))
    assert float(loss.loss.detach()) == pytest.approx(-0.2 * 1.25)
    assert scores.entropy is not None
    (gradient,) = torch.autograd.grad(loss.loss, scores.entropy)
    assert gradient.tolist() == [-0.2, -0.2]
