"""Every moment of a job in one stage."""

from __future__ import annotations

from engine.train.stopwatch import Stopwatch


def test_laps_of_one_stage_add_up_and_no_moment_is_lost() -> None:
    now = [10.0]
    clock = Stopwatch(lambda: now[0])
    for stage, took_s in (("load", 1.0), ("optimise", 4.0), ("export", 0.5), ("export", 0.25)):
        now[0] += took_s
        clock.lap(stage)
    assert clock.seconds == {"load": 1.0, "optimise": 4.0, "export": 0.75}


def test_what_came_to_nothing_is_told_as_one_stage() -> None:
    now = [0.0]
    clock = Stopwatch(lambda: now[0])
    now[0] = 3.0
    clock.lap("load")
    now[0] = 5.0
    clock.all_of_it_was("lost")
    now[0] = 6.0
    clock.lap("load")
    assert clock.seconds == {"lost": 5.0, "load": 1.0}
