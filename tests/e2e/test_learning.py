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
# What the base says of its own short answers, nats a token: mean, standard error and deviation of 111 among 768
# (`python tests/bench/base_fluency.py --samples 32`). A run has a dozen of them, too few to judge by.
BASE_SHORT_NATS, BASE_SHORT_ERROR, BASE_SHORT_DEVIATION = -1.185, 0.045, 0.474
SHARE_OF_BASE = 0.2
DUPLICATES_MORE = 0.1  # of the answers; docs/benchmarks.md says why not a share of the base's
CONTROL_UPDATES_MIN = 3
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


def test_the_shuffled_ratings_were_learned_from_too(learning_run: Any) -> None:
    published = [u["version"] for u in learning_run.shuffled_updates if u["verdict"] == "published"]
    assert len(published) >= CONTROL_UPDATES_MIN, "answers of the base say nothing of what chance would teach"
    assert {a.version for a in learning_run.shuffled} == {max(published)}


def test_what_was_learned_is_as_plausible_as_what_the_base_says_when_it_is_short(learning_run: Any) -> None:
    learned = [learning_run.logprob[a.completion_id] for a in learning_run.after if a.text]
    doubt = 2 * math.hypot(BASE_SHORT_ERROR, statistics.stdev(learned) / math.sqrt(len(learned)))
    assert statistics.mean(learned) > BASE_SHORT_NATS - FLUENCY_NATS - doubt


def test_short_answers_of_the_base_are_what_they_were_when_they_were_measured(learning_run: Any) -> None:
    short = [a for a in learning_run.before if a.n_words <= SHORT_WORDS and a.finish_reason == "stop"]
    assert short
    base = statistics.mean(learning_run.logprob[a.completion_id] for a in short)
    assert abs(base - BASE_SHORT_NATS) < 4 * BASE_SHORT_DEVIATION / math.sqrt(len(short))


def test_what_was_learned_is_as_varied_as_the_base(learning_run: Any) -> None:
    before, after = [a.text for a in learning_run.before], [a.text for a in learning_run.after]
    n_pairs = min(len(pairs_of(before)), len(pairs_of(after)))  # the more text, the fewer of its pairs are new
    assert distinct_2(after, n_pairs) > (1 - SHARE_OF_BASE) * distinct_2(before, n_pairs)
    assert duplicate_share(after) <= duplicate_share(before) + DUPLICATES_MORE


def test_answers_that_resemble_each_other_are_less_varied_than_those_that_repeat_nothing() -> None:
    alike = [f"the answer to this is number {number}" for number in range(20)]
    assert distinct_2(alike[:1], 6) == 1.0
    assert distinct_2(alike, len(pairs_of(alike))) < 0.3


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
        assert abs(update["metrics"]["policy/first_kl"]) < 0.02
        assert update["metrics"]["gate/canary_gap"] < 0.25


def pairs_of(texts: Sequence[str]) -> list[tuple[str, str]]:
    """The word pairs of all answers, one after the other."""
    return [pair for text in texts for pair in pairwise(text.lower().split())]


def distinct_2(texts: Sequence[str], n_pairs: int) -> float:
    """Different word pairs / word pairs, among the first `n_pairs` of all answers together."""
    pairs = pairs_of(texts)[:n_pairs]
    return len(set(pairs)) / len(pairs)


def duplicate_share(texts: Sequence[str]) -> float:
    """Share of the answers that are the same as an earlier one."""
    return 1 - len(set(texts)) / len(texts)
