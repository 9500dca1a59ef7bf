"""What the settings name and this machine does not have."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from edged import config
from edged.cli import usable


def settings(**changes: Any) -> config.Settings:
    return config.load(None, {key.replace("__", "."): value for key, value in changes.items()})


def judged_by(source: str, **changes: Any) -> config.Settings:
    return settings(reward__source=source, **changes)


def test_people_as_the_only_judges_need_nothing() -> None:
    assert usable.check_judge(settings(), connects=True) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_the_folder_of_a_judge_must_be_there(is_there: bool, tmp_path: Path) -> None:
    folder = str(tmp_path if is_there else tmp_path / "gone")
    by_function = judged_by("function", reward__function="m:f", reward__function_folder=folder)
    by_classifier = judged_by("classifier", reward__classifier=folder)
    for key, judged in (("function_folder", by_function), ("classifier", by_classifier)):
        (finding,) = usable.check_judge(judged, connects=False)
        assert finding.level == ("ok" if is_there else "fail")
        problems, _ = usable.check_settings(judged)
        assert [line.partition(":")[0] for line in problems] == ([] if is_there else [f"reward.{key}"])


def test_a_reward_service_that_nobody_runs_is_found_out_by_connecting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/judge"
        judged = judged_by("http", reward__url=url)
        assert [finding.level for finding in usable.check_judge(judged, connects=True)] == ["ok"]
    (finding,) = usable.check_judge(judged, connects=True)
    assert finding.level == "fail"
    assert finding.found.startswith(f"reward.url: nothing answers at {url}: ")
    assert [finding.level for finding in usable.check_judge(judged, connects=False)] == ["ok"]


def test_an_address_that_is_none_is_told_of_and_not_raised() -> None:
    assert usable.refusal_of_service("http://a:99999/")


@pytest.mark.parametrize(("layers", "noted"), [(99, True), (30, False), (1, False), ("all", False)])
def test_more_blocks_than_the_model_has_are_noted(layers: int | str, noted: bool) -> None:
    problems, notes = usable.check_settings(settings(lora__layers=layers))
    assert problems == []
    assert [note.startswith(f"lora.layers: got {layers}, the model has 30 blocks") for note in notes] == [True] * noted


def test_a_model_that_is_not_there_is_not_asked_for_its_blocks() -> None:
    assert usable.check_blocks(settings(lora__layers=99, model__path="/nowhere.gguf")) == []


def test_a_device_that_is_not_there_is_a_problem_of_the_settings() -> None:
    problems, _ = usable.check_settings(settings(placement__actor=[60, 61]))
    assert [line.startswith("placement.actor: there is no device 60") for line in problems] == [True]
