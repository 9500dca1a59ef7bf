"""Every objective through a whole update of the tiny model: it moves the adapter its own way, whoever cuts the step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from engine.lora import new_lora
from engine.protocol import OBJECTIVES, PreferredPair, RatedEpisode, TrainJob, TrainResult
from engine.train.batch import select
from engine.train.course import objective_of
from engine.train.job import JobFailed, run_job
from engine.train.optimise import actor_gradients, plan_steps
from engine.train.scorer import Scorer
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.objectives.updates import course_of
from tests.engine.train.tiny import BASE, BASE_SHA256, LORA, PPO, hash_tree, make_job, silent, write_job

STRONG = dataclasses.replace(PPO, learning_rate=5e-3, epochs=4, kl_coef=0.0)


def job_of(name: str, rated: list[RatedEpisode], **changes: object) -> TrainJob:
    """A job with one objective, or with all, and something for it to feed on: groups of four, pairs, corrections."""
    grouped = [dataclasses.replace(one, group=f"prompt {i // 4}") for i, one in enumerate(rated)]
    liked = [one.episode for one in rated if one.reward > 0]
    disliked = [one.episode for one in rated if one.reward < 0]
    pairs = tuple(PreferredPair(chosen=a, rejected=b) for a, b in zip(liked, disliked, strict=False))
    corrections = tuple(
        dataclasses.replace(one, episode_id=-i - 1, logprobs=(), temperature=1.0) for i, one in enumerate(liked)
    )
    objectives = dict.fromkeys(OBJECTIVES, 1.0) if name == "all" else {name: 1.0}
    return make_job(grouped, objectives=objectives, pairs=pairs, corrections=corrections, **changes)


def run(folder: Path, job: TrainJob, scorer: Scorer) -> TrainResult:
    return run_job(write_job(folder, job), scorer, BASE_SHA256, silent)


def moves(scorer: Scorer, rated: list[RatedEpisode], folder: Path) -> list[float]:
    """Per answer, by how much its log-probability rose."""
    new = dataclasses.replace(BASE, version=1, folder=str(folder / "out" / "adapter"))
    episodes = [one.episode for one in rated]
    before, after = (scorer.measure(episodes, [adapter] * len(episodes), silent) for adapter in (BASE, new))
    return [float((b.scaled - a.scaled).sum()) for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_people_prefer_becomes_likelier_than_what_they_do_not(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path, name: str
) -> None:
    rated = sample_episodes(16)
    result = run(tmp_path / "job", job_of(name, rated, ppo=STRONG), scorer)
    moved = moves(scorer, rated, tmp_path / "job")
    liked = [move for move, one in zip(moved, rated, strict=True) if one.reward > 0]
    disliked = [move for move, one in zip(moved, rated, strict=True) if one.reward < 0]
    assert sum(liked) / len(liked) > sum(disliked) / len(disliked) + 0.1
    assert result.metrics["policy/steps"] == 8.0
    assert any(figure.startswith(f"{name}/") for figure in result.metrics)


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_what_people_wrote_alone_moves_the_policy_no_further_than_ratings_may(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path, name: str
) -> None:
    wild = dataclasses.replace(PPO, learning_rate=0.03, epochs=4)
    kl = {}
    for bound in (10.0, 0.05):
        job = job_of(name, sample_episodes(8), ppo=dataclasses.replace(wild, live_kl_max=bound))
        kl[bound] = run(tmp_path / str(bound), job, scorer).metrics
    assert kl[10.0]["kl/live"] > 0.1
    assert kl[10.0]["policy/move_share"] == 1.0
    assert kl[0.05]["kl/live"] <= 0.05
    assert kl[0.05]["policy/move_share"] < 1.0


def test_the_distance_over_what_people_wrote_is_that_of_the_parent_from_the_new_policy_over_all_words(
    scorer: Scorer, sample_episodes: MakeEpisodes, tiny_folder: Path, tiny_peer: Any, tmp_path: Path
) -> None:
    job = job_of("sft", sample_episodes(6), ppo=dataclasses.replace(PPO, learning_rate=0.02, epochs=4))
    told = run(tmp_path / "job", job, scorer).metrics["kl/live"]
    plain = transformers.LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "job" / "out" / "adapter")).eval()
    forward, backward = [], []
    for one in job.corrections:
        ids, n = torch.tensor([one.prompt_ids + one.completion_ids]), len(one.completion_ids)
        with torch.no_grad():
            p, q = (torch.log_softmax(net(ids).logits[0, -n - 1 : -1].double(), -1) for net in (tiny_peer, adapted))
        forward.append((p.exp() * (p - q)).sum(-1))
        backward.append((q.exp() * (q - p)).sum(-1))
    assert told == pytest.approx(float(torch.cat(forward).mean()), rel=1e-3)
    assert told != pytest.approx(float(torch.cat(backward).mean()), rel=0.02)


def test_answers_that_kto_leaves_to_a_policy_gradient_are_counted(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    job = make_job(sample_episodes(8), objectives={"ppo": 1.0, "kto": 1.0})
    assert run(tmp_path / "job", job, scorer).dropped == {"kto_left_to_policy": 8}


def test_all_objectives_together_replay_to_the_same_bytes(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    job = job_of("all", sample_episodes(12))
    with_something_to_learn = {name for name, feed in OBJECTIVES.items() if feed != "thumbs"}  # all have a sampler
    for number in ("1", "2"):
        result = run(tmp_path / number, job, scorer)
        assert {figure.partition("/")[0] for figure in result.metrics} >= with_something_to_learn
    assert hash_tree(tmp_path / "1" / "out" / "adapter") == hash_tree(tmp_path / "2" / "out" / "adapter")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_t_ppo_4_the_gradient_of_a_step_does_not_depend_on_how_it_is_cut(
    scorer: Scorer, sample_episodes: MakeEpisodes, name: str
) -> None:
    job = job_of(name, sample_episodes(12), ppo=dataclasses.replace(PPO, minibatches=1, epochs=1, kl_coef=0.1))
    lora = new_lora(scorer.base.config.shape, LORA, 0, torch.device("cpu"))
    for _, b in lora.matrices.values():
        b.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(3))
    course = course_of(job, lora, scorer)
    (step,) = plan_steps(job, course)
    gradients = {}
    for size in (16, 10_000):
        scorer.micro_batch_tokens = size
        gradients[size], _ = actor_gradients(job, course, step, lora, scorer, silent)
    norm = float(torch.cat([one.flatten() for one in gradients[16]]).norm())
    assert norm > 0
    for fine, whole in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(fine, whole, rtol=1e-4, atol=1e-5 * norm)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("grpo", "grpo_equal_rewards"),
        ("rloo", "rloo_equal_rewards"),
        ("reinforce_pp", "reinforce_pp_equal_rewards"),
        ("kto", "kto_one_class"),
    ],
)
def test_a_batch_that_teaches_nothing_fails_with_its_reason_and_writes_nothing(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path, name: str, reason: str
) -> None:
    equal = [dataclasses.replace(one, reward=1.0) for one in sample_episodes(8)]
    with pytest.raises(JobFailed) as caught:
        run(tmp_path / "job", job_of(name, equal), scorer)
    assert (caught.value.code, caught.value.details) == ("batch_empty", {reason: 8})
    assert not (tmp_path / "job" / "out").exists()


def test_every_objective_is_a_module_with_an_objective() -> None:
    for name in OBJECTIVES:
        objective = objective_of(name)
        assert (objective.uses_critic, objective.uses_mismatched) == (name == "ppo", name == "kto")


def test_kto_takes_its_reference_point_from_the_answers_it_judges(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    job = job_of("kto", sample_episodes(6))
    course = course_of(job, new_lora(scorer.base.config.shape, LORA, 0, torch.device("cpu")), scorer)
    assert len(select(job, 96).sampled) == 6
    assert {float(item.constants["z0"]) for item in course.items["kto"]} == {0.0}  # the parent is the reference
