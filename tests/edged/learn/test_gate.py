"""The gate: what each check lets through, what it refuses, and what it says then."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.learn import gate
from edged.learn.gate import Evidence, Fluency, Limits, judge

LIMITS = Limits(
    norm_max=20.0, live_kl_max=0.5, canary_gap_max=0.25, fluency_drop=0.8, fluency_floor=1.5, distinct_drop=0.4
)
FLUENT = Fluency(logprob=-1.5, distinct_2=0.9, empty_share=0.0, mean_tokens=20.0)

LIVE_CANARY = ((-1.0, -2.0), (-0.5,))
MOVED_CANARY = ((-0.5, -2.5), (-1.0,))  # 0.5 nats a token away, in a direction of its own


def evidence(**changes: Any) -> Evidence:
    """A good candidate that was trained here."""
    values: dict[str, Any] = {
        "norm": 5.0,
        "kl_live": 0.1,
        "served": MOVED_CANARY,
        "served_live": LIVE_CANARY,
        "predicted": MOVED_CANARY,
        "predicted_live": LIVE_CANARY,
        "fluency": FLUENT,
        "live": FLUENT,
        "base": FLUENT,
    }
    return Evidence(**{**values, **changes})


def fluent(**changes: float) -> Fluency:
    return dataclasses.replace(FLUENT, **changes)


def shifted(canary: gate.Canary, by: float) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(value + by for value in row) for row in canary)


def test_a_good_candidate_is_accepted_with_its_figures() -> None:
    judgement = judge(evidence(), LIMITS)
    assert (judgement.accepted, judgement.reason) == (True, "all checks passed")
    assert judgement.metrics["gate/norm"] == 5.0
    assert judgement.metrics["gate/kl_live"] == 0.1
    assert judgement.metrics["gate/canary_gap"] == 0.0
    assert judgement.metrics["gate/canary_moved"] == 0.5
    assert judgement.metrics["gate/canary_predicted_move"] == 0.5
    assert judgement.metrics["gate/canary_cosine"] == pytest.approx(1.0)


def test_an_imported_adapter_is_judged_without_a_prediction() -> None:
    judgement = judge(evidence(kl_live=None, predicted=None, predicted_live=None), LIMITS)
    assert judgement.accepted
    assert not {"gate/kl_live", "gate/canary_gap", "gate/canary_cosine"} & judgement.metrics.keys()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm": 20.5}, r"too large: norm 20.50, the limit is 20 \(gate.norm_max\)"),
        ({"kl_live": 0.75}, r"moved too far: KL .* 0.750 nats a token, the limit is 0.5 \(gate.live_kl_max\)"),
        (
            {"served": shifted(MOVED_CANARY, 0.5)},
            r"not compute what was trained: .* 0.500 .*\(gate.canary_gap_max\)",
        ),
        ({"fluency": fluent(logprob=-2.5)}, r"less plausible: -2.50 .*-1.50 for the live .*\(gate.fluency_drop\)"),
        (
            {"fluency": fluent(logprob=-3.5), "live": fluent(logprob=-3.0)},
            r"drifted from the language of the base: -3.50 .*-1.50 for the base.*\(gate.fluency_floor\)",
        ),
        (
            {"fluency": fluent(distinct_2=0.45)},
            r"repeat themselves: 0.45 .* 0.90 for the live.*\(gate.distinct_drop",
        ),
        ({"fluency": fluent(empty_share=0.625)}, "62% of its answers to the fixed prompts are empty"),
        ({"norm": math.inf}, "the adapter holds numbers that are not finite"),
    ],
)
def test_each_check_refuses_with_a_sentence_that_names_its_limit(changes: dict[str, Any], reason: str) -> None:
    judgement = judge(evidence(**changes), LIMITS)
    assert not judgement.accepted
    assert re.search(reason, judgement.reason), judgement.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": 20.0},
        {"kl_live": 0.5},
        {"served": shifted(MOVED_CANARY, 0.25)},
        {"fluency": fluent(logprob=-2.25), "live": fluent(logprob=-1.5), "base": fluent(logprob=-0.75)},
        {"fluency": fluent(empty_share=0.5)},
        {"fluency": fluent(empty_share=0.75), "live": fluent(empty_share=0.75)},
        {"fluency": fluent(distinct_2=0.5), "live": fluent(distinct_2=0.75)},
        {"live": fluent(distinct_2=0.0)},
    ],
)
def test_a_value_at_its_limit_is_let_through(changes: dict[str, Any]) -> None:
    assert judge(evidence(**changes), LIMITS).accepted


def test_a_version_that_is_better_than_the_live_one_in_every_respect_is_accepted() -> None:
    better = evidence(fluency=fluent(logprob=-0.5, distinct_2=1.0), live=fluent(logprob=-3.0, distinct_2=0.1))
    assert judge(better, LIMITS).accepted


def test_a_server_that_did_not_apply_the_adapter_is_noticed() -> None:
    judgement = judge(evidence(served=LIVE_CANARY), dataclasses.replace(LIMITS, canary_gap_max=9.0))
    assert not judgement.accepted
    assert "did not move as the trainer predicted: 0.500 nats a token foretold, 0.000 seen" in judgement.reason


def test_a_server_that_moved_in_another_direction_is_noticed() -> None:
    """What a wrong order of the rows of Q and K does: the adapter acts, but not as it was trained."""
    elsewhere = ((-1.5, -1.5), (0.0,))
    judgement = judge(evidence(served=elsewhere), dataclasses.replace(LIMITS, canary_gap_max=9.0))
    assert not judgement.accepted
    assert "direction -1.00 (1 is the same)" in judgement.reason


def test_a_predicted_move_within_the_noise_proves_nothing() -> None:
    still = evidence(served=LIVE_CANARY, predicted=shifted(LIVE_CANARY, 0.09))
    assert judge(still, LIMITS).accepted


def test_a_canary_of_other_probes_cannot_be_compared() -> None:
    for name in ("served_live", "predicted", "predicted_live"):
        for other in ((), ((-1.0, -2.0),), ((-1.0, -2.0), (-0.5, -0.5))):
            judgement = judge(evidence(**{name: other}), LIMITS)
            assert not judgement.accepted
            assert "other probes" in judgement.reason


NUMBERS = [
    ("norm", None),
    ("kl_live", None),
    *[(name, None) for name in ("served", "served_live", "predicted", "predicted_live")],
    *[(who, field) for who in ("fluency", "live", "base") for field in ("logprob", "distinct_2", "empty_share")],
]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "field"), NUMBERS)
def test_a_number_that_is_not_finite_refuses_wherever_it_stands(name: str, field: str | None, bad: float) -> None:
    good = evidence()
    if field is not None:
        changed: Any = dataclasses.replace(getattr(good, name), **{field: bad})
    elif name in ("norm", "kl_live"):
        changed = bad
    else:
        changed = ((bad, -2.0), (-0.5,))
    judgement = judge(dataclasses.replace(good, **{name: changed}), LIMITS)
    assert not judgement.accepted
    assert all(math.isfinite(value) for value in judgement.metrics.values())


FIGURES = st.floats(-6, 6) | st.sampled_from([math.nan, math.inf, -math.inf])
ROWS = st.tuples(st.tuples(FIGURES, FIGURES), st.tuples(FIGURES))
SHARES = st.floats(0, 1)
FLUENCIES = st.builds(
    Fluency, logprob=st.floats(-6, 0), distinct_2=SHARES, empty_share=SHARES, mean_tokens=st.floats(0, 24)
)
EVIDENCES = st.builds(
    Evidence,
    norm=st.floats(0, 30),
    kl_live=st.none() | st.floats(-0.1, 1),
    served=ROWS,
    served_live=ROWS,
    predicted=st.none() | ROWS,
    predicted_live=ROWS,
    fluency=FLUENCIES,
    live=FLUENCIES,
    base=FLUENCIES,
)


@settings(deadline=None, max_examples=400)
@given(EVIDENCES)
def test_an_accepted_candidate_is_within_every_limit(found: Evidence) -> None:
    judgement = judge(found, LIMITS)
    assert judgement.reason
    assert all(math.isfinite(value) for value in judgement.metrics.values())
    if not judgement.accepted:
        return
    assert found.norm <= LIMITS.norm_max
    assert found.kl_live is None or found.kl_live <= LIMITS.live_kl_max
    assert all(math.isfinite(value) for row in (*found.served, *found.served_live) for value in row)
    if found.predicted is not None:
        assert gate.mean_gap(found.served, found.predicted) <= LIMITS.canary_gap_max
    assert found.live.logprob - found.fluency.logprob <= LIMITS.fluency_drop
    assert found.base.logprob - found.fluency.logprob <= LIMITS.fluency_floor
    assert found.fluency.empty_share <= max(0.5, found.live.empty_share)


# --------------------------------------------------------------------------------------------------------- figures

EOS = frozenset({0})


def test_fluency_counts_pairs_within_answers_and_leaves_eos_out() -> None:
    answers = [((1, 2, 1, 2, 0), -1.0), ((3, 4, 5, 0), -2.0), ((0,), None)]
    fluency = gate.fluency_of(answers, EOS)
    # Pairs: (1,2) (2,1) (1,2) and (3,4) (4,5): four different ones of five. No pair crosses answers.
    assert fluency.distinct_2 == pytest.approx(4 / 5)
    assert fluency.logprob == pytest.approx(-1.5)
    assert fluency.empty_share == pytest.approx(1 / 3)
    assert fluency.mean_tokens == pytest.approx(7 / 3)


def test_a_long_answer_does_not_outvote_the_short_ones() -> None:
    answers = [(tuple(range(1, 101)), -4.0), ((1,), -1.0), ((2,), -1.0)]
    assert gate.fluency_of(answers, EOS).logprob == pytest.approx(-2.0)


def test_answers_without_text_are_empty_and_not_fluent_by_accident() -> None:
    fluency = gate.fluency_of([((0,), None), ((), None)], EOS)
    assert (fluency.empty_share, fluency.mean_tokens) == (1.0, 0.0)
    assert not judge(evidence(fluency=fluency), LIMITS).accepted


def test_the_gap_is_the_mean_over_all_tokens_of_all_probes() -> None:
    assert gate.mean_gap(((-1.0, -2.0), (-3.0,)), ((-1.5, -2.0), (-2.0,))) == pytest.approx(0.5)
    assert gate.mean_gap((), ()) == 0.0


def test_the_cosine_of_no_move_is_zero() -> None:
    assert gate.cosine([0.0, 0.0], [1.0, 2.0]) == 0.0
    assert gate.cosine([1.0, 2.0], [2.0, 4.0]) == pytest.approx(1.0)
    assert gate.cosine([1.0, 0.0], [0.0, 3.0]) == 0.0
