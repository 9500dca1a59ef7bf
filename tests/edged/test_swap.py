"""The stages of a version, and which versions a rollback may go to, whatever was promoted in between."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.records import Live
from edged.swap import (
    DEEP_GATE,
    STOPGAP,
    WATCH,
    SwapError,
    after,
    rolled_back_by_itself,
    stage_of,
    versions_before,
    wanted_versions,
)

# ------------------------------------------------------------------------------------------------- versions_before


def lived(*steps: tuple[int, str]) -> list[Live]:
    """A live history, newest first, from its steps in the order of time; "daemon" is a rollback by the daemon, "watch"
    and "deep gate" are those by judges."""
    rollbacks = (STOPGAP, WATCH.name, DEEP_GATE.name)
    history: list[Any] = [
        Live(
            version=version,
            since=float(at),
            why="rolled_back" if why in rollbacks else why,  # type: ignore[arg-type]
            caller=why if why in rollbacks else "uid:0",
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
        ([(0, "base"), (1, "published"), (2, "published"), (1, "daemon")], [0]),
        ([(0, "base"), (1, "published"), (2, "published"), (0, "daemon"), (3, "published")], [2, 1, 0]),
        ([(0, "base"), (1, "published"), (2, "published"), (1, "watch"), (3, "published")], [1, 0]),
        ([(0, "base"), (1, "published"), (0, "promoted"), (1, "promoted"), (0, "watch"), (2, "published")], [0]),
        ([(0, "base"), (1, "published"), (0, "deep gate"), (1, "promoted"), (2, "published")], [1, 0]),
        ([(0, "base"), (1, "published"), (2, "published"), (1, "watch"), (0, "deep gate")], []),
    ],
)
def test_a_rollback_takes_back_what_it_left(steps: list[tuple[int, str]], before: list[int]) -> None:
    assert versions_before(lived(*steps)) == before


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([(0, "base")], [0]),
        ([(0, "base"), (1, "published"), (2, "published"), (0, "daemon")], [2, 1, 0]),
        ([(0, "base"), (1, "published"), (0, "daemon"), (2, "published"), (1, "daemon")], [2, 1, 0]),
        ([(0, "base"), (1, "published"), (0, "daemon"), (0, "promoted")], [0, 1]),
        ([(0, "base"), (1, "published"), (0, "promoted"), (1, "promoted"), (0, "watch")], [0]),
        ([(0, "base"), (1, "published"), (0, "watch"), (1, "promoted")], [1, 0]),
        ([(0, "base"), (1, "published"), (2, "published"), (1, "watch"), (0, "daemon")], [1, 0]),
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


@given(
    st.lists(
        st.tuples(st.sampled_from(["publish", "promote", "rollback", "watch", "deep gate"]), st.integers(0, 5)),
        max_size=40,
    )
)
def test_what_a_judge_rolled_back_is_not_wanted_until_somebody_makes_it_live(choices: list[tuple[str, int]]) -> None:
    steps, newest = [(0, "base")], 0
    condemned: set[int] = set()
    for kind, number in choices:
        before, live = versions_before(lived(*steps)), steps[-1][0]
        if kind == "publish":
            newest += 1
            steps.append((newest, "published"))
        elif kind == "promote":
            steps.append((min(number, newest), "promoted"))
            condemned.discard(steps[-1][0])
        elif before:
            steps.append((before[0], "rolled_back" if kind == "rollback" else kind))
            condemned |= {live} if kind != "rollback" else set()
        history = lived(*steps)
        assert rolled_back_by_itself(history) == condemned
        assert wanted_versions(history)[0] == history[0].version
        assert not condemned & set(wanted_versions(history))


# -------------------------------------------------------------------------------------------------------- stages


@pytest.mark.parametrize(
    ("events", "stage"),
    [
        (["proved", "published", "routed", "held"], "kept"),
        (["proved", "published", "routed", "rolled_back"], "rolled_back"),
        (["proved", "published", "rolled_back", "made_live", "routed"], "watched"),
        (["proved", "published", "held", "made_live"], "live"),
        (["proved", "published", "routed", "held", "rolled_back"], "rolled_back"),
    ],
)
def test_a_version_goes_from_stage_to_stage(events: list[Any], stage: str) -> None:
    now: Any = "staged"
    for event in events:
        now = after(now, event)
    assert now == stage


@pytest.mark.parametrize(
    ("stage", "event"),
    [
        ("staged", "published"),
        ("probed", "routed"),
        ("rolled_back", "rolled_back"),
        ("kept", "held"),
        ("live", "proved"),
    ],
)
def test_an_event_that_does_not_fit_names_both(stage: Any, event: Any) -> None:
    with pytest.raises(SwapError, match=f"{stage} cannot be {event}"):
        after(stage, event)


@pytest.mark.parametrize(("verdict", "serving", "stage"), [
    (None, False, "live"), (None, True, "watched"), ("kept", True, "kept"), ("kept", False, "kept"),
])  # fmt: skip
def test_the_live_version_is_watched_from_its_first_request_to_its_verdict(
    verdict: Any, serving: bool, stage: str
) -> None:
    assert stage_of(verdict, serving=serving) == stage
