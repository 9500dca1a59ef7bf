"""The learning campaign goes on where it was cut off, and counts only what was measured with the same sources."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from edged import config


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with the folder that scripts beside it are found in."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("learning")


@pytest.fixture
def seeds_run(learning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that were run; each leaves the same good outcome."""
    run: list[int] = []
    outcome = learning.Outcome(
        before=0.1, after=0.5, errors=4.0, fluency=0.0, variety=1.0, repeats=0.0, published=4, refused=0, practised=0
    )
    monkeypatch.setattr(learning, "run_seed", lambda liked, seed, settings: run.append(seed) or outcome)
    return run


def test_a_campaign_goes_on_after_the_last_whole_line(learning, seeds_run, tmp_path, capsys):
    lines = tmp_path / "learning.jsonl"
    learning.campaign("brief", 2, None, lines, only_report=False)
    whole = lines.read_text()
    lines.write_text(whole + whole.splitlines()[0][:40])  # cut off while a third was written
    assert learning.campaign("brief", 4, None, lines, only_report=False)
    assert seeds_run == [0, 1, 2, 3]
    assert learning.campaign("brief", 4, None, lines, only_report=True)
    assert "median of 4 seeds after 64 ratings: share 0.10 -> 0.50" in capsys.readouterr().out
    assert seeds_run == [0, 1, 2, 3]


def test_a_report_of_too_few_seeds_is_not_met(learning, seeds_run, tmp_path, capsys):
    learning.campaign("personal", 1, None, tmp_path / "lines", only_report=False)
    assert not learning.campaign("personal", 5, None, tmp_path / "lines", only_report=True)
    assert "1 of 5 seeds are there" in capsys.readouterr().out
    assert seeds_run == [0]


def test_other_sources_or_settings_are_another_campaign(learning, seeds_run, tmp_path, monkeypatch):
    lines = tmp_path / "lines"
    learning.campaign("brief", 1, None, lines, only_report=False)
    learning.campaign("brief", 1, "[learn]\nepochs = 1\n", lines, only_report=False)
    now = learning.course_of
    monkeypatch.setattr(learning, "course_of", lambda *given: dataclasses.replace(now(*given), code="other"))
    learning.campaign("brief", 1, None, lines, only_report=False)
    assert seeds_run == [0, 0, 0]


def test_the_rare_property_is_helped_by_settings_that_the_daemon_takes(learning, tmp_path):
    file = tmp_path / "edged.toml"
    file.write_text(learning.PROPERTIES["terse"].settings)
    assert config.load(file).reward.source == "fitted"
