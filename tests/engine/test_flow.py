"""The engine from a script, on the real model: the page's code, groups of answers, going on, and what is refused."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from adapters.folder import load_adapter_folder
from adapters.llamacpp_format import read_base_shape
from adapters.store import list_versions
from engine.children import ChildLost
from engine.flow import Answer, Flow, FlowError, Trainer
from engine.protocol import LoraSettings, PpoSettings, Sampling

PAGE = Path(__file__).parents[2] / "docs" / "flow.md"
PROMPTS = ["What is a cat?", "Name a color.", "Where is Rome?", "Why do birds sing?"]
BRIEF = Sampling(temperature=0.7, max_tokens=12, seed=3)
QUICK = PpoSettings(epochs=1, critic_warmup_steps=3)
SMALL = LoraSettings(rank=4, alpha=8.0, layers=2)


def by_length(answers: Sequence[Answer]) -> list[float | None]:
    return [1.0 - len(answer.text) / 60 for answer in answers]


@pytest.mark.real_model
def test_the_pages_code_runs_as_it_stands(
    packaged_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(code, {"model": packaged_model, "folder": tmp_path, "prompts": PROMPTS})
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told[:2]] == ["1", "2"]
    assert all(math.isfinite(float(line.split()[1])) for line in told[:2])
    assert len(told) >= 3
    versions = list_versions(tmp_path / "adapters")
    assert [found.version for found in versions] == [1, 2]
    weights, manifest = load_adapter_folder(versions[-1].path, read_base_shape(packaged_model))
    assert (manifest.parent, manifest.origin) == (1, "trained")
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
def test_a_round_that_cannot_be_learned_from_says_so_and_the_version_before_stays(
    packaged_model: Path, tmp_path: Path
) -> None:
    flow = Flow(
        model=packaged_model,
        folder=tmp_path,
        reward=lambda answers: [None] * len(answers),
        actor=SMALL,
        ppo=QUICK,
        sampling=BRIEF,
    )
    with Trainer(flow) as trainer:
        with pytest.raises(FlowError, match="batch_empty"):
            list(trainer.run(PROMPTS[:1], rounds=1))
        assert trainer.version == 0
        assert trainer.ask("Hi").version == 0
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


def test_what_a_flow_cannot_do_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'dpo': a flow has rated answers only; use one of ppo"):
        Flow(model="m.gguf", folder=tmp_path, reward=by_length, objectives={"dpo": 1.0})
    with pytest.raises(ValueError, match="give critic the same"):
        Flow(
            model="m.gguf",
            folder=tmp_path,
            reward=by_length,
            devices={"serve": "cpu", "actor": "cpu", "critic": "cuda:1", "reference": "cpu"},
        )
