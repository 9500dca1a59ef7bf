"""The critic on frozen features: zero at first, one plain gradient step, and it learns what can be learned."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.train import adamw
from engine.train.critic import explained_variance
from engine.train.critic_head import HeadCritic
from engine.train.objectives.ppo import value_loss
from tests.engine.train.tiny import PPO

SETTINGS = dataclasses.replace(PPO, value_coef=0.5, critic_learning_rate=0.01, max_grad_norm=1.0)


def zero_critic(n_features: int) -> HeadCritic:
    return HeadCritic(torch.zeros(n_features), torch.zeros(1))


def test_t_cr_1_a_new_critic_values_every_state_at_zero() -> None:
    assert bool((zero_critic(8).predict(torch.randn(5, 8)) == 0).all())


def test_a_step_is_adamw_on_the_gradient_of_the_clipped_loss() -> None:
    torch.manual_seed(0)
    features, old, returns = torch.randn(20, 8), torch.zeros(20), torch.randn(20)
    critic = zero_critic(8)
    weight, bias = torch.zeros(8, requires_grad=True), torch.zeros(1, requires_grad=True)
    state = adamw.new_adam_state([weight, bias])
    for _ in range(30):
        loss = value_loss(features @ weight + bias, old, returns, 0.2).mean()
        gradients = list(torch.autograd.grad(0.5 * loss, [weight, bias]))
        adamw.clip_by_norm(gradients, 1.0)
        adamw.adamw_step([weight, bias], gradients, state, learning_rate=0.01, weight_decay=0.0)
        step = critic.fit(features, old, returns, SETTINGS, 0.2)
        assert step.loss == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(critic.weight, weight.detach())
    torch.testing.assert_close(critic.bias, bias.detach())


def test_t_cr_4_a_linear_value_is_learned_and_explains_the_variance() -> None:
    torch.manual_seed(1)
    features = torch.randn(300, 8)
    returns = features @ torch.linspace(-0.5, 0.5, 8) + 0.3
    critic = zero_critic(8)
    for _ in range(400):
        critic.fit(features, torch.zeros(300), returns, SETTINGS, float("inf"))
    assert explained_variance(critic.predict(features), returns) > 0.99
