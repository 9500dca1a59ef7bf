"""Whatever a source returns, only finite numbers in range come out as rewards, and everything else has its reason."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import JudgeReason
from engine.score import verdict
from engine.score.verdict import DETAIL_CHARS, SourceFailed, Verdict

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("value", "reward", "reason"),
    [
        (0.25, 0.25, None),
        (-1, -1.0, None),
        (np.float32(0.5), 0.5, None),
        (np.int64(1), 1.0, None),
        (Fraction(1, 4), 0.25, None),
        (1.0, 1.0, None),
        (1.5, 1.0, "judge_clipped"),
        (-7, -1.0, "judge_clipped"),
        (10**400, 1.0, "judge_clipped"),
        (-(10**400), -1.0, "judge_clipped"),
        (None, None, "judge_abstained"),
        (math.nan, None, "judge_not_finite"),
        (np.float64("nan"), None, "judge_not_finite"),
        (math.inf, None, "judge_not_finite"),
        (-math.inf, None, "judge_not_finite"),
        (True, None, "judge_not_a_number"),
        (np.bool_(True), None, "judge_not_a_number"),
        ("0.5", None, "judge_not_a_number"),
        ([0.5], None, "judge_not_a_number"),
        (1 + 0j, None, "judge_not_a_number"),
    ],
)
def test_a_value_is_a_reward_or_has_a_named_reason(value: Any, reward: float | None, reason: str | None) -> None:
    found = verdict.check([value, 0.5], 2, 1.0)
    assert found.rewards == (reward, 0.5)
    assert found.reasons == (reason, None)


@given(values=anything, n_items=st.integers(0, 4), clip=st.floats(0.01, 100.0))
def test_no_return_value_gets_anything_but_finite_numbers_in_range_through(
    values: Any, n_items: int, clip: float
) -> None:
    found = verdict.check(values, n_items, clip)
    assert len(found.rewards) == len(found.reasons) == n_items
    for reward, reason in zip(found.rewards, found.reasons, strict=True):
        assert reason is None or reason in get_args(JudgeReason)
        if reward is None:
            assert reason not in (None, "judge_clipped")
        else:
            assert reason in (None, "judge_clipped")
            assert math.isfinite(reward)
            assert abs(reward) <= clip


@pytest.mark.parametrize(
    "values",
    [{"a": 1.0}, "ab", b"ab", 7, None, object(), {0.5, 0.25}, frozenset((0.5, 0.25)), {0.5: 1, 0.25: 2}.keys()],
)
def test_what_is_no_list_is_no_verdict(values: Any) -> None:
    found = verdict.check(values, 2, 1.0)
    assert found.reasons == ("judge_bad_answer",) * 2
    assert type(values).__name__ in found.detail


@pytest.mark.parametrize(
    ("values", "detail"),
    [
        ([0.5], "1 rewards for 2 answers"),
        ([0.5, 0.5, 0.5], "more than 2 rewards for 2 answers"),
        ([], "0 rewards for 2 answers"),
    ],
)
def test_another_number_of_rewards_than_answers_is_worth_nothing(values: list[float], detail: str) -> None:
    assert verdict.check(values, 2, 1.0) == Verdict((None, None), ("judge_wrong_length",) * 2, detail)


def test_a_source_that_yields_for_ever_is_cut_off() -> None:
    def endless() -> Iterator[float]:
        while True:
            yield 0.5

    assert verdict.check(endless(), 3, 1.0).reasons == ("judge_wrong_length",) * 3


def test_numpy_rows_are_lists() -> None:
    assert verdict.check(np.array([0.25, -0.5]), 2, 1.0) == Verdict((0.25, -0.5), (None, None))


def test_an_exception_tells_its_type_and_message() -> None:
    found = verdict.raised(2, ValueError("no such\nword"))
    assert found == Verdict((None, None), ("judge_raised",) * 2, "ValueError: no such word")


class Mute(Exception):
    """Raised by nobody sane: whoever asks it what it says is lied to, left without an answer, or ended."""

    def __init__(self, says: Callable[[], Any]) -> None:
        super().__init__()
        self._says = says

    def __str__(self) -> str:
        said: str = self._says()
        return said


def ended() -> str:
    sys.exit("enough")


def recursing() -> str:
    return recursing()


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: 5, "TypeError"),
        (ended, "SystemExit"),
        (recursing, "RecursionError"),
    ],
)
def test_an_exception_that_cannot_even_be_told_is_one_that_was_raised(says: Callable[[], Any], why: str) -> None:
    found = verdict.raised(2, Mute(says))
    assert found == Verdict((None, None), ("judge_raised",) * 2, f"Mute: (its text cannot be had: {why})")


def test_a_named_failure_keeps_its_name() -> None:
    found = verdict.raised(1, SourceFailed("judge_http_status", "answered 503"))
    assert found == Verdict((None,), ("judge_http_status",), "answered 503")


def test_a_long_or_broken_detail_is_made_fit_to_be_sent() -> None:
    found = verdict.raised(1, ValueError("\ud800" + "x" * 10_000))
    assert len(found.detail) == DETAIL_CHARS
    found.detail.encode()
