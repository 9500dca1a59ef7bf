"""The parts of the demo's course that need no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from edged.cli.exits import CommandError
from edged.demo.prompts import TRAINING
from edged.demo.run import RATINGS_PER_ROUND, Plan, fresh_state_folder, rounds_of_prompts, run


def test_an_empty_state_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert fresh_state_folder(tmp_path) == tmp_path


def test_a_folder_that_holds_learning_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "edged.db").touch()
    assert fresh_state_folder(tmp_path) == tmp_path / "demo-2"
    (tmp_path / "demo-2").mkdir()
    assert fresh_state_folder(tmp_path) == tmp_path / "demo-3"


def test_every_question_is_asked_equally_often_and_always_in_the_same_order() -> None:
    rounds = rounds_of_prompts(10)
    assert [len(prompts) for prompts in rounds] == [RATINGS_PER_ROUND] * 10
    asked = [prompt for prompts in rounds for prompt in prompts]
    assert {asked.count(prompt) for prompt in TRAINING} == {4}
    assert rounds == rounds_of_prompts(10)


def test_the_demo_does_not_disturb_a_daemon_that_runs(light_daemon) -> None:
    plan = Plan(preference="short", state_folder=light_daemon.socket.parent, rounds=1, port=0, model="smollm2-135m")
    with pytest.raises(CommandError, match="a daemon already runs"):
        run(plan, stay=False)


def test_a_daemon_that_cannot_start_ends_the_demo_with_its_log(tmp_path: Path) -> None:
    plan = Plan(preference="short", state_folder=tmp_path, rounds=1, port=0, model="nowhere.gguf")
    with pytest.raises(CommandError, match=r"nowhere\.gguf: no such file") as raised:
        run(plan, stay=False)
    assert "exit code 78" in raised.value.message
