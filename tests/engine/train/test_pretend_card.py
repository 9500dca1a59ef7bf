"""The whole of training on a device other than the CPU, without one: nothing is forgotten there or mixed up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters.peft import WEIGHTS_FILE
from engine.models import load_folder
from engine.protocol import OBJECTIVES, OUT_FOLDER, AdapterRef, PreferredPair, RatedEpisode, TrainJob
from engine.score.fitted import pooled_features
from engine.train.job import run_job
from engine.train.scorer import Scorer
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.pretend_card import CARD, MixedDevices, OnCard, PretendLanes, pretended
from tests.engine.train.tiny import BASE, BASE_SHA256, LORA, PPO, make_job, silent, write_job


@pytest.fixture
def card_scorer(tiny_folder: Path) -> Iterator[Scorer]:
    """The trainer on the pretended card."""
    lanes = PretendLanes()
    with pretended():
        yield Scorer(load_folder(tiny_folder, "float32", "cuda:0"), LORA.layers, lanes)
    lanes.close()


def test_a_tensor_that_was_not_moved_is_found():
    with pretended():
        on_card = torch.ones(3, device=CARD)
        assert isinstance(on_card, OnCard)
        assert on_card.device == CARD
        assert torch.equal((on_card * 2).cpu(), torch.full((3,), 2.0))
        with pytest.raises(MixedDevices):
            on_card + torch.ones(3)
        with pytest.raises(MixedDevices):
            on_card.numpy()


SHORT = dataclasses.replace(PPO, epochs=1, critic_warmup_steps=2)
JOBS: dict[str, dict[str, Any]] = {
    "ppo": {"objectives": {"ppo": 1.0}, "ppo": SHORT},
    "ppo with a critic of its own and entropy": {
        "objectives": {"ppo": 1.0},
        "ppo": dataclasses.replace(SHORT, critic="lora", entropy_coef=0.01, kl_target=0.1),
    },
    "every other objective": {
        "ppo": SHORT,
        "objectives": {name: 1.0 for name in OBJECTIVES if name != "ppo"},
    },
}


@pytest.mark.parametrize("changes", JOBS.values(), ids=JOBS.keys())
def test_an_update_stays_on_its_device_and_gives_what_the_cpu_gives(
    changes: dict[str, Any], card_scorer: Scorer, scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
):
    job = whole_job(sample_episodes(8), changes)
    run_job(write_job(tmp_path / "cpu", job), scorer, BASE_SHA256, silent)
    with pretended():
        assert isinstance(card_scorer.base.embedding, OnCard)
        run_job(write_job(tmp_path / "card", job), card_scorer, BASE_SHA256, silent)
    ours, theirs = (load_file(tmp_path / side / OUT_FOLDER / "adapter" / WEIGHTS_FILE) for side in ("card", "cpu"))
    for name, matrix in ours.items():
        # A step of Adam is of the size of the learning rate however small the gradient is, and attention has another
        # kernel there: a gradient near zero may round to either sign.
        torch.testing.assert_close(matrix, theirs[name], rtol=0, atol=1e-4)


def test_the_next_update_takes_adapter_and_checkpoint_to_its_device(
    card_scorer: Scorer, scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
):
    first = make_job(sample_episodes(2), ppo=dataclasses.replace(SHORT, critic="lora"))
    out = write_job(tmp_path / "first", first) / OUT_FOLDER
    run_job(out.parent, scorer, BASE_SHA256, silent)
    parent, state = AdapterRef(version=1, folder=str(out / "adapter")), str(out / "checkpoint")
    second = dataclasses.replace(first, job_id="job-2", version=2, parent=parent, checkpoint=state)
    with pretended():
        result = run_job(write_job(tmp_path / "second", second), card_scorer, BASE_SHA256, silent)
    assert result.metrics["checkpoint/lost"] == 0.0


def test_scoring_ahead_stays_on_its_device_and_gives_what_the_cpu_gives(
    card_scorer: Scorer, scorer: Scorer, sample_episodes: MakeEpisodes
):
    episodes = [rated.episode for rated in sample_episodes(3)]
    with pretended():
        ours = card_scorer.score(episodes, BASE, silent)
    for mine, its in zip(ours, scorer.score(episodes, BASE, silent), strict=True):
        assert mine.reference_logprob == pytest.approx(its.reference_logprob, abs=1e-5)


def test_features_of_a_fitted_judge_stay_on_their_device(card_scorer: Scorer, scorer: Scorer):
    with pretended():
        on_card = pooled_features(card_scorer.base, (3, 4, 5), (6, 7, 2))
    assert on_card == pytest.approx(pooled_features(scorer.base, (3, 4, 5), (6, 7, 2)), abs=1e-5)


def whole_job(rated: list[RatedEpisode], changes: dict[str, Any]) -> TrainJob:
    """Something of everything that objectives feed on: groups of three, greedy answers, pairs and
    corrections; and all prompts begin alike."""
    rated = [
        dataclasses.replace(one, episode=dataclasses.replace(one.episode, prompt_ids=(7, 8, *one.episode.prompt_ids)))
        for one in rated
    ]
    grouped = [dataclasses.replace(one, group=f"group-{i // 3}") for i, one in enumerate(rated[:6])]
    greedy = [
        dataclasses.replace(one, episode=dataclasses.replace(one.episode, temperature=0.0), reward=reward)
        for one, reward in zip(rated[6:], (1.0, -1.0), strict=True)
    ]
    answers = [dataclasses.replace(one.episode, episode_id=-i - 1, temperature=1.0) for i, one in enumerate(rated)]
    pair = PreferredPair(chosen=answers[0], rejected=answers[1])
    return make_job([*grouped, *greedy], pairs=(pair,), corrections=tuple(answers[2:4]), **changes)
