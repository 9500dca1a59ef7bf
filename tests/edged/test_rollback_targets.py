"""Which versions a rollback may go to: taken back step by step, whatever was promoted in between."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.control import STOPGAP, versions_before, wanted_versions
from edged.records import Live

# ------------------------------------------------------------------------------------------------- versions_before


def lived(*steps: tuple[int, str]) -> list[Live]:
    """A live history, newest first, from its steps in the order of time; "stopgap" is a rollback by the daemon."""
    history: list[Any] = [
        Live(
            version=version,
            since=float(at),
            why="rolled_back" if why == "stopgap" else why,  # type: ignore[arg-type]
            caller=STOPGAP if why == "stopgap" else "uid:0",
            pinned=False,
        )
        for at, (version, why) in enumerate(steps)
    ]
    return history[::-1]


@pytest.mark.parametrize(
    ("steps", "before"),
    [
        ([], []),
        ([(0, "base")], []),
        ([(0, "base"), (1, "published"), (2, "published")], [1, 0]),
        ([(0, "base"), (1, "published"), (2, "published"), (1, "rolled_back")], [0]),
        ([(0, "base"), (1, "published"), (2, "published"), (1, "rolled_back"), (3, "published")], [1, 0]),
        ([(0, "base"), (1, "published"), (0, "promoted")], [1]),
        ([(0, "base"), (1, "published"), (0, "promoted"), (1, "rolled_back")], [0]),
        ([(0, "base"), (1, "published"), (1, "promoted")], [0]),
        ([(0, "base"), (1, "published"), (2, "published"), (0, "rolled_back")], []),
        ([(5, "published"), (3, "rolled_back")], [5]),
        ([(0, "base"), (1, "published"), (2, "published"), (1, "stopgap")], [0]),
        ([(0, "base"), (1, "published"), (2, "published"), (0, "stopgap"), (3, "published")], [2, 1, 0]),
    ],
)
def test_a_rollback_takes_back_what_it_left(steps: list[tuple[int, str]], before: list[int]) -> None:
    assert versions_before(lived(*steps)) == before


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([(0, "base")], [0]),
        ([(0, "base"), (1, "published"), (2, "published"), (0, "stopgap")], [2, 1, 0]),
        ([(0, "base"), (1, "published"), (0, "stopgap"), (2, "published"), (1, "stopgap")], [2, 1, 0]),
        ([(0, "base"), (1, "published"), (0, "stopgap"), (0, "promoted")], [0, 1]),
    ],
)
def test_what_the_daemon_put_in_place_is_not_what_is_wanted(steps: list[tuple[int, str]], wanted: list[int]) -> None:
    assert wanted_versions(lived(*steps)) == wanted


@given(st.lists(st.tuples(st.sampled_from(["publish", "promote", "rollback"]), st.integers(0, 5)), max_size=40))
def test_rolling_back_again_and_again_ends_at_a_version_without_a_before(choices: list[tuple[str, int]]) -> None:
    steps, newest = [(0, "base")], 0
    for kind, number in choices:
        before = versions_before(lived(*steps))
        if kind == "publish":
            newest += 1
            steps.append((newest, "published"))
        elif kind == "promote":
            steps.append((min(number, newest), "promoted"))
        elif before:
            steps.append((before[0], "rolled_back"))
    n_rollbacks = 0
    while before := versions_before(lived(*steps)):
        assert before[0] != steps[-1][0]
        assert set(before) <= {version for version, _ in steps}
        steps.append((before[0], "rolled_back"))
        n_rollbacks += 1
        assert n_rollbacks <= len(choices)  # no two versions are swapped back and forth for ever


@given(st.integers(1, 20))
def test_after_publications_alone_a_rollback_walks_down_the_versions(n: int) -> None:
    steps = [(0, "base"), *[(version, "published") for version in range(1, n + 1)]]
    for expected in range(n - 1, -1, -1):
        before = versions_before(lived(*steps))
        assert before == list(range(expected, -1, -1))
        steps.append((before[0], "rolled_back"))
