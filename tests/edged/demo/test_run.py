"""The parts of the demo's course that need no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from edged.cli.exits import CommandError
from edged.demo.prompts import TRAINING
from edged.demo.run import RATINGS_PER_ROUND, Plan, closing_text, fresh_state_folder, rounds_of_prompts, run


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


def test_at_the_end_it_says_where_the_daemon_is_only_if_the_daemon_stays(tmp_path: Path) -> None:
    plan = Plan(preference="short", state_folder=tmp_path, rounds=1, port=0, model="smollm2-135m")
    folder, address = tmp_path / "demo 2", "http://127.0.0.1:8437/"
    stays = closing_text(plan, folder, address, stay=True)
    assert address in stays
    assert f"edged chat --connect unix:{tmp_path}/edged.sock" in stays
    stops = closing_text(plan, folder, address, stay=False)
    assert address not in stops
    assert "edged chat" not in stops
    assert f"edged run --model smollm2-135m --state-dir '{folder}'" in stops
