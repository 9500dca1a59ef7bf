"""Whether people like the answers of the live version less than those before it, looked at after each rating. Pure.

A test by betting (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", arXiv
2010.09686).

Null hypothesis: there is a number m such that every rating of the live version is expected to be m or above, given all
that came before, and every rating of the reference m or below. Nothing else is assumed of the ratings but that they lie
in [-1, 1]: not their distribution, not that they are independent. It is false if the live version's mean is below the
reference's, and also if people, questions or raters changed while it was live, which no such test can tell apart.

For a fixed m one bets that the reference lies above it and the live version below, a share c of one's money each time:

    wealth(m) = mean over c of  prod (1 + c (y / m - 1))              over the ratings y of the reference, in [0, 1]
              * mean over c of  prod (1 + c ((1 - x) / (1 - m) - 1))  over the ratings x of the live version

Under the null hypothesis with this m no bet gains on average, so the wealth, which is 1 at first, ever reaches
1 / alpha with a probability of at most alpha (Ville's inequality), however often one looks. m is unknown, so the least
wealth over all m is what counts, and that is never above the wealth at the true one. The first factor falls in m and
the second rises, so on an interval of m their product is at least the first at its upper end times the second at its
lower end; the least of these over a grid bounds it from below. A rating that its author changes counts as if it had
always been so; the bound is for those that stay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

REFERENCE_MIN = 16  # ratings without which there is nothing to compare with
REFERENCE_ENOUGH = 64  # beyond it, versions further back would only make the comparison one with a worse model

_BETS = (np.arange(8) + 0.5) / 8  # shares c, each with the same money at first
_MEANS = np.linspace(0.0, 1.0, 101)  # borders of the intervals of m

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """false_alarm: alpha; 0: nothing is rolled back. min_ratings: of the live version, before it may be. ratings: of it
    without an alarm, after which it is kept."""

    false_alarm: float
    min_ratings: int
    ratings: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """What people said of the answers of some versions. counts: rating in [-1, 1] -> answers with it."""

    versions: tuple[int, ...]
    counts: Mapping[float, int]

    @property
    def number(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """0.0 where there is none."""
        return sum(rating * count for rating, count in self.counts.items()) / self.number if self.number else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """open: go on. worse: roll it back. stood: it is kept. evidence: the least wealth; 1.0 where nothing is compared.

    reference: what it is compared with; None: too few ratings before it. reason: a sentence for people.
    """

    outcome: Literal["open", "worse", "stood"]
    evidence: float
    live: Rated
    reference: Rated | None
    reason: str


def judge(live: Rated, before: Sequence[Rated], rules: Rules) -> Finding:
    """What the ratings say of the live version by now.

    Args:
        live: its ratings since it went live.
        before: of the versions before it, the nearest first.
    """
    reference = pooled(before)
    evidence = 1.0 if reference is None else math.exp(min(log_evidence(reference.counts, live.counts), 700.0))
    outcome: Literal["open", "worse", "stood"] = "open"
    if live.number >= rules.min_ratings and rules.false_alarm > 0.0 and evidence * rules.false_alarm >= 1.0:
        outcome = "worse"
    elif live.number >= rules.ratings:
        outcome = "stood"
    return Finding(
        outcome=outcome,
        evidence=evidence,
        live=live,
        reference=reference,
        reason=_sentence(outcome, live, reference, rules),
    )


def pooled(before: Sequence[Rated]) -> Rated | None:
    """The reference: the nearest versions, until they have REFERENCE_ENOUGH ratings. None: less than REFERENCE_MIN."""
    versions: list[int] = []
    counts: dict[float, int] = {}
    for rated in before:
        if sum(counts.values()) >= REFERENCE_ENOUGH:
            break
        versions += rated.versions if rated.number else ()
        for rating, count in rated.counts.items():
            counts[rating] = counts.get(rating, 0) + count
    return Rated(versions=tuple(versions), counts=counts) if sum(counts.values()) >= REFERENCE_MIN else None


def log_evidence(reference: Mapping[float, int], live: Mapping[float, int]) -> float:
    """The logarithm of the least wealth, in nats, from the ratings of both: rating in [-1, 1] -> answers with it."""
    return float(np.min(bets_above(reference) + bets_below(live)))


def bets_above(reference: Mapping[float, int]) -> Floats:
    """The logarithm of the first factor, at the upper end of each interval of m; float[M]."""
    return _log_wealth([((1.0 + rating) / 2.0, count) for rating, count in reference.items()], _MEANS[1:])


def bets_below(live: Mapping[float, int]) -> Floats:
    """The logarithm of the second factor, at the lower end of each interval of m; float[M]."""
    return _log_wealth([((1.0 - rating) / 2.0, count) for rating, count in live.items()], 1.0 - _MEANS[:-1])


def _log_wealth(values: Sequence[tuple[float, int]], means: Floats) -> Floats:
    """Of bets that values in [0, 1], each with its number, lie above each of `means` (float[M], above 0); float[M]."""
    by_bet = np.zeros((len(means), len(_BETS)))  # [M, C]
    for value, count in values:
        by_bet += count * np.log1p(_BETS[None, :] * (value / means[:, None] - 1.0))
    most = by_bet.max(axis=1)
    return most + np.log(np.exp(by_bet - most[:, None]).mean(axis=1))  # type: ignore[no-any-return]


def _sentence(outcome: str, live: Rated, reference: Rated | None, rules: Rules) -> str:
    if live.number == 0:
        return f"{_named(live)} has no rating yet"
    said = f"{_named(live)} was rated {live.mean:.2f} on average over {_answers(live.number)}"
    if reference is None:
        return f"{said}; too few answers of those before it are rated to compare"
    compared = f"{said}, {_named(reference)} {reference.mean:.2f} over {reference.number}"
    match outcome:
        case "worse":
            once_in = round(1.0 / rules.false_alarm)
            return (
                f"{compared}: no more than one in {once_in} versions that are as good would be rated so badly by luck"
            )
        case "stood":
            return f"{compared}: it is not found to be worse"
        case _:
            return compared


def _answers(number: int) -> str:
    return f"{number} answer" + "s" * (number != 1)


def _named(rated: Rated) -> str:
    first, last = min(rated.versions), max(rated.versions)
    if first == last:
        return f"version {first}"
    if len(rated.versions) == 2:
        return f"versions {first} and {last}"
    return f"versions {', '.join(str(version) for version in sorted(rated.versions)[:-1])} and {last}"
