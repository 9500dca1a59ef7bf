"""What the demo is doing, told while it goes on: one live line on a terminal, and a line now and then elsewhere.

`Lines` decides what is worth a line and has no clock; `told` prints. A log of the demo never stays silent for long,
even if nothing happens: the thread in `told` repeats where it stands.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

Show = Callable[[str], None]  # is told what goes on

QUIET_S = 15.0  # the longest time without a line
TICK_S = 1.0


class Lines:
    """Which of the texts become lines: the first of each phase, and the newest after `QUIET_S` without a line.

    The phase is what comes before the first colon, comma or bracket of a text. All times are on one clock, in seconds.
    """

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._printed_at_s = started_s
        self._phase = ""
        self._text = ""

    def take(self, text: str, now_s: float) -> str | None:
        """A text that was shown at `now_s`: its line, or None if it needs none."""
        phase = re.split(r"[:,(]", text, maxsplit=1)[0].strip()
        is_new, self._phase, self._text = phase != self._phase, phase, text
        return self._line(now_s) if is_new else self.tick(now_s)

    def tick(self, now_s: float) -> str | None:
        """The newest text once more, if there has been no line for too long."""
        return self._line(now_s) if self._text and now_s - self._printed_at_s >= QUIET_S else None

    def _line(self, now_s: float) -> str:
        self._printed_at_s = now_s
        return f"{now_s - self._started_s:5.0f} s  {self._text}"


@contextmanager
def told(console: Console, *, tick_s: float = TICK_S, clock: Callable[[], float] = time.monotonic) -> Iterator[Show]:
    """Gives the `Show` to call with what goes on, from any thread, until the block ends."""
    if console.is_terminal:
        with console.status("") as shown:
            yield shown.update
        return
    lines = Lines(clock())
    turn = threading.Lock()
    ended = threading.Event()

    def show(text: str) -> None:
        with turn:
            _print(console, lines.take(text, clock()))

    def repeat() -> None:
        while not ended.wait(tick_s):
            with turn:
                _print(console, lines.tick(clock()))

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()


def _print(console: Console, line: str | None) -> None:
    if line is not None:
        console.print(line, markup=False, soft_wrap=True)
