"""What ratings say of a live version: how often good ones are found bad by luck, and how soon bad ones are found."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.learn.watch import (
    REFERENCE_ENOUGH,
    REFERENCE_MIN,
    Rated,
    Rules,
    bets_above,
    bets_below,
    judge,
    log_evidence,
    pooled,
)

RULES = Rules(false_alarm=0.01, min_ratings=8, ratings=128)
RUNS = 2000
LIKED, DISLIKED = 1.0, -1.0

counts = st.dictionaries(st.floats(-1.0, 1.0), st.integers(1, 40), max_size=5)


def said(version: int, liked: int, disliked: int) -> Rated:
    return Rated(versions=(version,), counts={LIKED: liked, DISLIKED: disliked})


# ------------------------------------------------------------------------------------------------------ simulations


@functools.cache
def above(liked: int, disliked: int) -> np.ndarray:
    return bets_above({LIKED: liked, DISLIKED: disliked})


@functools.cache
def below() -> np.ndarray:
    """The bets against the live version, by how many ratings it has and how many of them are likes; [N, N, M]."""
    table = np.zeros((RULES.ratings + 1, RULES.ratings + 1, len(bets_below({}))))
    for number in range(1, RULES.ratings + 1):
        for liked in range(number + 1):
            table[number, liked] = bets_below({LIKED: liked, DISLIKED: number - liked})
    return table


def alarms(before: float, now: float, *, reference: int, seed: int, ratings: int = RULES.ratings) -> list[int | None]:
    """Ratings after which each of RUNS versions is found worse, looked at after every one; None: never.

    before, now: the share of liked answers of the reference and of the live version.
    """
    rng = np.random.default_rng(seed)
    found: list[int | None] = []
    looks = np.arange(RULES.min_ratings, ratings + 1)
    for liked_before in rng.binomial(reference, before, RUNS):
        liked = np.cumsum(rng.random(ratings) < now)
        evidence = above(int(liked_before), reference - int(liked_before)) + below()[looks, liked[looks - 1]]
        reached = np.flatnonzero(evidence.min(axis=1) >= -math.log(RULES.false_alarm))
        found.append(int(looks[reached[0]]) if len(reached) else None)
    return found


@pytest.mark.parametrize(("share", "reference"), [(0.8, 64), (0.5, 64), (0.8, 16)])
def test_a_version_that_is_as_good_is_found_worse_no_more_often_than_allowed(share: float, reference: int) -> None:
    found = alarms(share, share, reference=reference, seed=11)
    assert sum(number is not None for number in found) <= RULES.false_alarm * RUNS


def test_ratings_of_another_kind_with_the_same_mean_are_not_found_worse() -> None:
    rng = np.random.default_rng(12)
    n_found = 0
    for _ in range(200):
        reference = {rating: int(n) for rating, n in zip((0.0, 0.5), rng.multinomial(64, (0.5, 0.5)), strict=True)}
        live = np.where(rng.random(128) < 0.625, LIKED, DISLIKED)  # mean 0.25 as well, as far apart as can be
        looks = ({LIKED: int((live[:n] > 0).sum()), DISLIKED: int((live[:n] < 0).sum())} for n in range(8, 129, 8))
        n_found += any(log_evidence(reference, seen) >= math.log(100.0) for seen in looks)
    assert n_found <= 2


@pytest.mark.parametrize(("reference", "within"), [(64, 40), (32, 64)])
def test_a_drop_of_the_liked_share_from_four_fifths_to_three_tenths_is_found(reference: int, within: int) -> None:
    found = alarms(0.8, 0.3, reference=reference, seed=13, ratings=within)
    assert sum(number is not None for number in found) >= 0.9 * RUNS


def test_a_better_version_is_never_found_worse() -> None:
    assert set(alarms(0.5, 0.9, reference=64, seed=14)) == {None}


# -------------------------------------------------------------------------------------------------------- evidence


@given(reference=counts, live=counts)
def test_without_ratings_of_both_there_is_no_evidence(reference: dict[float, int], live: dict[float, int]) -> None:
    assert log_evidence({}, {}) == pytest.approx(0.0, abs=1e-9)
    assert log_evidence(reference, {}) <= 0.01
    assert log_evidence({}, live) <= 0.01


@given(reference=counts, live=counts)
def test_a_bad_rating_more_of_the_live_version_speaks_against_it_more_than_a_good_one(
    reference: dict[float, int], live: dict[float, int]
) -> None:
    worse = {**live, DISLIKED: live.get(DISLIKED, 0) + 1}
    better = {**live, LIKED: live.get(LIKED, 0) + 1}
    assert log_evidence(reference, worse) >= log_evidence(reference, better) - 1e-9


@given(reference=counts, live=counts, m=st.floats(0.001, 0.999))
def test_the_evidence_is_no_more_than_what_betting_at_any_mean_would_win(
    reference: dict[float, int], live: dict[float, int], m: float
) -> None:
    def wealth(values: Sequence[tuple[float, int]], mean: float) -> float:
        shares = [(k + 0.5) / 8 for k in range(8)]
        return math.log(
            math.fsum(math.prod((1 + c * (value / mean - 1)) ** n for value, n in values) for c in shares) / 8
        )

    won = wealth([((1 + r) / 2, n) for r, n in reference.items()], m)
    won += wealth([((1 - r) / 2, n) for r, n in live.items()], 1 - m)
    assert log_evidence(reference, live) <= won + 1e-6


# -------------------------------------------------------------------------------------------------------- findings


def test_a_worse_version_is_told_in_a_sentence() -> None:
    finding = judge(said(5, 4, 19), [said(4, 55, 9)], RULES)
    assert finding.outcome == "worse"
    assert finding.reason == (
        "version 5 was rated -0.65 on average over 23 answers, version 4 0.72 over 64: "
        "no more than one in 100 versions that are as good would be rated so badly by luck"
    )


@pytest.mark.parametrize(
    ("rules", "outcome"),
    [
        (RULES, "worse"),
        (Rules(false_alarm=0.01, min_ratings=24, ratings=128), "open"),
        (Rules(false_alarm=0.0, min_ratings=8, ratings=128), "open"),
        (Rules(false_alarm=1e-9, min_ratings=8, ratings=128), "open"),
        (Rules(false_alarm=1e-9, min_ratings=8, ratings=23), "stood"),
    ],
)
def test_the_rules_decide_when_it_is_worse(rules: Rules, outcome: str) -> None:
    assert judge(said(5, 4, 19), [said(4, 55, 9)], rules).outcome == outcome


def test_a_version_that_was_rated_often_enough_has_stood() -> None:
    finding = judge(said(5, 100, 28), [said(4, 50, 14)], RULES)
    assert (finding.outcome, finding.evidence < 1.0) == ("stood", True)
    assert finding.reason.endswith("version 4 0.56 over 64: it is not found to be worse")


def test_without_a_reference_nothing_is_found_worse() -> None:
    finding = judge(said(1, 0, 50), [said(0, REFERENCE_MIN - 1, 0)], RULES)
    assert (finding.outcome, finding.reference, finding.evidence) == ("open", None, 1.0)
    assert "too few answers of those before it are rated" in finding.reason
    assert judge(Rated(versions=(1,), counts={}), [], RULES).reason == "version 1 has no rating yet"


def test_the_reference_reaches_back_until_it_has_enough_ratings() -> None:
    before = [said(9, 10, 2), said(8, 0, 0), said(7, 30, 2), said(6, 20, 20), said(5, 99, 1)]
    reference = pooled(before)
    assert reference is not None
    assert (reference.versions, reference.number) == ((9, 7, 6), 12 + 32 + 40)
    assert reference.number >= REFERENCE_ENOUGH
    finding = judge(said(10, 2, 21), before, RULES)
    assert "versions 6, 7 and 9 0.43 over 84" in finding.reason
