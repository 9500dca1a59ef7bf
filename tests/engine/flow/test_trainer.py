"""The engine from a script, on the real model: the page's code, groups of answers, going on, and what is refused."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from adapters.folder import load_adapter_folder
from adapters.llamacpp_format import read_base_shape
from adapters.peft import WEIGHTS_FILE
from adapters.store import list_versions
from engine.children import ChildLost
from engine.flow import Answer, Flow, FlowError, Trainer
from engine.flow.verdicts import verdicts
from engine.protocol import LoraSettings, PpoSettings, Sampling

PAGE = Path(__file__).parents[3] / "docs" / "flow.md"
PROMPTS = ["What is a cat?", "Name a color.", "Where is Rome?", "Why do birds sing?"]
ROUNDS = 3  # of the page
BRIEF = Sampling(temperature=0.7, max_tokens=12, seed=3)
QUICK = PpoSettings(epochs=1, critic_warmup_steps=3)
SMALL = LoraSettings(rank=4, alpha=8.0, layers=2)


def by_length(answers: Sequence[Answer]) -> list[float | None]:
    return [1.0 - len(answer.text) / 60 for answer in answers]


@pytest.mark.real_model
def test_the_pages_code_runs_as_it_stands_and_its_rewards_rise(
    packaged_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(code, {"model": packaged_model, "folder": tmp_path, "prompts": PROMPTS})
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told[:ROUNDS]] == [str(n + 1) for n in range(ROUNDS)]
    means = [float(line.split()[1]) for line in told[:ROUNDS]]
    assert means[-1] > means[0], means
    assert len(told) > ROUNDS
    versions = list_versions(tmp_path / "adapters")
    assert [found.version for found in versions] == list(range(1, ROUNDS + 1))
    weights, manifest = load_adapter_folder(versions[-1].path, read_base_shape(packaged_model))
    assert (manifest.parent, manifest.origin) == (ROUNDS - 1, "trained")
    assert weights.norm() > 0.0


@pytest.mark.real_model
def test_groups_of_answers_are_compared_and_a_folder_with_adapters_goes_on(
    packaged_model: Path, tmp_path: Path
) -> None:
    flow = Flow(
        model=packaged_model,
        folder=tmp_path,
        reward=by_length,
        objectives={"grpo": 1.0},
        actor=SMALL,
        ppo=QUICK,
        sampling=BRIEF,
    )
    with Trainer(flow) as trainer:
        (first,) = trainer.run(PROMPTS[:2], rounds=1, answers=3)
        assert [answer.messages[0].content for answer in first.answers] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
        assert {answer.version for answer in first.answers} == {0}
        assert (trainer.version, trainer.ask("Hi").version) == (1, 1)
    with Trainer(flow) as trainer:
        assert trainer.version == 1
        (second,) = trainer.run(PROMPTS[:2], rounds=1, answers=3)
        assert {answer.version for answer in second.answers} == {1}
        assert second.metrics["checkpoint/lost"] == 0.0
        assert second.version == trainer.version == 2


@pytest.mark.real_model
def test_a_round_that_cannot_be_learned_from_is_told_of_and_the_run_goes_on(
    packaged_model: Path, tmp_path: Path
) -> None:
    opinions: list[list[np.float32 | float | None]] = [
        [None, None],
        [math.nan, math.nan],
        [np.float32(0.5), np.float32(0.5)],
        [np.float32(-3.0), np.float32(0.5)],
    ]
    flow = Flow(
        model=packaged_model,
        folder=tmp_path,
        reward=lambda answers: opinions.pop(0),
        objectives={"grpo": 1.0, "kto": 0.3},
        actor=SMALL,
        ppo=QUICK,
        sampling=BRIEF,
    )
    with Trainer(flow) as trainer:
        nobody, nothing, equal, learned = trainer.run(PROMPTS[:1], rounds=4, answers=2)
        assert [round_.version for round_ in (nobody, nothing, equal, learned)] == [0, 0, 0, 1]
        assert nobody.skipped == {"no_opinion": 2}
        assert nothing.skipped == {"reward_not_finite": 2}
        assert equal.skipped["grpo_equal_rewards"] == 2
        assert "2 grpo_equal_rewards" in equal.no_update
        for round_ in (nobody, nothing, equal):
            assert (dict(round_.metrics), round_.idle) == ({}, ("grpo", "kto"))
        assert (learned.no_update, learned.idle) == ("", ("kto",)), "what grpo learns from, kto is not given"
        assert (learned.rewards, learned.mean_reward, learned.clipped) == ((-1.0, 0.5), -0.25, 1)
        assert learned.metrics["reward/mean"] == -0.25
        assert list(tmp_path.glob("jobs/*")) == []


@pytest.mark.real_model
def test_what_a_worker_cannot_do_is_an_error_and_leaves_nothing_behind(packaged_model: Path, tmp_path: Path) -> None:
    flow = Flow(model=packaged_model, folder=tmp_path, reward=by_length, actor=SMALL, ppo=QUICK, sampling=BRIEF)
    with Trainer(flow) as trainer:
        with pytest.raises(ValueError, match="got 0 prompts"):
            trainer.run([], rounds=1)
        with pytest.raises(FlowError, match="context_length_exceeded"):
            trainer.ask("word " * 10_000)
        assert trainer.ask("Hi").text
        with pytest.raises(FlowError, match="context_length_exceeded"):
            trainer.sample([PROMPTS[0], "word " * 10_000, PROMPTS[1]])
        asked = trainer.sample(PROMPTS)
        assert [answer.messages[0].content for answer in asked] == PROMPTS, "nothing is left of the one that failed"
        os.kill(trainer._serve.pid, signal.SIGKILL)
        with pytest.raises(ChildLost, match="the serve worker has died"):
            trainer.ask("Hi")


@pytest.mark.real_model
def test_roles_on_devices_of_their_own_learn_what_one_process_would(packaged_model: Path, tmp_path: Path) -> None:
    weights, answers = [], list[Answer]()
    for name, devices, threads in (("one", {}, 1), ("two", {"critic": "cpu:1", "reference": "cpu:1"}, 2)):
        flow = Flow(
            model=packaged_model,
            folder=tmp_path / name,
            reward=lambda answers: [1.0, -1.0],
            actor=SMALL,
            ppo=QUICK,
            sampling=BRIEF,
            devices=devices,  # type: ignore[arg-type]
            threads=threads,
        )
        with Trainer(flow) as trainer:
            # The same answers to both, whatever threads the server has.
            answers = answers or trainer.sample(PROMPTS[:2])
            round_ = trainer._learn(answers, verdicts(flow.reward(answers), 2), 1)
            assert (round_.no_update, trainer.version) == ("", 1)
            weights.append((list_versions(tmp_path / name / "adapters")[0].path / WEIGHTS_FILE).read_bytes())
    assert weights[0] == weights[1]
