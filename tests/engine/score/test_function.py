"""Importing the operator's function, and calling it with plain data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.fault import EngineFault
from engine.protocol import FunctionSource
from engine.score.function import open_function
from tests.engine.score.answers import make_item, soon

MODULE = """
seen = []

def by_length(batch):
    seen.extend(batch)
    return [len(item["answer"]) / 100 for item in batch]

class Judges:
    @staticmethod
    def nothing(batch):
        return [None for item in batch]

number = 7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my_judges.py").write_text(MODULE)
    (tmp_path / "my_broken_judge.py").write_text("import sys\nsys.exit('not today')\n")
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("my_judges", "my_broken_judge"):
        sys.modules.pop(name, None)


def test_the_function_gets_plain_data_and_its_numbers_are_the_rewards(folder: Path) -> None:
    judge = open_function(FunctionSource(entry_point="my_judges:by_length", folder=str(folder)))
    found = judge.judge([make_item("x" * 50, metadata={"app": "shop"}), make_item("x")], 1.0, soon())
    assert found.rewards == (0.5, 0.01)
    assert sys.modules["my_judges"].seen[0] == {
        "episode_id": 1,
        "messages": [{"role": "user", "content": "Why?"}],
        "prompt": None,
        "answer": "x" * 50,
        "finish_reason": "stop",
        "metadata": {"app": "shop"},
    }


def test_a_function_may_lie_in_a_class(folder: Path) -> None:
    judge = open_function(FunctionSource(entry_point="my_judges:Judges.nothing", folder=str(folder)))
    assert judge.judge([make_item()], 1.0, soon()).reasons == ("judge_abstained",)


@pytest.mark.parametrize(
    ("entry_point", "what"),
    [
        ("my_missing_judges:judge", "ModuleNotFoundError: No module named 'my_missing_judges'"),
        ("my_judges:judge", "AttributeError: module 'my_judges' has no attribute 'judge'"),
        ("my_judges:number", "it is a int and cannot be called"),
        ("my_broken_judge:judge", "SystemExit: not today"),
    ],
)
def test_a_function_that_cannot_be_had_is_a_fault_that_says_what_to_do(
    folder: Path, entry_point: str, what: str
) -> None:
    with pytest.raises(EngineFault) as caught:
        open_function(FunctionSource(entry_point=entry_point, folder=str(folder)))
    assert caught.value.code == "function_unusable"
    assert what in caught.value.message
    assert "reward.function_folder" in caught.value.message
