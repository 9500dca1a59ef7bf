"""The figures of the engines' noise, from measured answers."""

from __future__ import annotations

import numpy as np
import pytest

from edged.learn.noise import SPREAD_MIN, noise_of
from engine.protocol import EpisodeScore


def score(gaps: np.ndarray) -> EpisodeScore:
    """An answer whose tokens have these log(trainer / server)."""
    return EpisodeScore(
        episode_id=-1,
        n_tokens=len(gaps),
        reference_logprob=-1.0,
        kl=0.0,
        engine_gap=float(np.abs(gaps).mean()) if len(gaps) else None,
        engine_bias=float(gaps.mean()) if len(gaps) else None,
    )


def test_bias_and_spread_of_independent_tokens_are_found_again() -> None:
    random = np.random.default_rng(3)
    noise = noise_of([score(random.normal(0.02, 0.09, 24)) for _ in range(200)], 0.7)
    assert noise is not None
    assert (noise.bias, noise.spread) == (pytest.approx(0.02, abs=0.005), pytest.approx(0.09, rel=0.1))
    assert (noise.tokens, noise.temperature) == (24.0, 0.7)


def test_tokens_that_err_together_widen_the_spread() -> None:
    random = np.random.default_rng(4)
    scores = [score(np.full(25, random.normal(0.0, 0.1))) for _ in range(200)]
    noise = noise_of(scores, 0.7)
    assert noise is not None
    assert noise.spread == pytest.approx(0.1 * 5, rel=0.15), "the mean of 25 tokens spreads as one of them does"


def test_engines_that_agree_to_the_last_bit_still_get_a_band() -> None:
    noise = noise_of([score(np.zeros(24))] * 16, 0.7)
    assert noise is not None
    assert noise.spread == SPREAD_MIN


@pytest.mark.parametrize("gaps", [np.zeros(0), np.zeros(1), np.full(24, np.nan)])
def test_too_few_tokens_or_figures_that_are_none_tell_nothing(gaps: np.ndarray) -> None:
    assert noise_of([score(gaps)] * 2, 0.7) is None
    assert noise_of([], 0.7) is None
