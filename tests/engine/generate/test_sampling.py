"""Sampling against plain float64 softmax: which tokens can come, how often, and with which log-probability."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generate.sampling import NotFinite, Sampler, raw_logprob
from engine.generate.shaping import Shape

LOGPROB_TOLERANCE = 2e-5  # float32 sums over 50,000 terms
SIGMAS = 5.0
F64 = npt.NDArray[np.float64]


def sampler(*, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 1, **other: Any) -> Sampler:
    rest: dict[str, Any] = {"choice": 0, "top_logprobs": 0} | other
    return Sampler(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, **rest)


def log_softmax(logits: npt.ArrayLike) -> F64:
    x = np.asarray(logits, np.float64)
    x = x - x.max()
    return np.asarray(x - np.log(np.exp(x).sum()))


def distribution(logits: npt.ArrayLike, *, temperature: float, top_k: int, top_p: float) -> F64:
    """The textbook definition: temperature, top-k, top-p over what is left, renormalised."""
    p = np.exp(log_softmax(np.asarray(logits, np.float64) / temperature))
    order = np.argsort(-p, kind="stable")
    keep = order[: top_k or len(p)]
    mass = p[keep].cumsum() / p[keep].sum()
    keep = keep[: int(np.searchsorted(mass, top_p)) + 1] if top_p < 1 else keep
    cut = np.zeros_like(p)
    cut[keep] = p[keep] / p[keep].sum()
    return cut


@settings(deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 700),
    st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    st.sampled_from([0, 1, 5, 40]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
)
def test_log_probabilities_are_those_of_the_textbook_distribution(
    seed: int, n_vocab: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(n_vocab) * 4).astype(np.float32)
    expected = distribution(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed).draw(logits)
    assert expected[drawn.id] > 0
    assert drawn.logprob == pytest.approx(math.log(expected[drawn.id]), abs=LOGPROB_TOLERANCE)
    assert drawn.raw_logprob == pytest.approx(log_softmax(logits)[drawn.id], abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 6, 1.0), (1.3, 0, 0.8)]
)
def test_tokens_come_as_often_as_the_distribution_says(temperature: float, top_k: int, top_p: float) -> None:
    logits = np.linspace(-1, 2, 600).astype(np.float32)[np.random.default_rng(0).permutation(600)]
    logits[[3, 299, 555]] += np.float32(4)
    expected = distribution(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    n = 4000
    draws = sampler(temperature=temperature, top_k=top_k, top_p=top_p)
    counts = collections.Counter(draws.draw(logits).id for _ in range(n))
    assert all(expected[token] > 0 for token in counts)
    for token in np.argsort(-expected)[:6]:
        p = expected[token]
        assert abs(counts[int(token)] - n * p) <= SIGMAS * math.sqrt(n * p * (1 - p)) + 1


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.9)])
def test_min_p_leaves_out_what_is_less_likely_than_its_share_of_the_likeliest(top_k: int, top_p: float) -> None:
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    kept = np.where(p >= 0.3 * 0.4, p, 0)  # the first three
    expected = distribution(np.log(np.maximum(kept, 1e-300)), temperature=1.0, top_k=top_k, top_p=top_p)
    draws = sampler(min_p=0.3, top_k=top_k, top_p=top_p)
    for _ in range(300):
        drawn = draws.draw(np.log(p).astype(np.float32))
        assert drawn.logprob == pytest.approx(math.log(expected[drawn.id]), abs=LOGPROB_TOLERANCE)
        assert drawn.raw_logprob == pytest.approx(math.log(p[drawn.id]), abs=LOGPROB_TOLERANCE)


def test_a_shaped_draw_has_the_log_probability_of_the_shaped_distribution_and_the_models_own() -> None:
    logits = np.array([1.0, 2.0, 0.5], np.float32)
    draws = sampler(shape=Shape(bias=((0, 3.0),), frequency_penalty=1.5), prompt_ids=(2,))
    counts = np.zeros(3)
    for _ in range(6):
        drawn = draws.draw(logits)
        expected = log_softmax(logits + np.array([3.0, 0, 0]) - 1.5 * counts)
        assert drawn.logprob == pytest.approx(expected[drawn.id], abs=LOGPROB_TOLERANCE)
        assert drawn.raw_logprob == pytest.approx(log_softmax(logits)[drawn.id], abs=LOGPROB_TOLERANCE)
        counts[drawn.id] += 1


def test_a_greedy_draw_is_the_best_of_the_shaped_logits() -> None:
    logits = np.array([1.0, 2.0, 0.5], np.float32)
    assert sampler(temperature=0.0, shape=Shape(bias=((2, 100.0),))).draw(logits).id == 2
    repeated = sampler(temperature=0.0, shape=Shape(presence_penalty=1.5))
    assert [repeated.draw(logits).id for _ in range(2)] == [1, 0]


def test_temperature_zero_takes_the_best_token_with_certainty() -> None:
    logits = np.array([0.1, 3.0, 2.9], np.float32)
    drawn = sampler(temperature=0.0).draw(logits)
    assert (drawn.id, drawn.logprob) == (1, 0.0)
    assert drawn.raw_logprob == pytest.approx(log_softmax(logits)[1], abs=LOGPROB_TOLERANCE)


def test_the_same_seed_and_choice_draw_the_same_tokens_and_other_choices_do_not() -> None:
    logits = np.zeros(5000, np.float32)

    def tokens(seed: int, choice: int) -> list[int]:
        draws = sampler(seed=seed, choice=choice)
        return [draws.draw(logits).id for _ in range(8)]

    assert tokens(7, 0) == tokens(7, 0)
    assert tokens(7, 0) != tokens(7, 1)
    assert tokens(7, 0) != tokens(8, 0)
    assert tokens(-1, 0) == tokens(-1, 0)


def test_tokens_of_no_probability_are_never_drawn() -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[255, 256, 999]] = 0.0
    draws = sampler()
    assert {draws.draw(logits).id for _ in range(200)} == {255, 256, 999}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = np.zeros(10, np.float32)
    logits[3] = bad
    with pytest.raises(NotFinite):
        sampler().draw(logits)
    with pytest.raises(NotFinite):
        raw_logprob(logits, 0)


def test_alternatives_are_the_most_likely_tokens_with_raw_log_probabilities() -> None:
    logits = np.array([1.0, 4.0, 2.0, 3.0], np.float32)
    drawn = sampler(temperature=0.5, top_logprobs=3).draw(logits)
    raw = log_softmax(logits)
    assert [token for token, _ in drawn.top] == [1, 3, 2]
    assert [logprob for _, logprob in drawn.top] == pytest.approx([raw[1], raw[3], raw[2]], abs=LOGPROB_TOLERANCE)


def test_a_scored_token_has_its_raw_log_probability() -> None:
    logits = (np.random.default_rng(1).standard_normal(49152) * 5).astype(np.float32)
    assert raw_logprob(logits, 77) == pytest.approx(log_softmax(logits)[77], abs=LOGPROB_TOLERANCE)


class Allowed:
    """A constraint that always allows the same tokens."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.asked_for_all = 0
        self.taken: list[int] = []

    def allows(self, token: int) -> bool:
        return token in self.ids

    def allowed(self) -> npt.NDArray[np.integer[Any]]:
        self.asked_for_all += 1
        return np.array(self.ids)

    def take(self, token: int) -> None:
        assert token in self.ids
        self.taken.append(token)


