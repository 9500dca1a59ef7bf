"""How much of the time training may take: less where it slows answers down, all of it where it does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.learn.pace import SLOWDOWN_MAX, Pace, observe, slowdown_of
from engine.protocol import Gap

QUIET = [Gap(answers=1, steps=50, seconds=0.5), Gap(answers=4, steps=20, seconds=0.5)]


def gaps(factor: float, steps: int = 20) -> list[Gap]:
    """Gaps of four answers that are `factor` times the quiet ones."""
    return [Gap(answers=4, steps=steps, seconds=0.025 * factor * steps)]


def paced(share: float = 1.0) -> Pace:
    return Pace(observe(Pace(), QUIET, is_training=False, min_share=0.1).quiet_s, share)


def test_quiet_gaps_are_remembered_by_how_many_answers_ran() -> None:
    assert paced().quiet_s == {1: pytest.approx(0.01), 4: pytest.approx(0.025)}
    later = observe(paced(), [Gap(answers=4, steps=1, seconds=0.05)], is_training=False, min_share=0.1)
    assert later.quiet_s == {1: pytest.approx(0.01), 4: pytest.approx(0.8 * 0.025 + 0.2 * 0.05)}


def test_a_slowdown_halves_the_share_down_to_the_least_that_learning_keeps() -> None:
    pace, shares = paced(), []
    for _ in range(6):
        pace = observe(pace, gaps(SLOWDOWN_MAX * 1.1), is_training=True, min_share=0.1)
        shares.append(pace.share)
    assert shares == [0.5, 0.25, 0.125, 0.1, 0.1, 0.1]


def test_the_share_grows_back_once_answers_are_fast_again() -> None:
    pace, shares = paced(0.1), []
    for _ in range(7):
        pace = observe(pace, gaps(1.05), is_training=True, min_share=0.1)
        shares.append(pace.share)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_between_the_two_bounds_the_share_stays() -> None:
    assert observe(paced(0.4), gaps(1.7), is_training=True, min_share=0.1).share == 0.4


def test_gaps_that_cannot_be_compared_or_are_few_prove_nothing() -> None:
    unknown = [Gap(answers=9, steps=100, seconds=90.0)]
    assert slowdown_of(paced().quiet_s, unknown) is None
    assert observe(paced(), unknown, is_training=True, min_share=0.1).share == 1.0
    assert observe(paced(), gaps(10.0, steps=7), is_training=True, min_share=0.1).share == 1.0


def test_gaps_of_many_answers_are_compared_with_those_of_as_many() -> None:
    mixed = [Gap(answers=1, steps=10, seconds=0.1), Gap(answers=4, steps=10, seconds=0.25)]
    assert slowdown_of(paced().quiet_s, mixed) == pytest.approx(1.0)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60), st.floats(0, 10), st.booleans()), max_size=30),
    st.floats(0.01, 1.0),
)
def test_the_share_never_leaves_its_range_whatever_is_measured(
    reports: list[tuple[int, int, float, bool]], min_share: float
) -> None:
    pace = Pace()
    for answers, steps, seconds, is_training in reports:
        gap = Gap(answers=answers, steps=steps, seconds=seconds)
        pace = observe(pace, [gap], is_training=is_training, min_share=min_share)
        assert min_share <= pace.share <= 1.0
