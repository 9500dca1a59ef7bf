"""Fitting a reward to ratings on frozen features, and telling what it is worth. Pure: float64 numpy, no random numbers.

The head is linear on standardised features, with an intercept that is not penalised: ridge regression for graded
ratings, logistic regression where only two different ratings occur. There are often more features than ratings, so
all algebra runs in the space of the singular vectors. Ridge is solved in closed form and its penalty chosen by
exact leave-one-out error; the logistic head is found by Newton's method (IRLS) with a quarter of that penalty, because
at zero its loss has a quarter of the curvature.

What it is worth is measured on held-out folds, each predicted by a head that has seen nothing of it, its penalty and
standardisation included: the share of pairs, rated differently, that are put in the right order. Unlike a share of
right signs, it is 0.5 for any head without knowledge, however lopsided the ratings are.

Dimension letters: N ratings, P features, L penalties.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Kind = Literal["ridge", "logistic"]

PENALTIES_A_FEATURE = tuple(10.0 ** (k / 2) for k in range(-6, 5))  # 0.001 to 100; P times these are tried
N_FOLDS = 5
NEWTON_STEPS = 100
GRADIENT_SMALL = 1e-9  # a rating
SMALLEST_STEP = 1e-6  # of a whole Newton step; less is rounding at the minimum
LUCK_SE = 2.0  # chance reaches an accuracy of so many of its standard deviations about once in forty times
# Heads of different folds share most of their training answers, so their lucks go together: simulated on ratings drawn
# by lot, the accuracy spreads 1.33 to 1.47 times as wide as that of independent folds.
SHARED_LUCK = 1.45
SPREAD_SMALL = 1e-12  # of a feature that does not vary


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A fitted head. center, scale, weights: float64[P]. low, high: the two ratings of a logistic head."""

    kind: Kind
    center: Floats
    scale: Floats
    weights: Floats
    intercept: float
    low: float = -1.0
    high: float = 1.0


class Singular(NamedTuple):
    """Features float64[N, P] of mean 0, as the product u s vt: u float64[N, K], s float64[K], vt float64[K, P]."""

    u: Floats
    s: Floats
    vt: Floats


@dataclasses.dataclass(frozen=True, slots=True)
class HeldOut:
    """accuracy: share of `n_pairs` in the right order, ties counted half. chance_se: its standard deviation around 0.5
    for a head that knows nothing. Both None if n_pairs is 0."""

    n_pairs: int
    accuracy: float | None
    chance_se: float | None


def fit_head(features: Floats, ratings: Floats) -> Head:
    """The head for these ratings, of which at least two differ.

    Args:
        features: float64[N, P], finite. ratings: float64[N].
    """
    values = np.unique(ratings)
    if len(values) < 2:
        raise ValueError("ratings that are all equal fit no head")
    center, scale, standard = standardise(features)
    singular = Singular(*np.linalg.svd(standard, full_matrices=False))
    penalty = choose_penalty(singular, ratings)
    if len(values) > 2:
        weights, intercept = solve_ridge(singular, ratings, penalty)
        return Head(kind="ridge", center=center, scale=scale, weights=weights, intercept=intercept)
    low, high = float(values[0]), float(values[1])
    weights, intercept = solve_logistic(singular, ratings == high, penalty / 4.0)
    return Head(kind="logistic", center=center, scale=scale, weights=weights, intercept=intercept, low=low, high=high)


def score(head: Head, features: Floats) -> Floats:
    """float64[N]: what orders the answers of float64[N, P]: a rating for ridge, log-odds of the higher one else."""
    result: Floats = (features - head.center) / head.scale @ head.weights + head.intercept
    return result


def predict(head: Head, features: Floats) -> Floats:
    """float64[N]: the expected rating of the answers of float64[N, P], in [-1, 1] like every rating."""
    scores = score(head, features)
    if head.kind == "logistic":
        scores = head.low + (head.high - head.low) * _sigmoid(scores)
    return np.clip(scores, -1.0, 1.0)


