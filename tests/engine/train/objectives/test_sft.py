"""The likelihood of corrections."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.train.objectives.objective import Batch
from engine.train.objectives.sft import OBJECTIVE, negative_log_likelihood
from tests.engine.train.objectives.answers import answer, losses, settings_job

JOB = settings_job()


def test_the_mean_over_tokens_is_the_mean_negative_log_likelihood() -> None:
    written = (answer([-1.0, -2.0, -0.5], sampled=False), answer([-4.0], sampled=False))
    items = OBJECTIVE.prepare(Batch(corrections=written), JOB).items
    found, gradients = losses(OBJECTIVE, items, None, JOB)
    n_tokens = sum(item.count for item in items)
    assert n_tokens == 4
    assert sum(float(one.loss) for one in found) / n_tokens == pytest.approx(7.5 / 4)
    assert all(np.array_equal(gradient, -np.ones(gradient.shape)) for (gradient,) in gradients)


def test_a_flipped_sign_or_a_mean_over_answers_is_another_loss() -> None:
    written = (answer([-1.0, -2.0, -0.5], sampled=False), answer([-4.0], sampled=False))
    found, _ = losses(OBJECTIVE, OBJECTIVE.prepare(Batch(corrections=written), JOB).items, None, JOB)
    total = sum(float(one.loss) for one in found) / 4
    assert total > 0
    assert total != pytest.approx((3.5 / 3 + 4.0) / 2, rel=0.01)


def test_it_is_the_cross_entropy_of_torch() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens = torch.arange(6)
    logprobs = torch.log_softmax(logits, 1).gather(1, tokens[:, None])[:, 0]
    expected = torch.nn.functional.cross_entropy(logits, tokens, reduction="sum")
    torch.testing.assert_close(negative_log_likelihood(logprobs), expected)


def test_t_edit_1_rated_answers_and_pairs_are_left_alone_and_written_ones_need_no_sampler() -> None:
    batch = Batch(rated=(answer([-1.0], reward=1.0),), pairs=((answer([-1.0]), answer([-2.0])),))
    assert OBJECTIVE.prepare(batch, JOB).items == ()
