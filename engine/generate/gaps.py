"""How long running answers wait from one decode step to the next, and new ones for their first token, summed up for the
daemon. Pure but for its clock.

Gaps are kept apart by how many answers got a token in the step, because a step of many takes longer than a step of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.protocol import Decoding, FirstToken, Gap

REPORT_S = 1.0


class Gaps:
    """One for a serve worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_step_at: float | None = None
        self._reported_at = clock()
        self._sums: dict[int, tuple[int, float]] = {}  # answers -> steps, seconds
        self._firsts: list[FirstToken] = []

    def step(self, n_answers: int) -> None:
        """A step is over in which this many answers got a token."""
        now = self._clock()
        if self._last_step_at is not None and n_answers:
            steps, seconds = self._sums.get(n_answers, (0, 0.0))
            self._sums[n_answers] = (steps + 1, seconds + now - self._last_step_at)
        self._last_step_at = now

    def first(self, token: FirstToken) -> None:
        """A request has got its first token."""
        self._firsts.append(token)

    def idle(self) -> None:
        """No answer runs: the next step waits for nobody."""
        self._last_step_at = None

    def report(self) -> Decoding | None:
        """What came together since the last report, once it is time for one."""
        now = self._clock()
        if not (self._sums or self._firsts) or now - self._reported_at < REPORT_S:
            return None
        gaps = tuple(Gap(answers=n, steps=steps, seconds=s) for n, (steps, s) in sorted(self._sums.items()))
        report = Decoding(gaps=gaps, firsts=tuple(self._firsts))
        self._sums, self._firsts, self._reported_at = {}, [], now
        return report
