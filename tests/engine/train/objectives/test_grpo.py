"""GRPO against hand arithmetic and an independent numpy implementation, and what happens to groups without contrast."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.train.objectives.grpo import OBJECTIVE, SPREAD_FLOOR, group_advantages
from engine.train.objectives.objective import Batch, Item, TokenScores
from tests.engine.train.objectives.answers import answer, losses, random_answer, settings_job

LOW, HIGH, DUAL, BETA, CAP = 0.2, 0.28, 3.0, 0.5, 2.0
JOB = settings_job({"kl_coef": BETA, "kl_estimator": "k3", "kl_in": "loss"})
REWARDS = st.lists(st.floats(-1, 1, width=16), min_size=3, max_size=8)

# How a careless implementation would differ, and the factor or bound that it would get wrong.
FLIPS = (
    "policy sign",
    "ratio",
    "clip low",
    "clip high",
    "min and max",
    "kl sign",
    "kl direction",
    "weight",
    "kl weighted",
)


def numpy_loss(item: Item, new: np.ndarray, flip: str = "") -> float:
    """One token at a time, in the words of the paper; `flip` names what is done wrong."""
    rollout, total = item.rollouts[0], 0.0
    assert rollout.behaviour is not None
    advantages = item.constants["advantages"].tolist()
    columns = (new, rollout.parent.tolist(), rollout.reference.tolist(), rollout.behaviour.tolist(), advantages)
    for n, old, reference, behaviour, advantage in zip(*columns, strict=True):
        ratio = math.exp(old - n if flip == "ratio" else n - old)
        low = 1 + LOW if flip == "clip low" else 1 - LOW
        high = 1 - HIGH if flip == "clip high" else 1 + HIGH
        choose = max if flip == "min and max" else min
        surrogate = choose(ratio * advantage, min(max(ratio, low), high) * advantage)
        if advantage < 0:
            surrogate = max(surrogate, DUAL * advantage)
        weight = min(math.exp(behaviour - old if flip == "weight" else old - behaviour), CAP)
        d = (n - reference) if flip == "kl direction" else (reference - n)
        kl = BETA * (math.exp(d) - d - 1) * (-1 if flip == "kl sign" else 1)
        policy = -weight * surrogate * (-1 if flip == "policy sign" else 1)
        total += policy + kl * (weight if flip == "kl weighted" else 1)
    return total


def batch(seed: int = 1, lengths: tuple[int, ...] = (3, 9, 5, 7)) -> Batch:
    generator = np.random.default_rng(seed)
    rewards = generator.uniform(-1, 1, len(lengths))
    return Batch(
        rated=tuple(random_answer(generator, n, reward=r, group="g") for n, r in zip(lengths, rewards, strict=True))
    )


def moved(items: tuple[Item, ...], seed: int = 2, size: float = 0.5) -> list[list[np.ndarray]]:
    """Log-probabilities of a policy that is away from the parent, across the clip bounds on either side."""
    generator = np.random.default_rng(seed)
    return [[item.rollouts[0].parent.numpy() + generator.normal(0, size, item.count)] for item in items]


# -------------------------------------------------------------------------------------------------- advantages


def test_advantages_of_a_hand_made_group() -> None:
    found = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    size = 0.5 / (math.sqrt(4 * 0.25 / 3) + 1e-4)
    np.testing.assert_allclose(found.numpy(), [size, -size, -size, size], rtol=1e-12)


@given(REWARDS)
def test_advantages_equal_an_independent_numpy_implementation_and_sum_to_zero(rewards: list[float]) -> None:
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64)).numpy()
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert float(found.sum()) == pytest.approx(0.0, abs=1e-9)


@given(REWARDS, st.randoms(use_true_random=False))
def test_the_order_of_a_group_does_not_matter(rewards: list[float], random) -> None:
    order = random.sample(range(len(rewards)), len(rewards))
    straight = group_advantages(torch.tensor(rewards, dtype=torch.float64))
    shuffled = group_advantages(torch.tensor([rewards[i] for i in order], dtype=torch.float64))
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reward", [0.1, -1.0, 1 / 3])
def test_t_grpo_1_equal_rewards_give_exactly_zero_and_the_floor_is_that_of_the_peers(reward: float) -> None:
    assert group_advantages(torch.full((3,), reward, dtype=torch.float64)).tolist() == [0.0] * 3
    assert SPREAD_FLOOR == 1e-4


def test_t_grpo_1_a_group_of_equal_rewards_is_left_out_of_the_denominator_too() -> None:
    contrast = [answer([-1.0] * 4, reward=r, group="a") for r in (1.0, -1.0, 0.0)]
    equal = [answer([-1.0] * 100, reward=0.5, group="b") for _ in range(3)]
    prepared = OBJECTIVE.prepare(Batch(rated=(*contrast, *equal)), JOB)
    assert dict(prepared.skipped) == {"equal_rewards": 3}
    assert [item.count for item in prepared.items] == [4, 4, 4]


def test_t_grpo_2_a_group_of_one_is_left_out_with_its_reason() -> None:
    lonely = [answer([-1.0], reward=1.0, group="a"), answer([-1.0], reward=1.0), answer([-1.0], reward=-1.0)]
    prepared = OBJECTIVE.prepare(Batch(rated=tuple(lonely)), JOB)
    assert prepared.items == ()
    assert dict(prepared.skipped) == {"group_of_one": 3}
    with pytest.raises(ValueError, match="group of one"):
        group_advantages(torch.tensor([1.0]))


def test_t_grpo_3_answers_are_compared_within_their_group_only_wherever_they_stand() -> None:
    rewards = [("a", 1.0), ("b", 0.2), ("a", 0.0), ("b", 0.1), ("a", 0.5), ("b", 0.9)]
    rated = tuple(answer([-1.0, -2.0], reward=reward, group=group) for group, reward in rewards)
    prepared = OBJECTIVE.prepare(Batch(rated=rated), JOB)
    assert all(item.rollouts[0] is one for item, one in zip(prepared.items, rated, strict=True))
    for name in "ab":
        members = [i for i, (group, _) in enumerate(rewards) if group == name]
        expected = group_advantages(torch.tensor([rewards[i][1] for i in members], dtype=torch.float64))
        for i, advantage in zip(members, expected, strict=True):
            assert prepared.items[i].constants["advantages"].tolist() == pytest.approx([float(advantage)] * 2, rel=1e-6)


@given(st.floats(-1, 1), st.floats(-1, 1))
def test_t_grpo_4_two_nearly_equal_answers_are_hardly_moved_apart(first: float, second: float) -> None:
    found = group_advantages(torch.tensor([first, second], dtype=torch.float64))
    assert float(found.abs().max()) <= abs(first - second) / 2 + 1e-12
    assert float(found.abs().max()) <= math.sqrt(0.5)
    assert (float(found[0]) > 0) == (first > second)


# -------------------------------------------------------------------------------------------------------- loss


def test_loss_and_gradient_equal_an_independent_numpy_implementation() -> None:
    items = OBJECTIVE.prepare(batch(), JOB).items
    new = moved(items)
    found, gradients = losses(OBJECTIVE, items, new, JOB)
    step = 1e-6
    for item, loss, (gradient,), (logprobs,) in zip(items, found, gradients, new, strict=True):
        assert float(loss.loss) == pytest.approx(numpy_loss(item, logprobs), rel=1e-12)
        for t in range(item.count):
            up, down = (logprobs + sign * step * (np.arange(item.count) == t) for sign in (1, -1))
            slope = (numpy_loss(item, up) - numpy_loss(item, down)) / (2 * step)
            assert gradient[t] == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("flip", FLIPS)
def test_an_implementation_with_one_thing_the_wrong_way_round_gives_another_loss(flip: str) -> None:
    items = OBJECTIVE.prepare(batch(), JOB).items
    new = moved(items)
    found, _ = losses(OBJECTIVE, items, new, JOB)
    wrong = [numpy_loss(item, logprobs, flip) for item, (logprobs,) in zip(items, new, strict=True)]
    assert sum(float(one.loss) for one in found) != pytest.approx(sum(wrong), rel=0.01)


def test_t_ppo_7_at_the_first_step_the_loss_is_zero_and_its_gradient_is_not() -> None:
    rated = tuple(answer([-1.0] * 5, reward=r, group="g") for r in (1.0, 0.0, -0.5, 0.25))
    items = OBJECTIVE.prepare(Batch(rated=rated), JOB).items
    found, gradients = losses(OBJECTIVE, items, None, JOB)
    assert sum(float(one.loss) for one in found) == pytest.approx(0.0, abs=1e-12)
    assert math.sqrt(sum(float((g**2).sum()) for (g,) in gradients)) > 1.0


def test_descending_makes_the_better_answers_of_a_group_likelier() -> None:
    rated = tuple(answer([-1.0] * 3, reward=r, group="g") for r in (0.9, 0.1, 0.8, -0.3))
    _, gradients = losses(OBJECTIVE, OBJECTIVE.prepare(Batch(rated=rated), JOB).items, None, JOB)
    assert [bool((gradient < 0).all()) for (gradient,) in gradients] == [True, False, True, False]


def test_with_the_kl_in_the_reward_the_loss_has_none_and_the_rewards_have() -> None:
    in_reward = dataclasses.replace(JOB, ppo=dataclasses.replace(JOB.ppo, kl_in="reward"))
    strayed = answer([-1.0, -1.0], reference=[-2.0, -3.0], reward=1.0, group="g")  # KL 3 by k1
    others = [answer([-1.0, -1.0], reward=r, group="g") for r in (1.0, 0.0)]
    items = OBJECTIVE.prepare(Batch(rated=(strayed, *others)), in_reward).items
    expected = group_advantages(torch.tensor([1.0 - 3 * BETA, 1.0, 0.0], dtype=torch.float64))
    assert [float(item.constants["advantages"][0]) for item in items] == pytest.approx(expected.tolist())
    (loss, *_), _ = losses(OBJECTIVE, items, None, in_reward)
    assert float(loss.loss) == pytest.approx(-2 * float(expected[0]))


@given(st.lists(st.integers(1, 6), min_size=3, max_size=6), st.data())
def test_t_ppo_4_the_gradient_does_not_depend_on_how_a_step_is_cut(lengths: list[int], data: st.DataObject) -> None:
    """A policy of one parameter a vocabulary entry: its gradient is summed over parts of any sizes."""
    items = OBJECTIVE.prepare(batch(3, tuple(lengths)), JOB).items
    weights = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    n_tokens = sum(item.count for item in items)

    def gradient(part: list[Item]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for item in part:
            parent = item.rollouts[0].parent
            logprobs = parent + torch.log_softmax(weights, 0)[item.rollouts[0].tokens % 8] + math.log(8)
            total = total + OBJECTIVE.loss(item, [TokenScores(logprobs)], JOB).loss / n_tokens
        (found,) = torch.autograd.grad(total, weights)
        return found

    cuts = sorted(data.draw(st.sets(st.integers(1, len(items) - 1))))
    parts = [list(items[start:stop]) for start, stop in itertools.pairwise([0, *cuts, len(items)])]
    torch.testing.assert_close(sum(map(gradient, parts)), gradient(list(items)), rtol=1e-9, atol=1e-12)


def test_t_ppo_6_tokens_that_are_clipped_away_stay_in_the_denominator() -> None:
    rated = tuple(answer([-1.0] * 4, reward=r, group="g") for r in (1.0, 0.0, -1.0))
    job = settings_job({"kl_coef": 0.0})
    items = OBJECTIVE.prepare(Batch(rated=rated), job).items
    beyond = np.array([-1.0, -1.0, -1.0 + math.log(1.28) + 0.1, -1.0 + math.log(1.28) + 0.1])
    (loss, *_), ((gradient,), *_) = losses(OBJECTIVE, items, [[beyond]] + [[np.full(4, -1.0)]] * 2, job)
    advantage = float(items[0].constants["advantages"][0])
    assert (items[0].count, float(loss.figures["clip_frac"])) == (4, 2.0)
    assert gradient.tolist() == pytest.approx([-advantage, -advantage, 0.0, 0.0])  # those left are not blown up
