"""An answer is told from that of another adapter, and from one that two adapters have made."""

from __future__ import annotations

import math

import pytest

from edged.bench.provenance import Step, Trace, bound, deviation, trace_of


def trace(*steps: tuple[str, float, dict[str, float]]) -> Trace:
    return tuple(Step(token, logprob, {token: logprob, **others}) for token, logprob, others in steps)


OLD = trace(("The", -0.5, {"A": -1.5}), (" cat", -0.2, {" dog": -0.25}), (" sat", -1.0, {" ran": -2.0}))
NEW = trace(("The", -0.1, {"A": -3.0}), (" cat", -0.9, {" dog": -1.0}), (".", -0.3, {" sat": -1.8}))


def test_a_trace_is_read_as_the_api_tells_it() -> None:
    entry = {"token": "A", "logprob": -0.5, "top_logprobs": [{"token": "A", "logprob": -0.5, "bytes": [65]}]}
    assert trace_of([entry]) == (Step("A", -0.5, {"A": -0.5}),)


def test_rounding_is_a_small_deviation() -> None:
    rounded = tuple(Step(step.token, step.logprob + 0.01, step.top) for step in OLD)
    assert deviation(rounded, OLD) == pytest.approx(0.01)
    assert deviation(OLD, ()) == 0.0


def test_a_tie_taken_the_other_way_is_a_small_deviation_and_ends_the_comparison() -> None:
    other_way = (OLD[0], Step(" dog", -0.24, {}), Step(" barked", -9.0, {}))
    assert deviation(other_way, OLD) == pytest.approx(0.05 / 2)


def test_a_token_that_the_version_would_not_have_taken_is_an_infinite_deviation() -> None:
    assert deviation((Step("Hello", -0.5, {}),), OLD) == math.inf


def test_an_answer_under_the_name_of_another_version_deviates() -> None:
    assert deviation(NEW, OLD) == math.inf
    assert deviation(NEW[:2], OLD) == pytest.approx((0.4 + 0.7) / 2)


def test_an_answer_that_goes_on_with_another_adapter_deviates_from_both() -> None:
    mixed = (OLD[0], NEW[1], NEW[2])
    assert deviation(mixed, OLD) == math.inf
    assert deviation(mixed, NEW) == pytest.approx(0.4 / 3)


def test_what_a_crowd_does_to_answers_bounds_what_is_taken_for_rounding() -> None:
    crowded = tuple(Step(step.token, step.logprob + 0.04, step.top) for step in OLD)
    assert bound({"p": OLD}, {"p": crowded}) == pytest.approx(0.12)
    assert bound({"p": OLD}, {"p": OLD}) == 0.05
