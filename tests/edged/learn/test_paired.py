"""A difference counts only where it is beyond luck, and it is never beyond luck where there is none."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.learn.paired import CONFIDENCE, MIN_PROMPTS, mean, sign_test, surely_above


@given(st.lists(st.floats(-10, 10), min_size=MIN_PROMPTS, max_size=24))
@settings(max_examples=20, deadline=None)
def test_the_bound_lies_between_the_least_and_the_mean_and_is_the_same_each_time(values: list[float]) -> None:
    bound = surely_above(values)
    assert bound is not None
    assert min(values) - 1e-9 <= bound <= mean(values) + 1e-9
    assert surely_above(values) == bound


def test_too_few_prompts_have_no_bound() -> None:
    assert surely_above([5.0] * (MIN_PROMPTS - 1)) is None
    assert surely_above([5.0] * MIN_PROMPTS) == 5.0


def test_without_a_difference_the_bound_is_above_0_in_few_cases_and_with_a_large_one_in_nearly_all() -> None:
    chance = random.Random(1)
    none = [surely_above([chance.gauss(0.0, 1.0) for _ in range(24)]) for _ in range(120)]
    large = [surely_above([chance.gauss(1.5, 1.0) for _ in range(24)]) for _ in range(40)]
    assert statistics.fmean(bound is not None and bound > 0.0 for bound in none) <= 0.05
    assert statistics.fmean(bound is not None and bound > 0.0 for bound in large) >= 0.9


def test_a_sign_test_is_the_tail_of_a_coin() -> None:
    assert sign_test(0, 0) == 1.0
    assert sign_test(8, 0) == pytest.approx(1 / 256)
    assert sign_test(3, 1) == pytest.approx(5 / 16)
    assert sign_test(8, 0) < 1.0 - CONFIDENCE < sign_test(7, 0)