def standardise(features: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean float64[P], standard deviation float64[P] (1 where there is none) and the features brought to 0 and 1."""
    center = features.mean(axis=0)
    spread = features.std(axis=0)
    scale = np.where(spread > SPREAD_SMALL * (1.0 + np.abs(center)), spread, 1.0)
    return center, scale, (features - center) / scale


def choose_penalty(features: Singular, ratings: Floats) -> float:
    """The penalty with the least leave-one-out error of ridge; the largest of those that tie."""
    penalties: list[float] = [features.vt.shape[1] * share for share in reversed(PENALTIES_A_FEATURE)]
    return penalties[int(np.argmin(leave_one_out_errors(features, ratings, penalties)))]


def leave_one_out_errors(features: Singular, ratings: Floats, penalties: Sequence[float]) -> Floats:
    """float64[L]: mean squared error of ridge at each rating when fitted to all others, for each penalty.

    Exact and without refitting, as for every linear smoother: the residual over 1 less the rating's own leverage.
    """
    u, s, _ = features
    centered = ratings - ratings.mean()
    errors = np.empty(len(penalties))
    for index, penalty in enumerate(penalties):
        shrink = s**2 / (s**2 + penalty)
        residuals = centered - u @ (shrink * (u.T @ centered))
        leverage = 1.0 / len(ratings) + (u**2) @ shrink
        errors[index] = np.mean((residuals / (1.0 - leverage)) ** 2)
    return errors


def solve_ridge(features: Singular, ratings: Floats, penalty: float) -> tuple[Floats, float]:
    """Weights float64[P] and intercept that minimise sum (ratings - prediction)^2 + penalty |weights|^2."""
    u, s, vt = features
    mean = float(ratings.mean())
    weights: Floats = vt.T @ (s / (s**2 + penalty) * (u.T @ (ratings - mean)))
    return weights, mean


def solve_logistic(features: Singular, is_high: NDArray[np.bool_], penalty: float) -> tuple[Floats, float]:
    """Weights float64[P] and intercept that minimise the negative log-likelihood + penalty / 2 |weights|^2.

    Newton's method with halved steps; the objective is strictly convex, so it ends at the one minimum.

    Args:
        is_high: bool[N], both of them occurring. penalty: > 0.
    """
    u, s, vt = features
    design = np.hstack((u * s, np.ones((len(is_high), 1))))  # in the singular space, the intercept last
    penalties = np.append(np.full(len(s), penalty), 0.0)
    signs = np.where(is_high, 1.0, -1.0)

    def objective(at: Floats) -> float:
        return float(np.logaddexp(0.0, -signs * (design @ at)).sum()) + 0.5 * float((penalties * at**2).sum())

    at = np.zeros(design.shape[1])
    value = objective(at)
    for _ in range(NEWTON_STEPS):
        p_high = _sigmoid(design @ at)
        gradient = design.T @ (p_high - is_high) + penalties * at
        if np.abs(gradient).max() < GRADIENT_SMALL * len(is_high):
            break
        curvature = (design * (p_high * (1.0 - p_high))[:, None]).T @ design + np.diag(penalties)
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while (tried := objective(at - size * step)) > value and size > SMALLEST_STEP:
            size /= 2.0
        at, value = at - size * step, tried
    weights: Floats = vt.T @ at[:-1]
    return weights, float(at[-1])


def held_out(features: Floats, ratings: Floats, folds: NDArray[np.int64]) -> HeldOut:
    """How well heads order answers that they were not fitted to.

    Args:
        features: float64[N, P]. ratings: float64[N]. folds: int64[N], from `deal_folds`.
    """
    right, n_pairs, variance = 0.0, 0, 0.0
    for fold in np.unique(folds):
        out = folds == fold
        if len(np.unique(ratings[~out])) < 2:
            continue
        scores = score(fit_head(features[~out], ratings[~out]), features[out])
        in_order, compared = ordered_pairs(scores, ratings[out])
        right, n_pairs = right + in_order, n_pairs + compared
        variance += chance_variance(ratings[out])
    if n_pairs == 0:
        return HeldOut(0, None, None)
    return HeldOut(n_pairs, right / n_pairs, SHARED_LUCK * math.sqrt(variance) / (2 * n_pairs))


def deal_folds(ratings: Floats, keys: Sequence[bytes]) -> NDArray[np.int64]:
    """int64[N]: the fold of each rating, dealt like cards in the order of ratings, so that all folds are alike.

    keys: decide among equal ratings, so that the folds do not depend on the order in which ratings came.
    """
    order = sorted(range(len(keys)), key=lambda i: (ratings[i], keys[i]))
    folds = np.empty(len(keys), dtype=np.int64)
    folds[order] = np.arange(len(keys)) % N_FOLDS
    return folds


def ordered_pairs(scores: Floats, ratings: Floats) -> tuple[float, int]:
    """Of the pairs with different ratings, how many `scores` puts in the same order (ties half), and how many there
    are."""
    rated = np.sign(ratings[:, None] - ratings[None, :])
    scored = np.sign(scores[:, None] - scores[None, :])
    n_pairs = int(np.count_nonzero(rated)) // 2
    agreement = float((rated * scored).sum()) / 2.0
    return (n_pairs + agreement) / 2.0, n_pairs


def chance_variance(ratings: Floats) -> float:
    """Variance of (pairs in the right order - pairs in the wrong one) when scores have nothing to do with ratings.

    Kendall's: [n(n-1)(2n+5) - sum over groups of t equal ratings of t(t-1)(2t+5)] / 18.
    """

    def term(count: int) -> int:
        return count * (count - 1) * (2 * count + 5)

    _, tied = np.unique(ratings, return_counts=True)
    return (term(len(ratings)) - sum(term(int(count)) for count in tied)) / 18.0


def decide(n_ratings: int, measured: HeldOut, *, accuracy_min: float, ratings_min: int) -> tuple[bool, str]:
    """Whether the head may be used as a judge, and why (not), for people.

    It must beat the bar, and it must lie so far from 0.5 that luck is a poor explanation: with few pairs, chance alone
    passes any bar now and then.
    """
    if n_ratings < ratings_min:
        return False, f"{n_ratings} rated answers; it is fitted from {ratings_min} on"
    if measured.accuracy is None or measured.chance_se is None:
        return False, f"{n_ratings} rated answers, all rated the same; there is nothing to tell apart"
    found = f"{measured.accuracy:.2f} of {measured.n_pairs} held-out pairs in the right order"
    if measured.accuracy < accuracy_min:
        return False, f"{found}; it is used from {accuracy_min:.2f} on"
    needed = 0.5 + LUCK_SE * measured.chance_se
    if measured.accuracy < needed:
        luck = "anything" if needed >= 1.0 else f"anything below {needed:.2f}"
        return False, f"{found}; with so few that differ, luck explains {luck}"
    return True, found


def _sigmoid(x: Floats) -> Floats:
    result: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))  # finite at both ends
    return result
