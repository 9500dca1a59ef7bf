"""KTO against numpy: the reference point, the balance of liked and disliked, and batches that teach nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.train.objectives.kto import OBJECTIVE, balanced_weights, prospect_loss, reference_point
from engine.train.objectives.objective import Batch, Item
from tests.engine.train.objectives.answers import answer, losses, random_answer, settings_job

BETA = 0.2
JOB = settings_job(preference={"kto_beta": BETA})


def batch(rewards: tuple[float, ...] = (1.0, -1.0, -0.5, 0.2, -1.0), seed: int = 1, shift: float = 0.4) -> Batch:
    generator = np.random.default_rng(seed)
    rated = tuple(random_answer(generator, int(generator.integers(1, 9)), reward=reward) for reward in rewards)
    return Batch(rated=rated, mismatched=tuple(generator.normal(shift, 0.5, len(rewards)).tolist()))


def numpy_losses(rated: Batch, new: list[list[np.ndarray]], flip: str = "") -> list[float]:
    liked = [rollout.reward > 0 for rollout in rated.rated]
    z0 = max(float(np.mean(rated.mismatched)), 0.0) * (-1 if flip == "reference point" else 1)
    w_liked, w_disliked = len(liked) / 2 / sum(liked), len(liked) / 2 / (len(liked) - sum(liked))
    if flip == "weights":
        w_liked, w_disliked = w_disliked, w_liked
    found = []
    for rollout, (logprobs,), is_liked in zip(rated.rated, new, liked, strict=True):
        r = logprobs.sum() - rollout.reference.numpy().sum() * (-1 if flip == "reference" else 1)
        gain = BETA * (r - z0) if is_liked != (flip == "labels") else BETA * (z0 - r)
        value = 1 / (1 + math.exp(-gain))
        found.append((w_liked if is_liked else w_disliked) * (1 - value))
    return found


def moved(items: tuple[Item, ...], seed: int = 2) -> list[list[np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [
        [item.rollouts[0].parent.numpy() + generator.normal(0, 0.7, item.rollouts[0].tokens.shape[0])] for item in items
    ]


def test_loss_equals_an_independent_numpy_implementation() -> None:
    items = OBJECTIVE.prepare(batch(), JOB).items
    found, _ = losses(OBJECTIVE, items, moved(items), JOB)
    assert [float(one.loss) for one in found] == pytest.approx(numpy_losses(batch(), moved(items)), rel=1e-6)
    assert [item.count for item in items] == [1] * 5


@pytest.mark.parametrize("flip", ["labels", "reference", "reference point", "weights"])
def test_an_implementation_with_one_thing_the_wrong_way_round_gives_another_loss(flip: str) -> None:
    items = OBJECTIVE.prepare(batch(), JOB).items
    found, _ = losses(OBJECTIVE, items, moved(items), JOB)
    wrong = numpy_losses(batch(), moved(items), flip)
    assert [float(one.loss) for one in found] != pytest.approx(wrong, rel=0.01)


def test_a_hand_made_answer() -> None:
    loss = prospect_loss(
        torch.tensor([1.0, 1.0]), torch.tensor(0.5), torch.tensor([True, False]), torch.tensor([2.0, 1.0]), 0.1
    )
    assert loss.tolist() == pytest.approx([2 * (1 - 1 / (1 + math.exp(-0.05))), 1 - 1 / (1 + math.exp(0.05))])


def test_gradients_are_those_of_the_values() -> None:
    log_ratios = torch.linspace(-4, 4, 6, dtype=torch.float64).requires_grad_()
    is_liked, weights = torch.arange(6) % 2 == 0, torch.linspace(0.5, 2, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: prospect_loss(x, torch.tensor(0.3), is_liked, weights, 0.4), log_ratios)


def test_descending_makes_liked_answers_likelier_and_disliked_ones_less_likely() -> None:
    items = OBJECTIVE.prepare(batch(), JOB).items
    _, gradients = losses(OBJECTIVE, items, None, JOB)
    assert [bool((gradient < 0).all()) for (gradient,) in gradients] == [True, False, False, True, False]


def test_t_kto_1_the_reference_point_is_a_mean_never_negative_and_carries_no_gradient() -> None:
    mismatched = torch.tensor([0.5, 1.5, -0.5], requires_grad=True)
    point = reference_point(mismatched)
    assert not point.requires_grad
    assert float(point) == 0.5
    assert float(reference_point(-mismatched)) == 0.0


def test_t_kto_1_it_is_taken_from_mismatched_answers_of_the_same_batch() -> None:
    for shift in (0.4, 2.0):
        given = batch(shift=shift)
        items = OBJECTIVE.prepare(given, JOB).items
        assert [float(item.constants["z0"]) for item in items] == pytest.approx(
            [np.mean(given.mismatched)] * 5, rel=1e-6
        )


def test_t_kto_1_a_single_answer_has_no_mismatched_one_and_is_left_out() -> None:
    prepared = OBJECTIVE.prepare(Batch(rated=(answer([-1.0], reward=1.0),)), JOB)
    assert (prepared.items, dict(prepared.skipped)) == ((), {"no_mismatched": 1})


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_t_kto_1_a_batch_of_one_class_is_left_out(sign: float) -> None:
    prepared = OBJECTIVE.prepare(batch(rewards=(sign, sign, sign / 2)), JOB)
    assert (prepared.items, dict(prepared.skipped)) == ((), {"one_class": 3})


def test_a_rating_of_zero_is_no_opinion() -> None:
    prepared = OBJECTIVE.prepare(batch(rewards=(1.0, 0.0, -1.0, 0.0)), JOB)
    assert [item.rollouts[0].reward for item in prepared.items] == [1.0, -1.0]
    assert dict(prepared.skipped) == {"no_opinion": 2}
    assert dict(OBJECTIVE.prepare(batch(rewards=(0.0, 0.0)), JOB).skipped) == {"no_opinion": 2}


def test_nothing_rated_is_nothing_prepared() -> None:
    prepared = OBJECTIVE.prepare(Batch(), JOB)
    assert (prepared.items, dict(prepared.skipped)) == ((), {})


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0.1, 10), st.floats(0.1, 10))
def test_t_kto_1_the_weighted_counts_stay_between_equal_and_four_thirds(
    n_liked: int, n_disliked: int, liked_weight: float, disliked_weight: float
) -> None:
    w_liked, w_disliked = balanced_weights(n_liked, n_disliked, liked_weight, disliked_weight)
    ratio = n_liked * w_liked / (n_disliked * w_disliked)
    assert 1 - 1e-9 <= ratio <= 4 / 3 + 1e-9
    total = (n_liked + n_disliked) * (liked_weight + disliked_weight) / 2
    assert n_liked * w_liked + n_disliked * w_disliked == pytest.approx(total)


def test_of_as_many_of_each_the_weights_are_the_settings() -> None:
    assert balanced_weights(5, 5, 1.2, 1.0) == pytest.approx((1.2, 1.0))
    assert balanced_weights(1, 3, 1.0, 1.0) == pytest.approx((2.0, 2 / 3))


def test_answers_without_a_sampler_are_learned_from_too() -> None:
    rated = tuple(answer([-1.0], reward=r, sampled=False) for r in (1.0, -1.0))
    prepared = OBJECTIVE.prepare(Batch(rated=rated, mismatched=(0.0, 0.0)), JOB)
    assert len(prepared.items) == 2


def test_figures_tell_how_far_answers_are_on_the_side_that_was_asked_for() -> None:
    rated = (answer([-1.0], reference=[-2.0], reward=1.0), answer([-1.0], reference=[-3.0], reward=-1.0))
    items = OBJECTIVE.prepare(Batch(rated=rated, mismatched=(0.5, 0.5)), JOB).items
    found, _ = losses(OBJECTIVE, items, None, JOB)
    assert [float(one.figures["margin"]) for one in found] == pytest.approx([BETA * 0.5, -BETA * 1.5])
    assert [float(one.figures["accuracy"]) for one in found] == [1.0, 0.0]
