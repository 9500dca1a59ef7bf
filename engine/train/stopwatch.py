"""Where the time of a job goes: seconds by stage, each moment in one of them, so that they add up."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Runs from the moment that it is made. seconds: by stage, so far."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._last = clock()

    def lap(self, stage: str) -> None:
        """What has passed since the last lap belongs to `stage`."""
        now = self._clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def all_of_it_was(self, stage: str) -> None:
        """What has passed since the beginning came to nothing, and belongs to `stage`."""
        self.lap(stage)
        self.seconds = {stage: sum(self.seconds.values())}
