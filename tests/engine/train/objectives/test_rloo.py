"""RLOO against hand arithmetic, its invariants, and REINFORCE as what its first step is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.train.objectives.objective import Batch
from engine.train.objectives.rloo import OBJECTIVE, leave_one_out_advantages
from tests.engine.train.objectives.answers import answer, losses, random_answer, settings_job

NO_KL = settings_job({"kl_coef": 0.0})
IN_REWARD = settings_job({"kl_coef": 0.1, "kl_in": "reward"})
REWARDS = st.lists(st.floats(-1, 1, width=16), min_size=2, max_size=8)


@given(REWARDS)
def test_t_rloo_1_the_baseline_is_the_mean_of_the_others_and_advantages_sum_to_zero(rewards: list[float]) -> None:
    found = leave_one_out_advantages(torch.tensor(rewards, dtype=torch.float64)).numpy()
    expected = [r - float(np.mean([*rewards[:i], *rewards[i + 1 :]])) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert float(found.sum()) == pytest.approx(0.0, abs=1e-9)


def test_t_rloo_1_a_group_of_one_is_left_out_with_its_reason() -> None:
    prepared = OBJECTIVE.prepare(Batch(rated=(answer([-1.0], reward=1.0, group="a"),)), NO_KL)
    assert (prepared.items, dict(prepared.skipped)) == ((), {"group_of_one": 1})
    with pytest.raises(ValueError, match="group of one"):
        leave_one_out_advantages(torch.tensor([1.0]))


def test_a_group_of_equal_rewards_is_left_out_with_its_reason() -> None:
    equal = tuple(random_answer(np.random.default_rng(1), 3, reward=-1.0, group="a") for _ in range(3))
    prepared = OBJECTIVE.prepare(Batch(rated=equal), IN_REWARD)
    assert (prepared.items, dict(prepared.skipped)) == ((), {"equal_rewards": 3})


@given(REWARDS, st.floats(-5, 5))
def test_what_all_rewards_have_in_common_does_not_matter(rewards: list[float], shift: float) -> None:
    plain = leave_one_out_advantages(torch.tensor(rewards, dtype=torch.float64))
    shifted = leave_one_out_advantages(torch.tensor(rewards, dtype=torch.float64) + shift)
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-9)


def test_the_first_step_is_reinforce() -> None:
    rewards = [1.0, -0.5, 0.25]
    rated = tuple(answer([-1.0] * n, reward=r, group="g") for n, r in zip((2, 5, 3), rewards, strict=True))
    items = OBJECTIVE.prepare(Batch(rated=rated), NO_KL).items
    found, gradients = losses(OBJECTIVE, items, None, NO_KL)
    expected = [1.0 - (-0.125), -0.5 - 0.625, 0.25 - 0.25]
    for item, loss, (gradient,), advantage in zip(items, found, gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, [-advantage] * item.count, atol=1e-12)
        assert float(loss.loss) == pytest.approx(-advantage * item.count)


def test_a_flipped_sign_a_missing_baseline_or_a_baseline_of_all_is_another_gradient() -> None:
    rewards = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    rated = tuple(answer([-1.0], reward=float(r), group="g") for r in rewards)
    _, gradients = losses(OBJECTIVE, OBJECTIVE.prepare(Batch(rated=rated), NO_KL).items, None, NO_KL)
    found = np.array([float(gradient[0]) for (gradient,) in gradients])
    for wrong in (leave_one_out_advantages(rewards), -rewards, -(rewards - rewards.mean())):
        assert not np.allclose(found, wrong.numpy(), rtol=0.05, atol=0.05)


def test_later_steps_are_clipped_on_the_right_side() -> None:
    rated = tuple(answer([-1.0, -1.0], reward=r, group="g") for r in (1.0, -1.0))
    items = OBJECTIVE.prepare(Batch(rated=rated), NO_KL).items
    beyond, below = math.log(1.28) + 0.01, math.log(0.8) - 0.01
    new = [[np.array([-1.0 + beyond, -1.0 + below])]] * 2
    _, ((liked,), (disliked,)) = losses(OBJECTIVE, items, new, NO_KL)
    assert [bool(liked[0] == 0), bool(liked[1] < 0)] == [True, True]
    assert [bool(disliked[0] > 0), bool(disliked[1] == 0)] == [True, True]


def test_t_kl_2_with_the_kl_in_the_reward_an_answer_that_strayed_is_worth_less() -> None:
    strayed = answer([-1.0, -1.0], reference=[-2.0, -3.0], reward=0.5, group="g")
    others = [answer([-1.0], reward=r, group="g") for r in (0.5, -0.5)]
    items = OBJECTIVE.prepare(Batch(rated=(strayed, *others)), IN_REWARD).items
    advantage, equal, _ = (float(item.constants["advantages"][0]) for item in items)
    assert advantage == pytest.approx((0.5 - 0.1 * 3.0) - 0.0)
    assert advantage < equal


def test_with_the_kl_in_the_loss_its_gradient_is_added() -> None:
    in_loss = settings_job({"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k2"})
    rated = tuple(answer([-1.0], reference=[-2.0], reward=r, group="g") for r in (1.0, -1.0))
    _, ((liked,), (disliked,)) = losses(OBJECTIVE, OBJECTIVE.prepare(Batch(rated=rated), in_loss).items, None, in_loss)
    assert [float(liked[0]), float(disliked[0])] == pytest.approx([-2.0 + 0.1, 2.0 + 0.1])
