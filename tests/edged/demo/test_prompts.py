"""The questions of the demo."""

from __future__ import annotations

from edged.demo.prompts import HELD_OUT, TRAINING


def test_forty_questions_are_rated_and_twenty_four_others_held_out() -> None:
    assert (len(TRAINING), len(HELD_OUT)) == (40, 24)
    assert len({prompt.lower() for prompt in TRAINING + HELD_OUT}) == 64
