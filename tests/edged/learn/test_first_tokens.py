"""Waits for first tokens, with and without training: compared with their like, and robust against the odd one out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.learn.first_tokens import (
    KEPT,
    KEPT_TRAINING,
    QUIET_MIN,
    TRAINING_MIN,
    Waits,
    inflation,
    with_training,
    without_training,
)
from engine.protocol import FirstToken

SECONDS = st.floats(0.001, 100.0)


def first(seconds: float, tokens: int = 50, beside: int = 0) -> FirstToken:
    return FirstToken(queue_s=seconds / 4, prefill_s=3 * seconds / 4, beside=beside, evaluated_tokens=tokens)


def waits(quiet: list[float], training: list[float]) -> Waits:
    known = without_training(Waits(), [first(seconds) for seconds in quiet])
    return with_training(known, [first(seconds) for seconds in training])


def test_waits_that_grow_by_half_are_inflated_by_half() -> None:
    assert inflation(waits([0.2] * QUIET_MIN, [0.3] * TRAINING_MIN)) == pytest.approx(1.5)


def test_a_few_waits_prove_nothing() -> None:
    assert inflation(waits([0.2] * (QUIET_MIN - 1), [9.0] * 10)) is None
    assert inflation(waits([0.2] * QUIET_MIN, [9.0] * (TRAINING_MIN - 1))) is None


def test_long_prompts_and_full_boxes_are_compared_with_their_like() -> None:
    quiet = [first(0.1), first(1.6, tokens=800), first(0.4, beside=5)] * QUIET_MIN
    training = [first(0.2), first(3.2, tokens=900), first(0.8, beside=6)] * 2
    assert inflation(with_training(without_training(Waits(), quiet), training)) == pytest.approx(2.0)


def test_a_kind_that_was_never_seen_in_quiet_says_nothing() -> None:
    known = without_training(Waits(), [first(0.1)] * QUIET_MIN)
    assert with_training(known, [first(30.0, beside=40)] * 10) == known


def test_one_request_in_five_that_something_else_held_up_changes_nothing() -> None:
    assert inflation(waits([0.2] * 8, [0.3] * 8 + [60.0] * 2)) == pytest.approx(1.5)
    assert inflation(waits([0.2] * 8 + [60.0] * 2, [0.3] * 8)) == pytest.approx(1.5)


def test_it_is_the_tail_that_counts() -> None:
    assert inflation(waits([0.2] * 12, [0.2] * 6 + [0.6] * 6)) == pytest.approx(3.0)


@given(st.lists(SECONDS, min_size=QUIET_MIN, max_size=60), st.lists(SECONDS, min_size=TRAINING_MIN, max_size=40))
def test_it_lies_between_the_least_and_the_most_that_any_pair_shows(quiet: list[float], training: list[float]) -> None:
    measured = inflation(waits(quiet, training))
    assert measured is not None
    kept, seen = quiet[-KEPT:], training[-KEPT_TRAINING:]
    assert min(seen) / max(kept) <= measured * (1 + 1e-9)
    assert measured <= max(seen) / min(kept) * (1 + 1e-9)


@given(
    st.lists(SECONDS, min_size=QUIET_MIN, max_size=40),
    st.lists(SECONDS, min_size=TRAINING_MIN, max_size=KEPT_TRAINING),
    st.floats(1.01, 50.0),
)
def test_longer_waits_while_training_never_mean_less(quiet: list[float], training: list[float], factor: float) -> None:
    less, more = (inflation(waits(quiet, [by * seconds for seconds in training])) for by in (1.0, factor))
    assert less is not None
    assert more == pytest.approx(factor * less)


@given(st.lists(st.tuples(SECONDS, st.integers(1, 4000), st.integers(0, 300), st.booleans()), max_size=200))
def test_what_is_kept_is_bounded_and_the_newest(seen: list[tuple[float, int, int, bool]]) -> None:
    known = Waits()
    for seconds, tokens, beside, trains in seen:
        known = (with_training if trains else without_training)(known, [first(seconds, tokens, beside)])
        assert len(known.training) <= KEPT_TRAINING
        assert all(len(of_kind) <= KEPT for of_kind in known.quiet_s.values())
        if not trains:
            assert any(of_kind[-1] == pytest.approx(seconds) for of_kind in known.quiet_s.values())
    assert len(known.quiet_s) <= 13 * 10
