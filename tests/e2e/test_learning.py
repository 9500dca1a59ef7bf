"""Does it learn? One run on the real model, over the socket, judged on questions that were never rated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

# The first test of a session waits for the learning runs.
pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1800)]

FLUENCY_NATS = 0.3
SHARE_OF_BASE = 0.2
SHORT_WORDS = 36  # a rating above 0


def standard_error_of_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))


def test_held_out_answers_move_where_the_ratings_point_by_more_than_three_standard_errors(learning_run: Any) -> None:
    before = [answer.rating for answer in learning_run.before]
    after = [answer.rating for answer in learning_run.after]
    move = statistics.mean(after) - statistics.mean(before)
    assert move > 3 * standard_error_of_difference(before, after)
    words = (
        statistics.mean(a.n_words for a in learning_run.before),
        statistics.mean(a.n_words for a in learning_run.after),
    )
    assert words[1] < words[0]


def test_shuffled_ratings_move_the_answers_less_than_a_third_as_far(learning_run: Any) -> None:
    before = statistics.mean(answer.rating for answer in learning_run.before)
    learned = statistics.mean(answer.rating for answer in learning_run.after) - before
    by_chance = statistics.mean(answer.rating for answer in learning_run.shuffled) - before
    assert by_chance < learned / 3


def test_what_was_learned_is_as_plausible_as_what_the_base_says_when_it_is_short(learning_run: Any) -> None:
    short = [a for a in learning_run.before if a.n_words <= SHORT_WORDS and a.finish_reason == "stop"]
    assert len(short) >= 5, "too few short answers of the base to compare with"
    base = statistics.mean(learning_run.logprob[a.completion_id] for a in short)
    learned = statistics.mean(learning_run.logprob[a.completion_id] for a in learning_run.after if a.text)
    assert learned > base - FLUENCY_NATS


def test_what_was_learned_is_as_varied_as_the_base(learning_run: Any) -> None:
    short = [a.text for a in learning_run.before if a.n_words <= SHORT_WORDS and a.finish_reason == "stop"]
    after = [a.text for a in learning_run.after]
    assert distinct_2(after) > (1 - SHARE_OF_BASE) * distinct_2(short)
    # The base hardly ever says the same twice, so a share of its share would forbid a single repeated "Paris.".
    assert duplicate_share(after) <= duplicate_share([a.text for a in learning_run.before]) + SHARE_OF_BASE


def test_every_answer_names_a_version_that_was_published(learning_run: Any) -> None:
    published = {0} | {u["version"] for u in learning_run.updates if u["verdict"] == "published"}
    assert {a.version for a in learning_run.before} == {0}
    assert {a.version for a in learning_run.after} == {max(published)}


def test_each_update_tells_where_its_time_went_and_how_far_it_moved(learning_run: Any) -> None:
    published = [u for u in learning_run.updates if u["verdict"] == "published"]
    assert published
    for update in published:
        assert {"train", "gate", "publish", "swap", "total"} <= set(update["seconds"])
        assert 0.0 <= update["metrics"]["kl/live"] < 0.5
        assert abs(update["metrics"]["ppo/first_kl"]) < 0.02
        assert update["metrics"]["gate/canary_gap"] < 0.25


def distinct_2(texts: Sequence[str]) -> float:
    """Different word pairs / word pairs, within answers."""
    pairs = [list(pairwise(text.lower().split())) for text in texts]
    return sum(len(set(of_text)) for of_text in pairs) / max(1, sum(map(len, pairs)))


def duplicate_share(texts: Sequence[str]) -> float:
    """Share of the answers that are the same as an earlier one."""
    return 1 - len(set(texts)) / len(texts)
