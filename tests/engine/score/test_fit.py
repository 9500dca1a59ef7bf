"""The heads against slow references in float64, and the measure of what a head is worth against counting."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.score import fit
from engine.score.fit import Floats, HeldOut, Singular

seeds = st.integers(0, 2**32 - 1)


def singular(features: Floats) -> Singular:
    return Singular(*np.linalg.svd(features, full_matrices=False))


def centered(generator: np.random.Generator, n: int, p: int) -> Floats:
    features = generator.normal(size=(n, p))
    return features - features.mean(axis=0)


def keys_of(n: int) -> list[bytes]:
    return [index.to_bytes(4) for index in range(n)]


def ridge_by_normal_equations(features: Floats, ratings: Floats, penalty: float) -> Floats:
    """Weights and, last, the intercept, from one linear system."""
    design = np.hstack((features, np.ones((len(features), 1))))
    penalties = np.diag([penalty] * features.shape[1] + [0.0])
    solution: Floats = np.linalg.solve(design.T @ design + penalties, design.T @ ratings)
    return solution


# ----------------------------------------------------------------------------------------------------------- heads


@settings(deadline=None, max_examples=40)
@given(seed=seeds, n=st.integers(3, 20), p=st.integers(1, 30), penalty=st.floats(0.01, 100.0))
def test_ridge_solves_the_normal_equations(seed: int, n: int, p: int, penalty: float) -> None:
    generator = np.random.default_rng(seed)
    features, ratings = centered(generator, n, p), generator.uniform(-1, 1, n)
    weights, intercept = fit.solve_ridge(singular(features), ratings, penalty)
    expected = ridge_by_normal_equations(features, ratings, penalty)
    np.testing.assert_allclose(np.append(weights, intercept), expected, rtol=1e-7, atol=1e-9)


@settings(deadline=None, max_examples=25)
@given(seed=seeds, n=st.integers(4, 12), p=st.integers(1, 20))
def test_leave_one_out_errors_are_those_of_leaving_one_out(seed: int, n: int, p: int) -> None:
    generator = np.random.default_rng(seed)
    features, ratings = centered(generator, n, p), generator.uniform(-1, 1, n)
    penalties = [0.1, 1.0, 30.0]
    expected = []
    for penalty in penalties:
        errors = []
        for i in range(n):
            others = np.arange(n) != i
            solution = ridge_by_normal_equations(features[others], ratings[others], penalty)
            errors.append(ratings[i] - features[i] @ solution[:-1] - solution[-1])
        expected.append(np.mean(np.square(errors)))
    found = fit.leave_one_out_errors(singular(features), ratings, penalties)
    np.testing.assert_allclose(found, expected, rtol=1e-7)


@settings(deadline=None, max_examples=40)
@given(seed=seeds, n=st.integers(3, 20), p=st.integers(1, 30), penalty=st.floats(0.01, 100.0), share=st.floats(0, 1))
def test_the_logistic_head_ends_where_the_slope_of_its_objective_is_zero(
    seed: int, n: int, p: int, penalty: float, share: float
) -> None:
    generator = np.random.default_rng(seed)
    features = centered(generator, n, p) * 3.0
    is_high = np.arange(n) < 1 + int(share * (n - 2))
    weights, intercept = fit.solve_logistic(singular(features), is_high, penalty)
    p_high = 1.0 / (1.0 + np.exp(-(features @ weights + intercept)))
    np.testing.assert_allclose(features.T @ (p_high - is_high) + penalty * weights, 0.0, atol=1e-6 * n)
    assert (p_high - is_high).sum() == pytest.approx(0.0, abs=1e-6 * n)


def test_the_logistic_head_of_one_feature_is_the_one_found_by_search() -> None:
    feature, is_high = np.array([-2.0, -1.0, 1.0, 2.0]), np.array([False, True, False, True])
    weights, intercept = fit.solve_logistic(singular(feature[:, None]), is_high, 0.5)
    grid = np.linspace(-2, 2, 40_001)
    signs = np.where(is_high, 1.0, -1.0)
    losses = np.logaddexp(0.0, -signs * grid[:, None] * feature).sum(axis=1) + 0.25 * grid**2
    assert weights[0] == pytest.approx(grid[np.argmin(losses)], abs=1e-4)
    assert intercept == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("grades", [2, 5])
def test_a_head_gives_the_higher_rated_answers_the_higher_rewards(grades: int) -> None:
    generator = np.random.default_rng(1)
    features = generator.normal(size=(60, 100))
    taste = features[:, 3] - features[:, 7]
    ratings = np.linspace(-1, 1, grades)[np.argsort(np.argsort(taste)) * grades // 60]
    head = fit.fit_head(features, ratings)
    assert head.kind == ("logistic" if grades == 2 else "ridge")
    predicted = fit.predict(head, features)
    assert predicted.min() >= -1.0
    assert predicted.max() <= 1.0
    assert np.corrcoef(predicted, ratings)[0, 1] > 0.9


def test_a_logistic_head_predicts_between_its_two_ratings() -> None:
    generator = np.random.default_rng(2)
    features = generator.normal(size=(40, 3))
    ratings = np.where(features[:, 0] > 0, 0.5, 0.0)
    predicted = fit.predict(fit.fit_head(features, ratings), features)
    assert 0.0 <= predicted.min() < 0.1
    assert 0.4 < predicted.max() <= 0.5


def test_a_logistic_head_is_shrunk_as_much_as_ridge_would_be() -> None:
    # Where weights are small, p is 1/2 + score / 4, and both heads solve the same system but for a factor of two.
    generator = np.random.default_rng(7)
    features, ratings = generator.normal(size=(40, 30)), np.array([1.0, -1.0] * 20)
    _, _, standard = fit.standardise(features)
    penalty = fit.choose_penalty(singular(standard), ratings)
    ridge, _ = fit.solve_ridge(singular(standard), ratings, penalty)
    head = fit.fit_head(features, ratings)
    assert np.abs(head.weights).max() < 0.05
    np.testing.assert_allclose(head.weights, 2 * ridge, atol=0.02 * np.abs(ridge).max())


def test_a_feature_that_never_varies_changes_nothing() -> None:
    generator = np.random.default_rng(3)
    features, ratings = generator.normal(size=(30, 4)), generator.uniform(-1, 1, 30)
    with_constant = np.hstack((features, np.full((30, 1), 1e6)))
    head = fit.fit_head(with_constant, ratings)
    assert head.weights[4] == pytest.approx(0.0, abs=1e-12)
    assert np.isfinite(fit.predict(head, with_constant)).all()


def test_the_unit_of_a_feature_does_not_matter() -> None:
    generator = np.random.default_rng(4)
    features, ratings = generator.normal(size=(30, 4)), generator.uniform(-1, 1, 30)
    rescaled = features * np.array([1.0, 1e3, 1e-3, 1.0]) + np.array([0.0, 5.0, 0.0, -1.0])
    expected = fit.predict(fit.fit_head(features, ratings), features)
    np.testing.assert_allclose(fit.predict(fit.fit_head(rescaled, ratings), rescaled), expected, rtol=1e-6, atol=1e-8)


def test_equal_ratings_fit_no_head() -> None:
    with pytest.raises(ValueError, match="all equal"):
        fit.fit_head(np.eye(4), np.ones(4))


# -------------------------------------------------------------------------------------------------- what it is worth


@settings(deadline=None)
@given(seed=seeds, n=st.integers(0, 12))
def test_pairs_are_counted_one_by_one(seed: int, n: int) -> None:
    generator = np.random.default_rng(seed)
    scores, ratings = generator.integers(0, 4, n) / 4, generator.integers(-1, 2, n) / 1.0
    right, n_pairs = 0.0, 0
    for i, j in itertools.combinations(range(n), 2):
        if ratings[i] != ratings[j]:
            n_pairs += 1
            low, high = sorted((i, j), key=lambda k: ratings[k])
            right += 1.0 if scores[high] > scores[low] else 0.5 if scores[high] == scores[low] else 0.0
    assert fit.ordered_pairs(scores, ratings) == (right, n_pairs)


@pytest.mark.parametrize("ratings", [[-1, -1, 1, 1, 1], [0, 0.25, 0.5, 1, -1], [-1, 1, 1, 1, 1], [0, 0, 0.5, 0.5, 1]])
def test_the_variance_of_chance_is_that_over_all_orders(ratings: list[float]) -> None:
    rated = np.array(ratings, dtype=np.float64)
    differences = []
    for order in itertools.permutations(range(5)):
        right, n_pairs = fit.ordered_pairs(np.array(order, dtype=np.float64), rated)
        differences.append(2 * right - n_pairs)
    assert np.mean(differences) == 0.0
    assert fit.chance_variance(rated) == pytest.approx(np.mean(np.square(differences)))


@settings(deadline=None)
@given(ratings=st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=10, max_size=60), data=st.data())
def test_folds_are_alike_and_do_not_depend_on_the_order_of_the_ratings(ratings: list[float], data: Any) -> None:
    rated, keys = np.array(ratings), keys_of(len(ratings))
    folds = fit.deal_folds(rated, keys)
    for rating in (-1.0, 0.0, 1.0):
        counts = np.bincount(folds[rated == rating], minlength=fit.N_FOLDS)
        assert counts.max() - counts.min() <= 1
    order = data.draw(st.permutations(range(len(ratings))))
    np.testing.assert_array_equal(fit.deal_folds(rated[order], [keys[i] for i in order]), folds[order])


def test_a_taste_that_features_show_is_found_on_held_out_answers() -> None:
    generator = np.random.default_rng(5)
    features = generator.normal(size=(80, 200))
    features[:, :40] += 2.0 * generator.normal(size=(80, 1))  # a direction that many features share
    ratings = np.sign(features[:, :40].mean(axis=1))
    found = fit.held_out(features, ratings, fit.deal_folds(ratings, keys_of(80)))
    assert found.accuracy is not None
    assert found.accuracy > 0.9


@pytest.mark.parametrize("graded", [False, True])
def test_features_that_say_nothing_are_found_out(graded: bool) -> None:
    lucks, uses = [], 0
    for seed in range(60):
        generator = np.random.default_rng(seed)
        features = generator.normal(size=(40, 20))
        ratings = generator.uniform(-1, 1, 40) if graded else generator.choice([-1.0, 1.0], 40)
        found = fit.held_out(features, ratings, fit.deal_folds(ratings, keys_of(40)))
        assert found.accuracy is not None
        assert found.chance_se is not None
        lucks.append((found.accuracy - 0.5) / found.chance_se)
        uses += fit.decide(40, found, accuracy_min=0.5, ratings_min=10)[0]
    assert np.mean(lucks) == pytest.approx(0.0, abs=0.4)  # three standard errors of a mean of 60
    assert np.std(lucks) == pytest.approx(1.0, abs=0.3)
    assert uses <= 4
    # On the answers that it was fitted to, the same head looks as if it knew.
    right, n_pairs = fit.ordered_pairs(fit.score(fit.fit_head(features, ratings), features), ratings)
    assert right / n_pairs > 0.7


def test_accuracy_falls_to_its_mirror_when_the_held_out_ratings_are_turned_round() -> None:
    generator = np.random.default_rng(6)
    scores, ratings = generator.normal(size=30), generator.integers(-2, 3, 30) / 2.0
    right, n_pairs = fit.ordered_pairs(scores, ratings)
    turned, _ = fit.ordered_pairs(scores, -ratings)
    assert right + turned == n_pairs
    assert right != turned


def test_equal_ratings_have_no_pairs() -> None:
    ratings = np.ones(20)
    assert fit.held_out(np.eye(20), ratings, fit.deal_folds(ratings, keys_of(20))) == HeldOut(0, None, None)


def test_a_fold_whose_training_part_is_all_equal_is_left_out() -> None:
    ratings = np.array([1.0] * 9 + [-1.0])
    found = fit.held_out(np.random.default_rng(0).normal(size=(10, 3)), ratings, fit.deal_folds(ratings, keys_of(10)))
    assert found == HeldOut(0, None, None)


# ------------------------------------------------------------------------------------------------------ the decision


@pytest.mark.parametrize(
    ("n_ratings", "measured", "used", "why"),
    [
        (31, HeldOut(100, 0.9, 0.05), False, "31 rated answers; it is fitted from 32 on"),
        (40, HeldOut(0, None, None), False, "all rated the same"),
        (40, HeldOut(100, 0.64, 0.05), False, "0.64 of 100 held-out pairs in the right order; it is used from 0.65 on"),
        (40, HeldOut(40, 0.69, 0.1), False, "luck explains anything below 0.70"),
        (40, HeldOut(4, 1.0, 0.3), False, "1.00 of 4 held-out pairs in the right order; with so few that differ, luck"),
        (40, HeldOut(100, 0.65, 0.05), True, "0.65 of 100 held-out pairs in the right order"),
        (40, HeldOut(100, 0.2, 0.05), False, "it is used from 0.65 on"),
    ],
)
def test_a_head_is_used_only_while_it_beats_its_bar_and_luck(
    n_ratings: int, measured: HeldOut, used: bool, why: str
) -> None:
    decided, said = fit.decide(n_ratings, measured, accuracy_min=0.65, ratings_min=32)
    assert decided is used
    assert why in said
