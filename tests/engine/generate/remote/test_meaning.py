"""What a told log-probability is of, for every way in which a server may be started."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.generate.remote.meaning import PLAIN, PROCESSED, RAW, Meaning, judge, questions
from engine.generate.sampling import Sampler
from engine.generate.shaping import Shape
from engine.protocol import Sampling

MEANINGS = [Meaning(tempered=t, cut=c, shaped=s) for t in (False, True) for c in (False, True) for s in (False, True)]
CUTS = [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}]
SAMPLINGS = st.builds(
    lambda temperature, cut, bias, penalty: Sampling(
        temperature=temperature, logit_bias=bias, presence_penalty=penalty, **cut
    ),
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.sampled_from(CUTS),
    st.sampled_from([(), ((1, 2.0),)]),
    st.sampled_from([0.0, 0.5]),
)
LOGITS = np.array([2.0, 1.5, 0.5, -1.0, 0.0], np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def told(meaning: Meaning, sampling: Sampling, token: int) -> float:
    """What a server of this meaning says of a token."""
    logits = LOGITS.astype(np.float64)
    if meaning.shaped:
        for one, value in sampling.logit_bias:
            logits[one] += value  # nothing was sampled before, so penalties change nothing yet
    if meaning.tempered and sampling.temperature > 0:
        logits = logits / sampling.temperature
    if meaning.cut:
        kept = np.ones(len(logits), bool)
        order = np.argsort(-logits)
        if sampling.top_k:
            kept[order[sampling.top_k :]] = False
        weights = np.where(kept, np.exp(logits), 0)
        if sampling.top_p < 1:
            kept[order[int(np.searchsorted(np.cumsum(weights[order]) / weights.sum(), sampling.top_p)) + 1 :]] = False
        kept &= weights >= sampling.min_p * weights.max()
        logits = np.where(kept, logits, -np.inf)
    return float(log_softmax(logits)[token])


@given(SAMPLINGS, st.sampled_from(MEANINGS), st.integers(0, 50))
def test_what_is_said_to_be_known_is_what_our_own_sampler_records(sampling, meaning, seed):
    shape = Shape(bias=sampling.logit_bias, presence_penalty=sampling.presence_penalty)
    sampler = Sampler(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        choice=0,
        top_logprobs=0,
        shape=shape,
    )
    drawn = sampler.draw(LOGITS)
    behaviour, raw = meaning.split(told(meaning, sampling, drawn.id), sampling)
    if behaviour is not None:
        assert behaviour == pytest.approx(drawn.logprob, abs=1e-4)
    if raw is not None:
        assert raw == pytest.approx(drawn.raw_logprob, abs=1e-4)


@pytest.mark.parametrize("meaning", MEANINGS, ids=str)
def test_a_server_s_meaning_is_found_by_asking_it(meaning: Meaning) -> None:
    answers = {name: told(meaning, sampling, 0) for name, sampling in questions(0).items()}
    assert judge(told(meaning, PLAIN, 0), answers) == meaning


def test_what_vllm_is_started_with_decides_what_is_known_at_a_temperature() -> None:
    warm = Sampling(temperature=0.7)
    assert RAW.split(-1.5, warm) == (None, -1.5)
    assert PROCESSED.split(-1.5, warm) == (-1.5, None)
    assert RAW.split(-1.5, PLAIN) == PROCESSED.split(-1.5, PLAIN) == (-1.5, -1.5)
    assert RAW.split(-1.5, Sampling(temperature=0.0)) == (0.0, -1.5)


@pytest.mark.parametrize("number", [None, -9999.0, float("nan"), 0.5])
def test_what_is_no_log_probability_is_unknown(number: float | None) -> None:
    assert RAW.split(number, PLAIN) == (None, None)
