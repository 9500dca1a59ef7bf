"""Means and the verdict of the demo, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.demo.outcome import Answer, Score, compare, summarise


def answers(*ratings: float, text: str = "one two three") -> list[Answer]:
    return [
        Answer(prompt="?", completion_id=f"c{i}", text=text, finish_reason="stop", version=0, rating=rating)
        for i, rating in enumerate(ratings)
    ]


def test_a_summary_is_the_means_of_its_answers() -> None:
    scores = {"c0": Score(logprob=-2.0, kl=0.5), "c1": Score(logprob=None, kl=0.1)}
    summary = summarise(answers(0.0, 0.5, 1.0), scores)
    assert (summary.n_answers, summary.n_scored) == (3, 2)
    assert summary.reward == pytest.approx(0.5)
    assert summary.reward_variance == pytest.approx(0.25)
    assert summary.words == 3.0
    assert summary.finished_frac == 1.0
    assert summary.kl == pytest.approx(0.3)
    assert summary.fluency == -2.0


def test_without_scores_kl_and_fluency_are_unknown_not_zero() -> None:
    summary = summarise(answers(0.0, 1.0), {})
    assert summary.kl is None
    assert summary.fluency is None


def test_a_rise_of_more_than_three_standard_errors_is_learning() -> None:
    before, after = summarise(answers(-1.0, -0.9, -1.0, -0.9), {}), summarise(answers(0.9, 1.0, 0.9, 1.0), {})
    verdict = compare(before, after)
    variance = 4 * 0.05**2 / 3
    assert verdict.difference == pytest.approx(1.9)
    assert verdict.standard_error == pytest.approx(math.sqrt(2 * variance / 4))
    assert verdict.learned


def test_a_fall_or_a_rise_within_the_noise_is_not_learning() -> None:
    low, high = summarise(answers(-1.0, 1.0, -1.0, 1.0), {}), summarise(answers(-1.0, 1.0, 1.0, 1.0), {})
    assert not compare(low, high).learned
    assert not compare(summarise(answers(1.0, 0.9), {}), summarise(answers(-1.0, -0.9), {})).learned


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30))
def test_nothing_is_learned_from_the_same_answers_twice(ratings: list[float]) -> None:
    summary = summarise(answers(*ratings), {})
    assert not compare(summary, summary).learned
