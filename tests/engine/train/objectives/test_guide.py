"""The guide's example, taken from its page: it runs as written, gives the paper's loss, and trains."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from engine.protocol import OBJECTIVES, PreferredPair
from engine.train.job import run_job
from engine.train.objectives.objective import Batch, Objective
from engine.train.scorer import Scorer
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.objectives.answers import answer, losses, settings_job
from tests.engine.train.tiny import BASE, BASE_SHA256, PPO, make_job, silent, write_job
from tests.test_structure import undocumented

GUIDE = Path(__file__).parents[4] / "docs" / "objectives.md"


@pytest.fixture
def ipo(monkeypatch: pytest.MonkeyPatch) -> Objective:
    """The objective of the page, added the way the page says."""
    module_text, line = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    module = types.ModuleType("engine.train.objectives.ipo")
    exec(compile(module_text, str(GUIDE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, feed in eval("{" + line + "}").items():
        monkeypatch.setitem(OBJECTIVES, name, feed)
    return module.OBJECTIVE


def test_the_example_is_about_thirty_lines() -> None:
    module_text = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    assert len([line for line in module_text.splitlines() if line.strip()]) <= 30


def test_the_example_is_documented_as_every_module_must_be() -> None:
    tree = ast.parse(re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0])
    assert ast.get_docstring(tree)
    assert undocumented(tree) == []


def test_every_objective_has_its_row_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", GUIDE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(OBJECTIVES)


def test_its_loss_is_that_of_the_paper(ipo: Objective) -> None:
    job = settings_job(preference={"dpo_beta": 0.25})
    pair = (answer([-1.0, -1.0], reference=[-1.5, -1.0]), answer([-2.0], reference=[-1.0]))
    (item,) = ipo.prepare(Batch(pairs=(pair,)), job).items
    (found,), ((chosen, rejected),) = losses(ipo, [item], None, job)
    assert float(found.loss) == pytest.approx((1.5 - 2.0) ** 2)
    assert chosen.tolist() == pytest.approx([-1.0, -1.0])  # 2 (h - 2) dh: too small a margin, so up
    assert rejected.tolist() == pytest.approx([1.0])


def test_it_trains(ipo: Objective, scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path) -> None:
    episodes = [one.episode for one in sample_episodes(8)]
    pairs = tuple(PreferredPair(chosen=a, rejected=b) for a, b in zip(episodes[::2], episodes[1::2], strict=True))
    strong = dataclasses.replace(PPO, learning_rate=5e-3, epochs=4)
    folder = write_job(tmp_path / "job", make_job([], objectives={"ipo": 1.0}, pairs=pairs, ppo=strong))
    metrics = run_job(folder, scorer, BASE_SHA256, silent).metrics
    assert metrics["ipo/loss"] < 25.0  # of a margin of 0 with beta 0.1
    new = dataclasses.replace(BASE, version=1, folder=str(folder / "out" / "adapter"))
    before, after = (scorer.measure(episodes, [adapter] * len(episodes), silent) for adapter in (BASE, new))
    rises = torch.stack([(b.scaled - a.scaled).sum() for a, b in zip(before, after, strict=True)])
    assert bool((rises[::2] > rises[1::2]).all())
