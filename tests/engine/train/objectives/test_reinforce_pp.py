"""REINFORCE++ against a float64 numpy implementation of its rewards, returns and normalisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.train.objectives.objective import Batch
from engine.train.objectives.reinforce_pp import OBJECTIVE, discounted_returns, normalise
from tests.engine.train.objectives.answers import answer, losses, random_answer, settings_job

BETA, GAMMA = 0.05, 0.9
JOB = settings_job({"kl_coef": BETA, "gamma": GAMMA})
FLOATS = st.floats(-2, 2, width=16)


def numpy_advantages(batch: Batch, *, kl_sign: float = 1.0, backwards: bool = False) -> np.ndarray:
    """All tokens of the batch in order; a double loop, not a recursion."""
    returns = []
    for rollout in batch.rated:
        parent, reference = rollout.parent.numpy(), rollout.reference.numpy()
        rewards = -kl_sign * BETA * (parent - reference)
        rewards[-1] += rollout.reward
        for t in range(len(rewards)):
            span = range(t + 1) if backwards else range(t, len(rewards))
            returns.append(sum(GAMMA ** abs(i - t) * rewards[i] for i in span))
    returns = np.array(returns)
    return (returns - returns.mean()) / returns.std()


def batch(n: int = 10, seed: int = 4) -> Batch:
    generator = np.random.default_rng(seed)
    return Batch(
        rated=tuple(
            random_answer(generator, int(generator.integers(1, 8)), reward=(-1.0) ** i * 0.1 * i) for i in range(n)
        )
    )


@given(st.lists(FLOATS, min_size=1, max_size=20), st.floats(0, 1))
def test_returns_equal_a_double_loop(rewards: list[float], gamma: float) -> None:
    found = discounted_returns(torch.tensor(rewards, dtype=torch.float64), gamma)
    expected = [sum(gamma ** (i - t) * rewards[i] for i in range(t, len(rewards))) for t in range(len(rewards))]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)


def test_a_hand_made_answer() -> None:
    found = discounted_returns(torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64), 0.5)
    assert found.tolist() == [0.5 + 0.25, 0.5, 1.0]


def test_advantages_equal_an_independent_numpy_implementation() -> None:
    items = OBJECTIVE.prepare(batch(), JOB).items
    found = torch.cat([item.constants["advantages"] for item in items]).numpy()
    np.testing.assert_allclose(found, numpy_advantages(batch()), rtol=1e-5, atol=1e-6)  # rewards are float32
    for wrong in (-found, numpy_advantages(batch(), kl_sign=-1.0), numpy_advantages(batch(), backwards=True)):
        assert not np.allclose(wrong, numpy_advantages(batch()), rtol=0.01, atol=0.01)


@given(st.lists(FLOATS, min_size=2, max_size=30).filter(lambda values: np.std(values) > 0.01))
def test_normalised_advantages_have_mean_zero_and_variance_one(values: list[float]) -> None:
    found = normalise(torch.tensor(values, dtype=torch.float64))
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(found.square().mean()) == pytest.approx(1.0)


def test_t_gae_2_normalising_has_the_figures_of_the_reference_implementation() -> None:
    """Biased variance, over all entries; with the mean put back as in lm-human-preferences' shift_mean=False."""
    rows = torch.tensor([[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]], dtype=torch.float64)
    found = normalise(rows.flatten()).reshape(3, 3) + rows.mean()
    assert found[0].tolist() == pytest.approx([0.0508, 0.4381, 0.8254], abs=1e-4)


def test_t_gae_4_equal_returns_and_single_tokens_give_zero_and_no_nan() -> None:
    assert normalise(torch.full((5,), 0.3, dtype=torch.float64)).abs().max() < 1e-9
    assert normalise(torch.tensor([0.3])).tolist() == [0.0]


def test_t_gae_4_fewer_than_eight_answers_are_not_normalised() -> None:
    rated = tuple(answer([-1.0, -2.0], reward=r) for r in (1.0, -1.0, 0.5))
    items = OBJECTIVE.prepare(Batch(rated=rated), JOB).items
    for item, reward in zip(items, (1.0, -1.0, 0.5), strict=True):
        assert item.constants["advantages"].tolist() == pytest.approx([GAMMA * reward, reward])


def test_a_batch_of_equal_ratings_is_left_out_although_its_kl_differs() -> None:
    generator = np.random.default_rng(1)
    rated = tuple(random_answer(generator, 4, reward=-1.0) for _ in range(9))
    prepared = OBJECTIVE.prepare(Batch(rated=rated), JOB)
    assert (prepared.items, dict(prepared.skipped)) == ((), {"equal_rewards": 9})


def test_nothing_rated_is_nothing_prepared() -> None:
    prepared = OBJECTIVE.prepare(Batch(), JOB)
    assert (prepared.items, dict(prepared.skipped)) == ((), {})


def test_t_kl_2_a_token_that_moved_away_from_the_reference_is_charged_for_it() -> None:
    strayed = answer([-1.0, -1.0], reference=[-3.0, -1.0], reward=0.5)
    steady = answer([-1.0, -1.0], reward=-0.5)
    items = OBJECTIVE.prepare(Batch(rated=(strayed, steady)), settings_job({"kl_coef": BETA})).items
    assert items[0].constants["advantages"].tolist() == pytest.approx([0.5 - 2 * BETA, 0.5])


def test_the_kl_stands_in_the_reward_and_never_in_the_loss() -> None:
    """The gradient at the first step is the advantage alone, whatever the settings say of other objectives."""
    for place in ("loss", "reward"):
        job = settings_job({"kl_coef": BETA, "kl_in": place})
        rated = tuple(answer([-1.0], reference=[-2.0], reward=r) for r in (1.0, -1.0))
        items = OBJECTIVE.prepare(Batch(rated=rated), job).items
        _, ((liked,), (disliked,)) = losses(OBJECTIVE, items, None, job)
        assert [float(liked[0]), float(disliked[0])] == pytest.approx([-(1.0 - BETA), 1.0 + BETA])


def test_the_loss_is_the_clipped_surrogate_of_the_advantages() -> None:
    items = OBJECTIVE.prepare(batch(), JOB).items
    generator = np.random.default_rng(7)
    new = [[item.rollouts[0].parent.numpy() + generator.normal(0, 0.5, item.count)] for item in items]
    found, _ = losses(OBJECTIVE, items, new, JOB)
    for flip, agrees in (("", True), ("policy sign", False), ("clip low", False), ("clip high", False)):
        total = 0.0
        for item, (logprobs,) in zip(items, new, strict=True):
            rollout = item.rollouts[0]
            ratio = np.exp(logprobs - rollout.parent.numpy())
            low, high = (1.2 if flip == "clip low" else 0.8), (0.72 if flip == "clip high" else 1.28)
            advantages = item.constants["advantages"].numpy()
            surrogate = np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages)
            surrogate = np.where(advantages < 0, np.maximum(surrogate, 3.0 * advantages), surrogate)
            weights = np.minimum(np.exp(rollout.parent.numpy() - rollout.behaviour.numpy()), 2.0)
            total += float((weights * surrogate).sum()) * (1 if flip == "policy sign" else -1)
        assert (sum(float(one.loss) for one in found) == pytest.approx(total, rel=1e-9)) == agrees
