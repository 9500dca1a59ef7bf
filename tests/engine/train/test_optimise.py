"""The optimizer steps of an update: what moves and what does not, and that nothing depends on how a step is cut."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters.folder import load_adapter_folder
from engine.lora import Lora, new_lora
from engine.protocol import LoraSettings
from engine.train import adamw
from engine.train.critic_head import new_head_critic
from engine.train.job import run_job
from engine.train.learner import Learner
from engine.train.optimise import actor_gradients, optimise, plan_steps, score_tokens
from engine.train.scorer import Scorer
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.objectives.updates import course_of
from tests.engine.train.tiny import (
    BASE,
    BASE_SHA256,
    LORA,
    PPO,
    make_job,
    publish_lora,
    random_lora,
    silent,
    write_job,
)

ONE_STEP = dataclasses.replace(PPO, epochs=1, minibatches=1)


def adapter_bytes(folder: Path, scorer: Scorer) -> str:
    weights, _ = load_adapter_folder(folder / "out" / "adapter", scorer.base.config.shape)
    return weights.sha256()


def answers(scorer: Scorer, sample_episodes: MakeEpisodes, n: int):
    job = make_job(sample_episodes(n), ppo=ONE_STEP)
    course = course_of(job, new_lora(scorer.base.config.shape, LORA, 0, torch.device("cpu")), scorer)
    return [item.rollouts[0] for item in course.items["ppo"]]


def test_t_lora_1_every_matrix_is_trained_and_every_b_moves_in_the_first_step(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    lora = new_lora(scorer.base.config.shape, LORA, 3, torch.device("cpu"))
    n_modules = 7 * LORA.layers
    assert len(lora.parameters()) == 2 * n_modules
    assert len(adamw.new_adam_state(lora.parameters()).means) == 2 * n_modules
    folder = write_job(tmp_path / "job", make_job(sample_episodes(10), ppo=ONE_STEP))
    metrics = run_job(folder, scorer, BASE_SHA256, silent).metrics
    weights, _ = load_adapter_folder(folder / "out" / "adapter", scorer.base.config.shape)
    assert metrics["policy/steps"] == 1.0
    assert metrics["grad_norm"] > 0.0
    assert len(weights.matrices) == n_modules
    assert all(abs(b).max() > 0 for _, b in weights.matrices.values())


def test_t_lora_1_the_adapters_hash_changes_with_every_update(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    hashes = set()
    for steps in (0, 1, 2):
        ppo = dataclasses.replace(PPO, epochs=steps, minibatches=1)
        folder = write_job(tmp_path / f"{steps}", make_job(sample_episodes(10), ppo=ppo))
        run_job(folder, scorer, BASE_SHA256, silent)
        hashes.add(adapter_bytes(folder, scorer))
    assert len(hashes) == 3


def test_t_lora_3_an_adapter_as_reference_leaves_the_trained_one_trainable_and_itself_alone(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    reference = publish_lora(tmp_path / "v1", random_lora(scorer.base), 1)
    frozen = scorer.adapter(reference)
    assert frozen is not None
    before = [parameter.clone() for parameter in frozen.parameters()]
    job = make_job(sample_episodes(10, adapter=reference), parent=reference, reference=reference, version=2)
    folder = write_job(tmp_path / "job", job)
    run_job(folder, scorer, BASE_SHA256, silent)
    new, _ = load_adapter_folder(folder / "out" / "adapter", scorer.base.config.shape)
    for parameter, start in zip(frozen.parameters(), before, strict=True):
        assert torch.equal(parameter, start)
    assert all(bool((torch.tensor(b) != frozen.matrices[module][1]).any()) for module, (_, b) in new.matrices.items())


def test_t_lp_4_passes_with_and_without_gradient_score_alike_and_the_same_each_time(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    """Nothing random is in a pass: there is no dropout to be forgotten in either."""
    rollouts = answers(scorer, sample_episodes, 5)
    lora = random_lora(scorer.base)
    for parameter in lora.parameters():
        parameter.requires_grad_()
    first, second = (torch.cat([one.logprobs for one in score_tokens(rollouts, lora, scorer)]) for _ in range(2))
    assert torch.equal(first, second)
    assert first.requires_grad
    with torch.no_grad():
        without = torch.cat([one.logprobs for one in score_tokens(rollouts, lora, scorer)])
    assert torch.equal(first.detach(), without)
    assert not torch.equal(without, torch.cat([one.parent for one in rollouts])), "the adapter has an effect"


def test_t_mask_5_an_answers_logprobs_do_not_depend_on_what_it_is_computed_with(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    rollouts = answers(scorer, sample_episodes, 8)
    lora = random_lora(scorer.base)
    with torch.no_grad():
        together = score_tokens(rollouts, lora, scorer)
        alone = [score_tokens([one], lora, scorer)[0] for one in rollouts]
        pair = score_tokens([rollouts[3], rollouts[6]], lora, scorer)
    for i, one in enumerate(together):
        torch.testing.assert_close(one.logprobs, alone[i].logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(pair[1].logprobs, alone[6].logprobs, rtol=0, atol=1e-5)


def test_t_lp_8_figures_are_means_over_tokens_whatever_they_are_computed_with(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    job = make_job(sample_episodes(9), ppo=ONE_STEP)
    moved = random_lora(scorer.base)
    course = course_of(job, moved, scorer)
    (step,) = plan_steps(job, course)
    figures = {}
    for size in (16, 10_000):
        scorer.micro_batch_tokens = size
        _, figures[size] = actor_gradients(job, course, step, moved, scorer, silent)
    assert figures[16] == pytest.approx(figures[10_000], rel=1e-3, abs=1e-6)
    rollouts = [item.rollouts[0] for item in course.items["ppo"]]
    with torch.no_grad():
        logprobs = torch.cat([one.logprobs for one in score_tokens(rollouts, moved, scorer)])
    log_ratio = (logprobs - torch.cat([one.parent for one in rollouts])).double().numpy()
    assert figures[16]["policy/ratio_mean"] == pytest.approx(np.exp(log_ratio).mean(), rel=1e-3)
    # The parent sampled: r - 1 - log r, not 1/r - 1 + log r, which is that of samples from the new policy.
    assert figures[16]["policy/approx_kl"] == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean(), rel=1e-3)
    assert figures[16]["policy/approx_kl"] != pytest.approx((np.exp(-log_ratio) - 1 + log_ratio).mean(), rel=0.03)


def test_t_kl_1_t_lp_8_the_distance_that_is_told_is_that_of_the_parent_from_what_became_of_it(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    rated = sample_episodes(12)
    wild = dataclasses.replace(PPO, learning_rate=0.02, epochs=4)
    folder = write_job(tmp_path / "job", make_job(rated, ppo=wild))
    metrics = run_job(folder, scorer, BASE_SHA256, silent).metrics
    new = dataclasses.replace(BASE, version=1, folder=str(folder / "out" / "adapter"))
    only = [one.episode for one in rated]
    now, then = (
        torch.cat([one.scaled for one in scorer.measure(only, [ref] * len(only), silent)]).double().numpy()
        for ref in (new, BASE)
    )
    d = now - then
    assert metrics["kl/live"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-3)
    assert metrics["kl/live"] != pytest.approx((np.exp(-d) - 1 + d).mean(), rel=0.1)
    assert metrics["kl/reference"] == pytest.approx((np.exp(-d) - 1 + d).mean(), rel=1e-3), "of the policy from it"


def test_an_update_stops_at_live_kl_max_and_not_beyond(scorer: Scorer, sample_episodes: MakeEpisodes) -> None:
    job = make_job(sample_episodes(9), ppo=ONE_STEP)
    learner = strayed(scorer)
    course = course_of(job, learner.lora, scorer)
    (step,) = plan_steps(job, course)
    _, figures = actor_gradients(job, course, step, learner.lora, scorer, silent)
    distance = figures["policy/approx_kl"]
    assert distance > 0.01
    for bound, steps in ((1.01 * distance, 1.0), (0.99 * distance, 0.0)):
        bounded = dataclasses.replace(job, ppo=dataclasses.replace(ONE_STEP, live_kl_max=bound))
        learner = strayed(scorer)
        taken = optimise(bounded, course_of(bounded, learner.lora, scorer), learner, scorer, silent)
        assert (taken["policy/steps"], taken["policy/stopped_early"]) == (steps, 1.0 - steps)
        assert learner.adam.steps == steps


def strayed(scorer: Scorer) -> Learner:
    """A learner that is as far from the base as an update might bring it."""
    lora = random_lora(scorer.base)
    critic = new_head_critic(scorer.base.config.shape, torch.device("cpu"))
    return Learner(lora, adamw.new_adam_state(lora.parameters()), critic)


def test_weight_decay_pulls_every_matrix_towards_zero_by_the_step_size_times_it(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    job = make_job(sample_episodes(9), ppo=ONE_STEP)
    start = [one.clone() for one in strayed(scorer).lora.parameters()]
    moved = {}
    for decay in (0.0, 0.5):
        decayed = dataclasses.replace(job, ppo=dataclasses.replace(ONE_STEP, weight_decay=decay))
        learner = strayed(scorer)
        optimise(decayed, course_of(decayed, learner.lora, scorer), learner, scorer, silent)
        moved[decay] = learner.lora.parameters()
    for without, with_it, before in zip(moved[0.0], moved[0.5], start, strict=True):
        torch.testing.assert_close(without - with_it, 0.5 * PPO.learning_rate * before, rtol=1e-2, atol=1e-7)


OFFLINE = """
import sys, torch
from pathlib import Path
from engine.models import load_folder
from engine.train.job import run_job
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        raise RuntimeError(f"the network was asked for: {event} {arguments}")
sys.addaudithook(refuse)
folder, model, sha = sys.argv[1:]
scorer = Scorer(load_folder(Path(model), "float32", "cpu"), 2, Lanes(1, torch.device("cpu")))
run_job(Path(folder), scorer, sha, lambda *_: None)
"""


def test_t_off_1_training_saving_and_loading_ask_for_no_network(
    scorer: Scorer, sample_episodes: MakeEpisodes, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = write_job(tmp_path / "job", make_job(sample_episodes(8)))
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    arguments = [sys.executable, "-c", OFFLINE, str(folder), str(tiny_folder), BASE_SHA256]
    subprocess.run(arguments, check=True, timeout=200, env={**environment, "PYTHONPATH": os.getcwd()})
    adapter = dataclasses.replace(BASE, version=1, folder=str(folder / "out" / "adapter"))
    assert isinstance(scorer.adapter(adapter), Lora)


def test_t_lora_8_epsilon_is_that_of_the_ppo_replication_and_the_move_is_told(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    assert adamw.EPS == 1e-5
    metrics = run_job(write_job(tmp_path / "job", make_job(sample_episodes(8))), scorer, BASE_SHA256, silent).metrics
    assert {"lora/norm", "grad_norm", "kl/live", "policy/move_share"} <= set(metrics)


def test_t_lora_10_an_adapter_begins_the_same_whatever_was_drawn_before(scorer: Scorer) -> None:
    settings = LoraSettings(rank=2, alpha=4.0, layers=1)

    def first(seed: int) -> torch.Tensor:
        return new_lora(scorer.base.config.shape, settings, seed, torch.device("cpu")).parameters()[0]

    start = first(5)
    torch.manual_seed(1234)
    torch.rand(7)
    assert torch.equal(first(5), start)
    assert not torch.equal(first(6), start)