@pytest.mark.parametrize("likely", [True, False])
def test_under_a_constraint_tokens_come_as_often_as_among_those_that_fit(likely: bool) -> None:
    logits = np.linspace(-1, 2, 60).astype(np.float32)
    ids = [5, 20, 31, 59] if likely else [0, 1, 2, 3]
    expected = distribution(logits[ids], temperature=0.7, top_k=0, top_p=1.0)
    allowed = Allowed(ids)
    draws, n = sampler(temperature=0.7, constraint=allowed), 3000
    counts = collections.Counter(draws.draw(logits).id for _ in range(n))
    for token, p in zip(ids, expected, strict=True):
        assert abs(counts[token] - n * p) <= SIGMAS * math.sqrt(n * p * (1 - p)) + 1
    assert sum(counts.values()) == len(allowed.taken) == n
    assert 0 < allowed.asked_for_all < n


def test_a_constrained_draw_tells_what_the_model_thought_and_nothing_of_its_own_distribution() -> None:
    logits = np.array([0.0, 3.0, 1.0], np.float32)
    drawn = sampler(constraint=Allowed([2]), top_logprobs=1).draw(logits)
    assert (drawn.id, drawn.logprob) == (2, None)
    assert drawn.raw_logprob == pytest.approx(log_softmax(logits)[2], abs=LOGPROB_TOLERANCE)
    assert drawn.top[0][0] == 1


def test_a_greedy_constrained_draw_is_the_best_that_fits() -> None:
    logits = np.arange(100, dtype=np.float32)
    allowed = Allowed([7, 40])
    draws = sampler(temperature=0.0, constraint=allowed)
    assert [draws.draw(logits).id for _ in range(3)] == [40, 40, 40]
    assert draws.draw(-logits).id == 7
    assert logits.tolist() == list(range(100))


def test_a_drawn_token_is_penalised_under_a_constraint_too() -> None:
    draws = sampler(temperature=0.0, constraint=Allowed([1, 2]), shape=Shape(presence_penalty=2.0))
    logits = np.array([9.0, 3.0, 2.0], np.float32)
    assert [draws.draw(logits).id for _ in range(2)] == [1, 2]
