"""What a log of the demo shows while it goes on."""

from __future__ import annotations

import io
import threading

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from edged.demo.progress import QUIET_S, Lines, told

GUARD_S = 30.0


def test_the_first_text_of_each_phase_becomes_a_line_and_the_others_do_not() -> None:
    lines = Lines(100.0)
    assert lines.take("round 1: asking 16 questions", 101.0) == "    1 s  round 1: asking 16 questions"
    assert lines.take("round 1: 3 of 16 questions answered", 102.0) is None
    assert lines.take("training (epochs 1/4), 0 updates", 103.0) == "    3 s  training (epochs 1/4), 0 updates"
    assert lines.take("training (epochs 2/4), 0 updates", 104.0) is None
    assert lines.take("round 1: 4 of 16 questions answered", 105.0) is not None


def test_a_long_phase_is_told_again_with_its_newest_text() -> None:
    lines = Lines(0.0)
    lines.take("training (epochs 1/4)", 0.0)
    assert lines.take("training (epochs 2/4)", QUIET_S - 1) is None
    assert lines.tick(QUIET_S - 0.5) is None
    assert lines.tick(QUIET_S) == "   15 s  training (epochs 2/4)"
    assert lines.tick(QUIET_S + 1) is None


def test_before_anything_was_told_there_is_nothing_to_repeat() -> None:
    assert Lines(0.0).tick(10 * QUIET_S) is None


@given(st.lists(st.one_of(st.none(), st.sampled_from(["a: 1", "a: 2", "b"])), max_size=100))
def test_with_a_tick_every_second_it_is_never_silent_for_longer(texts: list[str | None]) -> None:
    lines = Lines(0.0)
    lines.take("start", 0.0)
    printed_at_s = [0.0]
    for now_s, text in enumerate(texts, start=1):
        line = lines.tick(now_s) if text is None else lines.take(text, now_s)
        if line is not None:
            printed_at_s.append(now_s)
    gaps_s = [b - a for a, b in zip(printed_at_s, [*printed_at_s[1:], len(texts)], strict=True)]
    assert max(gaps_s) <= QUIET_S


def test_without_a_terminal_whole_lines_are_printed_even_if_nothing_happens() -> None:
    class Out(io.StringIO):
        def write(self, text: str) -> int:
            count = super().write(text)
            if self.getvalue().count("training") == 3:
                enough.set()
            return count

    enough = threading.Event()
    out = Out()
    seconds = iter(range(0, 10**9, 20))  # each look at the clock is 20 s after the one before
    with told(Console(file=out, width=20), tick_s=0.001, clock=lambda: float(next(seconds))) as show:
        show("training [epochs] " + "1/4 " * 20)
        assert enough.wait(GUARD_S)
    lines = out.getvalue().splitlines()
    assert len(lines) >= 3
    assert {line.split(" s  ")[1] for line in lines} == {"training [epochs] " + "1/4 " * 20}


def test_on_a_terminal_there_is_one_live_line() -> None:
    out = io.StringIO()
    with told(Console(file=out, force_terminal=True)) as show:
        show("round 1: asking")
    assert " s  round 1" not in out.getvalue()
