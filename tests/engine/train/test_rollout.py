"""What an update knows of its answers: the very tokens that were sampled, ends included, and prompts that count for
nothing."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.lora import Lora, new_lora
from engine.protocol import OBJECTIVES, AdapterRef, EpisodeTokens, PreferredPair, RatedEpisode, TrainJob
from engine.train.batch import select
from engine.train.job import JobFailed, load_job, run_job
from engine.train.objectives.objective import Rollout
from engine.train.rollout import Gathered, gather, mismatched_answers
from engine.train.scorer import Scorer
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.objectives.updates import course_of
from tests.engine.train.tiny import (
    BASE,
    BASE_SHA256,
    LORA,
    make_job,
    peer_logprobs,
    publish_lora,
    random_lora,
    silent,
    write_job,
)

ROOT = Path(__file__).parents[3]
EOS = 2


def fresh_lora(scorer: Scorer) -> Lora:
    return new_lora(scorer.base.config.shape, LORA, 0, torch.device("cpu"))


def gathered(job: TrainJob, scorer: Scorer) -> Gathered:
    return gather(job, select(job, 96), fresh_lora(scorer), scorer, silent, mismatched="kto" in job.objectives)


def rollouts(job: TrainJob, scorer: Scorer) -> tuple[Rollout, ...]:
    return gathered(job, scorer).sampled.rated


def ending(rated: RatedEpisode, *tail: int) -> RatedEpisode:
    """The same answer with `tail` behind it."""
    episode = rated.episode
    longer = dataclasses.replace(
        episode, completion_ids=(*episode.completion_ids, *tail), logprobs=(*episode.logprobs, *[-1.0] * len(tail))
    )
    return dataclasses.replace(rated, episode=longer)


def test_t_tok_1_the_ids_that_are_trained_on_are_those_of_the_job_file(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    job = make_job(sample_episodes(6))
    found = rollouts(load_job(write_job(tmp_path / "job", job)), scorer)
    for rollout, rated in zip(found, job.episodes, strict=True):
        assert tuple(rollout.tokens.tolist()) == rated.episode.completion_ids
        assert rollout.prompt_ids == rated.episode.prompt_ids
        assert rollout.trunk.shape[0] == len(rated.episode.prompt_ids + rated.episode.completion_ids)


def test_t_tok_1_nothing_of_the_trainer_could_turn_text_into_tokens() -> None:
    imported = set()
    for path in (ROOT / "engine" / "train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    assert "torch" in imported
    assert imported & {"tokenizers", "transformers", "sentencepiece", "llama_cpp", "tiktoken"} == set()


def test_t_mask_1_t_mask_3_a_sampled_end_is_an_action_with_logprob_value_and_reward(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    (rated,) = sample_episodes(1)
    ended = ending(rated, EOS)
    (rollout,) = rollouts(make_job([ended]), scorer)
    n = len(ended.episode.completion_ids)
    assert int(rollout.tokens[-1]) == EOS
    assert [one.shape[0] for one in (rollout.parent, rollout.reference, rollout.features, rollout.entropy)] == [n] * 4
    (item,) = course_of(make_job([ended]), fresh_lora(scorer), scorer).items["ppo"]
    assert item.count == n
    torch.testing.assert_close(item.constants["returns"], torch.full((n,), ended.reward))


def test_t_mask_3_an_end_that_was_not_sampled_is_not_added(scorer: Scorer, sample_episodes: MakeEpisodes) -> None:
    for rated, rollout in zip(sample_episodes(6), rollouts(make_job(sample_episodes(6)), scorer), strict=True):
        assert rated.episode.completion_ids[-1] != EOS
        assert int(rollout.tokens[-1]) != EOS


def test_t_mask_1_an_end_in_the_middle_of_an_answer_masks_nothing(
    scorer: Scorer, sample_episodes: MakeEpisodes, tiny_peer: torch.nn.Module
) -> None:
    (rated,) = sample_episodes(1)
    odd = ending(rated, EOS, 9, EOS, EOS)
    (rollout,) = rollouts(make_job([odd]), scorer)
    episode = odd.episode
    ids, n = episode.prompt_ids + episode.completion_ids, len(episode.completion_ids)
    expected = peer_logprobs(tiny_peer, ids, n, episode.temperature)
    torch.testing.assert_close(rollout.parent, expected, rtol=1e-4, atol=1e-5)


def test_t_mask_4_an_answer_cut_by_its_length_is_trained_on_to_its_last_token(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    cut, ended = sample_episodes(2)
    job = make_job([cut, ending(ended, EOS)])
    counts = [item.count for item in course_of(job, fresh_lora(scorer), scorer).items["ppo"]]
    assert counts == [len(one.episode.completion_ids) for one in job.episodes]


def test_t_kl_4_at_the_start_the_distance_from_the_reference_is_exactly_zero(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    first = publish_lora(tmp_path / "v1", random_lora(scorer.base), 1)
    for reference in (BASE, first):
        job = make_job(sample_episodes(5), parent=reference, reference=reference, version=2)
        assert all(bool((one.parent == one.reference).all()) for one in rollouts(job, scorer))
    strayed = make_job(sample_episodes(5), parent=first, version=2)
    assert all(bool((one.parent != one.reference).any()) for one in rollouts(strayed, scorer))


def test_t_gae_2_returns_are_made_of_advantages_before_they_are_whitened(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    job = make_job(sample_episodes(12))  # enough of them to be whitened
    items = course_of(job, fresh_lora(scorer), scorer).items["ppo"]
    for item in items:  # without discount, the return of every token is the rating
        torch.testing.assert_close(
            item.constants["returns"], torch.full_like(item.constants["returns"], item.rollouts[0].reward)
        )
    advantages = torch.cat([item.constants["advantages"] for item in items])
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-5)


def test_t_dpo_2_t_dpo_3_the_reference_of_a_pair_is_of_the_completions_alone_and_of_this_base(
    scorer: Scorer, sample_episodes: MakeEpisodes, tiny_peer: torch.nn.Module
) -> None:
    one, other = (rated.episode for rated in sample_episodes(2, temperature=1.0))
    longer = dataclasses.replace(one, episode_id=77, prompt_ids=(*one.prompt_ids, 50, 51, 52))
    job = make_job([], objectives={"dpo": 1.0}, pairs=(PreferredPair(chosen=longer, rejected=other),))
    (item,) = course_of(job, fresh_lora(scorer), scorer).items["dpo"]
    for episode, found in ((longer, "reference_chosen"), (other, "reference_rejected")):
        ids = episode.prompt_ids + episode.completion_ids
        expected = peer_logprobs(tiny_peer, ids, len(episode.completion_ids), 1.0)
        assert float(item.constants[found]) == pytest.approx(float(expected.sum()), rel=1e-4)


def test_t_edit_1_a_written_answer_reaches_no_objective_that_compares_policies_on_samples(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    rated = sample_episodes(4)
    written = EpisodeTokens(
        episode_id=-1, prompt_ids=(5, 6), completion_ids=(7, 8), logprobs=(), temperature=1.0, adapter=BASE
    )
    job = make_job(
        [dataclasses.replace(one, group="g") for one in rated],
        objectives=dict.fromkeys(OBJECTIVES, 1.0),
        pairs=(PreferredPair(chosen=written, rejected=rated[0].episode),),
        corrections=(written,),
    )
    items = course_of(job, fresh_lora(scorer), scorer).items
    trained = {name: [r for item in of for r in item.rollouts if r.behaviour is None] for name, of in items.items()}
    assert {name for name, unsampled in trained.items() if unsampled} == {"dpo", "sft"}


def test_t_kto_1_mismatched_answers_stand_behind_their_neighbours_prompt(
    scorer: Scorer, sample_episodes: MakeEpisodes, tiny_peer: torch.nn.Module, tmp_path: Path
) -> None:
    first = publish_lora(tmp_path / "v1", random_lora(scorer.base), 1)
    rated = sample_episodes(3, temperature=1.0)
    job = make_job(rated, objectives={"kto": 1.0}, parent=first, version=2)
    found = gathered(job, scorer).thumbs.mismatched
    shifted = [
        dataclasses.replace(one.episode, episode_id=500 + i, prompt_ids=rated[(i + 1) % 3].episode.prompt_ids)
        for i, one in enumerate(rated)
    ]
    ours = [float(one.scaled.sum()) for one in scorer.measure(shifted, [first] * 3, silent)]
    for episode, parent, distance in zip(shifted, ours, found, strict=True):
        ids = episode.prompt_ids + episode.completion_ids
        base = float(peer_logprobs(tiny_peer, ids, len(episode.completion_ids), 1.0).sum())
        assert distance == pytest.approx(parent - base, abs=1e-3)
    assert gathered(dataclasses.replace(job, episodes=job.episodes[:1]), scorer).thumbs.mismatched == ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_t_kto_1_no_answer_stands_behind_its_own_prompt_and_all_do_behind_one_of_the_batch(numbers: list[int]) -> None:
    """Whoever asked what, and in groups as practice samples them."""
    asked = [
        EpisodeTokens(
            episode_id=i + 1, prompt_ids=(n, 5), completion_ids=(i, 8), logprobs=(), temperature=1.0, adapter=BASE
        )
        for i, n in enumerate(numbers)
    ]
    shifted = mismatched_answers(asked)
    if len(set(numbers)) == 1:
        assert shifted == ()
        return
    for answer, other in zip(asked, shifted, strict=True):
        assert other.completion_ids == answer.completion_ids
        assert other.prompt_ids != answer.prompt_ids
        assert other.prompt_ids in {one.prompt_ids for one in asked}
    assert len({one.episode_id for one in (*asked, *shifted)}) == 2 * len(asked)


def test_t_kto_1_where_all_answers_have_one_prompt_they_are_left_out_by_name(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    rated = sample_episodes(6)
    same = [
        dataclasses.replace(one, episode=dataclasses.replace(one.episode, prompt_ids=rated[0].episode.prompt_ids))
        for one in rated
    ]
    job = make_job(same, objectives={"kto": 1.0})
    assert gathered(job, scorer).thumbs.mismatched == ()
    with pytest.raises(JobFailed) as caught:
        run_job(write_job(tmp_path / "job", job), scorer, BASE_SHA256, silent)
    assert (caught.value.code, caught.value.details) == ("batch_empty", {"kto_no_mismatched": 6})


def test_the_base_as_an_adapter_is_the_version_without_a_folder(scorer: Scorer) -> None:
    assert scorer.adapter(AdapterRef(version=0, folder=None)) is None
