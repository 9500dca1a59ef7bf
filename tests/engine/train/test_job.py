"""Jobs as folders: what an update changes and what it must not, replays, failures, and resuming from a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.folder import load_adapter_folder
from adapters.weights import AdapterWeights
from engine.lora import Lora
from engine.models import Base
from engine.protocol import EngineNoise, RatedEpisode, TrainResult
from engine.train import job as job_module
from engine.train import optimise
from engine.train.checkpoint import load_checkpoint
from engine.train.critic_head import new_head_critic
from engine.train.job import JobFailed, run_job
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer
from tests import faults
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.tiny import (
    BASE,
    BASE_SHA256,
    LORA,
    PPO,
    hash_tree,
    make_job,
    publish_lora,
    random_lora,
    silent,
    write_job,
)


def run(folder: Path, scorer: Scorer) -> TrainResult:
    return run_job(folder, scorer, BASE_SHA256, silent)


def hash_base(base: Base) -> list[int]:
    tensors = [base.embedding, base.final_norm]
    tensors += [linear.weight for block in base.blocks for linear in block.linears.values()]
    return [hash(tensor.numpy().tobytes()) for tensor in tensors]


def test_an_update_writes_a_complete_adapter_that_differs_from_its_parent(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    folder = write_job(tmp_path / "update-1", make_job(sample_episodes(12)))
    result = run(folder, scorer)
    weights, manifest = load_adapter_folder(folder / "out" / "adapter", scorer.base.config.shape)
    assert (manifest.version, manifest.parent, manifest.base_sha256) == (1, 0, BASE_SHA256)
    assert all(abs(b).max() > 0 for _, b in weights.matrices.values()), "T-LORA-1: every B has moved"
    assert result.metrics["lora/norm"] == pytest.approx(weights.norm())
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.canary != result.parent_canary
    assert not (folder / "out.tmp").exists()
    stored = job_module.load_result(folder)
    assert stored == dataclasses.replace(result, seconds=stored.seconds), "all but the last part of the export"
    assert stored.seconds.keys() == result.seconds.keys()


STAGES = ("load", "gather", "value", "optimise", "measure", "canary", "export")


def test_a_job_tells_where_all_of_its_time_went_and_how_busy_it_was(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    episodes = sample_episodes(12)
    folder = write_job(tmp_path / "job", make_job(episodes))
    began = time.perf_counter()
    result = run(folder, scorer)
    wall_s = time.perf_counter() - began
    assert tuple(result.seconds) == STAGES
    assert all(seconds > 0.0 for seconds in result.seconds.values())
    assert 0.9 * wall_s < sum(result.seconds.values()) <= wall_s
    assert 0.0 < result.usage["busy/lanes"] <= 1.0
    assert result.usage["busy/cores"] > 0.0
    assert result.usage["bytes/between_ranks"] == 0.0
    assert result.usage["ahead/score_s"] == 0.0
    lengths = [len(one.episode.prompt_ids) + len(one.episode.completion_ids) for one in episodes]
    assert result.usage["tokens/all"] == sum(lengths)


def test_an_update_of_answers_that_were_scored_ahead_tells_the_time_that_took(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    rated = sample_episodes(8)
    began = time.perf_counter()
    scorer.score([one.episode for one in (*rated, *sample_episodes(8, seed=9))], BASE, silent)
    wall_s = time.perf_counter() - began
    result = run(write_job(tmp_path / "job", make_job(rated)), scorer)
    assert 0.0 < result.usage["ahead/score_s"] < wall_s, "its own half of what was scored"


def test_t_lp_3_at_the_first_step_the_ratio_is_one_and_nothing_is_clipped(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    one_step = dataclasses.replace(PPO, epochs=1, minibatches=1)
    metrics = run(write_job(tmp_path / "job", make_job(sample_episodes(12), ppo=one_step)), scorer).metrics
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ppo/clip_frac"] == 0.0
    assert metrics["policy/approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["policy/first_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["ppo/kl_loss"] == pytest.approx(0.0, abs=1e-9), "T-KL-4: a fresh adapter has no effect"
    assert metrics["is/weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["grad_norm"] > 0, "T-PPO-7"


def test_t_lp_3_the_ratio_is_one_after_saving_and_loading_an_adapter_too(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    parent = publish_lora(tmp_path / "v1", random_lora(scorer.base), 1)
    one_step = dataclasses.replace(PPO, epochs=1, minibatches=1)
    job = make_job(sample_episodes(10, adapter=parent), parent=parent, version=2, ppo=one_step)
    metrics = run(write_job(tmp_path / "job", job), scorer).metrics
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/first_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["ppo/kl_loss"] > 0


def test_t_is_1_a_replayed_answer_is_weighted_against_its_sampler_and_clipped_against_the_parent(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    parent = publish_lora(tmp_path / "v1", random_lora(scorer.base), 1)
    episodes = sample_episodes(10)  # by the base, so the parent is another policy
    one_step = dataclasses.replace(PPO, epochs=1, minibatches=1)
    job = make_job(episodes, parent=parent, version=2, ppo=one_step)
    metrics = run(write_job(tmp_path / "job", job), scorer).metrics
    only = [rated.episode for rated in episodes]
    new, old = (scorer.measure(only, [adapter] * len(only), silent) for adapter in (parent, BASE))
    weights = torch.cat([(a.scaled - b.scaled).exp() for a, b in zip(new, old, strict=True)]).clamp(max=2.0)
    assert metrics["is/weight_mean"] == pytest.approx(float(weights.mean()), rel=1e-4)
    assert 0.0 < metrics["is/ess"] < 1.0
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ppo/clip_frac"] == 0.0
    assert metrics["is/on_policy"] == 0.0
    assert "is/engine_gap" not in metrics


def test_t_lora_4_the_base_is_bit_identical_after_an_update(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    before = hash_base(scorer.base)
    run(write_job(tmp_path / "job", make_job(sample_episodes(8))), scorer)
    assert hash_base(scorer.base) == before


def test_liked_answers_become_likelier_and_disliked_ones_less_likely(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    episodes = sample_episodes(16)
    strong = dataclasses.replace(PPO, learning_rate=5e-3, epochs=4, kl_coef=0.0)
    folder = write_job(tmp_path / "job", make_job(episodes, ppo=strong))
    run(folder, scorer)
    moved = logprob_moves(scorer, episodes, folder)
    liked = [move for move, rated in zip(moved, episodes, strict=True) if rated.reward > 0]
    disliked = [move for move, rated in zip(moved, episodes, strict=True) if rated.reward < 0]
    assert sum(liked) / len(liked) > 0.05
    assert sum(disliked) / len(disliked) < -0.05


def logprob_moves(scorer: Scorer, episodes: list[RatedEpisode], folder: Path) -> list[float]:
    """Per episode, by how much the update in `folder` raised the mean log-probability of its tokens."""
    new = dataclasses.replace(BASE, version=1, folder=str(folder / "out" / "adapter"))
    only = [rated.episode for rated in episodes]
    before = scorer.measure(only, [BASE] * len(only), silent)
    after = scorer.measure(only, [new] * len(only), silent)
    return [float((b.scaled - a.scaled).mean()) for a, b in zip(before, after, strict=True)]


def test_the_kl_penalty_keeps_the_policy_near_the_reference(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    episodes = sample_episodes(16)
    kl = {}
    for coefficient in (0.0, 5.0):
        ppo = dataclasses.replace(PPO, learning_rate=5e-3, epochs=6, kl_coef=coefficient)
        kl[coefficient] = run(write_job(tmp_path / f"job-{coefficient}", make_job(episodes, ppo=ppo)), scorer).metrics[
            "kl/reference"
        ]
    assert kl[5.0] < kl[0.0] / 2


def test_a_move_beyond_live_kl_max_stops_the_epochs_and_is_shortened(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    wild = dataclasses.replace(PPO, learning_rate=0.05, epochs=6, live_kl_max=0.05)
    result = run(write_job(tmp_path / "job", make_job(sample_episodes(16), ppo=wild)), scorer)
    assert result.metrics["kl/live"] <= 0.05
    assert result.metrics["policy/stopped_early"] == 1.0
    assert result.metrics["policy/steps"] < 12
    assert result.metrics["policy/move_share"] < 1.0


def test_t_cr_2_the_critics_warm_up_leaves_the_actor_bit_identical(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    # No epoch at all: everything but the actor's own steps runs.
    no_steps = dataclasses.replace(PPO, epochs=0, critic_warmup_steps=20)
    folder = write_job(tmp_path / "job", make_job(sample_episodes(12), ppo=no_steps))
    metrics = run(folder, scorer).metrics
    weights, _ = load_adapter_folder(folder / "out" / "adapter", scorer.base.config.shape)
    assert metrics["critic/warmup_steps"] == 20
    assert all(not b.any() for _, b in weights.matrices.values())


def test_two_runs_of_one_job_give_the_same_bytes_whatever_was_scored_before(
    tiny_base: Base, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    episodes = sample_episodes(12)
    trees, results = [], []
    first = write_job(tmp_path / "first", make_job(episodes))
    second = Path(shutil.copytree(first, tmp_path / "second"))
    for folder, n_threads, ahead in ((first, 2, False), (second, 1, True)):
        lanes = Lanes(n_threads, torch.device("cpu"))
        fresh = Scorer(tiny_base, LORA.layers, lanes)
        if ahead:  # in another order, and with strangers among them
            fresh.score([rated.episode for rated in reversed(episodes + sample_episodes(5, seed=9))], BASE, silent)
        results.append(dataclasses.replace(run(folder, fresh), seconds={}, usage={}))
        trees.append({k: v for k, v in hash_tree(folder / "out").items() if k != "result.msgpack"})
        lanes.close()
    assert trees[0] == trees[1]
    assert results[0] == results[1]


REPLAY = """
import sys, torch
from pathlib import Path
from engine.models import load_folder
from engine.train.job import run_job
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer
folder, model, sha = sys.argv[1:]
scorer = Scorer(load_folder(Path(model), "float32", "cpu"), 2, Lanes(2, torch.device("cpu")))
run_job(Path(folder), scorer, sha, lambda *_: None)
"""


def test_t_res_1_a_fresh_process_replays_a_job_to_the_same_bytes(
    scorer: Scorer, sample_episodes: MakeEpisodes, tiny_folder: Path, tmp_path: Path
) -> None:
    first = write_job(tmp_path / "first", make_job(sample_episodes(12)))
    second = Path(shutil.copytree(first, tmp_path / "second"))
    (second / "out.tmp" / "adapter").mkdir(parents=True)  # what a killed run leaves
    run(first, scorer)
    arguments = [sys.executable, "-c", REPLAY, str(second), str(tiny_folder), BASE_SHA256]
    subprocess.run(arguments, check=True, timeout=200, env={**os.environ, "PYTHONPATH": os.getcwd()})
    trees = [hash_tree(folder / "out") for folder in (first, second)]
    for tree in trees:
        del tree["result.msgpack"]  # holds the seconds it took
    assert trees[0] == trees[1]


def test_t_res_1_killed_or_out_of_space_at_any_write_a_job_leaves_all_or_nothing_and_replays_to_the_same_bytes(
    sample_episodes: MakeEpisodes, tiny_folder: Path, tmp_path: Path
) -> None:
    short = dataclasses.replace(PPO, epochs=1, minibatches=1, critic_warmup_steps=1)
    template = write_job(tmp_path / "template", make_job(sample_episodes(4), ppo=short))
    command = [sys.executable, "-m", "tests.engine.train.faulty_jobs", str(tiny_folder), str(template)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(command, check=True, timeout=600, env=environment, stdout=subprocess.PIPE, text=True)
    cases = json.loads(ended.stdout)
    points = [case["point"] for case in cases if case["fault"] == "killed"]
    assert points.count("open") >= 7, "four files of the adapter, two of the checkpoint, and the result"
    assert points.count("os.rename") == 1
    nothing, everything = ["job.msgpack"], ["job.msgpack", "out"]
    for case in cases:
        assert case["replayed"], case
        if case["fault"] == "killed":
            assert (case["code"], case["left"]) in ((-9, nothing), (-9, [*nothing, "out.tmp"])), case
        else:
            assert (case["code"], case["left"]) in ((faults.REFUSED, nothing), (faults.DONE, everything)), case
    refused = [case for case in cases if case["code"] == faults.REFUSED]
    assert len(refused) >= 7, "every file but those that fit into what is left of the disk"


def test_a_finished_job_is_not_run_again(scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job", make_job(sample_episodes(8)))
    result = run(folder, scorer)
    before = hash_tree(folder)
    assert run(folder, scorer) == dataclasses.replace(result, seconds=job_module.load_result(folder).seconds)
    assert hash_tree(folder) == before


def test_training_goes_on_from_adapter_and_checkpoint(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    first = write_job(tmp_path / "1", make_job(sample_episodes(12)))
    run(first, scorer)
    parent = dataclasses.replace(BASE, version=1, folder=str(first / "out" / "adapter"))
    checkpoint = first / "out" / "checkpoint"
    episodes = sample_episodes(12, seed=2, adapter=parent)
    job = make_job(episodes, version=2, parent=parent, checkpoint=str(checkpoint))
    second = write_job(tmp_path / "2", job)
    metrics = run(second, scorer).metrics
    assert (metrics["critic/warmup_steps"], metrics["checkpoint/lost"]) == (0, 0)
    lora = scorer.adapter(parent)
    assert lora is not None
    fresh = new_head_critic(scorer.base.config.shape, torch.device("cpu"))
    learner = load_checkpoint(second / "out" / "checkpoint", lora, fresh)
    assert learner.adam.steps == 8
    assert learner.critic.adam.steps == PPO.critic_warmup_steps + 8


def state(folder: Path) -> dict[str, Any]:
    """What the checkpoint of a finished job says beside its tensors."""
    read: dict[str, Any] = json.loads((folder / "out" / "checkpoint" / "state.json").read_text())
    return read


def test_t_cr_4_the_running_mean_is_of_new_ratings_and_not_of_those_that_are_seen_again(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    rated = sample_episodes(8)
    again = [dataclasses.replace(one, reward=-1.0, replay=True) for one in rated[:3]]
    new = [dataclasses.replace(one, reward=reward) for one, reward in zip(rated[3:], (1, 0.5, 1, 0.5, 1), strict=True)]
    folder = write_job(tmp_path / "job", make_job([*again, *new]))
    run(folder, scorer)
    assert state(folder)["baseline"]["mean"] == pytest.approx(0.8)


def steered_job(scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path, target: float, **changes: Any) -> Path:
    """A job that hardly moves, of a parent that is far from the reference: of the two distances only one is small."""
    tmp_path.mkdir(exist_ok=True)
    parent = publish_lora(tmp_path / "parent", random_lora(scorer.base, size=0.2), 1)
    ppo = dataclasses.replace(PPO, learning_rate=1e-6, epochs=1, kl_target=target, kl_coef=0.1)
    job = make_job(sample_episodes(16, adapter=parent), parent=parent, version=2, ppo=ppo, **changes)
    return write_job(tmp_path / "job", job)


def test_the_penaltys_weight_is_steered_by_the_distance_from_the_reference(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    coefs = {}
    for name, target in (("near", 1e-3), ("far", 100.0)):
        folder = steered_job(scorer, sample_episodes, tmp_path / name, target)
        metrics = run(folder, scorer).metrics
        assert metrics["kl/live"] < 1e-3 < 0.01 < metrics["kl/reference"] < 100.0
        coefs[name] = state(folder)["penalty"]["coef"]
    # The error is beyond its bound of a fifth either way, and 16 answers of 160 make a tenth of that.
    assert coefs == {"near": pytest.approx(0.1 * 1.02), "far": pytest.approx(0.1 * 0.98)}


@pytest.mark.parametrize(("setting", "expected"), [(0.1, 0.1 * 1.02), (5.0, 5.0), (0.01, 0.01)])
def test_a_weight_of_the_penalty_that_is_set_anew_is_where_the_controller_begins_anew(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path, setting: float, expected: float
) -> None:
    first = steered_job(scorer, sample_episodes, tmp_path, 1e-3)
    run(first, scorer)
    job = job_module.load_job(first)
    parent = dataclasses.replace(BASE, version=2, folder=str(first / "out" / "adapter"))
    later = dataclasses.replace(
        job,
        version=3,
        parent=parent,
        checkpoint=str(first / "out" / "checkpoint"),
        ppo=dataclasses.replace(job.ppo, kl_coef=setting),
    )
    folder = write_job(tmp_path / "later", later)
    assert run(folder, scorer).metrics["kl/coef"] == pytest.approx(expected)
    assert state(folder)["penalty"] == {"coef": pytest.approx(expected * 1.02), "began_at": setting}


def failing(folder: Path, scorer: Scorer) -> JobFailed:
    with pytest.raises(JobFailed) as caught:
        run(folder, scorer)
    assert sorted(path.name for path in folder.iterdir()) == ["job.msgpack"], "nothing was written"
    return caught.value


def test_a_batch_without_usable_episodes_fails_as_batch_empty(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    (rated,) = sample_episodes(1)
    missing = dataclasses.replace(rated.episode, logprobs=(None,) * len(rated.episode.completion_ids))
    job = make_job([dataclasses.replace(rated, episode=missing), dataclasses.replace(rated, reward=float("nan"))])
    failure = failing(write_job(tmp_path / "job", job), scorer)
    assert failure.code == "batch_empty"
    assert failure.details == {"no_behaviour_logprob": 1, "reward_not_finite": 1}


def test_dropped_episodes_are_counted_and_the_others_trained_on(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    episodes = sample_episodes(9)
    episodes[4] = dataclasses.replace(
        episodes[4], episode=dataclasses.replace(episodes[4].episode, completion_ids=(), logprobs=())
    )
    result = run(write_job(tmp_path / "job", make_job(episodes)), scorer)
    assert result.dropped == {"empty": 1}
    assert result.metrics["episodes"] == 8


def off_by(rated: RatedEpisode, nats: float) -> RatedEpisode:
    """The answer as if its sampler had found each token `nats` less likely than the trainer does."""
    logprobs = tuple(p - nats for p in rated.episode.logprobs if p is not None)
    return dataclasses.replace(rated, episode=dataclasses.replace(rated.episode, logprobs=logprobs))


NOISE = EngineNoise(bias=0.0, spread=0.05, tokens=8.0, temperature=0.7)


def test_t_is_2_an_answer_that_the_server_does_not_compute_as_the_trainer_is_left_out_by_its_name(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    episodes = sample_episodes(10)
    wrong = [off_by(episodes[3], 0.5), off_by(episodes[7], -0.5)]
    mixed = [*episodes[:3], wrong[0], *episodes[4:7], wrong[1], *episodes[8:]]
    right = [*episodes[:3], *episodes[4:7], *episodes[8:]]
    with_them = run(write_job(tmp_path / "mixed", make_job(mixed, noise=NOISE)), scorer)
    without = run(write_job(tmp_path / "right", make_job(right, noise=NOISE)), scorer)
    assert (with_them.dropped, without.dropped) == ({"engine_mismatch": 2}, {})
    assert with_them.metrics == without.metrics, "they are in no advantage, no mean and no figure"
    assert with_them.metrics["is/sequence_max"] == pytest.approx(1.0, abs=1e-4)
    uncalibrated = run(write_job(tmp_path / "uncalibrated", make_job(mixed)), scorer)
    assert uncalibrated.dropped == {}
    assert uncalibrated.metrics["is/sequence_max"] == pytest.approx(math.exp(0.5), rel=1e-4)


def test_t_is_2_a_batch_that_another_policy_gave_is_refused_and_counted(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    job = make_job([off_by(rated, 0.5) for rated in sample_episodes(8)], noise=NOISE)
    failure = failing(write_job(tmp_path / "job", job), scorer)
    assert (failure.code, failure.details) == ("batch_empty", {"engine_mismatch": 8})


def test_t_is_3_a_batch_of_which_the_weights_leave_too_little_is_refused_and_counted(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    # One answer with all the weight: the others' tokens were all but certain to who sampled them.
    first, *others = sample_episodes(12)
    certain = [dataclasses.replace(one.episode, logprobs=(-0.001,) * len(one.episode.completion_ids)) for one in others]
    job = make_job([first, *[dataclasses.replace(o, episode=e) for o, e in zip(others, certain, strict=True)]])
    failure = failing(write_job(tmp_path / "job", job), scorer)
    assert (failure.code, failure.details) == ("batch_empty", {"low_effective_share": 12})
    assert "are worth" in failure.message


def test_t_mask_4_t_stale_1_t_lora_8_an_update_tells_of_cut_answers_their_ages_and_how_far_it_moved(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    v1, v2 = (publish_lora(tmp_path / f"v{n}", random_lora(scorer.base, seed=n), n) for n in (1, 2))
    episodes = [*sample_episodes(3, adapter=v2), *sample_episodes(1, seed=1, adapter=v1)]
    ended = dataclasses.replace(episodes[0].episode, completion_ids=(*episodes[0].episode.completion_ids[:-1], 2))
    episodes[0] = dataclasses.replace(episodes[0], episode=ended)
    old = dataclasses.replace(sample_episodes(1, seed=2)[0], replay=True)
    folder = write_job(tmp_path / "job", make_job([*episodes, old], parent=v2, version=3))
    metrics = run(folder, scorer).metrics
    assert metrics["episodes/cut_share"] == 3 / 4, "of the new ones"
    assert (metrics["is/age_mean"], metrics["is/age_max"]) == (pytest.approx(3 / 5), 2.0)
    parent, _ = load_adapter_folder(tmp_path / "v2", scorer.base.config.shape)
    child, _ = load_adapter_folder(folder / "out" / "adapter", scorer.base.config.shape)
    moved = sum(float(((new - old_) ** 2).sum()) for new, old_ in zip(flat(child), flat(parent), strict=True))
    size = sum(float((one**2).sum()) for one in flat(child))
    assert metrics["lora/move_share"] == pytest.approx(math.sqrt(moved / size), rel=1e-3)


def flat(weights: AdapterWeights) -> list[Any]:
    return [matrix for module in sorted(weights.matrices) for matrix in weights.matrices[module]]


def test_a_number_that_is_not_finite_voids_the_update(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = optimise.token_logprobs

    def poisoned(*arguments: torch.Tensor) -> torch.Tensor:
        return honest(*arguments) * float("nan")

    monkeypatch.setattr(optimise, "token_logprobs", poisoned)
    assert failing(write_job(tmp_path / "job", make_job(sample_episodes(8))), scorer).code == "not_finite"


def test_an_adapter_that_was_damaged_on_disk_is_refused(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    parent = publish_lora(tmp_path / "v1", random_lora(scorer.base), 1)
    weights = tmp_path / "v1" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = b"\xff\xff\xff\xff"
    weights.write_bytes(data)
    job = make_job(sample_episodes(8), parent=parent, version=2)
    assert failing(write_job(tmp_path / "job", job), scorer).code == "adapter_unreadable"


def test_an_adapter_of_another_model_is_refused(scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path) -> None:
    wide = dataclasses.replace(scorer.base.config.shape, n_ff=64)
    lora = random_lora(scorer.base)
    matrices = {m: (a.clone(), b.clone()) for m, (a, b) in lora.matrices.items()}
    for module in list(matrices):
        n_out, n_in = wide.module_shape(module)
        matrices[module] = (torch.ones(4, n_in), torch.ones(n_out, 4))
    parent = publish_lora(tmp_path / "v1", Lora(shape=wide, rank=4, alpha=8.0, matrices=matrices), 1)
    job = make_job(sample_episodes(8), parent=parent, version=2)
    assert failing(write_job(tmp_path / "job", job), scorer).code == "adapter_mismatch"


def test_a_job_for_another_base_or_no_job_at_all_is_refused(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    other = write_job(tmp_path / "other", make_job(sample_episodes(8), base_sha256="6" * 64))
    assert failing(other, scorer).code == "bad_job"
    torn = write_job(tmp_path / "torn", make_job(sample_episodes(8)))
    data = (torn / "job.msgpack").read_bytes()
    (torn / "job.msgpack").write_bytes(data[: len(data) // 2])
    assert failing(torn, scorer).code == "bad_job"
    unheard = make_job(sample_episodes(8), objectives={"telepathy": 1.0})
    assert failing(write_job(tmp_path / "unheard", unheard), scorer).code == "bad_job"
    weightless = make_job(sample_episodes(8), objectives={"ppo": 0.0})
    assert failing(write_job(tmp_path / "weightless", weightless), scorer).code == "bad_job"
    for number, change in enumerate(({"minibatches": 0}, {"epochs": -1}, {"kl_target": -1.0}, {"kl_target": math.nan})):
        wrong = make_job(sample_episodes(2), ppo=dataclasses.replace(PPO, **change))  # type: ignore[arg-type]
        assert failing(write_job(tmp_path / f"wrong {number}", wrong), scorer).code == "bad_job"


@pytest.mark.parametrize("damage", ["missing", "cut", "other_rank", "no_json"])
def test_a_checkpoint_that_cannot_be_read_costs_its_state_and_no_rating(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path, damage: str
) -> None:
    first = write_job(tmp_path / "first", make_job(sample_episodes(8)))
    run(first, scorer)
    checkpoint = first / "out" / "checkpoint"
    match damage:
        case "missing":
            shutil.rmtree(checkpoint)
        case "cut":
            data = (checkpoint / "state.safetensors").read_bytes()
            (checkpoint / "state.safetensors").write_bytes(data[: len(data) // 2])
        case "other_rank":
            state = json.loads((checkpoint / "state.json").read_text())
            (checkpoint / "state.json").write_text(json.dumps({**state, "rank": 3}))
        case "no_json":
            (checkpoint / "state.json").write_bytes(b"\xff{")
    parent = dataclasses.replace(BASE, version=1, folder=str(first / "out" / "adapter"))
    episodes = sample_episodes(8, seed=2, adapter=parent)
    job = make_job(episodes, version=2, parent=parent, checkpoint=str(checkpoint))
    one, again = write_job(tmp_path / "1", job), write_job(tmp_path / "2", job)
    metrics = run(one, scorer).metrics
    assert metrics["checkpoint/lost"] == 1.0
    assert metrics["critic/warmup_steps"] == PPO.critic_warmup_steps
    run(again, scorer)
    assert hash_tree(one / "out" / "checkpoint") == hash_tree(again / "out" / "checkpoint")


def test_a_full_disk_leaves_nothing_behind(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job_module, "publish_folder", full)
    folder = write_job(tmp_path / "job", make_job(sample_episodes(8)))
    failure = failing(folder, scorer)
    assert failure.code == "engine_error"
    assert "No space left" in failure.message


def test_an_adapter_on_more_blocks_than_usual_is_trained_too(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    everywhere = dataclasses.replace(LORA, layers=0)
    folder = write_job(tmp_path / "fresh", make_job(sample_episodes(8), lora=everywhere))
    run(folder, scorer)
    weights, _ = load_adapter_folder(folder / "out" / "adapter", scorer.base.config.shape)
    assert len(weights.matrices) == 4 * 7
    parent = publish_lora(tmp_path / "v1", random_lora(scorer.base, layers=0), 1)
    job = make_job(sample_episodes(8, seed=1, adapter=parent), parent=parent, version=2)
    assert run(write_job(tmp_path / "next", job), scorer).metrics["policy/first_kl"] == pytest.approx(0.0, abs=1e-9)
