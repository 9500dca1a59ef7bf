"""Every second of an update in one part, and every sum that of its parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.learn.laps import Laps, parts_of

STAGES = ["start", "wait", "gate", "publish", "swap", "lost"]


def ticking() -> tuple[Callable[[float], None], Callable[[], float]]:
    """How to let time pass, and the clock that shows it."""
    now = [100.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait, lambda: now[0]


@given(st.lists(st.tuples(st.sampled_from([*STAGES, "train"]), st.floats(0.0, 1000.0))), st.floats(0.0, 1000.0))
def test_whatever_happens_the_parts_add_up_to_the_time_from_rating_to_live(
    steps: list[tuple[str, float]], queue_s: float
) -> None:
    wait, clock = ticking()
    laps = Laps(queue_s, clock)
    for stage, took_s in steps:
        wait(took_s)
        if stage == "train":
            laps.trained({"optimise": took_s / 2, "export": took_s / 4})
        else:
            laps.lap(stage)
    laps.live()
    assert laps.seconds["total"] == pytest.approx(clock() - 100.0)
    assert laps.seconds["rating_to_live"] == pytest.approx(queue_s + clock() - 100.0)
    assert sum(parts_of(laps.seconds).values()) == pytest.approx(laps.seconds["rating_to_live"])


def test_what_the_trainer_does_not_tell_is_waiting() -> None:
    wait, clock = ticking()
    laps = Laps(None, clock)
    wait(10.0)
    laps.trained({"optimise": 6.0, "export": 1.0})
    assert parts_of(laps.seconds) == {"train/optimise": 6.0, "train/export": 1.0, "train/wait": 3.0}


def test_training_that_a_restart_found_done_counts_with_its_own_time() -> None:
    wait, clock = ticking()
    laps = Laps(None, clock)
    wait(0.5)
    laps.trained_before({"optimise": 6.0, "export": 1.0})
    laps.live()
    assert parts_of(laps.seconds) == {"wait": 0.5, "train/optimise": 6.0, "train/export": 1.0, "train/wait": 0.0}
    assert laps.seconds["total"] == 7.5
    assert "rating_to_live" not in laps.seconds, "nobody rated"
