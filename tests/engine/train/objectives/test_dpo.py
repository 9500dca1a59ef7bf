"""DPO against hand arithmetic and numpy: where it starts, which way it pulls, how hard."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.train.objectives.dpo import OBJECTIVE, margins, preference_loss
from engine.train.objectives.objective import Batch, Item
from tests.engine.train.objectives.answers import answer, losses, random_answer, settings_job

BETA = 0.3
JOB = settings_job(preference={"dpo_beta": BETA})


def pairs(n: int = 4, seed: int = 1) -> tuple[Item, ...]:
    generator = np.random.default_rng(seed)
    made = tuple(
        (
            random_answer(generator, int(generator.integers(1, 9))),
            random_answer(generator, int(generator.integers(1, 9))),
        )
        for _ in range(n)
    )
    return OBJECTIVE.prepare(Batch(pairs=made), JOB).items


def numpy_loss(item: Item, chosen: np.ndarray, rejected: np.ndarray, flip: str = "") -> float:
    reference_chosen, reference_rejected = (rollout.reference.numpy().sum() for rollout in item.rollouts)
    if flip == "answers":
        chosen, rejected = rejected, chosen
    if flip == "reference":
        reference_chosen, reference_rejected = -reference_chosen, -reference_rejected
    if flip == "no reference":
        reference_chosen = reference_rejected = 0.0
    if flip == "mean":
        chosen, rejected = chosen / chosen.size, rejected / rejected.size
    margin = BETA * ((chosen.sum() - rejected.sum()) - (reference_chosen - reference_rejected))
    return math.log1p(math.exp(margin if flip == "sigmoid" else -margin))


def moved(items: tuple[Item, ...], seed: int = 2) -> list[list[np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [[r.parent.numpy() + generator.normal(0, 0.7, r.parent.shape[0]) for r in item.rollouts] for item in items]


def test_t_dpo_1_the_loss_of_a_policy_that_is_the_reference_is_ln_2() -> None:
    made = tuple((answer([-1.0] * n), answer([-2.0] * (n + 3))) for n in (1, 4, 9))
    items = OBJECTIVE.prepare(Batch(pairs=made), JOB).items
    found, _ = losses(OBJECTIVE, items, None, JOB)
    assert [float(one.loss) for one in found] == pytest.approx([math.log(2)] * 3)
    assert [item.count for item in items] == [1, 1, 1]
    for one in found:
        assert {name: float(value) for name, value in one.figures.items() if name != "loss"} == dict.fromkeys(
            ("margin", "accuracy", "chosen_reward", "rejected_reward"), 0.0
        )


def test_a_hand_made_pair() -> None:
    items = OBJECTIVE.prepare(
        Batch(pairs=((answer([-1.0, -1.0], reference=[-1.5, -1.0]), answer([-2.0], reference=[-1.0])),)), JOB
    ).items
    (found,), ((chosen, rejected),) = losses(OBJECTIVE, items, None, JOB)
    margin = BETA * (0.5 - (-1.0))
    assert float(found.loss) == pytest.approx(-math.log(1 / (1 + math.exp(-margin))))
    pull = BETA / (1 + math.exp(margin))
    np.testing.assert_allclose(chosen, [-pull, -pull])
    np.testing.assert_allclose(rejected, [pull])
    assert float(found.figures["margin"]) == pytest.approx(margin)
    assert float(found.figures["chosen_reward"]) == pytest.approx(BETA * 0.5)
    assert float(found.figures["rejected_reward"]) == pytest.approx(-BETA)
    assert float(found.figures["accuracy"]) == 1.0


def test_loss_equals_an_independent_numpy_implementation() -> None:
    items = pairs()
    new = moved(items)
    found, _ = losses(OBJECTIVE, items, new, JOB)
    expected = [numpy_loss(item, *logprobs) for item, logprobs in zip(items, new, strict=True)]
    assert [float(one.loss) for one in found] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("flip", ["answers", "reference", "no reference", "mean", "sigmoid"])
def test_an_implementation_with_one_thing_the_wrong_way_round_gives_another_loss(flip: str) -> None:
    items = pairs()
    new = moved(items)
    found, _ = losses(OBJECTIVE, items, new, JOB)
    wrong = [numpy_loss(item, *logprobs, flip) for item, logprobs in zip(items, new, strict=True)]
    assert [float(one.loss) for one in found] != pytest.approx(wrong, rel=0.01)


def test_gradients_are_those_of_the_values() -> None:
    generator = torch.Generator().manual_seed(3)
    chosen, rejected, *reference = (-9 * torch.rand(5, generator=generator, dtype=torch.float64) for _ in range(4))
    assert torch.autograd.gradcheck(
        lambda c, r: preference_loss(margins(c, r, *reference, BETA)),
        (chosen.requires_grad_(), rejected.requires_grad_()),
    )


@given(st.floats(-500, 500), st.floats(-500, 500))
def test_swapping_the_answers_mirrors_the_margin_and_no_margin_is_too_large(chosen: float, rejected: float) -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    here, there = torch.tensor([chosen], dtype=torch.float64), torch.tensor([rejected], dtype=torch.float64)
    margin = margins(here, there, zero, zero, BETA)
    torch.testing.assert_close(margins(there, here, zero, zero, BETA), -margin)
    loss = preference_loss(margin)
    assert bool(torch.isfinite(loss))
    # log(1 + e^-m) - log(1 + e^m) = -m
    torch.testing.assert_close(loss - preference_loss(-margin), -margin)


def test_t_dpo_3_prompts_are_no_part_of_an_answers_likelihood() -> None:
    """A longer prompt has no log-probabilities in an item: what is summed is as long as the completions."""
    for item in pairs():
        assert [score.shape for score in (r.reference for r in item.rollouts)] == [
            r.tokens.shape for r in item.rollouts
        ]
        assert float(item.constants["reference_chosen"]) == pytest.approx(float(item.rollouts[0].reference.sum()))


def test_t_edit_1_a_written_answer_may_be_the_chosen_one_without_a_sampler() -> None:
    written, original = answer([-3.0, -3.0], sampled=False), answer([-1.0])
    items = OBJECTIVE.prepare(Batch(pairs=((written, original),)), JOB).items
    (found,), ((chosen, _),) = losses(OBJECTIVE, items, None, JOB)
    assert float(found.loss) == pytest.approx(math.log(2))
    assert bool((chosen < 0).all())  # descending makes it likelier


def test_rated_answers_and_corrections_are_left_alone() -> None:
    batch = Batch(rated=(answer([-1.0], reward=1.0),), corrections=(answer([-1.0], sampled=False),))
    assert OBJECTIVE.prepare(batch, JOB).items == ()
