"""What is trained on, and how it is cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import MICRO_BATCH_TOKENS, AdapterRef, EpisodeTokens, PreferredPair, RatedEpisode
from engine.train.batch import select, split_micro_batches, split_minibatches
from tests.engine.train.tiny import make_job

GOOD = RatedEpisode(
    episode=EpisodeTokens(
        episode_id=1,
        prompt_ids=(3, 4),
        completion_ids=(5, 6),
        logprobs=(-0.5, -0.25),
        temperature=0.7,
        adapter=AdapterRef(version=0, folder=None),
    ),
    reward=0.5,
    replay=False,
)


def changed(reward: float = 0.5, **fields: object) -> RatedEpisode:
    return dataclasses.replace(GOOD, reward=reward, episode=dataclasses.replace(GOOD.episode, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("episode", "reason"),
    [
        (changed(completion_ids=(), logprobs=()), "empty"),
        (changed(prompt_ids=()), "no_prompt"),
        (changed(completion_ids=(5, 99)), "unknown_token"),
        (changed(reward=float("nan")), "reward_not_finite"),
        (changed(temperature=0.0), "greedy"),
        (changed(logprobs=(-0.5, None)), "no_behaviour_logprob"),
        (changed(logprobs=(-0.5,)), "no_behaviour_logprob"),
        (changed(logprobs=(-0.5, -3.4e38)), "no_behaviour_logprob"),
        (changed(logprobs=(-0.5, float("nan"))), "no_behaviour_logprob"),
        (changed(logprobs=(-0.5, 0.5)), "no_behaviour_logprob"),
        (GOOD, "repeated"),
    ],
)
def test_t_tok_3_t_lp_7_an_unusable_episode_is_left_out_and_counted(episode: RatedEpisode, reason: str) -> None:
    selection = select(make_job([GOOD, episode]), n_vocab=50)
    assert selection.sampled == (GOOD,)
    assert selection.dropped == {reason: 1}


def test_thumbs_take_what_nobody_sampled_and_everything_where_no_policy_gradient_does() -> None:
    greedy = changed(temperature=0.0, episode_id=2)
    mixed = select(make_job([GOOD, greedy], objectives={"ppo": 1.0, "kto": 0.5}), n_vocab=50)
    assert (mixed.sampled, mixed.unsampled, mixed.thumbs_take_all) == ((GOOD,), (greedy,), False)
    alone = select(make_job([GOOD, greedy], objectives={"kto": 1.0}), n_vocab=50)
    assert (alone.sampled, alone.unsampled, alone.thumbs_take_all) == ((GOOD,), (greedy,), True)


def test_pairs_and_corrections_are_taken_only_by_who_feeds_on_them() -> None:
    other = dataclasses.replace(GOOD.episode, completion_ids=(7,), logprobs=())
    good, equal = PreferredPair(chosen=other, rejected=GOOD.episode), PreferredPair(chosen=other, rejected=other)
    empty = dataclasses.replace(other, completion_ids=())
    fields = {"pairs": (good, equal), "corrections": (other, empty)}
    both = select(make_job([GOOD], objectives={"dpo": 1.0, "sft": 1.0}, **fields), n_vocab=50)
    assert (both.sampled, both.pairs, both.corrections) == ((), (good,), (other,))
    assert both.dropped == {"equal_answers": 1, "empty": 1}
    assert select(make_job([GOOD], **fields), n_vocab=50).pairs == ()


@settings(deadline=None)
@given(n=st.integers(1, 40), minibatches=st.integers(1, 8), seed=st.integers(0, 100))
def test_every_episode_is_in_exactly_one_minibatch_of_an_epoch(n: int, minibatches: int, seed: int) -> None:
    parts = split_minibatches(n, minibatches, torch.Generator().manual_seed(seed))
    assert sorted(i for part in parts for i in part) == list(range(n))
    assert len(parts) == min(n, minibatches)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts == split_minibatches(n, minibatches, torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=60))
def test_every_episode_is_in_exactly_one_micro_batch_and_none_is_cut(lengths: list[int]) -> None:
    parts = split_micro_batches(lengths, MICRO_BATCH_TOKENS)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(parts)
    mean_load = sum(lengths) / len(parts)
    assert max(sum(lengths[i] for i in part) for part in parts) <= mean_load + max(lengths)


def test_an_even_number_of_micro_batches_keeps_two_lanes_busy() -> None:
    assert len(split_micro_batches([90] * 12, MICRO_BATCH_TOKENS)) == 2
    assert len(split_micro_batches([90] * 24, MICRO_BATCH_TOKENS)) == 4
    assert len(split_micro_batches([90], MICRO_BATCH_TOKENS)) == 1
