"""Which answers the sequence filter leaves out, and that their length does not decide it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import EngineNoise
from engine.train.objectives.objective import Rollout
from engine.train.sequence_filter import Z, complaint, log_geometric_ratio, rounding_band, sort_out
from tests.engine.train.objectives.answers import answer

NOISE = EngineNoise(bias=0.01, spread=0.08, tokens=16.0, temperature=0.7)
WIDTH_16 = Z * 0.08 / 4.0  # of an answer of 16 tokens and more


def off_by(log_ratios: list[float], *, on_policy: bool = True, temperature: float = 0.7) -> Rollout:
    """An answer whose tokens have these log(parent / behaviour)."""
    parent = np.full(len(log_ratios), -2.0)
    made = answer(parent, behaviour=parent - np.array(log_ratios))
    return dataclasses.replace(made, on_policy=on_policy, temperature=temperature)


def test_t_is_2_the_ratio_is_the_geometric_mean_over_the_answers_tokens() -> None:
    rollout = off_by([0.3, -0.1, 0.4])
    ratios = np.exp([0.3, -0.1, 0.4])
    assert math.exp(log_geometric_ratio(rollout)) == pytest.approx(ratios.prod() ** (1 / 3))


@pytest.mark.parametrize("n_tokens", [16, 64, 400])
def test_t_is_2_a_long_answer_is_judged_as_a_short_one_with_the_same_mean(n_tokens: int) -> None:
    # 0.012 nats a token are 3.3 times the probability after 100 tokens: a product would have left the long ones out.
    assert complaint(off_by([0.012] * n_tokens), NOISE, 1.0) is None
    inside, outside = NOISE.bias + WIDTH_16 - 1e-3, NOISE.bias + WIDTH_16 + 1e-3
    assert complaint(off_by([inside] * n_tokens), NOISE, 1.0) is None
    assert complaint(off_by([outside] * n_tokens), NOISE, 1.0) == "engine_mismatch"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_t_is_2_both_sides_of_the_band_are_left_out(sign: float) -> None:
    assert complaint(off_by([sign * 0.3] * 20), NOISE, 1.0) == "engine_mismatch"
    assert complaint(off_by([sign * 1.5] * 20, on_policy=False), NOISE, 1.0) == "drifted"
    assert complaint(off_by([sign * 0.3] * 20, on_policy=False), NOISE, 1.0) is None


def test_short_answers_have_the_wider_band_of_their_mean() -> None:
    (low_4, high_4), (low_16, high_16) = rounding_band(NOISE, 4, 0.7), rounding_band(NOISE, 16, 0.7)
    assert high_4 - NOISE.bias == pytest.approx(2 * (high_16 - NOISE.bias))
    assert low_4 - NOISE.bias == pytest.approx(2 * (low_16 - NOISE.bias))
    assert rounding_band(NOISE, 1000, 0.7) == (low_16, high_16)


def test_rounding_grows_as_the_temperature_falls_and_not_the_other_way_round() -> None:
    low, high = rounding_band(NOISE, 16, 0.7)
    assert rounding_band(NOISE, 16, 0.35) == (pytest.approx(2 * low), pytest.approx(2 * high))
    assert rounding_band(NOISE, 16, 2.0) == (low, high)


def test_without_a_calibration_nothing_is_held_against_what_the_parent_sampled() -> None:
    assert complaint(off_by([3.0] * 8), None, 1.0) is None
    assert complaint(off_by([1.01] * 8, on_policy=False), None, 1.0) == "drifted"


def test_what_is_not_finite_is_left_out() -> None:
    assert complaint(off_by([0.0, float("nan")]), NOISE, 1.0) == "ratio_not_finite"


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(1, 40), st.booleans()), max_size=12))
def test_every_answer_stays_or_is_counted_once(cases: list[tuple[float, int, bool]]) -> None:
    rollouts = [off_by([mean] * n, on_policy=on_policy) for mean, n, on_policy in cases]
    kept, left_out = sort_out(rollouts, NOISE, 1.0)
    assert len(kept) + sum(left_out.values()) == len(rollouts)
    assert [id(one) for one in kept] == [id(one) for one in rollouts if complaint(one, NOISE, 1.0) is None]
    assert set(left_out) <= {"engine_mismatch", "drifted"}
