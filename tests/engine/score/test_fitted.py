"""The fitted judge on a tiny random base: its features, when it judges, and that it says why it does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.models import Base, load_folder
from engine.protocol import Fit, FitReport, FittedSource, RatedTokens
from engine.score.fitted import FittedJudge, feature_layer, key_of, merge_same, open_fitted, pooled_features
from tests.engine.score.answers import make_item, soon
from tests.engine.train.tiny import write_tiny_model

EOS_ID = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def base(folder: Path) -> Base:
    return load_folder(folder, "float32", "cpu")


def make_ratings(n: int, *, seed: int = 0, first_id: int = 1, graded: bool = False) -> list[RatedTokens]:
    """Answers of twelve different tokens, rated by the share of the lower six: something that the stream shows."""
    generator = np.random.default_rng(seed)
    ratings = []
    for number in range(n):
        share = generator.uniform()
        length = int(generator.integers(4, 12))
        low, high = generator.integers(10, 16, length), generator.integers(50, 56, length)
        tokens = np.where(generator.uniform(size=length) < share, low, high)
        liked = float(np.mean(tokens < 50))
        ratings.append(
            RatedTokens(
                episode_id=first_id + number,
                prompt_ids=(5, 6, 7),
                completion_ids=tuple(tokens.tolist()),
                rating=2 * liked - 1 if graded else 1.0 if liked >= 0.5 else -1.0,
            )
        )
    return ratings


def fit(judge: FittedJudge, ratings: list[RatedTokens], **changes: Any) -> FitReport:
    values: dict[str, Any] = {"fresh": True, "more": False, "accuracy_min": 0.65, "ratings_min": 32, **changes}
    return judge.fit(Fit(job_id="fit-1", ratings=tuple(ratings), **values))


def rewards(judge: FittedJudge, ratings: list[RatedTokens]) -> list[float | None]:
    items = [make_item(prompt_ids=each.prompt_ids, completion_ids=each.completion_ids) for each in ratings]
    return list(judge.judge(items, 1.0, soon()).rewards)


def test_the_features_are_pooled_from_transformers_own_hidden_states(folder: Path, base: Base) -> None:
    prompt, completion = (5, 6, 7), (8, 9, 60, EOS_ID)
    peer = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = peer(torch.tensor([prompt + completion]), output_hidden_states=True).hidden_states
    states = hidden[feature_layer(base)][0, 3:].double()
    states = states / (states.square().mean(dim=-1, keepdim=True) + base.config.norm_eps).sqrt()
    found = pooled_features(base, prompt, completion)
    np.testing.assert_allclose(found[:32], states.mean(dim=0), atol=1e-5)
    np.testing.assert_allclose(found[32:64], states[-1], atol=1e-5)
    np.testing.assert_allclose(found[64:], [4 / 32, np.log(5), 1.0])
    assert pooled_features(base, prompt, completion[:3])[-1] == 0.0


@pytest.mark.parametrize("graded", [False, True])
def test_a_taste_is_learned_from_ratings_and_judges_answers_that_nobody_rated(base: Base, graded: bool) -> None:
    judge = FittedJudge(base)
    report = fit(judge, make_ratings(80, graded=graded))
    assert (report.used, report.n_ratings, report.head) == (True, 80, "ridge" if graded else "logistic")
    assert report.accuracy is not None
    assert report.accuracy > 0.8
    assert report.why == f"{report.accuracy:.2f} of {report.n_pairs} held-out pairs in the right order"
    unseen = make_ratings(40, seed=9, graded=True)
    found = np.array(rewards(judge, unseen), dtype=np.float64)
    assert np.corrcoef(found, [each.rating for each in unseen])[0, 1] > 0.6


def test_what_nobody_could_learn_is_not_used(base: Base) -> None:
    generator = np.random.default_rng(1)
    noise = [dataclasses.replace(each, rating=float(generator.choice([-1, 1]))) for each in make_ratings(60)]
    judge = FittedJudge(base)
    report = fit(judge, noise)
    assert (report.used, report.n_ratings) == (False, 60)
    assert "held-out pairs in the right order; " in report.why
    found = judge.judge([make_item()], 1.0, soon())
    assert (found.rewards, found.reasons, found.detail) == ((None,), ("judge_not_fitted",), report.why)


def test_it_is_put_to_use_and_out_of_use_as_ratings_come(base: Base) -> None:
    judge = FittedJudge(base)
    assert judge.judge([make_item()], 1.0, soon()).detail == "it was not fitted yet"
    assert fit(judge, make_ratings(20)).why == "20 rated answers; it is fitted from 32 on"
    assert fit(judge, make_ratings(80)).used
    equal = [dataclasses.replace(each, rating=1.0) for each in make_ratings(40)]
    assert "all rated the same" in fit(judge, equal).why
    assert rewards(judge, make_ratings(1)) == [None]


def test_parts_are_fitted_together_and_a_fresh_one_forgets(base: Base) -> None:
    ratings = make_ratings(60)
    whole, parts = FittedJudge(base), FittedJudge(base)
    expected = fit(whole, ratings)
    assert fit(parts, ratings[:30], more=True).n_ratings == 0
    assert fit(parts, ratings[30:], fresh=False) == expected
    assert rewards(parts, ratings) == rewards(whole, ratings)
    assert fit(parts, ratings[:35]).n_ratings == 35


def test_the_order_in_which_ratings_came_does_not_matter(base: Base) -> None:
    ratings = make_ratings(50)
    first, second = FittedJudge(base), FittedJudge(base)
    one, other = fit(first, ratings), fit(second, ratings[::-1])
    assert (one.n_pairs, one.used) == (other.n_pairs, other.used)
    assert one.accuracy == pytest.approx(other.accuracy, abs=1e-9)
    np.testing.assert_allclose(
        np.array(rewards(first, ratings[:5]), dtype=float), np.array(rewards(second, ratings[:5]), dtype=float), 1e-6
    )


def test_a_newer_rating_of_an_answer_replaces_the_older_one(base: Base) -> None:
    judge = FittedJudge(base)
    ratings = make_ratings(40)
    turned = dataclasses.replace(ratings[0], rating=-ratings[0].rating)
    fit(judge, [*ratings, turned])
    again = FittedJudge(base)
    fit(again, [turned, *ratings[1:]])
    assert rewards(judge, ratings) == rewards(again, ratings)


def test_the_same_answer_counts_once_with_the_mean_of_its_ratings() -> None:
    one, other, third = make_ratings(3)
    same = dataclasses.replace(one, episode_id=99, rating=-one.rating)
    answers, ratings = merge_same([one, other, same, third])
    assert [answer.episode_id for answer in answers] == [1, 2, 3]
    assert ratings.tolist() == [0.0, other.rating, third.rating]
    assert key_of(one) == key_of(same) != key_of(other)


def test_answers_without_tokens_teach_nothing_and_get_no_reward(base: Base) -> None:
    judge = FittedJudge(base)
    empty = RatedTokens(episode_id=999, prompt_ids=(5,), completion_ids=(), rating=1.0)
    assert fit(judge, [*make_ratings(60), empty]).n_ratings == 60
    found = judge.judge([make_item(completion_ids=()), make_item()], 1.0, soon())
    assert found.reasons == ("judge_empty", None)
    assert judge.judge([make_item()], 1.0, soon(-1.0)).reasons == ("judge_timeout",)


def test_it_is_opened_on_the_base_that_the_daemon_names(folder: Path) -> None:
    source = FittedSource(model_path=str(folder), base_sha256="5" * 64, cache_folder="unused", dtype="float32")
    assert fit(open_fitted(source, threads=1, device="cpu"), make_ratings(10)).n_ratings == 10
