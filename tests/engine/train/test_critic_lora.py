"""The critic with an adapter of its own: zero at first, the right gradient, and it leaves the actor alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.lora import new_lora
from engine.train.batch import select
from engine.train.checkpoint import load_checkpoint
from engine.train.critic import Target
from engine.train.critic_head import new_head_critic
from engine.train.critic_lora import LoraCritic, new_lora_critic
from engine.train.forward import completion_states
from engine.train.job import run_job
from engine.train.objectives.objective import Rollout
from engine.train.objectives.ppo import value_loss
from engine.train.rollout import gather
from engine.train.scorer import Scorer
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.tiny import BASE_SHA256, LORA, PPO, hash_tree, make_job, silent, write_job

CPU = torch.device("cpu")
WITH_LORA = dataclasses.replace(PPO, critic="lora")


def rollouts_of(scorer: Scorer, sample_episodes: MakeEpisodes, n: int = 6) -> list[Rollout]:
    job = make_job(sample_episodes(n))
    lora = new_lora(scorer.base.config.shape, LORA, 0, CPU)
    gathered = gather(job, select(job, 96), lora, scorer, silent, mismatched=False)
    return list(gathered.sampled.rated)


def moved_critic(scorer: Scorer) -> LoraCritic:
    """One whose adapter and head are not zero."""
    critic = new_lora_critic(scorer.base.config.shape, LORA, 5, CPU)
    generator = torch.Generator().manual_seed(5)
    for parameter in critic.parameters():
        parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.05, generator=generator))
    return critic


def targets_of(critic: LoraCritic, rollouts: list[Rollout], scorer: Scorer) -> list[Target]:
    values = critic.values(rollouts, scorer, silent)
    return [Target(r, v, torch.full_like(v, r.reward)) for r, v in zip(rollouts, values, strict=True)]


def test_t_cr_1_a_new_critic_values_every_state_at_zero(scorer: Scorer, sample_episodes: MakeEpisodes) -> None:
    critic = new_lora_critic(scorer.base.config.shape, LORA, 0, CPU)
    values = critic.values(rollouts_of(scorer, sample_episodes), scorer, silent)
    assert all(bool((one == 0).all()) for one in values)


def test_t_cr_6_a_value_is_of_the_state_before_its_token(scorer: Scorer, sample_episodes: MakeEpisodes) -> None:
    critic, rollouts = moved_critic(scorer), rollouts_of(scorer, sample_episodes)
    (value,) = critic.values([rollouts[0]], scorer, silent)
    changed = dataclasses.replace(rollouts[0], trunk=rollouts[0].trunk.clone())
    changed.trunk[-1] += 10.0  # the state behind the last token: nothing of the answer is to be foreseen there
    torch.testing.assert_close(critic.values([changed], scorer, silent)[0], value)
    changed.trunk[-2] += 10.0
    assert not torch.allclose(critic.values([changed], scorer, silent)[0][-1], value[-1])


def test_the_gradient_of_a_step_is_that_of_the_mean_loss_over_all_its_tokens(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    critic, rollouts = moved_critic(scorer), rollouts_of(scorer, sample_episodes)
    targets = targets_of(critic, rollouts, scorer)
    leaves = [parameter.clone().requires_grad_() for parameter in critic.parameters()]
    pairs = zip(leaves[0:-2:2], leaves[1:-2:2], strict=True)
    lora = dataclasses.replace(critic.lora, matrices=dict(zip(critic.lora.matrices, pairs, strict=True)))
    values = completion_states(rollouts, lora, scorer) @ leaves[-2] + leaves[-1]
    old, returns = (torch.cat([getattr(one, name) for one in targets]) for name in ("values", "returns"))
    loss = value_loss(values, old, returns, 0.2).mean()
    expected = torch.autograd.grad(PPO.value_coef * loss, leaves)
    n_tokens = returns.shape[0]
    found, its_loss = critic._gradients(targets, WITH_LORA, 0.2, scorer, n_tokens)
    assert its_loss == pytest.approx(loss.item(), rel=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    norm = float(torch.cat([one.flatten() for one in expected]).norm())
    assert critic.step(targets, WITH_LORA, 0.2, scorer, silent).grad_norm == pytest.approx(norm, rel=1e-4)


def test_it_learns_what_the_answers_ratings_are(scorer: Scorer, sample_episodes: MakeEpisodes) -> None:
    critic = new_lora_critic(scorer.base.config.shape, LORA, 0, CPU)
    targets = targets_of(critic, rollouts_of(scorer, sample_episodes), scorer)
    losses = [critic.step(targets, WITH_LORA, float("inf"), scorer, silent).loss for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]


def test_t_cr_5_an_update_trains_it_keeps_it_in_the_checkpoint_and_replays_to_the_same_bytes(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    job = make_job(sample_episodes(8), ppo=WITH_LORA)
    first, again = write_job(tmp_path / "1", job), write_job(tmp_path / "2", job)
    metrics = run_job(first, scorer, BASE_SHA256, silent).metrics
    run_job(again, scorer, BASE_SHA256, silent)
    assert hash_tree(first / "out" / "checkpoint") == hash_tree(again / "out" / "checkpoint")
    assert hash_tree(first / "out" / "adapter") == hash_tree(again / "out" / "adapter")
    assert metrics["critic/explained_variance_after"] > 0.0
    shape = scorer.base.config.shape
    fresh = new_lora_critic(shape, LORA, 99, CPU)
    learner = load_checkpoint(first / "out" / "checkpoint", new_lora(shape, LORA, 0, CPU), fresh)
    assert learner.critic.adam.steps == PPO.critic_warmup_steps + 4
    assert any(bool((b != 0).any()) for _, b in fresh.lora.matrices.values())
    other_kind = new_head_critic(shape, CPU)
    kept = load_checkpoint(first / "out" / "checkpoint", new_lora(shape, LORA, 0, CPU), other_kind)
    assert (kept.adam.steps, kept.critic.adam.steps) == (4, 0), "another kind of critic begins afresh"


def test_t_cr_3_the_critics_passes_leave_the_actor_as_it_was(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    no_steps = dataclasses.replace(WITH_LORA, epochs=0, critic_warmup_steps=10)
    folder = write_job(tmp_path / "job", make_job(sample_episodes(8), ppo=no_steps))
    run_job(folder, scorer, BASE_SHA256, silent)
    plain = write_job(tmp_path / "plain", make_job(sample_episodes(8), ppo=dataclasses.replace(PPO, epochs=0)))
    run_job(plain, scorer, BASE_SHA256, silent)
    assert hash_tree(folder / "out" / "adapter") == hash_tree(plain / "out" / "adapter")
