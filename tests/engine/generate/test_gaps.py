"""What a serve worker tells of the gaps between its decode steps."""

from __future__ import annotations

import pytest

from engine.generate.gaps import REPORT_S, Gaps
from engine.protocol import FirstToken, Gap


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def test_gaps_are_summed_by_how_many_answers_got_a_token() -> None:
    clock = Clock()
    gaps = Gaps(clock)
    for n_answers, seconds in ((2, 0.1), (2, 0.2), (3, 0.4), (3, 0.5)):
        clock.now_s += seconds
        gaps.step(n_answers)
    assert gaps.report() is not None
    assert gaps.report() is None, "nothing came together since"


def test_a_report_comes_once_a_second_and_holds_what_came_since_the_last_one() -> None:
    clock = Clock()
    gaps = Gaps(clock)
    gaps.step(1)
    clock.now_s += 0.25
    gaps.step(1)
    assert gaps.report() is None
    clock.now_s += REPORT_S
    gaps.step(4)
    report = gaps.report()
    assert report is not None
    assert report.gaps == (
        Gap(answers=1, steps=1, seconds=0.25),
        Gap(answers=4, steps=1, seconds=pytest.approx(REPORT_S)),
    )


def test_the_time_in_which_nobody_asked_and_steps_that_only_read_prompts_are_no_gaps() -> None:
    clock = Clock()
    gaps = Gaps(clock)
    gaps.step(1)
    gaps.idle()
    clock.now_s += 100.0
    gaps.step(1)
    clock.now_s += 1.0
    gaps.step(0)
    clock.now_s += 2.0
    assert gaps.report() is None


def test_first_tokens_are_told_once_also_where_no_gap_was_measured() -> None:
    clock = Clock()
    gaps = Gaps(clock)
    first = FirstToken(queue_s=0.1, prefill_s=0.2, beside=3, evaluated_tokens=40)
    gaps.first(first)
    clock.now_s += REPORT_S
    report = gaps.report()
    assert report is not None
    assert (report.gaps, report.firsts) == ((), (first,))
    clock.now_s += REPORT_S
    assert gaps.report() is None
